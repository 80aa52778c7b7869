//! Which pages to page out next, from which pages came back.
//!
//! The kernel tells which pages are in memory, not which are used. So a hand goes through memory in circles and sends
//! out each page that it meets. If the page is in memory again when the hand returns, the guest has used it: the hand
//! then passes it 1, 3, 7, and at last 15 times. If a circle sends out too few pages, pages that should be passed go,
//! too.
//!
//! The first circle is by address, each later one goes through parts of 2 MiB in another random order. By address, a
//! guest that reads more than its limit in a loop would lose each page shortly before it reads the page again.
//!
//! Before: a VM is above its limit. After: pages to page out, in the order of the hand.
//! Threads: one at a time. Units: pages, counted through all of the VM's RAM. Promise: a pick looks at each page five
//! times at most, and returns no page twice.

use std::ops::Range;

use ballast_base::PAGES_PER_UNIT;

/// The hand sent this page out.
const OUT: u8 = 0x80;
/// How often in a row the page was back when the hand came.
const TRIES_SHIFT: u8 = 4;
const MOST_TRIES: u8 = 4;
/// How often the hand will still pass the page.
const LEFT: u8 = 0x0f;
/// In place of that number, beside [`OUT`]: the page was picked in this call, and has not gone yet.
const PICKED: u8 = LEFT;
/// Pages of a part, and most pages that are examined at once.
const WINDOW: u64 = PAGES_PER_UNIT;

/// The hand, and one byte for each page.
#[derive(Debug, Default)]
pub struct Order {
    marks: Vec<u8>,
    /// The parts, in the order of this circle.
    parts: Vec<u32>,
    /// Index in `parts`, and the page within that part.
    hand: (usize, u64),
    random: u64,
}

/// Pages to page out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Picked {
    /// Pages to page out, as ranges.
    pub ranges: Vec<Range<u64>>,
    /// Number of pages in the ranges.
    pub pages: u64,
    /// Number of pages that were out and are back.
    pub restored: u64,
}

impl Picked {
    fn add(&mut self, page: u64) {
        self.pages += 1;
        match self.ranges.last_mut() {
            Some(last) if last.end == page => last.end += 1,
            _ => self.ranges.push(page..page + 1),
        }
    }
}

fn tries(mark: u8) -> u8 {
    (mark & !OUT) >> TRIES_SHIFT
}

fn passed(tries: u8) -> u8 {
    (tries << TRIES_SHIFT) | ((1u8 << tries) - 1)
}

impl Order {
    /// The order of a VM with this number of pages.
    pub fn new(pages: u64) -> Self {
        let parts = (0..pages.div_ceil(WINDOW) as u32).collect();
        Self { marks: vec![0; pages as usize], parts, hand: (0, 0), random: 1 }
    }

    /// Picks up to `want` pages. `present` returns the ascending runs of pages in memory within a range.
    ///
    /// # Errors
    /// Those of `present`; then nothing was picked.
    pub fn pick<E>(
        &mut self,
        want: u64,
        mut present: impl FnMut(Range<u64>) -> Result<Vec<Range<u64>>, E>,
    ) -> Result<Picked, E> {
        let mut picked = Picked::default();
        let result = self.circles(want, &mut present, &mut picked);
        let marks = picked.ranges.iter().flat_map(|range| range.start as usize..range.end as usize);
        // Pages that stay, because of an error, are not out.
        let kept = if result.is_ok() { !LEFT } else { !(OUT | LEFT) };
        marks.for_each(|page| self.marks[page] &= kept);
        result.map(|()| picked)
    }

    fn circles<E>(
        &mut self,
        want: u64,
        present: &mut impl FnMut(Range<u64>) -> Result<Vec<Range<u64>>, E>,
        picked: &mut Picked,
    ) -> Result<(), E> {
        let pages = self.marks.len() as u64;
        let mut begins = false;
        for round in 0..=MOST_TRIES {
            let mut looked = 0;
            while looked < pages && picked.pages < want {
                let (index, within) = self.hand;
                let first = u64::from(self.parts[index]) * WINDOW;
                let (at, end) = (first + within, pages.min(first + WINDOW));
                let window = at..end.min(at + (pages - looked));
                let runs = present(window.clone())?;
                let seen = self.window(window, &runs, (1 << round) - 1, want, picked);
                looked += seen;
                self.hand = if at + seen < end { (index, within + seen) } else { ((index + 1) % self.parts.len(), 0) };
                begins |= self.hand == (0, 0);
            }
            if picked.pages >= want {
                break;
            }
        }
        if begins {
            self.shuffle_rest();
        }
        Ok(())
    }

    /// Puts the parts that this circle has not reached into a random order.
    fn shuffle_rest(&mut self) {
        let met = self.hand.0 + usize::from(self.hand.1 > 0);
        for last in (met + 1..self.parts.len()).rev() {
            // Xorshift (Marsaglia 2003).
            self.random ^= self.random << 13;
            self.random ^= self.random >> 7;
            self.random ^= self.random << 17;
            self.parts.swap(last, met + (self.random % (last - met + 1) as u64) as usize);
        }
    }

