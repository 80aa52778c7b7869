//! Attaching: the description of this VMM for the keeper, the userfaultfds, and the service thread.
//!
//! Before: the VMM has mapped its RAM. After: a [`Client`], once the keeper has replied.
//! Threads: the caller's; it starts `ballast-client`. Units: bytes; addresses of this process.
//! Promise: a description that the keeper would refuse is refused here, by name.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ballast_base::wire;
use ballast_base::{Bytes, Hva, Uuid};
use ballast_sys::Uffd;
use ballast_sys::uffd::{HUGETLB_FEATURES, REQUIRED_FEATURES, feature};
use rustix::net::SocketAddrUnix;

use crate::agent_port::AgentPort;
use crate::client::Client;
use crate::control::ControlSocket;
use crate::error::AttachError;
use crate::link::Link;
use crate::ram::Ram;
use crate::regions::{Region, Table};
use crate::shared::{FailStop, Shared, Timing, announce, cut};
use crate::zapped::ZapGate;
use crate::{device, fault_workers, service, thread, visit};

/// The keeper's default attach socket.
pub const DEFAULT_SOCKET: &str = "/run/ballast/attach.sock";
/// The environment variable that names another socket.
pub const SOCKET_VARIABLE: &str = "BALLAST_SOCKET";

/// Collects the description for the keeper.
pub struct Builder {
    socket: PathBuf,
    name: String,
    uuid: Option<Uuid>,
    limit: Option<u64>,
    vmm: String,
    pinned: Option<String>,
    may_pin: bool,
    fault_workers: Option<usize>,
    regions: Vec<Ram>,
    fail_stop: FailStop,
    timing: Timing,
    agent_port: Option<AgentPort>,
}

impl std::fmt::Debug for Builder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Builder").field("name", &self.name).field("regions", &self.regions).finish_non_exhaustive()
    }
}

impl Builder {
    /// The VM's name for operators: any text of 1 to 255 bytes. Unprintable characters are escaped; with the escapes it
    /// may have [`wire::MAX_NAME`] bytes. Default: `vm-PID`, with the number of the pid namespace, unless that is the
    /// host's first.
    pub fn name(mut self, name: impl AsRef<str>) -> Self {
        self.name = wire::shown_name(name.as_ref());
        self
    }

    /// The VM's UUID, which identifies its settings. Default: none; the name identifies them.
    pub fn uuid(mut self, uuid: Uuid) -> Self {
        self.uuid = Some(uuid);
        self
    }

    /// Most DRAM of the VM from the start, in bytes. Default: no limit.
    pub fn limit(mut self, bytes: u64) -> Self {
        self.limit = Some(bytes);
        self
    }

    /// The keeper's attach socket. Default: `$BALLAST_SOCKET`, else [`DEFAULT_SOCKET`].
    pub fn socket(mut self, path: impl Into<PathBuf>) -> Self {
        self.socket = path.into();
        self
    }

    /// Starts as a pinned VM: managed, but never reclaimed, for this reason.
    pub fn pinned(mut self, reason: impl Into<String>) -> Self {
        self.pinned = Some(reason.into());
        self
    }

    /// Whether the kernel or a device may write to guest RAM for a while without the page table (O_DIRECT reads; reads
    /// from FUSE, virtiofs, 9p or CIFS past the page cache; vhost). If so, and the engine cannot check page references,
    /// no page is evicted before the full quarantine time. Default: true, which is always safe. False is a promise to
    /// call [`Client::may_pin`] before the first such access.
    pub fn may_pin(mut self, may_pin: bool) -> Self {
        self.may_pin = may_pin;
        self
    }

    /// Number of the engine's threads that serve this process's faults, 1 to 8. Default: `$BALLAST_FAULT_WORKERS`, else
    /// one per 8 CPUs that the process may use, but at most one per 16 GiB of RAM with which it attaches.
    pub fn fault_workers(mut self, workers: usize) -> Self {
        self.fault_workers = Some(workers);
        self
    }

    /// A piece of guest RAM: `len` bytes of `fd` from `file_offset`, mapped `MAP_SHARED` at `hva`.
    pub fn region(self, fd: OwnedFd, hva: Hva, len: Bytes, file_offset: Bytes) -> Self {
        self.ram(Ram::one(fd, hva, len, file_offset))
    }

    /// RAM that consists of several pieces, or whose guest-physical address is known.
    pub fn ram(mut self, ram: Ram) -> Self {
        self.regions.push(ram);
        self
    }

    /// Sets the handler for the report that the engine can no longer guarantee the guest's memory. It runs on the
    /// service thread. The guest must not run afterwards. Default: print the reason and abort the process.
    pub fn on_fail_stop(mut self, handler: impl Fn(&str) + Send + Sync + 'static) -> Self {
        self.fail_stop = Arc::new(handler);
        self
    }

    /// The port of the guest's agent, if it has one. Default: the socket in `$BALLAST_AGENT`.
    pub fn agent_port(mut self, port: AgentPort) -> Self {
        self.agent_port = Some(port);
        self
    }

    #[doc(hidden)]
    pub fn timing(mut self, timing: Timing) -> Self {
        self.timing = timing;
        self
    }

