//! The key that a request names, and whether the request is a write.
//!
//! Before: a load has a number of keys. After: an endless sequence of requests, equal for equal seeds. Threads: the
//! load's. Units: keys; a request is one step. Promise: `Repeat` begins the same sequence again, with its writes, after
//! [`PERIOD`] requests.
//!
//! Keys follow Zipf's law with an exponent of 0.99, the law of YCSB, by the inversion of Gray et al., *Quickly
//! Generating Billion-Record Synthetic Databases* (SIGMOD 1994), section 3.2. Ranks are scattered over the keys, so
//! that popular keys do not lie side by side.

use ballast_testkit::random::Random;

/// Requests after which [`Sequence::Repeat`] begins again: some 4 s of a server at full speed.
pub const PERIOD: u64 = 1_500_000;
/// Requests after which other keys of [`Sequence::Moving`] are popular: some 60 s.
pub const MOVE_EVERY: u64 = 24_000_000;
/// One request in this number is a write.
const WRITE_EVERY: u64 = 20;
/// One request in this number is part of a scan in [`Sequence::ScanBeside`].
const SCAN_EVERY: u64 = 10;
const EXPONENT: f64 = 0.99;

/// The order of the keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Sequence {
    /// Fresh random numbers for ever.
    Random,
    /// One sequence again and again, which never names a quarter of the pages.
    Repeat,
    /// Other keys become popular each minute.
    Moving,
    /// A tenth of the requests reads all keys in order.
    ScanBeside,
    /// A tenth of the keys, which are scattered, is named equally often, and the others never.
    Tenth,
}

impl Sequence {
    /// Its name in rows.
    pub fn name(self) -> &'static str {
        match self {
            Self::Random => "random",
            Self::Repeat => "repeat",
            Self::Moving => "moving",
            Self::ScanBeside => "scan-beside",
            Self::Tenth => "tenth",
        }
    }
}

/// A request: a key, and whether it is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The key, from 0.
    pub key: u32,
    /// It is written; else it is read.
    pub write: bool,
}

/// The sequence of requests.
#[derive(Debug)]
pub struct Keys {
    sequence: Sequence,
    seed: u64,
    random: Random,
    /// The key of each rank.
    of_rank: Vec<u32>,
    zeta: f64,
    alpha: f64,
    eta: f64,
    /// Requests so far, and the next key of the scan.
    count: u64,
    scan: u32,
}

impl Keys {
    /// The requests for this many keys.
    pub fn new(sequence: Sequence, keys: u32, seed: u64) -> Self {
        let mut random = Random(seed ^ 0x5eed);
        let mut of_rank: Vec<u32> = (0..keys).collect();
        for at in (1..of_rank.len()).rev() {
            of_rank.swap(at, (random.word() % (at as u64 + 1)) as usize);
        }
        let term = |rank: u32| f64::from(rank).powf(-EXPONENT);
        let zeta: f64 = (1..=keys).map(term).sum();
        let zeta2 = 1.0 + term(2);
        let eta = (1.0 - (2.0 / f64::from(keys)).powf(1.0 - EXPONENT)) / (1.0 - zeta2 / zeta);
        let alpha = 1.0 / (1.0 - EXPONENT);
        Self { sequence, seed, random: Random(seed), of_rank, zeta, alpha, eta, count: 0, scan: 0 }
    }

    /// The next request.
    pub fn next_request(&mut self) -> Request {
        if self.sequence == Sequence::Repeat && self.count.is_multiple_of(PERIOD) {
            self.random = Random(self.seed);
        }
        let count = self.count;
        self.count += 1;
        let write = self.random.word().is_multiple_of(WRITE_EVERY);
        let keys = self.of_rank.len() as u64;
        if self.sequence == Sequence::ScanBeside && count.is_multiple_of(SCAN_EVERY) {
            let key = self.scan;
            self.scan = ((u64::from(key) + 1) % keys) as u32;
            return Request { key, write: false };
        }
        if self.sequence == Sequence::Tenth {
            let rank = self.random.word() % (keys / 10).max(1);
            return Request { key: self.of_rank[rank as usize], write };
        }
        let moved = if self.sequence == Sequence::Moving { count / MOVE_EVERY * (keys / 10) } else { 0 };
        let rank = (self.rank() + moved) % keys;
        Request { key: self.of_rank[rank as usize], write }
    }

    /// A rank by Zipf's law: 0 is the most frequent one.
    fn rank(&mut self) -> u64 {
        // A number in `0..1`.
        let unit = (self.random.word() >> 11) as f64 / (1u64 << 53) as f64;
        let scaled = unit * self.zeta;
        if scaled < 1.0 {
            return 0;
        }
        if scaled < 1.0 + 0.5f64.powf(EXPONENT) {
            return 1;
        }
        let keys = self.of_rank.len();
        let rank = keys as f64 * (self.eta * unit - self.eta + 1.0).powf(self.alpha);
        (rank as u64).min(keys as u64 - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repeated_sequence_is_the_very_same_and_a_random_one_is_not() {
        let mut keys = Keys::new(Sequence::Repeat, 1000, 7);
        let first: Vec<_> = (0..PERIOD).map(|_| keys.next_request()).collect();
        assert!(first.iter().all(|request| *request == keys.next_request()));
        let mut keys = Keys::new(Sequence::Random, 1000, 7);
        assert!(first.iter().all(|request| *request == keys.next_request()), "the first period is equal");
        assert!(!first.iter().all(|request| *request == keys.next_request()));
    }

    #[test]
    fn zipf_names_the_first_rank_as_often_as_its_law_says() {
        let mut keys = Keys::new(Sequence::Random, 10_000, 3);
        let popular = keys.of_rank[0];
        let wanted = 1.0 / keys.zeta;
        let hits = (0..1_000_000).filter(|_| keys.next_request().key == popular).count() as f64 / 1e6;
        assert!((hits / wanted - 1.0).abs() < 0.05, "{hits} of {wanted}");
    }

    #[test]
    fn a_tenth_of_the_keys_has_all_requests() {
        let mut keys = Keys::new(Sequence::Tenth, 1000, 3);
        let named: std::collections::HashSet<_> = (0..10_000).map(|_| keys.next_request().key).collect();
        assert_eq!(named.len(), 100);
    }

    #[test]
    fn a_scan_beside_names_every_key_in_order() {
        let mut keys = Keys::new(Sequence::ScanBeside, 50, 3);
        let requests: Vec<_> = (0..500).map(|_| keys.next_request()).collect();
        let scanned: Vec<_> = requests.iter().step_by(10).map(|request| request.key).collect();
        assert_eq!(scanned, (0..50).collect::<Vec<_>>());
    }
}
