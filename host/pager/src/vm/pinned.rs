//! Pinned pages: pages with references other than those of their file.
//!
//! Before: `evict` has claimed pages that are zapped everywhere. After: a page that a device, direct I/O or a running
//! system call can still write to stays in memory, and reclaim skips it until it is unpinned.
//! Threads: the reclaim worker checks and records; heat's table asks which pages to skip; the API reads the counts.
//! Units: pages of a region, seconds.
//! Promise: the check comes after the acknowledged zap and before the read; an unknown result counts as pinned.

use std::cell::{OnceCell, RefCell};
use std::collections::BTreeMap;
use std::io;
use std::ops::Bound;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use ballast_base::{PAGES_PER_UNIT, PageCount, PageIdx, PageRange};
use ballast_heat::PageMap;
use ballast_store::PageBytes;
use ballast_sys::lock::Lock;
use ballast_sys::pins::{Pin, PinCheck};

use crate::vm::region::Region;
use ballast_page::memory::{Backing, Holds, Punched, ReadOutcome};

/// Time between two checks of pinned pages, and most pages of one check: 16,384 take 3 ms.
const AGAIN_EVERY: Duration = Duration::from_secs(1);
const AT_ONCE: u64 = 1 << 14;
/// A page that is pinned for this long is reported. A page that a foreign mapper had mapped is retried this often,
/// because each try needs a zap.
const LONG: Duration = Duration::from_secs(60);

/// Text of the event for pages that were pinned for [`LONG`].
pub(crate) fn held_long(pages: PageCount) -> String {
    format!(
        "{} pages ({}) have been held for a minute or longer by something that can write to them unseen, such as a \
         device, I/O that does not end, buffers registered with io_uring, or a process that is not of the VM and maps \
         them: they stay in memory",
        pages.0,
        pages.bytes()
    )
}

/// The pin check of a host, which all its VMs share; [`Pins::find_out`] opens it.
#[derive(Debug, Default)]
pub struct Pins(RwLock<Known>);

#[derive(Clone, Debug, Default)]
enum Known {
    #[default]
    NotYet,
    Works(Arc<PinCheck>),
    Missing(String),
}

impl Pins {
    /// Opens the pin check. Takes some 10 ms.
    ///
    /// # Errors
    /// The reason why the host has none; [`Pins::missing`] returns it as well.
    pub fn find_out(&self) -> Result<(), String> {
        let found = PinCheck::new().map_err(|why| why.to_string());
        let known = match &found {
            Ok(_) => None,
            Err(why) => Some(Known::Missing(why.clone())),
        };
        let result = found.as_ref().map(|_| ()).map_err(Clone::clone);
        self.set(known.unwrap_or_else(|| Known::Works(Arc::new(found.expect("no error is known")))));
        result
    }

    /// The pin check, if the host has one.
    pub fn check(&self) -> Option<Arc<PinCheck>> {
        match self.known() {
            Known::Works(check) => Some(check),
            _ => None,
        }
    }

    /// The reason why the host has none; `None` if it has one.
    pub fn missing(&self) -> Option<String> {
        match self.known() {
            Known::Works(_) => None,
            Known::NotYet => Some("not tried yet".into()),
            Known::Missing(why) => Some(why),
        }
    }

    /// Records that the check has begun to fail.
    pub(crate) fn lost(&self, why: &io::Error) {
        self.set(Known::Missing(format!("it worked before, and has failed: {why}")));
    }

    fn known(&self) -> Known {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set(&self, known: Known) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = known;
    }
}

/// A region's file whose pages are checked for pins before they are read.
#[derive(Debug)]
pub(crate) struct Asked<'a> {
    region: &'a Region,
    check: Option<&'a PinCheck>,
    failed: OnceCell<io::Error>,
    /// Pages held only by a mapping, ascending.
    mapped: RefCell<Vec<PageIdx>>,
}

impl<'a> Asked<'a> {
    /// Without a check, no page counts as held.
    pub fn new(region: &'a Region, check: Option<&'a PinCheck>) -> Self {
        Self { region, check, failed: OnceCell::new(), mapped: RefCell::default() }
    }

