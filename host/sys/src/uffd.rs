//! userfaultfd: a thin layer that turns errno values into outcomes.
//!
//! Before: a client creates the descriptor over its own address space and passes it on. After: the engine registers
//! ranges, reads faults and resolves them, from another process.
//! Threads: any; the kernel serialises calls. Units: addresses are in the process that created the descriptor.
//! Promise: `EEXIST`, `ENOENT`, `EAGAIN`, `ESRCH` are outcomes. `UFFDIO_COPY`'s byte count stays signed until it has
//! been checked, because kernels from about 6.15 on report a zero-progress `EAGAIN` differently.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

pub use ballast_base::fill::{FaultKind, FillOutcome};
use ballast_base::{HUGE_SIZE, Hva, PAGE_SIZE};

mod abi;

use abi::{
    ApiArg, CopyArg, EVENT_PAGEFAULT, FillArg, PAGEFAULT_FLAG_MINOR, REGISTER_MODE_MINOR, REGISTER_MODE_MISSING,
    RangeArg, RawMessage, RegisterArg, UFFD_API, UFFDIO_API, UFFDIO_CONTINUE, UFFDIO_COPY, UFFDIO_POISON,
    UFFDIO_REGISTER, UFFDIO_UNREGISTER, UFFDIO_WAKE, UFFDIO_ZEROPAGE,
};

/// Feature bits of `UFFDIO_API` that Ballast asks about.
pub mod feature {
    /// Missing faults on huge-page files (Linux 4.11).
    pub const MISSING_HUGETLBFS: u64 = 1 << 4;
    /// Missing faults on shared memory (4.11).
    pub const MISSING_SHMEM: u64 = 1 << 5;
    /// The fault message names the faulting thread (4.14).
    pub const THREAD_ID: u64 = 1 << 8;
    /// Minor faults on huge-page files (5.13).
    pub const MINOR_HUGETLBFS: u64 = 1 << 9;
    /// Minor faults on shared memory (5.14).
    pub const MINOR_SHMEM: u64 = 1 << 10;
    /// `UFFDIO_POISON` (6.6).
    pub const POISON: u64 = 1 << 14;
}

/// Features without which Ballast cannot manage a VM.
pub const REQUIRED_FEATURES: u64 = feature::MISSING_SHMEM | feature::THREAD_ID | feature::MINOR_SHMEM;

/// Features that a VM on huge-page files also needs.
pub const HUGETLB_FEATURES: u64 = feature::MISSING_HUGETLBFS | feature::MINOR_HUGETLBFS;

/// Most faults in one read: 64 messages of 32 bytes are 2 KiB of stack.
pub const READ_AT_ONCE: usize = 64;

/// One fault.
#[derive(Clone, Copy, Debug)]
pub struct Fault {
    /// Start of the page that was touched.
    pub addr: Hva,
    /// The kind of the fault when the kernel raised it; the page may have changed since.
    pub kind: FaultKind,
    /// The thread that waits.
    pub thread: u32,
}

/// A userfaultfd. Non-blocking, close-on-exec.
#[derive(Debug)]
pub struct Uffd(File);

