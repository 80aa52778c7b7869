//! Samples from the PMU, by perf: one event and one ring for each CPU (Demeter §3.2.2).
//!
//! Before: a CPU with PEBS, which in a guest needs a vPMU. After: virtual addresses of loads that took longer than a
//! cache hit. Each ring is drained when samples are taken: a program can no more drain at context switches than it can
//! keep its threads from being switched, so a ring holds what an epoch's worth of samples needs.
//! Threads: the caller's. Units: one sample for each 4,093 events; core cycles.
//! Promise: without such a CPU, opening returns the reason.
//!
//! The event has not been opened on any machine yet. Tests use the same path with the event for page faults, and the
//! parser on the bytes of the ABI (`sys/src/perf/records.rs`).

use std::io;

use ballast_sys::perf::records::Record;
use ballast_sys::perf::{Event, Opened, Sampler};

use super::{Each, Missed, SampleSource, Samples};
use crate::kernel_files::{Files, list};

/// One sample for this number of events (§3.2.2).
pub const PERIOD: u64 = 4093;
/// Loads that take longer than this come from memory (§3.2.2: a cache's take 53.6 ns, those of memory 68.7 ns).
pub const LEAST_NS: u64 = 64;
/// Pages of a ring: 512 KiB, 9,362 samples.
const PAGES: usize = 128;

/// Perf as a source.
#[derive(Debug)]
pub struct Perf {
    rings: Vec<Sampler>,
    watched: Vec<u32>,
}

/// Result of opening.
#[derive(Debug)]
pub enum Found {
    /// It samples.
    Perf(Perf),
    /// The reason why it cannot sample here.
    Not(&'static str),
}

impl Perf {
    /// Opens the event for loads that took longer than a cache hit.
    ///
    /// # Errors
    /// The kernel has no memory for it.
    pub fn loads(files: &Files) -> io::Result<Found> {
        let text = files.optional("/proc/cpuinfo")?.unwrap_or_default();
        let megahertz =
            text.lines().find_map(|line| line.strip_prefix("cpu MHz")?.split(':').nth(1)?.trim().parse::<f64>().ok());
        let cycles = megahertz.unwrap_or(3000.0) * LEAST_NS as f64 / 1000.0;
        Self::open(files, Event::LoadLatency { cycles: cycles as u16 }, PERIOD)
    }

    /// Opens any event.
    ///
    /// # Errors
    /// The kernel has no memory for it.
    pub fn open(files: &Files, event: Event, period: u64) -> io::Result<Found> {
        let mut rings = Vec::new();
        for cpu in list(&files.text("/sys/devices/system/cpu/online")?) {
            match Sampler::open_cpu(event, cpu, period, PAGES)? {
                Opened::Sampler(ring) => rings.push(ring),
                Opened::NoEvent => return Ok(Found::Not("this machine has no PMU with the event")),
                Opened::NotPermitted => return Ok(Found::Not("perf events of a CPU are not permitted")),
            }
        }
        Ok(Found::Perf(Self { rings, watched: Vec::new() }))
    }
}

impl SampleSource for Perf {
    fn name(&self) -> &'static str {
        "perf"
    }

    fn watch(&mut self, processes: &[u32]) -> io::Result<()> {
        self.watched = processes.to_vec();
        self.watched.sort_unstable();
        Ok(())
    }

    fn take(&mut self, each: &mut Each<'_>) -> io::Result<Missed> {
        let mut missed = Missed::default();
        for ring in &mut self.rings {
            let drained = ring.drain(|record| match record {
                Record::Sample(sample) if sample.address != 0 && self.watched.binary_search(&sample.pid).is_ok() => {
                    each(sample.pid, sample.address, Samples { count: 1, each: 1 });
                }
                Record::Lost(count) => missed.lost += count,
                _ => (),
            });
            missed.damaged += u64::from(drained.damaged.is_some()) + u64::from(drained.skipped);
        }
        Ok(missed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_base::PAGE_SIZE;
    use std::sync::atomic::Ordering;

    #[test]
    fn faults_on_any_cpu_are_sampled_with_their_process_and_address_and_others_left_out() {
        let files = Files::default();
        let mut perf = match Perf::open(&files, Event::PageFaults, 1).expect("opened or not") {
            Found::Perf(perf) => perf,
            Found::Not(why) => return ballast_testkit::skip("perf", why),
        };
        let memory = ballast_sys::Anon::new(200 * PAGE_SIZE).expect("memory");
        let own = std::process::id();
        let inside = memory.addr() as u64..(memory.addr() + memory.len()) as u64;
        let mut touch = |watched: &[u32], from: usize| {
            perf.watch(watched).expect("watched");
            (from..from + 100).for_each(|page| memory.word(page * PAGE_SIZE).store(1, Ordering::Relaxed));
            let (mut ours, mut others) = (0, 0);
            let missed = perf.take(&mut |process, address, samples| {
                ours += u32::from(process == own && inside.contains(&address)) * samples.count;
                others += u32::from(process != own);
            });
            assert_eq!(missed.expect("taken").damaged, 0);
            (ours, others)
        };
        let (seen, others) = touch(&[own], 0);
        // The kernel stops an event that comes too often for a tick.
        assert!(seen > 0 && others == 0, "{seen} {others}");
        assert_eq!(touch(&[1], 100).0, 0);
    }

    #[test]
    fn loads_are_sampled_or_the_reason_is_said() {
        match Perf::loads(&Files::default()).expect("opened or not") {
            Found::Perf(mut perf) => assert_eq!(perf.take(&mut |_, _, _| ()).expect("taken").damaged, 0),
            Found::Not(why) => assert!(!why.is_empty()),
        }
    }
}