    /// Records the pages that were found held. Returns the error if the check failed; all pages then counted as held.
    pub fn remember(self, held: &[PageIdx], pinned: &Pinned) -> io::Result<()> {
        let mapped = self.mapped.into_inner();
        for page in held {
            let by = if mapped.binary_search(page).is_ok() { By::Mapping } else { By::Reference };
            pinned.add(self.region.number, *page, self.region.granule_pages(), by);
        }
        self.failed.into_inner().map_or(Ok(()), Err)
    }

    fn still_held(&self, check: &PinCheck, granules: &[PageIdx]) -> io::Result<Vec<PageIdx>> {
        let mut held: Vec<(PageIdx, Pin)> = Vec::new();
        let mut ask = |granules: &[PageIdx]| -> io::Result<()> {
            let pins = self.region.pins(check, granules)?;
            held = granules.iter().copied().zip(pins).filter(|(_, pin)| stays(*pin)).collect();
            Ok(())
        };
        ask(granules)?;
        // A single surplus reference is mostly that of a CPU's LRU batch, which `lru_add_drain_all` releases.
        let listed = held.iter().any(|(_, pin)| *pin == Pin::Held(1)) && check.drain_if_due();
        if listed || held.iter().any(|(_, pin)| *pin == Pin::Unknown) {
            let doubtful: Vec<PageIdx> = held.iter().map(|(page, _)| *page).collect();
            let pins = self.region.pins(check, &doubtful)?;
            held = doubtful.into_iter().zip(pins).filter(|(_, pin)| stays(*pin)).collect();
        }
        let mapped = held.iter().filter(|(_, pin)| *pin == Pin::Mapped).map(|(page, _)| *page);
        self.mapped.borrow_mut().extend(mapped);
        Ok(held.into_iter().map(|(page, _)| page).collect())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    /// A mapping of a foreign mapper.
    Mapping,
    /// Any other reference, or an unknown one.
    Reference,
}

/// Returns whether a page must stay. A page whose memory failed need not: its read reports the error.
fn stays(pin: Pin) -> bool {
    !pin.may_go() && pin != Pin::Failed
}

impl Backing for Asked<'_> {
    fn held(&self, granules: &[PageIdx]) -> Vec<PageIdx> {
        let Some(check) = self.check else { return Vec::new() };
        self.still_held(check, granules).unwrap_or_else(|error| {
            let _ = self.failed.set(error);
            granules.to_vec()
        })
    }

    fn read(&self, first: PageIdx, out: &mut [PageBytes]) -> io::Result<ReadOutcome> {
        self.region.read(first, out)
    }

    fn holds(&self, pages: PageRange) -> io::Result<Holds> {
        self.region.holds(pages)
    }

    fn punch(&self, pages: PageRange) -> io::Result<Punched> {
        self.region.punch(pages)
    }

    fn write(&self, page: PageIdx, bytes: &PageBytes) -> io::Result<()> {
        self.region.write(page, bytes)
    }
}

/// Pages of a VM that were found held when they were about to be evicted.
#[derive(Debug, Default)]
pub struct Pinned {
    units: Mutex<Units>,
    pages: AtomicU64,
    long: AtomicU64,
}

#[derive(Debug, Default)]
struct Units {
    /// By region and unit.
    held: BTreeMap<Place, Held>,
    last: Option<Place>,
    checked_at: Option<Instant>,
    /// Time at which [`Held::before`] was set.
    counted_at: Option<Instant>,
}

type Place = (u32, u64);

#[derive(Clone, Copy, Debug)]
struct Held {
    now: PageMap,
    /// Pages that a foreign mapper had mapped. Once the guest touches such a page, the VM maps it, too, and the check
    /// cannot tell whether the foreign mapping is still there.
    mapped: PageMap,
    /// Pages that were held at the last count, and have not been found free since.
    before: PageMap,
}

impl Held {
    const NONE: Self = Self { now: PageMap::NONE, mapped: PageMap::NONE, before: PageMap::NONE };

    fn without(self, pages: PageMap) -> Self {
        let Self { now, mapped, before } = self;
        Self { now: now.without(pages), mapped: mapped.without(pages), before: before.without(pages) }
    }

    fn is_free(&self, page: u64, pin: Pin) -> bool {
        // The VM has mapped it again, and the check found no other reference.
        !stays(pin) || pin == Pin::Mapped && !self.mapped.get(page)
    }
}

