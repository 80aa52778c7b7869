//! The reclaim worker: keeps a VM's resident memory at or below its limit.
//!
//! Before: an operator or a policy wrote a limit. After: cold pages went through quarantine to the store.
//! Threads: one task per VM. It never waits for the client, whose reply notifies it. A fault waits for the pages of the
//! one run that is being punched (and copied, if reclaim is forced: see below), and for credits in a VM at its limit
//! (`throttle`, at most 0.1 s). Units: pages, bytes at the borders. Promise: a higher limit ends reclaim at once.
//!
//! ```text
//! resident:  0 ........................ low ........ limit .......
//!                   nothing to do        |  background  |  direct
//! ```
//!
//! Above *low* the worker reclaims in the background: it keeps a supply of pages in quarantine (`candidates` picks
//! them) and evicts those that stayed untouched for T, until resident memory is at low again. If the guest touches
//! nearly all of them, it keeps fewer (`effort`). Above *limit* it does the same without pauses, and takes warm pages,
//! too. There the quarantine is *adaptive* (`adaptive`), unless something may have pages pinned and the engine cannot
//! know which: T is shorter, and halved as long as nearly all pages are quarantine hits. If they are hits even with no
//! T at all, reclaim is *forced*: pages are locked before they are copied. From a *ceiling* on, a margin above the
//! limit and for a second after a cut more (`descent`), a page comes in only when one has gone out (`throttle`). Faults
//! that wait for that first raise the number of pages in quarantine, then halve T. So a VM whose working set is larger
//! than its limit is held to the limit, at the price of restores.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ballast_base::{Bytes, PAGE_SIZE};
use ballast_heat::Pick;
use ballast_store::PageBytes;
use ballast_sys::PinCheck;

use crate::reclaim::adaptive::Adaptive;
use crate::reclaim::candidates::Candidates;
use crate::reclaim::descent::Descent;
use crate::reclaim::effort::Effort;
use crate::reclaim::failures::Failures;
use crate::reclaim::interval;
use crate::reclaim::pace::Pace;
use crate::reclaim::pinned::{self, Asked};
use crate::reclaim::quarantine::{Accesses, Due, Quarantine};
use crate::run::pool::thread::go_first;
use crate::run::queue::Next;
use crate::vm::stats::Counter;
use crate::vm::{Hold, Vm};
use ballast_page::evict::{LockedFrom, To, evict, release};
use ballast_page::page_state::State;

/// Pauses after rounds without evictions: first, longest, longest at rest (`growth`), in the background, over a limit.
const IDLE: Duration = Duration::from_millis(200);
const QUIET: Duration = Duration::from_secs(1);
const REST: Duration = Duration::from_secs(8);
const BACKGROUND: Duration = Duration::from_millis(20);
const DIRECT: Duration = Duration::from_millis(2);
/// Longest time for which a round evicts, beyond the run in hand: then another VM has its turn.
const SLICE: Duration = Duration::from_millis(2);
/// Pause of reclaim after the store was full or busy.
const STORE_REST: Duration = Duration::from_secs(1);
/// The same while the spill worker frees space: the time it takes to write a few MiB.
const SPILL_REST: Duration = Duration::from_millis(20);
/// If this many rounds in a row found nothing to zap, and some pages are pinned or kept, no other page can go.
const HELD_UP_AFTER: u32 = 3;
/// The pause after such a round, in lengths of the round: it takes less than 1/20 of a CPU.
const PINNED_REST: u32 = 20;

/// Why nothing is evicted now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rest {
    /// There is no limit.
    Unlimited,
    /// The VM is held, or no process of it is known.
    Held,
    /// The store refused a page a moment ago.
    StoreRefused,
}

