//! Looks: the time for which each page was not accessed, and the chance that it is accessed soon.
//!
//! Before: the host wants reports, and DAMON (`damon`) can look at each page of a range. After: every page that a
//! program could access has an age and an interval, from looks at all memory in turn, and so a heat (`reuse`).
//! Units: pages; two bytes each. Promise: an age is never longer than the time in which the page was not accessed,
//! except for accesses during a look: of the seconds between two looks, some milliseconds for each GiB.
//!
//! A look has the kernel clear the idle flag of every page that was accessed, reads the flags, and has the kernel set
//! all flags again: a page that is idle at the next look was not accessed between the two. Memory is looked at in
//! parts, so that one look is short however large the guest is.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::ops::Range;
use std::time::{Duration, Instant};

use ballast_messages::run::{COLD, HOTTEST};

use crate::damon::Damon;
use crate::memory::{self, Flags};
use crate::pace::CPU_PART;
use crate::reuse::{self, AGES, Reuse, STEP};
use crate::setting::Setting;

/// Largest part: 4 GiB.
const PART: u64 = 1 << 20;
/// Looks at a part further apart than this do not show the order in which a program goes through its memory.
const FAR_APART: Duration = Duration::from_secs(20);
/// Time without an access after which a page is cold, unless it is likely to be accessed soon.
const COLD_AFTER: Duration = Duration::from_secs(10);
/// The chance of an access is expressed in steps of the square root of 1/2, up to this number. A page with fewer steps
/// than `DUE` is due: the chance is more than 1/2.
const STEPS: u8 = 15;
const DUE: u8 = 2;
/// State of a page of unknown age. A known state is 1 more than the age in looks; age 0: accessed until the last look.
const UNKNOWN: u8 = 0;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Heat {
    pub level: u8,
    /// Order within the level, the coldest first.
    pub rank: u8,
}

impl Heat {
    /// Heat of a page whose accesses cannot be seen. Of the 66 MiB that Linux has for itself in a guest of 320 MiB, a
    /// sixth was accessed within a minute.
    pub const UNKNOWN: Self = Self { level: COLD, rank: STEPS - 5 };

    /// The heat of a page that was not accessed for the time `idle`, and is accessed soon with this chance.
    fn of(idle: Duration, chance: f32) -> Self {
        let steps = (-2.0 * chance.log2()).clamp(0.0, STEPS.into()) as u8;
        match idle >= COLD_AFTER && steps >= DUE {
            true => Self { level: COLD, rank: STEPS - steps },
            false => Self { level: (HOTTEST - steps).max(1), rank: 0 },
        }
    }
}

#[derive(Debug)]
struct Part {
    pages: (u64, u64),
    /// The state of each page, and the interval between its accesses in steps; 0 is unknown. A longer interval counts
    /// at once, a shorter one by and by: a look may miss the access of a page that is used all the time.
    states: Vec<u8>,
    intervals: Vec<u8>,
    /// The ends of the last looks, the newest first. At the end of a look, all of the part's pages are idle.
    ends: VecDeque<Instant>,
    reuse: Reuse,
}

impl Part {
    fn new(pages: (u64, u64)) -> Self {
        let none = vec![0; (pages.1 - pages.0) as usize];
        Self { pages, states: none.clone(), intervals: none, ends: VecDeque::new(), reuse: Reuse::default() }
    }

    /// Returns the time between the last two looks, or since the last if that is longer.
    fn apart(&self, now: Instant) -> Duration {
        let mut ends = self.ends.iter();
        let Some(last) = ends.next() else { return Duration::ZERO };
        let between = ends.next().map_or(Duration::ZERO, |before| last.saturating_duration_since(*before));
        between.max(now.saturating_duration_since(*last))
    }

    fn is_due(&self, now: Instant) -> bool {
        self.ends.front().is_none_or(|end| now.saturating_duration_since(*end) >= STEP)
    }

    fn began(&mut self, now: Instant) {
        self.ends.push_front(now);
        self.ends.truncate(AGES + 1);
    }

    fn saw(&mut self, page: u64, flags: u64) {
        let at = (page - self.pages.0) as usize;
        let (state, interval) = (&mut self.states[at], &mut self.intervals[at]);
        if !memory::is_on_lru(flags) {
            (*state, *interval) = (UNKNOWN, 0);
            return;
        }
        let is_accessed = !memory::is_idle(flags);
        if let Some(age) = state.checked_sub(1) {
            self.reuse.saw(reuse::class(*interval), age.into(), is_accessed);
            if is_accessed {
                let this = u8::try_from(ages(&self.ends, age.into()).end).unwrap_or(u8::MAX);
                *interval = if this >= *interval { this } else { interval.midpoint(this) };
            }
        }
        *state = if is_accessed { 1 } else { (*state).max(1).saturating_add(1) };
    }

    fn learn(&mut self) {
        self.reuse.learn(|looks| ages(&self.ends, looks));
    }

