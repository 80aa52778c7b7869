//! For how long each page was not accessed.
//!
//! Before: the host wants reports, and DAMON (`damon`) can look at each page of a range. After: every page of memory
//! that somebody could access has an age, from looks at all of it, one after the other.
//! Units: pages; a byte each. Promise: an age is never longer than the time in which the page was not accessed, but for
//! accesses while a look was being taken: some milliseconds for a GiB, of seconds.
//!
//! A look has the kernel clear the idle flag of every page that was accessed, reads the flags, and has it set all flags
//! again: what is idle at the next look was not accessed between the two. Memory is looked at in parts, so that one
//! look is short however large the guest is.

use std::collections::VecDeque;
use std::io;
use std::time::{Duration, Instant};

use ballast_guest::run::{COLD, HOTTEST};

use crate::damon::Damon;
use crate::memory::{self, Flags};
use crate::setting::Setting;

/// Largest part: 4 GiB.
const PART: u64 = 1 << 20;
/// Least time between two looks at a part.
const LOOK_PAUSE: Duration = Duration::from_secs(5);
/// Time between two looks at any, by the time that the kernel took for the last.
const LOOK_PART: u32 = 20;
/// Time without an access after which a page is cold. Cold pages are ordered by age, in steps that double.
const COLD_AFTER: Duration = Duration::from_secs(10);
const OLDEST: u32 = 8;
/// States of a page: unknown; idle in 1 to [`MOST_IDLE`] looks in a row; accessed in as many looks in a row as the
/// state is above that.
const UNKNOWN: u8 = 0;
const MOST_IDLE: u8 = 127;

/// Heat of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Heat {
    /// As the host is told.
    pub level: u8,
    /// Order within the level, the oldest first.
    pub rank: u8,
}

impl Heat {
    /// A page that was not accessed for this long.
    fn idle(time: Duration) -> Self {
        let steps = time.as_secs() / COLD_AFTER.as_secs();
        match steps.checked_ilog2() {
            Some(steps) => Self { level: COLD, rank: (OLDEST - steps.min(OLDEST)) as u8 },
            None => Self { level: 1, rank: 0 },
        }
    }

    /// A page that was accessed in this number of looks in a row.
    fn accessed(looks: u8) -> Self {
        Self { level: looks.saturating_add(1).clamp(2, HOTTEST), rank: 0 }
    }
}

/// A part of memory.
#[derive(Debug)]
struct Part {
    pages: (u64, u64),
    /// The state of each page.
    states: Vec<u8>,
    /// The ends of the last looks, the newest first: all of it was idle then.
    ends: VecDeque<Instant>,
}

impl Part {
    fn new(pages: (u64, u64)) -> Self {
        Self { pages, states: vec![UNKNOWN; (pages.1 - pages.0) as usize], ends: VecDeque::new() }
    }

    fn is_due(&self, now: Instant) -> bool {
        self.ends.front().is_none_or(|end| now.saturating_duration_since(*end) >= LOOK_PAUSE)
    }

    /// A look begins, which ends at this time or later.
    fn began(&mut self, now: Instant) {
        self.ends.push_front(now);
        self.ends.truncate(usize::from(MOST_IDLE) + 1);
    }

    /// Returns the heat for each state; `None`: nothing is known.
    fn heats(&self, now: Instant) -> Vec<Option<Heat>> {
        let heat = |state: u8| match state {
            UNKNOWN => None,
            1..=MOST_IDLE => {
                let since = self.ends.get(usize::from(state)).or(self.ends.back());
                since.map(|since| Heat::idle(now.saturating_duration_since(*since)))
            }
            _ => Some(Heat::accessed(state - MOST_IDLE)),
        };
        (0..=u8::MAX).map(heat).collect()
    }
}

/// Returns the state after a look.
fn next(state: u8, flags: u64) -> u8 {
    match (memory::is_on_lru(flags), memory::is_idle(flags)) {
        (false, _) => UNKNOWN,
        (true, true) if state > MOST_IDLE => 1,
        (true, true) => (state + 1).min(MOST_IDLE),
        (true, false) => state.max(MOST_IDLE).saturating_add(1),
    }
}

/// All memory, and the means to look at it.
#[derive(Debug)]
pub struct Looks {
    damon: Damon,
    /// Until the last look.
    _no_mglru: Setting,
    parts: Vec<Part>,
    /// The part to be looked at next, and when, at the earliest.
    turn: usize,
    next: Instant,
    /// Least time between two looks at any.
    pause: Duration,
    /// Time in which the kernel looked, or was waited for.
    spent: Duration,
}

impl Looks {
    /// Begins to look at this memory, in ranges of pages, with this pause between two looks at least.
    ///
    /// # Errors
    /// The kernel has no DAMON that can do it, or another program uses it.
    pub fn start(ram: &[(u64, u64)], pause: Duration) -> io::Result<Self> {
        let damon = Damon::start()?;
        Ok(Self {
            damon,
            _no_mglru: Setting::no_mglru()?,
            parts: parts(ram).map(Part::new).collect(),
            turn: 0,
            next: Instant::now(),
            pause,
            spent: Duration::ZERO,
        })
    }

