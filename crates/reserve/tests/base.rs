//! A pool of base pages: shared memory in a tmpfs, filled in advance. What is handed out, kept and zeroed is as with
//! huge pages. What a VM frees is the host's, and the pool takes no more than the host can spare. Needs root.

mod common;

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::Ordering;

use ballast_base::pool::Nodes;
use ballast_base::{Bytes, HUGE_SIZE, Hva, MIB, PAGE_SIZE};
use ballast_testkit::skip;
use ballast_pool::Mode;
use ballast_reserve::{Grant, Host, Lacks, Page, Reserve, Want};
use ballast_sys::memfd::file_id;
use ballast_sys::uffd::REQUIRED_FEATURES;
use ballast_sys::{Mapping, Uffd, memfd};

use common::{Place, SECRET, grant, hold_in_pipe, map, search_and_mark, settle, sum, zero_all};

/// Memory that the pool's files have.
fn memory(place: &Place) -> u64 {
    let files = std::fs::read_dir(place.dir().join("4K")).expect("its files").flatten();
    let bricks = files.filter(|entry| entry.file_name().to_string_lossy().starts_with("brick-"));
    bricks.map(|brick| brick.metadata().expect("stat").blocks() * 512).sum()
}

#[test]
fn base_pages_are_filled_handed_out_and_kept_while_anybody_has_them_and_their_files_go_with_their_vm() {
    let Some(place) = Place::of(Page::Base) else { return };
    let Some(mut reserve) = place.pool(64, 16) else { return };
    assert_eq!((memory(&place), sum(&reserve, |node| node.ready)), (64 * MIB, 64 * MIB));
    assert_eq!((place.pages(), reserve.overview().vmemmap_freed), (0, Bytes(0)), "the kernel reserves none");
    let spy = grant(&mut reserve, "spy", 40);
    assert_eq!((spy.files.len(), sum(&reserve, |node| node.fenced)), (3, 8 * MIB));
    assert!(spy.files.iter().all(|file| memfd::check_ram_file(file) == Ok(Bytes(PAGE_SIZE as u64))));
    let had: Vec<_> = spy.files.iter().map(|file| file_id(file).expect("stat")).collect();
    let ram = map(&spy);
    assert_eq!(search_and_mark(&ram), 0);
    // What it frees is the host's, in pages of 4 KiB, and what it touches again is there again.
    let extent = spy.extents[0];
    memfd::punch(&spy.files[0], extent.offset.0, PAGE_SIZE as u64).expect("punch");
    assert_eq!(ram.words(0, 1)[0].load(Ordering::Relaxed), 0);
    memfd::punch(&spy.files[0], extent.offset.0, 2 * MIB).expect("punch");
    assert_eq!((memory(&place), sum(&reserve, |node| node.used)), (62 * MIB, 40 * MIB));
    // A page of it stays in a pipe, and its mapping outlives an owner of the pool.
    let (reader, _writer) = hold_in_pipe(&ram, 4 * HUGE_SIZE);
    drop((reserve, spy));
    let mut reserve = place.open();
    reserve.validate().expect("valid");
    assert_eq!((reserve.overview().tenants[0].name.as_str(), reserve.tend().expect("tend")), ("spy", 0));
    drop(ram);
    assert_eq!(reserve.tend().expect("tend"), 1);
    assert_eq!((memory(&place), sum(&reserve, |node| node.dirty)), (16 * MIB, 48 * MIB), "its files are gone");
    zero_all(&mut reserve);
    assert_eq!((memory(&place), sum(&reserve, |node| node.ready)), (64 * MIB, 64 * MIB));
    let victim = grant(&mut reserve, "victim", 64);
    assert_eq!(search_and_mark(&map(&victim)), 0, "somebody else's memory");
    assert!(victim.files.iter().all(|file| !had.contains(&file_id(file).expect("stat"))), "a file was handed on");
    let mut seen = [0; PAGE_SIZE];
    assert_eq!(rustix::io::read(&reader, &mut seen).expect("read"), PAGE_SIZE);
    let own = seen.chunks(8).filter(|word| **word == SECRET.to_ne_bytes()).count();
    assert_eq!(own, 1, "the spy sees its own page");
    reserve.validate().expect("valid");
}

