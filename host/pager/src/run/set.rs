//! A set: descriptors that one thread at a time waits for and serves, in turns.
//!
//! Before: [`super::servers`] puts a descriptor into the set of a CPU. After: each input is followed by a visit of its
//! [`Serve`], one visit at a time, until it is closed.
//! Threads: the set's worker waits and visits; any may notify, move and close. Units: nanoseconds of visits.
//! Promise: at most one thread visits a slot, whatever happens to it, and no input and no notification is lost.
//!
//! Owner of a slot: its *place* is the set that the slot names, which changes under the slot's lock.
//!
//! | State | Place | In that set | Rights |
//! |---|---|---|---|
//! | idle, due later, ready | its set | in slots and queue | its worker visits or moves it, any notifies or closes it |
//! | visited | its set | the visit | only its worker has the server; others leave a flag: notified, closing |
//! | stuck | a set apart | the visit | as visited; its thread went with it, and its former set has another |
//! | moved | the other set | ready | both epoll sets had it; one visit handles input of that time |
//! | being closed | as before | in neither | the thread that took it out ends it |
//! | over | none | | none |
//!
//! Lock order: the place of a slot; then one set, or its descriptor. No lock is held during a visit or an end.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

use rustix::event::epoll::Event;

use super::input::Input;
use super::queue::{ById, GroupId, Next, Queue, TaskId};
use super::serve::{After, BATCH, Serve};

pub(super) struct Slot {
    id: TaskId,
    group: GroupId,
    /// `None` when it is over: a thread that still has the slot must not be the one that closes the descriptor.
    fd: Mutex<Option<Arc<dyn AsFd + Send + Sync>>>,
    pub stuck: AtomicU32,
    /// The server, `None` when it is over, and the number of its panics.
    server: Mutex<(Option<Box<dyn Serve>>, u32)>,
    place: Mutex<Option<Arc<Set>>>,
    /// Notified when `place` becomes `None`.
    over: Condvar,
    /// The thread that visits it must end it.
    is_closing: AtomicBool,
    pub roams: bool,
}

impl std::fmt::Debug for Slot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Slot").field("id", &self.id).finish_non_exhaustive()
    }
}

/// Notifies a slot, which may be over.
#[derive(Clone, Debug)]
pub struct Notify(Weak<Slot>);

impl Notify {
    /// Has the slot visited soon, or once more if it is being visited. Never waits for a visit.
    pub fn notify(&self) {
        let Some(slot) = self.0.upgrade() else { return };
        let place = slot.place();
        if let Some(set) = &*place {
            set.notify(slot.id);
        }
    }

    /// Has the slot visited at the next input of this descriptor, unless it has moved to another set by then.
    ///
    /// # Errors
    /// The kernel does not watch this descriptor.
    pub fn watch(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        let Some(slot) = self.0.upgrade() else { return Ok(()) };
        let set = slot.place().clone();
        set.map_or(Ok(()), |set| set.input.add_once(fd, slot.id.number()))
    }
}

#[derive(Debug)]
pub(super) struct Worker {
    /// Thread ID; 0 at its start.
    pub number: AtomicU32,
    /// The set that it serves. Changes under the lock of the set that it leaves.
    pub set: Mutex<Arc<Set>>,
}

