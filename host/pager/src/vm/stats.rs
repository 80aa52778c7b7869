//! Statistics of a VM for operators: counters, latency histograms and stall, in the state file, which outlives engines.
//!
//! Before: workers count. After: `daemon` turns a snapshot into JSON and metrics.
//! Threads: each change is a relaxed atomic operation; a reader may catch a page between two gauges. Units:
//! nanoseconds, unless a name says otherwise.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ballast_handover::state_file::{COUNTERS, HISTOGRAM_WORDS, StateFile};

/// The counters, in the order of the state file. Those that are not called gauges only grow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Counter {
    /// Gauge: pages in Quarantine or Evicting.
    Quarantined,
    /// Gauge: pages Far or Restoring.
    Far,
    /// Gauge: pages Zero.
    Zero,
    /// Gauge: pages Poisoned.
    Poisoned,
    /// Gauge: bytes registered with userfaultfd.
    RegisteredBytes,
    /// Minor faults: the page was in its file, not mapped.
    FaultMinor,
    /// Faults on far pages.
    FaultRestore,
    /// Faults on pages known to be zero.
    FaultZero,
    /// Faults on pages never touched, or discarded.
    FaultFresh,
    /// Faults put back to be retried.
    FaultDeferred,
    /// Pages put into quarantine.
    Zapped,
    /// Pages written to a store and freed.
    Evicted,
    /// Pages found zero and freed.
    EvictedZero,
    /// Quarantine hits: pages touched in quarantine or while being evicted.
    QuarantineHits,
    /// Quarantine hits during the eviction: a copy was dropped.
    Aborted,
    /// Pages discarded.
    Discarded,
    /// Times that a store was full.
    StoreFull,
    /// Pages that could not be zapped, read, stored or punched; they stay resident.
    Failed,
    /// Time for which at least one thread of the VM waited, nanoseconds.
    StallSomeNs,
    /// Time for which all threads of the VM waited, nanoseconds.
    StallFullNs,
    /// Longest time of the VM without an engine, nanoseconds.
    LongestGapNs,
    /// Takeovers from an engine that had died.
    Takeovers,
    /// Far pages restored before a touch.
    Prefetched,
    /// Pages moved from the RAM store to a slower one.
    Spilled,
    /// Faults on far pages that were in a slow store.
    FaultFile,
    /// Units (2 MiB) mapped huge again.
    Coalesced,
    /// Units that the kernel refused to map huge.
    CoalesceRefused,
    /// Faults that the throttle delayed: the VM was above its limit.
    Throttled,
    /// Sum of these delays, nanoseconds.
    ThrottledNs,
    /// Sum of the refault intervals of all restored pages, milliseconds.
    RefaultMs,
    /// Sum of the reciprocals of these intervals, in thousandths of 1/s.
    RefaultMilliHz,
    /// Pages that faults restored: more than faults where 2 MiB moves as one.
    RestoredPages,
    /// Zero pages that faults or readahead filled.
    ZeroedPages,
    /// Wall-clock time that fault workers spent on its faults, nanoseconds; a visit hardly ever sleeps.
    FaultWorkNs,
    /// CPU time that its tasks took, nanoseconds.
    TaskCpuNs,
    /// Gauge: pages last seen on the host's slow node.
    SlowNode,
    /// Pages moved to the slow node.
    MovedDown,
    /// Pages moved to the fast node.
    MovedUp,
    /// Pages that were to be moved to another node, and stayed.
    MoveFailed,
    /// Huge units split so that their pages can be moved alone.
    Split,
    /// Units that the kernel would not split.
    SplitFailed,
    /// Units made huge again.
    Joined,
    /// Pages restored within [`SOON_MS`](crate::vm::interval::SOON_MS) of their eviction.
    RestoredSoon,
}
const _: () = assert!((Counter::RestoredSoon as usize) < COUNTERS);

