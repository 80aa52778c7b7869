//! What a VMM links (or preloads) so that Ballast can take its cold guest memory and give it back on touch.
//!
//! Before: the VMM maps guest RAM as shared memory. After: keeper and engine hold its userfaultfds and RAM files.
//! Threads: one, `ballast-client`, started by [`Builder::attach`]; everything public may be called from any thread.
//! Units: addresses are host virtual addresses of this process, lengths are bytes.
//! Promise: no panic leaves the C functions, nothing but announced RAM is ever zapped, and a keeper or an engine that dies
//! is only a pause.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let (ram, address): (std::os::fd::OwnedFd, u64) = unimplemented!();
//! use ballast_client::{Bytes, Client, Hva};
//! let client = Client::builder()
//!     .name("web-1")
//!     .limit(512 << 20)
//!     .region(ram, Hva(address), Bytes(1 << 30), Bytes(0))
//!     .attach()?;
//! // A balloon inflates: say so first, free the memory only after `Ok`.
//! client.discard(&[(Hva(address), 4096)])?;
//! # Ok(()) }
//! ```
//!
//! There is no detach: pages may be far, and only the engine can bring them back. A client stays attached until its
//! process exits; dropping a [`Client`] changes nothing (the userfaultfds must stay open, because the kernel answers
//! faults of a closed one with zeros).

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ballast_base::wire::{self, ClientToKeeper, MAX_RANGES, MAX_REGIONS, RegionInfo};
use ballast_sys::Uffd;
use ballast_sys::uffd::{ACCESS_FEATURES, HUGETLB_FEATURES, REQUIRED_FEATURES, feature};

mod control;
mod error;
pub mod ffi;
mod lanes;
mod link;
mod regions;
mod service;
#[doc(hidden)]
pub mod visit;

pub use ballast_base::wire::{Range, VmId};
pub use ballast_base::{Bytes, Hva};
pub use ballast_sys::memfd::FileId;
pub use control::DiscardError;
pub use error::{AttachError, RequestError, chain};
pub use lanes::VARIABLE as LANES_VARIABLE;

use link::Asked;
use regions::{Region, Table};

/// Where the keeper listens unless told otherwise.
pub const DEFAULT_SOCKET: &str = "/run/ballast/attach.sock";
/// The environment variable that names another socket.
pub const SOCKET_VARIABLE: &str = "BALLAST_SOCKET";

type FailStop = Arc<dyn Fn(&str) + Send + Sync>;

/// Every waiting time of the client, so that tests need not wait for real ones.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// From the attach message, or new RAM, to its answer. In RAM that is far elsewhere, faults must be served first, if need be by
    /// an engine that replaces one that hung.
    pub handshake: Duration,
    /// From a request or a discard to its answer.
    pub answer: Duration,
    /// Pause before the first reconnect; doubles up to the last.
    pub backoff_first: Duration,
    /// Longest pause between reconnects.
    pub backoff_last: Duration,
    /// Pause after a refused resume.
    pub refused_pause: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            handshake: Duration::from_secs(30),
            answer: Duration::from_secs(5),
            backoff_first: Duration::from_millis(10),
            backoff_last: Duration::from_millis(200),
            refused_pause: Duration::from_secs(2),
        }
    }
}

/// What VMM threads and the service thread share. Locks are taken in the order link, table; `control` is apart.
pub(crate) struct Shared {
    socket: PathBuf,
    name: String,
    limit: Option<u64>,
    vmm: String,
    /// At each attach in the same order: a page belongs to one of them for good.
    uffds: Vec<Uffd>,
    features: u64,
    table: Mutex<Table>,
    link: link::Link,
    control: control::Control,
    fail_stop: Mutex<FailStop>,
    timing: Timing,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("name", &self.name).field("socket", &self.socket).finish_non_exhaustive()
    }
}

/// A panic elsewhere leaves plain data behind that is still worth using; the VMM must go on.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A line for the operator, on the VMM's standard error. Its loss must not stop a guest, so a closed one is ignored.
pub(crate) fn announce(text: &str) {
    use std::io::Write;
    let _ = writeln!(std::io::stderr(), "ballast: {text}");
}

