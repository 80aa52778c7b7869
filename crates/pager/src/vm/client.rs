//! The client worker of a view: takes the client's answers to zaps, and carries out its discards.
//!
//! Before: [`Vm::add_view`] starts it. After: the client or the engine is gone.
//! Threads: one for each view. Units: ranges of the client's addresses.
//! Promise: a message that makes no sense is reported and costs the VM nothing: its faults are served all the same.

use std::io::ErrorKind;
use std::sync::Arc;

use ballast_base::wire::{self, ClientToEngine, EngineToClient};
use ballast_sys::scm;

use super::Vm;
use crate::fault::worker::{NAP, sleep_until_readable};
use crate::vm::view::View;

/// Listen to the client until it or the engine is gone.
pub(super) fn run(vm: &Vm, view: &Arc<View>) {
    let (mut invalid, mut failed) = (0u64, 0u64);
    while !vm.is_stopping() && !view.is_closed() {
        if !sleep_until_readable(view.control(), NAP) {
            continue;
        }
        let message = match scm::try_receive_bytes(view.control()) {
            Ok(Some(bytes)) => wire::decode::<ClientToEngine>(&bytes).map_err(|error| error.to_string()),
            Ok(None) => break,
            // The client took its message back, or another process has the other end and took it.
            Err(error) if error.kind() == ErrorKind::WouldBlock => continue,
            Err(error) if error.kind() == ErrorKind::InvalidData => Err(error.to_string()),
            Err(error) => {
                vm.report("client-error", format!("Receiving from the client in process {}: {error}", view.pid));
                break;
            }
        };
        match message {
            Ok(answer @ ClientToEngine::Zapped { .. }) => view.zapped(&answer),
            Ok(ClientToEngine::Discard { seq, ranges }) => {
                let error = vm.discard(view, &ranges).err().map(|error| error.to_string());
                failed += u64::from(error.is_some());
                // Reported at the 1st, 2nd, 4th, 8th ... time: a client that goes on shall not push other events out.
                if let Some(error) = &error
                    && failed.is_power_of_two()
                {
                    vm.report("discard-failed", format!("Discarding memory for process {}: {error}", view.pid));
                }
                // A client that does not read its answers repeats its question and gets another.
                if let Err(error) = view.tell(&EngineToClient::DiscardDone { seq, error }) {
                    tracing::warn!(vm = vm.state.name(), "Answering a discard of process {}: {error}", view.pid);
                }
            }
            Ok(ClientToEngine::Pong { .. }) => {}
            Err(error) => {
                // Reported at the 1st, 2nd, 4th, 8th ... time.
                invalid += 1;
                if invalid.is_power_of_two() {
                    vm.report("client-error", format!("The client in process {} sent nonsense: {error}", view.pid));
                }
            }
        }
    }
    view.disconnect();
}
