//! The stages of an upgrade: the effect of each event, death and delay in each stage. Pure: no I/O, no clock.
//!
//! Before: an operator asked for an engine of another program. After: one engine has all VMs: the successor, or the
//! engine that had them before.
//! Promise: a VM is given to an engine only when the other engine has closed it, is dead, or only serves its faults; in
//! the last case the new engine, too, only serves faults. Every stage ends: each has a deadline. `tests_upgrade.rs`
//! plays both engines against the real keeper, in any order of events.
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
//! A VM moves in steps, each when the step before is done: old does nothing for it but serve its faults; new opens it
//! and serves its faults as well; old closes it; new does all other work, too. The state file names both engines from
//! the second step to the third. If one of the two is too old for that, or old reports that it cannot (a write to the
//! VM's disk is overdue, say), old closes the VM, then new opens it, and no engine serves it in between.
//!
//! *Return*: new is killed. A VM that new had opened waits until the kernel says that nothing is left of new, as after
//! any engine's death (`fence`); then old opens the VM again, and recovery repairs its words. A VM that old was about
//! to close, or whose faults it only serves, old closes and opens again: it carries out the orders about a VM in turn.
//!
//! *Promote*: new becomes the keeper's engine. VMs of old are recovered as after any engine's death. So are VMs of
//! both, when nothing is left of old: new closes them first, because old may have died with pages locked.
//!
//! *Late* is counted in the keeper's own rounds: a keeper, or a host, that slept has waited for one round.

use std::time::{Duration, Instant};

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
    Done,
    Fails,
    OldDies,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Then {
    Go(Stage),
    Leave,
    /// The upgrade is over. Old continues, or an engine that is started from its program.
    Fail,
    Promote,
}

impl Stage {
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

    /// The longest time without progress of the stage. An engine needs seconds to examine, or to open, a VM of hundreds
    /// of GiB.
    pub const fn longest(self) -> Duration {
        match self {
            Self::Checking | Self::Moving => Duration::from_secs(20),
            Self::Resting | Self::Serving => Duration::from_secs(10),
            // The kernel may keep a thread of new for ever; operators hear of the VM that waits for it (`TELL_AFTER`).
            Self::Returning => Duration::from_secs(2),
        }
    }
}

/// The duration of a wait, in the keeper's own rounds.
#[derive(Debug)]
pub(crate) struct Deadline {
    waited: Duration,
    looked: Instant,
}

impl Deadline {
    /// The longest time that one round counts.
    const ROUND: Duration = Duration::from_secs(1);

    pub fn new(now: Instant) -> Self {
        Self { waited: Duration::ZERO, looked: now }
    }

    #[cfg(test)]
    pub fn age(&mut self, round: Duration) {
        self.waited += round;
    }

    /// Counts one more round. Returns whether the wait is over.
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
                // From any stage, after any failure, the end is two steps away.
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
