//! The reclaim worker: keeps a VM's resident memory at or below its limit.
//!
//! Before: an operator or a policy wrote a limit. After: cold pages went through quarantine to the store.
//! Threads: one task per VM. It never waits for the client, whose reply notifies it. A fault waits for the pages of the
//! one run that is being punched (and copied, in forced reclaim: see below), and for credits in a VM at its limit
//! (`throttle`, at most 0.1 s). Units: pages, bytes at the borders.
//! Promise: a higher limit ends reclaim at once.
//!
//! In each round the controller (`controller`) chooses the mode; its module has the modes and all numbers. In
//! background reclaim the worker keeps a supply of cold pages in quarantine (`candidates` picks them) and evicts those
//! that stayed untouched for T. Above the limit (direct reclaim) it does so without pauses, and takes warm pages, too;
//! T is then shorter, unless something may have pages pinned and the engine cannot know which. From the *ceiling* on, a
//! page comes in only after others have gone out (`throttle`). So a VM whose working set exceeds its limit is held to
//! the limit, at the price of refaults.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ballast_base::{Bytes, PAGE_SIZE};
use ballast_heat::Pick;
use ballast_store::PageBytes;
use ballast_sys::PinCheck;

use crate::reclaim::candidates::Candidates;
use crate::reclaim::controller::{BACKGROUND, Controller, LOOK, MOST_WAIT, Mode, REST, Round, SLICE, Seen, margin};
use crate::reclaim::failures::Failures;
use crate::reclaim::quarantine::{Accesses, Due, Quarantine};
use crate::run::pool::thread::go_first;
use crate::run::queue::Next;
use crate::vm::account::SHARE;
use crate::vm::interval;
use crate::vm::pinned::{self, Asked};
use crate::vm::stats::Counter;
use crate::vm::{Hold, Vm};
use ballast_page::evict::{LockedFrom, To, evict, release};
use ballast_page::page_state::State;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rest {
    Unlimited,
    /// The VM is held, or no process of it is known.
    Held,
    StoreRefused,
}

pub(crate) struct ReclaimWorker {
    vm: Arc<Vm>,
    /// The pin check, if there is one; fixed for a round.
    check: Option<Arc<PinCheck>>,
    /// Time since which rounds above the limit have found no page to evict.
    fruitless_since: Option<Instant>,
    candidates: Candidates,
    quarantine: Quarantine,
    controller: Controller,
    rest_until: Option<Instant>,
    failures: Failures,
    refusals: Failures,
    /// Bytes resident at the last round, and at the last round without work.
    resident: u64,
    checked: u64,
    /// Total time of successive rounds that each ended with more to do.
    searched: Duration,
    /// The last round found the VM at or below the low watermark.
    is_low: bool,
    was_tracked: bool,
    /// The last round ended although more pages were due.
    has_more: bool,
    /// Pages being evicted: 64 KiB, so that they are still in the CPU's cache when they are compressed.
    buffer: Box<[PageBytes; 16]>,
}

/// Opens the throttle: nothing is evicted any more, so no fault may wait for credits.
impl Drop for ReclaimWorker {
    fn drop(&mut self) {
        self.vm.mail.throttle.open();
    }
}

