//! From a real kernel's samples to ranges and a plan: page faults through perf, which every machine has; no machine
//! here has the loads that PEBS samples.

use std::ops::ControlFlow;
use std::sync::atomic::Ordering;

use ballast_base::{Bytes, PAGE_SIZE};
use ballast_ranges::relocate::{Limits, Placement, Rule, Tier, plan};
use ballast_ranges::{Classifier, Fitted, Range, Roots, UNIT, rank};
use ballast_sys::perf::records::{Record, Sample};
use ballast_sys::perf::{Event, Opened, Sampler};
use ballast_sys::{Mapping, memfd};
use ballast_testkit::published::{Parameters, Published};

const UNITS: usize = 32;
const HOT: usize = 20;

/// All of memory is in the slow tier, except its first unit.
struct FirstIsFast(u64);

impl Placement for FirstIsFast {
    fn visit(&self, range: &Range, each: &mut dyn FnMut(u64, Tier) -> ControlFlow<()>) {
        for unit in 0..UNITS as u64 {
            let address = self.0 + unit * UNIT;
            let tier = if unit == 0 { Tier::Fast } else { Tier::Slow };
            if (range.start..range.end).contains(&address) && each(address, tier).is_break() {
                return;
            }
        }
    }
}

#[test]
fn memory_that_faults_most_is_found_hot_and_promoted() {
    let mut sampler = match Sampler::open(Event::PageFaults, 0, 1, 64).expect("opened or not") {
        Opened::Sampler(sampler) => sampler,
        Opened::NoEvent | Opened::NotPermitted => {
            return ballast_testkit::skip("perf", "no page faults can be sampled");
        }
    };
    let bytes = UNITS * UNIT as usize;
    let file = memfd::create("hot", Bytes(bytes as u64)).expect("a file");
    let memory = Mapping::shared(file, 0, bytes).expect("mapped");
    let base = memory.addr() as u64;
    let hot = base + HOT as u64 * UNIT;
    let roots = Roots::new(&[(1 << 30, base), (base, base + bytes as u64)]).expect("two roots");
    let classifiers: [Box<dyn Classifier>; 2] =
        [Box::new(Fitted::new(roots.clone())), Box::new(Published::new(roots, Parameters::of(1)))];
    for mut classifier in classifiers {
        let mut seen = 0;
        for _ in 0..30 {
            memory.zap(0, bytes).expect("unmapped, so that each first write is a fault again");
            let every = |unit: usize| if unit == HOT { 4 } else { 256 };
            let pages = (0..UNITS).flat_map(|unit| (0..512).step_by(every(unit)).map(move |page| unit * 512 + page));
            pages.for_each(|page| memory.bytes(page * PAGE_SIZE, 1)[0].store(1, Ordering::Relaxed));
            let drained = sampler.drain(|record| {
                if let Record::Sample(Sample { address, .. }) = record {
                    classifier.record(address, 1);
                    seen += 1;
                }
            });
            assert_eq!(drained.damaged, None);
            classifier.end_epoch();
        }
        if seen < 30 * 100 {
            return ballast_testkit::skip(
                "perf",
                "too few faults were sampled: memory in huge pages, or a throttled event",
            );
        }
        let ranked = rank(classifier.ranges());
        let hottest = ranked[0];
        assert!(hottest.start <= hot && hot < hottest.end, "{}: {hottest:?}", classifier.name());
        assert!(hottest.bytes() <= 4 * UNIT, "{}: {} bytes", classifier.name(), hottest.bytes());
        if classifier.name() == "fitted" {
            let limits = Limits { fast: 1, free: 0, reserve: 0, most: 8 };
            let plan = plan(&ranked, &FirstIsFast(base), limits, Rule::Ours);
            assert_eq!((plan.promote, plan.demote), (vec![hot], vec![base]));
        }
    }
}