    /// Returns the heat for each class of intervals and each known state.
    fn heats(&self, now: Instant) -> Vec<[Heat; AGES]> {
        let last = self.ends.front().copied().unwrap_or(now);
        let since: [Instant; AGES] =
            std::array::from_fn(|age| self.ends.get(age).or(self.ends.back()).copied().unwrap_or(now));
        // Accesses since the last look are unknown, however long ago the look was.
        let heat = |since: Instant, chances: &[f32; AGES]| {
            let age = steps(now.saturating_duration_since(since)).min(AGES - 1);
            Heat::of(last.saturating_duration_since(since), chances[age])
        };
        let of = |chances: [f32; AGES]| since.map(|since| heat(since, &chances));
        self.reuse.chances().into_iter().map(of).collect()
    }

    /// Returns the heat of a page; `None`: nothing is known of it. `is_accessed`: it was accessed since the last look.
    fn heat(&self, heats: &[[Heat; AGES]], page: u64, is_accessed: bool) -> Option<Heat> {
        let at = (page - self.pages.0) as usize;
        let age = usize::from(self.states[at].checked_sub(1)?);
        Some(heats[reuse::class(self.intervals[at])][if is_accessed { 0 } else { age }])
    }
}

fn steps(time: Duration) -> usize {
    (time.as_secs() / STEP.as_secs()) as usize
}

/// Returns the ages, in steps, that a page had between the last two looks, if it was accessed this number of looks
/// before. `ends` are the ends of the looks, the newest first.
fn ages(ends: &VecDeque<Instant>, looks: usize) -> Range<usize> {
    let [Some(last), Some(before), Some(accessed)] = [0, 1, looks + 1].map(|look| ends.get(look).or(ends.back()))
    else {
        return 0..1;
    };
    let age = |end: &Instant| steps(end.saturating_duration_since(*accessed));
    age(before)..age(last).max(age(before) + 1)
}

/// All memory, and DAMON, which looks at it.
#[derive(Debug)]
pub struct Looks {
    damon: Damon,
    /// MGLRU stays off while looks are taken.
    _no_mglru: Setting,
    parts: Vec<Part>,
    /// The part to be looked at next, and the earliest time for it.
    turn: usize,
    next: Instant,
    /// Least time between two looks at any parts.
    pause: Duration,
    /// Time in which the kernel looked, or was waited for.
    spent: Duration,
}

impl Looks {
    /// Begins to look at this memory, in ranges of pages, with at least this pause between two looks. Fails if the
    /// kernel's DAMON lacks a needed feature, or another program uses it.
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

    /// Sets the ranges of pages that are RAM, after some was plugged or removed. Knowledge of unchanged parts stays.
    pub fn set_ram(&mut self, ram: &[(u64, u64)]) {
        self.parts = with_ram(std::mem::take(&mut self.parts), ram);
        self.turn = 0;
    }

    /// Returns the CPU time that the kernel spent on looks so far, or somewhat more, in microseconds.
    pub fn cpu_us(&self) -> u64 {
        self.damon.cpu_us()
    }

    /// Returns the longest time between two looks at a part, if it is too long to see the order of accesses in a loop.
    pub fn far_apart(&self, now: Instant) -> Option<Duration> {
        self.parts.iter().map(|part| part.apart(now)).max().filter(|apart| *apart > FAR_APART)
    }

    pub fn spent(&self) -> Duration {
        self.spent
    }

    /// Calls a function with each page, its flags and its heat, ascending, and another function after each part. Looks
    /// at one part, if it is due. A page that was restored since a look was accessed since then. Fails if the flags
    /// cannot be read, or another program has stopped DAMON.
    pub fn each(
        &mut self,
        flags: &Flags,
        was_restored_since: impl Fn(u64, Instant) -> bool,
        mut tell: impl FnMut(u64, u64, Option<Heat>),
        mut between: impl FnMut(),
    ) -> io::Result<()> {
        let now = Instant::now();
        let turn = self.turn;
        let is_due = now >= self.next && self.parts.get(turn).is_some_and(|part| part.is_due(now));
        let cpu_us = self.damon.cpu_us();
        for (number, part) in self.parts.iter_mut().enumerate() {
            let looks = is_due && number == turn;
            // The first look has nothing to compare with.
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
            let last = part.ends.front().copied().unwrap_or(now);
            flags.each(part.pages, |page, flags| {
                if counts {
                    part.saw(page, flags);
                }
                // Reading or writing a file clears the idle flag at once.
                let is_accessed = !counts && (!memory::is_idle(flags) || was_restored_since(page, last));
                tell(page, flags, part.heat(&heats, page, is_accessed));
            })?;
            if counts {
                part.learn();
            }
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
            self.next = Instant::now() + self.pause.max(took * CPU_PART);
        }
        Ok(())
    }
}