    /// Returns the CPU time that the kernel spent for it so far, or somewhat more, in microseconds.
    pub fn cpu_us(&self) -> u64 {
        self.damon.cpu_us()
    }

    /// Returns the time so far in which the kernel looked, or was waited for.
    pub fn spent(&self) -> Duration {
        self.spent
    }

    /// Calls a function with each page, its flags and its heat, ascending, and another one after each part. Looks at
    /// one part, if it is due.
    ///
    /// # Errors
    /// The flags cannot be read, or another program has stopped DAMON.
    pub fn each(
        &mut self,
        flags: &Flags,
        mut tell: impl FnMut(u64, u64, Option<Heat>),
        mut between: impl FnMut(),
    ) -> io::Result<()> {
        let now = Instant::now();
        let turn = self.turn;
        let is_due = now >= self.next && self.parts.get(turn).is_some_and(|part| part.is_due(now));
        let cpu_us = self.damon.cpu_us();
        for (number, part) in self.parts.iter_mut().enumerate() {
            let looks = is_due && number == turn;
            // The first time there is nothing to compare with.
            let counts = looks && !part.ends.is_empty();
            if looks {
                part.began(now);
            }
            if counts {
                let began = Instant::now();
                self.damon.clear_idle_of_accessed(part.pages)?;
                self.spent += began.elapsed();
            }
            let heats = part.heats(now);
            flags.each(part.pages, |page, flags| {
                let state = &mut part.states[(page - part.pages.0) as usize];
                if counts {
                    *state = next(*state, flags);
                }
                let heat = heats[usize::from(*state)];
                // Reading or writing a file clears the flag at once.
                let is_accessed = !counts && !memory::is_idle(flags) && (1..=MOST_IDLE).contains(state);
                tell(page, flags, if is_accessed { Some(Heat::accessed(1)) } else { heat });
            })?;
            if looks {
                let began = Instant::now();
                self.damon.set_idle(part.pages)?;
                part.ends[0] = Instant::now();
                self.spent += began.elapsed();
            }
            between();
        }
        if is_due {
            self.turn = (turn + 1) % self.parts.len();
            let took = Duration::from_micros(self.damon.cpu_us() - cpu_us);
            self.next = Instant::now() + self.pause.max(took * LOOK_PART);
        }
        Ok(())
    }
}

/// Returns the parts of this memory, in ranges of pages.
pub fn parts(ram: &[(u64, u64)]) -> impl Iterator<Item = (u64, u64)> {
    let of = |(page, end): &(u64, u64)| {
        let end = *end;
        (*page..end).step_by(PART as usize).map(move |page| (page, end.min(page + PART)))
    };
    ram.iter().flat_map(of)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LRU: u64 = 1 << 5;
    const IDLE: u64 = 1 << 25;

    #[test]
    fn memory_is_looked_at_in_parts_and_none_of_it_is_left_out() {
        let parts: Vec<_> = parts(&[(1, 0x9f), (0x100, 0x100 + 2 * PART + 7)]).collect();
        let second = 0x100 + PART;
        assert_eq!(parts, [(1, 0x9f), (0x100, second), (second, second + PART), (second + PART, second + PART + 7)]);
    }

    #[test]
    fn a_page_is_cold_after_the_time_in_which_looks_found_it_idle_and_hotter_the_more_looks_found_it_accessed() {
        let (start, every) = (Instant::now(), LOOK_PAUSE);
        let mut part = Part::new((0, 1));
        let mut heat = |look: u32, flags: u64| {
            part.states[0] = next(part.states[0], flags);
            part.began(start + every * look);
            part.heats(start + every * look)[usize::from(part.states[0])].map(|heat| (heat.level, heat.rank))
        };
        assert_eq!(heat(0, 0), None, "not a page that programs use");
        assert_eq!([1, 2, 3].map(|look| heat(look, LRU)), [Some((2, 0)), Some((3, 0)), Some((4, 0))]);
        let cold = |rank| Some((COLD, rank));
        assert_eq!([4, 5, 6, 7].map(|look| heat(look, LRU | IDLE)), [Some((1, 0)), cold(8), cold(8), cold(7)]);
        assert_eq!([heat(8, LRU), heat(9, LRU | IDLE)], [Some((2, 0)), Some((1, 0))], "it begins again");
        let last = (10..2000).map(|look| heat(look, LRU | IDLE)).last();
        assert_eq!(last, Some(cold(3)), "as long as is remembered");
        assert_eq!((0..300).map(|look| heat(2000 + look, LRU)).last(), Some(Some((HOTTEST, 0))));
        assert_eq!((Heat::idle(Duration::MAX), Heat::idle(Duration::ZERO).level), (Heat { level: COLD, rank: 0 }, 1));
    }

    #[test]
    fn a_part_is_looked_at_no_more_often_than_it_may_be() {
        let (mut part, now) = (Part::new((0, 1)), Instant::now());
        assert!(part.is_due(now));
        part.began(now);
        assert!(!part.is_due(now + LOOK_PAUSE / 2) && part.is_due(now + LOOK_PAUSE));
    }
}