/// The reclaim worker of a VM.
pub(crate) struct ReclaimWorker {
    vm: Arc<Vm>,
    /// The pin check, if there is one; the same for all of a round.
    check: Option<Arc<PinCheck>>,
    /// Rounds in a row that found nothing to zap, while something was pinned.
    fruitless: u32,
    candidates: Candidates,
    quarantine: Quarantine,
    adaptive: Adaptive,
    descent: Descent,
    effort: Effort,
    rest_until: Option<Instant>,
    failures: Failures,
    refusals: Failures,
    /// Bytes resident at the last round, and at the last round with nothing to do.
    resident: u64,
    checked: u64,
    /// The pause while there is nothing to do.
    pause: Duration,
    /// Decides whether a round begins after a client's reply.
    pace: Pace,
    /// The last round found the VM at or below low.
    is_low: bool,
    /// The VM was tracked after the last round.
    was_tracked: bool,
    /// The last round ended although more pages could go.
    has_more: bool,
    /// Pages on their way to the store: 64 KiB, so that they are still in the CPU's cache when they are compressed.
    buffer: Box<[PageBytes; 16]>,
}

/// Opens the throttle: no fault need wait for credits, because nothing is evicted any more.
impl Drop for ReclaimWorker {
    fn drop(&mut self) {
        self.vm.mail.throttle.open();
    }
}

impl ReclaimWorker {
    /// The worker of a VM that has no page on its way out.
    pub fn new(vm: Arc<Vm>) -> Self {
        let mut worker = Self {
            check: None,
            fruitless: 0,
            candidates: Candidates::new(vm.clone()),
            quarantine: Quarantine::new(vm.clone()),
            adaptive: Adaptive::new(vm.tuning.direct_quarantine),
            descent: Descent::new(Instant::now()),
            effort: Effort::default(),
            rest_until: None,
            failures: Failures::default(),
            refusals: Failures::default(),
            resident: 0,
            checked: 0,
            pause: IDLE,
            pace: Pace::default(),
            is_low: false,
            was_tracked: false,
            has_more: false,
            buffer: Box::new([[0; PAGE_SIZE]; _]),
            vm,
        };
        if let Err(error) = worker.quarantine.forget() {
            worker.vm.report("reclaim-failed", format!("Reading the page-state words: {error}"));
        }
        worker
    }

    /// Does a piece of work; returns when the next is due.
    pub fn run(&mut self, now: Instant) -> Next {
        let vm = self.vm.clone();
        if vm.is_stopping() {
            self.quarantine.release_all();
            return Next::Done;
        }
        if vm.is_held_for(Hold::NoZap) {
            vm.forget_ended();
        }
        vm.pressure.sample(vm.stats(), now);
        let pause = match self.was_only_answered(now).and_then(|answered| match answered {
            true => Ok(self.pace.pause),
            false => self.round(),
        }) {
            Ok(pause) => pause,
            Err(error) => {
                self.failures.report(&vm, now, &error);
                vm.mail.throttle.open();
                self.quarantine.release_all();
                if let Err(error) = self.quarantine.forget() {
                    tracing::error!(vm = vm.state.name(), "Reading the page-state words: {error}");
                }
                STORE_REST
            }
        };
        // A limit, a hold, and whether the VM is above its limit are seen here first.
        let is_tracked = vm.is_tracked();
        if std::mem::replace(&mut self.was_tracked, is_tracked) != is_tracked {
            vm.mail.track.notify();
        }
        // In a long pause only: memory that restores have emptied is prepared for the next eviction.
        if pause > DIRECT {
            vm.stores.first().store.tidy();
        }
        self.pace.pause = pause;
        self.next(now, pause)
    }

    /// Takes replies. Returns whether a client replied and there is nothing else to do.
    fn was_only_answered(&mut self, now: Instant) -> std::io::Result<bool> {
        let was_zapping = self.quarantine.is_zapping();
        self.quarantine.take_answers(now)?;
        let vm = &self.vm;
        let answered = was_zapping && !self.quarantine.is_zapping() && vm.held().is_none();
        Ok(answered && !self.pace.is_round_due(now, vm.effective_limit(), vm.mail.throttle.is_short()))
    }