impl Uffd {
    /// Create a userfaultfd over the calling process with `features`. Returns the descriptor and the features granted.
    ///
    /// Tries `/dev/userfaultfd` first (access by file permission, Linux 6.1), then the system call, which needs
    /// `CAP_SYS_PTRACE` or the `vm.unprivileged_userfaultfd` setting to serve faults raised inside the kernel.
    pub fn create(features: u64) -> io::Result<(Self, u64)> {
        Self::enabled(features, || -> io::Result<Self> {
            if let Ok(device) = Self::device()
                && let Ok(made) = Self::of_device(device.as_fd())
            {
                return Ok(made);
            }
            // SAFETY: a system call with a flags argument only.
            let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK) };
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
            // SAFETY: the kernel just gave us this descriptor; it has no other owner. Descriptors fit an int.
            Ok(Self(unsafe { File::from_raw_fd(fd as i32) }))
        })
    }

    /// As [`Self::create`], with an open device, from a process that may open it. The kernel checks permission when the
    /// device is opened; the address space is that of the process that makes the userfaultfd.
    pub fn create_by(device: BorrowedFd<'_>, features: u64) -> io::Result<(Self, u64)> {
        Self::enabled(features, || Self::of_device(device))
    }

    /// Open `/dev/userfaultfd`.
    pub fn device() -> io::Result<File> {
        File::options().read(true).write(true).open("/dev/userfaultfd")
    }

    fn of_device(device: BorrowedFd<'_>) -> io::Result<Self> {
        const USERFAULTFD_IOC_NEW: u64 = 0xAA00;
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
        // SAFETY: this request takes its flags by value and writes no memory.
        let fd = unsafe { libc::ioctl(device.as_raw_fd(), USERFAULTFD_IOC_NEW, flags) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel just gave us this descriptor; it has no other owner.
        Ok(Self(unsafe { File::from_raw_fd(fd) }))
    }

    /// A new userfaultfd with those of these features that the kernel offers.
    fn enabled(features: u64, open: impl Fn() -> io::Result<Self>) -> io::Result<(Self, u64)> {
        // The first API call on a descriptor is final, so the features are queried on another descriptor.
        let probe = open()?;
        let mut arg = ApiArg { api: UFFD_API, features: 0, ioctls: 0 };
        probe.ioctl(UFFDIO_API, &mut arg)?;
        let granted = arg.features & features;
        let uffd = open()?;
        let mut arg = ApiArg { api: UFFD_API, features: granted, ioctls: 0 };
        uffd.ioctl(UFFDIO_API, &mut arg)?;
        Ok((uffd, granted))
    }

    /// Every feature bit this kernel knows.
    pub fn probe_features() -> io::Result<u64> {
        Ok(Self::create(u64::MAX)?.1)
    }

    fn ioctl<T>(&self, request: u64, arg: &mut T) -> io::Result<()> {
        // SAFETY: every request constant of `abi` encodes the size of the struct it is called with (asserted at compile
        // time), `arg` is alive and exclusively ours, and the kernel writes within it only.
        let answer = unsafe { libc::ioctl(self.0.as_raw_fd(), request, arg) };
        if answer < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Register a range for missing and minor faults. Registering a registered range again is allowed.
    pub fn register(&self, start: Hva, len: u64) -> io::Result<()> {
        let mode = REGISTER_MODE_MISSING | REGISTER_MODE_MINOR;
        let mut arg = RegisterArg { range: RangeArg { start: start.0, len }, mode, ioctls: 0 };
        self.ioctl(UFFDIO_REGISTER, &mut arg)
    }

    /// Unregister a range and wake its waiters: the kernel serves its faults again, holes as zeros.
    pub fn unregister(&self, start: Hva, len: u64) -> io::Result<()> {
        let answer = self.ioctl(UFFDIO_UNREGISTER, &mut RangeArg { start: start.0, len });
        // The kernel first wakes the waiters and then unregisters, and no lock excludes a fault in between (Linux 6.6
        // to 7.3 at least). Without this call nothing would ever wake the thread of such a fault: its page cannot be
        // mapped through this descriptor any more.
        answer.and(self.wake(start, len))
    }

    /// Wake the threads that wait in a range; they repeat the access and may fault again.
    pub fn wake(&self, start: Hva, len: u64) -> io::Result<()> {
        self.ioctl(UFFDIO_WAKE, &mut RangeArg { start: start.0, len })
    }

    /// Put `bytes` into the file at this hole and map the page, in one step; wake the waiters. It is one page of the
    /// file's page size: a base page, or a huge page.
    pub fn copy(&self, dst: Hva, bytes: &[u8]) -> io::Result<FillOutcome> {
        let mut arg = CopyArg { dst: dst.0, src: bytes.as_ptr() as u64, len: bytes.len() as u64, mode: 0, copied: 0 };
        let answer = self.ioctl(UFFDIO_COPY, &mut arg);
        outcome(answer, arg.copied)
    }

    /// Put several base pages into the file at this hole and map them; wake the waiters. Returns how many were put,
    /// from the first on, and the next one's outcome: `Retry` means to continue there, `Done` that there is none.
    pub fn copy_pages(&self, dst: Hva, pages: &[[u8; PAGE_SIZE]]) -> io::Result<(usize, FillOutcome)> {
        let len = size_of_val(pages) as u64;
        let mut arg = CopyArg { dst: dst.0, src: pages.as_ptr() as u64, len, mode: 0, copied: 0 };
        let answer = self.ioctl(UFFDIO_COPY, &mut arg);
        if answer.is_ok() {
            return Ok((pages.len(), FillOutcome::Done));
        }
        // The bytes that were put, or the outcome of the first page.
        let put = usize::try_from(arg.copied).unwrap_or(0) / PAGE_SIZE;
        if put > 0 { Ok((put, FillOutcome::Retry)) } else { Ok((0, outcome(answer, arg.copied)?)) }
    }

    /// Put a huge page of zeros into the file at this hole and map it; wake the waiters.
    pub fn zero_huge_page(&self, dst: Hva) -> io::Result<FillOutcome> {
        /// The kernel has no zero page for hugetlbfs. This static is never written, so it occupies no memory. It
        /// consists of atomics, because a constant would be 2 MiB of the program's file.
        static ZEROS: [AtomicU64; HUGE_SIZE / 8] = [const { AtomicU64::new(0) }; HUGE_SIZE / 8];
        let mut arg = CopyArg { dst: dst.0, src: ZEROS.as_ptr() as u64, len: HUGE_SIZE as u64, mode: 0, copied: 0 };
        let answer = self.ioctl(UFFDIO_COPY, &mut arg);
        outcome(answer, arg.copied)
    }

    /// Put a page of zeros into the file at this hole and map it; wake the waiters.
    pub fn zero_page(&self, dst: Hva) -> io::Result<FillOutcome> {
        self.fill(UFFDIO_ZEROPAGE, dst, PAGE_SIZE as u64)
    }

    /// Put pages of zeros at this hole, until a page is there already. Returns how many were filled, from the first on.
    pub fn zero_pages(&self, dst: Hva, pages: u64) -> io::Result<u64> {
        let len = pages * PAGE_SIZE as u64;
        let mut arg = FillArg { range: RangeArg { start: dst.0, len }, mode: 0, done: 0 };
        let answer = self.ioctl(UFFDIO_ZEROPAGE, &mut arg);
        let filled = u64::try_from(arg.done).unwrap_or(0) / PAGE_SIZE as u64;
        if answer.is_err() && filled == 0 {
            outcome(answer, arg.done)?;
        }
        Ok(filled)
    }

    /// Map pages that are in the file; wake the waiters.
    pub fn map_existing(&self, dst: Hva, len: u64) -> io::Result<FillOutcome> {
        self.fill(UFFDIO_CONTINUE, dst, len)
    }

    /// Map the base pages of a range that are in the file; wake the waiters. Returns how many were mapped, from the
    /// first on, and the outcome of the one after them: `Retry` means to continue there, `Done` that there is none.
    pub fn map_run(&self, dst: Hva, pages: u64) -> io::Result<(u64, FillOutcome)> {
        let len = pages * PAGE_SIZE as u64;
        let mut arg = FillArg { range: RangeArg { start: dst.0, len }, mode: 0, done: 0 };
        let answer = self.ioctl(UFFDIO_CONTINUE, &mut arg);
        if answer.is_ok() {
            return Ok((pages, FillOutcome::Done));
        }
        // The bytes that were mapped, or the outcome of the first page.
        let mapped = u64::try_from(arg.done).unwrap_or(0) / PAGE_SIZE as u64;
        if mapped > 0 { Ok((mapped, FillOutcome::Retry)) } else { Ok((0, outcome(answer, arg.done)?)) }
    }

    /// Make touches of these pages a memory error (Linux 6.6).
    pub fn poison(&self, dst: Hva, len: u64) -> io::Result<FillOutcome> {
        self.fill(UFFDIO_POISON, dst, len)
    }

    fn fill(&self, request: u64, dst: Hva, len: u64) -> io::Result<FillOutcome> {
        let mut arg = FillArg { range: RangeArg { start: dst.0, len }, mode: 0, done: 0 };
        let answer = self.ioctl(request, &mut arg);
        outcome(answer, arg.done)
    }

    /// Read the faults that are waiting, at most [`READ_AT_ONCE`], into `out`, which is empty if none waits.
    pub fn read_faults(&self, out: &mut Vec<Fault>) -> io::Result<()> {
        out.clear();
        let empty = RawMessage {
            event: 0,
            reserved1: 0,
            reserved2: 0,
            reserved3: 0,
            flags: 0,
            address: 0,
            thread: 0,
            padding: 0,
        };
        let mut raw = [empty; READ_AT_ONCE];
        let read = match self.read_now(&mut raw) {
            Ok(read) => read,
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        out.extend(raw[..read / size_of::<RawMessage>()].iter().filter(|m| m.event == EVENT_PAGEFAULT).map(|m| {
            Fault {
                addr: Hva(m.address).page_start(),
                kind: if m.flags & PAGEFAULT_FLAG_MINOR != 0 { FaultKind::Minor } else { FaultKind::Missing },
                thread: m.thread,
            }
        }));
        Ok(())
    }

    /// Read without waiting, whatever `O_NONBLOCK` says: that is a flag of the open file, which the VMM shares and may
    /// clear. Linux before 6.10 supports no such read of a userfaultfd; there the flag decides.
    fn read_now(&self, raw: &mut [RawMessage; READ_AT_ONCE]) -> io::Result<usize> {
        static KNOWS_NOWAIT: AtomicBool = AtomicBool::new(true);
        let (fd, len) = (self.0.as_raw_fd(), size_of_val(raw));
        let vector = libc::iovec { iov_base: raw.as_mut_ptr().cast(), iov_len: len };
        if KNOWS_NOWAIT.load(Ordering::Relaxed) {
            // SAFETY: the buffer is ours and as long as stated; the kernel fills it with whole messages, which are
            // plain integers, so any bytes are a valid value. It reads the vector for the length of the call.
            let read = unsafe { libc::preadv2(fd, &raw const vector, 1, -1, libc::RWF_NOWAIT) };
            match usize::try_from(read) {
                Ok(read) => return Ok(read),
                Err(_) => {
                    let error = io::Error::last_os_error();
                    let unknown = [libc::EOPNOTSUPP, libc::ENOSYS, libc::ESPIPE];
                    if !error.raw_os_error().is_some_and(|errno| unknown.contains(&errno)) {
                        return Err(error);
                    }
                    KNOWS_NOWAIT.store(false, Ordering::Relaxed);
                }
            }
        }
        // SAFETY: as above.
        let read = unsafe { libc::read(fd, raw.as_mut_ptr().cast(), len) };
        usize::try_from(read).map_err(|_| io::Error::last_os_error())
    }

    /// Number of threads that wait for faults that a process has read.
    pub fn unanswered(&self) -> io::Result<u64> {
        let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", self.0.as_raw_fd()))?;
        let field = |name| text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok());
        let counts = field("total:").zip(field("pending:"));
        let (all, unread) =
            counts.ok_or_else(|| io::Error::other(format!("no counts of a userfaultfd in {text:?}")))?;
        Ok(all.saturating_sub(unread))
    }

    /// A second descriptor of the same userfaultfd.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self(self.0.try_clone()?))
    }
}

