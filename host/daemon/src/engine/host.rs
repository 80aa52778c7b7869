//! The host: all VMs that this engine serves, and the budgets of their far pages.
//!
//! Before: the keeper sent this engine's first order. After: each part of the engine finds the VMs here.
//! Threads: any; the list is locked briefly.

use std::sync::{Arc, RwLock};
use std::time::{Duration, Instant};

use ballast_base::wire::VmId;
use ballast_handover::orders::Begin;
use ballast_pager::vm::pinned::Pins;
use ballast_store::Budget;

use super::adopted::AdoptedVms;
use super::groups::Groups;
use super::pool::PoolService;
use super::remote::Remote;
use super::served::Served;
use super::upgrades::Upgrades;
use crate::events::Events;
use crate::history::Past;
use crate::kept_settings::KeptSettings;
use crate::settings::Settings;

/// Time within which the VM of an attached VMM is open, unless the engine is far behind.
const OPENS_WITHIN: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub struct Host {
    pub begin: Begin,
    /// The settings with which the engine began; the governor's may have changed since.
    pub settings: Settings,
    pub vms: RwLock<Vec<Arc<Served>>>,
    pub events: Arc<Events>,
    pub budget: Arc<Budget>,
    pub file_budget: Arc<Budget>,
    pub groups: Groups,
    pub remote: Option<Remote>,
    pub adopted: Arc<AdoptedVms>,
    pub pins: Arc<Pins>,
    pub upgrades: Upgrades,
    pub kept: KeptSettings,
    pub pool: Arc<PoolService>,
    pub past: Past,
}

impl Host {
    pub fn all(&self) -> Vec<Arc<Served>> {
        self.vms.read().expect("no panic while held").clone()
    }

    pub fn by_id(&self, id: VmId) -> Option<Arc<Served>> {
        self.all().into_iter().find(|served| served.vm.state.id() == id)
    }

    /// The VM of this name. If there are several, the last: an earlier one is about to be closed.
    pub fn by_name(&self, name: &str) -> Option<Arc<Served>> {
        self.all().into_iter().rfind(|served| served.vm.state.name() == name)
    }

    /// The time until which to wait for a VM that a caller may just have started: the VMM is attached before the engine
    /// has opened the VM.
    pub fn opens_until() -> Instant {
        Instant::now() + OPENS_WITHIN
    }

    /// Like [`Self::by_name`], but waits for an unknown VM, until `until`.
    pub fn attached(&self, name: &str, until: Instant) -> Option<Arc<Served>> {
        loop {
            let known = self.by_name(name);
            if known.is_some() || Instant::now() > until {
                return known;
            }
            std::thread::sleep(OPENS_WITHIN / 1000);
        }
    }
}
