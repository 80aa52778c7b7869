//! The hot part of the program's memory. Both the program that makes the accesses and the judge use this.
//!
//! Before: a kind, a size and a phase. After: [`crate::gups`] accesses memory by it, and [`crate::judge`] computes
//! shares from it. Units: blocks of 64 pages, eight in a unit of 2 MiB. Promise: the same arguments give the same heat
//! in both processes.

pub use ballast_testkit::random::next as random;

/// Share of the accesses that goes to the hot part: ten times as many as to the rest (Demeter §5.2).
pub const HOT_SHARE: f64 = 10.0 / 11.0;
/// 1/N of memory is hot.
const HOT_PART: usize = 8;
pub const BLOCKS: usize = 8;

/// The placement of the program's heat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// One hot eighth. The program touched it last at its start.
    Contiguous,
    /// A hot eighth, scattered over the second half of the memory.
    Scattered,
    /// A hot eighth that moves in each phase.
    Moving,
}

impl Kind {
    pub fn parse(name: &str) -> Option<Self> {
        match name {
            "contiguous" => Some(Self::Contiguous),
            "scattered" => Some(Self::Scattered),
            "moving" => Some(Self::Moving),
            _ => None,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Contiguous => "contiguous",
            Self::Scattered => "scattered",
            Self::Moving => "moving",
        }
    }

    pub fn hot(self, units: usize, phase: u64) -> Vec<usize> {
        self.hot_units(units, phase).into_iter().flat_map(|unit| unit * BLOCKS..(unit + 1) * BLOCKS).collect()
    }

    fn hot_units(self, units: usize, phase: u64) -> Vec<usize> {
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
                // The units that were touched first are left out: the fast tier has them from the start.
                let mut hot: Vec<usize> = all.into_iter().filter(|unit| *unit >= units / 2).take(count).collect();
                hot.sort_unstable();
                hot
            }
        }
    }

    pub fn shares(self, units: usize, phase: u64) -> Vec<f64> {
        let (hot, blocks) = (self.hot(units, phase), units * BLOCKS);
        let cold = (1.0 - HOT_SHARE) / (blocks - hot.len()).max(1) as f64;
        let mut shares = vec![cold; blocks];
        hot.iter().for_each(|block| shares[*block] = HOT_SHARE / hot.len() as f64);
        shares
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_eighth_is_hot_and_all_shares_are_one() {
        for kind in [Kind::Contiguous, Kind::Scattered, Kind::Moving] {
            for phase in 0..9 {
                let hot = kind.hot(128, phase);
                assert!(hot.len() == 128 && hot.is_sorted() && hot[127] < 1024, "{kind:?}");
                assert!((kind.shares(128, phase).iter().sum::<f64>() - 1.0).abs() < 1e-9);
            }
            assert_eq!(Kind::parse(kind.name()), Some(kind));
        }
        assert_ne!(Kind::Moving.hot(128, 0), Kind::Moving.hot(128, 1));
        assert_eq!(Kind::Contiguous.hot(128, 0), Kind::Contiguous.hot(128, 1));
    }
}
