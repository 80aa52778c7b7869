//! Scans: the source of heat of a VM.
//!
//! Before: heat's tracker names units to watch. After: it knows which of them, or which of their pages, were touched.
//! Threads: the VM's tracking worker. Units: 2 MiB, and pages.
//! Promise: while a cycle runs, no chunk is unregistered.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use ballast_heat::{AccessSource, CycleReport, Watch};
use ballast_sys::clock::cpu_time;

use super::zap::{Watched, ZapScan};
use crate::vm::Vm;
use crate::vm::touches::KeepRegistered;

/// The scans of one VM.
#[derive(Debug)]
pub struct Scans {
    vm: Arc<Vm>,
    zap: ZapScan,
    /// Dropped after `zap`, which ends its cycle first.
    running: Option<Cycle>,
}

#[derive(Debug)]
struct Cycle {
    cpu: Duration,
    _registered: KeepRegistered,
}

impl Scans {
    /// The scans of a VM, with no cycle under way.
    pub fn new(vm: Arc<Vm>) -> Self {
        Self { zap: ZapScan::new(vm.clone()), vm, running: None }
    }

    /// Registers the units to watch. Returns those that could be registered.
    fn register(&self, watch: &Watch) -> io::Result<Vec<Watched>> {
        // Held so that no view can be added.
        let _layout = self.vm.memory.layout();
        let coarse = watch.coarse.iter().map(|id| (*id, false));
        let mut all: Vec<_> = coarse.chain(watch.fine.iter().map(|id| (*id, true))).collect();
        all.sort_unstable();
        let mut watched = Vec::new();
        for (id, is_fine) in all {
            let Some(region) = self.vm.watchable(id)? else { continue };
            watched.push(Watched::new(region, id.unit, is_fine));
        }
        Ok(watched)
    }
}

impl AccessSource for Scans {
    fn start(&mut self, watch: &Watch) -> io::Result<()> {
        if self.running.is_some() {
            return Err(io::Error::other("Starting to watch touches: a cycle is running already"));
        }
        let before = cpu_time();
        let registered = self.vm.keep_registered();
        let watched = self.register(watch)?;
        self.zap.start(watched)?;
        let cpu = cpu_time().saturating_sub(before);
        self.running = Some(Cycle { cpu, _registered: registered });
        Ok(())
    }

    fn end(&mut self) -> io::Result<CycleReport> {
        let Some(cycle) = self.running.take() else {
            return Err(io::Error::other("Ending to watch touches: no cycle is running"));
        };
        let before = cpu_time();
        let (mut units, mut cost) = self.zap.end();
        units.sort_unstable_by_key(|(unit, _)| *unit);
        cost.cpu += cycle.cpu + cpu_time().saturating_sub(before);
        Ok(CycleReport { units, cost })
    }
}
