//! Growth: which VM at rest holds more, or less, than its reclaim worker saw?
//!
//! Before: a reclaim worker found nothing to do, and looks rarely from then on. After: it is notified when what its VM
//! holds has changed. Pages that come back say so themselves; memory that was never touched comes without a fault, so
//! somebody must look.
//! Threads: one task of the pool for all VMs: to run the worker of each, for the same look, cost ten times as much.
//! Units: bytes. Promise: growth is found within some [`EVERY`], but for what the pool is late.

use std::io;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use crate::run::pool::{Handle, Pool};
use crate::run::queue::Next;
use crate::vm::Vm;

/// How often all VMs at rest are looked at.
const EVERY: Duration = Duration::from_secs(1);

/// Those that are looked at, and the task that does it.
static WATCHED: Mutex<(Vec<Weak<Vm>>, Option<Handle>)> = Mutex::new((Vec::new(), None));

/// From now on this VM is looked at, until it is dropped.
///
/// # Errors
/// There is no thread to do it, and the kernel gives none.
pub(crate) fn watch(vm: &Arc<Vm>) -> io::Result<()> {
    let mut watched = WATCHED.lock().expect("no panic while held");
    let (vms, task) = &mut *watched;
    match task {
        Some(task) => task.notify(),
        None => {
            let pool = Pool::of_process();
            *task = Some(pool.add(pool.add_group(), "growth", |now: Instant| look(now))?);
        }
    }
    vms.push(Arc::downgrade(vm));
    Ok(())
}

/// Look at each; returns when to look again.
fn look(now: Instant) -> Next {
    let vms = {
        let (vms, _) = &mut *WATCHED.lock().expect("no panic while held");
        vms.retain(|vm| vm.strong_count() > 0);
        vms.clone()
    };
    for vm in vms.iter().filter_map(Weak::upgrade).filter(|vm| !vm.is_stopping()) {
        let rested = vm.mail.rested_at();
        // What cannot be read now is the worker's to report.
        if rested.is_some_and(|held| vm.resident().is_ok_and(|now| now.bytes().0 != held)) {
            vm.mail.wake_from_rest();
        }
    }
    if vms.is_empty() { Next::Idle } else { Next::about(now, EVERY) }
}
