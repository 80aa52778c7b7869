//! The workers' private memory: orders, version words, stacks, and what a KVM guest needs beside them.
//!
//! Before: `vm` knows the amount. After: `vm` and `kvm` take pieces of it.
//! Threads: one lays it out; the workers use what is theirs. Units: bytes; offsets from its start.
//! Promise: pieces begin at pages and never overlap.

use std::io;

use ballast_base::{Bytes, PAGE_SIZE};
use ballast_sys::{Mapping, memfd};

use crate::outcome::GuestKind;

/// Memory that only the workers and the host use, with the addresses by which workers know it.
#[derive(Debug)]
pub(crate) struct Private {
    pub map: Mapping,
    guest_base: u64,
    used: usize,
}

impl Private {
    /// `size` zeroed bytes.
    pub fn new(size: usize, kind: GuestKind) -> io::Result<Self> {
        let fd = memfd::create("ballast-testvm-private", Bytes(size as u64))?;
        let map = Mapping::shared(&fd, 0, size)?;
        // A native worker sees host addresses, a vCPU sees guest addresses from zero.
        let guest_base = if kind == GuestKind::Native { map.addr() as u64 } else { 0 };
        Ok(Self { map, guest_base, used: 0 })
    }

    /// Take `len` zeroed bytes at the next page. Returns their offset.
    pub fn take(&mut self, len: usize) -> usize {
        let offset = self.used.next_multiple_of(PAGE_SIZE);
        self.used = offset + len;
        assert!(self.used <= self.map.len(), "the private memory was measured too small");
        offset
    }

    /// The address workers know `offset` by.
    pub fn address(&self, offset: usize) -> u64 {
        self.guest_base + offset as u64
    }
}

/// Offsets of one worker's private memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Places {
    pub job: usize,
    pub versions: usize,
    pub stack: usize,
}

/// Enough for the guest program, which needs a few hundred bytes.
pub(crate) const STACK_LEN: usize = 4 * PAGE_SIZE;
