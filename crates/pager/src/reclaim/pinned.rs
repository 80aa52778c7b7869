//! Pinned pages: those that somebody holds beside their file, and what is known of whether anybody does.
//!
//! Before: `evict` has claimed pages that are zapped everywhere. After: what a device, direct I/O or a system call in the
//! middle of its work can still write to stays in memory, and is passed over until it is let go.
//! Threads: the reclaim lane asks and remembers; heat's table asks what to pass over; the API reads the figures.
//! Units: pages of a region, seconds. Promise: asking comes after the zap was acknowledged and before the bytes are read, and
//! "cannot be known" counts as held.

use std::collections::BTreeMap;
use std::io;
use std::ops::Bound;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};
use std::time::{Duration, Instant};

use ballast_base::{PAGE_SIZE, PAGES_PER_UNIT, PageCount, PageIdx};
use ballast_heat::PageMap;
use ballast_store::PageBytes;
use ballast_sys::pins::{Pin, PinCheck};

use crate::memory::{Backing, Holds, Punched};
use crate::region::Region;

/// How often pinned pages are looked at again, and how many at a time: 16,384 cost 3 ms.
const AGAIN_EVERY: Duration = Duration::from_secs(1);
const AT_ONCE: u64 = 1 << 14;
/// What is held for so long is told.
const LONG: Duration = Duration::from_secs(60);

/// The pin check of a host, which all its VMs share; nothing is known of it at first.
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
    /// Find out whether there is one. Takes some tens of milliseconds.
    ///
    /// # Errors
    /// Why there is none; also kept.
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

    /// The check, if there is one.
    pub fn check(&self) -> Option<Arc<PinCheck>> {
        match self.known() {
            Known::Works(check) => Some(check),
            _ => None,
        }
    }

    /// Why there is none; `None` if there is one.
    pub fn missing(&self) -> Option<String> {
        match self.known() {
            Known::Works(_) => None,
            Known::NotYet => Some("nobody has tried yet".into()),
            Known::Missing(why) => Some(why),
        }
    }

    /// It worked, and does so no more.
    pub(crate) fn lost(&self, why: &io::Error) {
        self.set(Known::Missing(format!("it worked, and failed: {why}")));
    }

    fn known(&self) -> Known {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set(&self, known: Known) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = known;
    }
}

/// A region's file, whose pages are asked for before they are read.
#[derive(Debug)]
pub(crate) struct Asked<'a> {
    region: &'a Region,
    check: Option<&'a PinCheck>,
    failed: OnceLock<io::Error>,
}

impl<'a> Asked<'a> {
    /// With no check nobody holds any page, as far as can be known.
    pub fn new(region: &'a Region, check: Option<&'a PinCheck>) -> Self {
        Self { region, check, failed: OnceLock::new() }
    }

    /// Why the check did not answer, if so. All pages were then taken to be held.
    pub fn failed(self) -> Option<io::Error> {
        self.failed.into_inner()
    }

    fn look(&self, check: &PinCheck, granules: &[PageIdx]) -> io::Result<Vec<PageIdx>> {
        let mut held: Vec<(PageIdx, Pin)> = Vec::new();
        let mut ask = |granules: &[PageIdx]| -> io::Result<()> {
            let pins = self.region.look(check, granules)?;
            held = granules.iter().copied().zip(pins).filter(|(_, pin)| stays(*pin)).collect();
            Ok(())
        };
        ask(granules)?;
        // One more than there should be: mostly the list of a CPU.
        let listed = held.iter().any(|(_, pin)| *pin == Pin::Held(1)) && check.drain_if_due();
        if listed || held.iter().any(|(_, pin)| *pin == Pin::Unknown) {
            let doubtful: Vec<PageIdx> = held.iter().map(|(page, _)| *page).collect();
            let pins = self.region.look(check, &doubtful)?;
            held = doubtful.into_iter().zip(pins).filter(|(_, pin)| stays(*pin)).collect();
        }
        Ok(held.into_iter().map(|(page, _)| page).collect())
    }
}

/// Must a page that was asked for stay? One whose memory failed goes on to be read: that fails, which says what it is.
fn stays(pin: Pin) -> bool {
    !pin.may_go() && pin != Pin::Failed
}

impl Backing for Asked<'_> {
    fn held(&self, granules: &[PageIdx]) -> Vec<PageIdx> {
        let Some(check) = self.check else { return Vec::new() };
        self.look(check, granules).unwrap_or_else(|error| {
            let _ = self.failed.set(error);
            granules.to_vec()
        })
    }

    fn read(&self, first: PageIdx, out: &mut [PageBytes]) -> io::Result<()> {
        self.region.read(first, out)
    }

    fn holds(&self, first: PageIdx, count: u64) -> io::Result<Holds> {
        self.region.holds(first, count)
    }

    fn punch(&self, first: PageIdx, count: u64) -> io::Result<Punched> {
        self.region.punch(first, count)
    }

    fn write(&self, page: PageIdx, bytes: &PageBytes) -> io::Result<()> {
        self.region.write(page, bytes)
    }
}

