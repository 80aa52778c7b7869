//! Samples of virtual memory from DAMON, the kernel's access monitor (sysfs, operations `vaddr`).
//!
//! Before: root, and a caller that has made DAMON's threads. After: for each range that DAMON found, one sample of each
//! unit of 2 MiB for each time that it saw the range accessed, at an address somewhere in it.
//! Threads: the caller's, and one of the kernel's for each process; users in one program take turns ([`lock`]).
//! Units: virtual addresses.
//! Promise: when this is dropped, the threads that it uses are off; no other one is touched.
//!
//! DAMON looks at one page of a range at a time, so a count is an estimate for the range. It clears the accessed bit
//! and flushes no TLB: on a CPU whose TLB holds the whole hot set, it sees little (an emulated CPU's holds megabytes).

use std::io;
use std::sync::{Mutex, MutexGuard};

use ballast_base::PAGE_SIZE;
use ballast_ranges::UNIT;
use ballast_sys::lock::Lock;

use super::{Each, SampleSource, Samples};
use crate::kernel_files::Files;

/// DAMON's files.
pub const ADMIN: &str = "/sys/kernel/mm/damon/admin/kdamonds";
/// DAMON looks at a page of each range each 5 ms (its default), and counts for this long.
const COUNT_US: u32 = 200_000;
/// The kernel counts CPU time in ticks of this length.
const TICK_US: u64 = 10_000;
/// Most ranges of a process: DAMON's CPU time grows with them, and so does its precision.
const MOST_RANGES: u32 = 500;

/// The kernel refuses a second thread while one waits for an answer of DAMON's, so a program with two users of it has
/// each hold this while it uses DAMON's files.
pub fn lock() -> MutexGuard<'static, ()> {
    static FILES: Mutex<()> = Mutex::new(());
    FILES.locked()
}

/// DAMON as a source.
#[derive(Debug)]
pub struct Damon {
    files: Files,
    /// Sampled processes, each by the DAMON thread with its index, counted from `first`.
    watched: Vec<u32>,
    first: usize,
    /// CPU time of threads that ended.
    spent_us: u64,
    /// Where in a range the next sample is.
    state: u64,
}

impl Damon {
    /// Uses threads that the caller has made, from index `first` on: one for each watched process.
    pub fn new(files: &Files, first: usize) -> Self {
        Self { files: files.clone(), watched: Vec::new(), first, spent_us: 0, state: 1 }
    }

    fn put(&self, path: &str, value: impl ToString) -> io::Result<()> {
        self.files.write(&format!("{ADMIN}/{path}"), value)
    }

    fn start(&mut self, processes: &[u32]) -> io::Result<()> {
        for (index, process) in (self.first..).zip(processes) {
            let context = format!("{index}/contexts/0");
            self.put(&format!("{index}/contexts/nr_contexts"), 1)?;
            self.put(&format!("{context}/operations"), "vaddr")?;
            let attributes = format!("{context}/monitoring_attrs");
            self.put(&format!("{attributes}/intervals/aggr_us"), COUNT_US)?;
            self.put(&format!("{attributes}/nr_regions/max"), MOST_RANGES)?;
            self.put(&format!("{context}/targets/nr_targets"), 1)?;
            self.put(&format!("{context}/targets/0/pid_target"), process)?;
            self.put(&format!("{context}/schemes/nr_schemes"), 1)?;
            self.put(&format!("{context}/schemes/0/action"), "stat")?;
            for (what, least) in [("sz", 0), ("nr_accesses", 1), ("age", 0)] {
                self.put(&format!("{context}/schemes/0/access_pattern/{what}/min"), least)?;
                self.put(&format!("{context}/schemes/0/access_pattern/{what}/max"), u32::MAX)?;
            }
        }
        for (index, process) in (self.first..).zip(processes) {
            let started = self.put(&format!("{index}/state"), "on");
            // DAMON refuses a process that has just ended. The others are sampled all the same: programs that come and
            // go quickly would otherwise keep it from starting at all.
            if started.is_err() && self.files.optional(&format!("/proc/{process}/stat"))?.is_some() {
                return started;
            }
        }
        self.watched = processes.to_vec();
        Ok(())
    }

    fn indexes(&self, count: usize) -> std::ops::Range<usize> {
        self.first..self.first + count
    }

    /// CPU time of the threads that run.
    fn running_us(&self) -> u64 {
        let of = |index: usize| {
            let pid = self.files.text(&format!("{ADMIN}/{index}/pid")).ok()?;
            let stat = self.files.text(&format!("/proc/{pid}/stat")).ok()?;
            let (_, rest) = stat.rsplit_once(") ")?;
            let ticks = rest.split_ascii_whitespace().skip(11).take(2).flat_map(str::parse::<u64>).sum::<u64>();
            Some(ticks * TICK_US)
        };
        self.indexes(self.watched.len()).filter_map(of).sum()
    }

