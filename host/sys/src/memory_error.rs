//! Memory errors: lets this process survive when the host's memory fails under a file that it maps.
//!
//! Before: [`Surviving`] says what the bytes of a mapping become when they are lost, and [`install`] was called.
//! After: a touch of a lost page, which would end this process (`SIGBUS`) and each successor, finds the new bytes in
//! the mapping and in the file, and a waiter is notified of the loss.
//! Threads: the handler runs on the thread that touched the page. It takes no lock but its own, allocates nothing, and
//! calls only async-signal-safe functions.
//! Units: bytes; the kernel loses a page of 4 KiB, or up to 2 MiB if it cannot split a huge one.
//! Promise: no process, this one or one that opens the file after its death, ever sees a hole in place of a lost page,
//! unless the page is to become zeros. A memory error anywhere else ends the process as before.
//!
//! The order of the steps lets a thread that touches the page at the same moment see the old page or the new one, and
//! lose no write: an empty file is mapped over the page, so that every touch enters the handler and waits; the lost
//! page is punched out of its file; the new bytes are written there; the file is mapped again. If this process ends
//! after the punch, its journal names the page ([`Survival::journal`]).

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::null_mut;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};

use ballast_base::{Bytes, HUGE_SIZE, PAGE_SIZE};

use crate::memfd;
pub use slot::{Fill, Losses, PageCopy, Survival, Surviving, in_journal};
use slot::{Slot, WORDS};

mod slot;

/// Signals in a row for readable pages after which the handler gives up: it cannot help then.
const MOST_SPURIOUS: u32 = 1000;

/// Held by the handler that replaces a page.
static BUSY: AtomicBool = AtomicBool::new(false);
/// An empty file, mapped over a page while its bytes are replaced: every touch of it is a `SIGBUS` as well.
static NOTHING: AtomicI32 = AtomicI32::new(-1);
/// Becomes readable with every loss.
static NOTIFY_FD: AtomicI32 = AtomicI32::new(-1);
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();
static SPURIOUS: AtomicU32 = AtomicU32::new(0);
/// A buffer of one page for the holder of [`BUSY`], because a signal's stack may be small.
static ROOM: [AtomicU64; WORDS] = [const { AtomicU64::new(0) }; WORDS];

#[derive(PartialEq, Eq)]
enum Replaced {
    Done,
    /// The file still has the pages: the kernel cannot split the huge page that they are part of.
    Stuck,
    /// The kernel refused. The journal says which part is not finished.
    Failed,
}

/// Replace the pages of a part of a mapping. The caller holds [`BUSY`].
fn replace(slot: &Slot, from: usize, to: usize) -> Replaced {
    let (base, fd) = (slot.start.load(Ordering::Acquire), slot.fd.load(Ordering::Acquire));
    let file_offset = slot.offset.load(Ordering::Acquire) + from as u64;
    slot.write_journal(file_offset | ((to - from) / PAGE_SIZE) as u64);
    if !map(base + from, to - from, NOTHING.load(Ordering::Acquire), 0) {
        return Replaced::Failed;
    }
    if !punch(fd, file_offset as i64, (to - from) as i64) {
        return Replaced::Stuck;
    }
    for at in (from..to).step_by(PAGE_SIZE) {
        let fill = slot.fill(at);
        if !matches!(fill, Fill::Zeros) && !write_page(fill, fd, file_offset as i64 + (at - from) as i64) {
            return Replaced::Failed;
        }
    }
    if !map(base + from, to - from, fd, file_offset as i64) {
        return Replaced::Failed;
    }
    slot.write_journal(0);
    Replaced::Done
}

fn map(addr: usize, len: usize, fd: i32, offset: i64) -> bool {
    let flags = libc::MAP_SHARED | libc::MAP_NORESERVE | libc::MAP_FIXED;
    // SAFETY: the range is inside a registered mapping, which a thread is touching, so it stays mapped; and no
    // reference to plain memory in it exists.
    let mapped = unsafe { libc::mmap(addr as *mut _, len, libc::PROT_READ | libc::PROT_WRITE, flags, fd, offset) };
    mapped != libc::MAP_FAILED
}

