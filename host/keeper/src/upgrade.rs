//! Upgrade: another engine follows the serving one, while that one serves.
//!
//! Before: an operator named a program (`Report::Upgrade`). After: the engine of that program has all VMs; or the old
//! one goes on, and operators are told why (`upgrade_end`). `stage` says what happens in which stage; `moving` moves
//! VMs.
//! Threads: the keeper's one. Nothing here waits.
//! Promise: no work of the old engine ends before the new one has looked at every VM and could serve it. A VM is with
//! one engine at a time, or with both while neither does more than serve its faults; its state file says which.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ballast_base::wire::{StoreFiles, VmId};
use ballast_handover::orders::Order;
use ballast_handover::upgrading::{Stage as Shown, Upgrading};
use ballast_sys::priority::run_first;

use crate::closer::SentFd;
use crate::engine::{Beat, Who, spawn};
use crate::keeper::{Keeper, SOON};
use crate::program::Program;
use crate::regions::{At, VmEntry};
use crate::stage::{Deadline, Happens, Stage, Then};
use crate::store_files::Files;
use crate::upgrading::{Asked, Upgrade};

impl Keeper {
    /// An engine passed an operator's request on.
    pub(crate) fn asked_to_upgrade(&mut self, who: Who, ask: u64, program: String) {
        let result = self.begin_upgrade(program);
        if let Err(why) = &result {
            tracing::warn!("no upgrade: {why}");
        }
        self.show_upgrade();
        let answer = Order::Asked { ask, result };
        match who {
            Who::Engine => self.order(&answer, &[]),
            Who::Next => self.order_next(&answer, &[]),
        }
    }

    /// A message of the new engine that is no reply: it serves.
    pub(crate) fn next_serves(&mut self) {
        match &mut self.upgrade {
            Some(upgrade) if upgrade.stage == Stage::Serving => {
                upgrade.next.pulse.starting = None;
                upgrade.serves = true;
                self.tend_upgrade();
            }
            Some(_) => self.upgrade_fails("it said that it serves before it was to"),
            None => {}
        }
    }

    /// May this engine change the settings? The new one's API is closed until it is to serve.
    pub(crate) fn sets(&self, who: Who) -> bool {
        who == Who::Engine || self.upgrade.as_ref().is_some_and(|upgrade| upgrade.stage == Stage::Serving)
    }

    /// Give the engine that is to follow an order.
    pub(crate) fn order_next(&mut self, order: &Order, fds: &[Arc<SentFd>]) {
        if let Some(upgrade) = self.upgrade.as_mut().filter(|upgrade| !upgrade.is_dead()) {
            upgrade.next.give(order, fds);
        }
    }

    /// Does the next engine read events itself? Until the old one rests, it gets them from there.
    pub(crate) fn tells_next(&self) -> bool {
        self.upgrade.as_ref().is_some_and(|upgrade| matches!(upgrade.stage, Stage::Moving | Stage::Serving))
    }

    /// The engine that gets a new VM: once VMs move, the next one. Else a user whose VMs come all the time would keep
    /// the upgrade from ending.
    pub(crate) fn at_for_new(&self) -> At {
        if self.tells_next() { At::Next } else { At::Engine }
    }

    /// The engine that is to follow is dead.
    pub(crate) fn next_died(&mut self) {
        // It may have given the reason.
        self.hear(Who::Next);
        if self.upgrade.as_ref().is_some_and(|upgrade| !upgrade.is_dead()) {
            self.upgrade_fails("it ended; its reason is in the log");
        }
    }

    /// Ping the engine that is to follow.
    pub(crate) fn keep_next(&mut self) {
        let Some(upgrade) = self.upgrade.as_mut().filter(|upgrade| !upgrade.is_dead()) else { return };
        match upgrade.next.pulse.beat(Instant::now()) {
            Beat::Rest => {}
            _ if upgrade.next.process.is_dying() => self.next_died(),
            Beat::Ask if upgrade.next.orders.is_empty() => upgrade.next.give(&Order::Ping, &[]),
            Beat::Ask => {}
            Beat::Dead(how) => self.upgrade_fails(&format!("it {how}")),
        }
        if let Some(upgrade) = self.upgrade.as_mut().filter(|upgrade| upgrade.next.starved) {
            upgrade.next.flush();
        }
    }

