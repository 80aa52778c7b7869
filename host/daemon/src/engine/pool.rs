//! The engine's part of the pool: one engine at a time has the pool, zeroes memory that VMs leave, and gives VMs
//! memory.
//!
//! Before: the keeper said where the pool is. After: the API shows and changes it, and VMMs that connect to its socket
//! get files (see `ballast-pool`). Its pages of 2 MiB and of 1 GiB are separate reserves, each with a directory.
//! Threads: one that opens the pool, checks for VMs that are gone, and zeroes; those of `ask`, for VMMs; those of the
//! API.
//! Promise: an engine that died left a pool that this one finds intact. Nothing here touches guest memory, and no other
//! part of the engine waits for it.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{anyhow, bail};
use ballast_api::{LendRequest, PoolPages, PoolRequest, PoolStat};
use ballast_base::Bytes;
use ballast_pool::{Error, Page, Reserve, Want};
use ballast_sys::clock;
use ballast_sys::lock::Lock;
use ballast_sys::memfd::FileId;

use crate::engine::lending::Lender;
use crate::engine::pool::demand::Demand;
use crate::engine::pool_parts::{self, Jobs, Parts};
use crate::events::Events;
use crate::settings::Pooling;

const POLL_EVERY: Duration = Duration::from_millis(200);
/// Time between checks of what VMs on demand have touched: within it, one thread touches up to 128 MiB.
const TOUCHED_EVERY: Duration = Duration::from_millis(20);
/// Time between tries to zero slices whose pages another process holds, and to repeat an open or listen that failed.
const AGAIN_EVERY: Duration = Duration::from_secs(1);
/// How long an operator's request waits for a pool that the preceding engine is about to leave.
const LEFT_WITHIN: Duration = Duration::from_secs(5);

mod ask;
pub mod demand;

#[derive(Debug)]
pub struct PoolService {
    place: Pooling,
    state: Mutex<State>,
    changed: Condvar,
    /// Why VMMs cannot request memory, although this engine has the pool.
    silent: Mutex<Option<String>>,
    /// Whether another engine has the pool and does not leave it.
    is_elsewhere: AtomicBool,
    /// Number of VMs to which memory is being sent: this engine has their files, too.
    handing: AtomicUsize,
    pub demand: Demand,
}

#[derive(Debug)]
enum State {
    /// Another engine had the pool at the last try, or there was no try yet.
    Coming(String),
    /// This engine does not have the pool, for this reason.
    Without(String),
    Ours(Box<Parts>),
}

impl PoolService {
    pub fn start(place: Pooling, events: Arc<Events>) -> io::Result<Arc<Self>> {
        let service = Self::new(place);
        let worker = service.clone();
        std::thread::Builder::new().name("pool".into()).spawn(move || worker.work(&events))?;
        Ok(service)
    }

    fn new(place: Pooling) -> Arc<Self> {
        Arc::new(Self {
            place,
            state: Mutex::new(State::Coming("it is being opened".into())),
            changed: Condvar::new(),
            silent: Mutex::default(),
            is_elsewhere: AtomicBool::new(false),
            handing: AtomicUsize::new(0),
            demand: Demand::default(),
        })
    }

    fn work(self: &Arc<Self>, events: &Events) {
        let place = &self.place;
        let mut said = String::new();
        let parts = loop {
            match Parts::open(&place.dir) {
                Ok(parts) => break parts,
                Err(error) => {
                    let (why, is_taken) = (error.to_string(), matches!(error, Error::Taken(_)));
                    if why != said && !is_taken {
                        events.add(None, "pool-unavailable", format!("the pool cannot be used: {why}"));
                    }
                    *self.state.locked() =
                        if is_taken { State::Coming(why.clone()) } else { State::Without(why.clone()) };
                    said = why;
                    // The engine that this one follows has the pool until it ends.
                    std::thread::sleep(POLL_EVERY);
                }
            }
        };
        *self.state.locked() = State::Ours(Box::new(parts));
        self.changed.notify_all();
        let (mut looked, mut again, mut lenders) =
            (None::<Instant>, Instant::now(), Page::ALL.map(|_| Lender::default()));
        let (mut listens, mut missing, mut completed) = (false, Vec::new(), None::<Instant>);
        loop {
            if completed.is_none_or(|at| at.elapsed() >= AGAIN_EVERY) {
                completed = Some(Instant::now());
                let before = std::mem::replace(&mut missing, self.complete(place, &mut listens));
                for why in missing.iter().filter(|why| !before.contains(why)) {
                    events.add(None, "pool-unavailable", why.clone());
                }
            }
            let wait = (!missing.is_empty()).then_some(AGAIN_EVERY);
            if let Err(error) = self.round(&mut looked, &mut again, wait, &mut lenders, events)
                && said != error.to_string()
            {
                said = error.to_string();
                events.add(None, "pool-unavailable", format!("the pool: {said}"));
            }
        }
    }