/// A latency histogram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Latency {
    /// Fault on a far page, from its read to the wake.
    Restore,
    /// Any other fault, from its read to the wake.
    Other,
}

/// A stage of a restore, with a histogram of the restores that `stages` samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Stage {
    /// From the read of the fault to the try that served it.
    Queue,
    /// From the start of that try until the word was found Far.
    Lookup,
    /// Until the page's bytes were read.
    Read,
    /// Until the thread was woken and the copy freed.
    Install,
}

impl Stage {
    /// All stages, in order.
    pub const ALL: [Self; 4] = [Self::Queue, Self::Lookup, Self::Read, Self::Install];

    /// Its name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Queue => "queue",
            Self::Lookup => "lookup",
            Self::Read => "read",
            Self::Install => "install",
        }
    }
}

/// Sub-buckets per power of two: a recorded value is at most 1/16 below its bucket's upper edge.
const SUB: u32 = 16;
/// Buckets: exact below 16 ns, then 16 per power of two up to 2^40 ns (18 minutes).
pub const BUCKETS: usize = 592;
/// Buckets of a stage, up to 2^30 ns (1 s); longer values count in the last one.
const STAGE_BUCKETS: usize = 432;
/// The stages follow the two latencies.
const STAGES_AT: usize = 2 * (BUCKETS + 2);
const _: () = assert!(STAGES_AT + Stage::ALL.len() * (STAGE_BUCKETS + 2) <= HISTOGRAM_WORDS);

fn bucket(ns: u64) -> usize {
    if ns < u64::from(SUB) {
        return ns as usize;
    }
    let power = ns.ilog2() - SUB.ilog2();
    let sub = (ns >> power) as u32 - SUB;
    ((power + 1) * SUB + sub).min(BUCKETS as u32 - 1) as usize
}

/// Upper edge of a bucket, nanoseconds.
pub fn upper_edge(bucket: usize) -> u64 {
    let (power, sub) = (bucket as u32 / SUB, bucket as u64 % u64::from(SUB));
    if power == 0 { sub } else { ((u64::from(SUB) + sub + 1) << (power - 1)) - 1 }
}

/// A copy of a histogram.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Histogram {
    /// Counts by bucket.
    pub counts: Vec<u64>,
    /// Sum of all values, nanoseconds.
    pub sum_ns: u64,
    /// Largest value, nanoseconds.
    pub max_ns: u64,
}

impl Histogram {
    /// Number of values.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// The value that `percent` of the values do not exceed, nanoseconds; 0 without values.
    pub fn percentile_ns(&self, percent: f64) -> u64 {
        let rank = (self.count() as f64 * percent / 100.0).ceil().max(1.0) as u64;
        let mut seen = 0;
        let at = self.counts.iter().position(|count| {
            seen += count;
            seen >= rank
        });
        at.map_or(0, |bucket| upper_edge(bucket).min(self.max_ns))
    }
}

/// The counters of one VM.
#[derive(Clone, Copy, Debug)]
pub struct Stats<'a> {
    counters: &'a [AtomicU64],
    histograms: &'a [AtomicU64],
}

impl<'a> Stats<'a> {
    /// The counters in a state file.
    pub fn of(file: &'a StateFile) -> Self {
        Self { counters: file.counters(), histograms: file.histograms() }
    }

    /// Adds to a counter.
    pub fn add(self, counter: Counter, n: u64) {
        self.counters[counter as usize].fetch_add(n, Ordering::Relaxed);
    }

    /// Lowers a gauge. It may be below zero for an instant, if a page is restored before its eviction is counted.
    pub fn sub(self, counter: Counter, n: u64) {
        self.counters[counter as usize].fetch_sub(n, Ordering::Relaxed);
    }

    /// Sets a gauge.
    pub fn set(self, counter: Counter, n: u64) {
        self.counters[counter as usize].store(n, Ordering::Relaxed);
    }

