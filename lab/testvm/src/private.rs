//! The private memory of the workers: jobs, version words, weights, stacks, and program and page tables of a KVM guest.
//!
//! Before: `vm` computes the size. After: `vm` and `kvm` allocate pieces of it.
//! Threads: one lays it out. Each worker uses its own pieces. Units: bytes; offsets count from the start.
//! Promise: pieces begin at page boundaries and never overlap.

use std::io;

use ballast_base::{Bytes, PAGE_SIZE};
use ballast_sys::{Mapping, memfd};

use crate::outcome::GuestKind;

/// Memory that only workers and host use, and its address as the workers see it.
#[derive(Debug)]
pub(crate) struct Private {
    pub map: Mapping,
    guest_base: u64,
    used: usize,
}

impl Private {
    pub fn new(size: usize, kind: GuestKind) -> io::Result<Self> {
        let fd = memfd::create("ballast-testvm-private", Bytes(size as u64))?;
        let map = Mapping::shared(&fd, 0, size)?;
        // A native worker sees host addresses, a vCPU sees guest addresses from zero.
        let guest_base = if kind == GuestKind::Native { map.addr() as u64 } else { 0 };
        Ok(Self { map, guest_base, used: 0 })
    }

    /// Allocate `len` zeroed bytes at the next page boundary. Returns their offset.
    pub fn take(&mut self, len: usize) -> usize {
        let offset = self.used.next_multiple_of(PAGE_SIZE);
        self.used = offset + len;
        assert!(self.used <= self.map.len(), "the private memory was measured too small");
        offset
    }

    pub fn address(&self, offset: usize) -> u64 {
        self.guest_base + offset as u64
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Places {
    pub job: usize,
    pub stack: usize,
}

/// Length of a stack in bytes. The guest program needs a few hundred.
pub(crate) const STACK_LEN: usize = 4 * PAGE_SIZE;