#[test]
fn a_vm_reaches_all_of_its_own_files_by_any_call_and_nothing_of_anothers() {
    let Some(place) = Place::of(Page::Base) else { return };
    let Some(mut reserve) = place.pool(48, 16) else { return };
    let victim = grant(&mut reserve, "victim", 16);
    let ram = map(&victim);
    search_and_mark(&ram);
    let spy = grant(&mut reserve, "spy", 4);
    let whole = Grant {
        vm: 0,
        extents: vec![ballast_base::Extent { file: 0, offset: Bytes(0), len: Bytes(16 * MIB) }],
        files: vec![spy.files[0].try_clone().expect("dup")],
        lacked: Lacks::new(),
    };
    let is_zero = |word: *const u64| {
        // SAFETY: a word of a mapping that the caller has just made or grown.
        unsafe { word.read_volatile() == 0 }
    };
    let (prot, len) = (libc::PROT_READ | libc::PROT_WRITE, 16 * MIB as usize);
    // SAFETY: no address is asked for, and each call is about what the one before it returned.
    unsafe {
        let fd = spy.files[0].as_raw_fd();
        let at = libc::mmap(std::ptr::null_mut(), PAGE_SIZE, prot, libc::MAP_SHARED, fd, 0);
        assert_ne!(at, libc::MAP_FAILED, "{}", io::Error::last_os_error());
        let grown = libc::mremap(at, PAGE_SIZE, len, libc::MREMAP_MAYMOVE);
        assert_ne!(grown, libc::MAP_FAILED, "shared memory grows, which is why a file is one VM's");
        assert!((0..len).step_by(PAGE_SIZE).all(|page| is_zero(grown.byte_add(page).cast())), "another VM's memory");
        libc::syscall(libc::SYS_remap_file_pages, grown, PAGE_SIZE, 0, 4095, 0);
        assert!(is_zero(grown.cast()));
        libc::munmap(grown, len);
    }
    // It writes all of its file, makes it longer, and cuts it while slices of it are to be filled.
    search_and_mark(&map(&whole));
    rustix::fs::ftruncate(&spy.files[0], 64 * MIB).expect("its file");
    assert_eq!(search_and_mark(&Mapping::shared(&spy.files[0], 32 * MIB, len).expect("map")), 0, "its own new pages");
    rustix::fs::ftruncate(&spy.files[0], 0).expect("its file");
    assert_eq!(ram.words(512 * 8, 1)[0].load(Ordering::Relaxed), 0);
    let marks = (0..len).step_by(PAGE_SIZE).map(|page| &ram.words(page, PAGE_SIZE / 8)[page / PAGE_SIZE % 512]);
    assert!(marks.map(|word| word.load(Ordering::Relaxed)).all(|word| word == SECRET), "the victim's is as it was");
    drop((whole, spy));
    assert_eq!(reserve.tend().expect("tend"), 1);
    zero_all(&mut reserve);
    assert_eq!((memory(&place), sum(&reserve, |node| node.ready)), (48 * MIB, 32 * MIB));
    assert_eq!(search_and_mark(&map(&grant(&mut reserve, "next", 32))), 0, "somebody else's memory");
    reserve.validate().expect("valid");
}

#[test]
fn a_vm_that_cuts_its_file_while_the_rest_of_it_is_filled_ends_nothing_and_keeps_it_to_itself() {
    let Some(place) = Place::of(Page::Base) else { return };
    let Some(mut reserve) = place.pool(16, 16) else { return };
    let first = grant(&mut reserve, "first", 16);
    search_and_mark(&map(&first));
    drop(first);
    assert_eq!(reserve.tend().expect("tend"), 1);
    for _ in 0..2 {
        let job = reserve.next_job().expect("a job").expect("there is one");
        let done = job.run();
        assert!(reserve.finish(done));
    }
    let spy = grant(&mut reserve, "spy", 4);
    let job = reserve.next_job().expect("a job").expect("its file has dirty slices");
    rustix::fs::ftruncate(&spy.files[0], 0).expect("its file");
    let done = job.run();
    reserve.finish(done);
    zero_all(&mut reserve);
    drop(spy);
    assert_eq!(reserve.tend().expect("tend"), 1);
    settle(&mut reserve);
    // Those that were being filled when it ended are filled again.
    zero_all(&mut reserve);
    assert_eq!(search_and_mark(&map(&grant(&mut reserve, "next", 16))), 0);
    reserve.validate().expect("valid");
}

