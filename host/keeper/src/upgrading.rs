//! The keeper's upgrades: the one under way, and the state of the last one for operators.
//!
//! Before: `upgrade` begins an upgrade. After: it goes from stage to stage, and ends. Threads: the keeper's one.
//! Promise: only the tables of [`crate::stage`] lead from one stage to another, and each stage has its own deadline.

use std::collections::{HashMap, HashSet};
use std::time::Instant;

use ballast_base::wire::VmId;
use ballast_handover::failure::Failure;
use ballast_handover::orders::Order;
use ballast_handover::upgrading::{Stage as Shown, Upgrading};

use crate::program::Program;
use crate::stage::{Deadline, Happens, Stage, Then};

/// The subject of an order of the upgrade.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Asked {
    Begun,
    Check(VmId),
    Rest,
    /// The old engine must only serve the VM's faults.
    ServeFaults(VmId),
    Part(VmId),
    Opened(VmId),
    /// The old engine must close the VM, which the new one serves as well.
    Leave(VmId),
}

#[derive(Default)]
pub(crate) struct Upgrades {
    under_way: Option<Upgrade>,
    last: Upgrading,
}

struct Upgrade {
    program: Program,
    stage: Stage,
    begun: Instant,
    deadline: Deadline,
    settings: Vec<u8>,
    asked: HashMap<u64, Asked>,
    /// VMs that the new engine opens, each with the time since when no engine serves it.
    opening: HashMap<VmId, Instant>,
    /// VMs that two engines serve, each with the time since when they do.
    both: HashMap<VmId, Instant>,
    incomplete: HashSet<VmId>,
}

impl Upgrades {
    /// No upgrade is under way, and this was the last one.
    pub fn after(last: Upgrading) -> Self {
        Self { under_way: None, last }
    }

    /// The state of the upgrade under way, or of the last one.
    pub fn last(&self) -> &Upgrading {
        &self.last
    }

    pub fn stage(&self) -> Option<Stage> {
        self.under_way.as_ref().map(|upgrade| upgrade.stage)
    }

    pub fn program(&self) -> Option<&Program> {
        self.under_way.as_ref().map(|upgrade| &upgrade.program)
    }

    pub fn is_with(&self, settings: &[u8]) -> bool {
        self.under_way.as_ref().is_some_and(|upgrade| upgrade.settings == settings)
    }

    pub fn begin(&mut self, program: Program, settings: Vec<u8>, vms: u32) {
        self.last = Upgrading {
            number: self.last.number + 1,
            program: program.path().display().to_string(),
            stage: Shown::Checking,
            vms,
            ..Upgrading::default()
        };
        let now = Instant::now();
        self.under_way = Some(Upgrade {
            program,
            stage: Stage::Checking,
            begun: now,
            deadline: Deadline::new(now),
            settings,
            asked: HashMap::new(),
            opening: HashMap::new(),
            both: HashMap::new(),
            incomplete: HashSet::new(),
        });
    }

    /// The order that tells engines the state of the upgrade.
    pub fn show(&mut self) -> Order {
        if let Some(upgrade) = &self.under_way {
            self.last.took_us = micros_since(upgrade.begun);
        }
        Order::Upgrading(self.last.clone())
    }

    /// Handles an event of the stage. Returns the stage or the end to which it leads.
    pub fn then(&mut self, happens: Happens, why: Option<&str>) -> Option<Then> {
        let upgrade = self.under_way.as_mut()?;
        upgrade.deadline = Deadline::new(Instant::now());
        if let Some(why) = why.filter(|_| self.last.message.is_empty()) {
            self.last.message = why.into();
        }
        let then = upgrade.stage.then(happens);
        if let Then::Go(stage) = then {
            tracing::debug!(?stage, "the upgrade goes on");
            upgrade.stage = stage;
            match stage {
                Stage::Moving => self.last.stage = Shown::Switching,
                Stage::Returning => {
                    self.last.stage = Shown::Returning;
                    upgrade.asked.clear();
                    // The old engine has these VMs again: its errors count.
                    upgrade.opening.clear();
                }
                Stage::Checking | Stage::Resting | Stage::Serving => {}
            }
        }
        Some(then)
    }

    /// Ends the upgrade. Returns its program.
    pub fn end(&mut self) -> Option<Program> {
        self.show();
        self.under_way.take().map(|upgrade| upgrade.program)
    }

    /// Ends the upgrade without its engine.
    pub fn fail(&mut self) {
        self.end();
        self.last.stage = Shown::Failed;
    }

    /// The keeper has become the program of the last upgrade, or stays what it was.
    pub fn finish(&mut self, keeper: Result<(), Failure>) {
        self.last.keeper = Some(keeper);
        self.last.stage = Shown::Done;
    }

    pub fn ask(&mut self, seq: u64, what: Asked) {
        if let Some(upgrade) = &mut self.under_way {
            upgrade.asked.insert(seq, what);
        }
    }