/// The pages of a VM that were found held when they should have gone.
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
    /// The last unit that was looked at.
    last: Option<Place>,
    looked_at: Option<Instant>,
    /// When [`Held::before`] was taken.
    counted_at: Option<Instant>,
}

type Place = (u32, u64);

/// Of one unit.
#[derive(Clone, Copy, Debug)]
struct Held {
    now: PageMap,
    /// Those of them that were held already when that was last counted, and ever since.
    before: PageMap,
}

impl Pinned {
    /// How many there are.
    pub fn pages(&self) -> PageCount {
        PageCount(self.pages.load(Ordering::Relaxed))
    }

    /// How many have been held for a minute or longer.
    pub fn long(&self) -> PageCount {
        PageCount(self.long.load(Ordering::Relaxed))
    }

    fn units(&self) -> MutexGuard<'_, Units> {
        self.units.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Is this page one of them?
    pub(crate) fn contains(&self, region: u32, page: PageIdx) -> bool {
        self.pages.load(Ordering::Relaxed) > 0
            && self.units().held.get(&(region, page.unit())).is_some_and(|held| held.now.get(page.0 % PAGES_PER_UNIT))
    }

    /// This granule was found held.
    pub(crate) fn add(&self, region: u32, first: PageIdx, pages: u64) {
        let mut units = self.units();
        let held =
            units.held.entry((region, first.unit())).or_insert(Held { now: PageMap::NONE, before: PageMap::NONE });
        let had = held.now.count();
        (first.0..first.0 + pages).for_each(|page| held.now.set(page % PAGES_PER_UNIT));
        self.pages.fetch_add(held.now.count() - had, Ordering::Relaxed);
    }

    /// Forget all.
    pub(crate) fn clear(&self) {
        if self.pages.swap(0, Ordering::Relaxed) > 0 {
            *self.units() = Units::default();
            self.long.store(0, Ordering::Relaxed);
        }
    }

    /// Look at some of them again, if it is time, and forget those that are held no more. Returns how many have been held for
    /// long, if none had been when that was last counted.
    pub(crate) fn look_again(
        &self,
        check: &PinCheck,
        region_of: impl Fn(u32) -> Option<Arc<Region>>,
        now: Instant,
    ) -> io::Result<Option<PageCount>> {
        if self.pages.load(Ordering::Relaxed) == 0 {
            return Ok(None);
        }
        let due = {
            let mut units = self.units();
            if units.looked_at.is_some_and(|at| now.saturating_duration_since(at) < AGAIN_EVERY) {
                return Ok(None);
            }
            units.looked_at = Some(now);
            units.next()
        };
        // Nobody else takes anything out meanwhile.
        for (place, pages) in due {
            let region = region_of(place.0).filter(|region| !region.is_removed());
            let free = match &region {
                None => pages,
                Some(region) => {
                    let base = place.1 * PAGES_PER_UNIT;
                    let of_unit = pages.iter().map(|page| PageIdx(base + page));
                    let firsts: Vec<_> = of_unit.filter(|page| region.first_of(*page) == *page).collect();
                    let mut free = PageMap::NONE;
                    for (first, pin) in firsts.iter().zip(region.look(check, &firsts)?) {
                        if !stays(pin) || pin == Pin::Mapped {
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
        *held = Held { now: held.now.without(pages), before: held.before.without(pages) };
        if held.now.is_empty() {
            units.held.remove(&place);
        }
    }

    /// Count those held for long, if it is time.
    fn count(&self, now: Instant) -> Option<PageCount> {
        let mut units = self.units();
        let since = *units.counted_at.get_or_insert(now);
        if now.saturating_duration_since(since) < LONG {
            return None;
        }
        units.counted_at = Some(now);
        let long: u64 = units.held.values().map(|held| held.before.count()).sum();
        units.held.values_mut().for_each(|held| held.before = held.now);
        let had = self.long.swap(long, Ordering::Relaxed);
        (had == 0 && long > 0).then_some(PageCount(long))
    }
}

impl Units {
    /// Some of them in turn.
    fn next(&mut self) -> Vec<(Place, PageMap)> {
        let after = self.last.map_or(Bound::Unbounded, Bound::Excluded);
        let until = self.last.map_or(Bound::Unbounded, Bound::Included);
        let mut wrapped = self.held.range((after, Bound::Unbounded)).chain(
            // Where it began, all was in the first part.
            self.last.iter().flat_map(|_| self.held.range((Bound::Unbounded, until))),
        );
        let mut due = Vec::new();
        let mut pages = 0;
        while pages < AT_ONCE
            && let Some((place, held)) = wrapped.next()
        {
            pages += held.now.count();
            due.push((*place, held.now));
        }
        self.last = due.last().map(|(place, _)| *place);
        due
    }
}

impl Region {
    /// Who holds these granules beside the file?
    fn look(&self, check: &PinCheck, granules: &[PageIdx]) -> io::Result<Vec<Pin>> {
        let base = self.file_offset().0 / PAGE_SIZE as u64;
        let numbers: Vec<u64> = granules.iter().map(|page| base + page.0).collect();
        check.look(self.file(), &numbers)
    }
}
