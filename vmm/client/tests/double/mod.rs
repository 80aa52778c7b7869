//! A scripted keeper and engine: the other side of the protocol, over real sockets, with the client's real userfaultfd.
//!
//! Each wait has a long timeout, so that a broken client fails a test instead of hanging it.
#![allow(dead_code, reason = "each test program uses a part of it")]

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use ballast_base::store::RAM_STORE;
use ballast_base::wire::{
    self, Attach, ClientToEngine, ClientToKeeper, EngineToClient, KeeperToClient, Range, StoreFiles, VmId,
};
use ballast_base::{Bytes, Hva, PAGE_SIZE};
use ballast_sys::uffd::{Fault, REQUIRED_FEATURES};
use ballast_sys::{Uffd, memfd, scm};
use ballast_testkit::missing;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// Longest wait for anything; only a broken client needs it.
pub const TIMEOUT: Timespec = Timespec { tv_sec: 60, tv_nsec: 0 };
pub const VM: VmId = VmId(*b"ballast-test-vm.");

pub fn wait_readable(fd: impl AsFd, what: &str) {
    let fd = fd.as_fd();
    loop {
        match rustix::event::poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)], Some(&TIMEOUT)) {
            Err(rustix::io::Errno::INTR) => {}
            Ok(0) => panic!("waited too long for {what}"),
            Ok(_) => return,
            Err(error) => panic!("poll: {error}"),
        }
    }
}

pub struct Keeper {
    _dir: Option<tempfile::TempDir>,
    pub path: PathBuf,
    listener: OwnedFd,
}

impl Keeper {
    /// `None`, with a printed skip, if this machine has no userfaultfd for the test.
    pub fn start() -> Option<Self> {
        let present = Uffd::create(REQUIRED_FEATURES).is_ok_and(|(_, granted)| granted == REQUIRED_FEATURES);
        if missing("uffd", (!present).then_some("no userfaultfd with shared-memory minor faults for this user")) {
            return None;
        }
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("attach.sock");
        Some(Self { listener: listen(&path), path, _dir: Some(dir) })
    }

    /// Closes the listener. The directory stays for the next keeper.
    pub fn die(self) -> (Option<tempfile::TempDir>, PathBuf) {
        std::fs::remove_file(&self.path).expect("unlink");
        (self._dir, self.path)
    }

    pub fn restart((dir, path): (Option<tempfile::TempDir>, PathBuf)) -> Self {
        Self { listener: listen(&path), path, _dir: dir }
    }

    pub fn connection(&self) -> OwnedFd {
        wait_readable(&self.listener, "a client");
        rustix::net::accept_with(&self.listener, SocketFlags::CLOEXEC).expect("accept")
    }

    /// The session of the next client, with its unanswered attach message.
    pub fn client(&self) -> Session {
        let socket = self.connection();
        let (message, fds) = receive(&socket);
        let ClientToKeeper::Attach(attach) = message else { panic!("{message:?} came first") };
        attach.validate().expect("a valid attach message");
        assert_eq!(fds.len(), attach.fd_count(), "descriptors beside the attach message");
        let mut fds = fds.into_iter();
        let uffd = Uffd::from(fds.next().expect("uffd"));
        let more_uffds = fds.by_ref().take(usize::from(attach.shards) - 1).map(Uffd::from).collect();
        let control = fds.next().expect("control");
        let ram = fds.by_ref().take(usize::from(attach.files)).collect();
        Session { socket, attach, uffd, more_uffds, control, ram, escrow: fds.collect() }
    }
}

fn listen(path: &Path) -> OwnedFd {
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
        .expect("socket");
    rustix::net::bind(&socket, &SocketAddrUnix::new(path).expect("address")).expect("bind");
    rustix::net::listen(&socket, 8).expect("listen");
    socket
}

/// Bytes that were sent on this socket and not read yet.
pub fn unread(socket: &OwnedFd) -> i32 {
    let mut bytes = 0;
    // SAFETY: this request writes one int, which is what it is given.
    let answer = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &mut bytes) };
    assert_eq!(answer, 0, "TIOCOUTQ");
    bytes
}

fn receive(socket: &OwnedFd) -> (ClientToKeeper, Vec<OwnedFd>) {
    wait_readable(socket, "a request");
    let received = scm::receive(socket).expect("receive").expect("the client hung up");
    (wire::decode(&received.bytes).expect("decode"), received.fds)
}

pub struct Session {
    pub socket: OwnedFd,
    pub attach: Attach,
    pub uffd: Uffd,
    pub more_uffds: Vec<Uffd>,
    pub control: OwnedFd,
    pub ram: Vec<OwnedFd>,
    pub escrow: Vec<OwnedFd>,
}