/// Collects what the keeper is told at attach.
pub struct Builder {
    socket: PathBuf,
    name: String,
    limit: Option<u64>,
    vmm: String,
    pinned: Option<String>,
    may_pin: bool,
    fault_lanes: Option<usize>,
    regions: Vec<(OwnedFd, RegionInfo)>,
    fail_stop: FailStop,
    timing: Timing,
}

impl std::fmt::Debug for Builder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Builder").field("name", &self.name).field("regions", &self.regions).finish_non_exhaustive()
    }
}

impl Builder {
    /// What operators will call the VM: letters, digits, `.`, `_`, `-`; at most 64. Default: `vm-PID`.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// Most DRAM the VM may use from the start, in bytes. Default: no limit.
    pub fn limit(mut self, bytes: u64) -> Self {
        self.limit = Some(bytes);
        self
    }

    /// Where the keeper listens. Default: `$BALLAST_SOCKET`, else [`DEFAULT_SOCKET`].
    pub fn socket(mut self, path: impl Into<PathBuf>) -> Self {
        self.socket = path.into();
        self
    }

    /// Start as a pinned VM: managed, but never reclaimed, for this reason.
    pub fn pinned(mut self, reason: impl Into<String>) -> Self {
        self.pinned = Some(reason.into());
        self
    }

    /// May the kernel or a device write to guest RAM for a while without touching it through the page table (reads with
    /// O_DIRECT, or from FUSE, virtiofs, 9p or CIFS past the page cache; vhost)? Where the engine cannot see who holds a page,
    /// none is then evicted before the full quarantine time. Default: true, the careful answer. False is a promise: call
    /// [`Client::may_pin`] before the first such access.
    pub fn may_pin(mut self, may_pin: bool) -> Self {
        self.may_pin = may_pin;
        self
    }

    /// How many threads of the engine serve this process's faults, 1 to 8. Default: `$BALLAST_FAULT_LANES`, else one
    /// for each 8 CPUs the process may use, but no more than one for each 16 GiB of RAM it attaches with.
    pub fn fault_lanes(mut self, lanes: usize) -> Self {
        self.fault_lanes = Some(lanes);
        self
    }

    /// A piece of guest RAM: `len` bytes of `fd` from `file_offset`, mapped `MAP_SHARED` at `hva`.
    pub fn region(mut self, fd: OwnedFd, hva: Hva, len: Bytes, file_offset: Bytes) -> Self {
        self.regions.push((fd, RegionInfo { hva, len, file_offset }));
        self
    }

    /// What to do when the engine says that the guest's memory can no longer be kept right. Runs on the service thread;
    /// the guest must not run on afterwards. Default: print the reason and abort the process.
    pub fn on_fail_stop(mut self, handler: impl Fn(&str) + Send + Sync + 'static) -> Self {
        self.fail_stop = Arc::new(handler);
        self
    }

    #[doc(hidden)]
    pub fn timing(mut self, timing: Timing) -> Self {
        self.timing = timing;
        self
    }