#[test]
fn an_owner_that_dies_while_it_fills_leaves_slices_that_the_next_one_fills() {
    let Some(place) = Place::of(Page::Base) else { return };
    let mut reserve = place.open();
    reserve.grow(Want::Bytes(Bytes(32 * MIB)), Some(place.node()), Some(Bytes(16 * MIB))).expect("grow");
    for round in 0..4 {
        let job = reserve.next_job().expect("a job").expect("there is one");
        match round {
            // Filled, and not noted; or noted and not filled; or done.
            0 => drop(job.run()),
            1 => drop(job),
            _ => {
                let done = job.run();
                assert!(reserve.finish(done));
            }
        }
        drop(reserve);
        reserve = place.open();
        reserve.validate().expect("valid");
        assert_eq!(sum(&reserve, |node| node.dirty) + sum(&reserve, |node| node.ready), 32 * MIB, "{round}");
    }
    assert!(sum(&reserve, |node| node.ready) >= 4 * MIB, "what was filled stays");
    zero_all(&mut reserve);
    assert_eq!((memory(&place), sum(&reserve, |node| node.ready)), (32 * MIB, 32 * MIB));
    // The author of a change died: what is lent by the state has no memory.
    reserve.lend(Bytes(16 * MIB), Some(place.node())).expect("lend");
    assert_eq!((memory(&place), sum(&reserve, |node| node.lent)), (16 * MIB, 16 * MIB));
    drop(reserve);
    let path = |number: u32| place.dir().join(format!("4K/brick-{number}"));
    let lent = [0, 1].into_iter().find(|number| blocks(&path(*number)) == 0).expect("one of them is empty");
    let file = std::fs::File::options().write(true).open(path(lent)).expect("open");
    memfd::allocate(&file, 0, 16 * MIB).expect("as if it had not been punched");
    std::fs::write(place.dir().join("journal.json"), "{}").expect("write");
    let reserve = place.open();
    assert_eq!(memory(&place), 16 * MIB);
    reserve.validate().expect("valid");
}

fn blocks(path: &Path) -> u64 {
    std::fs::metadata(path).map_or(0, |file| file.blocks())
}

/// The kernel's files of a host of 16 GiB, of which 512 MiB stay with it.
fn spare(root: &Path, mib: u64) -> Host {
    let write = |file: &str, text: &str| {
        let file = root.join(file);
        std::fs::create_dir_all(file.parent().expect("a folder")).expect("make");
        std::fs::write(file, text).expect("write");
    };
    let free = (512 + mib) << 10;
    write("sys/devices/system/node/has_memory", "0\n");
    write("proc/meminfo", &format!("MemAvailable: {free} kB\n"));
    let line = |key: &str, kib: u64| format!("Node 0 {key}: {kib} kB\n");
    let all = [("MemTotal", 16 << 20), ("MemFree", free), ("Active(file)", 0), ("Inactive(file)", 0)];
    write("sys/devices/system/node/node0/meminfo", &all.map(|(key, kib)| line(key, kib)).concat());
    Host::at(root).with(Page::Base)
}

