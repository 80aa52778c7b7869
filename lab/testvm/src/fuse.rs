//! A small FUSE server, for tests of a file system that responds late or never.
//!
//! Before: a test needs a file whose disk, host or network hangs. After: [`Fuse::dir`] is a directory of files. Any
//! process with access to this one's `/proc/PID/fd` can open them. The server replies at once, after a delay, or when
//! the test calls [`Fuse::release`].
//! Threads: one reads requests, one sends the late replies. Callers may be any.
//! Units: bytes.
//! Promise: the mount is attached to no directory, so nothing remains, even when the test is killed. When the server
//! ends, the kernel ends every request with an error.
//!
//! Each file is backed by a memfd of the server. The first lookup of a name creates an empty file.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ballast_base::Bytes;
use ballast_sys::lock::Lock;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{FallocateFlags, Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags};

/// Requests of the FUSE protocol, from `linux/fuse.h`.
mod op {
    pub(super) const LOOKUP: u32 = 1;
    pub(super) const FORGET: u32 = 2;
    pub(super) const GETATTR: u32 = 3;
    pub(super) const SETATTR: u32 = 4;
    pub(super) const OPEN: u32 = 14;
    pub(super) const READ: u32 = 15;
    pub(super) const WRITE: u32 = 16;
    pub(super) const STATFS: u32 = 17;
    pub(super) const RELEASE: u32 = 18;
    pub(super) const FSYNC: u32 = 20;
    pub(super) const INIT: u32 = 26;
    pub(super) const OPENDIR: u32 = 27;
    pub(super) const RELEASEDIR: u32 = 29;
    pub(super) const ACCESS: u32 = 34;
    pub(super) const CREATE: u32 = 35;
    pub(super) const INTERRUPT: u32 = 36;
    pub(super) const BATCH_FORGET: u32 = 42;
    pub(super) const FALLOCATE: u32 = 43;
    pub(super) const TMPFILE: u32 = 51;
}

/// Length of the header of a request, in bytes.
const HEADER: usize = 40;
const MOST: u32 = 1 << 20;
const ROOT: u64 = 1;
/// Flags of the reply to `INIT`: `ASYNC_READ`, `BIG_WRITES`, `ASYNC_DIO`, `MAX_PAGES`.
const INIT_FLAGS: u32 = 1 | 1 << 5 | 1 << 15 | 1 << 22;
const MINUTE: Duration = Duration::from_secs(60);
/// Flag of the reply to an open: reads and writes bypass the page cache, also without `O_DIRECT`.
const DIRECT_IO: u32 = 1;
/// Flag of a `SETATTR` request: it changes the size.
const SET_SIZE: u32 = 1 << 3;

/// A file system that this process serves.
#[derive(Debug)]
pub struct Fuse {
    mount: OwnedFd,
    shared: Arc<Shared>,
    running: Mutex<Option<Running>>,
}

#[derive(Debug)]
struct Running {
    /// When it is closed, the thread that reads requests ends.
    stop: OwnedFd,
    threads: [JoinHandle<()>; 2],
}

/// Returns whether reads at this offset of a file fail.
type Fails = Box<dyn Fn(u64) -> bool + Send>;

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").finish_non_exhaustive()
    }
}

#[derive(Default)]
struct State {
    /// Files by node number. The root is not among them.
    files: HashMap<u64, std::fs::File>,
    names: HashMap<Vec<u8>, u64>,
    /// The reply to an open has [`DIRECT_IO`].
    direct: bool,
    /// The server sends no reply while this is set.
    held: bool,
    delay: Duration,
    /// Which reads fail, with `EIO`.
    fails: Option<Fails>,
    /// Requests that wait for a reply, in order of arrival, each with the earliest time of its reply.
    late: Vec<(Instant, Vec<u8>)>,
    reads: u64,
    over: bool,
}

