//! The balloon: memory held for the host, page by page, by node (Demeter, section 3.3, without a driver).
//!
//! Before: the host says how many pages of a node it wants. After: the agent holds this number of pages, pinned, and
//! has told the host which ones; or fewer, if the guest cannot spare them.
//! Units: pages. Promise: the balloon grows a chunk at a time, so that the host's other requests do not wait for it. A
//! node without memory to spare delays no other node. The balloon shrinks when the guest's tasks wait for memory, and
//! when no host listens. The kernel has all of its memory back when the agent ends.

use std::collections::BTreeMap;
use std::io;
use std::time::{Duration, Instant};

use ballast_messages::Run;

use crate::owned::Owned;
use crate::pin::{MOST, Pins};
use crate::vital;

/// Pages taken at a time: 8 MiB.
const CHUNK: u64 = 2048;
/// If tasks wait for memory for more than this share of the time, in 1/1000, a part of the balloon is given back, and
/// nothing is taken for the time `REST`.
const STALL: u64 = 50;
const REST: Duration = Duration::from_secs(10);

#[derive(Debug)]
struct Chunk {
    slot: u32,
    memory: Owned,
}

#[derive(Debug, Default)]
pub struct Balloon {
    pins: Option<Pins>,
    /// By node: pages that the host wants, and chunks that are held.
    wanted: BTreeMap<u32, u64>,
    held: BTreeMap<u32, Vec<Chunk>>,
    slots: Vec<u32>,
    next_slot: u32,
    /// Nodes of which nothing is taken until this time, and the reason.
    rests: BTreeMap<u32, (Instant, String)>,
    /// Time at which stall was read last, and its value then.
    stall: Option<(Instant, u64)>,
    /// Time spent on taking memory since `stall` was read. The kernel counts it as stall.
    own: Duration,
}

impl Balloon {
    pub fn want(&mut self, node: u32, pages: u64) {
        self.wanted.insert(node, pages);
        self.rests.remove(&node);
    }

    pub fn held(&self, node: u32) -> u64 {
        self.held.get(&node).map_or(0, |chunks| chunks.iter().map(|chunk| chunk.memory.pages()).sum())
    }

    pub fn all(&self) -> Vec<(u32, Vec<Run>)> {
        let of = |chunks: &Vec<Chunk>| chunks.iter().filter_map(|chunk| chunk.memory.runs().ok()).flatten().collect();
        self.held.iter().map(|(node, chunks)| (*node, of(chunks))).collect()
    }

    /// Returns the pages that must become free on each node: those that the balloon lacks, and the node's reserve.
    pub fn lacks(&self) -> BTreeMap<u32, u64> {
        let lacks = self.wanted.keys().map(|node| (*node, self.lacks_of(*node)));
        lacks.filter(|(_, pages)| *pages > 0).map(|(node, pages)| (node, pages.saturating_add(least(node)))).collect()
    }

    /// Returns why the balloon holds less than the host wants, for the first such node.
    pub fn note(&self) -> Option<&str> {
        let mut rests = self.rests.iter().filter(|(node, _)| self.lacks_of(**node) > 0);
        rests.next().map(|(_, (_, why))| why.as_str())
    }

    fn lacks_of(&self, node: u32) -> u64 {
        self.wanted.get(&node).map_or(0, |wanted| wanted.saturating_sub(self.held(node)))
    }

    fn rests(&self, node: u32, now: Instant) -> bool {
        self.rests.get(&node).is_some_and(|(until, _)| now < *until)
    }

    /// Returns whether [`step`](Self::step) has work: the number of held pages is not what the host wants.
    pub fn is_busy(&self, now: Instant) -> bool {
        let has_work = |node: u32, pages: u64| {
            let held = self.held(node);
            held > pages || (held < pages && !self.rests(node, now))
        };
        self.wanted.iter().any(|(node, pages)| has_work(*node, *pages))
    }

    pub fn empty(&mut self) {
        self.wanted.clear();
        self.held.clear();
        self.rests.clear();
        // Closing the table removes all pins.
        self.pins = None;
        self.slots.clear();
        self.next_slot = 0;
    }

    /// Takes or gives back one chunk towards the wanted number. Returns the pages that were taken, with their node.
    pub fn step(&mut self, now: Instant) -> Option<(u32, Vec<Run>)> {
        self.check_stall(now);
        let taken = self.one_step(now);
        self.own += now.elapsed();
        taken
    }

    fn one_step(&mut self, now: Instant) -> Option<(u32, Vec<Run>)> {
        for (node, wanted) in self.wanted.clone() {
            let held = self.held(node);
            if held > wanted {
                self.shrink(node, held - wanted);
                return None;
            }
            if held == wanted || self.rests(node, now) {
                continue;
            }
            let pages = (wanted - held).min(CHUNK).min(vital::spare(node).saturating_sub(least(node)));
            if pages == 0 {
                self.rest(node, now, format!("node {node} has no more to spare"));
                continue;
            }
            match self.take(node, pages) {
                Ok(runs) => return Some((node, runs)),
                Err(error) => self.rest(node, now, format!("node {node}: {error}")),
            }
        }
        None
    }

    fn rest(&mut self, node: u32, now: Instant, why: String) {
        self.rests.insert(node, (now + REST, why));
    }

