//! The end of an upgrade: the new engine takes the place of the old one, or is ended, and the old one continues.
//!
//! Before: a stage of the upgrade led to its end (`upgrade`; the tables are in `stage`). After: the keeper has one
//! engine. After a success the keeper's program follows (`replace`), and the old engine is reaped when it has ended.
//! Threads: the keeper's one. Nothing here waits.

use ballast_handover::orders::Order;
use ballast_handover::upgrading::Upgrading;
use ballast_sys::priority::run_beside;

use crate::engine::Who;
use crate::keeper::Keeper;
use crate::place::At;
use crate::waiting::Making;

impl Keeper {
    /// The upgrade has failed, and the old engine has all VMs, or is gone.
    pub(crate) fn upgrade_failed(&mut self) {
        self.upgrades.fail();
        let Upgrading { program, message, .. } = self.upgrades.last();
        self.engines.end_next(message);
        let message = format!("no engine of {program}: {message}; the engine that served goes on");
        tracing::error!("{message}");
        self.order(&Order::Resume, &[]);
        run_beside();
        self.host_note("upgrade-failed", message);
        self.show_upgrade();
    }

    /// The new engine has all VMs, and serves.
    pub(crate) fn new_engine_serves(&mut self) {
        self.put_in_place();
        run_beside();
        self.upgrade_is_done();
    }

    /// Puts the new engine in the place of the old one, which died when VMs had begun to move.
    pub(crate) fn promote(&mut self) {
        let both = self.vms.which(|vm| vm.place.at() == At::Both);
        let opening: Vec<_> = self.upgrades.opening().collect();
        self.put_in_place();
        let since = self.engines.unserved_since_ns();
        let ours = self.engines.process(Who::Engine);
        let ours = ours.map(|process| (process.pid, process.start));
        let left = self.vms.which(|vm| vm.held.state().engine() != ours);
        // The new engine serves the VMs of both until it can open them anew, because it must mend words that the dead
        // one had locked.
        for vm in left.into_iter().chain(both) {
            self.hand_over(vm, since);
        }
        // Requests that failed while it opened their VM.
        opening.into_iter().for_each(|vm| self.order_pending(vm));
        self.upgrade_is_done();
        self.tend_fences();
    }

    fn put_in_place(&mut self) {
        let Some(program) = self.upgrades.end() else { return };
        self.engines.follow(program);
        for closing in self.vms.closing_mut() {
            // The old engine was closing it: the new one opens the VM and closes it.
            if closing.vm.place.who() != Who::Next {
                closing.take_back();
            }
            closing.vm.place.go_back();
        }
        for vm in self.vms.iter_mut() {
            vm.place.go_back();
        }
        for order in self.making.iter().map(Making::order).collect::<Vec<_>>() {
            self.order(&order, &[]);
        }
    }

    /// The new engine is in place. The keeper's own program is next.
    fn upgrade_is_done(&mut self) {
        let Upgrading { program, moved, took_us, longest_gap_us, message, .. } = self.upgrades.last();
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
        self.begin_replacing(self.engines.program().clone());
    }
}