#[derive(Debug)]
pub(super) struct Set {
    /// The CPU of its worker; `None`: the worker is bound to no CPU.
    pub cpu: Option<usize>,
    /// It has only one slot, whose server was stuck recently.
    pub is_apart: bool,
    /// Its flag that the worker waits changes under the lock of `inner`.
    input: Input,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
pub(super) struct Inner {
    queue: Queue,
    slots: ById<TaskId, Arc<Slot>>,
    pub worker: Option<Arc<Worker>>,
    pub visit: Option<Visit>,
    visits: u64,
}

#[derive(Clone, Debug)]
pub(super) struct Visit {
    pub slot: Arc<Slot>,
    pub since: Instant,
    number: u64,
}

impl Slot {
    pub fn new(
        id: TaskId,
        group: GroupId,
        fd: Arc<dyn AsFd + Send + Sync>,
        server: impl FnOnce(Notify) -> Box<dyn Serve>,
    ) -> Arc<Self> {
        Arc::new_cyclic(|this| {
            let server = server(Notify(this.clone()));
            Self {
                id,
                group,
                fd: Mutex::new(Some(fd)),
                stuck: AtomicU32::new(0),
                roams: server.roams(),
                server: Mutex::new((Some(server), 0)),
                place: Mutex::default(),
                over: Condvar::new(),
                is_closing: AtomicBool::new(false),
            }
        })
    }

    pub fn place(&self) -> MutexGuard<'_, Option<Arc<Set>>> {
        self.place.lock().expect("no panic while held")
    }

    pub fn times_stuck(&self) -> u32 {
        self.stuck.load(Ordering::Relaxed)
    }

    pub fn is_over(&self) -> bool {
        self.place().is_none()
    }

    /// Waits until it is over, or until this time.
    pub fn wait(&self, until: Option<Instant>) {
        let is_placed = |place: &mut Option<Arc<Set>>| place.is_some();
        let place = self.place();
        match until.map(|until| until.saturating_duration_since(Instant::now())) {
            None => drop(self.over.wait_while(place, is_placed).expect("no panic while held")),
            Some(left) => drop(self.over.wait_timeout_while(place, left, is_placed).expect("no panic while held")),
        }
    }

    pub fn enter(self: &Arc<Self>, set: &Arc<Set>) -> io::Result<()> {
        let mut place = self.place();
        set.listen(self, Input::add)?;
        *place = Some(set.clone());
        set.take_in(self, Duration::ZERO);
        Ok(())
    }

    pub fn visit(&self, now: Instant) -> After {
        let mut server = self.server.lock().expect("no panic while held");
        let (Some(server), panics) = &mut *server else { return After::next(Next::Done) };
        if let Ok(after) = catch_unwind(AssertUnwindSafe(|| server.serve(now, now + BATCH))) {
            return after;
        }
        *panics += 1;
        // `panicked` may panic as well.
        let goes_on = catch_unwind(AssertUnwindSafe(|| server.panicked(*panics))).unwrap_or(false);
        After::next(if goes_on { Next::Again } else { Next::Done })
    }

    /// Moves it, as the worker of its set, outside of visits. Returns whether it was moved.
    pub fn relocate(self: &Arc<Self>, from: &Arc<Set>, to: &Arc<Set>) -> io::Result<bool> {
        let mut place = self.place();
        if !place.as_ref().is_some_and(|place| Arc::ptr_eq(place, from)) {
            return Ok(false);
        }
        to.listen(self, Input::add)?;
        let Some(owed) = from.let_go(self) else {
            // Another thread ends it.
            to.unlisten(self);
            return Ok(false);
        };
        from.unlisten(self);
        *place = Some(to.clone());
        to.take_in(self, owed);
        Ok(true)
    }

    /// If its worker is still stuck in this visit of `from`, moves the slot and that worker to the new set `to`, and
    /// makes `other` the worker of `from`. Returns whether it was stuck.
    pub fn part(
        self: &Arc<Self>,
        from: &Arc<Set>,
        visit: &Visit,
        to: &Arc<Set>,
        other: &Arc<Worker>,
    ) -> io::Result<bool> {
        let mut place = self.place();
        if !place.as_ref().is_some_and(|place| Arc::ptr_eq(place, from)) {
            return Ok(false);
        }
        to.listen(self, Input::add)?;
        let mut inner = from.lock();
        let is_it = inner.visit.as_ref().is_some_and(|now| now.number == visit.number);
        let Some(stuck) = inner.worker.take_if(|_| is_it) else { return Ok(false) };
        inner.visit = None;
        inner.queue.ran(self.id, visit.since.elapsed(), Next::Done);
        inner.slots.remove(&self.id);
        {
            let mut apart = to.lock();
            apart.queue.add_as(self.id, self.group);
            let taken = apart.queue.take(Instant::now());
            debug_assert_eq!(taken, Some(self.id), "it is alone there");
            // It may have been notified during the visit.
            apart.queue.notify(self.id);
            apart.slots.insert(self.id, self.clone());
            apart.visit = Some(visit.clone());
            apart.worker = Some(stuck.clone());
        }
        *stuck.set.lock().expect("no panic while held") = to.clone();
        self.stuck.fetch_add(1, Ordering::Relaxed);
        inner.worker = Some(other.clone());
        drop(inner);
        from.unlisten(self);
        *place = Some(to.clone());
        Ok(true)
    }