fn outcome(answer: io::Result<()>, done: i64) -> io::Result<FillOutcome> {
    let Err(error) = answer else { return Ok(FillOutcome::Done) };
    match error.raw_os_error() {
        Some(libc::EEXIST) => Ok(FillOutcome::AlreadyThere),
        Some(libc::EAGAIN) => match -done {
            // One page was asked for, so progress means it is done; otherwise the field holds 0 or an errno.
            _ if done > 0 => Ok(FillOutcome::Done),
            code if code == i64::from(libc::EEXIST) => Ok(FillOutcome::AlreadyThere),
            _ => Ok(FillOutcome::Retry),
        },
        Some(libc::EFAULT) => Ok(FillOutcome::NotInFile),
        // The host, or the charged memory cgroup, is short of memory for a moment. Reclaim ends that.
        Some(libc::ENOMEM | libc::EINTR) => Ok(FillOutcome::Retry),
        Some(libc::ENOENT | libc::ESRCH) => Ok(FillOutcome::Gone),
        // `UFFDIO_CONTINUE` returns this for a page in the file that is marked as poisoned, or cannot be swapped in.
        Some(libc::EIO) => Ok(FillOutcome::Failed),
        _ => Err(error),
    }
}

impl AsFd for Uffd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<OwnedFd> for Uffd {
    fn from(fd: OwnedFd) -> Self {
        Self(fd.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Mapping, memfd};
    use ballast_base::Bytes;
    use ballast_testkit::skip;

    const LEN: u64 = 16 * PAGE_SIZE as u64;

    /// `None`, with a printed skip, if this user can have no such userfaultfd.
    fn setup() -> Option<(OwnedFd, Mapping, Uffd)> {
        let Some((uffd, _)) = Uffd::create(REQUIRED_FEATURES).ok().filter(|(_, granted)| *granted == REQUIRED_FEATURES)
        else {
            skip("uffd", "no userfaultfd with shared-memory minor faults for this user");
            return None;
        };
        let fd = memfd::create("ballast-test", Bytes(LEN)).expect("memfd");
        let map = Mapping::shared(&fd, 0, LEN as usize).expect("map");
        uffd.register(Hva(map.addr() as u64), LEN).expect("register");
        Some((fd, map, uffd))
    }

    fn next_fault(uffd: &Uffd) -> Fault {
        let mut faults = Vec::new();
        loop {
            uffd.read_faults(&mut faults).expect("read");
            if let Some(fault) = faults.first() {
                return *fault;
            }
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_missing_fault_names_page_and_thread_and_copy_resolves_it() {
        let Some((_fd, map, uffd)) = setup() else { return };
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| map.words(3 * PAGE_SIZE + 8, 1)[0].load(Ordering::Relaxed));
            let fault = next_fault(&uffd);
            assert_eq!((fault.addr.0, fault.kind), (map.addr() as u64 + 3 * 4096, FaultKind::Missing));
            assert_ne!(fault.thread, 0);
            assert_eq!(uffd.unanswered().expect("fdinfo"), 1);
            assert_eq!(uffd.copy(fault.addr, &[0xAB; PAGE_SIZE]).expect("copy"), FillOutcome::Done);
            assert_eq!(reader.join().expect("reader"), 0xABAB_ABAB_ABAB_ABAB);
            assert_eq!(uffd.unanswered().expect("fdinfo"), 0);
            assert_eq!(uffd.copy(fault.addr, &[1; PAGE_SIZE]).expect("copy"), FillOutcome::AlreadyThere);
        });
    }