impl Session {
    /// Replies to the attach message with two new files. Returns their identities.
    pub fn accept(&self) -> Vec<memfd::FileId> {
        self.accept_with(&[(RAM_STORE, 1)])
    }

    /// Like `accept`, for the first process of the VM.
    pub fn accept_first(&self) {
        self.accept_as(&[(RAM_STORE, 1)], true);
    }

    /// Like `accept`, with files of these stores after the state file, given as store number and number of files.
    pub fn accept_with(&self, stores: &[(u8, u8)]) -> Vec<memfd::FileId> {
        self.accept_as(stores, false)
    }

    fn accept_as(&self, stores: &[(u8, u8)], is_first: bool) -> Vec<memfd::FileId> {
        let stores: Vec<_> = stores.iter().map(|(store, count)| StoreFiles { store: *store, count: *count }).collect();
        let files: Vec<_> =
            (0..1 + wire::count_files(&stores)).map(|_| memfd::create("escrow", Bytes(4096)).expect("memfd")).collect();
        let fds: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        self.answer_with(&KeeperToClient::Attached { vm: VM, stores, is_first }, &fds);
        files.iter().map(|file| memfd::file_id(file).expect("stat")).collect()
    }

    pub fn answer(&self, message: &KeeperToClient) {
        self.answer_with(message, &[]);
    }

    pub fn answer_with(&self, message: &KeeperToClient, fds: &[BorrowedFd<'_>]) {
        scm::send(&self.socket, &wire::encode(message), fds).expect("send");
    }

    pub fn request(&self) -> (ClientToKeeper, Vec<OwnedFd>) {
        receive(&self.socket)
    }

    pub fn tell(&self, message: &EngineToClient) {
        scm::send(&self.control, &wire::encode(message), &[]).expect("send");
    }

    pub fn hear(&self) -> ClientToEngine {
        wait_readable(&self.control, "a control message");
        let received = scm::receive(&self.control).expect("receive").expect("the client hung up");
        wire::decode(&received.bytes).expect("decode")
    }

    /// EINVAL also if a part of a range was not zapped.
    pub fn zap(&self, seq: u64, ranges: Vec<Range>) -> Option<i32> {
        let (error, kept) = self.zap_parts(seq, ranges);
        error.or((!kept.is_empty()).then_some(libc::EINVAL))
    }

    /// Zaps these ranges; also returns the parts that were not zapped.
    pub fn zap_parts(&self, seq: u64, ranges: Vec<Range>) -> (Option<i32>, Vec<Range>) {
        self.tell(&EngineToClient::Zap { seq, ranges });
        match self.hear() {
            ClientToEngine::Zapped { seq: answered, error, kept } if answered == seq => (error, kept),
            other => panic!("{other:?} instead of an answer to zap {seq}"),
        }
    }

    pub fn ping(&self, seq: u64) {
        self.tell(&EngineToClient::Ping { seq });
        assert_eq!(self.hear(), ClientToEngine::Pong { seq });
    }

    /// Confirms each discard until `until` returns true. Returns the ranges of the first one, if any.
    pub fn acknowledge_discards(&self, until: impl Fn() -> bool) -> Vec<Range> {
        self.answer_discards(until, None)
    }

    /// Replies to each discard with this error, or none, until `until` returns true.
    pub fn answer_discards(&self, until: impl Fn() -> bool, error: Option<&str>) -> Vec<Range> {
        let mut first = None;
        while !until() {
            let mut fds = [PollFd::new(&self.control, PollFlags::IN)];
            let short = Timespec { tv_sec: 0, tv_nsec: 5_000_000 };
            if rustix::event::poll(&mut fds, Some(&short)).is_ok_and(|ready| ready > 0) {
                let ClientToEngine::Discard { seq, ranges } = self.hear() else { panic!("not a discard") };
                first.get_or_insert(ranges);
                self.tell(&EngineToClient::DiscardDone { seq, error: error.map(str::to_owned) });
            }
        }
        first.unwrap_or_default()
    }

    pub fn next_fault(&self) -> Fault {
        let mut faults = Vec::new();
        loop {
            wait_readable(&self.uffd, "a fault");
            self.uffd.read_faults(&mut faults).expect("read");
            if let Some(fault) = faults.first() {
                return *fault;
            }
        }
    }

    pub fn register_all(&self) {
        for region in &self.attach.regions {
            self.uffd.register(region.span.hva, region.span.len.0).expect("register");
        }
    }

    pub fn whole(&self, region: usize) -> Range {
        let span = self.attach.regions[region].span;
        (span.hva, span.len.0)
    }
}

pub const fn pages(count: u64) -> u64 {
    count * PAGE_SIZE as u64
}

pub fn hva(address: usize) -> Hva {
    Hva(address as u64)
}
