//! Clients that are gone and keep a worker all the same, counted by user.
//!
//! Before: a client was closed, and its last visit did not end in time. After: while a user has [`MOST`] of them, no
//! further process of that user is taken in.
//! Threads: any. Promise: each costs the engine a thread and some descriptors, and a user who is not root cannot have
//! it spend more than these.

use std::sync::{Mutex, MutexGuard};

use super::Served;

/// Most of one user. A VMM that means well has none: taking a message needs microseconds.
const MOST: usize = 16;

/// The clients of all VMs of the process that are stuck.
#[derive(Debug, Default)]
pub(crate) struct Stuck(Mutex<Vec<(u32, Served)>>);

impl Stuck {
    /// Those of this process.
    pub fn of_process() -> &'static Self {
        static STUCK: Stuck = Stuck(Mutex::new(Vec::new()));
        &STUCK
    }

    /// Those whose visits are still under way.
    fn now(&self) -> MutexGuard<'_, Vec<(u32, Served)>> {
        let mut stuck = self.0.lock().expect("no panic while held");
        stuck.retain(|(_, client)| !client.is_over());
        stuck
    }

    /// A client of this user was closed; it counts until its last visit is over.
    pub fn add(&self, user: u32, client: Served) {
        self.now().push((user, client));
    }

    /// Does this user have as many as one may have? Root may have any number.
    pub fn is_full(&self, user: u32) -> bool {
        user != 0 && self.now().iter().filter(|(whose, _)| *whose == user).count() >= MOST
    }
}
