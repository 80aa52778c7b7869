//! Spill: moves pages that have been far for long from the near stores to a slow one.
//!
//! Before: reclaim put pages into RAM, and they were not touched since. After: they are in the first slow store that
//! took them, and RAM has space again.
//! Threads: one task per VM that has a slow store, and may wait for it. A fault waits for it only on the one page whose
//! word it is changing (`shift`). Units: pages, in runs of neighbours of up to [`RUN`]. Memory: the bytes of four runs,
//! while a pass is under way.
//! Promise: a spill costs time, never bytes. A page that no slow store takes stays in RAM, and that is reported once. A
//! store that does not take a run in time gets shorter ones, until it takes each in time; it gets none while it still
//! writes one that was given up.
//!
//! While a store works on one or two runs, the next one is read, and the words of the one before are changed. So a
//! store behind a network has a run to work on while the reply to another one is on its way.
//!
//! A clock tells a page's age: a pass marks each far word that it meets (`Word::marked`), and every move of the page
//! makes a word without the mark. A page whose word is still marked in the next pass, at least `spill_after` later, is
//! old. So a page is spilled after one to two times `spill_after`. While the RAM store's budget is nearly used, passes
//! follow one another without that pause, in parts, until it has space again; reclaim notifies the worker, so that
//! pages move before the store refuses one. Once it has refused a page, all pages count as old.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ballast_base::store::Ending;
use ballast_base::{PAGE_SIZE, PageIdx, PageRange};
use ballast_store::{GetOutcome, PageBytes, PutOutcome};

use crate::run::pool::blocking;
use crate::run::queue::Next;
use crate::vm::Vm;
use crate::vm::far::stores::SlowTier;
use crate::vm::region::Region;
use crate::vm::stats::Counter;
use ballast_page::page_state::{State, Word};
use ballast_page::shift;

/// Most neighbouring pages written as one extent: 2 MiB.
const RUN: usize = 512;
/// Most runs under way. A store that does not wait for another machine ends each at once.
const UNDER_WAY: usize = 2;
/// Length of runs for a store that does not take longer runs in time.
const SHORTEST_RUN: usize = 8;
/// A store with short runs gets longer ones after it took this many in a row: each refused run costs a pause.
const LONGER_AFTER: u32 = 32;
/// Words read between two checks whether to stop: 512 KiB.
const STRIDE: u64 = 64 * 1024;
/// Time between checks whether the RAM store is short of space.
const TICK: Duration = Duration::from_secs(1);
const SHORTEST_TICK: Duration = Duration::from_millis(5);
/// Most pages moved by one run of the task when the RAM store is short of space: 32 MiB.
const SHORT: u64 = 8 * 1024;
/// Most pages moved when reclaim waits for space: a few milliseconds of writing.
const WANTED: u64 = 2 * 1024;
/// Pauses of a store after it was full, and after it did not reply.
const FULL_REST: Duration = Duration::from_secs(10);
const BUSY_REST: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, PartialEq)]
enum Take {
    /// Those marked in an earlier pass; the others get the mark.
    Old,
    All,
}

type Place = (u32, u64);

pub(crate) struct SpillWorker {
    vm: Arc<Vm>,
    targets: Vec<Target>,
    /// `None`: no page is moved; freed copies in slow stores are still removed.
    after: Option<Duration>,
    next_pass: Instant,
    pass: Option<Place>,
    /// Place at which to search next when space is wanted.
    hand: Place,
    /// While RAM is short of space, the time of the next search after one that found no old page.
    next_short: Instant,
    /// The run that is being read; the runs that stores are writing, the oldest first.
    run: SpillRun,
    under_way: VecDeque<(Sent, Ending)>,
    spare: SpillRun,
}

/// A slow store; the first that does not rest gets the next run.
struct Target {
    tier: SlowTier,
    rest_until: Option<Instant>,
    /// Most pages of the next run; halved when the store was busy.
    run: usize,
    /// Full runs taken since `run` was changed.
    taken: u32,
    /// Its rest was reported.
    said: bool,
}

#[derive(Default)]
struct SpillRun {
    first: u64,
    words: Vec<Word>,
    bytes: Vec<PageBytes>,
    /// The near store's form of each page.
    blobs: Vec<Vec<u8>>,
}

struct Sent {
    region: Arc<Region>,
    run: SpillRun,
    target: usize,
}

/// Reclaim must not count on a worker that has ended, also by a panic.
impl Drop for SpillWorker {
    fn drop(&mut self) {
        self.vm.mail.spill.set_helps(false);
    }
}

