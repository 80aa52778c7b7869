//! A real guest with an agent, under `ballast run --agent`.
//!
//! Before: `scripts/agent-image.sh` has made the image. After: a command runs in the guest; the caller talks to it
//! through its console, and to the host through the API. Threads: the bench's one. Units: bytes.
//! Promise: the guest ends with this process.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ballast_api::VmStat;
use ballast_base::{Bytes, MIB};
use ballast_testhost::until;
use ballast_testvm::qemu::{Image, QemuGuest};

use crate::order::Role;
use crate::rig::Bench;
use crate::worker::ROLE_COMMAND;

pub(crate) const MEMORY: Bytes = Bytes(320 * MIB);
/// Time in which agent and host learn what is hot, and time under the limit in which restores are counted.
pub(crate) const SETTLES: Duration = Duration::from_secs(60);
pub(crate) const COUNTED: Duration = Duration::from_secs(45);
pub(crate) const TAKEN: u64 = 80 * MIB;

pub(crate) fn mib(bytes: u64) -> f64 {
    bytes as f64 / MIB as f64
}

pub(crate) fn percent(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 * 100.0 / whole as f64 }
}

/// Pages that were restored at a touch, or prefetched.
pub(crate) fn restored(stat: &VmStat) -> u64 {
    stat.faults.restored_pages + stat.reclaim.prefetched_pages
}

/// Longest time of a step of an emulated guest on a busy machine.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(240);

/// The command line before that of QEMU, so that QEMU ends with this process; `more` follows.
pub(crate) fn words_before(more: Vec<String>) -> Result<Vec<String>> {
    let own = std::env::current_exe().context("Finding this program's own file")?.to_string_lossy().into_owned();
    let role = serde_json::to_string(&Role::Become)?;
    Ok([vec![own, ROLE_COMMAND.to_owned(), role, "--".to_owned()], more].concat())
}

pub(crate) struct Booted {
    pub(crate) guest: QemuGuest,
    pub(crate) name: String,
}

impl Booted {
    /// Boots a guest that runs a command and ends with this process.
    pub(crate) fn new(bench: &mut Bench, command: &str) -> Result<Self> {
        let name = bench.vm_name();
        let prefix = words_before(bench.daemon.run_words(&name, &["--agent"])?)?;
        let builder = QemuGuest::builder().name("bench").memory(MEMORY).image(Image::find_with_agent()?);
        let mut guest = builder.prefix(prefix).run(command).spawn()?;
        guest.wait_ready(TIMEOUT)?;
        bench.daemon.wait_for_vm(&name)?;
        Ok(Self { guest, name })
    }

    pub(crate) fn expect(&mut self, what: &str) -> Result<()> {
        let said = self.guest.answer(TIMEOUT)?;
        ensure!(said == what, "the guest says {said:?} and not {what:?}: {}", self.guest.serial_log());
        Ok(())
    }

    pub(crate) fn stat(&self, bench: &Bench) -> Result<VmStat> {
        Ok(bench.daemon.api().vm(&self.name)?)
    }

    /// Takes this much of the guest's resident memory, and waits until it is gone.
    pub(crate) fn squeeze(&self, bench: &Bench, taken: u64) -> Result<()> {
        let limit = self.stat(bench)?.resident_bytes.saturating_sub(taken);
        bench.daemon.api().set_limit(&self.name, Some(limit))?;
        until("the guest is not within its limit", TIMEOUT, || {
            Ok((self.stat(bench)?.resident_bytes <= limit).then_some(()))
        })
    }

    pub(crate) fn end(mut self, bench: &Bench) -> Result<()> {
        bench.daemon.api().set_limit(&self.name, None)?;
        self.guest.tell("compare")?;
        let status = self.guest.wait_run(TIMEOUT)?;
        ensure!(status == 0, "WRONG DATA, status {status}: {}", self.guest.serial_log());
        bench.daemon.wait_until_gone(&self.name)
    }
}
