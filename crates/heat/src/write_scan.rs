//! A source that lets the kernel remember writes: `PAGEMAP_SCAN` over ranges registered with `WP_ASYNC` (Linux 6.7).
//!
//! Before: somebody has a userfaultfd with that feature over the process that maps the RAM, beside the one for paging.
//! After: the pages written in a cycle, exactly, with no fault that anybody must serve.
//! Threads: one. Units: addresses are those of the process.
//! Promise: no byte changes; what is registered is given back when the source is dropped.
//!
//! Not the default, for three reasons that were looked at on Linux 6.18. It sees no reads. It takes ranges that the pager
//! has not registered only (a range belongs to one userfaultfd). And the first write to memory mapped huge splits the
//! mapping, after which every touch of its neighbours, read or written, counts as a write, and nothing maps it huge
//! again while it is registered. So it fits memory in base pages that is not paged: to find what a guest writes before
//! it is moved, say.

use std::io;
use std::time::{Duration, Instant};

use ballast_base::{HUGE_SIZE, Hva, PageIdx};
use ballast_sys::{Remote, Uffd};

use crate::source::{Ability, AccessSource, Cost, CostClass, Granularity, PageMap, Report, Seen, UnitId, Watch};

/// Where a region is mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Number of the region in its VM.
    pub region: u32,
    /// Its first byte in the process.
    pub start: Hva,
    /// Its bytes; whole pages.
    pub len: u64,
}

impl Span {
    /// Where a unit of it is, and how long that is; `None` if it is another region's or beyond the end.
    pub fn of(&self, unit: UnitId) -> Option<(Hva, u64)> {
        let offset = PageIdx::first_of_unit(unit.unit.into()).offset();
        let here = unit.region == self.region && offset < self.len;
        here.then(|| (self.start + offset, (self.len - offset).min(HUGE_SIZE as u64)))
    }
}

/// See above.
#[derive(Debug)]
pub struct WriteScan {
    remote: Remote,
    uffd: Uffd,
    spans: Vec<Span>,
    running: Option<(Watch, Instant)>,
    cpu: Duration,
}

impl WriteScan {
    /// Track a process by its pagemap, with a userfaultfd over it that has `WP_ASYNC` and `WP_SHMEM`.
    pub fn new(remote: Remote, uffd: Uffd, spans: Vec<Span>) -> io::Result<Self> {
        let mut source = Self { remote, uffd, spans: Vec::new(), running: None, cpu: Duration::ZERO };
        for span in spans {
            // Noted first, so that a failure gives back those before.
            source.uffd.register_for_writes(span.start, span.len)?;
            source.spans.push(span);
        }
        Ok(source)
    }

    /// The pages of a unit written since this was last asked.
    fn take(&self, unit: UnitId) -> io::Result<Option<(PageMap, PageMap)>> {
        let Some((start, len)) = self.spans.iter().find_map(|span| span.of(unit)) else { return Ok(None) };
        let mut written = PageMap::NONE;
        for (from, to) in self.remote.take_written(start, len)? {
            let pages = PageIdx::containing(from.0 - start.0).0..PageIdx::containing(to.0 - start.0).0;
            pages.for_each(|page| written.set(page));
        }
        Ok(Some((PageMap::first(PageIdx::containing(len).0), written)))
    }
}

impl Drop for WriteScan {
    fn drop(&mut self) {
        for span in &self.spans {
            // Gone with the process, if that is gone.
            let _ = self.uffd.unregister(span.start, span.len);
        }
    }
}

impl AccessSource for WriteScan {
    fn ability(&self) -> Ability {
        Ability {
            name: "write-scan",
            granularity: Granularity::Page,
            reads: false,
            writes: true,
            cost: CostClass::FaultInKernel,
        }
    }

    fn start(&mut self, watch: &Watch) -> io::Result<()> {
        if self.running.is_some() {
            return Err(io::Error::other("Starting to watch writes: a cycle is running already"));
        }
        let begun = Instant::now();
        for unit in watch.coarse.iter().copied().chain(watch.fine.iter().map(|fine| fine.unit)) {
            self.take(unit)?;
        }
        self.cpu = begun.elapsed();
        self.running = Some((watch.clone(), Instant::now()));
        Ok(())
    }

    fn end(&mut self) -> io::Result<Report> {
        let (watch, begun) =
            self.running.take().ok_or_else(|| io::Error::other("Reading what was written: no cycle is running"))?;
        let length = begun.elapsed();
        let ending = Instant::now();
        let mut units = Vec::new();
        for unit in watch.coarse {
            if let Some((_, written)) = self.take(unit)? {
                let touched = !written.is_empty();
                units.push((unit, Seen::Coarse { touched, written: Some(touched) }));
            }
        }
        for fine in watch.fine {
            if let Some((watched, written)) = self.take(fine.unit)? {
                units.push((fine.unit, Seen::Fine { watched, touched: written, written: Some(written) }));
            }
        }
        units.sort_unstable_by_key(|(unit, _)| *unit);
        // The guest's share is inside the kernel and not known here.
        let cost = Cost { cpu: self.cpu + ending.elapsed(), ..Cost::default() };
        Ok(Report { units, length, cost })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::FineWatch;
    use ballast_base::{Bytes, PAGE_SIZE};
    use ballast_needs::skip;
    use ballast_sys::{Mapping, memfd, uffd::feature};

    fn unit(unit: u32) -> UnitId {
        UnitId { region: 3, unit }
    }

    #[test]
    fn a_cycle_reports_the_pages_written_in_it_and_a_unit_elsewhere_is_left_out() {
        let features = feature::WP_ASYNC | feature::WP_SHMEM;
        let Some((uffd, _)) = Uffd::create(features).ok().filter(|(_, granted)| *granted == features) else {
            return skip("uffd", "no write tracking by the kernel");
        };
        let len = HUGE_SIZE + 10 * PAGE_SIZE;
        let fd = memfd::create("ballast-test", Bytes(len as u64)).expect("memfd");
        let map = Mapping::shared(&fd, 0, len).expect("map");
        map.populate(0, len).expect("populate");
        let span = Span { region: 3, start: Hva(map.addr() as u64), len: len as u64 };
        let remote = Remote::open(std::process::id()).expect("own process");
        let mut source = WriteScan::new(remote, uffd, vec![span]).expect("register");

        let fine = vec![FineWatch { unit: unit(1), pages: PageMap::ALL }];
        let watch = Watch { coarse: vec![unit(0), unit(7)], fine };
        for round in 0..3 {
            source.start(&watch).expect("start");
            assert!(source.start(&watch).is_err(), "one cycle at a time");
            if round == 1 {
                map.copy_in(5 * PAGE_SIZE, &[1]);
            }
            map.copy_in(HUGE_SIZE + round * PAGE_SIZE, &[1]);
            map.copy_out(HUGE_SIZE + 7 * PAGE_SIZE, &mut [0]);
            let mut written = PageMap::NONE;
            written.set(round as u64);
            let expected = [
                (unit(0), Seen::Coarse { touched: round == 1, written: Some(round == 1) }),
                (unit(1), Seen::Fine { watched: PageMap::first(10), touched: written, written: Some(written) }),
            ];
            assert_eq!(source.end().expect("end").units, expected);
            assert!(source.end().is_err());
        }
    }
}
