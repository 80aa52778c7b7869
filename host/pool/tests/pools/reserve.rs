//! A pool on real huge pages: what it reserves, hands out, takes back and lends, and what it never hands out.

use crate::common;

use std::sync::atomic::Ordering;

use ballast_base::pool::Nodes;
use ballast_base::{Bytes, HUGE_SIZE, MIB, PAGE_SIZE};
use ballast_pool::map::Mode;
use ballast_pool::{Grant, Reserve, Want};
use ballast_sys::Mapping;

use common::{Place, SECRET, grant, hold_in_pipe, map, search_and_mark, sum, two_nodes, zero_all};

#[test]
fn memory_is_reserved_handed_out_and_comes_back_zeroed_when_the_last_holder_is_gone() {
    let Some(place) = Place::new() else { return };
    let Some(mut reserve) = place.pool(64, 16) else { return };
    assert_eq!((place.pages(), sum(&reserve, |node| node.ready)), (32, 64 * MIB));
    let first = grant(&mut reserve, "first", 40);
    assert_eq!((first.files.len(), sum(&reserve, |node| node.used)), (3, 40 * MIB));
    assert_eq!(sum(&reserve, |node| node.fenced), 8 * MIB, "the rest of its third file is nobody else's");
    let ram = map(&first);
    assert_eq!(search_and_mark(&ram), 0);
    // A VM can reach the rest of its file.
    let rest = map(&Grant { extents: vec![whole_file(2)], ..first });
    search_and_mark(&rest);
    assert_eq!(reserve.tend().expect("tend"), 0, "it is mapped");
    drop(ram);
    assert_eq!(reserve.tend().expect("tend"), 0, "a file of it is mapped");
    drop(rest);
    assert_eq!(reserve.tend().expect("tend"), 1);
    assert_eq!(sum(&reserve, |node| node.dirty), 48 * MIB);
    let said = reserve
        .grant("next", Bytes(64 * MIB), Mode::Slices, &Nodes::One(place.node()))
        .expect_err("too little is zeroed")
        .to_string();
    assert!(said.contains("8 are ready for it (24 are to be zeroed"), "{said}");
    zero_all(&mut reserve);
    reserve.validate().expect("valid");
    let next = grant(&mut reserve, "next", 64);
    assert_eq!(search_and_mark(&map(&next)), 0, "somebody else's memory");
    drop(next);
    assert_eq!(reserve.tend().expect("tend"), 1);
    assert_eq!(place.pages(), 32, "no page was lost, and none is too many");
}

fn whole_file(file: u16) -> ballast_base::Extent {
    ballast_base::Extent { file, offset: Bytes(0), len: Bytes(16 * MIB) }
}

#[test]
fn an_owner_that_follows_finds_all_of_it_and_two_are_never() {
    let Some(place) = Place::new() else { return };
    let Some(mut reserve) = place.pool(32, 16) else { return };
    let held = grant(&mut reserve, "kept", 16);
    let ram = map(&held);
    search_and_mark(&ram);
    drop(reserve);
    let mut reserve = place.open();
    reserve.validate().expect("valid");
    assert_eq!(reserve.overview().tenants[0].name, "kept");
    assert_eq!(reserve.tend().expect("tend"), 0);
    assert_eq!(ram.words(0, 1)[0].load(Ordering::Relaxed), SECRET, "its memory is as it was");
    drop((ram, held));
    assert_eq!(reserve.tend().expect("tend"), 1);
    // A lock does not exclude its own process, so another process must try.
    let python = std::process::Command::new("python3").args(["--version"]).output();
    if python.is_ok() {
        let lock = place.dir().join("lock");
        let script = "import fcntl,sys\nfcntl.lockf(open(sys.argv[1],'w'),fcntl.LOCK_EX|fcntl.LOCK_NB)";
        let status = std::process::Command::new("python3").args(["-c", script]).arg(lock).output().expect("python3");
        assert!(!status.status.success(), "another process got the lock");
    }
}

