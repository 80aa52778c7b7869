//! Moves between two real NUMA nodes. Run by `scripts/tier-suite.sh` inside a guest that has them.

use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard};

use ballast_base::{Bytes, PAGE_SIZE};
use ballast_ranges::relocate::Tier;
use ballast_sys::Anon;
use ballast_sys::lock::Lock;
use ballast_sys::numa::{Place, locate, move_pages};
use ballast_sys::{Mapping, memfd};
use ballast_tier::Tiers;
use ballast_tier::kernel_files::Files;
use ballast_tier::mover::{Became, Mover, Moves, Order};
use ballast_tier::nodes::usage;
use ballast_tier::programs::memory;

const PAGES: usize = 1500;

/// The tests fill the same two nodes.
static NODES: Mutex<()> = Mutex::new(());

/// The tiers of this machine, if there are two. No other test uses them as long as the guard lives.
fn two_tiers() -> Option<(Files, Tiers, MutexGuard<'static, ()>)> {
    let alone = NODES.locked();
    let files = Files::default();
    let tiers = Tiers::detect(&files).ok().filter(|tiers| tiers.list.len() > 1);
    if tiers.is_none() {
        ballast_testkit::skip("two-nodes", "this machine has one tier of memory");
    }
    tiers.map(|tiers| (files, tiers, alone))
}

fn orders(memory: &Anon) -> Vec<Order> {
    let address = |page| (memory.addr() + page * PAGE_SIZE) as u64;
    (0..memory.len() / PAGE_SIZE).map(|page| Order { process: 0, address: address(page) }).collect()
}

fn nodes(memory: &Anon) -> Vec<Place> {
    let pages: Vec<u64> = orders(memory).iter().map(|order| order.address).collect();
    locate(std::process::id(), &pages).expect("located").expect("this process")
}

#[test]
fn pages_go_to_the_slow_node_and_back_with_all_they_hold() {
    let Some((files, tiers, _alone)) = two_tiers() else { return };
    let memory = Anon::new(PAGES * PAGE_SIZE).expect("memory");
    // The last page is never touched.
    (0..PAGES - 1).for_each(|page| memory.word(page * PAGE_SIZE + 8).store(page as u64 + 1, Ordering::Relaxed));
    let pids = [std::process::id()];
    let mover = Mover { files: &files, tiers: &tiers, pids: &pids };
    for (tier, at) in [(Tier::Slow, 1), (Tier::Fast, 0), (Tier::Slow, 1)] {
        let (mut moves, mut seen) = (Moves::default(), Vec::new());
        let has_room = mover.carry(&move_pages, tier, &orders(&memory), &mut moves, &mut |_, became| seen.push(became));
        assert!(has_room.expect("permitted"), "{moves:?}");
        let moved = seen.iter().filter(|became| **became == Became::In(tier)).count();
        assert_eq!(
            (moved, moves.promoted + moves.demoted, moves.absent),
            (PAGES - 1, PAGES as u64 - 1, 1),
            "{moves:?}"
        );
        let node = tiers.list[at].nodes[0];
        assert!(nodes(&memory)[..PAGES - 1].iter().all(|place| *place == Place::Node(node)));
        let whole = |page: usize| memory.word(page * PAGE_SIZE + 8).load(Ordering::Relaxed) == page as u64 + 1;
        assert!((0..PAGES - 1).all(whole));
    }
}

