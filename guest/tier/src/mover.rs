//! Moves pages as a plan says: demote first, then promote into the freed memory, turn by turn (Demeter §3.2.3).
//!
//! Before: a plan of [`ballast_ranges::relocate`]. After: pages are on other nodes, and each result is booked.
//! The paper swaps pages; no stock call can, so a turn is no larger than the reserve that the fast tier keeps free.
//! Threads: the caller's. Units: pages, bytes.
//! Promise: a page that stays is counted by reason and left alone for a while; a tier that is full ends the turn; pages
//! that one program pins, or that the kernel refuses to move for it, do not hold up another program's pages.

use std::io;

use ballast_base::PAGE_SIZE;
use ballast_ranges::relocate::Tier;
use ballast_sys::numa::Place;
use serde::Serialize;

use crate::kernel::Move;
use crate::kernel_files::Files;
use crate::nodes::{Tiers, usage};

/// Pages that were to be moved, and their results.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Moves {
    /// From a slow tier to the fast one.
    pub promoted: u64,
    /// From the fast tier to a slow one.
    pub demoted: u64,
    /// Pages that were gone.
    pub absent: u64,
    /// Pages that are mapped more than once.
    pub shared: u64,
    /// Pages that are pinned, or under I/O.
    pub busy: u64,
    /// Pages for which the other tier had no room.
    pub full: u64,
    /// Pages that the kernel cannot move.
    pub never: u64,
    /// Pages of programs that may not use the other node, for example by their cpuset.
    pub refused: u64,
}

/// Where a page of a process is to go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Order {
    /// Index of its process, for the caller.
    pub process: usize,
    /// Its address there.
    pub address: u64,
}

/// The result for one page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Became {
    /// It is in this tier now.
    In(Tier),
    /// It is gone.
    Gone,
    /// It stays where it was.
    Stays,
    /// The kernel refused to move any page of this program to that node.
    Refused,
}

/// Moves pages to nodes with room.
#[derive(Debug)]
pub struct Mover<'a> {
    /// Where meminfo is.
    pub files: &'a Files,
    /// The nodes.
    pub tiers: &'a Tiers,
    /// The pid of each process.
    pub pids: &'a [u32],
}

