//! Scans: the source of heat of a VM. Each chunk of its RAM is watched by the scan that suits it.
//!
//! Before: heat's tracker says which units to watch. After: it knows which of them, or which of their pages, were
//! touched. Threads: the VM's tracking worker. Units: 2 MiB, and pages. Promise: one scan watches a unit, and while a
//! cycle runs no chunk is unregistered.
//!
//! | A chunk | is watched by |
//! |---|---|
//! | registered for accesses by all that map it, no unit seen mapped huge | `rwp`: the kernel records touches |
//! | any other | `zap`: a touch is a fault that we serve |
//!
//! `Vm::register` decides once how a chunk is registered: memory registered for accesses cannot be mapped huge again.
//! For the same reason the zap scan watches huge mappings of shared memory: the kernel unmaps one when it is protected
//! (seen on 7.3), so that its touch would be a fault for us as with a zap.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use ballast_base::{PageIdx, PageRange};
use ballast_heat::source::Ability;
use ballast_heat::{AccessSource, CycleReport, UnitId, Watch};
use ballast_sys::clock::cpu_time;

use super::rwp::{self, ProtectedRun, RwpScan};
use super::touches::{FINE_UNITS, KeepRegistered};
use super::zap::{self, Watched, ZapScan};
use crate::vm::Vm;
use crate::vm::region::{Region, Registered};

/// The scans of one VM.
#[derive(Debug)]
pub struct Scans {
    vm: Arc<Vm>,
    zap: ZapScan,
    rwp: RwpScan,
    /// Dropped after the scans, which end their cycles first.
    running: Option<Cycle>,
    /// The kernel watched some units in the last cycle.
    is_rwp_used: bool,
}

/// The running cycle.
#[derive(Debug)]
struct Cycle {
    /// CPU time at its start.
    cpu: Duration,
    _registered: KeepRegistered,
}

impl Scans {
    /// For this VM, with no cycle under way.
    pub fn new(vm: Arc<Vm>) -> Self {
        Self { zap: ZapScan::new(vm.clone()), rwp: RwpScan::new(vm.clone()), vm, running: None, is_rwp_used: false }
    }

    /// Registers the units of a watch, and gives each to one of the scans.
    fn divide(&self, watch: &Watch) -> io::Result<(Vec<Watched>, Vec<ProtectedRun>)> {
        // Held so that no view is added meanwhile.
        let _layout = self.vm.layout();
        let coarse = watch.coarse.iter().map(|id| (*id, None));
        let mut all: Vec<_> = coarse.chain(watch.fine.iter().map(|fine| (fine.unit, Some(fine.pages)))).collect();
        all.sort_unstable_by_key(|(id, _)| *id);
        let (mut zap, mut rwp, mut fine) = (Vec::new(), Vec::new(), 0);
        for (id, pages) in all {
            let Some(region) = self.vm.watchable(id)? else { continue };
            if self.is_seen_by_kernel(&region, id) {
                ProtectedRun::add(&mut rwp, region, id.unit, pages);
                continue;
            }
            fine += usize::from(pages.is_some());
            if pages.is_none() || fine <= FINE_UNITS {
                zap.push(Watched::new(region, id.unit, pages));
            }
        }
        Ok((zap, rwp))
    }

    /// Returns whether the kernel can record touches of a unit.
    fn is_seen_by_kernel(&self, region: &Region, id: UnitId) -> bool {
        let first = PageIdx::first_of_unit(u64::from(id.unit));
        region.registered_as(first) == Registered::Accesses
            && (region.granule_pages() > 1 || !region.units().any_huge(PageRange::of_unit(u64::from(id.unit))))
            && self.vm.views().iter().all(|view| view.sees_accesses() || view.base(id.region).is_none())
    }
}

impl AccessSource for Scans {
    fn ability(&self) -> Ability {
        if self.is_rwp_used { rwp::ABILITY } else { zap::ABILITY }
    }

    fn start(&mut self, watch: &Watch) -> io::Result<()> {
        if self.running.is_some() {
            return Err(io::Error::other("Starting to watch touches: a cycle is running already"));
        }
        let before = cpu_time();
        let registered = self.vm.keep_registered();
        let (zap, rwp) = self.divide(watch)?;
        self.is_rwp_used = !rwp.is_empty();
        self.zap.start(zap)?;
        if let Err(error) = self.rwp.start(rwp) {
            self.zap.end();
            return Err(error);
        }
        let cpu = cpu_time().saturating_sub(before);
        self.running = Some(Cycle { cpu, _registered: registered });
        Ok(())
    }

    fn end(&mut self) -> io::Result<CycleReport> {
        let Some(cycle) = self.running.take() else {
            return Err(io::Error::other("Ending to watch touches: no cycle is running"));
        };
        let before = cpu_time();
        // Both are ended, even if the first fails.
        let by_kernel = self.rwp.end();
        let (mut units, mut cost) = self.zap.end();
        let (seen, of_kernel) = by_kernel?;
        units.extend(seen);
        units.sort_unstable_by_key(|(unit, _)| *unit);
        cost.cpu += of_kernel.cpu + cycle.cpu + cpu_time().saturating_sub(before);
        cost.guest += of_kernel.guest;
        cost.faults += of_kernel.faults;
        Ok(CycleReport { units, cost })
    }
}