impl SpillWorker {
    /// `None` if the VM has no slow store.
    pub fn new(vm: Arc<Vm>) -> Option<Self> {
        let targets = vm.stores.slow().iter().cloned().map(|tier| Target {
            tier,
            rest_until: None,
            run: RUN,
            taken: 0,
            said: false,
        });
        let (targets, after) = (targets.collect::<Vec<_>>(), vm.tuning.spill_after);
        if targets.is_empty() {
            return None;
        }
        vm.mail.spill.set_helps(after.is_some());
        Some(Self {
            targets,
            after,
            // The first pass is later: an earlier engine may have set marks just before.
            next_pass: Instant::now() + after.unwrap_or_default(),
            pass: None,
            hand: (0, 0),
            next_short: Instant::now(),
            run: SpillRun::default(),
            under_way: VecDeque::new(),
            spare: SpillRun::default(),
            vm,
        })
    }

    pub fn run(&mut self, now: Instant) -> Next {
        let vm = self.vm.clone();
        if vm.is_stopping() {
            return Next::Done;
        }
        blocking(|| vm.state.beside(|| self.targets.iter().for_each(|target| target.tier.store.tidy())));
        let Some(after) = self.after else {
            return if self.is_untidy() { Next::Again } else { Next::about(now, TICK) };
        };
        let wanted = vm.mail.spill.take();
        if let Err(error) = self.round(wanted, after, now) {
            vm.report("spill-failed", format!("Reading the page-state words: {error}"));
            self.next_pass = Instant::now() + after;
            self.pass = None;
        }
        // The buffers are not kept between runs of the task.
        (self.run, self.spare) = Default::default();
        Next::after(Instant::now(), self.pause())
    }

    fn is_untidy(&self) -> bool {
        self.targets.iter().any(|target| target.tier.store.is_untidy())
    }

    /// Pause before the next part, unless space is wanted.
    fn pause(&self) -> Duration {
        if self.is_untidy() {
            return Duration::ZERO;
        }
        let is_short = self.next_short <= Instant::now() && self.vm.stores.first().store.is_short();
        if (self.pass.is_some() || is_short) && !self.rests() {
            return Duration::ZERO;
        }
        TICK.min(self.next_pass.saturating_duration_since(Instant::now()).max(SHORTEST_TICK))
    }

    fn round(&mut self, wanted: bool, after: Duration, now: Instant) -> std::io::Result<()> {
        let vm = self.vm.clone();
        for target in &mut self.targets {
            target.rest_until = target.rest_until.filter(|until| now < *until);
        }
        if vm.is_stopping() || vm.held().is_some() || self.rests() {
            return Ok(());
        }
        let ram = &vm.stores.first().store;
        vm.mail.spill.looks();
        if wanted {
            let moved = self.turn(Take::All, WANTED)?;
            vm.mail.spill.set_helps(moved > 0);
            ram.tidy();
            vm.notify_reclaim();
        } else if self.pass.is_some() || now >= self.next_pass {
            let (end, _) = self.walk(self.pass.unwrap_or((0, 0)), Take::Old, u64::MAX)?;
            self.pass = end;
            if end.is_none() {
                self.next_pass = Instant::now() + after;
            }
            ram.tidy();
        } else if ram.is_short() && now >= self.next_short {
            if self.turn(Take::Old, SHORT)? == 0 {
                // It has marked pages, so the next turn finds some.
                self.next_short = Instant::now() + TICK;
            }
            ram.tidy();
        }
        Ok(())
    }

    /// Walks on from the hand, at most once around. Returns the number of moved pages.
    fn turn(&mut self, take: Take, most: u64) -> std::io::Result<u64> {
        let from = self.hand;
        let (mut end, mut moved) = self.walk(from, take, most)?;
        if end.is_none() && moved == 0 && from != (0, 0) {
            (end, moved) = self.walk((0, 0), take, most)?;
        }
        self.hand = end.unwrap_or((0, 0));
        Ok(moved)
    }

    /// Walks over the words that were ever written. Returns the place where it stopped, `None` at the end, and the
    /// number of moved pages. Afterwards no run is under way.
    fn walk(&mut self, from: Place, take: Take, most: u64) -> std::io::Result<(Option<Place>, u64)> {
        let walked = self.walk_on(from, take, most);
        let last = self.finish();
        walked.map(|(end, moved)| (end, moved + last))
    }

