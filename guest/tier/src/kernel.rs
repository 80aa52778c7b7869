//! The engine's requests to the kernel about processes: their page tables, and moves of their pages.
//!
//! Before: a program was chosen. After: [`crate::pages`] and [`crate::mover`] have answers, of this machine or, in
//! tests, of a model. Threads: the engine's. Units: addresses of the process, numbers of nodes.
//! Promise: none of its own; the calls are those of `ballast-sys`.

use std::io;

use ballast_base::{Hva, PAGE_SIZE};
use ballast_sys::Remote;
use ballast_sys::numa::{Place, move_pages};

/// A page that a process maps: its frame, and whether it is mapped once.
pub type Mapped = (u64, bool);

/// The page table of a process.
pub trait PageTable: Send {
    /// Returns what is mapped at this number of pages from `start` on; see [`Remote::pages`].
    fn pages(&self, start: u64, count: usize) -> io::Result<Vec<Option<Mapped>>>;
}

impl PageTable for Remote {
    fn pages(&self, start: u64, count: usize) -> io::Result<Vec<Option<Mapped>>> {
        let mut found = vec![None; count];
        Self::pages(self, Hva(start), &mut found)?;
        Ok(found
            .into_iter()
            .map(|page| page.map(|page| (page.address / PAGE_SIZE as u64, page.is_exclusive)))
            .collect())
    }
}

/// Moves pages of a process to a node; see [`move_pages`].
pub type Move<'a> = dyn Fn(u32, &[u64], u32) -> io::Result<Option<Vec<Place>>> + 'a;

/// The kernel, or a model of it.
pub(crate) trait Kernel: Send {
    fn open(&self, pid: u32) -> io::Result<Box<dyn PageTable>>;

    fn move_pages(&self, pid: u32, pages: &[u64], node: u32) -> io::Result<Option<Vec<Place>>>;
}

#[derive(Debug)]
pub(crate) struct Machine;

impl Kernel for Machine {
    fn open(&self, pid: u32) -> io::Result<Box<dyn PageTable>> {
        Ok(Box::new(Remote::open(pid)?))
    }

    fn move_pages(&self, pid: u32, pages: &[u64], node: u32) -> io::Result<Option<Vec<Place>>> {
        move_pages(pid, pages, node)
    }
}
