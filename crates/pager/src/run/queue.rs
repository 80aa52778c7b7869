//! The queue of the pool: which task runs next. No thread, no lock, no clock.
//!
//! Before: tasks are notified, or their time comes. After: [`Queue::take`] returns one, group by group.
//! Threads: the caller has a lock. Units: nanoseconds of running.
//! Promise: a notification is never lost: a task that is notified while it runs, runs again. Between two runs of a
//! group's tasks each other group that has ready tasks runs for at most [`QUANTUM`] and the rest of one run (deficit
//! round robin).
//!
//! ```text
//!         notified, or its time has come       take
//! Idle, At ───────────────────────────► Ready ─────────► Running ──► by `Next`, or Ready if notified meanwhile
//! ```

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// What a group may run for each time its turn comes.
pub const QUANTUM: Duration = Duration::from_millis(1);
/// A group owes at most this many quanta: a task that ran for long in one go does not wait for ever.
const MOST_DEBT: i64 = 16;

/// When a task runs again. If it is notified, in any case at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// As soon as it is its turn: it has more to do.
    Again,
    /// Then.
    At(Instant),
    /// When it is notified.
    Idle,
    /// Never: it is over.
    Done,
}

impl Next {
    /// After a pause that began at `now`; without one if it is zero.
    pub fn after(now: Instant, pause: Duration) -> Self {
        if pause.is_zero() { Self::Again } else { Self::At(now + pause) }
    }

    /// After a pause of about this length, at the same moment as the others that do not care: one wake-up serves all.
    pub fn about(now: Instant, pause: Duration) -> Self {
        /// Of the moments.
        const GRAIN: Duration = Duration::from_millis(100);
        static FIRST: OnceLock<Instant> = OnceLock::new();
        let first = *FIRST.get_or_init(|| now);
        let grains = (now + pause).saturating_duration_since(first).as_nanos().div_ceil(GRAIN.as_nanos());
        Self::At(first + GRAIN * u32::try_from(grains).unwrap_or(u32::MAX))
    }
}

/// A task of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TaskId(u64);

/// Tasks that share their turns: those of one VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GroupId(u64);

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
    /// What it may still run before others have their turn, in nanoseconds. Below zero: what it ran too long.
    credit: i64,
    /// It has its turn, and was given its quantum.
    has_turn: bool,
}

/// See above.
#[derive(Debug, Default)]
pub struct Queue {
    next: u64,
    tasks: HashMap<TaskId, Task>,
    groups: HashMap<GroupId, Group>,
    /// Groups with ready tasks; the first one has its turn.
    turns: VecDeque<GroupId>,
    timers: BTreeSet<(Instant, TaskId)>,
}

impl Queue {
    /// A group without tasks. It is forgotten when the last one it had is over.
    pub fn add_group(&mut self) -> GroupId {
        self.next += 1;
        GroupId(self.next)
    }

    /// A new task, which is ready.
    pub fn add(&mut self, group: GroupId) -> TaskId {
        self.next += 1;
        let id = TaskId(self.next);
        self.tasks.insert(id, Task { group, state: State::Idle });
        self.groups.entry(group).or_default().tasks += 1;
        self.notify(id);
        id
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

    /// The task that is to run now; it runs until [`Queue::ran`].
    pub fn take(&mut self, now: Instant) -> Option<TaskId> {
        self.fire(now);
        loop {
            let turn = *self.turns.front()?;
            let group = self.groups.get_mut(&turn).expect("it has a task");
            if !std::mem::replace(&mut group.has_turn, true) {
                group.credit += QUANTUM.as_nanos() as i64;
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

    /// Those whose time has come are ready.
    fn fire(&mut self, now: Instant) {
        while let Some((at, id)) = self.timers.first().copied().filter(|(at, _)| *at <= now) {
            self.timers.remove(&(at, id));
            let task = self.tasks.get_mut(&id).expect("it has a timer");
            task.state = State::Ready;
            let group = task.group;
            self.make_ready(id, group);
        }
    }

    /// A task ran for this long.
    pub fn ran(&mut self, id: TaskId, spent: Duration, next: Next) {
        let task = self.tasks.get_mut(&id).expect("it ran");
        let group = task.group;
        let known = self.groups.get_mut(&group).expect("it has a task");
        let quantum = QUANTUM.as_nanos() as i64;
        let spent = i64::try_from(spent.as_nanos()).unwrap_or(i64::MAX);
        known.credit = known.credit.saturating_sub(spent).max(-MOST_DEBT * quantum);
        if known.ready.is_empty() {
            // Who has nothing to do saves nothing.
            known.credit = known.credit.min(quantum);
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
                self.make_ready(id, group);
            }
        }
    }

    /// Is any task ready? Those whose time has come are not counted before [`Queue::take`] was called.
    pub fn is_ready(&self) -> bool {
        !self.turns.is_empty()
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
        /// Whatever happens: what was notified, or whose time came, is taken, and nothing else is.
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
    }
}
