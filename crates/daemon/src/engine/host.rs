//! The host: all VMs that this engine serves, and who pays for their far pages.
//!
//! Before: the keeper said what this engine is to begin with. After: every part of the engine finds the VMs here.
//! Threads: any; the list is locked for a moment.

use std::sync::{Arc, RwLock};

use ballast_base::wire::VmId;
use ballast_handover::orders::Begin;
use ballast_pager::reclaim::pinned::Pins;
use ballast_store::Budget;

use super::groups::Groups;
use super::pool::Room;
use super::remote::Remote;
use super::served::Served;
use super::upgrades::Upgrades;
use crate::events::Events;
use crate::settings::Settings;

/// See the file's head.
#[derive(Debug)]
pub struct Host {
    /// What the keeper said.
    pub begin: Begin,
    /// What it wants of this engine; the control loop may have been changed since.
    pub settings: Settings,
    /// The VMs, in the order of their attach.
    pub vms: RwLock<Vec<Arc<Served>>>,
    /// What happened.
    pub events: Arc<Events>,
    /// Who pays for far pages.
    pub budget: Arc<Budget>,
    /// Who pays for those on disk.
    pub file_budget: Arc<Budget>,
    /// Where VMs of a group have equal pages once.
    pub groups: Groups,
    /// The cluster they may go to.
    pub remote: Option<Remote>,
    /// Whether it can be known who holds a page.
    pub pins: Arc<Pins>,
    /// The last upgrade.
    pub upgrades: Upgrades,
    /// Memory for VMs.
    pub pool: Arc<Room>,
}

impl Host {
    /// The VMs now.
    pub fn all(&self) -> Vec<Arc<Served>> {
        self.vms.read().expect("no panic while held").clone()
    }

    /// The VM of this id.
    pub fn by_id(&self, id: VmId) -> Option<Arc<Served>> {
        self.all().into_iter().find(|served| served.vm.state.id() == id)
    }

    /// The VM of this name.
    pub fn by_name(&self, name: &str) -> Option<Arc<Served>> {
        self.all().into_iter().find(|served| served.vm.state.name() == name)
    }
}
