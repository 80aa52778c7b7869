//! The queue of the pool, and of each set of userfaultfds: decides which task runs next. It has no thread, lock or
//! clock.
//!
//! Before: tasks are notified, or their time comes. After: [`Queue::take`] returns one, group by group.
//! Threads: the caller has a lock. Units: nanoseconds of running.
//! Promise: a notification is never lost: a task that is notified while it runs, runs again. Between two runs of a
//! group's tasks each other group that has ready tasks runs for at most a quantum ([`QUANTUM`], unless said otherwise)
//! and the rest of one run (deficit round robin).
//!
//! ```text
//!         notified, or its time has come       take
//! Idle, At ───────────────────────────► Ready ─────────► Running ──► by `Next`, or Ready if notified meanwhile
//! ```

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// What a group may run for at each turn.
pub const QUANTUM: Duration = Duration::from_millis(1);
/// A group owes at most this much, in nanoseconds: a task that ran for long in one go does not wait for ever. More than
/// a visit of a fault worker may take before its userfaultfd goes apart.
const MOST_DEBT: i64 = 16_000_000;

/// Shares that change nothing, and the bounds beyond which shares have no more effect: so a turn is four quanta at
/// most, and the group with the fewest shares has a quarter of the usual turn.
pub const USUAL_SHARES: u32 = 1000;
const FEWEST_SHARES: u32 = 250;
const MOST_SHARES: u32 = 4000;

/// The charge of a group with these shares for a run that took this long.
pub fn charge(spent: Duration, shares: u32) -> Duration {
    spent * USUAL_SHARES / shares.clamp(FEWEST_SHARES, MOST_SHARES)
}

/// When a task runs again. A task that is notified runs at once in any case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// As soon as it is its turn: it has more to do.
    Again,
    /// At this time.
    At(Instant),
    /// When it is notified.
    Idle,
    /// Never: it is over.
    Done,
}

impl Next {
    /// After a pause that began at `now`; at once if the pause is zero.
    pub fn after(now: Instant, pause: Duration) -> Self {
        if pause.is_zero() { Self::Again } else { Self::At(now + pause) }
    }

    /// After a pause of about this length, at the same moment as other tasks with such a pause: one wake-up serves all.
    pub fn about(now: Instant, pause: Duration) -> Self {
        /// Distance of the moments, for long pauses and for short ones: as many tasks as possible run in a row.
        const LONG_GRAIN: Duration = Duration::from_secs(1);
        const GRAIN: Duration = Duration::from_millis(100);
        static FIRST: OnceLock<Instant> = OnceLock::new();
        let first = *FIRST.get_or_init(|| now);
        let grain = if pause < LONG_GRAIN { GRAIN } else { LONG_GRAIN };
        // Rounded down: a task that runs at such a moment, or a little later, is due at the next one again.
        let due = (now + pause).saturating_duration_since(first);
        let grains = (due.as_nanos() / grain.as_nanos()).max(1);
        let at = first + grain * u32::try_from(grains).unwrap_or(u32::MAX);
        Self::At(if at > now { at } else { at + grain })
    }
}

/// A task of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TaskId(u64);

impl TaskId {
    /// For a task that may change queues, whose number is therefore not a queue's.
    pub const fn new(number: u64) -> Self {
        Self(number)
    }

    /// Its number.
    pub const fn number(self) -> u64 {
        self.0
    }
}

/// Tasks that share their turns: those of one VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GroupId(u64);

/// Ids are counted up, so any function spreads them.
#[derive(Debug, Default)]
pub struct IdHasher(u64);

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    fn write_u64(&mut self, id: u64) {
        self.0 = (self.0 ^ id).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }
}

/// By ids of tasks or groups.
pub type ById<K, V> = HashMap<K, V, BuildHasherDefault<IdHasher>>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Idle,
    At(Instant),
    Ready,
    Running { notified: bool },
}

#[derive(Debug)]
struct Task {
    group: GroupId,
    state: State,
}

#[derive(Debug, Default)]
struct Group {
    tasks: usize,
    ready: VecDeque<TaskId>,
    /// What it may still run before others have their turn, in nanoseconds. Below zero: it ran too long by this.
    credit: i64,
    /// It has its turn, and was given its quantum.
    has_turn: bool,
}

impl Group {
    fn charge(&mut self, spent: Duration) {
        let spent = i64::try_from(spent.as_nanos()).unwrap_or(i64::MAX);
        self.credit = self.credit.saturating_sub(spent).max(-MOST_DEBT);
    }
}

/// The queue.
#[derive(Debug)]
pub struct Queue {
    /// In nanoseconds.
    quantum: i64,
    next: u64,
    tasks: ById<TaskId, Task>,
    groups: ById<GroupId, Group>,
    /// Groups with ready tasks; the first one has its turn.
    turns: VecDeque<GroupId>,
    timers: BTreeSet<(Instant, TaskId)>,
}

impl Default for Queue {
    fn default() -> Self {
        Self::new(QUANTUM)
    }
}

impl Queue {
    /// A queue with this quantum.
    pub fn new(quantum: Duration) -> Self {
        Self {
            quantum: quantum.as_nanos() as i64,
            next: 0,
            tasks: ById::default(),
            groups: ById::default(),
            turns: VecDeque::new(),
            timers: BTreeSet::new(),
        }
    }

    /// Adds a group without tasks. It is forgotten when its last task is over.
    pub fn add_group(&mut self) -> GroupId {
        self.next += 1;
        GroupId(self.next)
    }

    /// Adds a new task, which is ready.
    pub fn add(&mut self, group: GroupId) -> TaskId {
        self.next += 1;
        let id = TaskId(self.next);
        self.add_as(id, group);
        id
    }

