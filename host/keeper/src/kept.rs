//! A keeper's record, and a keeper made from it.
//!
//! Before: nothing prevents an exec (`replace`). After: the next program has this keeper's VMs, clients and engine.
//! Threads: the keeper's one.
//! Promise: to make a keeper, a program duplicates the descriptors, reads files, and sends nothing. So if it fails
//! here, the program before it can be the keeper again.

use std::os::fd::AsRawFd;
use std::sync::Arc;

use anyhow::{Context, bail};
use ballast_base::wire::{decode, encode};
use ballast_handover::kept::Kept;
use ballast_handover::orders::Order;

use crate::client::Clients;
use crate::engines::Engines;
use crate::keeper::{Keeper, Standing};
use crate::options::Options;
use crate::program::Program;
use crate::taken;
use crate::upgrading::Upgrades;
use crate::vms::Vms;

impl Keeper {
    /// The record of this keeper; `None` if it cannot be recorded: `replace` says why.
    pub(crate) fn kept(&self) -> Option<Kept> {
        let standing = self.standing.as_ref()?;
        let mut kept = Kept {
            lock: standing.lock,
            attach: standing.attach.as_raw_fd(),
            file_stores: self.file_stores,
            upgrading: encode(&Order::Upgrading(self.upgrades.last().clone())),
            groups: self.groups.clone(),
            ..Kept::default()
        };
        self.engines.record(&mut kept)?;
        self.clients.record(&mut kept);
        self.vms.record(&mut kept);
        Some(kept)
    }

    /// Makes the keeper of this record, in the next program. For the other arguments see [`Engines::of`].
    pub(crate) fn of(kept: &Kept, own_program: Program, is_back: bool) -> anyhow::Result<Self> {
        let options = Options { file_stores: kept.file_stores, groups: kept.groups.clone(), ..Options::default() };
        let engines = Engines::of(kept, own_program, is_back)?;
        let mut keeper = Self::new(options, engines);
        keeper.clients = Clients::of(kept)?;
        let Order::Upgrading(upgrading) = decode(&kept.upgrading).context("Reading how the upgrade stands")? else {
            bail!("how the upgrade stands is no such message");
        };
        keeper.upgrades = Upgrades::after(upgrading);
        keeper.vms = Vms::of(kept)?;
        keeper.standing = Some(Standing { lock: kept.lock, attach: Arc::new(taken::fd(kept.attach)?) });
        Ok(keeper)
    }
}
