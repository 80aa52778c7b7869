//! The keeper's state.
//!
//! Before: `run` made it. After: each of the other files adds functions to it.
//! Threads: the keeper's one.

use std::collections::BTreeMap;
use std::os::fd::{OwnedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use ballast_handover::orders::Order;
use ballast_handover::upgrading::Upgrading;
use ballast_sys::spawn::{Child, Starter};

use crate::client::Clients;
use crate::closer::{Closer, SentFd};
use crate::complaints::Complaints;
use crate::engine::Engine;
use crate::options::Options;
use crate::program::Program;
use crate::regions::VmEntry;
use crate::replacing::Replacing;
use crate::upgrading::{Leaving, Upgrade};
use crate::waiting::{Asked, Closing, Making, Returning};

/// The longest wait while something must be checked without an event.
pub(crate) const SOON: Duration = Duration::from_millis(20);

/// The lock that makes a process the one keeper of its directory.
pub(crate) struct Standing {
    /// The number of the lock file's descriptor. It is open until the process ends: the lock goes with it.
    pub lock: RawFd,
    pub attach: Arc<OwnedFd>,
}

/// The keeper's state.
pub(crate) struct Keeper {
    /// `None` before it listens.
    pub(crate) standing: Option<Standing>,
    pub(crate) file_stores: bool,
    pub(crate) groups: Vec<(String, Vec<String>)>,
    /// The settings that engines begin with: those of the program's start until an operator changed them.
    pub(crate) settings: Vec<u8>,
    /// The program that engines are started from.
    pub(crate) program: Program,
    /// The program of this keeper itself.
    pub(crate) own_program: Program,
    pub(crate) starter: Starter,
    pub(crate) since_unix_s: u64,
    pub(crate) closer: Arc<Closer>,
    pub(crate) api: Arc<SentFd>,
    pub(crate) engine: Option<Engine>,
    /// The next engine, in an upgrade.
    pub(crate) upgrade: Option<Upgrade>,
    /// The state of the last upgrade.
    pub(crate) last_upgrade: Upgrading,
    /// This process is about to become another program.
    pub(crate) replacing: Option<Replacing>,
    /// The program before the last upgrade, until the new one has served once.
    pub(crate) last_program: Option<Program>,
    /// Engines that were replaced and have not ended.
    pub(crate) leaving: Vec<Leaving>,
    /// Attaches that wait for their stores.
    pub(crate) making: Vec<Making>,
    /// Children that died and have not been reaped: the kernel may keep threads of them.
    pub(crate) zombies: Vec<Child>,
    /// Each is readable when a killed engine of an earlier keeper is gone.
    pub(crate) dying: Vec<OwnedFd>,
    pub(crate) restarts: u64,
    /// Engines in a row that died before they served.
    pub(crate) young_deaths: u32,
    /// When and why the last engine went.
    pub(crate) died: Option<(Instant, String)>,
    /// Notes for the next engine's event list.
    pub(crate) unsaid: Vec<Order>,
    pub(crate) clients: Clients,
    pub(crate) complaints: Complaints,
    pub(crate) next_client: u64,
    /// No connections are taken until then.
    pub(crate) accept_again: Option<Instant>,
    pub(crate) vms: Vec<VmEntry>,
    /// When the first pages of their state files are remembered next.
    pub(crate) remember_at: Instant,
    pub(crate) closing: Vec<Closing>,
    /// VMs that were told to come again when the engine serves.
    pub(crate) returning: Vec<Returning>,
    /// Orders that clients wait for, by number.
    pub(crate) pending: BTreeMap<u64, Asked>,
    pub(crate) next_seq: u64,
}

impl Keeper {
    /// A keeper without engine and VMs. Engines are started from `program`.
    pub(crate) fn new(options: Options, program: Program, starter: Starter, api: OwnedFd) -> Self {
        let closer = Closer::new();
        Self {
            standing: None,
            since_unix_s: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
            settings: options.engine,
            file_stores: options.file_stores,
            groups: options.groups,
            own_program: program.clone(),
            program,
            starter,
            api: Arc::new(SentFd::new(api, 0, closer.clone()).checked()),
            closer,
            engine: None,
            upgrade: None,
            last_upgrade: Upgrading::default(),
            replacing: None,
            last_program: None,
            leaving: Vec::new(),
            making: Vec::new(),
            zombies: Vec::new(),
            dying: Vec::new(),
            restarts: 0,
            young_deaths: 0,
            died: None,
            unsaid: Vec::new(),
            clients: Clients::new(),
            complaints: Complaints::default(),
            next_client: 0,
            accept_again: None,
            vms: Vec::new(),
            remember_at: Instant::now(),
            closing: Vec::new(),
            returning: Vec::new(),
            pending: BTreeMap::new(),
            next_seq: 0,
        }
    }
}
