//! The descriptors that come with an order about a VM, and the regions to which they belong.
//!
//! Before: the keeper sent the order ([`ballast_handover::orders`]). After: [`super::vms`] opens the VM with the files,
//! or [`super::check`] checks whether it could. Threads: the VM's worker. Promise: if too few or too many files come,
//! an error says how many.

use std::io;
use std::os::fd::OwnedFd;

use anyhow::{Context, bail, ensure};
use ballast_base::store::{FILE_STORE, GROUP_STORE, RAM_STORE};
use ballast_base::wire::StoreFiles;
use ballast_handover::records::RegionRecord;
use ballast_handover::state_file::StateFile;
use ballast_pager::vm::ram::RamFile;

/// The regions whose files came with an order about `count` regions: the keeper may have added more since.
pub(super) fn sent_regions(state: &StateFile, count: u32) -> Vec<RegionRecord> {
    let mut regions = state.regions();
    regions.truncate(count as usize);
    regions
}

pub(super) fn ram_files(fds: Vec<OwnedFd>, count: u8) -> anyhow::Result<Vec<RamFile>> {
    ensure!(fds.len() == usize::from(count), "{} RAM files came, and {count} were announced", fds.len());
    fds.into_iter().map(RamFile::new).collect::<io::Result<_>>().context("Looking at RAM files")
}

pub(super) struct Files {
    pub arena: OwnedFd,
    /// The VM's own opening of its group's arena.
    pub group: Option<OwnedFd>,
    pub file: Option<[OwnedFd; 2]>,
}

pub(super) fn store_files(stores: &[StoreFiles], fds: &mut impl Iterator<Item = OwnedFd>) -> anyhow::Result<Files> {
    let (mut arena, mut group, mut file) = (None, None, None);
    for StoreFiles { store, count } in stores {
        let mut files = fds.by_ref().take(usize::from(*count));
        match (*store, files.next(), files.next(), files.next()) {
            (RAM_STORE, Some(only), None, None) => arena = Some(only),
            (FILE_STORE, Some(place), Some(index), None) => file = Some([place, index]),
            (GROUP_STORE, Some(only), None, None) => group = Some(only),
            _ => bail!("{count} files came for store {store}, which this engine does not expect"),
        }
    }
    Ok(Files { arena: arena.context("the arena is missing")?, group, file })
}
