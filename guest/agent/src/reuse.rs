//! The chance that a page is accessed again soon, learned from pages like it.
//!
//! Before: looks say which pages were accessed. After: for each class of pages and each time without an access, the
//! chance that the next access comes before a wait of about half a minute is over.
//! Units: pages, looks; times are steps of [`STEP`]. Promise: pure; the same looks give the same chances.
//!
//! The time since the last access is not enough: in a program that goes through its memory in a circle, the page that
//! was not accessed for longest is next. So pages are in classes by the interval between their last accesses (by which
//! LIRS ranks). For each class and age, the share of the pages of this age that is accessed is learned (the hit
//! densities of LHD, Beckmann et al., NSDI 2018). Pages of a class are often accessed together in one look, so a look
//! counts as one observation, of however many pages. Without an observation, the chance falls with interval and age.
//! Looks are not equally far apart, so ages and intervals are times.

use std::ops::Range;
use std::time::Duration;

/// A step of ages and intervals: looks are no closer than this.
pub const STEP: Duration = Duration::from_secs(5);
/// Number of ages, in steps and in looks; a page stays at the last one.
pub const AGES: usize = 255;
/// Classes of intervals: unknown, 1, 2, 3 to 4, 5 to 8 steps ...; more than 32.
pub const CLASSES: usize = 8;
/// The chance that the wait goes on after a step: six steps are its mean.
const GOES_ON: f32 = 5.0 / 6.0;
/// About this many looks are remembered.
const REMEMBERED: f32 = 64.0;
/// A look that found fewer pages than this counts for less.
const MANY: f32 = 64.0;

/// Returns the class of pages with this interval; 0 is unknown.
pub fn class(interval: u8) -> usize {
    match interval {
        0 => 0,
        _ => (u8::BITS - (interval - 1).leading_zeros()).min(CLASSES as u32 - 2) as usize + 1,
    }
}

/// The share of pages of a class and age that is accessed in a step, if nothing is known: one access in the interval or
/// the age, whichever is longer; a quarter of it if no interval is known.
fn unlearned(class: usize, age: usize) -> f32 {
    let of = |steps: usize| 1.0 / steps as f32;
    if class == 0 { of(age + 1) / 4.0 } else { of((age + 1).max(1 << (class - 1))) }
}

/// Pages that reached an age, and those of them that were accessed at it.
#[derive(Clone, Copy, Debug, Default)]
struct Count {
    came: u32,
    accessed: u32,
}

/// Observations of one class at one age.
#[derive(Clone, Copy, Debug, Default)]
struct Share {
    /// Number of looks, and the sum of the shares.
    looks: f32,
    sum: f32,
}

impl Share {
    fn learn(&mut self, count: Count) {
        let fades = 1.0 - 1.0 / REMEMBERED;
        (self.looks, self.sum) = (self.looks * fades, self.sum * fades);
        if count.came > 0 {
            let weight = (count.came as f32 / MANY).min(1.0);
            self.looks += weight;
            self.sum += weight * count.accessed as f32 / count.came as f32;
        }
    }

    /// The expected share. The share without knowledge counts as one look.
    fn expected(&self, unlearned: f32) -> f32 {
        (self.sum + unlearned) / (self.looks + 1.0)
    }
}

#[derive(Debug)]
pub struct Reuse {
    /// By class and age in steps.
    shares: Vec<[Share; AGES]>,
    /// Counts of the present look, by class and age in looks.
    look: Vec<[Count; AGES]>,
}

impl Default for Reuse {
    fn default() -> Self {
        Self { shares: vec![[Share::default(); AGES]; CLASSES], look: vec![[Count::default(); AGES]; CLASSES] }
    }
}

impl Reuse {
    /// Counts a page of this class that was accessed this number of looks ago. `is_accessed`: again since then.
    pub fn saw(&mut self, class: usize, looks: usize, is_accessed: bool) {
        let count = &mut self.look[class][looks];
        count.came += 1;
        count.accessed += u32::from(is_accessed);
    }