    pub fn has_all_answers(&self) -> bool {
        self.under_way.as_ref().is_some_and(|upgrade| upgrade.asked.is_empty())
    }

    /// The order with this number was replied to. Returns its subject, if it is an order of the upgrade.
    pub fn answered(&mut self, seq: u64) -> Option<Asked> {
        let upgrade = self.under_way.as_mut()?;
        let asked = upgrade.asked.remove(&seq)?;
        upgrade.deadline = Deadline::new(Instant::now());
        Some(asked)
    }

    /// The subject that is late, if any, and its VM, if it has one.
    pub fn late(&mut self, now: Instant) -> Option<(Option<VmId>, &'static str)> {
        let upgrade = self.under_way.as_mut()?;
        if !upgrade.deadline.is_over(now, upgrade.stage.longest()) {
            return None;
        }
        let waits = upgrade.asked.values().filter_map(|asked| match asked {
            Asked::ServeFaults(vm) => Some((*vm, "was not let go by the engine that serves it")),
            Asked::Part(vm) | Asked::Leave(vm) => Some((*vm, "was not closed by the engine that serves it")),
            Asked::Opened(vm) => Some((*vm, "was not opened by the new engine")),
            _ => None,
        });
        Some(match upgrade.stage {
            Stage::Checking => (None, "it did not look through all VMs"),
            Stage::Resting => (None, "the engine that serves did not come to rest"),
            Stage::Serving => (None, "it has all VMs and did not begin to serve"),
            Stage::Moving | Stage::Returning => {
                waits.min_by_key(|(vm, _)| vm.0).map_or((None, "no VM moved"), |(vm, what)| (Some(vm), what))
            }
        })
    }

    pub fn checked(&mut self) {
        self.last.checked += 1;
    }

    /// The new engine has the order to open this VM, which no engine serves since then.
    pub fn opens(&mut self, vm: VmId, since: Instant) {
        if let Some(upgrade) = &mut self.under_way {
            upgrade.opening.insert(vm, since);
        }
    }

    /// VMs that the new engine opens and that no engine serves.
    pub fn opening(&self) -> impl Iterator<Item = VmId> {
        self.under_way.iter().flat_map(|upgrade| upgrade.opening.keys().copied())
    }

    /// The new engine has opened this VM, or could not. Returns since when no engine served it.
    pub fn opened(&mut self, vm: VmId) -> Option<Instant> {
        self.under_way.as_mut()?.opening.remove(&vm)
    }

    /// The old engine could not serve all processes of this VM, so the new one need not.
    pub fn set_incomplete(&mut self, vm: VmId) {
        if let Some(upgrade) = &mut self.under_way {
            upgrade.incomplete.insert(vm);
        }
    }

    pub fn is_whole(&self, vm: VmId) -> bool {
        self.under_way.as_ref().is_some_and(|upgrade| !upgrade.incomplete.contains(&vm))
    }

    pub fn shares(&mut self, vm: VmId) {
        if let Some(upgrade) = &mut self.under_way {
            upgrade.both.insert(vm, Instant::now());
        }
    }

    /// Counts a VM that the new engine has. `since`: when the VM lost its last engine.
    pub fn moved(&mut self, since: Option<Instant>) {
        self.last.moved += 1;
        self.last.longest_gap_us = self.last.longest_gap_us.max(since.map_or(0, micros_since));
    }

    /// The new engine has this VM, which both served, alone.
    pub fn left(&mut self, vm: VmId) {
        let since = self.under_way.as_mut().and_then(|upgrade| upgrade.both.remove(&vm));
        self.last.moved += 1;
        self.last.longest_switch_us = self.last.longest_switch_us.max(since.map_or(0, micros_since));
    }
}

fn micros_since(since: Instant) -> u64 {
    since.elapsed().as_micros() as u64
}

#[cfg(test)]
impl Upgrades {
    /// Makes the wait of the stage longer, in rounds.
    pub fn age(&mut self, round: std::time::Duration) {
        if let Some(upgrade) = &mut self.under_way {
            upgrade.deadline.age(round);
        }
    }

    pub fn questions(&self) -> impl Iterator<Item = (u64, Asked)> {
        self.under_way.iter().flat_map(|upgrade| upgrade.asked.iter().map(|(seq, asked)| (*seq, *asked)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_that_returns_to_the_old_engine_is_opened_by_no_other() {
        let mut upgrades = Upgrades::after(Upgrading::default());
        upgrades.begin(Program::at("/proc/self/exe".into()).expect("this program"), Vec::new(), 1);
        for stage in [Stage::Resting, Stage::Moving] {
            assert_eq!(upgrades.then(Happens::Done, None), Some(Then::Go(stage)));
        }
        upgrades.opens(VmId([7; 16]), Instant::now());
        assert_eq!(upgrades.opening().count(), 1);
        assert_eq!(upgrades.then(Happens::Fails, Some("it died")), Some(Then::Go(Stage::Returning)));
        assert_eq!(upgrades.opening().count(), 0, "an error of the old engine would be taken for one of the new");
    }
}