    /// When the next piece of work is due after this pause, or earlier because a client must have replied by then.
    fn next(&mut self, now: Instant, pause: Duration) -> Next {
        if let Some(until) = self.quarantine.until() {
            // The reply notifies. Without pages to evict there is nothing to do before that.
            let has_due = self.quarantine.is_waiting();
            self.pace.due = has_due.then(|| now + pause);
            return if has_due { Next::after(now, pause) } else { Next::At(until.max(now)) };
        }
        self.pace.due = None;
        if pause < IDLE {
            self.pause = IDLE;
            self.vm.mail.rest_at(None);
            return Next::after(now, pause);
        }
        let vm = &self.vm;
        if vm.effective_limit().is_none() && vm.stats().get(Counter::RegisteredBytes) == 0 {
            // A limit, a hold, or a view notifies.
            return Next::Idle;
        }
        let is_same = std::mem::replace(&mut self.checked, self.resident) == self.resident;
        let is_quiet = is_same && vm.pinned.pages().0 == 0;
        let longest = if self.is_low { REST } else { QUIET };
        self.pause = if is_quiet { (self.pause * 2).min(longest) } else { IDLE };
        vm.mail.rest_at(is_quiet.then_some(self.resident));
        Next::about(now, pause.max(self.pause))
    }

    /// Does one round; returns how long to pause before the next.
    fn round(&mut self) -> std::io::Result<Duration> {
        let vm = self.vm.clone();
        let now = Instant::now();
        self.is_low = false;
        self.pace.held_to = vm.effective_limit();
        self.check_pinned_again(now);
        let limit = match self.limit(now) {
            Ok(limit) => limit,
            Err(rest) => {
                vm.mail.throttle.open();
                if rest != Rest::StoreRefused {
                    self.descent.end();
                    vm.mail.over_limit.store(false, Ordering::Relaxed);
                    vm.pinned.clear();
                    self.quarantine.release_all();
                }
                return if rest == Rest::StoreRefused { Ok(IDLE) } else { self.settle() };
            }
        };
        let resident = vm.resident()?.bytes().0;
        self.resident = resident;
        vm.mail.over_limit.store(resident > limit.0, Ordering::Relaxed);
        let margin = super::margin(limit).0;
        let ceiling = margin.max(self.descent.above(limit.0, resident, now));
        if vm.may_pin() && self.check.is_none() {
            // Its pages must stay in quarantine for T, so its faults do not wait.
            vm.mail.throttle.open();
        } else {
            let pages = |bytes| Bytes(bytes).pages_floor().0;
            vm.mail.throttle.set(pages(resident), pages(limit.0), pages(ceiling));
        }
        let low = limit.0.saturating_sub(margin);
        self.is_low = resident <= low;
        // Also where nothing need be evicted: the agent is judged by the refaults of earlier evictions.
        self.candidates.take_note(now);
        if self.is_low {
            if resident + 2 * margin <= low {
                // Far below: the limit was raised, or the guest freed much. Quarantine is not needed.
                self.quarantine.release_all();
            }
            return Ok(IDLE);
        }
        let excess = Bytes(resident - low).pages_floor().0;
        // A fault that waits for credits is as urgent as a VM above its limit.
        let is_short = vm.mail.throttle.was_short();
        let over_limit = resident > limit.0 || is_short;
        go_first(is_short);
        let others_wait = vm.mail.others_wait.load(Ordering::Relaxed);
        self.adaptive.begin(over_limit, is_short, others_wait, limit.pages_floor().0, now);
        let evicted = self.drain(excess, over_limit, now)?;
        self.adaptive.evicted(evicted, now);
        let supply = self.adaptive.supply(vm.tuning.quarantine, limit.pages_floor().0);
        let all = (excess - evicted.min(excess)) + Bytes(margin).pages_floor().0 + supply;
        let (watched, hits) = (vm.stats().get(Counter::Quarantined), vm.stats().get(Counter::QuarantineHits));
        let wanted = if over_limit { self.effort.all(all, hits) } else { self.effort.part_of(all, hits, evicted) };
        let (mut zapped, mut is_cut) = (0, false);
        if watched < wanted && !self.quarantine.is_zapping() {
            let pick = if over_limit { Pick::Any } else { Pick::Cold };
            (zapped, is_cut) = self.top_up((wanted - watched).min(self.adaptive.batch()), pick)?;
        }
        if self.has_more || is_cut && (over_limit || self.candidates.is_sorting()) {
            self.pace.searched += now.elapsed();
            return Ok(Duration::ZERO);
        }
        let searched = std::mem::take(&mut self.pace.searched) + now.elapsed();
        let stays = vm.pinned.pages().0 > 0 || vm.views().iter().any(|view| view.kept.any());
        let is_fruitless = watched == 0 && zapped == 0 && !is_cut && stays;
        self.fruitless = if is_fruitless { self.fruitless.saturating_add(1) } else { 0 };
        Ok(match (over_limit, evicted > 0) {
            (true, true) => Duration::ZERO,
            (true, false) if self.fruitless >= HELD_UP_AFTER => {
                // No fault need wait for credits, and a further search costs a check of every page.
                vm.mail.throttle.open();
                IDLE.max(searched * PINNED_REST)
            }
            (true, false) if self.quarantine.is_all_unseen() && !self.adaptive.unseen(now).is_zero() => BACKGROUND,
            (true, false) => DIRECT.min(self.wait_for(Some(self.adaptive.wait()))),
            _ => BACKGROUND,
        })
    }