    /// Raises a counter to at least `n`.
    pub fn raise(self, counter: Counter, n: u64) {
        self.counters[counter as usize].fetch_max(n, Ordering::Relaxed);
    }

    /// Reads a counter. A gauge below zero reads as zero.
    pub fn get(self, counter: Counter) -> u64 {
        (self.counters[counter as usize].load(Ordering::Relaxed) as i64).max(0) as u64
    }

    fn histogram_words(self, which: Latency) -> &'a [AtomicU64] {
        let size = BUCKETS + 2;
        &self.histograms[which as usize * size..][..size]
    }

    fn stage_words(self, which: Stage) -> &'a [AtomicU64] {
        let size = STAGE_BUCKETS + 2;
        &self.histograms[STAGES_AT + which as usize * size..][..size]
    }

    /// Records one latency.
    pub fn record(self, which: Latency, took: Duration) {
        record(self.histogram_words(which), took);
    }

    /// Records one stage of a restore.
    pub fn record_stage(self, which: Stage, took: Duration) {
        record(self.stage_words(which), took);
    }

    /// Copies a histogram.
    pub fn histogram(self, which: Latency) -> Histogram {
        copy(self.histogram_words(which))
    }

    /// The histogram of all faults, each of which is in one of the two latencies.
    pub fn fault_histogram(self) -> Histogram {
        let (mut all, other) = (self.histogram(Latency::Restore), self.histogram(Latency::Other));
        all.counts.iter_mut().zip(other.counts).for_each(|(sum, count)| *sum += count);
        Histogram { sum_ns: all.sum_ns + other.sum_ns, max_ns: all.max_ns.max(other.max_ns), ..all }
    }

    /// Copies a stage's histogram.
    pub fn stage(self, which: Stage) -> Histogram {
        copy(self.stage_words(which))
    }
}

/// A histogram's words: its buckets, then sum and maximum.
fn record(words: &[AtomicU64], took: Duration) {
    let ns = took.as_nanos() as u64;
    let buckets = words.len() - 2;
    words[bucket(ns).min(buckets - 1)].fetch_add(1, Ordering::Relaxed);
    words[buckets].fetch_add(ns, Ordering::Relaxed);
    words[buckets + 1].fetch_max(ns, Ordering::Relaxed);
}

fn copy(words: &[AtomicU64]) -> Histogram {
    let words: Vec<u64> = words.iter().map(|word| word.load(Ordering::Relaxed)).collect();
    let buckets = words.len() - 2;
    Histogram { counts: words[..buckets].to_vec(), sum_ns: words[buckets], max_ns: words[buckets + 1] }
}

/// Stall averages of one kind, in percent, as the kernel's PSI computes them: exponential, sampled every 2 s.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Averages {
    /// Over 10 seconds.
    pub avg10: f64,
    /// Over 60 seconds.
    pub avg60: f64,
    /// Over 300 seconds.
    pub avg300: f64,
}

impl Averages {
    /// Adds a sample: this percentage of the elapsed time was stall.
    pub fn add(&mut self, percent: f64, elapsed: Duration) {
        for (average, window_s) in [(&mut self.avg10, 10.0), (&mut self.avg60, 60.0), (&mut self.avg300, 300.0)] {
            let keep = (-elapsed.as_secs_f64() / window_s).exp();
            *average = *average * keep + percent * (1.0 - keep);
        }
    }
}

/// Turns growing stall totals into averages.
#[derive(Debug)]
pub struct Pressure(Mutex<Sampled>);

#[derive(Debug)]
struct Sampled {
    at: Instant,
    totals_ns: [u64; 2],
    averages: [Averages; 2],
}

impl Pressure {
    /// The sampling period.
    pub const PERIOD: Duration = Duration::from_secs(2);

    /// Starts from the totals so far.
    pub fn new(stats: Stats<'_>) -> Self {
        let totals_ns = [Counter::StallSomeNs, Counter::StallFullNs].map(|counter| stats.get(counter));
        Self(Mutex::new(Sampled { at: Instant::now(), totals_ns, averages: Default::default() }))
    }