    /// Opens missing parts, and listens, if that is still to be done. Returns what could not be done.
    fn complete(self: &Arc<Self>, place: &Pooling, listens: &mut bool) -> Vec<String> {
        let mut missing = Vec::new();
        if let State::Ours(parts) = &mut *self.state.locked() {
            missing.extend(parts.complete(&place.dir));
        }
        if !*listens {
            let failed = self.listen(place).err().map(|error| format!("VMs get no memory of the pool: {error:#}"));
            *listens = failed.is_none();
            missing.extend(failed.clone());
            *self.silent.locked() = failed;
        }
        missing
    }

    /// Checks for VMs that are gone, if it is time, and zeroes one slice, or waits for at most `wait`.
    fn round(
        &self,
        looked: &mut Option<Instant>,
        again: &mut Instant,
        wait: Option<Duration>,
        lenders: &mut [Lender; 2],
        events: &Events,
    ) -> Result<(), Error> {
        self.demand.tell_if_short();
        let looks = looked.is_none_or(|at| at.elapsed() >= POLL_EVERY);
        let far = looks.then(|| self.demand.far());
        let mut state = self.state.locked();
        let State::Ours(parts) = &mut *state else { return Ok(()) };
        // A part that fails must not stop the other one, nor the zeroing of slices.
        let mut failed = Ok(());
        if let Some(far) = far {
            parts.of(Page::Huge).into_iter().for_each(|huge| huge.set_far(far.clone()));
            for (page, reserve) in parts.each() {
                let lender = &mut lenders[page as usize];
                match reserve.tend().and_then(|_| lender.adjust(reserve, clock::monotonic_ns() / 1_000_000)) {
                    Ok(None) => {}
                    Ok(Some(lent)) => events.add(None, "pool-lent", lent),
                    Err(error) => failed = failed.and(Err(error)),
                }
            }
            // The time is read again, because the kernel may have delayed this thread.
            *looked = Some(Instant::now());
        }
        for failure in parts.each().flat_map(|(_, reserve)| reserve.take_failures()) {
            events.add(failure.owner.clone().map(|(name, _)| name), "pool-memory-failed", failure.to_string());
        }
        let on_demand = parts.of(Page::Huge).ok().filter(|huge| huge.has_on_demand());
        let has_on_demand = on_demand.is_some();
        failed = failed.and(self.demand.tend(on_demand, looks));
        let is_due = again.elapsed() >= AGAIN_EVERY;
        if is_due {
            *again = Instant::now();
        }
        let (mut jobs, found) =
            parts.jobs(is_due).map_or_else(|error| (Jobs::default(), Err(error)), |jobs| (jobs, Ok(())));
        failed = failed.and(found);
        if jobs.is_empty() {
            let rests = parts.is_at_rest();
            let is_at_rest = matches!(rests, Ok(true)) && failed.is_ok();
            failed = failed.and(rests.map(drop));
            match is_at_rest {
                // No VM has memory of the pool, and there is nothing to do. A thread that changes that notifies.
                true => match wait {
                    None => drop(self.changed.wait(state)),
                    Some(most) => drop(self.changed.wait_timeout(state, most)),
                },
                false if has_on_demand => drop(self.changed.wait_timeout(state, TOUCHED_EVERY)),
                false => drop(self.changed.wait_timeout(state, POLL_EVERY)),
            }
            return failed;
        }
        drop(state);
        while let Some((page, job)) = jobs.next() {
            let done = job.run();
            let State::Ours(parts) = &mut *self.state.locked() else { return failed };
            // The part was there when the job began, and parts do not disappear.
            let Ok(part) = parts.of(page) else { continue };
            let is_ready = part.finish(done);
            if let Some(found_a_page) = jobs.done(page, is_ready) {
                // The other jobs are still run: a job that is dropped is never done.
                failed = failed.and(part.replenish(found_a_page));
            }
        }
        self.changed.notify_all();
        failed
    }

