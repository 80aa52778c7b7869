//! The end of an upgrade: the new engine takes the place of the old one, or it is ended and the old one goes on.
//!
//! Before: a stage of the upgrade led to its end (`upgrade`; the tables are in `stage`). After: one engine is the
//! keeper's. After a success the keeper's program follows (`replace`), and the old engine is reaped when it has ended.
//! Threads: the keeper's one. Nothing here waits.
//! Promise: an engine that is not the keeper's any more stays on a list until it has ended and is reaped. One that is
//! told to leave and does not is killed after 5 s.

use std::time::{Duration, Instant};

use ballast_handover::orders::Order;
use ballast_handover::upgrading::{Stage as Shown, Upgrading};
use ballast_sys::clock;
use ballast_sys::priority::run_beside;
use rustix::process::{Signal, pidfd_send_signal};

use crate::engine::Engine;
use crate::keeper::Keeper;
use crate::regions::{At, VmEntry};
use crate::stage::Deadline;
use crate::upgrading::Leaving;
use crate::waiting::Making;

impl Keeper {
    /// Kill the new engine. Its pidfd tells when it is dead; its messages do not count any more.
    pub(crate) fn end_next(&mut self) {
        let Some(upgrade) = &mut self.upgrade else { return };
        let why = &upgrade.shown.message;
        tracing::error!(pid = upgrade.next.process.pid, "the engine that was to follow is ended: {why}");
        let _ = pidfd_send_signal(upgrade.next.child.pidfd(), Signal::KILL);
        upgrade.next.orders.clear();
    }

    /// It is over, and the old engine has all VMs, or is gone.
    pub(crate) fn upgrade_failed(&mut self) {
        self.end_next();
        let Some(mut upgrade) = self.upgrade.take() else { return };
        upgrade.shown.stage = Shown::Failed;
        upgrade.shown.took_us = upgrade.begun.elapsed().as_micros() as u64;
        self.zombies.push(upgrade.next.child);
        self.last_upgrade = upgrade.shown;
        let Upgrading { program, message, .. } = &self.last_upgrade;
        let message = format!("no engine of {program}: {message}; the engine that served goes on");
        tracing::error!("{message}");
        self.order(&Order::Resume, &[]);
        run_beside();
        self.host_note("upgrade-failed", message);
        self.show_upgrade();
    }

    /// The new engine has all VMs, and answers.
    pub(crate) fn new_engine_serves(&mut self) {
        self.order(&Order::Leave, &[]);
        let old = self.put_in_place();
        if let Some(old) = old {
            self.leaving.push(Leaving { engine: old, deadline: Deadline::new(Instant::now()) });
        }
        run_beside();
        self.upgrade_is_done();
    }

    /// The old engine died when VMs had begun to move.
    pub(crate) fn promote(&mut self) {
        let both: Vec<_> = self.vms.iter().filter(|vm| vm.at == At::Both).map(|vm| vm.state.id()).collect();
        let opening: Vec<_> = self.upgrade.iter().flat_map(|upgrade| upgrade.opening.keys().copied()).collect();
        self.put_in_place();
        let since = self.died.as_ref().map(|(at, _)| clock::monotonic_ns_at(*at));
        let ours = self.engine.as_ref().map(|engine| engine.process);
        let named = |vm: &VmEntry| vm.state.engine() == ours.map(|process| (process.pid, process.start));
        let left: Vec<_> = self.vms.iter().filter(|vm| !named(vm)).map(|vm| vm.state.id()).collect();
        // VMs of both are served by the new one until it can open them anew: words that the dead one had locked must be
        // mended.
        for vm in left.into_iter().chain(both) {
            self.hand_over(vm, since);
        }
        // Requests that failed while it opened their VM.
        opening.into_iter().for_each(|vm| self.order_pending(vm));
        self.upgrade_is_done();
        self.tend_fences();
    }

    /// The new engine takes the place of the old one, which is returned.
    fn put_in_place(&mut self) -> Option<Engine> {
        let upgrade = self.upgrade.as_mut()?;
        let shown = upgrade.shown.clone();
        let (begun, program, serves) = (upgrade.begun, upgrade.program.clone(), upgrade.serves);
        let next = self.upgrade.take()?.next;
        let old = self.engine.replace(next);
        let last = std::mem::replace(&mut self.program, program);
        self.last_program = Some(last).filter(|last| !last.is_file_of(&self.program) && !serves);
        let mut entries: Vec<&mut VmEntry> = self.vms.iter_mut().collect();
        for closing in &mut self.closing {
            // The old engine was making it: the new one opens it and goes on.
            if closing.entry.at != At::Next {
                closing.take_back();
            }
            entries.push(&mut closing.entry);
        }
        entries.into_iter().for_each(|entry| entry.at = At::Engine);
        for order in self.making.iter().map(Making::order).collect::<Vec<_>>() {
            self.order(&order, &[]);
        }
        self.last_upgrade = Upgrading { took_us: begun.elapsed().as_micros() as u64, ..shown };
        old
    }

    /// The engine has followed. The keeper is next.
    fn upgrade_is_done(&mut self) {
        let Upgrading { program, moved, took_us, longest_gap_us, message, .. } = &self.last_upgrade;
        let (took_ms, gap_ms) = (*took_us as f64 / 1e3, *longest_gap_us as f64 / 1e3);
        let how = match (message.as_str(), longest_gap_us) {
            ("", 0) => "each served at every moment".into(),
            ("", _) => format!("each unserved for {gap_ms:.1} ms at most"),
            (also, _) => also.to_owned(),
        };
        let message = format!("an engine of {program} follows, after {took_ms:.0} ms; {moved} VMs moved; {how}");
        tracing::info!("{message}");
        self.host_note("upgraded", message);
        self.show_upgrade();
        self.begin_replacing(self.program.clone());
    }

    /// Reap engines that left, and end those that do not.
    pub(crate) fn tend_leaving(&mut self) {
        const LONGEST: Duration = Duration::from_secs(5);
        let now = Instant::now();
        let (mut gone, mut stay) = (Vec::new(), Vec::new());
        for mut leaving in std::mem::take(&mut self.leaving) {
            leaving.engine.flush();
            match leaving.engine.child.try_wait() {
                Ok(None) if leaving.deadline.is_over(now, LONGEST) => gone.push(leaving.engine),
                Ok(None) => stay.push(leaving),
                _ => {}
            }
        }
        self.leaving = stay;
        for engine in gone {
            tracing::error!(pid = engine.process.pid, "an engine that was followed does not end: killing it");
            let _ = pidfd_send_signal(engine.child.pidfd(), Signal::KILL);
            self.zombies.push(engine.child);
        }
    }
}
