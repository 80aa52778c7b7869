//! Clients whose last visit does not end, counted by user.
//!
//! Before: a client was closed, and its last visit did not end in time. After: while a user has [`MOST`] of these
//! clients, no further process of that user is accepted.
//! Threads: any.
//! Promise: each costs the engine a thread and some descriptors, and a user other than root causes at most [`MOST`].

use std::sync::{Mutex, MutexGuard};

use super::Served;

/// Most clients of one user. A well-behaved VMM has none: reading a message takes microseconds.
const MOST: usize = 16;

/// Closed clients of all VMs whose visits are still under way.
#[derive(Debug, Default)]
pub(crate) struct Stuck(Mutex<Vec<(u32, Served)>>);

impl Stuck {
    pub fn of_process() -> &'static Self {
        static STUCK: Stuck = Stuck(Mutex::new(Vec::new()));
        &STUCK
    }

    /// The list, without clients whose visits have ended.
    fn now(&self) -> MutexGuard<'_, Vec<(u32, Served)>> {
        let mut stuck = self.0.lock().expect("no panic while held");
        stuck.retain(|(_, client)| !client.is_over());
        stuck
    }

    /// Adds a closed client, which counts until its last visit has ended.
    pub fn add(&self, user: u32, client: Served) {
        self.now().push((user, client));
    }

    /// Returns whether this user has the most clients allowed. There is no limit for root.
    pub fn is_full(&self, user: u32) -> bool {
        user != 0 && self.now().iter().filter(|(whose, _)| *whose == user).count() >= MOST
    }
}
