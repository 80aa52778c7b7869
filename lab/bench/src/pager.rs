//! The pager of a guest: the daemon, the kernel, the plain handler, or none.
//!
//! Before: a guest in a helper process has RAM. After: its pages are paged out when the bench orders it.
//! Threads: the guest's; the client has one of its own. Units: pages; microseconds of CPU time.
//! Promise: a guest of the kernel's is in its memory cgroup before it has memory.

use std::collections::HashSet;
use std::os::fd::{AsFd, AsRawFd};
use std::path::PathBuf;

use anyhow::{Context, Result, anyhow, bail};
use ballast_base::{Bytes, Hva, PAGE_SIZE, PageCount};
use ballast_client::Client;
use ballast_sys::memfd;
use ballast_testvm::GuestRam;

use crate::order::Backing;
use crate::plain::Handler;

pub(crate) enum Pager {
    /// The daemon, by its limit; the client stays attached as long as the process lives.
    Ballast(#[expect(dead_code, reason = "kept, not used")] Client),
    Kernel,
    Plain(Handler),
    Floor,
}

impl Pager {
    pub(crate) fn attach(backing: &Backing, ram: &GuestRam) -> Result<Self> {
        let hva = Hva(ram.addr() as u64);
        Ok(match backing {
            Backing::Ballast { socket, name } => {
                // Only the guest touches this memory, so the short quarantine is right.
                let builder = Client::builder().name(name).socket(socket).may_pin(false);
                let file = ram.memfd().try_clone_to_owned().context("Duplicating the memory file")?;
                let client = builder.region(file, hva, Bytes(ram.len() as u64), Bytes(0)).attach();
                Self::Ballast(client.map_err(|error| anyhow!("Attaching {name}: {}", ballast_client::chain(&error)))?)
            }
            Backing::Plain => Self::Plain(Handler::start(ram)?),
            Backing::Near => Self::Plain(Handler::start_near(ram)?),
            Backing::Kernel { .. } => Self::Kernel,
            Backing::Floor => Self::Floor,
        })
    }

    /// Pages out the first `pages` pages of RAM. Returns the CPU time that other processes spent on it.
    pub(crate) fn page_out(&mut self, ram: &GuestRam, pages: u64) -> Result<f64> {
        let len = PageCount(pages).bytes().0 as usize;
        match self {
            Self::Ballast(_) => bail!("Ballast puts pages out by its limit"),
            Self::Kernel => ram.page_out(0, len).context("MADV_PAGEOUT")?,
            Self::Floor => ram.zap(0, len).context("MADV_DONTNEED")?,
            Self::Plain(handler) => {
                ram.zap(0, len).context("MADV_DONTNEED")?;
                return handler.page_out(pages);
            }
        }
        Ok(0.0)
    }
}

pub(crate) fn enter(backing: &Backing) -> Result<()> {
    let Backing::Kernel { procs } = backing else { return Ok(()) };
    std::fs::write(procs, std::process::id().to_string()).with_context(|| format!("Writing {}", procs.display()))
}

/// The file of this process's guest RAM, as others can open it.
pub(crate) fn own_file(ram: &GuestRam) -> PathBuf {
    format!("/proc/{}/fd/{}", std::process::id(), ram.memfd().as_raw_fd()).into()
}

/// Pages of a file that are not in it.
pub(crate) fn holes(file: impl AsFd, pages: u64) -> Result<Vec<u64>> {
    let mut present = HashSet::new();
    let mut offset = 0;
    while let Some((start, end)) = memfd::next_data(&file, offset).context("Looking for data in guest RAM")? {
        present.extend(start / PAGE_SIZE as u64..end.div_ceil(PAGE_SIZE as u64));
        offset = end;
    }
    Ok((0..pages).filter(|page| !present.contains(page)).collect())
}
