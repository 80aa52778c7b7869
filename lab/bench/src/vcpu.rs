//! A guest whose memory a KVM virtual CPU touches: one fill and one round of touches, by the guest program of `testvm`.
//!
//! Before: `guest` was asked for a KVM guest. After: the bench has times that the guest's own clock measured.
//! Threads: the vCPU's; it waits between its phases until it gets the order to continue.
//! Units: an operation is the touch of one page: it checks eight words and, half of the time, writes them.
//! Promise: pages are touched once each, scattered by a stride; a wrong word makes the round an error.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Instant;

use anyhow::{Context, Result, anyhow, ensure};
use ballast_base::PageCount;
use ballast_testvm::{GuestKind, GuestRam, Moment, Outcome, Spec, Vm, Workload};

use crate::cpu;
use crate::order::{Data, GuestConfig, Out, Touched};
use crate::pager::{Pager, holes};
use crate::stats::Summary;
use crate::zram;

pub(crate) struct Vcpu {
    vm: Arc<Vm>,
    pager: Pager,
    go: Sender<()>,
    thread: Option<JoinHandle<Result<Outcome>>>,
}

impl Vcpu {
    pub(crate) fn start(config: &GuestConfig) -> Result<Self> {
        let mut spec = Spec::new(Workload::Sequential, PageCount(config.pages).bytes());
        spec.ops = config.pages;
        spec.half_compressible = config.data == Data::HalfCompressible;
        spec.latency = true;
        let vm = Arc::new(Vm::new(&spec, GuestKind::Kvm)?);
        let pager = Pager::attach(&config.backing, vm.ram())?;
        let ((go, wait), (filled, is_filled)) = (channel(), channel());
        let thread = std::thread::Builder::new().name("vcpu".into()).spawn({
            let vm = vm.clone();
            let gate: Mutex<(Receiver<()>, Sender<()>)> = Mutex::new((wait, filled));
            move || {
                vm.run(&|moment, _| {
                    if moment == Moment::Run
                        && let Ok(gate) = gate.lock()
                    {
                        // The other ends close only when this process ends.
                        let _ = gate.1.send(());
                        let _ = gate.0.recv();
                    }
                })
            }
        })?;
        let vcpu = Self { vm, pager, go, thread: Some(thread) };
        match is_filled.recv() {
            Ok(()) => Ok(vcpu),
            Err(_) => vcpu.end().and_then(|_| Err(anyhow!("the KVM guest ended before its touches"))),
        }
    }

    pub(crate) fn ram(&self) -> &GuestRam {
        self.vm.ram()
    }

    pub(crate) fn page_out(&mut self, pages: u64) -> Result<Out> {
        let (start, cpu) = (Instant::now(), cpu::of_thread()?);
        let elsewhere_us = self.pager.page_out(self.vm.ram(), pages)?;
        let wall_us = start.elapsed().as_secs_f64() * 1e6;
        let cpu_us = cpu::of_thread()? - cpu + elsewhere_us;
        let pages = match self.pager {
            Pager::Floor => pages,
            // The kernel does not show swapped pages of a memory file as holes, so the use of the swap, ours alone,
            // counts.
            Pager::Kernel => zram::used_pages()?.min(pages),
            _ => holes(self.vm.ram().memfd(), pages)?.len() as u64,
        };
        Ok(Out { pages, wall_us, cpu_us, ..Out::default() })
    }

    pub(crate) fn touch(&mut self) -> Result<Touched> {
        let _ = self.go.send(());
        let thread = self.thread.take().context("this KVM guest has done its touches")?;
        let outcome = thread.join().map_err(|_| anyhow!("the vCPU thread panicked"))??;
        touched(&outcome)
    }

    fn end(mut self) -> Result<Outcome> {
        let thread = self.thread.take().context("the vCPU has ended")?;
        thread.join().map_err(|_| anyhow!("the vCPU thread panicked"))?
    }
}

fn touched(outcome: &Outcome) -> Result<Touched> {
    ensure!(outcome.is_right(), "WRONG DATA in a KVM guest: {:?}", outcome.wrong.first());
    let latency = outcome.latency.as_ref().context("the KVM guest did not measure")?;
    let us = |ns: u64| ns as f64 / 1e3;
    let summary = Summary {
        count: latency.count,
        p50_us: us(latency.p50_ns),
        p90_us: us(latency.p90_ns),
        p99_us: us(latency.p99_ns),
        max_us: us(latency.max_ns),
    };
    Ok(Touched { summary, faults: summary, wall_us: outcome.run_ms * 1e3, wrong: outcome.wrong_words })
}