/// Punch a part of a file; returns false if there is no hole afterwards.
fn punch(fd: i32, offset: i64, len: i64) -> bool {
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    loop {
        // SAFETY: system calls on a descriptor, without pointers.
        let (answer, next) =
            unsafe { (libc::fallocate(fd, mode, offset, len), libc::lseek(fd, offset, libc::SEEK_DATA)) };
        match answer {
            0 => return next < 0 || next >= offset + len,
            _ if errno() == libc::EINTR => {}
            _ => return false,
        }
    }
}

/// Write the new bytes of a page to a file. The caller holds [`BUSY`].
fn write_page(fill: &Fill, fd: i32, offset: i64) -> bool {
    for (at, word) in ROOM.iter().enumerate() {
        let value = match fill {
            Fill::Zeros => 0,
            Fill::Pattern(value) => *value,
            Fill::Copy(copy) => copy.words()[at].load(Ordering::Acquire),
        };
        word.store(value, Ordering::Relaxed);
    }
    // SAFETY: the buffer is as long as stated, and static.
    let written = unsafe { libc::pwrite(fd, ROOM.as_ptr().cast(), PAGE_SIZE, offset) };
    written == PAGE_SIZE as isize
}

fn errno() -> i32 {
    // SAFETY: the address of this thread's errno is always valid.
    unsafe { *libc::__errno_location() }
}

/// Can the page at this address be read? The kernel tries it, in a call that has no effect whatever the bytes are.
fn is_readable(addr: usize) -> bool {
    const NO_SUCH_WAY: i32 = -1;
    const LEN: usize = 8;
    let none: *mut libc::c_void = null_mut();
    // SAFETY: the kernel reads 8 bytes or finds that it cannot; then it rejects the first argument.
    let answer = unsafe { libc::syscall(libc::SYS_rt_sigprocmask, NO_SUCH_WAY, addr, none, LEN) };
    answer == 0 || errno() != libc::EFAULT
}

/// Is there a hole at this offset, which is inside the file? Then nothing can be lost there: it has no memory.
fn is_hole(fd: i32, offset: u64) -> bool {
    // SAFETY: a system call on a descriptor, without pointers.
    unsafe { libc::lseek(fd, offset as i64, libc::SEEK_HOLE) == offset as i64 }
}

fn is_file_readable(fd: i32, offset: u64) -> bool {
    let mut byte = 0u8;
    // SAFETY: one byte of room for one byte.
    unsafe { libc::pread(fd, (&raw mut byte).cast(), 1, offset as i64) == 1 }
}

/// Make the page at this address readable again. Returns false if it is not ours, or cannot be replaced. The caller
/// holds [`BUSY`]. `is_known`: the kernel reported that the memory failed.
fn mend(addr: usize, is_known: bool) -> bool {
    let page = addr & !(PAGE_SIZE - 1);
    if is_readable(page) {
        // Another thread has replaced the page already.
        return SPURIOUS.fetch_add(1, Ordering::Relaxed) < MOST_SPURIOUS;
    }
    let Some(slot) = Slot::find(page) else { return false };
    SPURIOUS.store(0, Ordering::Relaxed);
    let (start, len, fd) =
        (slot.start.load(Ordering::Acquire), slot.len.load(Ordering::Acquire), slot.fd.load(Ordering::Acquire));
    let (within, file_offset) = (page - start, slot.offset.load(Ordering::Acquire) + (page - start) as u64);
    if matches!(slot.fill(within), Fill::Copy(_)) && is_file_readable(fd, file_offset) {
        // Another process replaced the page; only our page table is out of date.
        return map(page, PAGE_SIZE, fd, file_offset as i64);
    }
    if !is_known && is_hole(fd, file_offset) {
        return false;
    }
    slot.note(file_offset);
    match replace(slot, within, within + PAGE_SIZE) {
        // Past the end of a file that was truncated, reads still fail.
        Replaced::Done => return is_readable(page),
        Replaced::Failed => return false,
        Replaced::Stuck => {}
    }
    // A huge page that cannot be split. In a file, huge pages begin at multiples of their size.
    let huge = HUGE_SIZE as u64;
    let before = (file_offset % huge) as usize;
    let (from, to) = (within.saturating_sub(before), (within + HUGE_SIZE - before).min(len));
    (from..to)
        .step_by(PAGE_SIZE)
        .filter(|at| *at != within)
        .for_each(|at| slot.note(file_offset - within as u64 + at as u64));
    replace(slot, from, to) == Replaced::Done && is_readable(page)
}