    #[test]
    fn a_read_does_not_wait_whatever_another_holder_of_the_descriptor_does_to_its_flags() {
        let Some((_fd, _map, uffd)) = setup() else { return };
        let mut faults = Vec::new();
        uffd.read_faults(&mut faults).expect("read");
        let mut bytes = [0u8; 32];
        let vector = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
        // SAFETY: the buffer is ours and as long as stated.
        let read = unsafe { libc::preadv2(uffd.as_fd().as_raw_fd(), &raw const vector, 1, -1, libc::RWF_NOWAIT) };
        if read < 0 && io::Error::last_os_error().raw_os_error() != Some(libc::EAGAIN) {
            return skip("kernel-6.10", "this kernel has no read of a userfaultfd that never waits");
        }
        rustix::fs::fcntl_setfl(&uffd, rustix::fs::OFlags::empty()).expect("clear O_NONBLOCK");
        uffd.read_faults(&mut faults).expect("read");
        assert!(faults.is_empty());
    }

    #[test]
    fn copy_pages_fills_up_to_the_first_page_that_is_there() {
        let Some((_fd, map, uffd)) = setup() else { return };
        let addr = Hva(map.addr() as u64);
        assert_eq!(uffd.copy(addr + 2 * 4096, &[9; PAGE_SIZE]).expect("copy"), FillOutcome::Done);
        let pages = [[5; PAGE_SIZE]; 4];
        assert_eq!(uffd.copy_pages(addr, &pages).expect("copy").0, 2);
        assert_eq!(uffd.copy_pages(addr + 2 * 4096, &pages[2..]).expect("copy"), (0, FillOutcome::AlreadyThere));
        assert_eq!(uffd.copy_pages(addr + 3 * 4096, &pages).expect("copy"), (4, FillOutcome::Done));
        let bytes = [0, 1, 2, 3, 6].map(|page| map.words(page * PAGE_SIZE, 1)[0].load(Ordering::Relaxed) as u8);
        assert_eq!(bytes, [5, 5, 9, 5, 5]);
    }

