//! Growth: notices that a VM at rest holds more, or less, than its reclaim worker saw.
//!
//! Before: a reclaim worker found nothing to do, and runs rarely. After: it is notified when the VM's resident memory
//! has changed. A restore notifies by itself, but unregistered memory that was never touched comes in without a fault
//! that the engine sees, so a task must check for it.
//! Threads: one task for all VMs; running each VM's worker for this check cost ten times as much. Units: bytes.
//! Promise: growth is noticed within about [`EVERY`], plus the delay of the pool.

use std::io;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use crate::run::pool::{Handle, Pool};
use crate::run::queue::Next;
use crate::vm::Vm;

/// Time between two checks of all VMs at rest.
const EVERY: Duration = Duration::from_secs(1);

/// The VMs to check, and the task that checks them.
static WATCHED: Mutex<(Vec<Weak<Vm>>, Option<Handle>)> = Mutex::new((Vec::new(), None));

/// Has the task check this VM until the VM is dropped. Fails if the kernel cannot start a thread for the task.
pub(crate) fn watch(vm: &Arc<Vm>) -> io::Result<()> {
    let mut watched = WATCHED.lock().expect("no panic while held");
    let (vms, task) = &mut *watched;
    match task {
        Some(task) => task.notify(),
        None => {
            let pool = Pool::of_process();
            *task = Some(pool.add(pool.add_group(), "growth", |now: Instant| check(now))?);
        }
    }
    vms.push(Arc::downgrade(vm));
    Ok(())
}

/// Checks whether VMs at rest have grown; returns when to check again.
fn check(now: Instant) -> Next {
    let vms = {
        let (vms, _) = &mut *WATCHED.lock().expect("no panic while held");
        vms.retain(|vm| vm.strong_count() > 0);
        vms.clone()
    };
    for vm in vms.iter().filter_map(Weak::upgrade).filter(|vm| !vm.is_stopping()) {
        let rested = vm.mail.rested_at();
        // If it cannot be read, the worker reports that.
        if rested.is_some_and(|held| vm.resident_at_once().is_ok_and(|now| now.bytes().0 != held)) {
            vm.mail.wake_from_rest();
        }
    }
    if vms.is_empty() { Next::Idle } else { Next::about(now, EVERY) }
}