impl Pinned {
    /// Number of held pages.
    pub fn pages(&self) -> PageCount {
        PageCount(self.pages.load(Ordering::Relaxed))
    }

    /// Number of pages that have been held for a minute or longer.
    pub fn long(&self) -> PageCount {
        // Some may have been released since the count.
        PageCount(self.long.load(Ordering::Relaxed)).min(self.pages())
    }

    fn units(&self) -> MutexGuard<'_, Units> {
        self.units.locked()
    }

    pub(crate) fn contains(&self, region: u32, page: PageIdx) -> bool {
        self.pages.load(Ordering::Relaxed) > 0
            && self.units().held.get(&(region, page.unit())).is_some_and(|held| held.now.get(page.0 % PAGES_PER_UNIT))
    }

    fn add(&self, region: u32, first: PageIdx, pages: u64, by: By) {
        let mut units = self.units();
        let held = units.held.entry((region, first.unit())).or_insert(Held::NONE);
        let had = held.now.count();
        for page in first.0..first.0 + pages {
            held.now.set(page % PAGES_PER_UNIT);
            if by == By::Mapping {
                held.mapped.set(page % PAGES_PER_UNIT);
            }
        }
        self.pages.fetch_add(held.now.count() - had, Ordering::Relaxed);
    }

    pub(crate) fn clear(&self) {
        let mut units = self.units();
        if !units.held.is_empty() {
            *units = Units::default();
            self.pages.store(0, Ordering::Relaxed);
            self.long.store(0, Ordering::Relaxed);
        }
    }

    /// Checks some held pages again, once a second, and forgets those that are free. Returns the number that have been
    /// held for a minute or longer, if it was zero at the last count.
    pub(crate) fn check_again(
        &self,
        check: &PinCheck,
        region_of: impl Fn(u32) -> Option<Arc<Region>>,
        now: Instant,
    ) -> io::Result<Option<PageCount>> {
        let due = {
            let mut units = self.units();
            if units.held.is_empty()
                || units.checked_at.is_some_and(|at| now.saturating_duration_since(at) < AGAIN_EVERY)
            {
                return Ok(None);
            }
            units.checked_at = Some(now);
            units.next()
        };
        // Only this thread removes entries.
        for (place, held) in due {
            let region = region_of(place.0).filter(|region| !region.is_removed());
            let free = match &region {
                None => PageMap::ALL,
                Some(region) => {
                    let base = place.1 * PAGES_PER_UNIT;
                    let of_unit = held.now.iter().map(|page| PageIdx(base + page));
                    let firsts: Vec<_> = of_unit.filter(|page| region.first_of(*page) == *page).collect();
                    let mut free = PageMap::NONE;
                    for (first, pin) in firsts.iter().zip(region.pins(check, &firsts)?) {
                        if held.is_free(first.0 % PAGES_PER_UNIT, pin) {
                            (first.0..first.0 + region.granule_pages())
                                .for_each(|page| free.set(page % PAGES_PER_UNIT));
                        }
                    }
                    free
                }
            };
            self.take_out(place, free);
        }
        Ok(self.count(now))
    }

    fn take_out(&self, place: Place, pages: PageMap) {
        let mut units = self.units();
        let Some(held) = units.held.get_mut(&place) else { return };
        self.pages.fetch_sub(held.now.and(pages).count(), Ordering::Relaxed);
        *held = held.without(pages);
        if held.now.or(held.before).is_empty() {
            units.held.remove(&place);
        }
    }

    /// Once a minute, counts the pages held that long, and lets reclaim retry those that a foreign mapper had mapped.
    fn count(&self, now: Instant) -> Option<PageCount> {
        let mut units = self.units();
        let since = *units.counted_at.get_or_insert(now);
        if now.saturating_duration_since(since) < LONG {
            return None;
        }
        units.counted_at = Some(now);
        let (mut long, mut again) = (0, 0);
        units.held.retain(|_, held| {
            long += held.before.and(held.now).count();
            again += held.mapped.count();
            *held = Held { now: held.now.without(held.mapped), mapped: PageMap::NONE, before: held.now };
            !held.before.is_empty()
        });
        self.pages.fetch_sub(again, Ordering::Relaxed);
        let had = self.long.swap(long, Ordering::Relaxed);
        (had == 0 && long > 0).then_some(PageCount(long))
    }
}