    /// Closes it: it ends at once, or at the end of the visit under way.
    pub fn close(&self) {
        let place = self.place();
        let Some(set) = place.clone() else { return };
        let mut inner = set.lock();
        if inner.visit.as_ref().is_some_and(|visit| visit.slot.id == self.id) {
            self.is_closing.store(true, Ordering::Release);
            return;
        }
        // Another thread took it out, and ends it.
        if inner.slots.remove(&self.id).is_none() {
            return;
        }
        inner.queue.remove(self.id);
        drop(inner);
        drop(place);
        if set.is_apart {
            // Its worker ends, too.
            set.wake();
        }
        self.end(&set);
    }

    /// Ends it; the caller has taken it out of this set.
    fn end(&self, set: &Set) {
        set.unlisten(self);
        let server = self.server.lock().expect("no panic while held").0.take();
        // Dropping the server may panic as well.
        let ended = catch_unwind(AssertUnwindSafe(|| {
            if let Some(mut server) = server {
                server.end();
            }
        }));
        if ended.is_err() {
            tracing::error!("ending a server panicked");
        }
        // Under the lock of the place: a thread that is moving the slot first removes it from the other epoll set. If
        // the descriptor stayed there, it could not be served again.
        let place = self.place();
        let fd = self.fd.lock().expect("no panic while held").take();
        drop(place);
        // Dropped before a thread that waits for the end continues, and closes its own descriptor.
        drop(fd);
        *self.place() = None;
        self.over.notify_all();
    }
}

impl Set {
    pub fn new(cpu: Option<usize>, is_apart: bool) -> io::Result<Arc<Self>> {
        let inner = Inner { queue: Queue::new(BATCH), slots: ById::default(), worker: None, visit: None, visits: 0 };
        Ok(Arc::new(Self { cpu, is_apart, input: Input::new()?, inner: Mutex::new(inner) }))
    }