    /// Make the userfaultfds, start the service thread, and tell the keeper. Returns when the keeper has answered.
    pub fn attach(self) -> Result<Client, AttachError> {
        let _quiet = visit::enter();
        wire::check_name(&self.name).map_err(AttachError::Config)?;
        if self.regions.is_empty() {
            return Err(AttachError::Config("no RAM region was given".into()));
        }
        wire::check_regions(&self.regions.iter().map(|(_, info)| *info).collect::<Vec<_>>())
            .map_err(AttachError::Config)?;
        let mut table = Table::default();
        for (fd, info) in self.regions {
            table.push(Region::checked(fd, info).map_err(AttachError::Config)?);
        }
        let wanted = REQUIRED_FEATURES | HUGETLB_FEATURES | ACCESS_FEATURES | feature::POISON;
        let variable = std::env::var(LANES_VARIABLE).ok();
        let cpus = std::thread::available_parallelism().map_or(1, |cpus| cpus.get() as u64);
        let lanes = lanes::count(self.fault_lanes, variable.as_deref(), cpus, table.total().0);
        let made: Vec<(Uffd, u64)> = (0..lanes.map_err(AttachError::Config)?)
            .map(|_| Uffd::create(wanted))
            .collect::<Result<_, _>>()
            .map_err(AttachError::Userfault)?;
        let features = made.iter().fold(wanted, |features, (_, granted)| features & granted);
        let huge = table.iter().any(regions::Region::is_huge);
        let required = REQUIRED_FEATURES | if huge { HUGETLB_FEATURES } else { 0 };
        if features & required != required {
            return Err(AttachError::Features(required & !features));
        }
        let shared = Arc::new(Shared {
            socket: self.socket,
            name: self.name,
            limit: self.limit,
            vmm: cut(self.vmm),
            uffds: made.into_iter().map(|(uffd, _)| uffd).collect(),
            features,
            table: Mutex::new(table),
            link: link::Link::new(self.pinned.map(cut), self.may_pin),
            control: control::Control::default(),
            fail_stop: Mutex::new(self.fail_stop),
            timing: self.timing,
        });
        start(shared.clone()).map_err(|source| AttachError::System { what: "starting its thread", source })?;
        let vm = shared.link.first_outcome()?;
        Ok(Client { shared, vm })
    }
}

/// The longest text a message may hold, cut at a character border.
fn cut(mut text: String) -> String {
    const LONGEST: usize = 256;
    let mut end = text.len().min(LONGEST);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.truncate(end);
    text
}

/// Start the service thread with all signals blocked: the VMM's signals are for the VMM's threads.
fn start(shared: Arc<Shared>) -> std::io::Result<()> {
    let body = move || {
        visit::enter_for_good();
        loop {
            let turn = std::panic::AssertUnwindSafe(|| service::run(&shared));
            match std::panic::catch_unwind(turn) {
                Ok(()) => return,
                Err(_) => {
                    announce("the service thread met a bug and starts again");
                    shared.link.down();
                    std::thread::sleep(Duration::from_millis(100));
                }
            }
        }
    };
    let mut all = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: both sets live across the calls; `sigfillset` fills the first and `pthread_sigmask` the second.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
    }
    // A new thread inherits the mask.
    let started = std::thread::Builder::new().name("ballast-client".into()).stack_size(256 * 1024).spawn(body);
    // SAFETY: `before` was filled by the successful call above (SIG_SETMASK with valid sets cannot fail).
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut()) };
    started.map(drop)
}

/// An attachment. Dropping it does not detach; see the crate's documentation.
#[derive(Clone, Debug)]
pub struct Client {
    shared: Arc<Shared>,
    vm: VmId,
}

impl Client {
    /// Begin to describe this VMM.
    pub fn builder() -> Builder {
        let vmm = std::env::current_exe().ok();
        let vmm = vmm.as_deref().and_then(|path| path.file_name()).map(|name| name.to_string_lossy().into_owned());
        Builder {
            socket: std::env::var_os(SOCKET_VARIABLE).map_or_else(|| DEFAULT_SOCKET.into(), PathBuf::from),
            name: format!("vm-{}", std::process::id()),
            limit: None,
            vmm: vmm.unwrap_or_else(|| "unknown".into()),
            pinned: None,
            may_pin: true,
            fault_lanes: None,
            regions: Vec::new(),
            fail_stop: Arc::new(|reason| {
                announce(&format!("the guest's memory cannot be kept right: {reason}. Stopping the VM"));
                std::process::abort();
            }),
            timing: Timing::default(),
        }
    }

    /// The identity the keeper gave this VM.
    pub fn vm(&self) -> VmId {
        self.vm
    }

    /// Guest RAM announced now.
    pub fn ram(&self) -> Bytes {
        lock(&self.shared.table).total()
    }