    /// Start the successor, and have it look at every VM.
    pub(crate) fn begin_upgrade(&mut self, program: String) -> Result<(), String> {
        let program = if program.is_empty() { self.program.path().into() } else { PathBuf::from(program) };
        if !program.is_absolute() {
            return Err(format!("{} is not an absolute path", program.display()));
        }
        let opened = Program::at(program.clone());
        let opened = opened.map_err(|error| format!("Opening {}: {error}", program.display()));
        // A file that was installed under the same name since is another program.
        let is_asked = |of: &Program| opened.as_ref().is_ok_and(|opened| of.path() == program && of.is_file_of(opened));
        if let Some(upgrade) = &self.upgrade {
            let under_way = &upgrade.shown.program;
            return match is_asked(&upgrade.program) && !upgrade.is_dead() {
                true => Ok(()),
                false => Err(format!("the upgrade to {under_way} is under way: try again when it is over")),
            };
        }
        if let Some(replacing) = &self.replacing {
            return match is_asked(&replacing.program) {
                true => Ok(()),
                false => Err("the keeper is about to be replaced: try again".into()),
            };
        }
        let serving = self.engine.as_ref().is_some_and(|engine| engine.pulse.starting.is_none());
        if !serving || self.vms.iter().any(|vm| vm.fenced.is_some()) {
            return Err("the engine that serves has only just begun, or waits for a VM: try again later".into());
        }
        let opened = opened?;
        let next = spawn(&mut self.starter, &opened).map_err(|error| format!("{error:#}"))?;
        tracing::info!(pid = next.process.pid, program = %program.display(), "an engine that is to follow is started");
        let now = Instant::now();
        let shown = Upgrading {
            number: self.last_upgrade.number + 1,
            program: program.display().to_string(),
            stage: Shown::Checking,
            vms: self.vms.len() as u32,
            ..Upgrading::default()
        };
        self.upgrade = Some(Upgrade {
            next,
            program: opened,
            stage: Stage::Checking,
            shown,
            begun: now,
            deadline: Deadline::new(now),
            settings: self.settings.clone(),
            asked: HashMap::new(),
            opening: HashMap::new(),
            both: HashMap::new(),
            incomplete: Vec::new(),
            serves: false,
        });
        let (begin, api) = self.begin();
        self.order_next(&begin, &api);
        // It decides and answers the API when it has all VMs.
        let seq = self.ask(Asked::Begun);
        self.order_next(&Order::Rest { seq }, &[]);
        let checks: Vec<_> = self.vms.iter().filter(|vm| vm.is_handed_over()).map(check).collect();
        for (vm, stores, files, regions, fds) in checks {
            let seq = self.ask(Asked::Check(vm));
            if let Some(entry) = self.vms.iter_mut().find(|entry| entry.state.id() == vm) {
                entry.question = Some(seq);
            }
            self.order_next(&Order::CheckVm { seq, vm, stores, files, regions }, &fds);
        }
        self.show_upgrade();
        self.tend_upgrade();
        Ok(())
    }

    pub(crate) fn seq(&mut self) -> u64 {
        let seq = self.next_seq;
        self.next_seq += 1;
        seq
    }

    pub(crate) fn ask(&mut self, what: Asked) -> u64 {
        let seq = self.seq();
        if let Some(upgrade) = &mut self.upgrade {
            upgrade.asked.insert(seq, what);
        }
        seq
    }

    /// Tell the engines how it stands, for API clients that ask them.
    pub(crate) fn show_upgrade(&mut self) {
        if let Some(upgrade) = &mut self.upgrade {
            upgrade.shown.took_us = upgrade.begun.elapsed().as_micros() as u64;
            self.last_upgrade = upgrade.shown.clone();
        }
        let order = Order::Upgrading(self.last_upgrade.clone());
        self.order(&order, &[]);
        self.order_next(&order, &[]);
    }

    /// Is this the reply to an order of the upgrade? Then handle it.
    pub(crate) fn answered_upgrade(&mut self, who: Who, seq: u64, result: &Result<(), String>) -> bool {
        let Some(upgrade) = &mut self.upgrade else { return false };
        let Some(asked) = upgrade.asked.get(&seq).copied() else { return false };
        if asked.whom() != who {
            self.answers_for_another(who);
            return true;
        }
        upgrade.asked.remove(&seq);
        upgrade.deadline = Deadline::new(Instant::now());
        match (asked, result) {
            (Asked::Begun, _) => {}
            (Asked::Check(vm), Err(why)) => {
                // A VM that is gone needs no engine; one that has come back is not the one that was checked.
                if self.vm(vm).is_some_and(|entry| entry.question == Some(seq)) {
                    self.upgrade_fails(&format!("it cannot serve {}: {why}", self.called(vm)));
                }
            }
            (Asked::Check(_), Ok(())) => {
                upgrade.shown.checked += 1;
                self.show_upgrade();
            }
            (Asked::Rest, _) => self.upgrade_goes_on(),
            (Asked::ServeFaults(vm), result) => self.faults_only(vm, seq, result),
            (Asked::Leave(vm), _) => self.left_to_next(vm),
            (Asked::Part(vm), served) => {
                if served.is_err() {
                    upgrade.incomplete.push(vm);
                }
                self.move_on(vm, seq);
            }
            (Asked::Opened(vm), result) => self.opened_by_next(vm, seq, result),
        }
        self.tend_upgrade();
        true
    }

    /// An engine has replied to a question that the other one was asked. The reply is not used.
    pub(crate) fn answers_for_another(&mut self, who: Who) {
        match who {
            Who::Next => self.upgrade_fails("it answered what the other engine was asked"),
            Who::Engine => tracing::error!("the engine answered what the one that is to follow was asked"),
        }
    }