    /// The same under a number of the caller's, in a group of the caller's.
    pub fn add_as(&mut self, id: TaskId, group: GroupId) {
        self.tasks.insert(id, Task { group, state: State::Idle });
        self.groups.entry(group).or_default().tasks += 1;
        self.notify(id);
    }

    /// Forgets a task that does not run. Returns what its group owes if that was the last one it had.
    pub fn remove(&mut self, id: TaskId) -> Duration {
        let Some(task) = self.tasks.remove(&id) else { return Duration::ZERO };
        let group = self.groups.get_mut(&task.group).expect("it has a task");
        match task.state {
            State::At(at) => drop(self.timers.remove(&(at, id))),
            State::Ready => {
                group.ready.retain(|ready| *ready != id);
                if group.ready.is_empty() {
                    group.has_turn = false;
                    self.turns.retain(|turn| *turn != task.group);
                }
            }
            State::Idle | State::Running { .. } => {}
        }
        group.tasks -= 1;
        if group.tasks > 0 {
            return Duration::ZERO;
        }
        let owed = self.groups.remove(&task.group).map_or(0, |group| group.credit.min(0).unsigned_abs());
        Duration::from_nanos(owed)
    }

    /// A group with a task owes this much from elsewhere.
    pub fn owe(&mut self, group: GroupId, owed: Duration) {
        if let Some(group) = self.groups.get_mut(&group) {
            group.charge(owed);
        }
    }

    /// There is something to do for a task. Returns whether that made it ready. A task that is over is not notified.
    pub fn notify(&mut self, id: TaskId) -> bool {
        let Some(task) = self.tasks.get_mut(&id) else { return false };
        match task.state {
            State::Ready => return false,
            State::Running { .. } => {
                task.state = State::Running { notified: true };
                return false;
            }
            State::At(at) => drop(self.timers.remove(&(at, id))),
            State::Idle => {}
        }
        task.state = State::Ready;
        let group = task.group;
        self.make_ready(id, group);
        true
    }

    fn make_ready(&mut self, id: TaskId, group: GroupId) {
        let known = self.groups.get_mut(&group).expect("it has a task");
        if known.ready.is_empty() {
            self.turns.push_back(group);
        }
        known.ready.push_back(id);
    }

    /// Takes the task that is to run now; it runs until [`Queue::ran`].
    pub fn take(&mut self, now: Instant) -> Option<TaskId> {
        self.fire(now);
        loop {
            let turn = *self.turns.front()?;
            let group = self.groups.get_mut(&turn).expect("it has a task");
            if !std::mem::replace(&mut group.has_turn, true) {
                group.credit += self.quantum;
            }
            if group.credit <= 0 {
                group.has_turn = false;
                self.turns.rotate_left(1);
                continue;
            }
            let id = group.ready.pop_front().expect("it has turns only with ready tasks");
            if group.ready.is_empty() {
                group.has_turn = false;
                self.turns.pop_front();
            }
            self.tasks.get_mut(&id).expect("it is ready").state = State::Running { notified: false };
            return Some(id);
        }
    }

    /// Makes tasks ready whose time has come.
    fn fire(&mut self, now: Instant) {
        while let Some((at, id)) = self.timers.first().copied().filter(|(at, _)| *at <= now) {
            self.timers.remove(&(at, id));
            let task = self.tasks.get_mut(&id).expect("it has a timer");
            task.state = State::Ready;
            let group = task.group;
            self.make_ready(id, group);
        }
    }

    /// A task ran, and is charged this much.
    pub fn ran(&mut self, id: TaskId, spent: Duration, next: Next) {
        let task = self.tasks.get_mut(&id).expect("it ran");
        let group = task.group;
        let known = self.groups.get_mut(&group).expect("it has a task");
        known.charge(spent);
        if known.ready.is_empty() {
            // A group with nothing to do saves no credit.
            known.credit = known.credit.min(self.quantum);
        }
        let notified = task.state == State::Running { notified: true };
        match next {
            Next::Done => {
                self.tasks.remove(&id);
                known.tasks -= 1;
                if known.tasks == 0 {
                    self.groups.remove(&group);
                }
            }
            Next::At(at) if !notified => {
                task.state = State::At(at);
                self.timers.insert((at, id));
            }
            Next::Idle if !notified => task.state = State::Idle,
            _ => {
                task.state = State::Ready;
                // With credit left, its only task has the rest of its turn.
                let keeps_turn = known.ready.is_empty() && known.credit > 0;
                self.make_ready(id, group);
                if keeps_turn {
                    self.turns.rotate_right(1);
                    self.groups.get_mut(&group).expect("it has a task").has_turn = true;
                }
            }
        }
    }

    /// Is any task ready? Tasks whose time has come are not counted before [`Queue::take`] was called.
    pub fn is_ready(&self) -> bool {
        !self.turns.is_empty()
    }

    /// Is any task but this one ready?
    pub fn is_ready_beside(&self, id: TaskId) -> bool {
        let ready = |group| self.groups.get(group).is_some_and(|group| group.ready.iter().any(|ready| *ready != id));
        self.turns.iter().any(ready)
    }

    /// When the next task's time comes.
    pub fn next_due(&self) -> Option<Instant> {
        self.timers.first().map(|(at, _)| *at)
    }

    /// Tasks of a group that are not over.
    pub fn of(&self, group: GroupId) -> Vec<TaskId> {
        if !self.groups.contains_key(&group) {
            return Vec::new();
        }
        self.tasks.iter().filter(|(_, task)| task.group == group).map(|(id, _)| *id).collect()
    }
}

#[cfg(test)]
mod tests;