    /// Creates the userfaultfds, starts the service thread, and tells the keeper. Returns when the keeper has replied.
    pub fn attach(self) -> Result<Client, AttachError> {
        let _quiet = visit::enter();
        wire::check_name(&self.name).map_err(AttachError::Config)?;
        if self.regions.is_empty() {
            return Err(AttachError::Config("no RAM region was given".into()));
        }
        let mut table = Table::default();
        for ram in self.regions {
            table.push(Region::checked(ram).map_err(AttachError::Config)?);
        }
        let (infos, files) = table.describe(true);
        let files = u8::try_from(files.len()).unwrap_or(u8::MAX);
        wire::check_regions(&infos, files).map_err(AttachError::Config)?;
        let wanted = REQUIRED_FEATURES | HUGETLB_FEATURES | feature::POISON;
        let variable = std::env::var(fault_workers::VARIABLE).ok();
        let cpus = std::thread::available_parallelism().map_or(1, |cpus| cpus.get() as u64);
        let workers = fault_workers::count(self.fault_workers, variable.as_deref(), cpus, table.total().0);
        let workers = workers.map_err(AttachError::Config)?;
        let made = userfaultfds(workers, wanted, &self.socket, self.timing.handshake)?;
        let features = made.iter().fold(wanted, |features, (_, granted)| features & granted);
        let huge = table.iter().any(Region::is_huge);
        let required = REQUIRED_FEATURES | if huge { HUGETLB_FEATURES } else { 0 };
        if features & required != required {
            return Err(AttachError::Features(required & !features));
        }
        let uffds: Vec<Uffd> = made.into_iter().map(|(uffd, _)| uffd).collect();
        let registered = table.iter().try_for_each(|region| region.ram.register(&uffds));
        registered.map_err(|source| AttachError::System { what: "registering RAM that comes on demand", source })?;
        let shared = Arc::new(Shared {
            socket: fixed(self.socket),
            name: self.name,
            uuid: self.uuid,
            limit: self.limit,
            vmm: cut(self.vmm),
            uffds,
            features,
            table: Mutex::new(table),
            gate: ZapGate::default(),
            link: Link::new(self.pinned.map(cut), self.may_pin),
            control: ControlSocket::default(),
            fail_stop: Mutex::new(self.fail_stop),
            timing: self.timing,
            agent_port: self.agent_port,
        });
        start(shared.clone()).map_err(|source| AttachError::System { what: "starting its thread", source })?;
        let vm = shared.link.first_outcome()?;
        Ok(Client::new(shared, vm))
    }
}

impl Client {
    /// Begins the description of this VMM.
    pub fn builder() -> Builder {
        let vmm = std::env::current_exe().ok();
        let vmm = vmm.as_deref().and_then(|path| path.file_name()).map(|name| name.to_string_lossy().into_owned());
        Builder {
            socket: std::env::var_os(SOCKET_VARIABLE).map_or_else(|| DEFAULT_SOCKET.into(), PathBuf::from),
            name: own_name(),
            uuid: None,
            limit: None,
            vmm: vmm.unwrap_or_else(|| "unknown".into()),
            pinned: None,
            may_pin: true,
            fault_workers: None,
            regions: Vec::new(),
            fail_stop: Arc::new(|reason| {
                announce(&format!("the guest's memory cannot be kept right: {reason}. Stopping the VM"));
                std::process::abort();
            }),
            timing: Timing::default(),
            agent_port: AgentPort::of_environment(),
        }
    }
}

/// Creates userfaultfds with these features, by this process's own permissions, else with the keeper's device.
fn userfaultfds(count: u8, features: u64, socket: &Path, at_most: Duration) -> Result<Vec<(Uffd, u64)>, AttachError> {
    let own = (0..count).map(|_| Uffd::create(features)).collect::<Result<_, _>>();
    let Err(error) = own else { return own.map_err(AttachError::Userfault) };
    let Some(device) = device::of_keeper(socket, at_most)? else { return Err(AttachError::Userfault(error)) };
    (0..count)
        .map(|_| Uffd::create_by(device.as_fd(), features))
        .collect::<Result<_, _>>()
        .map_err(AttachError::Userfault)
}

/// The default name of a VM. Two processes in different pid namespaces may have the same pid.
pub(crate) fn own_name() -> String {
    /// The kernel's `PROC_PID_INIT_INO`, as the link of a process in the first namespace shows it.
    const FIRST: &str = "pid:[4026531836]";
    let namespace = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default().to_string_lossy().into_owned();
    let number = namespace.trim_matches(|c: char| !c.is_ascii_digit());
    let id = std::process::id();
    if namespace == FIRST || number.is_empty() { format!("vm-{id}") } else { format!("vm-{id}-{number}") }
}

/// The absolute path: QEMU changes its working directory after it attached (`-daemonize`), and must find the next
/// keeper. A path that is too long for a socket's address stays as it is.
fn fixed(path: PathBuf) -> PathBuf {
    let absolute = std::path::absolute(&path).ok();
    absolute.filter(|path| SocketAddrUnix::new(path).is_ok()).unwrap_or(path)
}

fn start(shared: Arc<Shared>) -> std::io::Result<()> {
    thread::spawn("ballast-client", move || {
        loop {
            let turn = std::panic::AssertUnwindSafe(|| service::run(&shared));
            match std::panic::catch_unwind(turn) {
                Ok(()) => return,
                Err(_) => {
                    announce("the service thread hit a bug and starts again");
                    shared.link.down();
                    std::thread::sleep(Duration::from_millis(100));
                }
            }
        }
    })
}
