//! Changes of the number of huge pages that fail in the middle, and lost states: other users keep their pages.

use crate::common;

use std::path::{Path, PathBuf};
use std::process::Command;

use ballast_base::{Bytes, MIB};
use ballast_pool::{Host, Page, Reserve, Want};

use common::{Place, sum, two_nodes};

/// A file of the kernel's that cannot be written while this value lives.
struct ReadOnly(PathBuf);

impl ReadOnly {
    fn pages_of(root: &Path, node: u32) -> Self {
        let file = root.join(format!("sys/devices/system/node/node{node}/hugepages/hugepages-2048kB/nr_hugepages"));
        for options in [["--bind"].as_slice(), &["-o", "remount,ro,bind"]] {
            let status = Command::new("mount").args(options).args([&file, &file]).status().expect("mount");
            assert!(status.success(), "{options:?}");
        }
        Self(file)
    }
}

impl Drop for ReadOnly {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}

/// A pool of 32 MiB on two nodes. On each, 5 pages belong to others.
fn pool(place: &Place, root: &Path) -> (Reserve, Host) {
    let host = two_nodes(root);
    let mut reserve = Reserve::open(&place.dir(), host.clone()).expect("open");
    reserve.grow(Want::Bytes(Bytes(32 * MIB)), None, Some(Bytes(16 * MIB))).expect("grow");
    assert_eq!(pages(&host), [13, 13]);
    (reserve, host)
}

fn set_surplus(root: &Path, node: u32, pages: u32) {
    let file = format!("sys/devices/system/node/node{node}/hugepages/hugepages-2048kB/surplus_hugepages");
    std::fs::write(root.join(file), format!("{pages}\n")).expect("write");
}

fn pages(host: &Host) -> [u64; 2] {
    [0, 1].map(|node| host.pages(node).expect("pages").total)
}

#[test]
fn the_change_after_one_that_failed_takes_no_page_for_one_of_others() {
    let Some(place) = Place::new() else { return };
    let root = tempfile::tempdir().expect("a directory");
    let (mut reserve, host) = pool(&place, root.path());
    let kept = ReadOnly::pages_of(root.path(), 1);
    let said = reserve.lend(Bytes(16 * MIB), Some(1)).expect_err("the kernel refuses").to_string();
    assert!(said.contains("Lending huge pages"), "{said}");
    assert_eq!(pages(&host), [13, 13]);
    drop(kept);
    reserve.lend(Bytes(8 * MIB), Some(0)).expect("lend");
    assert_eq!((pages(&host), sum(&reserve, |node| node.lent)), ([9, 5], 24 * MIB));
    reserve.lend(Bytes(0), None).expect("take back");
    assert_eq!(pages(&host), [13, 13]);
    reserve.validate().expect("valid");
}

#[test]
fn a_change_that_fails_on_one_node_is_undone_at_once_where_the_kernel_allows_it() {
    let Some(place) = Place::new() else { return };
    let root = tempfile::tempdir().expect("a directory");
    let (mut reserve, host) = pool(&place, root.path());
    // The account of owed pages cannot be written, and one must be noted: a surplus page that is converted.
    set_surplus(root.path(), 1, 1);
    std::fs::create_dir(place.dir().join("owed.new")).expect("make");
    reserve.grow(Want::Bytes(Bytes(36 * MIB)), Some(1), None).expect_err("nothing can be noted");
    assert!(!place.dir().join("journal.json").exists(), "it would undo what others do meanwhile");
    assert_eq!(host.pages(0).expect("pages").total, 13);
    std::fs::remove_dir(place.dir().join("owed.new")).expect("remove");
    reserve.validate().expect("valid");
}