    pub fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("no panic while held")
    }

    /// Listens to a slot by a function of [`Input`]. The caller holds the lock of its place.
    pub fn listen(&self, slot: &Slot, add: fn(&Input, BorrowedFd<'_>, u64) -> io::Result<()>) -> io::Result<()> {
        let fd = slot.fd.lock().expect("no panic while held");
        let fd = fd.as_ref().ok_or(io::ErrorKind::NotFound)?;
        add(&self.input, (**fd).as_fd(), slot.id.number())
    }

    fn unlisten(&self, slot: &Slot) {
        if let Some(fd) = &*slot.fd.lock().expect("no panic while held") {
            // After a failure the event of an unknown slot causes no visit.
            self.input.remove((**fd).as_fd());
        }
    }

    /// Makes a slot ready here, with the debt of its group. The caller holds the lock of its place.
    fn take_in(&self, slot: &Arc<Slot>, owed: Duration) {
        let mut inner = self.lock();
        inner.slots.insert(slot.id, slot.clone());
        inner.queue.add_as(slot.id, slot.group);
        inner.queue.owe(slot.group, owed);
        self.wake();
    }

    /// Takes a slot out that is not being visited. Returns the debt of its group, if the slot was here. The caller
    /// holds the lock of its place.
    fn let_go(&self, slot: &Slot) -> Option<Duration> {
        let mut inner = self.lock();
        let owed = inner.queue.remove(slot.id);
        inner.slots.remove(&slot.id).map(|_| owed)
    }

    fn notify(&self, id: TaskId) {
        if self.lock().queue.notify(id) {
            self.wake();
        }
    }

    /// Wakes the worker: there is work, or a reason to end.
    pub fn wake(&self) {
        self.input.wake();
    }

    /// Its worker ends. The set must drop it, because they refer to each other.
    pub fn is_left(&self) {
        self.lock().worker = None;
    }

    pub fn is_idle(&self) -> bool {
        self.input.is_waiting()
    }

    pub fn len(&self) -> usize {
        self.lock().slots.len()
    }

    pub fn any(&self) -> Option<Arc<Slot>> {
        self.lock().slots.values().next().cloned()
    }

    pub fn is_crowded_for(&self, slot: &Slot) -> bool {
        self.lock().queue.is_ready_beside(slot.id)
    }

    /// Number of visits so far; the visit under way, with its worker.
    pub fn current_visit(&self) -> (u64, Option<(Visit, Arc<Worker>)>) {
        let inner = self.lock();
        (inner.visits, inner.visit.clone().zip(inner.worker.clone()))
    }

    /// If there is work and no visit is under way: the number of visits so far, and the worker.
    pub fn waits(&self) -> Option<(u64, Arc<Worker>)> {
        let inner = self.lock();
        let worker = inner.worker.clone().filter(|_| inner.visit.is_none() && !inner.slots.is_empty())?;
        (inner.queue.is_ready() || self.input.is_there()).then_some((inner.visits, worker))
    }

    /// Waits for work, as its worker. `at_most`: the longest wait.
    pub fn wait(&self, events: &mut Vec<Event>, now: Instant, at_most: Option<Duration>) -> io::Result<()> {
        let pause = {
            let inner = self.lock();
            let due = inner.queue.next_due().map(|due| due.saturating_duration_since(now));
            match inner.queue.is_ready() || self.is_apart && inner.slots.is_empty() {
                true => Some(Duration::ZERO),
                false => {
                    // The lock is held, so a thread that adds or removes work from now on wakes this one.
                    self.input.begin_wait();
                    due.into_iter().chain(at_most).min()
                }
            }
        };
        self.input.wait(events, pause)
    }

    /// Handles these events, and begins the next visit.
    pub fn begin(&self, events: &[Event], now: Instant) -> Option<Arc<Slot>> {
        let mut inner = self.lock();
        self.input.end_wait();
        for event in events {
            let data = event.data;
            inner.queue.notify(TaskId::new(data.u64()));
        }
        let id = inner.queue.take(now)?;
        let slot = inner.slots.get(&id).expect("it is in the queue").clone();
        inner.visits += 1;
        inner.visit = Some(Visit { slot: slot.clone(), since: now, number: inner.visits });
        Some(slot)
    }
}

impl Worker {
    /// Ends a slot's visit in `set`, which took `spent`. Returns this worker's set: another one if it was stuck.
    pub fn book(self: &Arc<Self>, mut set: Arc<Set>, slot: &Slot, spent: Duration, after: &After) -> Arc<Set> {
        loop {
            let mut inner = set.lock();
            if !inner.worker.as_ref().is_some_and(|worker| Arc::ptr_eq(worker, self)) {
                drop(inner);
                set = self.set.lock().expect("no panic while held").clone();
                continue;
            }
            inner.visit = None;
            let is_over = after.next == Next::Done || slot.is_closing.load(Ordering::Acquire);
            inner.queue.ran(slot.id, after.charge(spent), if is_over { Next::Done } else { after.next });
            if is_over {
                inner.slots.remove(&slot.id);
                drop(inner);
                slot.end(&set);
            } else {
                drop(inner);
            }
            return set;
        }
    }
}