#[test]
fn pages_that_are_mapped_a_second_time_stay_and_are_counted_as_that() {
    let Some((files, tiers, _alone)) = two_tiers() else { return };
    let bytes = 100 * PAGE_SIZE;
    let file = memfd::create("shared", Bytes(bytes as u64)).expect("a file");
    let maps = [0, 1].map(|_| Mapping::shared(&file, 0, bytes).expect("mapped"));
    (0..100).for_each(|page| maps.iter().for_each(|map| map.copy_in(page * PAGE_SIZE, &[7])));
    let order = |page| Order { process: 0, address: (maps[0].addr() + page * PAGE_SIZE) as u64 };
    let orders: Vec<Order> = (0..100).map(order).collect();
    let pages: Vec<u64> = orders.iter().map(|order| order.address).collect();
    let places = || locate(std::process::id(), &pages).expect("located").expect("this process");
    let before = places();
    let to = if before[0] == Place::Node(tiers.list[0].nodes[0]) { Tier::Slow } else { Tier::Fast };
    let pids = [std::process::id()];
    let mover = Mover { files: &files, tiers: &tiers, pids: &pids };
    let (mut moves, mut stay) = (Moves::default(), 0);
    let each = &mut |_, became| stay += u64::from(became == Became::Stays);
    mover.carry(&move_pages, to, &orders, &mut moves, each).expect("permitted");
    assert_eq!(places(), before);
    assert!(moves.shared == 100 && stay == 100 && moves.promoted + moves.demoted == 0, "{moves:?}");
}

/// Has the kernel hold the first pages of this memory for pipes: they stay where they are as long as the pipes live.
fn pin(memory: &Anon, pages: usize) -> Vec<(std::io::PipeReader, std::io::PipeWriter)> {
    const OF_A_PIPE: usize = 16;
    let pipes = (0..pages).step_by(OF_A_PIPE).map(|first| {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        let bytes = OF_A_PIPE.min(pages - first) * PAGE_SIZE;
        let start = (memory.addr() + first * PAGE_SIZE) as *mut libc::c_void;
        let part = libc::iovec { iov_base: start, iov_len: bytes };
        // SAFETY: `part` is alive and names memory that is ours; nobody reads the pipe.
        let held = unsafe { libc::vmsplice(writer.as_raw_fd(), &raw const part, 1, libc::SPLICE_F_NONBLOCK) };
        assert_eq!(held, bytes as isize, "{}", std::io::Error::last_os_error());
        (reader, writer)
    });
    pipes.collect()
}

#[test]
fn pages_that_are_pinned_stay_and_are_told_as_that_and_all_others_go() {
    let Some((files, tiers, _alone)) = two_tiers() else { return };
    let memory = Anon::new(PAGES * PAGE_SIZE).expect("memory");
    (0..PAGES).for_each(|page| memory.word(page * PAGE_SIZE).store(1, Ordering::Relaxed));
    let first = nodes(&memory)[0];
    let to = if first == Place::Node(tiers.list[0].nodes[0]) { Tier::Slow } else { Tier::Fast };
    let pids = [std::process::id()];
    let mover = Mover { files: &files, tiers: &tiers, pids: &pids };
    // Fewer pages than are moved alone, and more.
    for (pinned, least) in [(20, 20), (700, 512)] {
        let _held = pin(&memory, pinned);
        let (mut moves, mut stay) = (Moves::default(), Vec::new());
        let each = &mut |order: Order, became| stay.extend((became == Became::Stays).then_some(order.address));
        assert!(mover.carry(&move_pages, to, &orders(&memory), &mut moves, each).expect("permitted"));
        assert!(stay.len() >= least && moves.busy as usize == stay.len(), "{pinned} pinned: {moves:?}");
        assert!(nodes(&memory)[..pinned].iter().all(|place| *place == first));
        let others = nodes(&memory)[pinned..].iter().filter(|place| **place != first).count();
        assert!(others > 0 && others as u64 <= moves.promoted + moves.demoted, "{others} moved: {moves:?}");
        // The pages go back for the next round.
        let back = if to == Tier::Slow { Tier::Fast } else { Tier::Slow };
        mover.carry(&move_pages, back, &orders(&memory), &mut Moves::default(), &mut |_, _| ()).expect("permitted");
    }
}

/// A process that may use the memory of one node. Dropping it ends it.
struct Confined {
    child: std::process::Child,
    group: &'static str,
}