#[test]
fn what_is_lent_is_the_hosts_and_comes_back_zeroed() {
    let Some(place) = Place::new() else { return };
    let Some(mut reserve) = place.pool(64, 16) else { return };
    let held = grant(&mut reserve, "vm", 16);
    search_and_mark(&map(&held));
    reserve.lend(Bytes(32 * MIB), Some(place.node())).expect("lend");
    assert_eq!((place.pages(), sum(&reserve, |node| node.lent)), (16, 32 * MIB));
    reserve.lend(Bytes(64 * MIB), Some(place.node())).expect("lend");
    assert_eq!((place.pages(), sum(&reserve, |node| node.lent)), (8, 48 * MIB), "a VM has the rest");
    assert!(reserve.overview().notes[0].contains("48 MiB of 64 MiB are lent"), "{:?}", reserve.overview().notes);
    reserve.validate().expect("valid");
    reserve.lend(Bytes(8 * MIB), Some(place.node())).expect("take back");
    assert_eq!((place.pages(), sum(&reserve, |node| node.lent)), (28, 8 * MIB));
    // A pool that grows takes back lent slices first.
    reserve.grow(Want::Bytes(Bytes(64 * MIB)), Some(place.node()), None).expect("grow");
    assert_eq!((place.pages(), sum(&reserve, |node| node.lent)), (32, 0));
    zero_all(&mut reserve);
    let rest = grant(&mut reserve, "next", 48);
    assert_eq!(search_and_mark(&map(&rest)), 0);
    reserve.validate().expect("valid");
}

#[test]
fn a_page_that_a_pipe_holds_is_given_to_nobody() {
    let Some(place) = Place::new() else { return };
    let Some(mut reserve) = place.pool(32, 16) else { return };
    let held = grant(&mut reserve, "spy", 32);
    let ram = map(&held);
    search_and_mark(&ram);
    // The spy's page is in a pipe that outlives the spy's mapping and descriptors.
    let (reader, writer) = hold_in_pipe(&ram, 0);
    drop((ram, held));
    assert_eq!(reserve.tend().expect("tend"), 1, "the kernel says that nobody has the files");
    zero_all(&mut reserve);
    // The kernel has one page less, unless a page of another user became free.
    let (ready, waiting) = (sum(&reserve, |node| node.ready), reserve.overview().waiting);
    assert!(ready >= 30 * MIB && ready + waiting.0 == 32 * MIB, "{ready}, {waiting}");
    let next = grant(&mut reserve, "next", ready / MIB);
    let victim = map(&next);
    assert_eq!(search_and_mark(&victim), 0);
    let mut seen = [0; PAGE_SIZE];
    let got = rustix::io::read(&reader, &mut seen).expect("read");
    let word = u64::from_ne_bytes(seen[..8].try_into().expect("eight bytes"));
    assert_eq!((got, word), (PAGE_SIZE, SECRET), "the spy sees its own page and no other");
    drop((reader, writer));
    for job in reserve.jobs_again() {
        let done = job.run();
        assert!(reserve.finish(done), "the page is free now");
    }
    assert_eq!(reserve.overview().waiting, Bytes(0));
    reserve.validate().expect("valid");
}

#[test]
fn bad_requests_are_refused_by_name() {
    let Some(place) = Place::new() else { return };
    let mut reserve = place.open();
    let said = |result: Result<Grant, ballast_pool::Error>| result.expect_err("refused").to_string();
    assert!(said(reserve.grant("vm", Bytes(MIB), Mode::Slices, &Nodes::Any)).contains("nothing is reserved"));
    drop(reserve);
    let Some(mut reserve) = place.pool(32, 16) else { return };
    assert!(said(reserve.grant("vm", Bytes(MIB), Mode::Slices, &Nodes::Any)).contains("1 MiB is no multiple of 2 MiB"));
    assert!(said(reserve.grant("vm", Bytes(2 * MIB), Mode::Slices, &Nodes::One(77))).contains("no node 77"));
    let grown = reserve.grow(Want::Percent(1), Some(77), None).expect_err("no node").to_string();
    assert!(grown.contains("there is no node 77"), "{grown}");
    let grown = reserve.grow(Want::Percent(1), None, Some(Bytes(32 * MIB))).expect_err("no brick").to_string();
    assert!(grown.contains("they cannot become 32 MiB"), "{grown}");
    assert!(reserve.overview().tenants.is_empty());
}