    /// The T that holds now.
    fn wait_for(&self, direct: Option<Duration>) -> Duration {
        self.vm.quarantine(direct, self.check.is_some())
    }

    /// Finds the pin check, and checks again the pages that were pinned.
    fn check_pinned_again(&mut self, now: Instant) {
        let vm = self.vm.clone();
        self.check = vm.pins.check();
        let Some(check) = &self.check else { return vm.pinned.clear() };
        match vm.pinned.check_again(check, |number| vm.region(number), now) {
            Ok(None) => {}
            Ok(Some(pages)) => vm.report("pages-pinned", pinned::held_long(pages)),
            Err(error) => self.lose_check(&error),
        }
    }

    /// Notes that the pin check has failed: from now on T decides alone.
    fn lose_check(&mut self, error: &std::io::Error) {
        if self.check.take().is_some() {
            self.vm.pins.lost(error);
            self.vm
                .report("pin-check-lost", format!("checking who holds a page: {error}; from now on only time tells"));
        }
    }

    /// The limit that holds now.
    fn limit(&self, now: Instant) -> Result<Bytes, Rest> {
        let vm = self.vm.clone();
        let limit = vm.effective_limit().ok_or(Rest::Unlimited)?;
        if vm.held().is_some() || vm.views().is_empty() {
            return Err(Rest::Held);
        }
        if self.rest_until.is_some_and(|until| now < until) {
            return Err(Rest::StoreRefused);
        }
        Ok(limit)
    }

    /// While nothing is to be reclaimed, unregisters chunks that need not be under userfaultfd.
    fn settle(&mut self) -> std::io::Result<Duration> {
        // Tracking sees touches only of what is registered.
        let is_watched = self.vm.stats().get(Counter::RegisteredBytes) > 0 && !self.vm.views().is_empty();
        if is_watched && !self.vm.is_tracked() {
            let _layout = self.vm.layout();
            for region in self.vm.regions() {
                self.vm.unregister_settled(&region)?;
            }
        }
        Ok(IDLE)
    }