    #[test]
    fn a_zapped_page_raises_a_minor_fault_and_keeps_its_bytes() {
        let Some((fd, map, uffd)) = setup() else { return };
        let addr = Hva(map.addr() as u64);
        assert_eq!(uffd.map_existing(addr, 4096).expect("continue"), FillOutcome::NotInFile);
        assert_eq!(uffd.zero_page(addr).expect("zero"), FillOutcome::Done);
        map.words(0, 1)[0].store(77, Ordering::Relaxed);
        map.zap(0, PAGE_SIZE).expect("zap");
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| map.words(0, 1)[0].load(Ordering::Relaxed));
            assert_eq!(next_fault(&uffd).kind, FaultKind::Minor);
            assert_eq!(uffd.map_existing(addr, 4096).expect("continue"), FillOutcome::Done);
            assert_eq!(reader.join().expect("reader"), 77);
            assert_eq!(uffd.map_existing(addr, 4096).expect("continue"), FillOutcome::AlreadyThere);
        });
        memfd::punch(&fd, 0, 4096).expect("punch");
        uffd.unregister(addr, LEN).expect("unregister");
        assert_eq!(map.words(0, 1)[0].load(Ordering::Relaxed), 0, "an unregistered hole reads as zeros");
        assert_eq!(uffd.zero_page(addr).expect("zero"), FillOutcome::Gone);
    }
}
