//! A source that asks DAMON, the kernel's access monitor, about physical memory (sysfs, operations `paddr`).
//!
//! Before: root, and a kernel whose DAMON no program uses. After: which units were touched, by the accessed bits that
//! DAMON samples; no fault, no zap, no change of a mapping.
//! Threads: one; [`AccessSource::end`] waits for DAMON's next aggregation. Units: physical byte addresses.
//! Promise: at the end of a cycle and when dropped, DAMON is off and the number of its threads is as before.
//!
//! It is not the default. A unit that is not one huge page has no single place in physical memory and is left out.
//! DAMON merges neighbours with similar access into one range and samples one page of each at a time, so what it
//! reports is an estimate, good for the coarse phase of a large guest.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ballast_base::{HUGE_SIZE, Hva, PAGE_SIZE, PageIdx};
use ballast_sys::Remote;

use crate::source::{Ability, AccessSource, Cost, CycleReport, Granularity, Seen, UnitId, Watch};

/// DAMON's directory.
pub const SYSFS: &str = "/sys/kernel/mm/damon/admin/kdamonds";
/// DAMON samples a page of each range at this interval: its own default.
const SAMPLE: Duration = Duration::from_millis(5);

/// Where a region is mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Number of the region in its VM.
    pub region: u32,
    /// Address of its first byte in the process.
    pub start: Hva,
    /// Its size in bytes; whole pages.
    pub len: u64,
}

impl Span {
    /// Address and length of a unit; `None` if it is of another region or beyond the end.
    pub fn of(&self, unit: UnitId) -> Option<(Hva, u64)> {
        let offset = PageIdx::first_of_unit(unit.unit.into()).offset();
        let here = unit.region == self.region && offset < self.len;
        here.then(|| (self.start + offset, (self.len - offset).min(HUGE_SIZE as u64)))
    }
}

/// The source.
#[derive(Debug)]
pub struct Damon {
    root: PathBuf,
    remote: Remote,
    spans: Vec<Span>,
    /// What DAMON aggregates: as long as a cycle lasts.
    window: Duration,
    /// How many of its threads were configured before.
    threads: Option<String>,
    /// Physical address of each unit that the cycle that runs watches, ascending.
    running: Option<Vec<(u64, UnitId)>>,
}

/// Adds to an error what was done to which file.
fn at(path: &Path, what: &str, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{what} {}: {error}", path.display()))
}

impl Damon {
    /// Track a process with DAMON's files below `root` ([`SYSFS`]).
    pub fn new(root: &Path, remote: Remote, spans: Vec<Span>, window: Duration) -> io::Result<Self> {
        let damon = Self { root: root.into(), remote, spans, window, threads: None, running: None };
        damon.check_free()?;
        Ok(damon)
    }

    /// An error if the kernel has no DAMON, or it is in use.
    fn check_free(&self) -> io::Result<()> {
        let count: u32 = self.read("nr_kdamonds")?.parse().unwrap_or(0);
        for number in 0..count {
            if self.read(&format!("{number}/state"))? == "on" {
                return Err(io::Error::new(io::ErrorKind::ResourceBusy, "DAMON is in use by another program"));
            }
        }
        Ok(())
    }

    fn read(&self, file: &str) -> io::Result<String> {
        let path = self.root.join(file);
        let text = fs::read_to_string(&path).map_err(|error| at(&path, "Reading", &error))?;
        Ok(text.trim().to_owned())
    }

    fn write(&self, file: &str, value: impl ToString) -> io::Result<()> {
        let path = self.root.join(file);
        fs::write(&path, value.to_string()).map_err(|error| at(&path, "Writing", &error))
    }

    /// The physical place of a unit that is one huge page.
    fn place(&self, unit: UnitId) -> Option<u64> {
        let (start, len) = self.spans.iter().find_map(|span| span.of(unit))?;
        if len != HUGE_SIZE as u64 {
            return None;
        }
        let mut pages = vec![None; HUGE_SIZE / PAGE_SIZE];
        self.remote.physical(start, &mut pages).ok()?;
        let first = (*pages.first()?)?;
        let whole = pages.iter().zip((first..).step_by(PAGE_SIZE)).all(|(page, expected)| *page == Some(expected));
        (whole && first.is_multiple_of(HUGE_SIZE as u64)).then_some(first)
    }

