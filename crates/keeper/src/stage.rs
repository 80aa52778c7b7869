//! The stages of an upgrade: what happens in each, and what each death and each delay leads to. Pure: no I/O, no clock.
//!
//! Before: an operator asked for an engine of another program. After: one engine has all VMs: the successor, or the one
//! that had them before.
//! Promise: a VM is given to an engine only when the other one has closed it, is dead, or does nothing for it but serve
//! faults, and then the new one does no more than that either. There is no stage without an end: each has a deadline.
//! `tests_upgrade.rs` plays both engines against the real keeper, in any order of events.
//!
//! *Old* is the engine that served when the upgrade began, *new* its successor.
//!
//! | Stage | New | Old | VMs | goes on when |
//! |---|---|---|---|---|
//! | Checking | rests, looks at each VM, reads only | serves, decides, answers | old | new has looked at all |
//! | Resting | rests | serves; stops deciding and answering | old | old says that it rests |
//! | Moving | opens what it is given | lets go what it is told | each: old, both, new | new has all |
//! | Serving | begins to decide and answer | has no VM | new | new says that it serves: old leaves |
//! | Returning | is dead | gets its VMs again, decides, answers | old | all are given back |
//!
//! | Happens | Checking | Resting | Moving | Serving | Returning |
//! |---|---|---|---|---|---|
//! | new refuses, dies, is late | failed | return | return | return | (dead already) |
//! | old is late | - | return | return | - | failed: its silence ends it as always |
//! | old dies | failed; new ends; start old's program | the same | promote | promote | failed; start old's program |
//! | a VM comes | old has it, unchecked | old | new has it | new | old |
//! | a VM comes back whose connection was cut | old | old | who had it; old: then moved | the same | old |
//! | a VM goes | its engine closes it | the same | the same, in turn | new | old |
//! | the keeper dies | new ends: it has no VM | the same | each serves what it has | new serves | old serves |
//!
//! A VM moves in steps, each when the one before is done: old does nothing for it but serve its faults; new opens it
//! and serves its faults as well; old closes it; new does all the rest. The state file names both engines from the
//! second step to the third. Where one of the two is too old for that, or old says that it cannot (a write to the VM's
//! disk is overdue, say), old closes the VM, then new opens it, and nobody serves it in between.
//!
//! *Return*: new is killed. Of what it had opened nothing moves until the kernel says that nothing is left of it, as
//! for any engine that dies (`fence`); then old opens the VM again, and recovery mends what new left. What old was
//! about to close, or serves the faults of and no more, it closes and opens again: it carries out the orders about a VM
//! in turn.
//! *Promote*: new is the keeper's engine from now on. What old had is recovered as after any engine's death; so is what
//! both had, which new closes first, when nothing is left of old: it may have died with pages locked.
//! *Late* is counted in the keeper's own rounds: a keeper, or a host, that slept has waited for one round.

use std::time::{Duration, Instant};

/// See the tables above. The end of an upgrade is no stage: there is none then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    Checking,
    Resting,
    Moving,
    Serving,
    Returning,
}

/// What happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Happens {
    /// What the stage waits for.
    Done,
    /// New refused, died, or was late; or old was late.
    Fails,
    /// Old died.
    OldDies,
}

/// What follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Then {
    /// This stage begins.
    Go(Stage),
    /// New serves all: old leaves.
    Leave,
    /// The upgrade is over, and old goes on, or what is started from its program.
    Fail,
    /// New takes the place of old, which is dead.
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

    /// How long may pass without anything that brings the stage nearer to its end. A VM of hundreds of GiB is looked
    /// through, or opened, in seconds.
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

    /// One more round. Returns whether it has been waited for so long.
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
                // From anywhere, by anything that goes wrong, the end is two steps away.
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