#[test]
fn a_change_that_fails_or_whose_author_dies_gives_away_no_page_that_slices_still_wait_for() {
    let Some(place) = Place::new() else { return };
    let root = tempfile::tempdir().expect("a directory");
    let (mut reserve, host) = pool(&place, root.path());
    set_surplus(root.path(), 0, 2);
    reserve.grow(Want::Bytes(Bytes(36 * MIB)), Some(0), None).expect("grow");
    // The kernel has converted the surplus pages.
    set_surplus(root.path(), 0, 0);
    let grown = pages(&host);
    let owed = || std::fs::read_to_string(place.dir().join("owed.json")).expect("something is owed");
    let before = owed();
    let kept = ReadOnly::pages_of(root.path(), 1);
    reserve.lend(Bytes(16 * MIB), Some(1)).expect_err("the kernel refuses");
    assert_eq!((pages(&host), owed()), (grown, before.clone()));
    assert!(place.dir().join("journal.json").exists(), "it is still to be undone");
    drop((kept, reserve));
    let reserve = Reserve::open(&place.dir(), host.clone()).expect("open");
    assert!(!place.dir().join("journal.json").exists());
    // By the state, the pages of the second node are lent.
    assert_eq!((pages(&host), owed()), ([grown[0], 5], before));
    reserve.validate().expect("valid");
}

#[test]
fn a_pool_whose_files_are_gone_returns_its_pages_once_however_often_that_fails() {
    let Some(place) = Place::new() else { return };
    let root = tempfile::tempdir().expect("a directory");
    let (reserve, host) = pool(&place, root.path());
    drop(reserve);
    common::unmount(&place.dir().join("2M"));
    let kept = ReadOnly::pages_of(root.path(), 1);
    for _ in 0..3 {
        Reserve::open(&place.dir(), host.clone()).expect_err("the kernel refuses");
        assert_eq!(pages(&host), [5, 13]);
    }
    drop(kept);
    let reserve = Reserve::open(&place.dir(), host.clone()).expect("open");
    assert_eq!((pages(&host), reserve.overview().nodes.len()), ([5, 5], 0));
    assert!(reserve.overview().notes[0].contains("were gone"));
}

#[test]
fn a_node_that_came_after_the_pool_gives_nothing_and_the_others_still_do() {
    let Some(place) = Place::new() else { return };
    let root = tempfile::tempdir().expect("a directory");
    let (mut reserve, host) = pool(&place, root.path());
    let nodes = root.path().join("sys/devices/system/node");
    let copied = Command::new("cp").arg("-r").args([nodes.join("node0"), nodes.join("node2")]).status();
    assert!(copied.expect("cp").success());
    let meminfo = std::fs::read_to_string(nodes.join("node0/meminfo")).expect("read").replace("Node 0", "Node 2");
    std::fs::write(nodes.join("node2/meminfo"), meminfo).expect("write");
    std::fs::write(nodes.join("has_memory"), "0-2\n").expect("write");
    reserve.grow(Want::Bytes(Bytes(64 * MIB)), None, None).expect("grow");
    let notes = reserve.overview().notes;
    assert_eq!((pages(&host), host.pages(2).expect("pages").total), ([21, 21], 13), "{notes:?}");
    assert!(notes.iter().any(|note| note.contains("node 2 is younger than the pool")), "{notes:?}");
    let said = reserve.grow(Want::Bytes(Bytes(64 * MIB)), Some(2), None).expect_err("not of the pool").to_string();
    assert!(said.contains("the pool has no node 2"), "{said}");
}

#[test]
fn a_state_of_another_boot_is_forgotten_even_if_it_cannot_be_read_and_its_pages_are_of_a_size_that_is_gone() {
    let dir = tempfile::tempdir().expect("a directory");
    let write = |file: &str, text: &str| std::fs::write(dir.path().join(file), text).expect("write");
    write("origin.json", r#"{"boot":"another","mark":"origin-0"}"#);
    write("state", "no state");
    write("journal.json", r#"{"0":99999}"#);
    // A host without the kernel's files: nothing is changed there.
    let host = Host::at(&dir.path().join("nowhere")).with(Page::Gib);
    let reserve = Reserve::open(dir.path(), host).expect("open");
    assert!(reserve.overview().notes[0].contains("were gone"));
    assert_eq!(std::fs::read_dir(dir.path()).expect("list").count(), 1, "the lock alone is left");
}
