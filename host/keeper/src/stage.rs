//! The stages of an upgrade: what happens in each, and what each death and each delay leads to. Pure: no I/O, no clock.
//!
//! Before: an operator asked for an engine of another program. After: one engine has all VMs: the successor, or the one
//! that had them before.
//! Promise: a VM is given to an engine only when the other one has closed it, is dead, or only serves its faults, and
//! in that case the new one does no more either. Every stage ends: each has a deadline. `tests_upgrade.rs` plays both
//! engines against the real keeper, in any order of events.
//!
//! *Old* is the engine that served when the upgrade began, *new* its successor.
//!
//! | Stage | New | Old | VMs | goes on when |
//! |---|---|---|---|---|
//! | Checking | rests, looks at each VM, reads only | serves, decides, answers | old | new has looked at all |
//! | Resting | rests | serves; stops deciding and answering | old | old says that it rests |
//! | Moving | opens the VMs it is given | gives up the VMs it is told to | each: old, both, new | new has all |
//! | Serving | begins to decide and answer | has no VM | new | new says that it serves: old leaves |
//! | Returning | is dead | gets its VMs again, decides, answers | old | all are given back |
//!
//! | Happens | Checking | Resting | Moving | Serving | Returning |
//! |---|---|---|---|---|---|
//! | new refuses, dies, is late | failed | return | return | return | (dead already) |
//! | old is late | - | return | return | - | failed: its silence ends it as always |
//! | old dies | failed; new ends; start old's program | the same | promote | promote | failed; start old's program |
//! | a VM comes | old has it, unchecked | old | new has it | new | old |
//! | a VM comes back whose connection was cut | old | old | its engine; old: then moved | the same | old |
//! | a VM goes | its engine closes it | the same | the same, in turn | new | old |
//! | the keeper dies | new ends: it has no VM | the same | each serves what it has | new serves | old serves |
//!
//! A VM moves in steps, each when the one before is done: old does nothing for it but serve its faults; new opens it
//! and serves its faults as well; old closes it; new does all the rest. The state file names both engines from the
//! second step to the third. If one of the two is too old for that, or old reports that it cannot (a write to the VM's
//! disk is overdue, say), old closes the VM, then new opens it, and no engine serves it in between.
//!
//! *Return*: new is killed. VMs that it had opened stay until the kernel says that nothing is left of new, as for any
//! engine that dies (`fence`); then old opens each again, and recovery repairs its words. VMs that old was about to
//! close, or whose faults it only serves, it closes and opens again: it carries out the orders about a VM in turn.
//! *Promote*: new is the keeper's engine from now on. VMs of old are recovered as after any engine's death; so are VMs
//! of both, which new closes first, when nothing is left of old: old may have died with pages locked.
//! *Late* is counted in the keeper's own rounds: a keeper, or a host, that slept has waited for one round.

use std::time::{Duration, Instant};

/// See the tables above. The end of an upgrade is no stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    Checking,
    Resting,
    Moving,
    Serving,
    Returning,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Happens {
    /// The condition that the stage waits for.
    Done,
    /// New refused, died, or was late; or old was late.
    Fails,
    /// Old died.
    OldDies,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Then {
    Go(Stage),
    /// New serves all: old leaves.
    Leave,
    /// The upgrade is over, and old goes on, or an engine that is started from its program.
    Fail,
    /// New replaces old, which is dead.
    Promote,
}

impl Stage {
    /// The tables above.
    pub fn then(self, happens: Happens) -> Then {
        use Happens::{Done, Fails, OldDies};
        use Stage::{Checking, Moving, Resting, Returning, Serving};
        match (self, happens) {
            (Checking, Done) => Then::Go(Resting),
            (Resting, Done) => Then::Go(Moving),
            (Moving, Done) => Then::Go(Serving),
            (Serving, Done) => Then::Leave,
            (Checking, Fails | OldDies) | (Resting, OldDies) | (Returning, _) => Then::Fail,
            (Resting | Moving | Serving, Fails) => Then::Go(Returning),
            (Moving | Serving, OldDies) => Then::Promote,
        }
    }

    /// The longest time without progress of the stage. An engine looks through, or opens, a VM of hundreds of GiB in
    /// seconds.
    pub const fn longest(self) -> Duration {
        match self {
            Self::Checking | Self::Moving => Duration::from_secs(20),
            Self::Resting | Self::Serving => Duration::from_secs(10),
            // The kernel may keep a thread of new for ever; operators hear of such a VM (`TELL_AFTER`).
            Self::Returning => Duration::from_secs(2),
        }
    }
}

/// How long something has been waited for, in the keeper's own rounds.
#[derive(Debug)]
pub(crate) struct Deadline {
    waited: Duration,
    looked: Instant,
}

impl Deadline {
    /// The longest that one round counts.
    const ROUND: Duration = Duration::from_secs(1);

    pub fn new(now: Instant) -> Self {
        Self { waited: Duration::ZERO, looked: now }
    }

    /// As if another round had passed.
    #[cfg(test)]
    pub fn age(&mut self, round: Duration) {
        self.waited += round;
    }

    /// Count one more round. Returns whether the wait is over.
    pub fn is_over(&mut self, now: Instant, at_most: Duration) -> bool {
        self.waited += now.saturating_duration_since(self.looked).min(Self::ROUND);
        self.looked = now;
        self.waited > at_most
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Stage; 5] = [Stage::Checking, Stage::Resting, Stage::Moving, Stage::Serving, Stage::Returning];

    #[test]
    fn every_stage_ends_whatever_happens_and_a_failure_never_leads_on() {
        for stage in ALL {
            for happens in [Happens::Done, Happens::Fails, Happens::OldDies] {
                // From anywhere, after any failure, the end is two steps away.
                match stage.then(happens) {
                    Then::Go(next) if happens == Happens::Done => assert_ne!(next, stage),
                    Then::Go(next) => assert_eq!(next, Stage::Returning),
                    Then::Leave => assert_eq!((stage, happens), (Stage::Serving, Happens::Done)),
                    Then::Fail | Then::Promote => {}
                }
            }
        }
        let path: Vec<_> = std::iter::successors(Some(Stage::Checking), |stage| match stage.then(Happens::Done) {
            Then::Go(next) => Some(next),
            _ => None,
        })
        .collect();
        assert_eq!(path, &ALL[..4]);
    }

    #[test]
    fn a_keeper_that_slept_has_waited_for_one_round() {
        let start = Instant::now();
        let mut deadline = Deadline::new(start);
        assert!(!deadline.is_over(start + Duration::from_secs(3600), Duration::from_secs(2)));
        let after = |s: u64| start + Duration::from_secs(3600 + s);
        assert!(!deadline.is_over(after(1), Duration::from_secs(2)));
        assert!(deadline.is_over(after(2), Duration::from_secs(2)));
    }
}
