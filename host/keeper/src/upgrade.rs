//! Upgrade: another engine replaces the serving one without a pause.
//!
//! Before: an operator named a program (`Report::Upgrade`). After: the engine of that program has all VMs; or the old
//! engine continues, and operators are told why (`upgrade_end`). `stage` has the tables of the stages; `moving` moves
//! VMs.
//! Threads: the keeper's one. Nothing here waits.
//! Promise: no work of the old engine ends before the new one has examined every VM and could serve it. A VM is with
//! one engine at a time, or with both while neither does more than serve its faults; its state file says which.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use ballast_base::wire::VmId;
use ballast_handover::failure::Failure;
use ballast_handover::orders::Order;
use ballast_sys::priority::run_first;

use crate::engine::Who;
use crate::keeper::{Keeper, SOON};
use crate::program::Program;
use crate::stage::{Happens, Stage, Then};
use crate::upgrading::Asked;

impl Keeper {
    /// Begins an upgrade that an operator requested of this engine, and gives the engine the result.
    pub(crate) fn asked_to_upgrade(&mut self, who: Who, ask: u64, program: String) {
        let result = self.begin_upgrade(program).map_err(|error| Failure::new(format_args!("{error:#}")));
        if let Err(why) = &result {
            tracing::warn!("no upgrade: {why}");
        }
        self.show_upgrade();
        self.engines.give(who, &Order::Asked { ask, result }, &[]);
    }

    pub(crate) fn next_serves(&mut self) {
        self.engines.has_started(Who::Next);
        self.tend_upgrade();
    }

    /// Whether events also go to the next engine. Until the old one rests, the next engine gets them from the old one.
    pub(crate) fn tells_next(&self) -> bool {
        matches!(self.upgrades.stage(), Some(Stage::Moving | Stage::Serving))
    }

    /// The engine that gets a new VM: once VMs move, the next one. Otherwise a user who attaches VMs all the time would
    /// keep the upgrade from ending.
    pub(crate) fn who_for_new(&self) -> Who {
        if self.tells_next() { Who::Next } else { Who::Engine }
    }

    pub(crate) fn next_died(&mut self) {
        // It may have reported the reason.
        self.hear(Who::Next);
        if self.engines.get(Who::Next).is_some() {
            self.upgrade_fails("it ended; its reason is in the log");
        }
    }

    /// Starts the successor, and has it examine every VM.
    pub(crate) fn begin_upgrade(&mut self, program: String) -> anyhow::Result<()> {
        let program = if program.is_empty() { self.engines.program().path().into() } else { PathBuf::from(program) };
        ensure!(program.is_absolute(), "{} is not an absolute path", program.display());
        let opened = Program::at(program.clone()).with_context(|| format!("Opening {}", program.display()));
        // A file that was installed under the same name since then is another program.
        let is_asked = |of: &Program| opened.as_ref().is_ok_and(|opened| of.path() == program && of.is_file_of(opened));
        if let Some(under_way) = self.upgrades.program() {
            let is_asked = is_asked(under_way) && self.engines.get(Who::Next).is_some();
            let under_way = under_way.path().display();
            ensure!(is_asked, "the upgrade to {under_way} is under way: try again when it is over");
            return Ok(());
        }
        if let Some(replacing) = &self.replacing {
            ensure!(is_asked(&replacing.program), "the keeper is about to be replaced: try again");
            return Ok(());
        }
        let serving = self.engines.get(Who::Engine).is_some_and(|engine| !engine.is_starting());
        if !serving || self.vms.iter().any(|vm| vm.place.fenced().is_some()) {
            bail!("the engine that serves has only just begun, or waits for a VM: try again later");
        }
        let opened = opened?;
        self.engines.start_next(&opened)?;
        self.upgrades.begin(opened, self.engines.settings().to_vec(), self.vms.iter().count() as u32);
        // It rests: it makes decisions and answers the API only when it has all VMs.
        let seq = self.ask(Asked::Begun);
        self.engines.give(Who::Next, &Order::Rest { seq }, &[]);
        for id in self.vms.which(|vm| vm.place.is_handed_over()) {
            let seq = self.ask(Asked::Check(id));
            if let Some(vm) = self.vms.get_mut(id) {
                vm.place.ask(seq);
                let (order, fds) = vm.held.check(seq);
                self.engines.give(Who::Next, &order, &fds);
            }
        }
        self.show_upgrade();
        self.tend_upgrade();
        Ok(())
    }

    pub(crate) fn ask(&mut self, what: Asked) -> u64 {
        let seq = self.engines.number();
        self.upgrades.ask(seq, what);
        seq
    }

