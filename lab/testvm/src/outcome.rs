//! The result of a run.
//!
//! Before: `vm` collects the workers' results. After: the caller reads them, or prints one line of JSON.
//! Threads: none. Units: in every key. Words are hexadecimal text, because JSON numbers lose bits.

use serde::{Deserialize, Serialize, Serializer};

use crate::guest;

/// The kind of the workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum GuestKind {
    /// Threads of this process.
    Native,
    /// Virtual CPUs, in user mode, without a kernel.
    Kvm,
}

/// The result of one run.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    /// Operations done by all workers.
    pub ops: u64,
    /// Wrong bytes, counted each time they were read.
    pub wrong_bytes: u64,
    /// Words with wrong bytes.
    pub wrong_words: u64,
    /// The first wrong words, at most 16 per worker.
    pub wrong: Vec<Wrong>,
    /// Time of the operations.
    pub run_ms: f64,
    /// Times of operations, if the spec asks for them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub latency: Option<Latency>,
}

impl Outcome {
    /// Returns true if no byte was wrong.
    pub fn is_right(&self) -> bool {
        self.wrong_words == 0
    }
}

/// One wrong word.
#[derive(Clone, Debug, Serialize)]
pub struct Wrong {
    /// The worker that read it.
    pub worker: usize,
    /// Page of guest RAM.
    pub page: u64,
    /// Byte offset in the page.
    pub offset: u64,
    /// The expected word.
    #[serde(serialize_with = "hex")]
    pub expected: u64,
    /// The word that was read.
    #[serde(serialize_with = "hex")]
    pub found: u64,
    /// Operations that the worker had done.
    pub op: u64,
    /// `run` or `verify`.
    pub phase: &'static str,
}

/// Times of operations. A percentile is the upper edge of a bucket, at most 12.5 % above the true value.
#[derive(Clone, Debug, Serialize)]
pub struct Latency {
    /// Operations measured.
    pub count: u64,
    /// Median.
    pub p50_ns: u64,
    /// 90 %.
    pub p90_ns: u64,
    /// 99 %.
    pub p99_ns: u64,
    /// The longest operation: the longest stall of the VM in the run phase.
    pub max_ns: u64,
}

impl Latency {
    /// Computes the figures from counts per bucket, the longest operation, and the rate of the clock.
    pub(crate) fn new(counts: &[u64], longest: u64, ticks_per_ns: f64) -> Self {
        let count: u64 = counts.iter().sum();
        let ns = |ticks: u64| (ticks as f64 / ticks_per_ns) as u64;
        let percentile = |fraction: f64| {
            let rank = (count as f64 * fraction).ceil() as u64;
            let mut seen = 0;
            let bucket = counts.iter().position(|here| {
                seen += here;
                seen >= rank
            });
            bucket.map_or(0, |bucket| ns(upper_edge(bucket as u64).min(longest)))
        };
        let [p50_ns, p90_ns, p99_ns] = [0.5, 0.9, 0.99].map(percentile);
        Self { count, p50_ns, p90_ns, p99_ns, max_ns: ns(longest) }
    }
}

/// Returns the largest value that [`guest::bucket`] maps to a bucket.
fn upper_edge(bucket: u64) -> u64 {
    if bucket < 8 {
        return bucket;
    }
    let (exponent, eighth) = (bucket / 8 + 2, bucket % 8);
    let width = 1u128 << (exponent - 3);
    let edge = (1u128 << exponent) + u128::from(eighth + 1) * width - 1;
    debug_assert_eq!(guest::bucket(edge as u64), bucket);
    edge as u64
}

pub(crate) fn hex<S: Serializer>(value: &u64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&format!("{value:#018x}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_is_in_a_bucket_and_buckets_are_adjacent() {
        let mut next = 0u64;
        for bucket in 0..guest::BUCKETS as u64 {
            assert_eq!(guest::bucket(next), bucket);
            let edge = upper_edge(bucket);
            assert_eq!(guest::bucket(edge), bucket);
            next = edge.wrapping_add(1);
        }
        assert_eq!(next, 0, "the last bucket ends at u64::MAX");
    }
}
