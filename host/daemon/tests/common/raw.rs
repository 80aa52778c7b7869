//! A client that speaks the attach protocol by hand, message by message.

use std::fs::File;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use ballast_base::wire::{self, Attach, ClientToKeeper, KeeperToClient, RegionInfo, Span, StoreFiles, VmId};
use ballast_base::{Bytes, Hva, PAGE_SIZE};
use ballast_client::Builder;
use ballast_sys::uffd::REQUIRED_FEATURES;
use ballast_sys::{Mapping, Uffd, memfd, scm};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::{Daemon, missing};

/// Longer than any test needs to wait: a daemon that hangs fails the test.
const TIMEOUT: Timespec = Timespec { tv_sec: 60, tv_nsec: 0 };

/// Whether userfaultfd is missing; prints the reason.
pub fn no_uffd() -> bool {
    let refused = Uffd::create(REQUIRED_FEATURES).err();
    missing("uffd", refused.map(|error| format!("no userfaultfd with shared-memory minor faults: {error}")))
}

pub fn userfaultfd() -> Uffd {
    Uffd::create(REQUIRED_FEATURES).expect("userfaultfd").0
}

pub struct Ram {
    pub fd: OwnedFd,
    pub map: ManuallyDrop<Mapping>,
    /// Whether the client library has it: then the library zaps pages at these addresses as long as this process lives,
    /// whatever is mapped there.
    is_announced: AtomicBool,
}

impl Drop for Ram {
    fn drop(&mut self) {
        if !*self.is_announced.get_mut() {
            // SAFETY: nothing uses it after this.
            unsafe { ManuallyDrop::drop(&mut self.map) };
        }
    }
}

impl Ram {
    pub fn new(pages: u64) -> Self {
        let fd = memfd::create("guest-ram", Bytes(pages * 4096)).expect("memfd");
        Self::of(fd)
    }

    pub fn of(fd: OwnedFd) -> Self {
        let len = memfd::size(&fd).expect("stat").0;
        let map = Mapping::shared(&fd, 0, len as usize).expect("map");
        Self::mapped(fd, map)
    }

    /// RAM that is already mapped, from this file among others.
    pub fn mapped(fd: OwnedFd, map: Mapping) -> Self {
        Self { map: ManuallyDrop::new(map), fd, is_announced: AtomicBool::new(false) }
    }

    /// Unmaps it without telling the client.
    pub fn unmap(mut self) {
        *self.is_announced.get_mut() = false;
    }

    /// Notes that the client library of this process is about to have it.
    pub fn announce(&self) {
        self.is_announced.store(true, Ordering::Relaxed);
    }

    pub fn info(&self) -> RegionInfo {
        let len = memfd::size(&self.fd).expect("stat");
        RegionInfo::one(Hva(self.map.addr() as u64), len, Bytes(0))
    }

    fn word(&self, page: u64) -> &AtomicU64 {
        &self.map.words(page as usize * PAGE_SIZE, 1)[0]
    }

    pub fn set(&self, page: u64, value: u64) {
        self.word(page).store(value, Ordering::Relaxed);
    }

    pub fn get(&self, page: u64) -> u64 {
        self.word(page).load(Ordering::Relaxed)
    }

    pub fn mark(&self) {
        for page in 0..self.map.len() as u64 / PAGE_SIZE as u64 {
            self.word(page).store(mark(page), Ordering::Relaxed);
        }
    }

    /// Whether the page has the word of [`Ram::mark`]. Touches the page.
    pub fn is_marked(&self, page: u64) -> bool {
        self.word(page).load(Ordering::Relaxed) == mark(page)
    }

    /// The number of these pages that are memory errors; all others must have the word of [`Ram::mark`]. A system call
    /// reads the pages.
    pub fn lost(&self, pages: impl Iterator<Item = u64>) -> u64 {
        let sink = File::from(memfd::create("sink", Bytes(0)).expect("memfd"));
        let mut lost = 0;
        for page in pages {
            let end = sink.metadata().expect("stat").len();
            if self.map.send_to(&sink, page as usize * PAGE_SIZE, 8).is_err() {
                lost += 1;
                continue;
            }
            let mut word = [0; 8];
            sink.read_exact_at(&mut word, end).expect("read");
            assert_eq!(u64::from_le_bytes(word), mark(page), "page {page} has wrong bytes");
        }
        lost
    }

    pub fn vm(&self, daemon: &Daemon, name: &str) -> Builder {
        self.join(ballast_client::Client::builder().name(name).socket(daemon.attach_socket()))
    }

    pub fn join(&self, vm: Builder) -> Builder {
        self.announce();
        let Span { hva, len } = self.info().span;
        vm.region(self.fd.try_clone().expect("dup"), hva, len, Bytes(0))
    }
}

fn mark(page: u64) -> u64 {
    page * 7919 + 1
}

pub fn files(pid: u32, name: &str) -> Vec<String> {
    let mut found: Vec<(u32, String)> = std::fs::read_dir(format!("/proc/{pid}/fd"))
        .expect("descriptors")
        .filter_map(|entry| {
            let path = entry.ok()?.path();
            let target = std::fs::read_link(&path).ok()?;
            let number = path.file_name()?.to_str()?.parse().ok()?;
            target.to_str()?.contains(name).then(|| (number, path.to_str().expect("ascii").to_owned()))
        })
        .collect();
    found.sort();
    found.into_iter().map(|(_, path)| path).collect()
}