    fn walk_on(&mut self, from: Place, take: Take, most: u64) -> std::io::Result<(Option<Place>, u64)> {
        let vm = self.vm.clone();
        let mut moved = 0;
        for (region, record) in vm.regions().iter().zip(vm.state.regions()).skip(from.0 as usize) {
            if region.is_removed() {
                continue;
            }
            let start = if region.number == from.0 { from.1 } else { 0 };
            let written = vm.state.written_words(&record)?;
            for pages in written {
                let (mut page, end) = (pages.start().0.max(start), pages.end());
                while page < end.0 {
                    let stretch = PageRange::of(PageIdx(page), STRIDE).before(end);
                    let (next, gone) = self.stretch(region, stretch, take, most.saturating_sub(moved));
                    moved += gone;
                    page = next;
                    if moved >= most || self.rests() || vm.is_stopping() || vm.mail.spill.is_wanted() {
                        return Ok((Some((region.number, page)), moved));
                    }
                }
            }
        }
        Ok((None, moved))
    }

    /// Reads the words of these pages, and moves those that `take` selects, about `most` of them. Returns the page
    /// after the last one read, and the number of moved pages.
    fn stretch(&mut self, region: &Arc<Region>, pages: PageRange, take: Take, most: u64) -> (u64, u64) {
        let (mut moved, mut next) = (0, pages.start().0);
        let longest = |targets: &[Target]| {
            targets.iter().find(|target| target.rest_until.is_none()).map_or(RUN, |target| target.run)
        };
        let mut run = longest(&self.targets);
        for page in pages.iter().map(|page| page.0) {
            next = page + 1;
            if self.goes(region, page, take) && self.run.words.len() < run {
                continue;
            }
            let gone = self.flush(region);
            moved += gone;
            run = longest(&self.targets);
            let stop = || moved >= most || self.vm.is_stopping() || self.vm.mail.spill.is_wanted();
            if self.rests() || gone > 0 && stop() {
                break;
            }
        }
        // A write has a deadline, and the next words may add nothing to the run: no thread would wait for the write.
        let last = if self.run.words.is_empty() { self.finish() } else { self.flush(region) };
        (next, moved + last)
    }

    /// Returns whether `take` selects this page. Its word and bytes are then at the end of the run.
    fn goes(&mut self, region: &Region, page: u64, take: Take) -> bool {
        let granule = region.granule(PageIdx(page));
        let index = page - region.first_of(PageIdx(page)).0;
        let head = granule.cell().load();
        if head.state() != State::Far || head.is_locked() {
            return false;
        }
        let word = if index == 0 { head } else { granule.word_of(index as usize) };
        let near = self.vm.stores.get_near(word.store());
        let near = near.filter(|store| word.state() == State::Far && store.takes_room(word.handle()));
        if take == Take::Old && !head.is_marked() {
            // A granule's mark stands for all its pages. If the exchange fails, the granule is not old.
            if index == 0 && (near.is_some() || granule.pages() > 1) {
                granule.cell().swap(head, head.marked());
            }
            return false;
        }
        let Some(near) = near else { return false };
        let at = self.run.words.len();
        if self.run.bytes.len() == at {
            self.run.bytes.push([0; PAGE_SIZE]);
            self.run.blobs.push(Vec::new());
        }
        let (key, bytes, blob) = (region.key(PageIdx(page)), &mut self.run.bytes[at], &mut self.run.blobs[at]);
        // Read without the lock: the commit checks that the copy is still the one that was read.
        if near.get_blob(key, word.handle(), bytes, blob) != GetOutcome::Found {
            return false;
        }
        if at == 0 {
            self.run.first = page;
        }
        self.run.words.push(word);
        true
    }

    /// Sends the run. If enough runs are under way, waits for the oldest, and returns how many of its pages moved.
    fn flush(&mut self, region: &Arc<Region>) -> u64 {
        let waits = !self.run.words.is_empty() && self.under_way.len() >= UNDER_WAY;
        let stored = waits.then(|| self.stored()).flatten();
        self.send(region);
        stored.map_or(0, |stored| self.commit(stored))
    }

    /// Waits for the runs that are under way, and changes their words. Returns the number of moved pages.
    fn finish(&mut self) -> u64 {
        std::iter::from_fn(|| self.stored().map(|stored| self.commit(stored))).sum()
    }