    /// Tells the engines the state of the upgrade, for API clients that ask them.
    pub(crate) fn show_upgrade(&mut self) {
        let order = self.upgrades.show();
        self.engines.give(Who::Engine, &order, &[]);
        self.engines.give(Who::Next, &order, &[]);
    }

    /// Handles the reply to an order of the upgrade. Returns false if the order is not one of an upgrade.
    pub(crate) fn answered_upgrade(&mut self, seq: u64, result: &Result<(), Failure>) -> bool {
        let Some(asked) = self.upgrades.answered(seq) else { return false };
        match (asked, result) {
            (Asked::Begun, _) => {}
            (Asked::Check(vm), Err(why)) => {
                // A VM that is gone needs no engine; a VM that has come back is not the one that was checked.
                if self.vms.get(vm).is_some_and(|vm| vm.place.is_asked(seq)) {
                    self.upgrade_fails(&format!("it cannot serve {}: {why}", self.called(vm)));
                }
            }
            (Asked::Check(_), Ok(())) => {
                self.upgrades.checked();
                self.show_upgrade();
            }
            (Asked::Rest, _) => self.upgrade_goes_on(),
            (Asked::ServeFaults(vm), result) => self.faults_only(vm, seq, result),
            (Asked::Leave(vm), _) => self.left_to_next(vm),
            (Asked::Part(vm), served) => {
                if served.is_err() {
                    self.upgrades.set_incomplete(vm);
                }
                self.move_on(vm, seq);
            }
            (Asked::Opened(vm), result) => self.opened_by_next(vm, seq, result),
        }
        self.tend_upgrade();
        true
    }

    pub(crate) fn called(&self, vm: VmId) -> String {
        self.vms.get(vm).map_or_else(|| format!("VM {vm}"), |vm| format!("VM {}", vm.name()))
    }

    /// Continues the upgrade. Returns how soon to check again.
    pub(crate) fn tend_upgrade(&mut self) -> Option<Duration> {
        if let Some((vm, what)) = self.upgrades.late(Instant::now()) {
            let whose = vm.map_or_else(String::new, |vm| self.called(vm) + " ");
            self.upgrade_fails(&format!("{whose}{what} in time"));
        }
        match self.upgrades.stage()? {
            Stage::Checking if self.upgrades.has_all_answers() => self.upgrade_goes_on(),
            // A VM that comes back may come to the old engine, and then moves.
            Stage::Moving | Stage::Serving => self.move_some(),
            Stage::Returning if self.vms.iter().all(|vm| vm.place.fenced().is_none()) => self.upgrade_goes_on(),
            Stage::Checking | Stage::Resting | Stage::Returning => {}
        }
        self.upgrades.stage().map(|_| SOON)
    }

    pub(crate) fn upgrade_goes_on(&mut self) {
        if self.upgrades.stage() == Some(Stage::Resting) && !self.upgrades.is_with(self.engines.settings()) {
            return self.upgrade_fails("the settings were changed while it looked through VMs; try again");
        }
        self.upgrade_then(Happens::Done, None);
    }

    pub(crate) fn upgrade_fails(&mut self, why: &str) {
        self.upgrade_then(Happens::Fails, Some(why));
    }

    /// The serving engine is dead. Returns whether the new one is in its place.
    pub(crate) fn old_engine_died(&mut self) -> bool {
        self.upgrade_then(Happens::OldDies, Some("the engine that served died meanwhile")) == Some(Then::Promote)
    }

    fn upgrade_then(&mut self, happens: Happens, why: Option<&str>) -> Option<Then> {
        let then = self.upgrades.then(happens, why)?;
        match then {
            Then::Go(Stage::Checking) => {}
            Then::Go(Stage::Resting) => {
                let seq = self.ask(Asked::Rest);
                self.engines.give(Who::Engine, &Order::Rest { seq }, &[]);
            }
            Then::Go(Stage::Moving) => {
                self.show_upgrade();
                run_first();
                self.move_some();
            }
            Then::Go(Stage::Serving) => self.engines.begin_to_serve(Who::Next, true),
            Then::Go(Stage::Returning) => {
                self.engines.end_next(why.unwrap_or_default());
                self.take_back();
            }
            Then::Leave => self.new_engine_serves(),
            Then::Promote => self.promote(),
            Then::Fail => self.upgrade_failed(),
        }
        Some(then)
    }

    /// Tells operators of an event of the host. Without an engine, the next one gets it.
    pub(crate) fn host_note(&mut self, kind: &str, message: String) {
        self.engines.note(Order::Note { vm: None, kind: kind.into(), message });
    }
}