    fn stop(&mut self) -> io::Result<()> {
        self.spent_us += self.running_us();
        let count = self.watched.len();
        self.watched.clear();
        for index in self.indexes(count) {
            // The kernel switches a thread off when its process ends.
            if self.files.text(&format!("{ADMIN}/{index}/state"))? == "on" {
                self.put(&format!("{index}/state"), "off")?;
            }
        }
        Ok(())
    }

    /// Returns the ranges of the thread with this index, ascending, each with how often it was seen accessed.
    fn ranges(&self, index: usize) -> io::Result<Vec<(u64, u64, u64)>> {
        let state = format!("{index}/state");
        // The write returns when DAMON has counted to the end.
        if let Err(error) = self.put(&state, "update_schemes_tried_regions") {
            let is_on = self.files.text(&format!("{ADMIN}/{state}"))? == "on";
            return if is_on { Err(error) } else { Ok(Vec::new()) };
        }
        let folder = format!("{ADMIN}/{index}/contexts/0/schemes/0/tried_regions");
        let mut found = Vec::new();
        for number in self.files.numbered(&folder, "")? {
            let value = |name: &str| self.files.number(&format!("{folder}/{number}/{name}"));
            found.push((value("start")?, value("end")?, value("nr_accesses")?));
        }
        found.sort_unstable();
        Ok(found)
    }
}

/// Spreads the counts of ranges over units of 2 MiB. A unit that a range fills gets the range's count; a unit of which
/// the range has a part gets this part of the count. DAMON looked at one page for all of a range, so one access that it
/// saw counts as many samples as the range has units.
fn spread(ranges: &[(u64, u64, u64)], state: &mut u64, each: &mut dyn FnMut(u64, Samples)) {
    let mut carry = 0u128;
    for &(start, end, count) in ranges {
        let units = u32::try_from((end.saturating_sub(start) / UNIT).max(1)).unwrap_or(u32::MAX);
        let mut at = start;
        while at < end {
            let next = (at / UNIT + 1).saturating_mul(UNIT).min(end);
            carry += u128::from(count) * u128::from(next - at);
            let samples = u32::try_from(carry / u128::from(UNIT)).unwrap_or(u32::MAX);
            carry %= u128::from(UNIT);
            if samples > 0 {
                *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let pages = ((next - at) / PAGE_SIZE as u64).max(1);
                each(at + (*state >> 33) % pages * PAGE_SIZE as u64, Samples { count: samples, each: units });
            }
            at = next;
        }
    }
}

impl SampleSource for Damon {
    fn watch(&mut self, processes: &[u32]) -> io::Result<()> {
        if processes == self.watched {
            return Ok(());
        }
        let _held = lock();
        self.stop()?;
        if processes.is_empty() {
            return Ok(());
        }
        self.start(processes).inspect_err(|_| {
            self.watched = processes.to_vec();
            let _ = self.stop();
        })
    }

    fn take(&mut self, each: &mut Each<'_>) -> io::Result<()> {
        for index in 0..self.watched.len() {
            let held = lock();
            let (process, ranges) = (self.watched[index], self.ranges(self.first + index)?);
            drop(held);
            spread(&ranges, &mut self.state, &mut |address, samples| each(process, address, samples));
        }
        Ok(())
    }

    fn cpu_us(&self) -> u64 {
        let _held = lock();
        self.spent_us + self.running_us()
    }
}

impl Drop for Damon {
    fn drop(&mut self) {
        let _held = lock();
        // An error cannot be reported here; the next user of DAMON finds it on and says so.
        let _ = self.stop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nodes::tests::put;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_range_counts_as_much_as_its_size_and_its_count_say_and_inside_of_itself(
            ranges in proptest::collection::vec((1u64..5000, 1u64..3000, 1u64..40), 1..20),
        ) {
            let mut at = 0;
            let ranges: Vec<(u64, u64, u64)> = ranges.into_iter().map(|(gap, pages, count)| {
                let start = at + gap * 4096;
                at = start + pages * 4096;
                (start, at, count)
            }).collect();
            let expected: u128 = ranges.iter().map(|(start, end, count)| u128::from((end - start) * count)).sum();
            let (mut samples, mut state, mut inside) = (0u128, 1, true);
            spread(&ranges, &mut state, &mut |address, count| {
                samples += u128::from(count.count);
                inside &= ranges.iter().any(|(start, end, _)| (*start..*end).contains(&address));
            });
            prop_assert!(inside);
            prop_assert_eq!(samples, expected / u128::from(UNIT));
        }
    }

