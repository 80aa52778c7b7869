//! A real guest with an agent, under `ballast run --agent`.
//!
//! Before: `scripts/agent-image.sh` has made the image. After: a command runs in the guest; the caller talks to it by
//! its console, and to the host by the API. Threads: the bench's one. Units: bytes.
//! Promise: the guest ends with this process.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ballast_api::VmStat;
use ballast_base::{Bytes, MIB};
use ballast_sys::program;
use ballast_testvm::qemu::{Image, QemuGuest};

use crate::order::Role;
use crate::rig::Bench;
use crate::worker::ROLE_COMMAND;

/// Memory of a guest.
pub(crate) const MEMORY: Bytes = Bytes(320 * MIB);
/// Time in which agent and host learn what is hot, and time under the limit in which restores are counted.
pub(crate) const SETTLES: Duration = Duration::from_secs(60);
pub(crate) const COUNTED: Duration = Duration::from_secs(45);
/// Memory that the limit takes.
pub(crate) const TAKEN: u64 = 80 * MIB;

pub(crate) fn mib(bytes: u64) -> f64 {
    bytes as f64 / MIB as f64
}

pub(crate) fn percent(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 * 100.0 / whole as f64 }
}

/// Pages that were restored, on touch or ahead of one.
pub(crate) fn restored(stat: &VmStat) -> u64 {
    stat.faults.restored_pages + stat.reclaim.prefetched_pages
}

/// Longest time of a step of an emulated guest on a busy machine.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(240);

/// The words before those of a QEMU that ends with this process: a VM of this name under `ballast run` with these
/// options, or one without Ballast.
pub(crate) fn words_before(run: Option<(&Bench, &str, &[&str])>) -> Result<Vec<String>> {
    let path = |path: &Path| path.to_string_lossy().into_owned();
    let own = path(&std::env::current_exe().context("Finding this program's own file")?);
    let role = serde_json::to_string(&Role::Become)?;
    let mut words = vec![own, ROLE_COMMAND.to_owned(), role, "--".to_owned()];
    if let Some((bench, name, options)) = run {
        let ballast = path(&program::find("ballast").context("Finding what starts QEMU")?);
        let socket = path(&bench.daemon.attach_socket());
        let last = ["--name", name, "--attach-socket", &socket, "--"];
        words.extend([&[&ballast, "run"], options, &last].concat().into_iter().map(str::to_owned));
    }
    Ok(words)
}

/// A guest, and the name of its VM.
pub(crate) struct Booted {
    pub(crate) guest: QemuGuest,
    pub(crate) name: String,
}

impl Booted {
    /// Boots a guest that runs a command and ends with this process.
    pub(crate) fn new(bench: &mut Bench, command: &str) -> Result<Self> {
        let name = bench.vm_name();
        let prefix = words_before(Some((bench, &name, &["--agent"])))?;
        let builder = QemuGuest::builder().name("bench").memory(MEMORY).image(Image::find_with_agent()?);
        let mut guest = builder.prefix(prefix).run(command).spawn()?;
        guest.wait_ready(TIMEOUT)?;
        bench.daemon.wait_for_vm(&name)?;
        Ok(Self { guest, name })
    }

    /// Waits until the guest says this.
    pub(crate) fn expect(&mut self, what: &str) -> Result<()> {
        let said = self.guest.answer(TIMEOUT)?;
        ensure!(said == what, "the guest says {said:?} and not {what:?}: {}", self.guest.serial_log());
        Ok(())
    }

    pub(crate) fn stat(&self, bench: &Bench) -> Result<VmStat> {
        Ok(bench.daemon.api().vm(&self.name)?)
    }

    /// Takes this much of what is resident, and waits until it has gone.
    pub(crate) fn squeeze(&self, bench: &Bench, taken: u64) -> Result<()> {
        let limit = self.stat(bench)?.resident_bytes.saturating_sub(taken);
        bench.daemon.api().set_limit(&self.name, Some(limit))?;
        let began = Instant::now();
        while self.stat(bench)?.resident_bytes > limit {
            ensure!(began.elapsed() < TIMEOUT, "the guest is never within {}", Bytes(limit));
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }

    /// Lets the guest compare its bytes and end.
    pub(crate) fn end(mut self, bench: &Bench) -> Result<()> {
        bench.daemon.api().set_limit(&self.name, None)?;
        self.guest.tell("compare")?;
        let status = self.guest.wait_run(TIMEOUT)?;
        ensure!(status == 0, "WRONG DATA, status {status}: {}", self.guest.serial_log());
        bench.daemon.wait_until_gone(&self.name)
    }
}