impl Units {
    /// The next units in turn, until they have at least [`AT_ONCE`] held pages.
    fn next(&mut self) -> Vec<(Place, Held)> {
        let after = self.last.map_or(Bound::Unbounded, Bound::Excluded);
        let until = self.last.map_or(Bound::Unbounded, Bound::Included);
        let mut wrapped = self.held.range((after, Bound::Unbounded)).chain(
            // Without a `last`, the first range has all units.
            self.last.iter().flat_map(|_| self.held.range((Bound::Unbounded, until))),
        );
        let mut due = Vec::new();
        let mut pages = 0;
        while pages < AT_ONCE
            && let Some((place, held)) = wrapped.next()
        {
            pages += held.now.count();
            due.push((*place, *held));
        }
        self.last = due.last().map(|(place, _)| *place);
        due
    }
}

impl Region {
    /// References to these granules other than those of their file.
    fn pins(&self, check: &PinCheck, granules: &[PageIdx]) -> io::Result<Vec<Pin>> {
        let places: Vec<_> = granules.iter().map(|page| self.ram.place(*page)).collect();
        let mut pins = Vec::with_capacity(places.len());
        // Neighbours in one file are checked by one call.
        for run in places.chunk_by(|(file, page), (other, next)| file.id == other.id && page < next) {
            let numbers: Vec<u64> = run.iter().map(|(_, page)| *page).collect();
            pins.extend(check.pins(run[0].0, &numbers)?);
        }
        Ok(pins)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Applies this result of the check to one page.
    fn found(pinned: &Pinned, page: u64, pin: Pin) {
        let held = pinned.units().held.get(&(0, 0)).copied().unwrap_or(Held::NONE);
        if held.is_free(page, pin) {
            let mut free = PageMap::NONE;
            free.set(page);
            pinned.take_out((0, 0), free);
        }
    }

    fn state(pinned: &Pinned) -> (Vec<u64>, u64, u64) {
        let held = (0..PAGES_PER_UNIT).filter(|page| pinned.contains(0, PageIdx(*page))).collect();
        (held, pinned.pages().0, pinned.long().0)
    }

    #[test]
    fn released_pages_go_at_once_and_foreign_mapped_ones_are_retried_each_minute() {
        let (pinned, start) = (Pinned::default(), Instant::now());
        let minutes = |count: u32| start + count * LONG;
        for (page, by) in [(1, By::Reference), (2, By::Reference), (3, By::Mapping), (4, By::Mapping)] {
            pinned.add(0, PageIdx(page), 1, by);
        }
        assert_eq!(pinned.count(start), None);
        assert_eq!(state(&pinned), (vec![1, 2, 3, 4], 4, 0));
        for (page, pin) in [(1, Pin::Held(1)), (2, Pin::Mapped), (3, Pin::Mapped), (4, Pin::Free)] {
            found(&pinned, page, pin);
        }
        assert_eq!(state(&pinned), (vec![1, 3], 2, 0));
        assert_eq!(pinned.count(minutes(1) - Duration::from_millis(1)), None);
        assert_eq!(state(&pinned), (vec![1, 3], 2, 0));
        for minute in 1..9 {
            let told = pinned.count(minutes(minute));
            assert_eq!(told, (minute == 2).then_some(PageCount(2)), "after {minute} minutes");
            assert_eq!(state(&pinned).0, [1], "the mapped page is tried");
            pinned.add(0, PageIdx(3), 1, By::Mapping);
            assert_eq!(state(&pinned), (vec![1, 3], 2, if minute == 1 { 0 } else { 2 }));
        }
        found(&pinned, 1, Pin::Absent);
        assert_eq!(state(&pinned), (vec![3], 1, 1), "no more are held for long than are held");
        // It was retried, and evicted.
        assert_eq!(pinned.count(minutes(9)), None);
        assert_eq!(state(&pinned), (vec![], 0, 0));
        assert_eq!(pinned.count(minutes(10)), None);
        assert!(pinned.units().held.is_empty() && pinned.long.load(Ordering::Relaxed) == 0);
    }
}
