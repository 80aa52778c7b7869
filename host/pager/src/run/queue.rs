//! The queue of the pool, and of each set of userfaultfds: which task runs next. It has no thread, lock or clock.
//!
//! Before: tasks are notified, or their timers are due. After: [`Queue::take`] returns one, group by group.
//! Threads: the caller has a lock. Units: nanoseconds of running.
//! Promise: no notification is lost: a task that is notified during a run runs again. Between two runs of a group's
//! tasks, each other group with ready tasks runs for at most a quantum ([`QUANTUM`] by default) and the rest of one run
//! (deficit round robin).
//!
//! ```text
//! |           notified, or its timer is due      take
//! | Idle, At ───────────────────────────► Ready ─────────► Running ──► by `Next`; Ready if it was notified
//! ```

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Time that a group may run for in each turn.
pub const QUANTUM: Duration = Duration::from_millis(1);
/// Most debt of a group, in nanoseconds, so that a task with one long run need not wait for too long. It exceeds the
/// longest visit of a fault worker after which a userfaultfd gets a thread of its own.
const MOST_DEBT: i64 = 16_000_000;

/// The default shares, and the bounds of their effect: a turn is at most four quanta, and at least a quarter of one.
pub const USUAL_SHARES: u32 = 1000;
const FEWEST_SHARES: u32 = 250;
const MOST_SHARES: u32 = 4000;

/// The charge for a run of this length of a group with these shares.
pub fn charge(spent: Duration, shares: u32) -> Duration {
    spent * USUAL_SHARES / shares.clamp(FEWEST_SHARES, MOST_SHARES)
}

/// The next run of a task. A notified task runs at once in any case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// In its next turn: it has more to do.
    Again,
    /// At this time.
    At(Instant),
    /// When it is notified.
    Idle,
    /// Never: it is done.
    Done,
}

impl Next {
    /// After a pause that begins at `now`; [`Next::Again`] if the pause is zero.
    pub fn after(now: Instant, pause: Duration) -> Self {
        if pause.is_zero() { Self::Again } else { Self::At(now + pause) }
    }

    /// After a pause of about this length, at a time common to tasks with such pauses: one wake-up serves them all.
    pub fn about(now: Instant, pause: Duration) -> Self {
        /// Intervals of the common times, for long and for short pauses.
        const LONG_GRAIN: Duration = Duration::from_secs(1);
        const GRAIN: Duration = Duration::from_millis(100);
        static FIRST: OnceLock<Instant> = OnceLock::new();
        let first = *FIRST.get_or_init(|| now);
        let grain = if pause < LONG_GRAIN { GRAIN } else { LONG_GRAIN };
        // Rounded down: a task that runs at a common time, or a little later, is due at the next one.
        let due = (now + pause).saturating_duration_since(first);
        let grains = (due.as_nanos() / grain.as_nanos()).max(1);
        let at = first + grain * u32::try_from(grains).unwrap_or(u32::MAX);
        Self::At(if at > now { at } else { at + grain })
    }
}

/// ID of a task in a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TaskId(u64);

impl TaskId {
    /// For a task that may move to other queues: the caller ensures that the number is unique.
    pub const fn new(number: u64) -> Self {
        Self(number)
    }

    /// Its number.
    pub const fn number(self) -> u64 {
        self.0
    }
}

/// ID of a group of tasks that share their turns: those of one VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GroupId(u64);

/// Hasher for IDs, which are counted up.
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

/// Map from IDs of tasks or groups.
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
    /// Time that it may still run before other groups have their turn, in nanoseconds; negative: a debt.
    credit: i64,
    /// It has its turn, and has got its quantum.
    has_turn: bool,
}

impl Group {
    fn charge(&mut self, spent: Duration) {
        let spent = i64::try_from(spent.as_nanos()).unwrap_or(i64::MAX);
        self.credit = self.credit.saturating_sub(spent).max(-MOST_DEBT);
    }
}

/// Tasks by group, with their turns and timers.
#[derive(Debug)]
pub struct Queue {
    quantum: i64,
    next: u64,
    tasks: ById<TaskId, Task>,
    groups: ById<GroupId, Group>,
    /// Groups with ready tasks; the first one has the turn.
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

    /// A new group. It is forgotten when its last task is done.
    pub fn add_group(&mut self) -> GroupId {
        self.next += 1;
        GroupId(self.next)
    }

    /// Adds a task, which is ready.
    pub fn add(&mut self, group: GroupId) -> TaskId {
        self.next += 1;
        let id = TaskId(self.next);
        self.add_as(id, group);
        id
    }

    /// Adds a task under the caller's IDs; it is ready.
    pub fn add_as(&mut self, id: TaskId, group: GroupId) {
        self.tasks.insert(id, Task { group, state: State::Idle });
        self.groups.entry(group).or_default().tasks += 1;
        self.notify(id);
    }

    /// Removes a task that does not run. Returns the debt of its group if it was the group's last task.
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

    /// Adds to a group's debt, which it brings from another queue.
    pub fn owe(&mut self, group: GroupId, owed: Duration) {
        if let Some(group) = self.groups.get_mut(&group) {
            group.charge(owed);
        }
    }

    /// Notifies a task. Returns whether that made it ready. No effect if it is done.
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

    /// Takes the task whose turn it is; it runs until [`Queue::ran`].
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

    fn fire(&mut self, now: Instant) {
        while let Some((at, id)) = self.timers.first().copied().filter(|(at, _)| *at <= now) {
            self.timers.remove(&(at, id));
            let task = self.tasks.get_mut(&id).expect("it has a timer");
            task.state = State::Ready;
            let group = task.group;
            self.make_ready(id, group);
        }
    }

    /// Ends a run, which is charged with `spent`.
    pub fn ran(&mut self, id: TaskId, spent: Duration, next: Next) {
        let task = self.tasks.get_mut(&id).expect("it ran");
        let group = task.group;
        let known = self.groups.get_mut(&group).expect("it has a task");
        known.charge(spent);
        if known.ready.is_empty() {
            // A group without ready tasks saves no credit.
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
                // With credit left, the only task of a group keeps its turn.
                let keeps_turn = known.ready.is_empty() && known.credit > 0;
                self.make_ready(id, group);
                if keeps_turn {
                    self.turns.rotate_right(1);
                    self.groups.get_mut(&group).expect("it has a task").has_turn = true;
                }
            }
        }
    }

    /// Returns whether a task is ready. Timers that became due since [`Queue::take`] do not count.
    pub fn is_ready(&self) -> bool {
        !self.turns.is_empty()
    }

    /// Returns whether another task than this one is ready.
    pub fn is_ready_beside(&self, id: TaskId) -> bool {
        let ready = |group| self.groups.get(group).is_some_and(|group| group.ready.iter().any(|ready| *ready != id));
        self.turns.iter().any(ready)
    }

    /// Time of the first timer.
    pub fn next_due(&self) -> Option<Instant> {
        self.timers.first().map(|(at, _)| *at)
    }

    /// Tasks of a group that are not done.
    pub fn of(&self, group: GroupId) -> Vec<TaskId> {
        if !self.groups.contains_key(&group) {
            return Vec::new();
        }
        self.tasks.iter().filter(|(_, task)| task.group == group).map(|(id, _)| *id).collect()
    }
}

#[cfg(test)]
mod tests;
