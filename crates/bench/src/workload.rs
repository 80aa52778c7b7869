//! A VM of `testvm` that runs a workload without end, measured slice by slice.
//!
//! Before: the bench stops (`SIGSTOP`) and continues this process, so that VMs take turns. After: operations per slice.
//! Threads: the VM's, and this one, which sleeps during a slice. Units: operations. Promise: the same seed and size on
//! every side; all words are checked as they are read, and a wrong one makes the slice an error.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use ballast_base::Bytes;
use ballast_testvm::{GuestKind, Moment, Spec, Vm, Workload};

use crate::cpu;
use crate::guest::Pager;
use crate::order::{Answer, Backing, WorkloadConfig};

pub(crate) struct Runner {
    config: WorkloadConfig,
    running: Option<Running>,
}

struct Running {
    vm: Arc<Vm>,
    pager: Option<Pager>,
    ended: Receiver<String>,
}

impl Runner {
    pub(crate) fn new(config: WorkloadConfig) -> Self {
        Self { config, running: None }
    }

    /// Fill the VM's memory and let it run.
    pub(crate) fn fill(&mut self) -> Result<Answer> {
        let workload = if self.config.zipf { Workload::Zipf } else { Workload::Hotset };
        let mut spec = Spec::new(workload, Bytes(self.config.ram_bytes));
        (spec.ops, spec.report_every) = (u64::MAX, u64::MAX);
        let vm = Arc::new(Vm::new(&spec, if self.config.kvm { GuestKind::Kvm } else { GuestKind::Native })?);
        let ((filled, is_filled), (end, ended)) = (channel(), channel());
        let runner = vm.clone();
        std::thread::Builder::new().name("vm".into()).spawn(move || {
            let outcome = runner.run(&|moment, _| {
                if moment == Moment::Run {
                    let _ = filled.send(());
                }
            });
            let _ = end.send(outcome.map_or_else(|error| error.to_string(), |_| "it ended".into()));
        })?;
        let running = Running { vm, pager: None, ended };
        if is_filled.recv().is_err() {
            bail!("the workload VM ended: {}", running.ended.recv().unwrap_or_default());
        }
        self.running = Some(running);
        Ok(Answer::Filled { ram: None, vmm: None })
    }

    /// From now on the daemon could take its memory.
    pub(crate) fn attach(&mut self) -> Result<Answer> {
        let running = self.running.as_mut().context("the VM has not started")?;
        ensure!(running.pager.is_none(), "the VM is attached already");
        let (socket, name) = self.config.attach.clone();
        running.pager = Some(Pager::attach(&Backing::Ballast { socket, name }, running.vm.ram())?);
        Ok(Answer::Done)
    }

    pub(crate) fn slice(&mut self, ms: u64) -> Result<Answer> {
        let running = self.running.as_ref().context("the VM has not started")?;
        let (start, before, cpu_us) = (Instant::now(), running.vm.progress(), cpu::of_process()?);
        if let Ok(why) = running.ended.recv_timeout(Duration::from_millis(ms)) {
            bail!("the workload VM ended: {why}");
        }
        let (after, wall_us) = (running.vm.progress(), start.elapsed().as_secs_f64() * 1e6);
        ensure!(after.wrong_bytes == 0, "WRONG DATA: {} bytes in a workload VM", after.wrong_bytes);
        Ok(Answer::Sliced { ops: after.ops - before.ops, wall_us, cpu_us: cpu::of_process()? - cpu_us })
    }
}
