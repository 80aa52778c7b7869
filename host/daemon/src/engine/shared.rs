//! State that the thread that takes orders shares with the workers of VMs.
//!
//! Before: the engine has begun. After: `mod` takes orders with it, and `vms`, `make`, `memory` and `write_back` carry
//! them out.
//! Threads: any.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{self, Receiver, TryRecvError};
use std::sync::{Arc, Mutex};

use anyhow::Context;
use ballast_base::wire::{self, VmId};
use ballast_handover::failure::Failure;
use ballast_handover::orders::Report;
use ballast_handover::state_file::StateFile;
use ballast_pager::vm::Vm;
use ballast_sys::lock::Lock;
use ballast_sys::process::Process;
use ballast_sys::scm;

use super::governor::Governor;
use super::host::Host;
use super::served::Served;
use super::unopened::{Unopened, may_pass};
use crate::events::Events;
use crate::settings::Settings;

pub(super) type Made = Result<[OwnedFd; 2], Failure>;

#[derive(Debug, Default)]
pub(super) struct Overdue(Mutex<Vec<Receiver<Made>>>);

impl Overdue {
    pub fn is_any(&self) -> bool {
        let mut overdue = self.0.locked();
        overdue.retain(|made| matches!(made.try_recv(), Err(TryRecvError::Empty)));
        !overdue.is_empty()
    }

    pub fn add(&self, made: Receiver<Made>) {
        self.0.locked().push(made);
    }
}

/// Set when the far pages of a VM that is being closed must no longer be written back.
pub(super) type Closing = Arc<AtomicBool>;

/// The calling thread counts as working for the VM until this is dropped.
pub(super) struct Unlists<'a>(pub &'a Vm);

impl Drop for Unlists<'_> {
    fn drop(&mut self) {
        self.0.state.unlist_thread();
    }
}

pub(super) fn mend(vm: &Vm) -> anyhow::Result<()> {
    let recovered = vm.recover()?;
    let far: Vec<_> = recovered.live.iter().map(|(number, live)| (*number, live.count())).collect();
    tracing::warn!(vm = vm.state.name(), ?far, mended = recovered.mended, "took over");
    Ok(())
}

pub(super) struct Engine {
    pub keeper: Arc<OwnedFd>,
    pub me: Process,
    pub host: Arc<Host>,
    pub governor: Arc<Governor>,
    pub events: Arc<Events>,
    pub mapper_scan: mpsc::Sender<Arc<Served>>,
    pub closing: Mutex<HashMap<VmId, Closing>>,
    pub overdue: Overdue,
    pub unopened: Mutex<HashMap<VmId, Unopened>>,
    /// VMs that another engine serves, too, and that this one has closed. The keeper records that, unless it dies
    /// before it reads the report.
    pub parted: Mutex<Vec<StateFile>>,
}

impl Engine {
    pub fn settings(&self) -> &Settings {
        &self.host.settings
    }

    pub fn open_again(&self, state: &StateFile) -> anyhow::Result<StateFile> {
        let state = StateFile::open(state.fd().try_clone_to_owned().context("Duplicating a descriptor")?)?;
        state.open_as(self.me.pid, self.me.start);
        Ok(state)
    }

    pub fn report(&self, report: &Report) -> anyhow::Result<()> {
        scm::send(&*self.keeper, &wire::encode(report), &[]).context("Reporting to the keeper")
    }

    /// Records why this VM could not be opened, or that it was. `is_whole`: whether the order came with all of its
    /// descriptors.
    pub fn unopened(&self, vm: VmId, why: Option<&anyhow::Error>, is_whole: bool) {
        self.forget_unopened(vm);
        if let Some(error) = why {
            let why = Unopened { text: format!("{error:#}"), may_pass: !is_whole || may_pass(error.as_ref()) };
            self.unopened.locked().insert(vm, why);
        }
    }

    pub fn why_unopened(&self, vm: VmId) -> Option<String> {
        self.unopened.locked().get(&vm).map(|why| why.text.clone())
    }

    pub fn forget_unopened(&self, vm: VmId) -> Option<Unopened> {
        self.unopened.locked().remove(&vm)
    }

    pub fn has_parted(&self, state: Option<StateFile>) {
        let mut parted = self.parted.locked();
        parted.extend(state);
        // The keeper has recorded the others.
        parted.retain(|state| state.leaving() == Some((self.me.pid, self.me.start)));
    }

    pub fn has_again(&self, vm: VmId) {
        self.parted.locked().retain(|state| state.id() != vm);
    }

    /// The keeper is gone: records the closings whose reports it may not have read.
    pub fn record_parted(&self) {
        self.has_parted(None);
        let mut parted = self.parted.locked();
        parted.drain(..).for_each(|state| state.has_left());
    }

    pub fn failed(&self, vm: Option<String>, what: &str, error: &anyhow::Error) {
        tracing::error!(vm, "Carrying out {what}: {error:#}");
        self.events.add(vm, "order-failed", format!("{error:#}"));
    }

    pub fn done(&self, seq: u64, result: io::Result<()>) -> anyhow::Result<()> {
        self.report(&Report::Done { seq, result: result.map_err(Failure::new) })
    }
}