    /// RAM was hot-plugged: call before the guest can see it. While the keeper is away this succeeds at once, and the
    /// region is announced with the next attach message.
    pub fn add_region(&self, fd: OwnedFd, hva: Hva, len: Bytes, file_offset: Bytes) -> Result<(), RequestError> {
        let _quiet = visit::enter();
        let shared = &self.shared;
        let info = RegionInfo { hva, len, file_offset };
        let region = Region::checked(fd, info).map_err(RequestError::Invalid)?;
        if region.is_huge() && shared.features & HUGETLB_FEATURES != HUGETLB_FEATURES {
            return Err(RequestError::Invalid(format!("RAM at {hva}: this kernel's userfaultfd has no huge pages")));
        }
        let sent = regions::duplicate(&region.fd).map_err(|error| RequestError::Invalid(error.to_string()))?;
        {
            let mut infos = lock(&shared.table).infos();
            infos.push(info);
            wire::check_regions(&infos).map_err(RequestError::Invalid)?;
            if infos.len() > MAX_REGIONS {
                return Err(RequestError::Invalid(format!("a VM may have at most {MAX_REGIONS} RAM regions")));
            }
        }
        let answer =
            shared.link.ask(&ClientToKeeper::AddRegion(info), &[sent.as_fd()], shared.timing.handshake, false, |_| {
                lock(&shared.table).push(region);
            });
        if let Err(RequestError::Refused(_)) = &answer {
            lock(&shared.table).remove(hva);
        }
        answer.map(|_: Asked| ())
    }

    /// RAM is about to be unplugged: call before unmapping it, and unmap after this returns, whatever it returns.
    pub fn remove_region(&self, hva: Hva) -> Result<(), RequestError> {
        /// More keepers do not die during one unplug.
        const MOST_KEEPERS: usize = 8;
        let _quiet = visit::enter();
        let shared = &self.shared;
        if !lock(&shared.table).iter().any(|region| region.info.hva == hva) {
            return Err(RequestError::Invalid(format!("no RAM region begins at {hva}")));
        }
        let mut answer = Ok(Asked::Later);
        let mut unlisted = false;
        // When the keeper dies before it answers, its successor may have been told of the region: ask that one too.
        for _ in 0..MOST_KEEPERS {
            let timing = shared.timing;
            answer = shared.link.ask(&ClientToKeeper::RemoveRegion(hva), &[], timing.answer, false, |state| {
                // With no keeper there, the next attach message must not have it; else it stays until the answer.
                if state.phase != link::Phase::Up {
                    unlisted = lock(&shared.table).remove(hva);
                }
            });
            if unlisted || !matches!(answer, Ok(Asked::Later)) {
                break;
            }
        }
        // No zap may hit what is mapped there next.
        lock(&shared.table).remove(hva);
        answer.map(|_: Asked| ())
    }

    /// From now on no page may be reclaimed, for this reason. `Ok` means that the keeper has confirmed it; without it, do
    /// not do what needs the pin. Pages that are far already come back at their touch; [`Client::restore_all`] touches
    /// all.
    pub fn pin(&self, reason: &str) -> Result<(), RequestError> {
        let _quiet = visit::enter();
        let reason = cut(reason.to_owned());
        let message = ClientToKeeper::Pin(reason.clone());
        self.shared
            .link
            .ask(&message, &[], self.shared.timing.answer, true, |state| {
                state.pinned.get_or_insert(reason);
            })
            .map(|_: Asked| ())
    }

    /// From now on [`Builder::may_pin`] is true. `Ok` means that the keeper has confirmed it (now or before); without it,
    /// do not let the kernel or a device write to guest RAM past the page table.
    pub fn may_pin(&self) -> Result<(), RequestError> {
        let _quiet = visit::enter();
        self.shared.link.may_pin(self.shared.timing.answer)
    }

    /// This process is about to hand its RAM on: to a program that it executes in its place, to another VMM that opens the file.
    /// Bring back every page that is far, and take none from now on, for this reason, which stays as after [`Client::pin`].
    /// `Ok` means that all are in their files; without it, do not go on. It takes a second for some 100,000 far pages, and
    /// gives up when no page comes back for 30 seconds (there is no memory, or a store does not answer).
    pub fn bring_back(&self, reason: &str) -> Result<(), RequestError> {
        let _quiet = visit::enter();
        let (shared, limit) = (&self.shared, self.shared.timing.handshake);
        let reason = cut(reason.to_owned());
        let message = ClientToKeeper::Pin(reason.clone());
        let seen = std::cell::Cell::new(lock(&shared.table).resident());
        let grows = || {
            let now = lock(&shared.table).resident();
            now > seen.replace(now)
        };
        // A keeper that dies over it says nothing about pages: only the answer of one that was asked does.
        loop {
            let change = |state: &mut link::State| {
                state.pinned.get_or_insert(reason.clone());
            };
            match shared.link.ask_while(&message, &[], limit, false, change, &grows)? {
                Asked::Done => return Ok(()),
                Asked::Later => shared.link.wait_for_keeper(limit)?,
            }
        }
    }