    fn configure(&mut self, places: &[(u64, UnitId)]) -> io::Result<()> {
        let before = self.read("nr_kdamonds")?;
        self.write("nr_kdamonds", 1)?;
        self.threads = Some(before);
        self.write("0/contexts/nr_contexts", 1)?;
        let us = |time: Duration| time.as_micros();
        let intervals = "0/contexts/0/monitoring_attrs/intervals";
        self.write("0/contexts/0/operations", "paddr")?;
        self.write(&format!("{intervals}/sample_us"), us(SAMPLE))?;
        self.write(&format!("{intervals}/aggr_us"), us(self.window.max(SAMPLE * 2)))?;
        self.write(&format!("{intervals}/update_us"), us(self.window * 1000))?;
        let count = places.len().max(3);
        self.write("0/contexts/0/monitoring_attrs/nr_regions/max", count * 2)?;
        self.write("0/contexts/0/monitoring_attrs/nr_regions/min", count)?;
        self.write("0/contexts/0/targets/nr_targets", 1)?;
        let regions = "0/contexts/0/targets/0/regions";
        self.write(&format!("{regions}/nr_regions"), places.len())?;
        for (index, (start, _)) in places.iter().enumerate() {
            self.write(&format!("{regions}/{index}/start"), start)?;
            self.write(&format!("{regions}/{index}/end"), start + HUGE_SIZE as u64)?;
        }
        self.write("0/contexts/0/schemes/nr_schemes", 1)?;
        self.write("0/contexts/0/schemes/0/action", "stat")?;
        // Ranges of any size and age that were seen touched at all.
        for (what, least) in [("sz", 0), ("nr_accesses", 1), ("age", 0)] {
            self.write(&format!("0/contexts/0/schemes/0/access_pattern/{what}/min"), least)?;
            self.write(&format!("0/contexts/0/schemes/0/access_pattern/{what}/max"), u32::MAX)?;
        }
        self.write("0/state", "on")
    }

    /// The ranges seen touched, `(start, end)`.
    fn touched(&self) -> io::Result<Vec<(u64, u64)>> {
        // Returns when the current aggregation is complete.
        self.write("0/state", "update_schemes_tried_regions")?;
        let directory = self.root.join("0/contexts/0/schemes/0/tried_regions");
        let entries = fs::read_dir(&directory).map_err(|error| at(&directory, "Listing", &error))?;
        let mut ranges = Vec::new();
        for entry in entries {
            let name = entry?.file_name();
            let Some(number) = name.to_str().filter(|name| name.bytes().all(|byte| byte.is_ascii_digit())) else {
                continue;
            };
            let value = |end: &str| -> io::Result<u64> {
                let file = format!("0/contexts/0/schemes/0/tried_regions/{number}/{end}");
                self.read(&file)?.parse().map_err(|_| io::Error::other(format!("{file} holds no number")))
            };
            ranges.push((value("start")?, value("end")?));
        }
        ranges.sort_unstable();
        Ok(ranges)
    }

    /// Switch it off and restore what was configured.
    fn restore(&mut self) -> io::Result<()> {
        let Some(before) = self.threads.take() else { return Ok(()) };
        if self.read("0/state")? == "on" {
            self.write("0/state", "off")?;
        }
        self.write("nr_kdamonds", before)
    }
}

/// Which of these units overlap a range; both ascending.
fn overlapping(places: &[(u64, UnitId)], ranges: &[(u64, u64)]) -> Vec<bool> {
    let touched = |start: u64| {
        let before = ranges.partition_point(|(_, end)| *end <= start);
        ranges[before..].iter().next().is_some_and(|(from, _)| *from < start + HUGE_SIZE as u64)
    };
    places.iter().map(|(start, _)| touched(*start)).collect()
}

impl Drop for Damon {
    fn drop(&mut self) {
        // An error cannot be reported here; the next user of DAMON finds it on and says so.
        let _ = self.restore();
    }
}

