//! Making: attaches that wait for a file store, which the engine makes.
//!
//! Before: a process attaches as a VM that must have a file store and has none. After: the process is attached; its VM
//! has a file store, or an event says why not.
//! Threads: the keeper's one. Promise: if an engine dies before it made the store, its successor makes it; no attach
//! waits longer than [`MAKE_TIMEOUT`].

use std::time::{Duration, Instant};

use ballast_base::wire::Attach;
use ballast_handover::failure::Failure;

use crate::admit::Admitted;
use crate::keeper::Keeper;
use crate::waiting::{Made, Making};

/// How long an attach waits for an engine. A healthy engine takes milliseconds, and four seconds more if the disk
/// hangs.
const MAKE_TIMEOUT: Duration = Duration::from_secs(5);

impl Keeper {
    pub(crate) fn is_making(&self, client: u64) -> bool {
        self.making.iter().any(|making| making.client == client)
    }

    pub(crate) fn make_file_store(&mut self, client: u64, attach: &Attach, admitted: Admitted) {
        let seq = self.engines.number();
        let making = Making { seq, client, attach: attach.clone(), admitted, since: Instant::now() };
        self.order(&making.order(), &[]);
        self.making.push(making);
    }

    /// The engine made the store, or could not: continues with the attach.
    pub(crate) fn made(&mut self, seq: u64, made: Made) {
        let waiting = self.making.iter().position(|making| making.seq == seq);
        if let Some(making) = waiting.map(|at| self.making.remove(at)) {
            self.go_on(making, made);
        }
    }

    /// Continues, without a store, with each attach that has waited for [`MAKE_TIMEOUT`].
    pub(crate) fn tend_making(&mut self) {
        while let Some(at) = self.making.iter().position(|making| making.since.elapsed() > MAKE_TIMEOUT) {
            let making = self.making.remove(at);
            self.go_on(making, Err(Failure::new(format_args!("the engine made none within {MAKE_TIMEOUT:?}"))));
        }
    }

    /// Continues with an attach, unless its client is gone.
    fn go_on(&mut self, Making { client, attach, admitted, .. }: Making, made: Made) {
        if self.clients.peer(client).is_some()
            && let Err(why) = self.attach_with(client, &attach, admitted, Some(made))
        {
            self.refuse(client, &why);
        }
    }
}