impl Mover<'_> {
    /// Moves pages of any processes to this tier, and reports the result for each. Returns false if it is full.
    ///
    /// # Errors
    /// The kernel does not say how much memory is free.
    pub fn carry(
        &self,
        move_pages: &Move<'_>,
        to: Tier,
        orders: &[Order],
        moves: &mut Moves,
        each: &mut dyn FnMut(Order, Became),
    ) -> io::Result<bool> {
        let Some(node) = self.roomiest(to)? else {
            moves.full += orders.len() as u64;
            return Ok(false);
        };
        let mut has_room = true;
        for part in orders.chunk_by(|a, b| a.process == b.process) {
            let Some(&pid) = self.pids.get(part[0].process) else { continue };
            let addresses: Vec<u64> = part.iter().map(|order| order.address).collect();
            let mut places = match move_pages(pid, &addresses, node) {
                Ok(Some(places)) => places,
                Ok(None) => {
                    moves.absent += part.len() as u64;
                    part.iter().for_each(|order| each(*order, Became::Gone));
                    continue;
                }
                // Its cpuset is without the node, it belongs to another user, or the node is gone by now.
                Err(_) => {
                    moves.refused += part.len() as u64;
                    part.iter().for_each(|order| each(*order, Became::Refused));
                    continue;
                }
            };
            let are_stuck = self.ask_alone(move_pages, (pid, node), &addresses, &mut places, &mut has_room);
            for (order, place) in part.iter().zip(places) {
                let (count, became) = match place {
                    Place::Node(now) if self.tiers.is_fast(now) == (to == Tier::Fast) => match to {
                        Tier::Fast => (&mut moves.promoted, Became::In(to)),
                        Tier::Slow => (&mut moves.demoted, Became::In(to)),
                    },
                    Place::Absent => (&mut moves.absent, Became::Gone),
                    Place::Full => {
                        (moves.full, has_room) = (moves.full + 1, false);
                        continue;
                    }
                    // The page was not tried, so the next plan has it again.
                    Place::Untried if !are_stuck => continue,
                    Place::Shared => (&mut moves.shared, Became::Stays),
                    Place::Busy | Place::Untried => (&mut moves.busy, Became::Stays),
                    Place::Never | Place::Node(_) => (&mut moves.never, Became::Stays),
                };
                *count += 1;
                each(*order, became);
            }
        }
        Ok(has_room)
    }

    /// If a list fails in part, the kernel stops and gives no reasons; so each page is moved alone to learn its reason.
    /// Returns whether the other pages count as pinned: a program may have more pinned pages than can be moved alone
    /// before the first of them are tried again, and these pages would fill each plan.
    fn ask_alone(
        &self,
        move_pages: &Move<'_>,
        (pid, node): (u32, u32),
        addresses: &[u64],
        places: &mut [Place],
        has_room: &mut bool,
    ) -> bool {
        let (mut asked, mut stuck) = (0, 0);
        for (at, place) in places.iter_mut().enumerate() {
            if *place == Place::Untried && asked < MOST_ALONE && *has_room {
                asked += 1;
                let Ok(Some(alone)) = move_pages(pid, &addresses[at..=at], node) else { continue };
                // Alone it was tried, but the kernel says neither that it is pinned nor that the node is full.
                *place = match alone[0] {
                    Place::Untried if self.room(node).is_ok_and(|room| room < PAGE_SIZE as u64) => Place::Full,
                    Place::Untried => Place::Busy,
                    place => place,
                };
                *has_room &= *place != Place::Full;
                stuck += usize::from(*place == Place::Busy);
            }
        }
        stuck == MOST_ALONE
    }

    /// Returns the free memory of a node above the kernel's reserve.
    fn room(&self, node: u32) -> io::Result<u64> {
        let now = usage(self.files, node)?;
        Ok(now.free.saturating_sub(now.high))
    }

    /// Returns the node of the tier with the most free memory above the kernel's reserve; of the slow tiers, a node of
    /// the fastest one with free memory. `None` if no node has any.
    fn roomiest(&self, tier: Tier) -> io::Result<Option<u32>> {
        let tiers = match tier {
            Tier::Fast => &self.tiers.list[..1],
            Tier::Slow => &self.tiers.list[1..],
        };
        for tier in tiers {
            let mut best = None;
            for node in &tier.nodes {
                let room = self.room(*node)?;
                if room >= PAGE_SIZE as u64 && best.is_none_or(|(most, _)| room > most) {
                    best = Some((room, *node));
                }
            }
            if let Some((_, node)) = best {
                return Ok(Some(node));
            }
        }
        Ok(None)
    }
}