#[test]
fn two_nodes_give_as_much_each_and_keep_what_others_have() {
    let Some(place) = Place::new() else { return };
    let root = tempfile::tempdir().expect("a directory");
    let host = two_nodes(root.path());
    let mut reserve = Reserve::open(&place.dir(), host.clone()).expect("open");
    reserve.grow(Want::Percent(80), None, Some(Bytes(1 << 30))).expect("grow");
    let reserved =
        |reserve: &Reserve| reserve.overview().nodes.iter().map(|node| node.reserved.0 >> 30).collect::<Vec<_>>();
    let pages = || [0, 1].map(|node| host.pages(node).expect("pages").total);
    let notes = reserve.overview().notes;
    // 3 + 1 GiB of node 1, less half of the margin: 256 MiB.
    assert_eq!((reserved(&reserve), pages()), (vec![3, 3], [1925, 1925]), "{notes:?}");
    assert!(notes.iter().any(|note| note.contains("node 1 can give 3.8 GiB of the 12.8 GiB")), "{notes:?}");
    assert!(notes.last().is_some_and(|note| note.contains("balanced")), "{notes:?}");
    reserve.lend(Bytes(1 << 30), Some(1)).expect("lend");
    assert_eq!(pages(), [1925, 1413]);
    reserve.grow(Want::Bytes(Bytes(6 << 30)), None, None).expect("grow");
    assert_eq!(pages(), [1925, 1541], "what is short of 3 GiB, and no more");
    reserve.validate().expect("valid");
}

#[test]
fn pages_that_take_the_place_of_held_ones_leave_the_host_its_margin() {
    let Some(place) = Place::new() else { return };
    let root = tempfile::tempdir().expect("a directory");
    let host = two_nodes(root.path());
    let mut reserve = Reserve::open(&place.dir(), host.clone()).expect("open");
    reserve.grow(Want::Bytes(Bytes(32 * MIB)), None, Some(Bytes(16 * MIB))).expect("grow");
    // The kernel of this machine has no such pages, so all slices wait.
    zero_all(&mut reserve);
    if reserve.overview().waiting != Bytes(32 * MIB) {
        return ballast_testkit::skip("hugetlb", "this machine has huge pages that nobody uses");
    }
    // From now on the host has 8 GiB, of which 520 MiB are available: 8 MiB more than the margin.
    for node in [0, 1] {
        let file = root.path().join(format!("sys/devices/system/node/node{node}/meminfo"));
        let text = std::fs::read_to_string(&file).expect("read");
        std::fs::write(&file, text.replace("MemTotal: 16777216 kB", "MemTotal: 4194304 kB")).expect("write");
    }
    assert_eq!(host.memory(1).expect("memory").total, Bytes(4 << 30));
    std::fs::write(root.path().join("proc/meminfo"), format!("MemAvailable: {} kB\n", 520 << 10)).expect("write");
    let pages = || [0, 1].map(|node| host.pages(node).expect("pages").total).iter().sum::<u64>();
    let before = pages();
    for _ in 0..12 {
        for job in reserve.jobs_again() {
            let done = job.run();
            assert!(!reserve.finish(done), "a page from nowhere");
        }
        reserve.replenish(false).expect("ask for pages");
        // The kernel reports the memory that the pool has taken.
        let left = (520 << 10) - (pages() - before) * (2 << 10);
        std::fs::write(root.path().join("proc/meminfo"), format!("MemAvailable: {left} kB\n")).expect("write");
    }
    assert_eq!(pages() - before, 4);
}

#[test]
fn a_change_whose_author_died_is_undone() {
    let Some(place) = Place::new() else { return };
    let Some(reserve) = place.pool(32, 16) else { return };
    drop(reserve);
    // The author had noted the number of the others' pages, and had changed the kernel's number.
    let (host, node) = (ballast_pool::Host::default(), place.node());
    let others = host.pages(node).expect("pages").total - 16;
    std::fs::write(place.dir().join("journal.json"), format!("{{\"{node}\":{others}}}")).expect("write");
    host.change_pages(node, 10).expect("change");
    let reserve = place.open();
    assert_eq!(place.pages(), 16, "the kernel keeps pages that nobody knows of");
    reserve.validate().expect("valid");
    assert!(!place.dir().join("journal.json").exists());
}