#[test]
fn the_pool_takes_no_more_than_the_host_can_spare_when_it_is_asked_when_it_fills_and_when_it_takes_back() {
    let Some(place) = Place::of(Page::Base) else { return };
    let root = tempfile::tempdir().expect("a directory");
    let now = |mib: u64| spare(root.path(), mib);
    let mut reserve = Reserve::open(&place.dir(), now(40)).expect("open");
    let grow = |reserve: &mut Reserve| {
        reserve.grow(Want::Bytes(Bytes(64 * MIB)), None, Some(Bytes(8 * MIB))).expect("grow");
        sum(reserve, |node| node.reserved)
    };
    assert_eq!(grow(&mut reserve), 40 * MIB);
    let notes = reserve.overview().notes;
    assert!(notes[0].contains("node 0 can give 40 MiB of the 64 MiB"), "{notes:?}");
    // What is not filled yet is not there twice.
    assert_eq!(grow(&mut reserve), 40 * MIB);
    // Others use the memory before it is filled: nothing is, and who asks is told at once.
    now(1);
    assert!(reserve.next_job().expect("ask").is_none() && !reserve.is_zeroing() && !reserve.is_at_rest());
    let notes = reserve.overview().notes;
    assert!(notes.iter().any(|note| note.contains("40 MiB are not filled: the host has no memory")), "{notes:?}");
    let said = reserve.grant("early", Bytes(2 * MIB), Mode::Slices, &Nodes::Any).map(drop).expect_err("not filled");
    assert!(said.to_string().contains("0 are ready"), "{said}");
    now(40);
    zero_all(&mut reserve);
    assert_eq!((memory(&place), sum(&reserve, |node| node.ready)), (40 * MIB, 40 * MIB));
    // A VM ends while the host is short: its memory is the host's until it is well.
    drop(grant(&mut reserve, "vm", 16));
    now(0);
    assert_eq!(reserve.tend().expect("tend"), 1);
    zero_all(&mut reserve);
    assert_eq!((memory(&place), sum(&reserve, |node| node.dirty)), (24 * MIB, 16 * MIB));
    // Lent memory leaves its files. No more of it comes back than the host has beside what is to be filled.
    reserve.lend(Bytes(24 * MIB), None).expect("lend");
    assert_eq!(sum(&reserve, |node| node.lent), 24 * MIB);
    let left = memory(&place) + sum(&reserve, |node| node.dirty);
    assert_eq!(left, 16 * MIB);
    now(20);
    reserve.lend(Bytes(0), None).expect("take back");
    let to_come = sum(&reserve, |node| node.dirty);
    assert!(
        (to_come, sum(&reserve, |node| node.lent)) == (20 * MIB, 40 * MIB - memory(&place) - 20 * MIB),
        "{reserve:?}"
    );
    let notes = reserve.overview().notes;
    assert!(notes[0].contains("and 512 MiB stay with it"), "{notes:?}");
    now(100);
    reserve.lend(Bytes(0), None).expect("take back");
    zero_all(&mut reserve);
    assert_eq!((memory(&place), sum(&reserve, |node| node.ready)), (40 * MIB, 40 * MIB));
    reserve.validate().expect("valid");
}

#[test]
fn slices_that_found_no_page_are_filled_again_only_as_far_as_the_host_can_spare() {
    let Some(place) = Place::of(Page::Base) else { return };
    let root = tempfile::tempdir().expect("a directory");
    let now = |mib: u64| spare(root.path(), mib);
    let mut reserve = Reserve::open(&place.dir(), now(64)).expect("open");
    reserve.grow(Want::Bytes(Bytes(16 * MIB)), None, Some(Bytes(16 * MIB))).expect("grow");
    for _ in 0..2 {
        let done = reserve.next_job().expect("a job").expect("there is one").run();
        assert!(reserve.finish(done));
    }
    // It cuts its file, so that none of the other slices can be filled.
    let spy = grant(&mut reserve, "spy", 4);
    rustix::fs::ftruncate(&spy.files[0], 0).expect("its file");
    zero_all(&mut reserve);
    assert_eq!(reserve.overview().waiting, Bytes(12 * MIB));
    drop(spy);
    assert_eq!(reserve.tend().expect("tend"), 1);
    let (mut left, mut jobs) = (5, Vec::new());
    now(left);
    jobs.extend(reserve.jobs_again());
    while let Some(job) = jobs.pop().or_else(|| reserve.next_job().expect("ask")) {
        let done = job.run();
        assert!(reserve.finish(done));
        left = left.saturating_sub(2);
        now(left);
    }
    assert_eq!((memory(&place), reserve.overview().waiting), (4 * MIB, Bytes(0)), "what others may use was taken");
    now(64);
    zero_all(&mut reserve);
    assert_eq!((memory(&place), sum(&reserve, |node| node.ready)), (16 * MIB, 16 * MIB));
    reserve.validate().expect("valid");
}

