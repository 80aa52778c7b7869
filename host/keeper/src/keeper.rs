//! The keeper's state, in parts: only a part's own file changes its fields.
//!
//! Before: `run` made the keeper. After: each of the other files adds functions to it, which use several parts.
//! Threads: the keeper's one.

use std::os::fd::{OwnedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use crate::client::Clients;
use crate::engines::Engines;
use crate::options::Options;
use crate::replacing::Replacing;
use crate::upgrading::Upgrades;
use crate::vms::Vms;
use crate::waiting::Making;

/// The longest wait while a condition must be checked that no event reports.
pub(crate) const SOON: Duration = Duration::from_millis(20);

/// The lock that makes a process the one keeper of its directory.
pub(crate) struct Standing {
    /// The lock file's descriptor. It is open until the process ends: the lock goes with it.
    pub lock: RawFd,
    pub attach: Arc<OwnedFd>,
}

pub(crate) struct Keeper {
    /// `None` before it listens.
    pub(crate) standing: Option<Standing>,
    pub(crate) file_stores: bool,
    pub(crate) groups: Vec<(String, Vec<String>)>,
    pub(crate) engines: Engines,
    pub(crate) upgrades: Upgrades,
    pub(crate) replacing: Option<Replacing>,
    pub(crate) making: Vec<Making>,
    pub(crate) clients: Clients,
    pub(crate) vms: Vms,
}

impl Keeper {
    pub(crate) fn new(options: Options, engines: Engines) -> Self {
        Self {
            standing: None,
            file_stores: options.file_stores,
            groups: options.groups,
            engines,
            upgrades: Upgrades::default(),
            replacing: None,
            making: Vec::new(),
            clients: Clients::default(),
            vms: Vms::new(),
        }
    }
}
