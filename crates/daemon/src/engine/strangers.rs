//! The watch: no page leaves a VM while a process that has not attached maps its RAM.
//!
//! Before: a view came, or [`EVERY`] is over. After: VMs with strangers are held and their pages on the way back; those
//! whose strangers went are let go.
//! Threads: one, which may be kept waiting by other processes; bringing pages back has a thread of the VM's own.
//! Promise: a VM that nobody has looked at yet is not reclaimed from. Who cannot be looked at is said once.

use std::collections::HashSet;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use ballast_pager::vm::Hold;
use ballast_sys::kcmp;
use ballast_sys::memfd::FileId;

use super::huge_pages;
use crate::backend::{Host, Served};
use crate::keeper::fence::Process;
use crate::watch::{self, Look};

/// How often processes are looked through.
const EVERY: Duration = Duration::from_secs(5);

/// Start the watch; a VM that is sent to it is looked at at once.
pub fn start(host: Arc<Host>) -> anyhow::Result<mpsc::Sender<Arc<Served>>> {
    let (sender, asked) = mpsc::channel::<Arc<Served>>();
    let mut watch = Watch { host, unreadable: HashSet::new() };
    std::thread::Builder::new().name("watch".into()).spawn(move || {
        loop {
            let vms = match asked.recv_timeout(EVERY) {
                Ok(first) => std::iter::once(first).chain(asked.try_iter()).collect(),
                Err(mpsc::RecvTimeoutError::Timeout) => watch.host.all(),
                Err(mpsc::RecvTimeoutError::Disconnected) => return,
            };
            watch.look(&vms);
        }
    })?;
    Ok(sender)
}

struct Watch {
    host: Arc<Host>,
    /// Processes that could not be looked at, of which it was said.
    unreadable: HashSet<Process>,
}

impl Watch {
    fn look(&mut self, vms: &[Arc<Served>]) {
        let wanted: Vec<&Arc<Served>> = vms.iter().filter(|served| wants_look(served)).collect();
        if wanted.is_empty() {
            return;
        }
        let look = look_for_strangers(&wanted);
        for served in &wanted {
            let nobody = "no other process maps this VM's RAM any more";
            judge(served, Hold::Shared, "ram-shared", stranger(served, &look), nobody);
            let spared = "khugepaged spares this VM's RAM now";
            judge(served, Hold::HugePages, "huge-pages", huge_pages::danger(served), spared);
            served.vm.hold(Hold::Unchecked, None);
        }
        let unreadable: HashSet<Process> = look.unreadable.into_iter().collect();
        for process in unreadable.difference(&self.unreadable) {
            self.host.events.add(None, "not-looked-at", unreadable_text(&[*process]));
        }
        self.unreadable = unreadable;
    }
}

/// What an operator is told about processes that could not be looked at.
pub fn unreadable_text(processes: &[Process]) -> String {
    let names: Vec<String> = processes.iter().map(|process| watch::name(*process)).collect();
    format!(
        "the memory map of process {} cannot be read: if it maps RAM of a VM and has not attached, it may read zeros",
        names.join(", ")
    )
}

/// Only a VM from which pages may go needs a look, and one that is waiting for it.
fn wants_look(served: &Served) -> bool {
    let vm = &served.vm;
    let may_lose_pages = vm.effective_limit().is_some() && !vm.is_pinned() && !vm.views().is_empty();
    may_lose_pages || vm.is_held_for(Hold::Unchecked)
}

fn files_of(served: &Served) -> HashSet<FileId> {
    served.vm.regions().iter().filter(|region| !region.is_removed()).map(|region| region.file_id()).collect()
}

/// Look twice for processes that map RAM of one of these VMs and are not among its views.
pub fn look_for_strangers(vms: &[&Arc<Served>]) -> Look {
    let vms: Vec<_> = vms.iter().map(|served| (files_of(served), pids_of(served))).collect();
    let all = vms.iter().flat_map(|(files, _)| files).copied().collect();
    // Known is who is a view of every VM of which it maps RAM.
    let attached = vms.iter().flat_map(|(_, pids)| pids).copied().collect();
    watch::strangers(&all, attached, |process, found| {
        vms.iter().all(|(files, pids)| files.is_disjoint(found) || pids.contains(&process.pid))
    })
}

/// Who may map a VM's RAM: its processes, and this engine, which asks hugetlbfs through a mapping that nobody ever touches
/// what a file holds.
fn pids_of(served: &Served) -> HashSet<u32> {
    served.pids().into_iter().chain([std::process::id()]).collect()
}

/// Why no page may leave this VM, by what the look has found.
pub fn stranger(served: &Served, look: &Look) -> Option<String> {
    if let Some(reason) = served.unserved() {
        return Some(reason);
    }
    let (files, pids) = (files_of(served), pids_of(served));
    let strangers =
        look.mapping.iter().filter(|(process, found)| !files.is_disjoint(found) && !pids.contains(&process.pid));
    let process = strangers.map(|(process, _)| *process).min_by_key(|process| process.pid)?;
    let who = watch::name(process);
    let unknown = if kcmp::is_available() {
        ""
    } else {
        " (this kernel has no kcmp, so a child that runs in the VMM's own memory cannot be told from others)"
    };
    Some(format!("process {who} maps this VM's RAM and has not attached to Ballast, so no page may leave it{unknown}"))
}

/// Hold a VM while there is such a reason; let it go again when that is over.
fn judge(served: &Arc<Served>, kind: Hold, event: &str, reason: Option<String>, over: &str) {
    let vm = &served.vm;
    match (reason, vm.is_held_for(kind)) {
        (Some(reason), false) => {
            vm.report(event, reason.clone());
            if let Err(error) = served.restore(kind, reason, |_| ()) {
                vm.report("restore-failed", format!("Bringing its pages back: {error}"));
            }
        }
        (None, true) => {
            vm.report(event, over.into());
            vm.hold(kind, None);
        }
        _ => {}
    }
}
