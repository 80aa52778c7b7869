//! Extrapolates short scans to a longer time: the chance that a page that they missed is touched in it.
//!
//! Before: fine scans of units, each a second or shorter, and the pages that the last ones saw untouched. After: how
//! much of a unit is touched within the span of the working set, and whether its other pages are cold or were only
//! missed.
//! Units: chances, 0 to 1; times in lengths of a scan. Promise: pure. Where no unit was scanned twice, the result is
//! what the scans saw.
//!
//! One scan cannot tell a unit of which a fifth is hot from a unit of which all is lukewarm: both show a fifth. Two
//! scans can: in the first unit they show the same pages, in the second mostly others. So this file counts, as a life
//! table does: of the pages that the last one, two, three, ... scans all missed, how many did the next scan see
//! touched? A longer time is a number of such scans in a row. A page that was missed more often than was ever counted
//! is assumed to be like those that were missed most often.

/// Misses in a row that are counted apart. A page missed three times counts as missed once, twice and three times.
const MISSES: usize = 4;
/// Pages that the prior weighs as much as. The prior is: no touch, for one miss; the chance with one miss fewer, for
/// more; the VM's chance, for a unit. So a chance that comes from few pages stays near its prior.
const PRIOR: f64 = 64.0;
/// Factor by which counts decay with each cycle: scans of some dozens of cycles count.
const KEPT: f64 = 0.97;

/// Pages that were missed, and how many of them the next scan saw touched.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Counts {
    missed: [f64; MISSES],
    seen: [f64; MISSES],
}

impl Counts {
    /// A scan watched a page that the last `misses` scans before it had all missed.
    pub fn push(&mut self, misses: u32, touched: bool) {
        for class in 0..(misses as usize).min(MISSES) {
            self.missed[class] += 1.0;
            self.seen[class] += f64::from(u8::from(touched));
        }
    }

    /// The share touched of the pages that at least the scan before had missed; `None` if there were none.
    pub fn of_missed(&self) -> Option<f64> {
        (self.missed[0] > 0.0).then(|| self.seen[0] / self.missed[0])
    }

    /// A cycle has passed: older counts weigh less.
    pub fn fade(&mut self) {
        self.missed.iter_mut().chain(&mut self.seen).for_each(|count| *count *= KEPT);
    }

    /// The chances in the VM that these are the counts of.
    pub fn chances(&self) -> Chances {
        let mut chance = 0.0;
        Chances(std::array::from_fn(|class| {
            chance = (self.seen[class] + PRIOR * chance) / (self.missed[class] + PRIOR);
            chance
        }))
    }
}

/// The chance that the next scan sees a page touched that the last one, two, ... scans missed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Chances([f64; MISSES]);

impl Chances {
    /// The chances of one unit of the VM, by its own counts.
    pub fn of_unit(&self, own: Counts) -> Self {
        // A unit that is colder than its VM after few misses is assumed colder after more.
        let mut colder = 1.0;
        Self(std::array::from_fn(|class| {
            let vm = self.0[class];
            let chance = (own.seen[class] + PRIOR * vm * colder) / (own.missed[class] + PRIOR);
            colder = if vm > chance { chance / vm } else { 1.0 };
            chance
        }))
    }

    /// The chance that a page that the last `misses` scans missed, at least one, is touched in the time of `span` more.
    pub fn after_misses(&self, misses: u32, span: f64) -> f64 {
        let spared = |scan: u32| 1.0 - self.0[(misses + scan).clamp(1, MISSES as u32) as usize - 1];
        let span = span.clamp(0.0, 1e4);
        let whole = span.floor() as u32;
        1.0 - (0..whole).map(spared).product::<f64>() * spared(whole).powf(span.fract())
    }

    /// The share of pages that are touched in the time of `span` scans, if one scan sees `share` touched.
    pub fn within(&self, share: f64, span: f64) -> f64 {
        share + (1.0 - share) * self.after_misses(1, span - 1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::SplitMix64;
    use proptest::prelude::*;

    const SPAN: f64 = 7.5;

    /// Count a number of scans of a unit whose pages have these chances, in turn. Returns the share seen.
    fn count(law: &[f64], scans: usize, rng: &mut SplitMix64, counts: &mut Counts) -> f64 {
        let (mut seen, mut misses) = (0, [0; 512]);
        for _ in 0..scans {
            for (page, misses) in misses.iter_mut().enumerate() {
                let touched = (rng.below(1 << 32) as f64) < law[page % law.len()] * (1u64 << 32) as f64;
                counts.push(*misses, touched);
                *misses = if touched { 0 } else { *misses + 1 };
                seen += u32::from(touched);
            }
        }
        f64::from(seen) / (512 * scans) as f64
    }

    /// The same of many units, whose chances become those of a VM.
    fn vm(law: &[f64], scans: usize) -> (Chances, f64) {
        let (mut rng, mut counts) = (SplitMix64::new(5), Counts::default());
        let share = (0..50).map(|_| count(law, scans, &mut rng, &mut counts)).sum::<f64>() / 50.0;
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
    fn of_pages_of_every_warmth_more_scans_estimate_better_what_a_longer_time_would_touch() {
        let law: [f64; 10] = [0.9, 0.5, 0.3, 0.2, 0.1, 0.1, 0.05, 0.02, 0.01, 0.01];
        let truth = law.iter().map(|p| 1.0 - (1.0 - p).powf(SPAN)).sum::<f64>() / law.len() as f64;
        let error = |scans| {
            let (chances, share) = vm(&law, scans);
            (chances.within(share, SPAN) - truth).abs()
        };
        assert!(error(2) < 0.2 && error(6) < 0.1, "{} {}", error(2), error(6));
    }

    #[test]
    fn scans_of_a_unit_outweigh_what_its_vm_is_like() {
        let (vm, _) = vm(&[0.2], 3);
        let mut own = Counts::default();
        let share = count(&[1.0, 0.0, 0.0, 0.0, 0.0], 2, &mut SplitMix64::new(1), &mut own);
        assert!(vm.after_misses(1, SPAN) > 0.5);
        let unit = vm.of_unit(own);
        assert!(unit.after_misses(2, SPAN) < 0.2 && unit.within(share, SPAN) < 0.4, "{unit:?}");
    }

    #[test]
    fn with_nothing_to_compare_a_scan_means_what_it_saw() {
        let chances = Counts::default().chances();
        assert_eq!((chances.within(0.25, SPAN), chances.after_misses(1, SPAN)), (0.25, 0.0));
    }

    proptest! {
        #[test]
        fn a_chance_is_one_and_grows_with_time(
            counts in proptest::array::uniform4((0.0f64..1e5, 0.0f64..=1.0)),
            share in 0.0f64..=1.0, misses in 1u32..40, span in 0.0f64..300.0,
        ) {
            let seen = counts.map(|(missed, part)| missed * part);
            let counts = Counts { missed: counts.map(|(missed, _)| missed), seen };
            for chances in [counts.chances(), Counts::default().chances().of_unit(counts)] {
                let chance = chances.after_misses(misses, span);
                prop_assert!((0.0..=1.0).contains(&chance), "{chance}");
                prop_assert!(chances.after_misses(misses, span + 0.7) >= chance - 1e-9);
                prop_assert!((share - 1e-9..=1.0).contains(&chances.within(share, span)));
            }
        }
    }
}