impl AccessSource for Damon {
    fn ability(&self) -> Ability {
        Ability { name: "damon", granularity: Granularity::Range }
    }

    fn start(&mut self, watch: &Watch) -> io::Result<()> {
        if self.running.is_some() {
            return Err(io::Error::other("Starting DAMON: a cycle is running already"));
        }
        self.check_free()?;
        let units = watch.coarse.iter().copied().chain(watch.fine.iter().map(|fine| fine.unit));
        let mut places: Vec<_> = units.filter_map(|unit| Some((self.place(unit)?, unit))).collect();
        places.sort_unstable();
        if !places.is_empty()
            && let Err(error) = self.configure(&places)
        {
            let _ = self.restore();
            return Err(error);
        }
        self.running = Some(places);
        Ok(())
    }

    fn end(&mut self) -> io::Result<CycleReport> {
        let places = self
            .running
            .take()
            .ok_or_else(|| io::Error::other("Asking DAMON what was touched: no cycle is running"))?;
        let ranges = if places.is_empty() { Ok(Vec::new()) } else { self.touched() };
        self.restore()?;
        let touched = overlapping(&places, &ranges?);
        let mut units: Vec<_> =
            places.iter().zip(touched).map(|((_, unit), touched)| (*unit, Seen::Coarse { touched })).collect();
        units.sort_unstable_by_key(|(unit, _)| *unit);
        // DAMON's thread is the kernel's: its CPU time is not counted.
        Ok(CycleReport { units, cost: Cost::default() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_base::Bytes;
    use ballast_needs::skip;
    use ballast_sys::{Mapping, memfd, remote::Collapsed};
    use std::sync::atomic::{AtomicBool, Ordering};

    fn unit(unit: u32) -> UnitId {
        UnitId { region: 0, unit }
    }

    #[test]
    fn a_unit_is_touched_if_any_range_overlaps_it() {
        const HUGE: u64 = HUGE_SIZE as u64;
        let places = [(0, unit(3)), (2 * HUGE, unit(0)), (3 * HUGE, unit(1)), (9 * HUGE, unit(2))];
        let ranges = [(HUGE, 2 * HUGE), (3 * HUGE + 4096, 4 * HUGE), (5 * HUGE, 20 * HUGE)];
        assert_eq!(overlapping(&places, &ranges), [false, false, true, true]);
        assert_eq!(overlapping(&places, &[]), [false; 4]);
    }

    /// Eight units of our own, each one huge page. `None`, with a skip printed, where that is impossible or their
    /// physical addresses are hidden.
    fn huge_pages() -> Option<(Mapping, Remote, Span, u64)> {
        const UNITS: usize = 8;
        let fd = memfd::create("ballast-test", Bytes((UNITS * HUGE_SIZE) as u64)).expect("memfd");
        let map = Mapping::shared(&fd, 0, UNITS * HUGE_SIZE).expect("map");
        map.populate(0, map.len()).expect("populate");
        let start = Hva(map.addr() as u64);
        let remote = Remote::open(std::process::id()).expect("own process");
        let collapsed = remote.collapse(start, map.len() as u64);
        let mut first = [None];
        remote.physical(start, &mut first).expect("pagemap");
        match (collapsed, first) {
            (Ok(Collapsed::Done), [Some(place)]) => {
                Some((map, remote, Span { region: 0, start, len: (UNITS * HUGE_SIZE) as u64 }, place))
            }
            (Ok(Collapsed::Done), _) => {
                skip("root", "physical addresses are hidden");
                None
            }
            (collapsed, _) => {
                skip("collapse", format_args!("{collapsed:?}"));
                None
            }
        }
    }

    fn watch() -> Watch {
        Watch { coarse: (0..8).map(unit).collect(), fine: Vec::new() }
    }

    fn touched(report: &CycleReport) -> Vec<u32> {
        report.units.iter().filter(|(_, seen)| seen.touched()).map(|(unit, _)| unit.unit).collect()
    }

    #[test]
    fn it_asks_about_the_addresses_of_the_units_and_reads_the_result() {
        let Some((_map, remote, span, place)) = huge_pages() else { return };
        let root = tempfile::tempdir().expect("directory");
        let file = |name: &str| root.path().join(name);
        let context = "0/contexts/0";
        for directory in [
            "monitoring_attrs/intervals",
            "monitoring_attrs/nr_regions",
            "schemes/0/access_pattern/sz",
            "schemes/0/access_pattern/nr_accesses",
            "schemes/0/access_pattern/age",
            "schemes/0/tried_regions/0",
        ] {
            fs::create_dir_all(file(&format!("{context}/{directory}"))).expect("directory");
        }
        (0..8).for_each(|index| {
            fs::create_dir_all(file(&format!("{context}/targets/0/regions/{index}"))).expect("directory");
        });
        fs::write(file("nr_kdamonds"), "0\n").expect("write");
        fs::write(file("0/state"), "off\n").expect("write");
        let tried = format!("{context}/schemes/0/tried_regions");
        fs::write(file(&format!("{tried}/total_bytes")), "4096\n").expect("write");
        fs::write(file(&format!("{tried}/0/start")), format!("{}\n", place + 4096)).expect("write");
        fs::write(file(&format!("{tried}/0/end")), format!("{}\n", place + 8192)).expect("write");

        let mut damon = Damon::new(root.path(), remote, vec![span], Duration::from_millis(100)).expect("free");
        damon.start(&watch()).expect("start");
        let text = |name: &str| fs::read_to_string(file(name)).expect(name);
        assert_eq!((text("nr_kdamonds"), text("0/state")), ("1".into(), "on".into()));
        assert_eq!(text(&format!("{context}/operations")), "paddr");
        assert_eq!(text(&format!("{context}/monitoring_attrs/intervals/aggr_us")), "100000");
        assert_eq!(text(&format!("{context}/targets/0/regions/nr_regions")), "8");
        let starts: Vec<u64> = (0..8)
            .map(|index| text(&format!("{context}/targets/0/regions/{index}/start")).parse().expect("a number"))
            .collect();
        assert!(starts.contains(&place) && starts.is_sorted(), "{starts:?}");
        let report = damon.end().expect("end");
        assert_eq!((report.units.len(), touched(&report)), (8, vec![0]));
        assert_eq!(text("nr_kdamonds"), "0", "restored");

        fs::write(file("nr_kdamonds"), "1\n").expect("write");
        fs::write(file("0/state"), "on\n").expect("write");
        assert!(damon.start(&watch()).expect_err("in use").to_string().contains("in use"));
        drop(damon);
        assert_eq!(text("0/state"), "on\n", "what another program uses is left alone");
    }

    #[test]
    fn damon_tells_touched_huge_pages_from_untouched_ones_and_is_restored() {
        let Some((map, remote, span, _)) = huge_pages() else { return };
        let made = Damon::new(Path::new(SYSFS), remote, vec![span], Duration::from_millis(200));
        let Ok(mut damon) = made.inspect_err(|error| skip("damon", error)) else { return };
        let before = damon.read("nr_kdamonds").expect("count");
        let (done, (begun, begins)) = (AtomicBool::new(false), std::sync::mpsc::channel());
        let report = std::thread::scope(|scope| {
            let (done, map) = (&done, &map);
            scope.spawn(move || {
                let _ = begun.send(());
                while !done.load(Ordering::Relaxed) {
                    for page in 0..512 {
                        map.copy_in(2 * HUGE_SIZE + page * PAGE_SIZE, &[1]);
                        map.copy_in(5 * HUGE_SIZE + page * PAGE_SIZE, &[1]);
                    }
                }
            });
            begins.recv().expect("it touches");
            let report = damon.start(&watch()).and_then(|()| damon.end());
            done.store(true, Ordering::Relaxed);
            report
        });
        assert_eq!(damon.read("nr_kdamonds").expect("count"), before);
        let touched = touched(&report.expect("DAMON is free"));
        assert!(touched.contains(&2) && touched.contains(&5), "{touched:?}");
    }
}