    /// Sends the run to the first store that does not rest; if there is none, its pages stay.
    fn send(&mut self, region: &Arc<Region>) {
        let ready = self.targets.iter().position(|target| target.rest_until.is_none());
        let Some(target) = ready.filter(|_| !self.run.words.is_empty()) else { return self.run.words.clear() };
        let (vm, slow) = (self.vm.clone(), self.targets[target].tier.store.clone());
        if slow.must_recover() {
            // A write that was given up is still under way: another one would wait behind it.
            self.run.words.clear();
            return self.rest(target, PutOutcome::Busy);
        }
        self.run.words.truncate(self.targets[target].run); // It may have been read for another store.
        let run = std::mem::replace(&mut self.run, std::mem::take(&mut self.spare));
        let count = run.words.len();
        let (first, bytes, blobs) = (region.key(PageIdx(run.first)), &run.bytes[..count], &run.blobs[..count]);
        // The store may punch freed space, too.
        let ending = blocking(|| vm.state.beside(|| slow.begin_put(first, bytes, blobs)));
        self.under_way.push_back((Sent { region: region.clone(), run, target }, ending));
    }

    /// Waits until the oldest run under way is stored or refused. A store that refused it rests.
    fn stored(&mut self) -> Option<(Sent, Vec<PutOutcome>)> {
        let (sent, ending) = self.under_way.pop_front()?;
        let mut outcomes = Vec::with_capacity(sent.run.words.len());
        let vm = self.vm.clone();
        blocking(|| vm.state.beside(|| ending(&mut outcomes)));
        let refused = outcomes.iter().rfind(|outcome| !matches!(outcome, PutOutcome::Stored(_))).copied();
        let target = &mut self.targets[sent.target];
        // A run that was sent before the limit became lower does not lower it further.
        if refused == Some(PutOutcome::Busy) && sent.run.words.len() <= target.run {
            (target.run, target.taken) = ((target.run / 2).max(SHORTEST_RUN), 0);
        } else if refused.is_none() && outcomes.len() >= target.run {
            target.taken += 1;
            if target.taken >= LONGER_AFTER {
                (target.run, target.taken) = ((target.run * 2).min(RUN), 0);
            }
        }
        if let Some(outcome) = refused {
            self.rest(sent.target, outcome);
        } else if target.rest_until.is_none() {
            target.said = false;
            vm.mail.spill.set_helps(true);
        }
        Some((sent, outcomes))
    }

    /// Changes the words of a run's stored pages. Returns the number of moved pages.
    fn commit(&mut self, (Sent { region, mut run, target }, outcomes): (Sent, Vec<PutOutcome>)) -> u64 {
        let (vm, SlowTier { number, store: slow, .. }) = (&self.vm, &self.targets[target].tier);
        let copies = run.bytes.iter().zip(run.blobs.iter().map(Vec::as_slice));
        let mut moved = 0;
        for (((page, from), copy), outcome) in (run.first..).zip(&run.words).zip(copies).zip(outcomes) {
            let PutOutcome::Stored(handle) = outcome else { continue };
            let page = PageIdx(page);
            let granule = region.granule(page);
            let to = Word::far(*number, handle, from.age());
            // The mark stands for a granule whose other pages must still be moved.
            let to = if granule.pages() > 1 && from.is_marked() { to.marked() } else { to };
            let place = (granule, (page.0 - region.first_of(page).0) as usize);
            let Some(near) = vm.stores.get_near(from.store()) else {
                slow.free(region.key(page), handle);
                continue;
            };
            moved += u64::from(shift::commit(place, region.key(page), (*from, near), (to, &**slow), copy));
        }
        vm.stats().add(Counter::Spilled, moved);
        run.words.clear();
        self.spare = run;
        moved
    }

    fn rests(&self) -> bool {
        self.targets.iter().all(|target| target.rest_until.is_some())
    }

    /// A store refused a page: lets it rest, and reports that once. The next run goes to the next store.
    fn rest(&mut self, target: usize, outcome: PutOutcome) {
        let target = &mut self.targets[target];
        let full = outcome == PutOutcome::Full;
        target.rest_until = Some(Instant::now() + if full { FULL_REST } else { BUSY_REST });
        if !std::mem::replace(&mut target.said, true) {
            let usage = if full { "has no room" } else { "does not take pages now" };
            let why = target.tier.store.last_refusal().unwrap_or_else(|| "it gives no reason".into());
            let text = format!("the {} {usage} ({why}): old pages stay in RAM, nothing is lost", target.tier.name);
            self.vm.report("spill-rests", text);
        }
        if self.rests() {
            self.vm.mail.spill.set_helps(false);
        }
    }
}
