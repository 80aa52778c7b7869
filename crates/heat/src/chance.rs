//! What short looks say of a longer time: the chance that a page that looks missed is touched in it after all.
//!
//! Before: looks into units, each of a second or less, and the pages that the last looks saw untouched. After: how much of a
//! unit is touched within the span of the working set, and whether its other pages are cold or were only missed.
//! Units: chances, 0 to 1; times in looks. Promise: pure. Where nothing was looked into twice, the answer is what the looks
//! saw and no more.
//!
//! One look cannot tell a unit of which a fifth is hot from one of which all is lukewarm: both show a fifth. Two can: the
//! first shows the same pages again, the second mostly others. So it is counted, as in a table of lives: of the pages that
//! the last one, two, three, ... looks all missed, whatever looks before them saw, how many did the next one see touched? For
//! a longer time that is gone on with; a page that was missed more often than was ever counted is taken to be like those
//! that were missed most.

/// Misses in a row that are told apart: a page that was missed three times is counted as missed once, twice and three times.
const MISSES: usize = 4;
/// What was counted is mixed with so many pages of what is known besides: of no touch at all, to begin with; of pages with one
/// miss fewer; of the VM, for a unit. So a chance that was told from a few pages is near what was known before.
const LEAN: f64 = 64.0;
/// What is kept when a cycle has passed: looks of some dozens of cycles count.
const KEPT: f64 = 0.97;

/// Pages that were missed, and how many of them the next look saw touched.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Counts {
    missed: [f64; MISSES],
    seen: [f64; MISSES],
}

impl Counts {
    /// A look watched a page that so many looks before it had all missed.
    pub fn push(&mut self, misses: u32, touched: bool) {
        for class in 0..(misses as usize).min(MISSES) {
            self.missed[class] += 1.0;
            self.seen[class] += f64::from(u8::from(touched));
        }
    }

    /// The share touched of the pages that the look before, or more, had missed; `None` if there were none.
    pub fn of_missed(&self) -> Option<f64> {
        (self.missed[0] > 0.0).then(|| self.seen[0] / self.missed[0])
    }

    /// A cycle has passed: what is known grows old.
    pub fn fade(&mut self) {
        self.missed.iter_mut().chain(&mut self.seen).for_each(|count| *count *= KEPT);
    }

    /// The chances in a VM of which this was counted.
    pub fn chances(&self) -> Chances {
        let mut chance = 0.0;
        Chances(std::array::from_fn(|class| {
            chance = (self.seen[class] + LEAN * chance) / (self.missed[class] + LEAN);
            chance
        }))
    }
}

/// The chance to be seen touched by the next look, of a page that the last one, two, ... looks missed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Chances([f64; MISSES]);

impl Chances {
    /// Those of one unit, of which this was counted besides.
    pub fn of_unit(&self, own: Counts) -> Self {
        // What is colder than its VM with few misses is so with more.
        let mut colder = 1.0;
        Self(std::array::from_fn(|class| {
            let vm = self.0[class];
            let chance = (own.seen[class] + LEAN * vm * colder) / (own.missed[class] + LEAN);
            colder = if vm > chance { chance / vm } else { 1.0 };
            chance
        }))
    }

    /// The chance that a page that was missed by so many looks, at least one, is touched in the time of `span` looks more.
    pub fn after_misses(&self, misses: u32, span: f64) -> f64 {
        let spared = |look: u32| 1.0 - self.0[(misses + look).clamp(1, MISSES as u32) as usize - 1];
        let span = span.clamp(0.0, 1e4);
        let whole = span.floor() as u32;
        1.0 - (0..whole).map(spared).product::<f64>() * spared(whole).powf(span.fract())
    }