    /// Locks the state, once the preceding engine has left the pool. Only the first call waits for that.
    fn lock_when_left(&self) -> MutexGuard<'_, State> {
        let is_coming =
            |state: &mut State| matches!(state, State::Coming(_)) && !self.is_elsewhere.load(Ordering::Relaxed);
        let waited = self.changed.wait_timeout_while(self.state.locked(), LEFT_WITHIN, is_coming);
        let (state, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        if waited.timed_out() {
            self.is_elsewhere.store(true, Ordering::Relaxed);
        }
        state
    }

    pub fn stat(&self) -> PoolStat {
        match &mut *self.lock_when_left() {
            State::Ours(parts) => {
                // While no VM has memory of the pool, no other thread checks.
                for (_, reserve) in parts.each() {
                    if let Err(error) = reserve.find_failures() {
                        tracing::warn!("Looking for failed memory of the pool: {error}");
                    }
                }
                self.changed.notify_all();
                self.stat_of(parts)
            }
            State::Coming(why) | State::Without(why) => PoolStat { notes: vec![why.clone()], ..PoolStat::default() },
        }
    }

    fn stat_of(&self, parts: &Parts) -> PoolStat {
        let mut stat = parts.stat();
        stat.notes.extend(self.silent.locked().clone());
        stat
    }

    pub fn reserve(&self, request: &PoolRequest) -> anyhow::Result<PoolStat> {
        let want = match (request.bytes, request.percent) {
            (Some(bytes), None) => Want::Bytes(Bytes(bytes)),
            (None, Some(percent @ 1..=100)) => Want::Percent(percent),
            (None, Some(percent)) => bail!("{percent} percent; 1 to 100 can be"),
            _ => bail!("either bytes or percent must be there"),
        };
        let (percent, file) = (request.overcommit_percent, request.file_bytes.map(Bytes));
        self.change(request.pages, |reserve| {
            percent.map_or(Ok(()), |percent| reserve.check_overcommit(percent))?;
            reserve.grow(want, request.node, file)?;
            percent.map_or(Ok(()), |percent| reserve.set_overcommit(percent))
        })
    }

    pub fn lend(&self, request: &LendRequest) -> anyhow::Result<PoolStat> {
        let most = Bytes(request.bytes);
        self.change(request.pages, |reserve| {
            if request.when_short {
                if request.node.is_some() {
                    return Err(Error::Request("what is lent when the host is short is of all nodes".into()));
                }
                return reserve.set_lending(Some(most));
            }
            reserve.set_lending(None)?;
            reserve.lend(most, request.node)
        })
    }

    fn change(
        &self,
        pages: PoolPages,
        what: impl FnOnce(&mut Reserve) -> Result<(), Error>,
    ) -> anyhow::Result<PoolStat> {
        let page = pool_parts::for_operator(pages);
        let far = self.demand.far();
        let mut state = self.lock_when_left();
        match &mut *state {
            State::Ours(parts) => {
                let part = parts.of(page)?;
                part.set_far(far);
                what(part).map_err(|error| anyhow!(error.to_string()))?;
                self.demand.show(part);
                self.changed.notify_all();
                Ok(self.stat_of(parts))
            }
            State::Coming(why) | State::Without(why) => bail!("This engine has not got the pool: {why}"),
        }
    }

    pub fn has(&self, file: FileId) -> bool {
        pool_parts::has(&self.place.dir, file)
    }
}

#[cfg(test)]
mod tests;
