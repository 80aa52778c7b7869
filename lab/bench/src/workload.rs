//! A VM of `testvm` that runs a workload without end, measured slice by slice.
//!
//! Before: the bench gives the workload and the side that may take its memory. After: it has operations per slice, and
//! knows whether every word is right. A bench may stop (`SIGSTOP`) and continue this process between orders, so that
//! VMs take turns.
//! Threads: the VM's, and this one, which sleeps during a slice. Units: operations.
//! Promise: every side runs the same spec. All words are checked as they are read, and a wrong one makes the slice an
//! error. A workload of the kernel's side is in its memory cgroup before it has any memory.
//!
//! ```text
//! Ballast:  [Attach] Fill [Attach] Slice Slice ... [Verify]      attached from the start, or later, or never
//! kernel:            Fill          Slice Slice ... [Verify]
//! ```

use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use ballast_testvm::{Moment, Vm};

use crate::cpu;
use crate::order::{Answer, Backing, WorkloadConfig};
use crate::pager::{Pager, enter, own_file};

pub(crate) struct Runner {
    config: WorkloadConfig,
    vm: Option<Arc<Vm>>,
    pager: Option<Pager>,
    running: Option<Running>,
}

struct Running {
    /// Gets a message after the final comparison of every word.
    verified: Receiver<()>,
    /// Gets the reason for the end.
    ended: Receiver<String>,
}

impl Runner {
    pub(crate) fn new(config: WorkloadConfig) -> Result<Self> {
        enter(&config.backing)?;
        Ok(Self { config, vm: None, pager: None, running: None })
    }

    fn vm(&mut self) -> Result<Arc<Vm>> {
        if let Some(vm) = &self.vm {
            return Ok(vm.clone());
        }
        let mut spec = self.config.spec.clone();
        spec.ops = u64::MAX;
        Ok(self.vm.insert(Arc::new(Vm::new(&spec, self.config.kind)?)).clone())
    }

    pub(crate) fn fill(&mut self) -> Result<Answer> {
        ensure!(self.running.is_none(), "the VM has started already");
        let vm = self.vm()?;
        let ram = own_file(vm.ram());
        let ((filled, is_filled), (verify, verified), (end, ended)) = (channel(), channel(), channel());
        std::thread::Builder::new().name("vm".into()).spawn(move || {
            let outcome = vm.run(&|moment, _| {
                let _ = match moment {
                    Moment::Run => filled.send(()),
                    Moment::End => verify.send(()),
                    _ => Ok(()),
                };
            });
            let _ = end.send(outcome.map_or_else(|error| format!("{error:#}"), |_| "it ended".into()));
        })?;
        if is_filled.recv().is_err() {
            bail!("the workload VM ended: {}", ended.recv().unwrap_or_default());
        }
        self.running = Some(Running { verified, ended });
        Ok(Answer::Filled { ram: Some(ram) })
    }

    /// Attaches the VM: from now on the daemon may take its memory.
    pub(crate) fn attach(&mut self) -> Result<Answer> {
        ensure!(matches!(self.config.backing, Backing::Ballast { .. }), "this VM's memory is not for a ballastd");
        ensure!(self.pager.is_none(), "the VM is attached already");
        let vm = self.vm()?;
        self.pager = Some(Pager::attach(&self.config.backing, vm.ram())?);
        Ok(Answer::Done)
    }

    pub(crate) fn progress(&self) -> Result<Answer> {
        let (vm, _) = self.running()?;
        Ok(Answer::Progress { ops: vm.progress().ops })
    }

    pub(crate) fn slice(&mut self, ms: u64) -> Result<Answer> {
        let (vm, running) = self.running()?;
        let (start, before, cpu_us) = (Instant::now(), vm.progress(), cpu::of_process()?);
        if let Ok(why) = running.ended.recv_timeout(Duration::from_millis(ms)) {
            bail!("the workload VM ended: {why}");
        }
        let (after, wall_us) = (vm.progress(), start.elapsed().as_secs_f64() * 1e6);
        ensure!(after.wrong_bytes == 0, "WRONG DATA: {} bytes in a workload VM", after.wrong_bytes);
        Ok(Answer::Sliced { ops: after.ops - before.ops, wall_us, cpu_us: cpu::of_process()? - cpu_us })
    }

    pub(crate) fn think(&self, rounds: u64) -> Result<Answer> {
        self.running()?.0.think(rounds);
        Ok(Answer::Done)
    }

    /// Ends the run and compares every word of RAM.
    pub(crate) fn verify(&mut self) -> Result<Answer> {
        let (vm, running) = self.running()?;
        vm.stop();
        if running.verified.recv().is_err() {
            bail!("the workload VM ended: {}", running.ended.recv().unwrap_or_default());
        }
        let wrong = vm.progress().wrong_bytes;
        ensure!(wrong == 0, "WRONG DATA: {wrong} bytes in a workload VM");
        Ok(Answer::Done)
    }

    fn running(&self) -> Result<(&Vm, &Running)> {
        self.vm.as_deref().zip(self.running.as_ref()).context("the VM has not started")
    }
}
