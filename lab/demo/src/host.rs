//! The demo's host: its arguments, the service and the program that starts guests.
//!
//! Before: `lib` or `cluster` was asked for a demo. After: guests boot, and their figures are read from the API.
//! Threads: the demo's one. Units: bytes and seconds. Promise: the service and its guests end with this process.

use std::fmt;
use std::time::Duration;

use anyhow::{Context, Result};
use ballast_api::{AdoptRequest, Client, VmStat};
use ballast_base::Bytes;
use ballast_base::units::KIB;
use ballast_testhost::{Daemon, until};
use ballast_testvm::qemu::QemuGuest;
use ballast_testvm::qemu::load::Dataset;

use crate::guest::Guest;
use crate::measure;

/// Run the main job on two real VMs: load, squeeze, kill the engine, verify every byte
#[derive(Clone, Debug, clap::Args)]
pub struct DemoArgs {
    /// RAM of each guest
    #[arg(long, default_value = "640M", value_name = "SIZE")]
    pub(crate) memory: Bytes,
    /// Data loaded into each guest's Redis
    #[arg(long, default_value = "256M", value_name = "SIZE")]
    pub(crate) data: Bytes,
    /// Seconds per throughput measurement
    #[arg(long, default_value_t = 8, value_name = "SECONDS")]
    pub(crate) seconds: u64,
    /// One guest whose cold memory is on a cluster of six servers, one of which is killed
    #[arg(long)]
    pub(crate) cluster: bool,
}

pub(crate) const VALUE: usize = 16 * KIB as usize;
/// Limit for the boot of a guest. Without KVM, on a busy machine, a boot is slow.
pub(crate) const BOOT_TIMEOUT: Duration = Duration::from_secs(120);
/// Limit for the time until both VMs are within their limits.
pub(crate) const LIMIT_TIMEOUT: Duration = Duration::from_secs(60);

/// The machine lacks something that the demo needs. The text names it.
#[derive(Debug)]
pub struct Missing(pub(crate) String);

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Missing {}

pub(crate) struct Host(Daemon);

impl Host {
    pub(crate) fn with_settings(settings: &str) -> Result<Self> {
        Ok(Self(Daemon::with_settings(settings)?))
    }

    pub(crate) fn api(&self) -> &Client {
        self.0.api()
    }

    pub(crate) fn boot(&self, name: &str, memory: Bytes) -> Result<Guest> {
        let words = self.0.run_words(name, &[])?;
        let qemu = QemuGuest::builder().name(name).memory(memory).prefix(words).spawn()?;
        Ok(Guest { name: name.to_owned(), qemu, data: Dataset::new(0, VALUE, 0) })
    }

    /// Boots a guest without Ballast: private memory, no library.
    pub(crate) fn boot_plain(&self, name: &str, memory: Bytes) -> Result<Guest> {
        let qemu = QemuGuest::builder().name(name).memory(memory).shared_memory(false).spawn()?;
        Ok(Guest { name: name.to_owned(), qemu, data: Dataset::new(0, VALUE, 0) })
    }

    /// Adopts a guest while it runs.
    pub(crate) fn adopt(&self, guest: &Guest) -> Result<()> {
        let request = AdoptRequest { pid: Some(guest.qemu.pid()), ..AdoptRequest::default() };
        self.api().adopt(&request).with_context(|| format!("Adopting {}", guest.name)).map(drop)
    }

    pub(crate) fn stats(&self, guests: &[Guest]) -> Result<Vec<VmStat>> {
        guests.iter().map(|guest| Ok(self.api().vm(&guest.name)?)).collect()
    }

    pub(crate) fn wait_for_limits(&self, guests: &[Guest], limits: &[u64]) -> Result<()> {
        until("the VMs are still over their limits", LIMIT_TIMEOUT, || {
            let stats = self.stats(guests)?;
            Ok(stats.iter().zip(limits).all(|(vm, limit)| vm.resident_bytes <= *limit).then_some(()))
        })
    }

    /// Kill the engine, a child of the keeper. Returns its pid.
    pub(crate) fn kill_engine(&self) -> Result<u32> {
        let pid = self.api().host()?.engine_pid;
        measure::kill(pid)?;
        Ok(pid)
    }
}