    /// Takes a sample if a period has passed since the last one.
    pub fn sample(&self, stats: Stats<'_>, now: Instant) {
        let mut state = self.0.lock().expect("no panic while held");
        let elapsed = now.saturating_duration_since(state.at);
        if elapsed < Self::PERIOD {
            return;
        }
        state.at = now;
        for (kind, counter) in [Counter::StallSomeNs, Counter::StallFullNs].into_iter().enumerate() {
            let total = stats.get(counter);
            let stalled = total.saturating_sub(state.totals_ns[kind]) as f64;
            state.totals_ns[kind] = total;
            let percent = (stalled / elapsed.as_nanos() as f64 * 100.0).min(100.0);
            state.averages[kind].add(percent, elapsed);
        }
    }

    /// The averages of some and full stall.
    pub fn averages(&self) -> [Averages; 2] {
        self.0.lock().expect("no panic while held").averages
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_base::wire::VmId;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_value_lies_at_most_a_sixteenth_below_its_buckets_edge(ns in 0u64..1 << 40) {
            let edge = upper_edge(bucket(ns));
            prop_assert!(edge >= ns && edge - ns <= ns / 16, "{ns} in a bucket that ends at {edge}");
            prop_assert!(bucket(ns) == 0 || upper_edge(bucket(ns) - 1) < ns);
        }
    }

    #[test]
    fn percentiles_come_from_the_recorded_values_and_survive_the_engine() {
        let file = StateFile::create(VmId([0; 16]), "x").expect("create");
        for us in 1..=100 {
            Stats::of(&file).record(Latency::Restore, Duration::from_micros(us));
        }
        let again = StateFile::open(file.fd().try_clone_to_owned().expect("dup")).expect("open");
        let histogram = Stats::of(&again).histogram(Latency::Restore);
        assert_eq!((histogram.count(), histogram.max_ns, histogram.sum_ns), (100, 100_000, 5_050_000));
        let p50 = histogram.percentile_ns(50.0);
        assert!((50_000..=53_200).contains(&p50), "{p50}");
        assert_eq!(histogram.percentile_ns(100.0), 100_000);
        assert_eq!(Stats::of(&again).histogram(Latency::Other).percentile_ns(99.0), 0);
    }

    #[test]
    fn stages_lie_beside_the_latencies_and_one_of_minutes_is_in_the_last_bucket() {
        let file = StateFile::create(VmId([0; 16]), "x").expect("create");
        let stats = Stats::of(&file);
        for (stage, ns) in Stage::ALL.into_iter().zip([5, 500, 50_000, 300_000_000_000]) {
            stats.record_stage(stage, Duration::from_nanos(ns));
        }
        let percentiles = Stage::ALL.map(|stage| stats.stage(stage).percentile_ns(50.0));
        assert_eq!(percentiles, [5, 500, 50_000, (1 << 30) - 1]);
        assert!([Latency::Restore, Latency::Other].iter().all(|which| stats.histogram(*which).count() == 0));
        assert_eq!(stats.stage(Stage::Install).max_ns, 300_000_000_000);
    }

    #[test]
    fn a_vm_that_waits_half_the_time_shows_fifty_percent() {
        let file = StateFile::create(VmId([0; 16]), "x").expect("create");
        let stats = Stats::of(&file);
        let pressure = Pressure::new(stats);
        let mut now = Instant::now();
        for _ in 0..1000 {
            now += Duration::from_secs(2);
            stats.add(Counter::StallSomeNs, 1_000_000_000);
            pressure.sample(stats, now);
        }
        let [some, full] = pressure.averages();
        assert!((some.avg10 - 50.0).abs() < 0.1 && (some.avg300 - 50.0).abs() < 0.2, "{some:?}");
        assert_eq!(full, Averages::default());
    }
}
