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
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn a_task_runs_when_it_is_notified_or_its_time_comes_and_not_before() {
        let mut queue = Queue::default();
        let now = Instant::now();
        let group = queue.add_group();
        let task = queue.add(group);
        assert_eq!(queue.take(now), Some(task), "a new task is ready");
        assert_eq!(queue.take(now), None);
        queue.ran(task, MS, Next::At(now + 5 * MS));
        assert_eq!((queue.next_due(), queue.take(now + 4 * MS)), (Some(now + 5 * MS), None));
        assert_eq!(queue.take(now + 5 * MS), Some(task));
        queue.ran(task, MS, Next::At(now + 50 * MS));
        assert!(queue.notify(task) && !queue.notify(task) && queue.next_due().is_none());
        assert_eq!(queue.take(now), Some(task));
        assert!(!queue.notify(task), "it runs");
        queue.ran(task, MS, Next::Idle);
        assert_eq!(queue.take(now), Some(task), "it was notified while it ran");
        queue.ran(task, MS, Next::Done);
        assert!(!queue.notify(task) && queue.take(now).is_none() && queue.of(group).is_empty());
        assert!(queue.groups.is_empty() && queue.tasks.is_empty());
    }

    #[test]
    fn a_group_with_many_ready_tasks_runs_no_longer_than_one_with_a_single_task() {
        let mut queue = Queue::default();
        let now = Instant::now();
        let (flood, single) = (queue.add_group(), queue.add_group());
        let many: Vec<TaskId> = (0..50).map(|_| queue.add(flood)).collect();
        let one = queue.add(single);
        let mut ran = [0; 2];
        for _ in 0..1000 {
            let task = queue.take(now).expect("all have more to do");
            assert!(task == one || many.contains(&task));
            ran[usize::from(task == one)] += 1;
            queue.ran(task, MS, Next::Again);
        }
        assert!((499..=501).contains(&ran[1]), "{ran:?}");
    }

    #[test]
    fn a_task_of_short_runs_has_as_much_time_as_one_of_long_ones() {
        let mut queue = Queue::default();
        let now = Instant::now();
        let tasks = [queue.add_group(), queue.add_group()].map(|group| queue.add(group));
        let runs = [MS / 20, 2 * MS];
        let mut spent = [Duration::ZERO; 2];
        for _ in 0..2000 {
            let task = queue.take(now).expect("both have more to do");
            let at = usize::from(task == tasks[1]);
            spent[at] += runs[at];
            queue.ran(task, runs[at], Next::Again);
            assert!(spent[0].abs_diff(spent[1]) <= 4 * MS, "{spent:?}");
        }
    }

    #[test]
    fn a_task_that_moves_between_queues_takes_its_debt_along() {
        let now = Instant::now();
        let (mover, others) = (TaskId::new(1), [TaskId::new(2), TaskId::new(3)]);
        let mut queues = others.map(|other| {
            let mut queue = Queue::new(MS / 10);
            queue.add_as(other, GroupId(other.number()));
            queue
        });
        queues[0].add_as(mover, GroupId(1));
        let (mut at, mut spent) = (0, [Duration::ZERO; 2]);
        for _ in 0..20_000 {
            let task = queues[at].take(now).expect("the other always has more to do");
            let ran = if task == mover { 4 * MS } else { MS / 10 };
            spent[usize::from(task == mover)] += ran;
            queues[at].ran(task, ran, Next::Again);
            if task == mover {
                let owed = queues[at].remove(mover);
                at = 1 - at;
                queues[at].add_as(mover, GroupId(1));
                queues[at].owe(GroupId(1), owed);
            }
        }
        // It always competes with one other, and each of them has half.
        assert!(spent[0].abs_diff(spent[1]) <= 16 * MS, "{spent:?}");
    }

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Notify(usize),
        Run { next: u8, us: u64, notify: bool },
        Pass(u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (0..6usize).prop_map(Step::Notify),
            (0..3u8, 0..5000u64, any::<bool>()).prop_map(|(next, us, notify)| Step::Run { next, us, notify }),
            (0..3000u64).prop_map(Step::Pass),
        ]
    }

    proptest! {
        /// In any sequence, a task that was notified, or whose time came, is taken, and no other.
        #[test]
        fn no_notification_and_no_timer_is_lost(steps in proptest::collection::vec(step(), 1..200)) {
            let mut queue = Queue::default();
            let mut now = Instant::now();
            let groups = [queue.add_group(), queue.add_group(), queue.add_group()];
            let tasks: Vec<TaskId> = (0..6).map(|at| queue.add(groups[at % 3])).collect();
            // When each is to run, at the latest.
            let mut due: Vec<Option<Instant>> = vec![Some(now); 6];
            for step in steps {
                match step {
                    Step::Notify(at) => {
                        queue.notify(tasks[at]);
                        due[at] = Some(due[at].map_or(now, |due| due.min(now)));
                    }
                    Step::Pass(us) => now += Duration::from_micros(us),
                    Step::Run { next, us, notify } => {
                        let wanted = due.iter().any(|due| due.is_some_and(|due| due <= now));
                        let taken = queue.take(now);
                        prop_assert_eq!(taken.is_some(), wanted);
                        let Some(task) = taken else { continue };
                        let at = tasks.iter().position(|known| *known == task).expect("one of them");
                        prop_assert!(due[at].take().is_some_and(|due| due <= now));
                        if notify {
                            queue.notify(task);
                        }
                        let later = now + Duration::from_micros(us);
                        let next = [Next::Again, Next::At(later), Next::Idle][usize::from(next)];
                        queue.ran(task, Duration::from_micros(us), next);
                        due[at] = match next {
                            Next::Again => Some(now),
                            _ if notify => Some(now),
                            Next::At(at) => Some(at),
                            _ => None,
                        };
                    }
                }
            }
        }

        /// Groups that always have something to do run for the same time, but for a quantum and the longest run.
        #[test]
        fn turns_are_fair_whatever_a_run_takes(
            runs in proptest::collection::vec((1..4000u64, 1..4000u64, 1..4000u64), 50..200),
        ) {
            let mut queue = Queue::default();
            let now = Instant::now();
            let groups = [queue.add_group(), queue.add_group(), queue.add_group()];
            let tasks = groups.map(|group| queue.add(group));
            let mut spent = [0u64; 3];
            for (a, b, c) in runs {
                let task = queue.take(now).expect("they always have something to do");
                let at = tasks.iter().position(|known| *known == task).expect("one of them");
                let us = [a, b, c][at];
                spent[at] += us;
                queue.ran(task, Duration::from_micros(us), Next::Again);
                let (least, most) = (spent.iter().min().expect("three"), spent.iter().max().expect("three"));
                prop_assert!(most - least <= 2 * 4000 + 2000, "{spent:?}");
            }
        }

        /// A task that becomes ready runs after a quantum and one run of each other group; a removed one never runs.
        #[test]
        fn one_that_becomes_ready_waits_for_one_turn_of_each_other_group(
            runs in proptest::collection::vec(1..400u64, 50..300), others in 1..8u64, every in 1..20usize,
        ) {
            const QUANTUM_US: u64 = 100;
            const LONGEST_US: u64 = 400;
            let mut queue = Queue::new(Duration::from_micros(QUANTUM_US));
            let now = Instant::now();
            let id = TaskId::new;
            for other in 1..=others {
                queue.add_as(id(other), GroupId(other));
                queue.add_as(id(100 + other), GroupId(other));
            }
            queue.add_as(id(50), GroupId(50));
            queue.add_as(id(60), GroupId(1));
            queue.remove(id(60));
            let mut waited = Some(0);
            for (step, us) in runs.into_iter().enumerate() {
                let task = queue.take(now).expect("most always have something to do");
                prop_assert!(task != id(60));
                if task == id(50) {
                    waited = None;
                    queue.ran(task, Duration::from_micros(us.min(QUANTUM_US)), Next::Idle);
                } else {
                    waited = waited.map(|waited| waited + us);
                    let most = others * (QUANTUM_US + LONGEST_US);
                    prop_assert!(waited.is_none_or(|waited| waited <= most), "{waited:?}");
                    queue.ran(task, Duration::from_micros(us), Next::Again);
                }
                if step % every == 0 && queue.notify(id(50)) {
                    waited = Some(0);
                }
            }
        }
    }
}
