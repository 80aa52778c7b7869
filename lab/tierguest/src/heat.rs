//! Which part of the program's memory is hot: known to the program that makes the accesses, and to the judge.
//!
//! Before: a kind, a size, a seed. After: [`crate::gups`] accesses memory by it; [`crate::judge`] computes shares from
//! it. Units: 2 MiB. Promise: the same words give the same heat, in both processes.

/// Share of the accesses to the hot part: ten times as many as to the rest (Demeter §5.2).
pub const HOT_SHARE: f64 = 10.0 / 11.0;
/// 1/N of memory is hot.
const HOT_PART: usize = 8;

/// What the program does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// One hot eighth, which was touched last at the start.
    Contiguous,
    /// The same heat, anywhere.
    Scattered,
    /// A hot eighth that is elsewhere in each phase.
    Moving,
}

impl Kind {
    /// By name.
    pub fn parse(name: &str) -> Option<Self> {
        match name {
            "contiguous" => Some(Self::Contiguous),
            "scattered" => Some(Self::Scattered),
            "moving" => Some(Self::Moving),
            _ => None,
        }
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Contiguous => "contiguous",
            Self::Scattered => "scattered",
            Self::Moving => "moving",
        }
    }

    /// The hot units of this number of units, in a phase.
    pub fn hot(self, units: usize, phase: u64) -> Vec<usize> {
        let count = (units / HOT_PART).max(1);
        match self {
            Self::Contiguous => (units - count..units).collect(),
            Self::Moving => {
                let at = (HOT_PART as u64 - 1 - phase % HOT_PART as u64) as usize * count;
                (at..(at + count).min(units)).collect()
            }
            Self::Scattered => {
                let mut all: Vec<usize> = (0..units).collect();
                let mut state = 7;
                for at in (1..units).rev() {
                    all.swap(at, (random(&mut state) % (at as u64 + 1)) as usize);
                }
                // Not those that were touched first: the fast tier would have them from the start.
                let mut hot: Vec<usize> = all.into_iter().filter(|unit| *unit >= units / 2).take(count).collect();
                hot.sort_unstable();
                hot
            }
        }
    }

    /// The share of all accesses that goes to each unit.
    pub fn shares(self, units: usize, phase: u64) -> Vec<f64> {
        let hot = self.hot(units, phase);
        let cold = (1.0 - HOT_SHARE) / (units - hot.len()).max(1) as f64;
        let mut shares = vec![cold; units];
        hot.iter().for_each(|unit| shares[*unit] = HOT_SHARE / hot.len() as f64);
        shares
    }
}

/// SplitMix64.
pub fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mixed = (*state ^ *state >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ mixed >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_eighth_is_hot_and_all_shares_are_one() {
        for kind in [Kind::Contiguous, Kind::Scattered, Kind::Moving] {
            for phase in 0..9 {
                let hot = kind.hot(128, phase);
                assert!(hot.len() == 16 && hot.is_sorted() && hot[15] < 128, "{kind:?}");
                assert!((kind.shares(128, phase).iter().sum::<f64>() - 1.0).abs() < 1e-9);
            }
            assert_eq!(Kind::parse(kind.name()), Some(kind));
        }
        assert_ne!(Kind::Moving.hot(128, 0), Kind::Moving.hot(128, 1));
        assert_eq!(Kind::Contiguous.hot(128, 0), Kind::Contiguous.hot(128, 1));
    }
}