    /// Touch every page of guest RAM on this thread, so that none is far afterwards (if the VM is pinned). Pages the guest
    /// never used become resident too.
    pub fn restore_all(&self) -> std::io::Result<()> {
        let _quiet = visit::enter();
        let parts: Vec<Range> = {
            let table = lock(&self.shared.table);
            table.iter().flat_map(|region| table.overlap(region.info.hva, region.info.len.0)).collect()
        };
        parts.into_iter().try_for_each(populate)
    }

    /// The VMM is about to free these ranges (balloon, free page reporting, virtio-mem): whole pages, each range inside
    /// one region, at most 1024 ranges. Free the memory only after `Ok`; after an error it still holds what it held, and
    /// must be kept.
    pub fn discard(&self, ranges: &[Range]) -> Result<(), DiscardError> {
        let _quiet = visit::enter();
        if ranges.is_empty() {
            return Ok(());
        }
        if ranges.len() > MAX_RANGES {
            let text = format!("{} ranges in one call; at most {MAX_RANGES} are allowed", ranges.len());
            return Err(DiscardError::Invalid(text));
        }
        {
            let table = lock(&self.shared.table);
            if let Some((hva, len)) = ranges.iter().find(|range| !table.allows(**range)) {
                let text = format!("{len} bytes at {hva} are not whole pages inside one RAM region");
                return Err(DiscardError::Invalid(text));
            }
        }
        let waiting_on =
            || announce("an engine took a discard and does not answer; the VMM thread waits on for safety");
        self.shared.control.discard(ranges.to_vec(), self.shared.timing.answer, waiting_on)
    }

    /// Which parts of `[hva, hva + len)` are announced RAM.
    pub fn overlap(&self, hva: Hva, len: u64) -> Vec<Range> {
        let _quiet = visit::enter();
        lock(&self.shared.table).overlap(hva, len)
    }

    /// Where `[offset, offset + len)` of a file is mapped as announced RAM.
    pub fn of_file(&self, file: FileId, offset: u64, len: u64) -> Vec<Range> {
        let _quiet = visit::enter();
        lock(&self.shared.table).of_file(file, offset, len)
    }

    /// These addresses are about to be unmapped or mapped over. Regions covered whole are removed as by
    /// [`Client::remove_region`]; a part of a region is never zapped again and so never reclaimed. What of it is far is brought
    /// back first, by touches of this thread: what is mapped there next may be the same RAM, and raises no faults.
    pub fn unmapping(&self, hva: Hva, len: u64) -> Result<(), RequestError> {
        let _quiet = visit::enter();
        let (whole, parts) = lock(&self.shared.table).unmapping(hva, len);
        for (hva, len) in parts {
            if populate((hva, len)).is_ok() {
                continue;
            }
            // A page that cannot be read (a memory error may be why it is mapped over) keeps none of the others away.
            for at in (hva.0..hva.0 + len).step_by(ballast_base::PAGE_SIZE) {
                let _ = populate((Hva(at), ballast_base::PAGE_SIZE as u64));
            }
        }
        whole.into_iter().map(|hva| self.remove_region(hva)).fold(Ok(()), Result::and)
    }
}

/// Touch every page of a range, so that none is far.
fn populate((hva, len): Range) -> std::io::Result<()> {
    let advice = rustix::mm::Advice::LinuxPopulateRead;
    // SAFETY: MADV_POPULATE_READ changes no bytes and frees nothing; an address that is unmapped meanwhile is an error, not
    // a fault.
    unsafe { rustix::mm::madvise(hva.0 as *mut std::ffi::c_void, len as usize, advice)? };
    Ok(())
}