    /// The share of pages that are touched in the time of `span` looks, of which one sees `share` touched.
    pub fn within(&self, share: f64, span: f64) -> f64 {
        share + (1.0 - share) * self.after_misses(1, span - 1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::Dice;
    use proptest::prelude::*;

    const SPAN: f64 = 7.5;

    /// Count so many looks into a unit whose pages have these chances, in turn; answers the share seen.
    fn count(law: &[f64], looks: usize, dice: &mut Dice, counts: &mut Counts) -> f64 {
        let (mut seen, mut misses) = (0, [0; 512]);
        for _ in 0..looks {
            for (page, misses) in misses.iter_mut().enumerate() {
                let touched = (dice.below(1 << 32) as f64) < law[page % law.len()] * (1u64 << 32) as f64;
                counts.push(*misses, touched);
                *misses = if touched { 0 } else { *misses + 1 };
                seen += u32::from(touched);
            }
        }
        f64::from(seen) / (512 * looks) as f64
    }

    /// The same of many units, whose chances become those of a VM.
    fn vm(law: &[f64], looks: usize) -> (Chances, f64) {
        let (mut dice, mut counts) = (Dice::new(5), Counts::default());
        let share = (0..50).map(|_| count(law, looks, &mut dice, &mut counts)).sum::<f64>() / 50.0;
        (counts.chances(), share)
    }

    #[test]
    fn a_hot_fifth_stays_a_fifth_and_its_cold_rest_cold() {
        let (chances, share) = vm(&[1.0, 0.0, 0.0, 0.0, 0.0], 2);
        assert_eq!((chances.within(share, SPAN), chances.after_misses(1, SPAN)), (share, 0.0));
    }

    #[test]
    fn an_evenly_lukewarm_unit_is_nearly_all_touched_in_a_longer_time() {
        let (chances, share) = vm(&[0.2], 2);
        let truth = 1.0 - 0.8f64.powf(SPAN);
        assert!((chances.within(share, SPAN) - truth).abs() < 0.03, "{chances:?}");
        assert!((chances.after_misses(2, SPAN) - truth).abs() < 0.05, "{chances:?}");
    }

    #[test]
    fn of_pages_of_every_warmth_more_looks_tell_better_what_a_longer_time_would_touch() {
        let law: [f64; 10] = [0.9, 0.5, 0.3, 0.2, 0.1, 0.1, 0.05, 0.02, 0.01, 0.01];
        let truth = law.iter().map(|p| 1.0 - (1.0 - p).powf(SPAN)).sum::<f64>() / law.len() as f64;
        let error = |looks| {
            let (chances, share) = vm(&law, looks);
            (chances.within(share, SPAN) - truth).abs()
        };
        assert!(error(2) < 0.2 && error(6) < 0.1, "{} {}", error(2), error(6));
    }

    #[test]
    fn what_looks_into_a_unit_show_outweighs_what_its_vm_is_like() {
        let (vm, _) = vm(&[0.2], 3);
        let mut own = Counts::default();
        let share = count(&[1.0, 0.0, 0.0, 0.0, 0.0], 2, &mut Dice::new(1), &mut own);
        assert!(vm.after_misses(1, SPAN) > 0.5);
        let unit = vm.of_unit(own);
        assert!(unit.after_misses(2, SPAN) < 0.2 && unit.within(share, SPAN) < 0.4, "{unit:?}");
    }

    #[test]
    fn with_nothing_to_compare_a_look_means_what_it_saw() {
        let chances = Counts::default().chances();
        assert_eq!((chances.within(0.25, SPAN), chances.after_misses(1, SPAN)), (0.25, 0.0));
    }

    proptest! {
        #[test]
        fn a_chance_is_one_and_grows_with_time(
            counts in proptest::array::uniform4((0.0f64..1e5, 0.0f64..=1.0)), share in 0.0f64..=1.0, misses in 1u32..40, span in 0.0f64..300.0,
        ) {
            let counts = Counts { missed: counts.map(|(missed, _)| missed), seen: counts.map(|(missed, part)| missed * part) };
            for chances in [counts.chances(), Counts::default().chances().of_unit(counts)] {
                let chance = chances.after_misses(misses, span);
                prop_assert!((0.0..=1.0).contains(&chance), "{chance}");
                prop_assert!(chances.after_misses(misses, span + 0.7) >= chance - 1e-9);
                prop_assert!((share - 1e-9..=1.0).contains(&chances.within(share, span)));
            }
        }
    }
}
