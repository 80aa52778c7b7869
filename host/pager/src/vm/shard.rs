//! Shards: the userfaultfds of a process, through one of which a page's faults come (`ballast_base::stripes`).
//!
//! Before: the client made them. After: each has a fault worker of its own.
//! Threads: any; nothing here changes. Promise: at least one, in the client's order.

use ballast_sys::Uffd;

/// The userfaultfds of one process, in the client's order.
#[derive(Debug)]
pub struct Shards(Vec<Uffd>);

impl Shards {
    /// `None` if there is none.
    pub fn new(uffds: Vec<Uffd>) -> Option<Self> {
        (!uffds.is_empty()).then_some(Self(uffds))
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// One of them.
    pub fn get(&self, shard: usize) -> &Uffd {
        &self.0[shard]
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = &Uffd> {
        self.0.iter()
    }
}