impl Fuse {
    /// Mount the file system and start the server.
    pub fn serve() -> io::Result<Self> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let device = rustix::fs::open("/dev/fuse", flags, Mode::empty())?;
        let context = rustix::mount::fsopen("fuse", FsOpenFlags::FSOPEN_CLOEXEC)?;
        let number = device.as_raw_fd().to_string();
        let settings =
            [("source", "test"), ("fd", &number), ("rootmode", "40777"), ("user_id", "0"), ("group_id", "0")];
        for (name, value) in settings {
            rustix::mount::fsconfig_set_string(context.as_fd(), name, value)?;
        }
        rustix::mount::fsconfig_set_flag(context.as_fd(), "allow_other")?;
        rustix::mount::fsconfig_create(context.as_fd())?;
        // The mount is attached to no directory. It ends with this descriptor and the open files.
        let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
        let mount = rustix::mount::fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes)?;
        let shared = Arc::new(Shared { state: Mutex::default(), changed: Condvar::new() });
        let (stopped, stop) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        let server = Arc::new(Server { device, shared: shared.clone() });
        let taker = server.clone();
        let threads = [
            std::thread::Builder::new().name("fuse".into()).spawn(move || taker.take_requests(&stopped))?,
            std::thread::Builder::new().name("fuse-late".into()).spawn(move || server.answer_late())?,
        ];
        Ok(Self { mount, shared, running: Mutex::new(Some(Running { stop, threads })) })
    }

    /// Its root directory. Other processes can use this path, too.
    pub fn dir(&self) -> PathBuf {
        format!("/proc/{}/fd/{}", std::process::id(), self.mount.as_raw_fd()).into()
    }

    /// Set whether files that are opened from now on bypass the page cache, as with virtiofs, 9p or CIFS without a
    /// cache. Open files do not change. An open with `O_DIRECT` always bypasses it.
    pub fn set_direct(&self, direct: bool) {
        self.shared.lock().direct = direct;
    }

    /// Delay the reply to each read from now on.
    pub fn set_delay(&self, delay: Duration) {
        self.shared.lock().delay = delay;
    }

    /// From now on, a read fails if `fails` is true for the offset of one of its blocks of 4096 bytes.
    pub fn fail_reads(&self, fails: impl Fn(u64) -> bool + Send + 'static) {
        self.shared.lock().fails = Some(Box::new(fails));
    }

    /// Hold every reply from now on.
    pub fn hold(&self) {
        self.shared.lock().held = true;
    }

    /// Holds every reply until the returned value is dropped, so that the processes of a failed test can end.
    pub fn hold_on(&self) -> Held<'_> {
        self.hold();
        Held(self)
    }

    /// Reply to the held requests, and to all later ones.
    pub fn release(&self) {
        self.shared.lock().held = false;
        self.shared.changed.notify_all();
    }

    /// Wait until at least `least` reads wait for their replies.
    pub fn wait_for_held(&self, least: usize) {
        let reads = |state: &State| state.late.iter().filter(|(_, request)| u32_at(request, 4) == op::READ).count();
        let missing = |state: &mut State| reads(state) < least;
        let waited = self.shared.changed.wait_timeout_while(self.shared.lock(), MINUTE, missing);
        let (state, result) = waited.unwrap_or_else(PoisonError::into_inner);
        let held = reads(&state);
        drop(state);
        assert!(!result.timed_out(), "{held} reads are held, not {least}");
    }

    /// The number of reads received so far.
    pub fn reads(&self) -> u64 {
        self.shared.lock().reads
    }

    /// Stop the server. The kernel ends unanswered and later requests with an error.
    pub fn end(&self) {
        let Some(Running { stop, threads }) = self.running.locked().take() else {
            return;
        };
        self.shared.lock().over = true;
        self.shared.changed.notify_all();
        drop(stop);
        for thread in threads {
            // The device is closed when both threads have ended.
            let _ = thread.join();
        }
    }
}

impl Drop for Fuse {
    fn drop(&mut self) {
        self.end();
    }
}

/// See [`Fuse::hold_on`].
#[derive(Debug)]
#[must_use = "the server replies again when this is dropped"]
pub struct Held<'a>(&'a Fuse);

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.release();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.locked()
    }
}

struct Server {
    device: OwnedFd,
    shared: Arc<Shared>,
}