impl ReclaimWorker {
    pub fn new(vm: Arc<Vm>) -> Self {
        let mut worker = Self {
            check: None,
            fruitless_since: None,
            candidates: Candidates::new(vm.clone()),
            quarantine: Quarantine::new(vm.clone()),
            controller: Controller::new(vm.tuning.direct_quarantine),
            rest_until: None,
            failures: Failures::default(),
            refusals: Failures::default(),
            resident: 0,
            checked: 0,
            searched: Duration::ZERO,
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

    pub fn run(&mut self, now: Instant) -> Next {
        let vm = self.vm.clone();
        if vm.is_stopping() {
            self.quarantine.release_all();
            return Next::Done;
        }
        vm.pressure.sample(vm.stats(), now);
        let pause = match self.quarantine.take_answers(now).and_then(|()| self.round()) {
            Ok(pause) => pause,
            Err(error) => {
                self.failures.report(&vm, now, &error);
                vm.mail.throttle.open();
                self.quarantine.release_all();
                if let Err(error) = self.quarantine.forget() {
                    tracing::error!(vm = vm.state.name(), "Reading the page-state words: {error}");
                }
                LOOK
            }
        };
        // This worker is the first to see a new limit or hold, or that the VM exceeds its limit.
        let is_tracked = vm.is_tracked();
        if std::mem::replace(&mut self.was_tracked, is_tracked) != is_tracked {
            vm.mail.track.notify();
        }
        // Only in a long pause: memory that restores have emptied is prepared for the next eviction.
        if pause > SLICE {
            vm.stores.first().store.tidy();
        }
        self.next(now, pause)
    }

    /// The next run: after this pause, or when a client's reply is overdue.
    fn next(&mut self, now: Instant, pause: Duration) -> Next {
        if let Some(until) = self.quarantine.until() {
            // The reply notifies. Until then there is work only if pages wait for T.
            let has_due = self.quarantine.is_waiting();
            return if has_due { Next::after(now, pause) } else { Next::At(until.max(now)) };
        }
        if pause < MOST_WAIT {
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
        vm.mail.rest_at(is_quiet.then_some(self.resident));
        let rests = match is_quiet {
            true if self.is_low => REST,
            true => LOOK,
            false => MOST_WAIT,
        };
        Next::about(now, pause.max(rests))
    }

    /// Runs one round; returns the pause before the next.
    fn round(&mut self) -> std::io::Result<Duration> {
        let vm = self.vm.clone();
        let now = Instant::now();
        self.is_low = false;
        self.check_pinned_again(now);
        let limit = match self.limit(now) {
            Ok(limit) => limit,
            Err(rest) => {
                vm.mail.throttle.open();
                if rest == Rest::StoreRefused {
                    return Ok(MOST_WAIT);
                }
                vm.mail.over_limit.store(false, Ordering::Relaxed);
                vm.pinned.clear();
                self.quarantine.release_all();
                return self.settle();
            }
        };
        let resident = vm.resident()?.bytes();
        self.resident = resident.0;
        vm.mail.over_limit.store(resident > limit, Ordering::Relaxed);
        if vm.may_pin() && self.check.is_none() {
            // Its pages must stay in quarantine for T, so its faults must not wait for credits.
            vm.mail.throttle.open();
        } else {
            vm.mail.throttle.set(resident.pages_floor().0, limit.pages_floor().0, margin(limit));
        }
        // Also if nothing is to be evicted: the agent is judged by the refaults of earlier evictions.
        self.candidates.take_note(now);
        let (faults_wait, others_wait) = (vm.mail.throttle.was_short(), vm.mail.others_wait.load(Ordering::Relaxed));
        go_first(faults_wait);
        let round = self.controller.begin(&Seen { limit, resident, faults_wait, others_wait, now });
        if round.mode == Mode::Rest {
            self.is_low = true;
            if round.is_far_below {
                // The limit was raised, or the guest freed much memory: quarantine is not needed.
                self.quarantine.release_all();
            }
            return Ok(MOST_WAIT);
        }
        let evicted = self.drain(&round, now)?;
        let wanted = self.controller.evicted(&round, evicted);
        let watched = vm.stats().get(Counter::Quarantined);
        let (mut zapped, mut is_cut) = (0, false);
        if watched < wanted && !self.quarantine.is_zapping() {
            let pick = if round.mode.is_urgent() { Pick::Any } else { Pick::Cold };
            (zapped, is_cut) = self.top_up((wanted - watched).min(Controller::batch()), pick)?;
        }
        if self.has_more || is_cut && (round.mode.is_urgent() || self.candidates.is_sorting()) {
            self.searched += now.elapsed();
            return Ok(Duration::ZERO);
        }
        let searched = std::mem::take(&mut self.searched) + now.elapsed();
        if round.mode == Mode::Background {
            return Ok(BACKGROUND);
        }
        let is_fruitless = watched == 0 && zapped == 0 && !is_cut;
        let since = is_fruitless.then(|| self.fruitless_since.unwrap_or(now));
        self.fruitless_since = since;
        Ok(match since {
            _ if evicted > 0 => Duration::ZERO,
            Some(since) if now.saturating_duration_since(since) >= LOOK => {
                // All pages are pinned or kept. Faults must not wait for credits, and each search checks every page.
                vm.mail.throttle.open();
                MOST_WAIT.max(searched * SHARE)
            }
            _ if self.quarantine.is_all_unseen() && !round.unseen.is_zero() => BACKGROUND,
            _ => SLICE.min(self.wait_for(round.direct)),
        })
    }

    fn wait_for(&self, direct: Option<Duration>) -> Duration {
        self.vm.quarantine(direct, self.check.is_some())
    }

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

    /// Records that the pin check has failed: from now on only T protects pinned pages.
    fn lose_check(&mut self, error: &std::io::Error) {
        if self.check.take().is_some() {
            self.vm.pins.lost(error);
            let why = format!("checking page references: {error}; pages are now evicted only after the full T");
            self.vm.report("pin-check-lost", why);
        }
    }

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
        // Tracking sees only touches of registered memory.
        let is_watched = self.vm.stats().get(Counter::RegisteredBytes) > 0 && !self.vm.views().is_empty();
        // These holds are short, and a chunk that the VMM has mapped over in part cannot be registered again.
        let is_passing = self.vm.is_held_for(Hold::Unchecked) || self.vm.is_held_for(Hold::Orphaned);
        if is_watched && !is_passing && !self.vm.is_tracked() {
            let _layout = self.vm.memory.layout();
            for region in self.vm.regions() {
                self.vm.unregister_settled(&region)?;
            }
        }
        Ok(MOST_WAIT)
    }

    /// Evicts up to about `excess` pages that stayed untouched for T; returns their number.
    fn drain(&mut self, round: &Round, now: Instant) -> std::io::Result<u64> {
        let vm = self.vm.clone();
        let Round { mode, unseen, excess, .. } = *round;
        let (began, mut gone, mut judged) = (Instant::now(), 0, (0, 0));
        self.has_more = false;
        while gone < excess && !vm.is_stopping() {
            if began.elapsed() >= SLICE {
                self.has_more = true;
                break;
            }
            let _layout = vm.memory.layout();
            // Computed anew for each run, because a device may begin to pin pages.
            let wait = self.wait_for(round.direct);
            let due = self.quarantine.due(wait, unseen, !mode.is_urgent(), now);
            let Some(Due { ticket, accesses, region, run }) = due else { break };
            let granule_of = |page| region.granule(page);
            let first = vm.stores.first();
            let to = To { number: first.number, store: &*first.store, since: interval::stamp() };
            let from = if mode == Mode::Forced { LockedFrom::Copy } else { LockedFrom::Punch };
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
            // Pages that waited for longer say nothing about T.
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
        // Pages that the store refused were not touched.
        if self.rest_until.is_none_or(|until| until < now) {
            self.controller.judge(mode, judged, now);
        }
        Ok(gone)
    }

    /// Pauses reclaim because the store refused a page. Reported once per series.
    fn store_refused(&mut self, full: bool) {
        if full && self.vm.mail.spill.make_room() {
            self.rest_until = Some(Instant::now() + BACKGROUND);
            return;
        }
        let now = Instant::now();
        self.rest_until = Some(now + LOOK);
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

    /// Puts about `want` more pages into quarantine. Returns their number, and whether there may be more candidates.
    fn top_up(&mut self, want: u64, pick: Pick) -> std::io::Result<(u64, bool)> {
        let vm = self.vm.clone();
        let layout = vm.memory.layout();
        if vm.views().is_empty() || vm.held().is_some() {
            return Ok((0, false));
        }
        let (picked, is_cut) = self.candidates.pick(want, pick, Instant::now());
        Ok((self.quarantine.put(layout, picked.into_iter())?, is_cut))
    }
}