    #[test]
    fn ranges_at_the_end_of_the_address_space_end() {
        let mut calls = 0;
        spread(&[(u64::MAX - 10, u64::MAX, 40)], &mut 1, &mut |_, _| calls += 1);
        assert_eq!(calls, 0, "a few bytes are no sample");
    }

    /// DAMON's files for two processes.
    fn canned(root: &std::path::Path) {
        for index in 0..2 {
            let context = format!("{ADMIN}/{index}/contexts/0");
            put(root, &format!("{ADMIN}/{index}/state"), "off\n");
            for folder in [
                "monitoring_attrs/intervals",
                "monitoring_attrs/nr_regions",
                "targets/0",
                "schemes/0/access_pattern/sz",
                "schemes/0/access_pattern/nr_accesses",
                "schemes/0/access_pattern/age",
            ] {
                put(root, &format!("{context}/{folder}/x"), "");
            }
            let range = format!("{context}/schemes/0/tried_regions/3");
            put(root, &format!("{range}/start"), &format!("{}\n", 4 * UNIT));
            put(root, &format!("{range}/end"), &format!("{}\n", 6 * UNIT));
            put(root, &format!("{range}/nr_accesses"), "7\n");
        }
    }

    #[test]
    fn each_process_gets_a_thread_which_is_off_at_the_end() {
        let root = tempfile::tempdir().expect("directory");
        canned(root.path());
        let files = Files::below(root.path());
        let text = |path: &str| files.text(&format!("{ADMIN}/{path}")).expect("written");
        let mut damon = Damon::new(&files, 0);
        damon.watch(&[77, 99]).expect("watched");
        assert_eq!(text("1/state"), "on");
        assert_eq!(
            (text("1/contexts/0/targets/0/pid_target"), text("0/contexts/0/operations")),
            ("99".into(), "vaddr".into())
        );
        let mut seen = Vec::new();
        damon
            .take(&mut |process, address, samples| seen.push((process, address / UNIT, samples.count, samples.each)))
            .expect("taken");
        assert_eq!(seen, [(77, 4, 7, 2), (77, 5, 7, 2), (99, 4, 7, 2), (99, 5, 7, 2)]);
        put(root.path(), &format!("{ADMIN}/0/state"), "on\n");
        drop(damon);
        assert_eq!(text("0/state"), "off");
    }

    #[test]
    fn a_process_that_damon_refuses_because_it_has_ended_keeps_no_other_one_from_being_sampled() {
        let root = tempfile::tempdir().expect("directory");
        canned(root.path());
        // The state can be read, but not written.
        let state = root.path().join(&format!("{ADMIN}/1/state")[1..]);
        std::fs::remove_file(&state).expect("a file");
        std::os::unix::fs::symlink("/proc/version", &state).expect("link");
        let files = Files::below(root.path());
        let mut damon = Damon::new(&files, 0);
        damon.watch(&[77, 99]).expect("watched");
        let mut seen = Vec::new();
        damon.take(&mut |process, _, _| seen.push(process)).expect("taken");
        assert_eq!(seen, [77, 77]);
        damon.watch(&[]).expect("stopped");
        put(root.path(), "/proc/99/stat", "99 (it lives) S");
        assert!(damon.watch(&[77, 99]).is_err());
        assert_eq!(files.text(&format!("{ADMIN}/0/state")).expect("read"), "off");
    }

    #[test]
    fn threads_before_the_first_are_left_alone() {
        let root = tempfile::tempdir().expect("directory");
        canned(root.path());
        put(root.path(), &format!("{ADMIN}/0/state"), "on\n");
        put(root.path(), &format!("{ADMIN}/1/pid"), "55\n");
        put(root.path(), "/proc/55/stat", "55 (kdamond.1) S 2 0 0 0 -1 0 0 0 0 0 3 4 0 0 20 0\n");
        let files = Files::below(root.path());
        let text = |path: &str| files.text(&format!("{ADMIN}/{path}")).expect("written");
        let mut damon = Damon::new(&files, 1);
        damon.watch(&[77]).expect("watched");
        assert_eq!((text("1/state"), text("1/contexts/0/targets/0/pid_target")), ("on".into(), "77".into()));
        assert_eq!(damon.cpu_us(), 70_000);
        drop(damon);
        assert_eq!((text("0/state"), text("1/state")), ("on".into(), "off".into()));
    }
}