/// Divides this memory into parts, and keeps those that are known already.
fn with_ram(known: Vec<Part>, ram: &[(u64, u64)]) -> Vec<Part> {
    let mut known: HashMap<(u64, u64), Part> = known.into_iter().map(|part| (part.pages, part)).collect();
    parts(ram).map(|pages| known.remove(&pages).unwrap_or_else(|| Part::new(pages))).collect()
}

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
    fn memory_that_is_plugged_is_looked_at_and_what_is_known_of_the_rest_stays() {
        let mut known = vec![Part::new((1, 9)), Part::new((16, 32))];
        known[1].states[3] = 7;
        let now = with_ram(known, &[(16, 32), (64, 80)]);
        assert_eq!(now.iter().map(|part| part.pages).collect::<Vec<_>>(), [(16, 32), (64, 80)]);
        assert_eq!((now[0].states[3], &now[1].states), (7, &Part::new((64, 80)).states));
    }

    fn after(looks: impl Iterator<Item = u64>) -> (Part, Instant) {
        let (mut part, mut now) = (Part::new((7, 8)), Instant::now());
        for flags in looks {
            now += STEP;
            part.began(now);
            part.saw(7, flags);
            part.learn();
        }
        (part, now)
    }

    fn heat_after(looks: impl Iterator<Item = u64>) -> Option<Heat> {
        let (part, now) = after(looks);
        part.heat(&part.heats(now), 7, false)
    }

    #[test]
    fn a_page_is_cold_after_the_time_in_which_looks_found_it_idle_and_the_longer_the_colder() {
        assert_eq!(heat_after([0].into_iter()), None, "not a page that programs use");
        let idle = |looks: usize| heat_after([LRU].into_iter().chain([LRU | IDLE].repeat(looks))).expect("known");
        assert!(idle(0) > idle(1) && idle(1).level > COLD, "{:?}", [idle(0), idle(1)]);
        assert!([2, 4, 8, 300].iter().all(|looks| idle(*looks).level == COLD), "{:?}", idle(2));
        assert!(idle(2) > idle(8) && idle(8) > idle(300), "{:?}", [2, 8, 300].map(idle));
        assert_eq!(after([LRU, LRU | IDLE, 0].into_iter()).0.states, [UNKNOWN], "it is another page now");
    }

    #[test]
    fn a_page_that_was_accessed_until_the_last_look_is_not_cold_however_long_ago_that_is() {
        let (part, now) = after([LRU | IDLE, LRU].into_iter());
        let later = part.heats(now + COLD_AFTER * 9);
        assert!(part.heat(&later, 7, false).is_some_and(|heat| heat.level > COLD));
    }

    #[test]
    fn the_interval_of_a_page_grows_at_once_and_falls_by_halves() {
        let circle = |turns: usize| [[LRU].as_slice(), &[LRU | IDLE; 12]].concat().repeat(turns).into_iter();
        let interval = |looks: &mut dyn Iterator<Item = u64>| after(looks).0.intervals[0];
        assert_eq!([interval(&mut circle(1)), interval(&mut circle(2)), interval(&mut circle(5))], [0, 13, 13]);
        assert_eq!(interval(&mut circle(5).chain([LRU; 8])), 1);
        assert_eq!(interval(&mut [LRU; 8].into_iter().chain(circle(2))), 13);
    }

    #[test]
    fn a_page_that_is_due_is_not_cold_and_one_that_was_just_accessed_in_a_circle_is_colder() {
        let mut part = Part::new((0, 130));
        let start = Instant::now();
        let now = |look: u64| start + STEP * look as u32;
        // Each look finds ten of 130 pages accessed, so each page is accessed in every 13th look.
        for look in 0..200 {
            part.began(now(look));
            for page in 0..130 {
                part.saw(page, if page / 10 == look % 13 { LRU } else { LRU | IDLE });
            }
            part.learn();
        }
        let heats = part.heats(now(199));
        // The last look found the pages from 40 to 49 accessed.
        let heat = |page| part.heat(&heats, page, false).expect("known");
        assert_eq!([40, 20, 50].map(|page| heat(page).level == COLD), [false, true, false], "{:?}", heat(50));
        assert!(heat(20) < heat(0) && heat(0) < heat(110) && heat(110) < heat(50), "{:?}", [20, 0, 110, 50].map(heat));
        assert!(heat(40) < heat(50), "{:?}", [40, 50].map(heat));
        assert_eq!(part.heat(&heats, 20, true), Some(heat(40)), "a file that was read since");
    }

    #[test]
    fn looks_are_as_far_apart_as_the_last_two_and_as_the_last_one_is_ago() {
        let (mut part, now) = (Part::new((0, 1)), Instant::now());
        assert_eq!(part.apart(now), Duration::ZERO, "no look yet");
        part.began(now);
        assert_eq!(part.apart(now + STEP), STEP);
        part.began(now + STEP * 5);
        let apart = [6, 9, 11].map(|pauses| part.apart(now + STEP * pauses));
        assert_eq!(apart, [5, 5, 6].map(|pauses| STEP * pauses));
    }

    #[test]
    fn a_part_is_looked_at_no_more_often_than_it_may_be() {
        let (mut part, now) = (Part::new((0, 1)), Instant::now());
        assert!(part.is_due(now));
        part.began(now);
        assert!(!part.is_due(now + STEP / 2) && part.is_due(now + STEP));
    }
}
