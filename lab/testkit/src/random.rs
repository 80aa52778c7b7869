//! Random numbers of a test, which follow from a seed.
//!
//! Before: a seed, fixed or from a variable. After: the same numbers each time, so that a failure can be repeated.
//! Threads: each has its own. Promise: the sequence for a seed does not change (SplitMix64).

pub(crate) const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

pub(crate) fn mix(mut word: u64) -> u64 {
    word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ word >> 31
}

/// Returns the next number of the sequence with this state.
pub fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(STEP);
    mix(*state)
}

/// A sequence with this state; it begins with the seed.
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    /// A sequence with the seed in this environment variable, or with a seed from the process id. Prints the seed.
    pub fn seeded(variable: &str) -> Self {
        let given = std::env::var(variable).ok().and_then(|seed| seed.parse().ok());
        let seed = given.unwrap_or_else(|| u64::from(std::process::id()));
        println!("{variable}={seed}");
        Self(seed)
    }

    /// Returns the next number.
    pub fn word(&mut self) -> u64 {
        next(&mut self.0)
    }

    /// Returns the next one, below `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        self.word() % end
    }

    /// Returns an index into a list of this length.
    pub fn index(&mut self, len: usize) -> usize {
        self.below(len as u64) as usize
    }

    /// True in one of this number of cases.
    pub fn one_in(&mut self, cases: u64) -> bool {
        self.below(cases) == 0
    }

    /// Returns one of these values.
    pub fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.index(all.len())]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sequence_of_a_seed_is_that_of_splitmix64() {
        let mut random = Random(1_234_567);
        let words = [0; 3].map(|_| random.word());
        assert_eq!(words, [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]);
    }
}