/// Most pages of a list that are moved alone to learn why they stay. If all are pinned, the rest counts as pinned.
const MOST_ALONE: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nodes::tests::{put, two_nodes};
    use ballast_sys::numa::move_pages;
    use std::sync::atomic::Ordering;

    #[test]
    fn the_roomiest_node_of_a_tier_is_taken_and_none_where_all_are_full() {
        let root = tempfile::tempdir().expect("directory");
        two_nodes(root.path());
        let files = Files::below(root.path());
        let tiers = Tiers::detect(&files).expect("two tiers");
        let mover = Mover { files: &files, tiers: &tiers, pids: &[] };
        assert_eq!(mover.roomiest(Tier::Fast).expect("read"), Some(0));
        assert_eq!(mover.roomiest(Tier::Slow).expect("read"), Some(1));
        // 112 pages are to stay free.
        put(
            root.path(),
            "/sys/devices/system/node/node0/meminfo",
            "Node 0 MemTotal: 99999 kB\nNode 0 MemFree: 450 kB\n",
        );
        assert_eq!(mover.roomiest(Tier::Fast).expect("read"), None);
        let mut moves = Moves::default();
        let order = Order { process: 0, address: 4096 };
        assert!(!mover.carry(&move_pages, Tier::Fast, &[order], &mut moves, &mut |_, _| ()).expect("an outcome"));
        assert_eq!(moves.full, 1);
    }

    #[test]
    fn pages_that_are_there_already_count_as_moved_and_absent_ones_are_told_of() {
        let files = Files::default();
        let Ok(mut tiers) = Tiers::detect(&files) else { return ballast_testkit::skip("numa", "no nodes") };
        // One tier is enough to move to where pages are.
        tiers.list.truncate(1);
        let memory = ballast_sys::Anon::new(8 * PAGE_SIZE).expect("memory");
        (0..7).for_each(|page| memory.word(page * PAGE_SIZE).store(9, Ordering::Relaxed));
        let order = |page: usize| Order { process: 0, address: (memory.addr() + page * PAGE_SIZE) as u64 };
        let orders: Vec<Order> = (0..8).map(order).collect();
        let (pids, mut moves, mut gone) = ([std::process::id()], Moves::default(), Vec::new());
        let mover = Mover { files: &files, tiers: &tiers, pids: &pids };
        let each = &mut |order: Order, became| {
            if became == Became::Gone {
                gone.push(order.address)
            }
        };
        assert!(mover.carry(&move_pages, Tier::Fast, &orders, &mut moves, each).expect("meminfo"));
        if moves.refused > 0 {
            return ballast_testkit::skip("numa", "this kernel moves no pages between nodes");
        }
        assert_eq!((moves.promoted, moves.absent, gone), (7, 1, vec![orders[7].address]));
    }

    #[test]
    fn what_the_kernel_refuses_for_one_program_keeps_no_page_of_another_one_where_it_is() {
        let files = Files::default();
        let Ok(mut tiers) = Tiers::detect(&files) else { return ballast_testkit::skip("numa", "no nodes") };
        tiers.list.truncate(1);
        let memory = ballast_sys::Anon::new(PAGE_SIZE).expect("memory");
        memory.word(0).store(9, Ordering::Relaxed);
        let order = |process| Order { process, address: memory.addr() as u64 };
        // A kernel thread has no memory, so the kernel refuses.
        let (pids, mut moves, mut seen) = ([2, std::process::id()], Moves::default(), Vec::new());
        let mover = Mover { files: &files, tiers: &tiers, pids: &pids };
        let each = &mut |order: Order, became| seen.push((order.process, became));
        assert!(mover.carry(&move_pages, Tier::Fast, &[order(0), order(1)], &mut moves, each).expect("meminfo"));
        if seen[0].1 != Became::Refused || seen[1].1 == Became::Refused {
            return ballast_testkit::skip("numa", format!("{seen:?}"));
        }
        assert_eq!(seen, [(0, Became::Refused), (1, Became::In(Tier::Fast))]);
        assert_eq!((moves.refused, moves.promoted), (1, 1));
    }

    #[test]
    fn a_program_that_has_much_memory_pinned_has_all_of_it_left_alone_and_others_what_was_not_reached() {
        let root = tempfile::tempdir().expect("directory");
        two_nodes(root.path());
        let files = Files::below(root.path());
        let tiers = Tiers::detect(&files).expect("two tiers");
        let mover = Mover { files: &files, tiers: &tiers, pids: &[7] };
        let orders: Vec<Order> = (0..1000).map(|page| Order { process: 0, address: page << 12 }).collect();
        let carry = |pinned: u64| {
            // A list with a pinned page fails, and no page of it moves.
            let kernel = move |_: u32, pages: &[u64], node: u32| {
                let is_stuck = pages.iter().any(|page| page >> 12 < pinned);
                Ok(Some(vec![if is_stuck { Place::Untried } else { Place::Node(node) }; pages.len()]))
            };
            let (mut moves, mut stay) = (Moves::default(), 0);
            let each = &mut |_, became| stay += u64::from(became == Became::Stays);
            assert!(mover.carry(&kernel, Tier::Slow, &orders, &mut moves, each).expect("meminfo"));
            (stay, moves.busy, moves.demoted)
        };
        assert_eq!(carry(0), (0, 0, 1000));
        assert_eq!(carry(900), (1000, 1000, 0));
        // One of the pages that are moved alone goes, so others may go, too.
        assert_eq!(carry(63), (63, 63, 1));
        // The kernel gives the same answer where the node has no free page.
        let meminfo = "Node 1 MemTotal: 99999 kB\nNode 1 MemFree: 20 kB\n";
        let full = |_: u32, pages: &[u64], _: u32| {
            put(root.path(), "/sys/devices/system/node/node1/meminfo", meminfo);
            Ok(Some(vec![Place::Untried; pages.len()]))
        };
        let mut moves = Moves::default();
        let each = &mut |_, became| panic!("{became:?}");
        assert!(!mover.carry(&full, Tier::Slow, &orders, &mut moves, each).expect("meminfo"));
        assert_eq!(moves, Moves { full: 1, ..Moves::default() });
    }
}