pub fn open(path: &str) -> File {
    File::options().read(true).write(true).open(path).expect("open the file again")
}

pub struct RawClient {
    path: PathBuf,
    name: String,
    pub uffds: Vec<Uffd>,
    control: (OwnedFd, OwnedFd),
    socket: Option<OwnedFd>,
    /// After an attach: the VM, the counts of its store files, and descriptors of its state file and its stores.
    pub escrow: Option<(VmId, Vec<StoreFiles>, Vec<OwnedFd>)>,
}

impl RawClient {
    pub fn new(path: &Path, name: &str) -> Self {
        let uffds = vec![userfaultfd()];
        let control = scm::pair().expect("control sockets");
        Self { path: path.to_owned(), name: name.to_owned(), uffds, control, socket: None, escrow: None }
    }

    /// The message that attaches with this RAM, one file per region; it resumes if the client was attached before.
    pub fn message(&self, regions: Vec<RegionInfo>) -> Attach {
        let files = regions.len();
        let numbered = regions.into_iter().zip(0..).map(|(mut region, file)| {
            region.extents.iter_mut().for_each(|extent| extent.file = file);
            region
        });
        Attach {
            name: self.name.clone(),
            uuid: None,
            limit: None,
            vmm: "raw".into(),
            uffd_features: REQUIRED_FEATURES,
            shards: self.uffds.len() as u8,
            files: files as u8,
            pinned: None,
            may_pin: false,
            regions: numbered.collect(),
            resume: self.escrow.as_ref().map(|(vm, ..)| *vm),
            stores: self.escrow.as_ref().map_or_else(Vec::new, |(_, stores, _)| stores.clone()),
        }
    }

    pub fn descriptors<'a>(&'a self, ram: &[&'a Ram]) -> Vec<BorrowedFd<'a>> {
        let mut fds: Vec<_> = self.uffds.iter().map(AsFd::as_fd).chain([self.control.1.as_fd()]).collect();
        fds.extend(ram.iter().map(|ram| ram.fd.as_fd()));
        fds.extend(self.escrow.iter().flat_map(|(.., files)| files).map(AsFd::as_fd));
        fds
    }

    /// Attaches or resumes with this RAM. Returns the keeper's answer; `None` if nothing listens or the keeper hung up.
    pub fn attach(&mut self, ram: &[&Ram]) -> Option<KeeperToClient> {
        loop {
            let socket = self.ask_to_attach(ram)?;
            let answer = self.hear_of_attach(socket);
            // A returning VM is told to repeat its request until the keeper's engine serves.
            if self.escrow.is_none() || !matches!(answer, Some(KeeperToClient::Later(_))) {
                return answer;
            }
            std::thread::yield_now();
        }
    }

    /// Sends the request of [`Self::attach`].
    pub fn ask_to_attach(&self, ram: &[&Ram]) -> Option<OwnedFd> {
        self.ask_to_attach_at(ram.iter().map(|ram| ram.info()).collect(), ram)
    }

    /// Sends a request with these descriptions of the RAM.
    pub fn ask_to_attach_at(&self, regions: Vec<RegionInfo>, ram: &[&Ram]) -> Option<OwnedFd> {
        let socket = connect(&self.path)?;
        let message = self.message(regions);
        let bytes = wire::encode(&ClientToKeeper::Attach(message));
        scm::send(&socket, &bytes, &self.descriptors(ram)).ok()?;
        Some(socket)
    }

    pub fn hear_of_attach(&mut self, socket: OwnedFd) -> Option<KeeperToClient> {
        let (answer, fds) = hear(&socket)?;
        if let KeeperToClient::Attached { vm, stores, .. } = &answer {
            self.socket = Some(socket);
            self.escrow = Some((*vm, stores.clone(), fds));
        }
        Some(answer)
    }

    pub fn ask(&self, message: &ClientToKeeper, fds: &[BorrowedFd<'_>]) -> Option<KeeperToClient> {
        let socket = self.socket.as_ref().expect("attached");
        scm::send(socket, &wire::encode(message), fds).ok()?;
        self.hear()
    }

    pub fn send(&self, message: &ClientToKeeper) {
        scm::send(self.socket.as_ref().expect("attached"), &wire::encode(message), &[]).expect("send");
    }

    pub fn hear(&self) -> Option<KeeperToClient> {
        hear(self.socket.as_ref().expect("attached")).map(|(answer, _)| answer)
    }

    /// Hangs up. The escrow stays, for a resume.
    pub fn hang_up(&mut self) {
        self.socket = None;
    }
}

pub fn connect(path: &Path) -> Option<OwnedFd> {
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).ok()?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path).expect("address")).ok()?;
    Some(socket)
}

pub fn hear(socket: &OwnedFd) -> Option<(KeeperToClient, Vec<OwnedFd>)> {
    let mut fds = [PollFd::new(socket, PollFlags::IN)];
    let ready = poll(&mut fds, Some(&TIMEOUT)).expect("poll");
    assert_eq!(ready, 1, "no answer from the keeper");
    let received = scm::receive(socket).ok()??;
    Some((wire::decode(&received.bytes).expect("a message"), received.fds))
}