extern "C" fn on_bus_error(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel gives a handler with SA_SIGINFO a whole siginfo; that of SIGBUS has an address.
    let (code, addr) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    if code == libc::BUS_MCEERR_AO {
        // Memory of this process that no thread is touching. A later touch raises the signal again.
        return;
    }
    let before = errno();
    // `BUS_ADRERR`: the page could not be swapped in; or the kernel does not distinguish memory errors.
    if code == libc::BUS_MCEERR_AR || code == libc::BUS_ADRERR {
        while BUSY.compare_exchange(false, true, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            // SAFETY: no arguments.
            unsafe { libc::sched_yield() };
        }
        let mended = mend(addr, code == libc::BUS_MCEERR_AR);
        BUSY.store(false, Ordering::Release);
        if mended {
            notify();
            // SAFETY: this thread's own.
            unsafe { *libc::__errno_location() = before };
            return;
        }
    }
    if code > 0 {
        say("ballast: memory that this process needs cannot be read, at ", addr);
    }
    pass_on(signal, info, context);
}

/// Write a line to standard error by async-signal-safe calls alone.
fn say(text: &str, addr: usize) {
    let mut line = [b'0'; 20];
    line[1] = b'x';
    line[18] = b'\n';
    for (digit, at) in line[2..18].iter_mut().zip((0..16).rev()) {
        *digit = b"0123456789abcdef"[addr >> (4 * at) & 15];
    }
    for bytes in [text.as_bytes(), &line[..19]] {
        // SAFETY: bytes that live during the call. A failure is ignored: nothing can be done about it.
        unsafe { libc::write(libc::STDERR_FILENO, bytes.as_ptr().cast(), bytes.len()) };
    }
}

/// Notify the threads that wait for losses; they query again.
pub fn notify() {
    let (notify_fd, one) = (NOTIFY_FD.load(Ordering::Acquire), 1u64);
    // SAFETY: eight bytes that live during the call; the kernel refuses a number that is no descriptor.
    unsafe { libc::write(notify_fd, (&raw const one).cast(), 8) };
}

/// Do what would happen without this handler.
fn pass_on(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let handler = PREVIOUS.get().map_or(libc::SIG_DFL, |previous| previous.sa_sigaction);
    let with_info = PREVIOUS.get().is_some_and(|previous| previous.sa_flags & libc::SA_SIGINFO != 0);
    if handler == libc::SIG_DFL || handler == libc::SIG_IGN {
        // The access is repeated after the return, and then ends the process.
        // SAFETY: sets a default action.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    } else if with_info {
        // SAFETY: the kernel was told of this address as a handler of this type.
        let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) =
            unsafe { std::mem::transmute(handler) };
        handler(signal, info, context);
    } else {
        // SAFETY: the same.
        let handler: extern "C" fn(i32) = unsafe { std::mem::transmute(handler) };
        handler(signal);
    }
}