    /// Gives 1/8 of the held memory back if tasks wait for memory. A full balloon must shrink, too.
    pub fn check_stall(&mut self, now: Instant) {
        let at = self.stall.map(|(at, _)| now.saturating_duration_since(at));
        if at.is_some_and(|since| since < Duration::from_secs(1)) {
            return;
        }
        let total = vital::tick().stall_some_us;
        let own = std::mem::take(&mut self.own);
        let Some((at, before)) = self.stall.replace((now, total)) else { return };
        let is_stalled = is_stalled(now.saturating_duration_since(at), total.saturating_sub(before), own);
        if !is_stalled || self.wanted.values().all(|pages| *pages == 0) {
            return;
        }
        for node in self.wanted.keys().copied().collect::<Vec<_>>() {
            self.rest(node, now, "the guest waits for memory".into());
        }
        for node in self.held.keys().copied().collect::<Vec<_>>() {
            let pages = self.held(node) / 8;
            self.shrink(node, pages);
        }
    }

    fn take(&mut self, node: u32, pages: u64) -> io::Result<Vec<Run>> {
        if self.pins.is_none() {
            self.pins = Some(Pins::new()?);
        }
        let slot = self.slots.pop().unwrap_or(self.next_slot);
        if slot >= MOST {
            return Err(io::Error::other("it has no more places to pin memory in"));
        }
        self.next_slot = self.next_slot.max(slot + 1);
        let pinned = Owned::new(pages as usize, Some(node)).and_then(|memory| {
            let (start, len) = memory.place();
            self.pins.as_ref().expect("made above").set(slot, start, len)?;
            // Read after pinning, because pinning may move pages.
            let runs = memory.runs()?;
            Ok((memory, runs))
        });
        let (memory, runs) = match pinned {
            Ok(pinned) => pinned,
            Err(error) => {
                self.slots.push(slot);
                return Err(error);
            }
        };
        self.held.entry(node).or_default().push(Chunk { slot, memory });
        Ok(runs)
    }

    /// Gives this number of pages of a node back, in whole chunks. Pages that are too many are taken again.
    fn shrink(&mut self, node: u32, pages: u64) {
        let mut left = pages;
        while left > 0 {
            let Some(chunk) = self.held.get_mut(&node).and_then(Vec::pop) else { return };
            left = left.saturating_sub(chunk.memory.pages());
            if let Some(pins) = &self.pins
                && let Err(error) = pins.set(chunk.slot, 0, 0)
            {
                eprintln!("ballast-agent: letting go of memory: {error}");
            }
            self.slots.push(chunk.slot);
        }
    }
}

fn least(node: u32) -> u64 {
    let pages = vital::nodes().iter().find(|other| other.node == node).map_or(0, |node| node.pages);
    vital::least_free(pages)
}

/// Returns whether tasks of the guest waited too long for memory in this time. While the balloon fills, the kernel also
/// counts this program as waiting, for the time `own`; that is no reason to give memory back.
fn is_stalled(passed: Duration, stall_us: u64, own: Duration) -> bool {
    let others = stall_us.saturating_sub(own.as_micros() as u64);
    u128::from(others) * 1000 > passed.as_micros() * u128::from(STALL)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_it_lacks_of_a_node_is_more_than_what_is_wanted_and_nothing_once_it_has_that() {
        let mut balloon = Balloon::default();
        balloon.want(0, 100);
        balloon.want(1, 0);
        let lacks = balloon.lacks();
        assert!(lacks.len() == 1 && lacks[&0] >= 100 + vital::least_free(0), "{lacks:?}");
        balloon.want(0, u64::MAX);
        assert_eq!(balloon.lacks()[&0], u64::MAX);
        balloon.want(0, 0);
        assert_eq!(balloon.lacks(), BTreeMap::new());
    }

    #[test]
    fn a_node_that_gives_no_more_keeps_no_other_one_waiting() {
        // No machine has these nodes, so the first step finds that neither has memory to spare.
        let (first, second) = (4000, 4001);
        let (mut balloon, now) = (Balloon::default(), Instant::now());
        balloon.want(first, 100);
        assert!(balloon.is_busy(now) && balloon.step(now).is_none() && !balloon.is_busy(now));
        assert!(balloon.note().is_some_and(|why| why.contains("node 4000")), "{:?}", balloon.note());
        balloon.want(second, 100);
        assert!(balloon.is_busy(now) && !balloon.rests(second, now), "the second has not been asked yet");
        assert!(balloon.rests(first, now), "and what is wanted of it does not wake the first");
        assert!(balloon.step(now).is_none() && !balloon.is_busy(now));
        assert!(balloon.is_busy(now + REST), "both are tried again");
        balloon.want(first, 0);
        assert!(balloon.note().is_some_and(|why| why.contains("node 4001")), "{:?}", balloon.note());
    }

    #[test]
    fn what_the_balloon_waits_for_itself_is_no_pressure_of_the_guests() {
        let second = Duration::from_secs(1);
        assert!(is_stalled(second, 60_000, Duration::ZERO));
        assert!(!is_stalled(second, 50_000, Duration::ZERO));
        assert!(!is_stalled(second, 700_000, Duration::from_millis(700)));
        assert!(is_stalled(second, 800_000, Duration::from_millis(700)));
    }
}