    /// Ends the look. `ages`: the ages that pages had between the last look and this one, by the number of looks since
    /// they were accessed. An access in this time counts at its end.
    pub fn learn(&mut self, ages: impl Fn(usize) -> Range<usize>) {
        for (shares, look) in self.shares.iter_mut().zip(&mut self.look) {
            let mut counts = [Count::default(); AGES];
            for (looks, seen) in std::mem::replace(look, [Count::default(); AGES]).into_iter().enumerate() {
                if seen.came == 0 {
                    continue;
                }
                let ages = ages(looks);
                ages.clone().for_each(|age| counts[age.min(AGES - 1)].came += seen.came);
                counts[(ages.end - 1).min(AGES - 1)].accessed += seen.accessed;
            }
            shares.iter_mut().zip(counts).for_each(|(share, count)| share.learn(count));
        }
    }

    /// Returns for each class and age the chance of an access in the wait, from 0 to 1.
    pub fn chances(&self) -> Vec<[f32; AGES]> {
        let of = |(class, shares): (usize, &[Share; AGES])| {
            let expected = |age: usize| shares[age].expected(unlearned(class, age));
            let mut chances = [0.0; AGES];
            // The last age has no end.
            let last = expected(AGES - 1);
            let mut later = last * GOES_ON / (1.0 - (1.0 - last) * GOES_ON);
            for age in (0..AGES).rev() {
                let share = expected(age);
                later = (share + (1.0 - share) * later) * GOES_ON;
                chances[age] = later;
            }
            chances
        };
        self.shares.iter().enumerate().map(of).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_are_in_classes_that_double() {
        assert_eq!([0, 1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 255].map(class), [0, 1, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7]);
    }

    #[test]
    fn before_anything_is_known_the_longer_the_interval_and_the_older_the_colder() {
        let chances = Reuse::default().chances();
        assert!(chances.iter().all(|class| class.is_sorted_by(|younger, older| younger >= older)));
        assert!(chances[1..].is_sorted_by(|short, long| short[0] > long[0]));
        assert!(chances[0][0] > 0.25 && chances[0][12] < 0.125, "{} {}", chances[0][0], chances[0][12]);
    }

    #[test]
    fn of_a_circle_the_oldest_is_the_next_and_what_is_never_accessed_stays_the_coldest() {
        const CIRCLE: usize = 13;
        let mut reuse = Reuse::default();
        for look in 0..100 {
            for age in 0..CIRCLE {
                (0..500).for_each(|_| reuse.saw(class(CIRCLE as u8), age, age + 1 == CIRCLE));
            }
            (0..5000).for_each(|_| reuse.saw(0, look, false));
            reuse.learn(|look| look..look + 1);
        }
        let chances = reuse.chances();
        let circle = &chances[class(CIRCLE as u8)][..CIRCLE];
        assert!(circle.is_sorted_by(|younger, older| younger < older), "{circle:?}");
        assert!(circle[0] < 0.125 && circle[CIRCLE - 1] > 0.75, "{circle:?}");
        assert!(chances[0][99] < circle[0] / 4.0, "{}", chances[0][99]);
    }

    #[test]
    fn pages_that_are_accessed_at_random_have_one_chance_whatever_their_age() {
        let mut reuse = Reuse::default();
        for _ in 0..100 {
            for age in 0..AGES {
                (0..100).for_each(|page| reuse.saw(class(40), age, page % 50 == 0));
            }
            reuse.learn(|look| look..look + 1);
        }
        let chances = reuse.chances()[class(40)];
        let (least, most) = chances.iter().fold((1.0f32, 0.0f32), |(low, high), one| (low.min(*one), high.max(*one)));
        assert!(most < least * 1.25 && (0.05..0.2).contains(&least), "{least} {most}");
    }

    #[test]
    fn one_look_at_many_pages_is_one_observation() {
        let mut reuse = Reuse::default();
        let before = reuse.chances()[4][0];
        (0..100_000).for_each(|_| reuse.saw(4, 0, true));
        reuse.learn(|look| look..look + 1);
        let once = reuse.chances()[4][0];
        (0..20).for_each(|_| {
            (0..1000).for_each(|_| reuse.saw(4, 0, true));
            reuse.learn(|look| look..look + 1);
        });
        let often = reuse.chances()[4][0];
        assert!(before < once && once < 0.7 && often > 0.75, "{before} {once} {often}");
    }
}
