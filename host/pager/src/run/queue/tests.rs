//! Turns, notifications and timers of the queue.

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
    // It always competes with one other task, and each gets half of the time.
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
    #[test]
    fn no_notification_and_no_timer_is_lost(steps in proptest::collection::vec(step(), 1..200)) {
        let mut queue = Queue::default();
        let mut now = Instant::now();
        let groups = [queue.add_group(), queue.add_group(), queue.add_group()];
        let tasks: Vec<TaskId> = (0..6).map(|at| queue.add(groups[at % 3])).collect();
        // Latest time of each task's next run.
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

    /// Groups that always have work run for equal times, except for a quantum and the longest run.
    #[test]
    fn turns_are_fair_whatever_the_lengths_of_runs(
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

    /// A ready task waits for a quantum and one run of each other group. A removed task never runs.
    #[test]
    fn a_task_that_becomes_ready_waits_for_one_turn_of_each_other_group(
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