    pub(crate) fn called(&self, vm: VmId) -> String {
        self.vm(vm).map_or_else(|| format!("VM {vm}"), |entry| format!("VM {}", entry.state.name()))
    }

    /// Continue the upgrade. Returns how soon to look again.
    pub(crate) fn tend_upgrade(&mut self) -> Option<Duration> {
        let now = Instant::now();
        let upgrade = self.upgrade.as_mut()?;
        let stage = upgrade.stage;
        if upgrade.deadline.is_over(now, stage.longest()) {
            let late = match stage {
                Stage::Checking => "it did not look through all VMs in time".into(),
                Stage::Resting => "the engine that serves did not come to rest in time".into(),
                Stage::Serving => "it has all VMs and did not begin to serve in time".into(),
                Stage::Moving | Stage::Returning => {
                    let waits = upgrade.asked.values().filter_map(|asked| match asked {
                        Asked::ServeFaults(vm) => Some((*vm, "was not let go by the engine that serves it")),
                        Asked::Part(vm) | Asked::Leave(vm) => {
                            Some((*vm, "was not closed by the engine that serves it"))
                        }
                        Asked::Opened(vm) => Some((*vm, "was not opened by the new engine")),
                        _ => None,
                    });
                    let first = waits.min_by_key(|(vm, _)| vm.0);
                    first.map_or_else(|| "a VM".into(), |(vm, what)| format!("{} {what} in time", self.called(vm)))
                }
            };
            self.upgrade_fails(&late);
        }
        match self.upgrade.as_ref()?.stage {
            Stage::Checking => {
                if self.upgrade.as_ref()?.asked.is_empty() {
                    self.upgrade_goes_on();
                }
            }
            // A VM that comes back may come to the old engine, and moves.
            Stage::Moving | Stage::Serving => self.move_some(),
            Stage::Returning => {
                if self.vms.iter().all(|vm| vm.fenced.is_none()) {
                    self.upgrade_goes_on();
                }
            }
            Stage::Resting => {}
        }
        self.upgrade.is_some().then_some(SOON)
    }

    /// The stage is done.
    pub(crate) fn upgrade_goes_on(&mut self) {
        let Some(upgrade) = &self.upgrade else { return };
        if upgrade.stage == Stage::Resting && upgrade.settings != self.settings {
            return self.upgrade_fails("the settings were changed while it looked through VMs; try again");
        }
        self.upgrade_then(upgrade.stage.then(Happens::Done), None);
    }

    /// The new engine refused, died, lied or was late; or the old one was late.
    pub(crate) fn upgrade_fails(&mut self, why: &str) {
        let Some(upgrade) = &self.upgrade else { return };
        self.upgrade_then(upgrade.stage.then(Happens::Fails), Some(why));
    }

    /// The engine that serves is dead. Returns whether another one is in its place.
    pub(crate) fn old_engine_died(&mut self) -> bool {
        let Some(upgrade) = &self.upgrade else { return false };
        let then = upgrade.stage.then(Happens::OldDies);
        self.upgrade_then(then, Some("the engine that served died meanwhile"));
        then == Then::Promote
    }

    fn upgrade_then(&mut self, then: Then, why: Option<&str>) {
        let Some(upgrade) = &mut self.upgrade else { return };
        upgrade.deadline = Deadline::new(Instant::now());
        if let Some(why) = why.filter(|_| upgrade.shown.message.is_empty()) {
            upgrade.shown.message = why.into();
        }
        match then {
            Then::Go(stage) => {
                tracing::debug!(?stage, "the upgrade goes on");
                upgrade.stage = stage;
                match stage {
                    Stage::Checking => {}
                    Stage::Resting => {
                        let seq = self.ask(Asked::Rest);
                        self.order(&Order::Rest { seq }, &[]);
                    }
                    Stage::Moving => {
                        upgrade.shown.stage = Shown::Switching;
                        self.show_upgrade();
                        run_first();
                        self.move_some();
                    }
                    Stage::Serving => {
                        upgrade.next.told_to_serve = true;
                        self.order_next(&Order::Serve, &[]);
                    }
                    Stage::Returning => {
                        upgrade.shown.stage = Shown::Returning;
                        upgrade.asked.clear();
                        self.end_next();
                        self.take_back();
                    }
                }
            }
            Then::Leave => self.new_engine_serves(),
            Then::Promote => self.promote(),
            Then::Fail => self.upgrade_failed(),
        }
    }

    /// Tell operators of an event of the host. With no engine, the next one learns it.
    pub(crate) fn host_note(&mut self, kind: &str, message: String) {
        let note = Order::Note { vm: None, kind: kind.into(), message };
        if self.engine.is_some() {
            self.order(&note, &[]);
        } else {
            self.unsaid.push(note);
        }
    }
}

type Check = (VmId, Vec<StoreFiles>, u8, u32, Vec<Arc<SentFd>>);

fn check(vm: &VmEntry) -> Check {
    let (fds, files, regions) = vm.descriptors();
    (vm.state.id(), Files::counts(&vm.stores), files, regions, fds)
}
