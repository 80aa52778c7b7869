//! The loop, on files that stand for a machine.

use std::collections::VecDeque;
use std::path::Path;
use std::time::Duration;

use super::*;
use crate::nodes::tests::{put, tell_apart, two_nodes};
use crate::programs::Choice;
use crate::source::{Each, Samples};

const NODES: &str = "/sys/devices/system/node";

#[derive(Clone, Debug, Default)]
struct Scripted {
    epochs: VecDeque<Vec<(u32, u64, u32)>>,
    watched: Vec<u32>,
}

impl Scripted {
    /// A source with these epochs of `(process, address, samples)`.
    fn new(epochs: impl IntoIterator<Item = Vec<(u32, u64, u32)>>) -> Self {
        Self { epochs: epochs.into_iter().collect(), watched: Vec::new() }
    }
}

impl SampleSource for Scripted {
    fn watch(&mut self, processes: &[u32]) -> io::Result<()> {
        self.watched = processes.to_vec();
        Ok(())
    }

    fn take(&mut self, each: &mut Each<'_>) -> io::Result<()> {
        for (process, address, samples) in self.epochs.pop_front().unwrap_or_default() {
            if self.watched.contains(&process) {
                each(process, address, Samples { count: samples, each: 1 });
            }
        }
        Ok(())
    }
}

fn start(files: &Files, source: Scripted) -> Option<Tierer> {
    let choice = Choice { least: 0, ..Choice::default() };
    let settings = Settings { choice, ..Settings::default() };
    match Tierer::with_files(files.clone(), settings, Box::new(source)) {
        Err(Unavailable::Frames(why)) => {
            ballast_testkit::skip("root", why);
            None
        }
        tierer => Some(tierer.expect("two tiers")),
    }
}

#[test]
fn nodes_that_come_are_used_and_when_one_tier_is_left_that_is_said() {
    let root = tempfile::tempdir().expect("directory");
    two_nodes(root.path());
    let files = Files::below(root.path());
    let Some(mut tierer) = start(&files, Scripted::default()) else { return };
    tierer.step().expect("an epoch");
    assert_eq!(tierer.status().tiers.len(), 2);
    put(root.path(), &format!("{NODES}/has_memory"), "0-2\n");
    tell_apart(root.path(), &["0", "1", "2"]);
    put(root.path(), &format!("{NODES}/node2/meminfo"), "Node 2 MemTotal: 8 kB\nNode 2 MemFree: 8 kB\n");
    (0..CHOOSE_EVERY).for_each(|_| tierer.step().expect("an epoch"));
    assert_eq!(tierer.status().tiers.len(), 3);
    put(root.path(), &format!("{NODES}/has_memory"), "0\n");
    let ended = (0..CHOOSE_EVERY).find_map(|_| tierer.step().err());
    assert!(matches!(ended, Some(Unavailable::OneTier(1))), "{ended:?}");
}

/// A process that sleeps. Dropping it ends it.
struct Sleeper(std::process::Child);

impl Sleeper {
    /// Starts it as the only program of these files; `None`, with a printed skip, if it never sleeps.
    fn start(root: &Path) -> Option<Self> {
        let sleeper = Self(std::process::Command::new("sleep").arg("1000").spawn().expect("sleep"));
        let (began, folder) = (Instant::now(), format!("/proc/{}", sleeper.0.id()));
        // The memory map changes until the process sleeps.
        while !std::fs::read_to_string(format!("{folder}/stat")).expect("its state").contains(") S ") {
            if began.elapsed() > Duration::from_secs(10) {
                ballast_testkit::skip("sleep", "a process that is to sleep does not within 10 s");
                return None;
            }
            std::thread::yield_now();
        }
        std::fs::create_dir_all(root.join("proc")).expect("directory");
        std::os::unix::fs::symlink(&folder, root.join(&folder[1..])).expect("link");
        Some(sleeper)
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_memory_block_that_is_plugged_leaves_pages_known_and_other_nodes_in_a_tier_do_not() {
    let root = tempfile::tempdir().expect("directory");
    two_nodes(root.path());
    let files = Files::below(root.path());
    let Some(mut tierer) = start(&files, Scripted::default()) else { return };
    let Some(_sleeper) = Sleeper::start(root.path()) else { return };
    let mut rounds = |epochs: u64| {
        (0..epochs).for_each(|_| tierer.step().expect("an epoch"));
        (tierer.watched[0].pages.rounds(), tierer.tiers.node_of(24 << 15))
    };
    let (before, node) = rounds(5 * CHOOSE_EVERY);
    assert_eq!(node, None);
    put(root.path(), &format!("{NODES}/node1/memory24/state"), "online\n");
    let (after, node) = rounds(CHOOSE_EVERY);
    assert!(after > before && before > CHOOSE_EVERY as u32, "{before} rounds, then {after}");
    assert_eq!(node, Some(1));
    tell_apart(root.path(), &["1", "0"]);
    let (after, _) = rounds(CHOOSE_EVERY);
    assert!(after <= CHOOSE_EVERY as u32, "{after} rounds");
}

#[test]
fn a_program_whose_pages_may_not_be_moved_is_asked_once_in_30_s_and_ends_nothing() {
    let root = tempfile::tempdir().expect("directory");
    two_nodes(root.path());
    // All memory is on the slow node; the kernel has no node of the fast one's number, so it refuses.
    for node in [0, 1] {
        std::fs::remove_dir_all(root.path().join(format!("sys/devices/system/node/node{node}"))).expect("gone");
    }
    put(root.path(), "/sys/devices/system/memory/block_size_bytes", "100000000000\n");
    put(root.path(), &format!("{NODES}/node0/memory0/state"), "online\n");
    put(root.path(), &format!("{NODES}/has_memory"), "0,63\n");
    tell_apart(root.path(), &["63", "0"]);
    for node in [0, 63] {
        let meminfo = format!("Node {node} MemTotal: 1048576 kB\nNode {node} MemFree: 524288 kB\n");
        put(root.path(), &format!("{NODES}/node{node}/meminfo"), &meminfo);
    }
    let files = Files::below(root.path());
    if start(&files, Scripted::default()).is_none() {
        return;
    }
    let Some(sleeper) = Sleeper::start(root.path()) else { return };
    let pid = sleeper.0.id();
    let areas = memory(&files, pid).expect("its memory").areas;
    let samples: Vec<(u32, u64, u32)> = areas.iter().map(|(start, _)| (pid, *start, 50)).collect();
    let Some(mut tierer) = start(&files, Scripted::new(vec![samples; 200])) else { return };
    let mut asked = Vec::new();
    for _ in 0..150 {
        tierer.plan_again = Instant::now();
        tierer.step().expect("an epoch");
        asked.push(tierer.status().moves.refused);
    }
    // The kernel is asked in the first epoch, and 60 and 120 epochs later.
    let times = asked.chunk_by(|a, b| a == b).filter(|same| same[0] > 0).count();
    assert!(times == 3 && tierer.status().moves.promoted == 0, "{asked:?}");
    assert!(tierer.status().notes.iter().any(|note| note.contains("refuses")), "{:?}", tierer.status());
    assert_eq!(tierer.status().programs, 1);
}