impl Server {
    fn take_requests(&self, stopped: &OwnedFd) {
        let mut buffer = vec![0; MOST as usize + 8192];
        loop {
            let mut fds = [PollFd::new(&self.device, PollFlags::IN), PollFd::new(stopped, PollFlags::IN)];
            match poll(&mut fds, None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(_) => return,
            }
            if !fds[1].revents().is_empty() {
                return;
            }
            match rustix::io::read(&self.device, &mut buffer) {
                Ok(len) => self.take(&buffer[..len]),
                // The kernel returns ENOENT if a request was aborted before it was read.
                Err(Errno::INTR | Errno::NOENT | Errno::AGAIN) => {}
                Err(_) => return,
            }
        }
    }

    fn take(&self, request: &[u8]) {
        let mut state = self.shared.lock();
        let opcode = u32_at(request, 4);
        let mut due = Instant::now();
        if opcode == op::READ {
            state.reads += 1;
            due += state.delay;
        }
        let waits = state.held || (opcode == op::READ && !state.delay.is_zero());
        if waits && opcode != op::INIT {
            state.late.push((due, request.to_vec()));
            self.shared.changed.notify_all();
        } else {
            self.answer(&mut state, request);
        }
    }

    fn answer_late(&self) {
        let mut state = self.shared.lock();
        while !state.over {
            let now = Instant::now();
            let next = state.late.iter().map(|(due, _)| *due).min().filter(|_| !state.held);
            match next {
                Some(due) if due <= now => {
                    let at = state.late.iter().position(|(other, _)| *other == due).unwrap_or_default();
                    let (_, request) = state.late.remove(at);
                    self.answer(&mut state, &request);
                }
                Some(due) => {
                    let waited = self.shared.changed.wait_timeout(state, due - now);
                    state = waited.unwrap_or_else(PoisonError::into_inner).0;
                }
                None => state = self.shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    fn answer(&self, state: &mut State, request: &[u8]) {
        let (opcode, unique) = (u32_at(request, 4), u64_at(request, 8));
        if matches!(opcode, op::FORGET | op::BATCH_FORGET | op::INTERRUPT) {
            return;
        }
        let result = state.carry_out(opcode, u64_at(request, 16), &request[HEADER..]);
        let (error, body) = match result {
            Ok(body) => (0, body.0),
            Err(errno) => (-errno.raw_os_error(), Vec::new()),
        };
        let reply = Body::default().u32(16 + body.len() as u32).u32(error as u32).u64(unique).bytes(&body);
        // The write fails if the request was aborted meanwhile.
        let _ = rustix::io::write(&self.device, &reply.0);
    }
}

impl State {
    /// Carry out a request about `node`. Returns the body of the reply.
    fn carry_out(&mut self, opcode: u32, node: u64, arg: &[u8]) -> Result<Body, Errno> {
        let file = self.files.get(&node);
        match opcode {
            op::INIT => {
                let readahead = u32_at(arg, 8);
                let body = Body::default().u32(7).u32(31).u32(readahead).u32(INIT_FLAGS & u32_at(arg, 12));
                let (background, congestion, max_pages) = (64, 48, MOST >> 12);
                Ok(body.u32(background | congestion << 16).u32(MOST).u32(1).u32(max_pages).bytes(&[0; 32]))
            }
            op::LOOKUP => {
                let node = self.named(arg)?;
                self.entry(node)
            }
            op::CREATE => {
                let node = self.named(&arg[16..])?;
                Ok(self.entry(node)?.bytes(&self.opened(arg).0))
            }
            op::TMPFILE => {
                let node = self.make()?;
                Ok(self.entry(node)?.bytes(&self.opened(arg).0))
            }
            op::GETATTR => self.attributes(node),
            op::SETATTR => {
                let size = (u32_at(arg, 0) & SET_SIZE != 0).then(|| u64_at(arg, 16));
                if let (Some(size), Some(file)) = (size, file) {
                    file.set_len(size).map_err(errno_of)?;
                }
                self.attributes(node)
            }
            op::OPEN => file.map(|_| self.opened(arg)).ok_or(Errno::ISDIR),
            op::READ => {
                let (offset, len) = (u64_at(arg, 8), u32_at(arg, 16).min(MOST));
                let mut blocks = (offset..offset + u64::from(len)).step_by(4096);
                if self.fails.as_ref().is_some_and(|fails| blocks.any(fails)) {
                    return Err(Errno::IO);
                }
                let mut bytes = vec![0; len as usize];
                let read = file.ok_or(Errno::ISDIR)?.read_at(&mut bytes, offset).map_err(errno_of)?;
                Ok(Body(bytes[..read].to_vec()))
            }
            op::WRITE => {
                let (offset, bytes) = (u64_at(arg, 8), &arg[40..]);
                file.ok_or(Errno::ISDIR)?.write_all_at(bytes, offset).map_err(errno_of)?;
                Ok(Body::default().u32(bytes.len() as u32).u32(0))
            }
            op::FALLOCATE => {
                let flags = FallocateFlags::from_bits_retain(u32_at(arg, 24));
                rustix::fs::fallocate(file.ok_or(Errno::ISDIR)?, flags, u64_at(arg, 8), u64_at(arg, 16))?;
                Ok(Body::default())
            }
            op::STATFS => {
                let (blocks, free) = (1 << 30, 1 << 29);
                let body = Body::default().u64(blocks).u64(free).u64(free).u64(free).u64(free);
                Ok(body.u32(4096).u32(255).u32(4096).bytes(&[0; 28]))
            }
            op::OPENDIR => Ok(Body::default().bytes(&[0; 16])),
            op::RELEASE | op::RELEASEDIR | op::FSYNC | op::ACCESS => Ok(Body::default()),
            // FLUSH is refused, too, because a disk does not have it: the kernel then sends no other.
            _ => Err(Errno::NOSYS),
        }
    }

    fn opened(&self, arg: &[u8]) -> Body {
        let direct = self.direct || u32_at(arg, 0) & OFlags::DIRECT.bits() != 0;
        Body::default().u64(0).u32(if direct { DIRECT_IO } else { 0 }).u32(0)
    }

    /// Returns the node of a name, and creates the file if needed. A zero byte ends the name.
    fn named(&mut self, name: &[u8]) -> Result<u64, Errno> {
        let name = name.split(|byte| *byte == 0).next().unwrap_or_default().to_vec();
        if let Some(node) = self.names.get(&name) {
            return Ok(*node);
        }
        let node = self.make()?;
        self.names.insert(name, node);
        Ok(node)
    }

    fn make(&mut self) -> Result<u64, Errno> {
        let node = ROOT + 1 + self.files.len() as u64;
        let memory = ballast_sys::memfd::create("fuse", Bytes(0)).map_err(errno_of)?;
        self.files.insert(node, memory.into());
        Ok(node)
    }

    fn entry(&self, node: u64) -> Result<Body, Errno> {
        let valid_s = 1000;
        let body = Body::default().u64(node).u64(0).u64(valid_s).u64(valid_s).u64(0);
        Ok(body.bytes(&self.attributes_of(node)?.0))
    }

    fn attributes(&self, node: u64) -> Result<Body, Errno> {
        // The attributes must not be cached: the blocks of a file change when it is written.
        Ok(Body::default().u64(0).u64(0).bytes(&self.attributes_of(node)?.0))
    }

    fn attributes_of(&self, node: u64) -> Result<Body, Errno> {
        let (size, blocks, mode) = match self.files.get(&node) {
            Some(file) => {
                let stat = rustix::fs::fstat(file)?;
                (stat.st_size as u64, stat.st_blocks as u64, 0o100_600)
            }
            None if node == ROOT => (0, 0, 0o040_777),
            None => return Err(Errno::NOENT),
        };
        let (links, block) = (1, 4096);
        let times = Body::default().u64(node).u64(size).u64(blocks).bytes(&[0; 36]);
        Ok(times.u32(mode).u32(links).u32(0).u32(0).u32(0).u32(block).u32(0))
    }
}

fn errno_of(error: io::Error) -> Errno {
    Errno::from_io_error(&error).unwrap_or(Errno::IO)
}

#[derive(Debug, Default)]
struct Body(Vec<u8>);

impl Body {
    fn u32(self, value: u32) -> Self {
        self.bytes(&value.to_ne_bytes())
    }

    fn u64(self, value: u64) -> Self {
        self.bytes(&value.to_ne_bytes())
    }

    fn bytes(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self
    }
}

/// Returns a field of a request, or zero if the request is too short.
fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).map_or(0, |field| u32::from_ne_bytes(*field))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).map_or(0, |field| u64::from_ne_bytes(*field))
}