    /// Evicts up to about `excess` pages that stayed untouched for T; returns how many.
    fn drain(&mut self, excess: u64, over_limit: bool, now: Instant) -> std::io::Result<u64> {
        let vm = self.vm.clone();
        let unseen = self.adaptive.unseen(now);
        let (began, mut gone, mut judged) = (Instant::now(), 0, (0, 0));
        self.has_more = false;
        while gone < excess && !vm.is_stopping() {
            if began.elapsed() >= SLICE {
                self.has_more = true;
                break;
            }
            let _layout = vm.layout();
            // This is computed for each run: the VM may begin to pin pages.
            let wait = self.wait_for(over_limit.then(|| self.adaptive.wait()));
            let due = self.quarantine.due(wait, unseen, !over_limit, now);
            let Some(Due { ticket, accesses, region, run }) = due else { break };
            let granule_of = |page| region.granule(page);
            let first = vm.stores.first();
            let to = To { number: first.number, store: &*first.store, since: interval::stamp() };
            let from = if over_limit && self.adaptive.is_forced() { LockedFrom::Copy } else { LockedFrom::Punch };
            region.departures().go(run);
            let check = self.check.clone();
            let asked = Asked::new(&region, check.as_deref());
            let evicted = evict(region.region_key(), run, granule_of, ticket, &asked, to, &mut self.buffer[..], from);
            if let Err(error) = asked.remember(&evicted.held, &vm.pinned) {
                self.lose_check(&error);
            }
            let held = evicted.held.len() as u64 * region.granule_pages();
            vm.ledger().evicted(&evicted, region.granule_pages());
            let went = evicted.far + evicted.zero;
            gone += went;
            // Memory that waited for longer says nothing of T.
            if accesses != Accesses::Unseen || unseen.is_zero() {
                judged = (judged.0 + run.count() - held, judged.1 + went);
            }
            let refused = evicted.store_full || evicted.store_busy;
            if refused || evicted.failed.is_some() {
                vm.ledger().moved(State::Quarantine, State::Resident, release(run, ticket, granule_of));
                vm.stats().add(Counter::Failed, evicted.refused);
            }
            if let Some(first) = evicted.unreadable.first() {
                evicted.unreadable.iter().for_each(|page| region.set_aside(*page));
                let (pages, number) = (evicted.unreadable.len() as u64 * region.granule_pages(), region.number);
                let text = format!("memory of the host failed: {pages} pages from {first} on of region {number}");
                vm.report("memory-error", format!("{text} cannot be read, and stay where they are"));
            }
            if let Some(error) = evicted.failed {
                return Err(error);
            }
            if refused {
                self.store_refused(evicted.store_full);
                break;
            }
            vm.mail.spill.check(&vm.stores);
        }
        if over_limit && judged.1 * 8 < judged.0 && self.rest_until.is_none_or(|until| until < now) {
            self.adaptive.nearly_all_touched();
        }
        Ok(gone)
    }

    /// Pauses reclaim because the store refused a page, and reports it unless it refused one a moment ago.
    fn store_refused(&mut self, full: bool) {
        if full && self.vm.mail.spill.make_room() {
            self.rest_until = Some(Instant::now() + SPILL_REST);
            return;
        }
        let now = Instant::now();
        self.rest_until = Some(now + STORE_REST);
        if full {
            self.vm.stats().add(Counter::StoreFull, 1);
        }
        if self.refusals.begins(now) {
            let usage = self.vm.stores.first().store.usage();
            let why = if full { "has no room" } else { "does not answer" };
            let (used, budget) = (Bytes(usage.bytes), Bytes(usage.budget_bytes));
            let text = format!("the store {why} ({used} of {budget} used): reclaim rests, nothing is lost");
            self.vm.report(if full { "store-full" } else { "store-busy" }, text);
        }
        self.quarantine.release_all();
    }

    /// Puts some `want` more pages into quarantine. Returns how many, and whether there may be more.
    fn top_up(&mut self, want: u64, pick: Pick) -> std::io::Result<(u64, bool)> {
        let vm = self.vm.clone();
        let layout = vm.layout();
        if vm.views().is_empty() || vm.held().is_some() {
            return Ok((0, false));
        }
        let (picked, is_cut) = self.candidates.pick(want, pick, Instant::now());
        Ok((self.quarantine.put(layout, picked.into_iter())?, is_cut))
    }
}
