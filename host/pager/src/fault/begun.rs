//! Begun: faults whose pages a store is reading from a disk or a network.
//!
//! Before: a fault worker had the store send the request, without waiting. After: the reply came, and the page is
//! mapped; or it did not come within [`SOON`], and a slow worker waits for it.
//! Threads: the fault worker of the userfaultfd, which is visited when the reply comes.
//! Promise: the fault worker never waits for a reply; a fault that the reply does not serve goes to the slow workers.
//!
//! Passing the fault to another thread takes two wake-ups, on other CPUs: as long as a reply does.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ballast_base::store::{Ends, IoContext, OnReply};
use ballast_page::outcome::Served;
use ballast_page::page_state::State;

use crate::tier::slow;
use crate::vm::Vm;
use crate::vm::serve::resolve::{Target, resolve};
use crate::vm::serve::stages::Times;
use crate::vm::serve::stall::PendingFault;
use crate::vm::stats::Counter;
use crate::vm::view::View;

/// Time for which a fault worker keeps a fault whose read was begun. Slow workers wait in parallel for slower stores.
const SOON: Duration = Duration::from_millis(2);

/// If all pending faults wait for replies, the time at which the first of them goes to a slow worker.
pub(crate) fn due(pending: &VecDeque<PendingFault>) -> Option<Instant> {
    let due = |pending: &PendingFault| pending.begun.map(|begun| begun + SOON);
    pending.iter().map(due).collect::<Option<Vec<_>>>()?.into_iter().min()
}

/// Serves a fault whose read was begun, if its page has arrived. Returns false if the fault must be retried; otherwise
/// it was served, or a slow worker has it.
pub(crate) fn ends(
    vm: &Vm,
    view: &Arc<View>,
    target: &Target<'_>,
    pending: &mut PendingFault,
    times: &Times,
    watch: OnReply<'_>,
) -> bool {
    let Target { region, page, .. } = target;
    if region.word(*page).state() != State::Far || !region.is_slow(*page) {
        // Another thread has restored it.
        pending.begun = None;
        return false;
    }
    let is_awaited = AtomicBool::new(false);
    let watch = |fd: BorrowedFd<'_>| {
        is_awaited.store(true, Ordering::Relaxed);
        watch(fd);
    };
    let stores = vm.stores.reads(IoContext::GUEST.ended_by(Ends::AtOnce(&watch)));
    if let Some(served) = resolve(vm, target, pending, &stores, times) {
        if matches!(served, Served::Restored | Served::Filled { .. }) {
            vm.stats().add(Counter::FaultFile, 1);
        }
        if served == Served::Restored {
            slow::restored_one(vm, view, region, *page);
        }
        return true;
    }
    if is_awaited.into_inner() && pending.begun.is_some_and(|begun| begun.elapsed() < SOON) {
        return false;
    }
    pending.begun = None;
    vm.mail.slow.take(vm.stats(), view, *pending);
    true
}