/// A write to a file that does not end, and holds the file's lock: its source is a page that does not come.
struct Write {
    uffd: Uffd,
    source: Mapping,
    writer: std::thread::JoinHandle<isize>,
}

impl Write {
    fn begin(file: &OwnedFd) -> Self {
        let uffd = Uffd::create(REQUIRED_FEATURES).expect("userfaultfd").0;
        let source = memfd::create("source", Bytes(PAGE_SIZE as u64)).expect("memfd");
        let source = Mapping::shared(source, 0, PAGE_SIZE).expect("map");
        uffd.register(Hva(source.addr() as u64), PAGE_SIZE as u64).expect("register");
        let (file, at) = (file.try_clone().expect("dup"), source.addr());
        let writer = std::thread::spawn(move || {
            // SAFETY: a page that stays mapped until this thread is joined.
            unsafe { libc::pwrite(file.as_raw_fd(), at as *const libc::c_void, PAGE_SIZE, 0) }
        });
        let mut faults = Vec::new();
        while faults.is_empty() {
            uffd.read_faults(&mut faults).expect("read");
            std::thread::yield_now();
        }
        Self { uffd, source, writer }
    }

    fn end(self) {
        self.uffd.zero_page(Hva(self.source.addr() as u64)).expect("a page");
        assert_eq!(self.writer.join().expect("joined"), PAGE_SIZE as isize);
    }
}

#[test]
fn an_owner_that_follows_waits_for_no_lock_of_a_file_that_a_client_has() {
    let Some(place) = Place::of(Page::Base) else { return };
    if let Err(error) = Uffd::create(REQUIRED_FEATURES) {
        return skip("uffd", error);
    }
    let root = tempfile::tempdir().expect("a directory");
    let mut reserve = Reserve::open(&place.dir(), spare(root.path(), 64)).expect("open");
    reserve.grow(Want::Bytes(Bytes(32 * MIB)), None, Some(Bytes(16 * MIB))).expect("grow");
    for _ in 0..2 {
        let done = reserve.next_job().expect("a job").expect("there is one").run();
        assert!(reserve.finish(done));
    }
    // It has a part of a file whose rest is not filled yet.
    let spy = grant(&mut reserve, "spy", 4);
    let ram = map(&spy);
    let write = Write::begin(&spy.files[0]);
    // Its owner died during a change, and memory failed meanwhile.
    drop(reserve);
    std::fs::write(place.dir().join("journal.json"), "{}").expect("write");
    let host = spare(root.path(), 64);
    let meminfo = root.path().join("proc/meminfo");
    let text = std::fs::read_to_string(&meminfo).expect("read");
    std::fs::write(meminfo, format!("{text}HardwareCorrupted: 4 kB\n")).expect("write");
    let mut reserve = Reserve::open(&place.dir(), host).expect("open");
    assert_eq!(reserve.tend().expect("tend"), 0);
    zero_all(&mut reserve);
    assert_eq!(sum(&reserve, |node| Bytes(node.ready.0 + node.fenced.0)), 28 * MIB);
    reserve.lend(Bytes(8 * MIB), None).expect("lend");
    reserve.lend(Bytes(0), None).expect("take back");
    zero_all(&mut reserve);
    let victim = grant(&mut reserve, "victim", 16);
    assert_eq!(search_and_mark(&map(&victim)), 0);
    write.end();
    drop((ram, spy, victim));
    assert_eq!(reserve.tend().expect("tend"), 2);
    zero_all(&mut reserve);
    assert_eq!((memory(&place), sum(&reserve, |node| node.ready)), (32 * MIB, 32 * MIB));
    reserve.validate().expect("valid");
}