#[test]
fn a_pool_that_grows_beside_pages_beyond_the_reserved_ones_has_its_own_and_leaves_those_what_they_are() {
    const OTHERS: u64 = 4;
    let Some(place) = Place::new() else { return };
    let host = ballast_pool::Host::default();
    let nodes = host.nodes().expect("nodes");
    let surplus = |node: &u32| host.pages(*node).expect("pages").surplus;
    let at_first: Vec<u64> = nodes.iter().map(surplus).collect();
    let others = ballast_testkit::PoolLoan::new(OTHERS).and_then(|loan| {
        // The others have the free pages, too, if the host had any.
        let free = nodes.iter().map(|node| Ok(host.pages(*node)?.free)).sum::<std::io::Result<u64>>()?;
        let all = OTHERS + free;
        let file = ballast_sys::memfd::create_huge("ballast-others", Bytes(all * HUGE_SIZE as u64))?;
        let map = Mapping::shared(&file, 0, all as usize * HUGE_SIZE)?;
        map.populate(0, map.len())?;
        // From here on no process gets more surplus pages: the pool has its own pages, or none.
        drop(loan);
        Ok(map)
    });
    let Ok(others) = others.inspect_err(|why| ballast_testkit::skip("hugetlb", why)) else { return };
    // The kernel decides of which node the pages are: the pool takes the node that has most of them.
    let gained = nodes.iter().zip(at_first).map(|(node, first)| (surplus(node).saturating_sub(first), *node));
    let (gained, node) = gained.max().expect("a node");
    let before = host.pages(node).expect("pages");
    let Some(mut reserve) = place.pool_of(32, 16, Some(node)) else { return };
    assert_eq!(sum(&reserve, |node| node.ready), 32 * MIB, "it waits for pages that others have");
    assert_eq!(host.pages(node).expect("pages").total, before.total + 16 + before.surplus, "all count as reserved");
    assert_eq!(reserve.tend().expect("tend"), 0);
    let now = host.pages(node).expect("pages");
    assert_eq!((now.total, now.surplus), (before.total + 16, before.surplus), "they are what they were");
    // The owner dies before it gives them back, and the next owner does so.
    reserve.lend(Bytes(16 * MIB), Some(node)).expect("lend");
    reserve.lend(Bytes(0), Some(node)).expect("take back");
    drop(reserve);
    let mut reserve = place.open();
    zero_all(&mut reserve);
    assert_eq!(sum(&reserve, |node| node.ready), 32 * MIB);
    reserve.tend().expect("tend");
    drop(others);
    let now = host.pages(node).expect("pages");
    assert_eq!((now.total, now.surplus), (before.total + 16, before.surplus - gained), "no page is kept for nobody");
    reserve.validate().expect("valid");
}

#[test]
fn a_pool_whose_files_are_gone_is_forgotten_and_its_pages_are_the_hosts() {
    let Some(place) = Place::new() else { return };
    let Some(mut reserve) = place.pool(32, 16) else { return };
    let held = grant(&mut reserve, "vm", 16);
    drop(reserve);
    common::unmount(&place.dir().join("2M"));
    let mut reserve = place.open();
    assert_eq!((place.pages(), reserve.overview().nodes.len()), (0, 0), "{:?}", reserve.overview());
    assert!(reserve.overview().notes[0].contains("were gone"));
    reserve.grow(Want::Bytes(Bytes(32 * MIB)), Some(place.node()), None).expect("grow");
    zero_all(&mut reserve);
    let said =
        reserve.grant("huge", Bytes(32 * MIB), Mode::Slices, &Nodes::Any).map(|grant| search_and_mark(&map(&grant)));
    // While the VM of the old files lives, the kernel may count its pages as those of the new pool.
    assert!(said.is_err() || said.is_ok_and(|found| found == 0));
    drop(held);
}
