//! Checks whether this engine could serve a VM that another engine serves now.
//!
//! Before: this engine will follow another one, and the keeper sends each VM's descriptors. After: nothing has changed,
//! and the keeper knows that this engine can open the VM, or why it cannot.
//! Threads: the VM's worker.
//! Promise: it only reads. It checks everything that opening depends on: layouts, words, store numbers, RAM files.
//! Unfinished work of the other engine is no reason to refuse, because recovery repairs it.

use std::os::fd::OwnedFd;

use anyhow::{Context, ensure};
use ballast_base::store::{FILE_STORE, GROUP_STORE, RAM_STORE, REMOTE_STORE};
use ballast_base::wire::{StoreFiles, VmId};
use ballast_handover::arena;
use ballast_handover::state_file::StateFile;
use ballast_pager::vm::inspect::{Inspected, inspect};

use super::order_files::{Files, ram_files, sent_regions, store_files};
use super::shared::Engine;

impl Engine {
    pub(super) fn check_vm(
        &self,
        id: VmId,
        stores: &[StoreFiles],
        files: u8,
        regions: u32,
        fds: Vec<OwnedFd>,
    ) -> anyhow::Result<Inspected> {
        let mut fds = fds.into_iter();
        let state = StateFile::open(fds.next().context("the state file is missing")?)?;
        ensure!(state.id() == id, "the state file is that of VM {}", state.id());
        let Files { arena, group, file } = store_files(stores, &mut fds)?;
        arena::inspect(&arena::RAM, &arena)?;
        if let Some(group) = &group {
            arena::inspect(&arena::GROUP, group)?;
        }
        if let Some([_, index]) = &file {
            // The store's file is on a disk, which may not respond. Opening would not wait for it, either.
            arena::inspect(&arena::INDEX, index)?;
        }
        let ram = ram_files(fds.collect(), files)?;
        for (number, record) in sent_regions(&state, regions).iter().enumerate().filter(|(_, record)| !record.removed) {
            let missing = record.files.iter().find(|wanted| ram.iter().all(|file| file.id != **wanted));
            ensure!(missing.is_none(), "region {number}: its RAM file {missing:?} did not come");
        }
        let mut numbers = vec![RAM_STORE];
        numbers.extend(file.map(|_| FILE_STORE));
        numbers.extend(group.map(|_| GROUP_STORE));
        // Without a cluster in the settings, the VM's pages in the cluster wait (`missing`).
        numbers.extend((self.host.remote.is_some() || state.cluster() != 0).then_some(REMOTE_STORE));
        let seen = inspect(&state, &numbers)?;
        let Inspected { words, far, moving } = seen;
        tracing::info!(vm = state.name(), words, far, moving, "checked: this engine could serve it");
        Ok(seen)
    }
}