    /// Examines a window until enough is picked. Returns the number of pages examined.
    fn window(&mut self, window: Range<u64>, runs: &[Range<u64>], pass: u8, want: u64, picked: &mut Picked) -> u64 {
        let mut runs = runs.iter().peekable();
        for page in window.clone() {
            while runs.next_if(|run| run.end <= page).is_some() {}
            let is_present = runs.peek().is_some_and(|run| run.contains(&page));
            let mark = &mut self.marks[page as usize];
            if !is_present {
                // The page was not needed for a whole circle.
                if *mark & OUT != 0 && pass == 0 {
                    *mark = OUT | (tries(*mark).saturating_sub(1) << TRIES_SHIFT);
                }
                continue;
            }
            if *mark & OUT != 0 {
                if *mark & LEFT == PICKED {
                    continue;
                }
                picked.restored += 1;
                *mark = passed((tries(*mark) + 1).min(MOST_TRIES));
            }
            if *mark & LEFT > pass {
                *mark -= 1;
                continue;
            }
            *mark |= OUT | PICKED;
            picked.add(page);
            if picked.pages >= want {
                return page + 1 - window.start;
            }
        }
        window.end - window.start
    }

    /// Notes that these pages stayed, because something holds them.
    pub fn stayed(&mut self, pages: Range<u64>) {
        for mark in &mut self.marks[pages.start as usize..pages.end as usize] {
            *mark = passed(MOST_TRIES);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;

    struct Guest {
        order: Order,
        present: Vec<bool>,
    }

    impl Guest {
        fn new(pages: usize) -> Self {
            Self { order: Order::new(pages as u64), present: vec![true; pages] }
        }

        /// Pages out `want` pages; returns those that went, and how many were back.
        fn out(&mut self, want: u64) -> (Vec<u64>, u64) {
            let present = &self.present;
            let runs = |range: Range<u64>| {
                Ok::<_, Infallible>(range.filter(|page| present[*page as usize]).map(|page| page..page + 1).collect())
            };
            let Ok(picked) = self.order.pick(want, runs);
            let pages: Vec<u64> = picked.ranges.iter().cloned().flatten().collect();
            assert_eq!(pages.len() as u64, picked.pages);
            for page in &pages {
                assert!(std::mem::take(&mut self.present[*page as usize]), "{page} is picked twice, or was out");
            }
            (pages, picked.restored)
        }

        fn touch(&mut self, page: usize) {
            self.present[page] = true;
        }
    }

    #[test]
    fn most_pages_of_a_loop_slightly_larger_than_the_limit_stay() {
        let (pages, limit) = (64 * WINDOW as usize, 58 * WINDOW);
        let (mut guest, mut restored) = (Guest::new(pages), 0);
        for touch in 0..20 * 64 {
            let part = touch % 64 * WINDOW as usize;
            restored += usize::from(touch >= 10 * 64 && !guest.present[part]);
            (part..part + WINDOW as usize).for_each(|page| guest.touch(page));
            let resident = guest.present.iter().filter(|present| **present).count() as u64;
            guest.out(resident.saturating_sub(limit));
        }
        assert!(restored < 10 * 64 / 2, "{restored} of {} touches restored a part", 10 * 64);
    }

    #[test]
    fn the_first_circle_is_by_address() {
        let mut guest = Guest::new(100);
        assert_eq!(guest.out(3), (vec![0, 1, 2], 0));
        assert_eq!(guest.out(2), (vec![3, 4], 0));
        assert_eq!(guest.out(1000).0, (5..100).collect::<Vec<_>>());
        assert_eq!(guest.out(1), (vec![], 0), "all of it is out");
    }

    #[test]
    fn pages_that_are_used_all_the_time_are_passed_more_often_each_time() {
        const HOT: usize = 64;
        let mut guest = Guest::new(4096);
        guest.out(4096 - 1024);
        let (mut state, mut went) = (1u64, 0);
        for round in 0..100 {
            (0..HOT).for_each(|page| guest.touch(page));
            for _ in 0..512 {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                guest.touch(HOT + (state >> 33) as usize % (4096 - HOT));
            }
            let resident = guest.present.iter().filter(|present| **present).count() as u64;
            let (out, _) = guest.out(resident - 1024);
            assert_eq!(out.len() as u64, resident - 1024);
            went += if round < 50 { 0 } else { out.iter().filter(|page| **page < HOT as u64).count() };
        }
        // First in, first out would send each of them out every third round.
        assert!(went < HOT * 50 / 6, "pages that are used went out {went} times");
    }

    #[test]
    fn a_guest_that_uses_all_of_its_memory_gives_what_is_asked() {
        let mut guest = Guest::new(200);
        for _ in 0..50 {
            (0..200).for_each(|page| guest.touch(page));
            assert_eq!(guest.out(150).0.len(), 150);
        }
    }

    #[test]
    fn pages_that_stay_are_asked_for_last() {
        let mut guest = Guest::new(10);
        guest.order.stayed(0..4);
        assert_eq!(guest.out(6).0, (4..10).collect::<Vec<_>>());
        assert_eq!(guest.out(4).0, (0..4).collect::<Vec<_>>());
        assert_eq!(Order::new(0).pick(5, |_| Err("not asked")), Ok(Picked::default()));
    }

    #[test]
    fn a_guest_larger_than_a_part_is_gone_through_in_circles() {
        let pages = WINDOW as usize * 2 + 10;
        let mut guest = Guest::new(pages);
        assert_eq!(guest.out(WINDOW + 5).0.last(), Some(&(WINDOW + 4)));
        assert_eq!(guest.out(WINDOW + 5).0.last(), Some(&(pages as u64 - 1)));
        guest.touch(3);
        assert_eq!(guest.out(1), (vec![3], 1));
    }
}