impl Confined {
    fn start(node: u32) -> std::io::Result<Self> {
        let (all, group) = ("/sys/fs/cgroup", "/sys/fs/cgroup/two-nodes-test");
        std::fs::write(format!("{all}/cgroup.subtree_control"), "+cpuset")?;
        // A test that ended early leaves the group.
        let _ = std::fs::remove_dir(group);
        std::fs::create_dir(group)?;
        let child = std::process::Command::new("sleep").arg("1000").spawn()?;
        let confined = Self { child, group };
        std::fs::write(format!("{group}/cpuset.mems"), node.to_string())?;
        std::fs::write(format!("{group}/cgroup.procs"), confined.child.id().to_string())?;
        Ok(confined)
    }
}

impl Drop for Confined {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir(self.group);
    }
}

#[test]
fn a_program_whose_cpuset_is_without_the_node_is_refused_and_others_go_there() {
    let Some((files, tiers, _alone)) = two_tiers() else { return };
    let mut confined = match Confined::start(tiers.list[0].nodes[0]) {
        Err(error) => return ballast_testkit::skip("cgroup", error),
        Ok(confined) => confined,
    };
    let pid = confined.child.id();
    // The process may not have mapped its memory yet.
    let areas = loop {
        match memory(&files, pid) {
            Ok(memory) if !memory.areas.is_empty() => break memory.areas,
            _ => assert!(confined.child.try_wait().expect("a child").is_none(), "it has ended"),
        }
        std::thread::yield_now();
    };
    let ours = Anon::new(PAGES * PAGE_SIZE).expect("memory");
    (0..PAGES).for_each(|page| ours.word(page * PAGE_SIZE).store(1, Ordering::Relaxed));
    let (pids, mut moves) = ([pid, std::process::id()], Moves::default());
    let mover = Mover { files: &files, tiers: &tiers, pids: &pids };
    let first = areas.iter().map(|(start, _)| Order { process: 0, address: *start });
    let all: Vec<Order> = first.chain(orders(&ours).into_iter().map(|order| Order { process: 1, ..order })).collect();
    let mut refused = 0;
    let each = &mut |order: Order, became| match order.process {
        0 => refused += usize::from(became == Became::Refused),
        _ => assert_eq!(became, Became::In(Tier::Slow)),
    };
    assert!(mover.carry(&move_pages, Tier::Slow, &all, &mut moves, each).expect("meminfo"));
    assert_eq!((refused, moves.demoted), (areas.len(), PAGES as u64), "{moves:?}");
    assert!(nodes(&ours).iter().all(|place| *place == Place::Node(tiers.list[1].nodes[0])));
}

#[test]
fn a_full_node_ends_the_turn_and_nothing_is_lost() {
    let Some((files, tiers, _alone)) = two_tiers() else { return };
    let fast = tiers.list[0].nodes[0];
    let room = usage(&files, fast).expect("read").free as usize;
    let Ok(memory) = Anon::new(room + (16 << 20)) else { return ballast_testkit::skip("two-nodes", "no memory") };
    let pages = memory.len() / PAGE_SIZE;
    (0..pages).for_each(|page| memory.word(page * PAGE_SIZE).store(page as u64, Ordering::Relaxed));
    let pids = [std::process::id()];
    let mover = Mover { files: &files, tiers: &tiers, pids: &pids };
    let mut moves = Moves::default();
    // In turns, as a plan does: the room is looked at before each.
    let has_room = orders(&memory).chunks(4096).try_for_each(|turn| {
        match mover.carry(&move_pages, Tier::Fast, turn, &mut moves, &mut |_, _| ()).expect("permitted") {
            true => Ok(()),
            false => Err(()),
        }
    });
    assert!(has_room.is_err() && moves.full > 0, "{moves:?}");
    assert!((0..pages).all(|page| memory.word(page * PAGE_SIZE).load(Ordering::Relaxed) == page as u64));
}