/// Install the handler: from now on this process survives memory errors in registered mappings. Returns an eventfd that
/// becomes readable when a page was lost. Only the first call has an effect.
pub fn install() -> io::Result<OwnedFd> {
    static ONCE: OnceLock<Result<OwnedFd, i32>> = OnceLock::new();
    let made = ONCE.get_or_init(|| {
        let make = || -> io::Result<OwnedFd> {
            // SAFETY: a system call without pointers.
            let notify_fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
            if notify_fd < 0 {
                return Err(io::Error::last_os_error());
            }
            // SAFETY: the kernel just gave us this descriptor; it has no other owner.
            let notify_fd = unsafe { OwnedFd::from_raw_fd(notify_fd) };
            // Both descriptors stay open as long as the process lives.
            let nothing = std::mem::ManuallyDrop::new(memfd::create("ballast-nothing", Bytes(0))?);
            NOTHING.store(nothing.as_raw_fd(), Ordering::Release);
            NOTIFY_FD.store(notify_fd.as_raw_fd(), Ordering::Release);
            // SAFETY: both actions are plain data for which zeros are a value; the new one names a handler of the
            // right type, during which no other signal is delivered.
            unsafe {
                let (mut action, mut previous): (libc::sigaction, libc::sigaction) = std::mem::zeroed();
                libc::sigfillset(&mut action.sa_mask);
                action.sa_sigaction = on_bus_error as *const () as usize;
                action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
                if libc::sigaction(libc::SIGBUS, std::ptr::null(), &mut previous) == 0 {
                    let _ = PREVIOUS.set(previous);
                }
                if libc::sigaction(libc::SIGBUS, &action, null_mut()) != 0 {
                    return Err(io::Error::last_os_error());
                }
            }
            Ok(notify_fd)
        };
        make().map_err(|error| error.raw_os_error().unwrap_or(libc::EINVAL))
    });
    match made {
        Ok(notify_fd) => notify_fd.try_clone(),
        Err(errno) => Err(io::Error::from_raw_os_error(*errno)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Mapping;
    use crate::uffd::{FillOutcome, REQUIRED_FEATURES, Uffd, feature};
    use ballast_base::Hva;
    use ballast_testkit::skip;
    use std::sync::Arc;

    const PAGES: usize = 6;

    struct Rig {
        file: Arc<OwnedFd>,
        journal: Arc<Surviving>,
        map: Surviving,
        copy: Arc<PageCopy>,
        uffd: Uffd,
    }

    /// A mapping whose pages become zeros, a pattern, and a copy, two of each; and a mark of userfaultfd, which makes a
    /// touch of a page a memory error, as failed memory would. `None`, with a printed skip, before Linux 6.6.
    fn setup() -> Option<Rig> {
        let features = REQUIRED_FEATURES | feature::POISON;
        let Some((uffd, _)) = Uffd::create(features).ok().filter(|(_, granted)| *granted == features) else {
            skip("uffd", "no userfaultfd that can poison pages for this user");
            return None;
        };
        install().expect("install");
        let file = Arc::new(memfd::create("ballast-test", Bytes((PAGES * PAGE_SIZE) as u64)).expect("memfd"));
        let other = Arc::new(memfd::create("ballast-test", Bytes(PAGE_SIZE as u64)).expect("memfd"));
        let map = Mapping::shared(&*other, 0, PAGE_SIZE).expect("map");
        let survival = Survival { file: other, offset: 0, fills: vec![], journal: None };
        let journal = Arc::new(Surviving::new(map, survival));
        let copy = Arc::new(PageCopy::default());
        let fills = vec![
            (2 * PAGE_SIZE, Fill::Zeros),
            (4 * PAGE_SIZE, Fill::Pattern(0x1F)),
            (6 * PAGE_SIZE, Fill::Copy(copy.clone())),
        ];
        let survival = Survival { file: file.clone(), offset: 0, fills, journal: Some((journal.clone(), 8)) };
        let map = Surviving::new(Mapping::shared(&*file, 0, PAGES * PAGE_SIZE).expect("map"), survival);
        (0..PAGES).for_each(|page| map.words(page * PAGE_SIZE, 1)[0].store(100 + page as u64, Ordering::Relaxed));
        Some(Rig { file, journal, map, copy, uffd })
    }

    fn poison(uffd: &Uffd, map: &Mapping, page: usize) {
        let at = Hva((map.addr() + page * PAGE_SIZE) as u64);
        map.zap(page * PAGE_SIZE, PAGE_SIZE).expect("zap");
        uffd.register(at, PAGE_SIZE as u64).expect("register");
        assert_eq!(uffd.poison(at, PAGE_SIZE as u64).expect("poison"), FillOutcome::Done);
    }

    #[test]
    fn a_lost_page_gets_its_new_bytes_in_mapping_and_file_and_the_pages_around_it_stay() {
        let Some(Rig { file, journal, map, uffd, .. }) = setup() else { return };
        let notify_fd = install().expect("again");
        let word = |page: usize| map.words(page * PAGE_SIZE, 1)[0].load(Ordering::Relaxed);
        poison(&uffd, &map, 1);
        poison(&uffd, &map, 2);
        assert_eq!(map.losses(), Losses::default());
        assert_eq!([0, 1, 2, 3].map(word), [100, 0, 0x1F, 103]);
        assert_eq!(map.words(2 * PAGE_SIZE, WORDS)[WORDS - 1].load(Ordering::Relaxed), 0x1F);
        // The mapping has the file's own page again: a word written here is read there.
        map.words(2 * PAGE_SIZE, 1)[0].store(7, Ordering::Relaxed);
        let again = Mapping::shared(&*file, 0, PAGES * PAGE_SIZE).expect("map");
        assert_eq!([1, 2].map(|page| again.words(page * PAGE_SIZE, 1)[0].load(Ordering::Relaxed)), [0, 7]);
        assert_eq!(map.lost(), 2);
        assert_eq!(map.losses(), Losses { offsets: vec![4096, 8192], pages: 2 });
        assert_eq!(map.losses(), Losses::default(), "told once");
        assert_eq!(journal.words(8, 1)[0].load(Ordering::Relaxed), 0, "nothing is under way");
        let mut told = [0; 8];
        assert_eq!(rustix::io::read(&notify_fd, &mut told), Ok(8), "a waiter is notified");
    }

    #[test]
    fn a_page_that_another_process_has_replaced_is_left_as_it_is() {
        let Some(Rig { map, copy, uffd, .. }) = setup() else { return };
        copy.words()[0].store(1, Ordering::Relaxed);
        poison(&uffd, &map, 4);
        assert_eq!(map.words(4 * PAGE_SIZE, 1)[0].load(Ordering::Relaxed), 104, "the file's page can be read");
        assert_eq!(map.lost(), 0);
    }

    #[test]
    fn threads_that_meet_a_lost_page_at_once_go_on_and_what_they_write_afterwards_stays() {
        let Some(Rig { map, uffd, .. }) = setup() else { return };
        for round in 0..50 {
            map.words(2 * PAGE_SIZE, 8).iter().for_each(|word| word.store(1, Ordering::Relaxed));
            poison(&uffd, &map, 2);
            std::thread::scope(|scope| {
                for word in map.words(2 * PAGE_SIZE, 4) {
                    scope.spawn(move || {
                        assert_eq!(word.load(Ordering::Acquire), 0x1F);
                        word.store(round, Ordering::Release);
                    });
                }
            });
            assert!(map.words(2 * PAGE_SIZE, 4).iter().all(|word| word.load(Ordering::Acquire) == round));
            assert_eq!(map.lost(), round + 1, "replaced once");
        }
    }

    #[test]
    fn a_memory_error_elsewhere_ends_the_process_as_before() {
        const VICTIM: &str = "BALLAST_TEST_VICTIM";
        if std::env::var_os(VICTIM).is_some() {
            let Some(Rig { map, uffd, .. }) = setup() else { std::process::exit(3) };
            let file = memfd::create("ballast-test", Bytes(PAGE_SIZE as u64)).expect("memfd");
            let other = Mapping::shared(&file, 0, PAGE_SIZE).expect("map");
            poison(&uffd, &other, 0);
            drop(map);
            other.words(0, 1)[0].load(Ordering::Relaxed);
            std::process::exit(0);
        }
        if setup().is_none() {
            return;
        }
        let name = "memory_error::tests::a_memory_error_elsewhere_ends_the_process_as_before";
        let victim = std::process::Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", name, "--nocapture"])
            .env(VICTIM, "1")
            .output()
            .expect("run");
        let signal = std::os::unix::process::ExitStatusExt::signal(&victim.status);
        assert_eq!(signal, Some(libc::SIGBUS), "{victim:?}");
        let said = String::from_utf8_lossy(&victim.stderr).into_owned();
        assert!(said.contains("ballast: memory that this process needs cannot be read, at 0x0000"), "{said}");
    }

    #[test]
    fn a_journal_says_which_part_of_the_file_is_being_replaced() {
        assert_eq!([0, 0x3001, 0x20_0200].map(in_journal), [None, Some((0x3000, 4096)), Some((0x20_0000, 512 * 4096))]);
    }
}
