//! For how long each page was not accessed, and how soon it is likely to be.
//!
//! Before: the host wants reports, and DAMON (`damon`) can look at each page of a range. After: every page of memory
//! that somebody could access has an age and an interval, from looks at all of it, one after the other, and by these
//! a heat (`reuse`).
//! Units: pages; two bytes each. Promise: an age is never longer than the time in which the page was not accessed, but
//! for accesses while a look was being taken: some milliseconds for a GiB, of seconds.
//!
//! A look has the kernel clear the idle flag of every page that was accessed, reads the flags, and has it set all flags
//! again: what is idle at the next look was not accessed between the two. Memory is looked at in parts, so that one
//! look is short however large the guest is.

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
/// Looks at a part that are further apart than this do not tell the order in which a program goes through its memory
/// once a minute.
const FAR_APART: Duration = Duration::from_secs(20);
/// Time without an access after which a page is cold, unless it is likely to be accessed soon.
const COLD_AFTER: Duration = Duration::from_secs(10);
/// The chance of an access is told in steps of the square root of 1/2, down to this one. A page is due before this one:
/// the chance is more than 1/2.
const STEPS: u8 = 15;
const DUE: u8 = 2;
/// State of a page: unknown, or 1 more than its age in looks: 0 if it was accessed until the last one.
const UNKNOWN: u8 = 0;

/// Heat of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Heat {
    /// As the host is told.
    pub level: u8,
    /// Order within the level, the coldest first.
    pub rank: u8,
}

impl Heat {
    /// A page of which nobody can see whether it is used. Of the 66 MiB that a Linux of 320 MiB has for itself, a sixth
    /// was used within a minute.
    pub const UNKNOWN: Self = Self { level: COLD, rank: STEPS - 5 };

    /// A page that was not accessed for this long, and is accessed soon with this chance.
    fn of(idle: Duration, chance: f32) -> Self {
        let steps = (-2.0 * chance.log2()).clamp(0.0, STEPS.into()) as u8;
        match idle >= COLD_AFTER && steps >= DUE {
            true => Self { level: COLD, rank: STEPS - steps },
            false => Self { level: (HOTTEST - steps).max(1), rank: 0 },
        }
    }
}

/// A part of memory.
#[derive(Debug)]
struct Part {
    pages: (u64, u64),
    /// The state of each page, and the interval between its accesses in steps; 0 is unknown. A longer one counts at
    /// once, shorter ones by and by: what is used all the time is now and then not seen in a look.
    states: Vec<u8>,
    intervals: Vec<u8>,
    /// The ends of the last looks, the newest first: all of it was idle then.
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

    /// A look begins, which ends at this time or later.
    fn began(&mut self, now: Instant) {
        self.ends.push_front(now);
        self.ends.truncate(AGES + 1);
    }

    /// The look found a page with these flags.
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

    /// The look has found all pages.
    fn learn(&mut self) {
        self.reuse.learn(|looks| ages(&self.ends, looks));
    }

    /// Returns the heat for each class of intervals and each state but the unknown one.
    fn heats(&self, now: Instant) -> Vec<[Heat; AGES]> {
        let last = self.ends.front().copied().unwrap_or(now);
        let since: [Instant; AGES] =
            std::array::from_fn(|age| self.ends.get(age).or(self.ends.back()).copied().unwrap_or(now));
        // Nobody knows what was accessed since the last look, however long that is ago.
        let heat = |since: Instant, chances: &[f32; AGES]| {
            let age = steps(now.saturating_duration_since(since)).min(AGES - 1);
            Heat::of(last.saturating_duration_since(since), chances[age])
        };
        let of = |chances: [f32; AGES]| since.map(|since| heat(since, &chances));
        self.reuse.chances().into_iter().map(of).collect()
    }

    /// Returns the heat of a page; `None`: nothing is known. It may have been accessed since the last look.
    fn heat(&self, heats: &[[Heat; AGES]], page: u64, is_accessed: bool) -> Option<Heat> {
        let at = (page - self.pages.0) as usize;
        let age = usize::from(self.states[at].checked_sub(1)?);
        Some(heats[reuse::class(self.intervals[at])][if is_accessed { 0 } else { age }])
    }
}

fn steps(time: Duration) -> usize {
    (time.as_secs() / STEP.as_secs()) as usize
}

/// Ages, in steps, from the look before the last one to the last one, of a page that was accessed this number of looks
/// before. `ends` are those of the looks, the newest first.
fn ages(ends: &VecDeque<Instant>, looks: usize) -> Range<usize> {
    let [Some(last), Some(before), Some(accessed)] = [0, 1, looks + 1].map(|look| ends.get(look).or(ends.back()))
    else {
        return 0..1;
    };
    let age = |end: &Instant| steps(end.saturating_duration_since(*accessed));
    age(before)..age(last).max(age(before) + 1)
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

    /// The memory is another, in ranges of pages: some was plugged, or removed. What is known of the rest stays.
    pub fn set_ram(&mut self, ram: &[(u64, u64)]) {
        self.parts = with_ram(std::mem::take(&mut self.parts), ram);
        self.turn = 0;
    }

    /// Returns the CPU time that the kernel spent for it so far, or somewhat more, in microseconds.
    pub fn cpu_us(&self) -> u64 {
        self.damon.cpu_us()
    }

    /// Returns the longest time between two looks at a part, if it is so long that circles are not seen.
    pub fn far_apart(&self, now: Instant) -> Option<Duration> {
        self.parts.iter().map(|part| part.apart(now)).max().filter(|apart| *apart > FAR_APART)
    }

    /// Returns the time so far in which the kernel looked, or was waited for.
    pub fn spent(&self) -> Duration {
        self.spent
    }

    /// Calls a function with each page, its flags and its heat, ascending, and another one after each part. Looks at
    /// one part, if it is due. A page that was restored since a look was accessed since then.
    ///
    /// # Errors
    /// The flags cannot be read, or another program has stopped DAMON.
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
            let last = part.ends.front().copied().unwrap_or(now);
            flags.each(part.pages, |page, flags| {
                if counts {
                    part.saw(page, flags);
                }
                // Reading or writing a file clears the flag at once.
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

/// Returns the parts of this memory, as these are where they are parts of it.
fn with_ram(known: Vec<Part>, ram: &[(u64, u64)]) -> Vec<Part> {
    let mut known: HashMap<(u64, u64), Part> = known.into_iter().map(|part| (part.pages, part)).collect();
    parts(ram).map(|pages| known.remove(&pages).unwrap_or_else(|| Part::new(pages))).collect()
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
    fn memory_that_is_plugged_is_looked_at_and_what_is_known_of_the_rest_stays() {
        let mut known = vec![Part::new((1, 9)), Part::new((16, 32))];
        known[1].states[3] = 7;
        let now = with_ram(known, &[(16, 32), (64, 80)]);
        assert_eq!(now.iter().map(|part| part.pages).collect::<Vec<_>>(), [(16, 32), (64, 80)]);
        assert_eq!((now[0].states[3], &now[1].states), (7, &Part::new((64, 80)).states));
    }

    /// A part of one page after looks with these flags, and the time.
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
        // Ten pages in each look, and all in thirteen; each stands for many.
        for look in 0..200 {
            part.began(now(look));
            for page in 0..130 {
                part.saw(page, if page / 10 == look % 13 { LRU } else { LRU | IDLE });
            }
            part.learn();
        }
        let heats = part.heats(now(199));
        // The last look was at the pages from 40 on.
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
