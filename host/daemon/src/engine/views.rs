//! Adds a process whose faults will be served, even if not all of its RAM can be.
//!
//! Before: the keeper handed over userfaultfds and a control socket. After: the process's faults are served. If pages
//! are far in memory that the kernel does not register (the VMM unmapped it unannounced), the VM is not reclaimed.
//! Threads: the VM's worker. Promise: all regions are served, whatever is mapped there. A region that cannot be
//! registered costs an event and the VM's limit.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use anyhow::Context;
use ballast_base::wire::Span;
use ballast_pager::vm::client_peer::ClientPeer;
use ballast_pager::vm::view::View;
use ballast_sys::{Uffd, process};

use super::served::Served;

/// Whether this process is a QEMU that was started to load a VM: by `virsh restore`, a migration, or a snapshot.
pub fn loads(pid: u32) -> bool {
    let line = process::command_line(pid).unwrap_or_default();
    line.split(|byte| *byte == 0).any(|word| matches!(word, b"-incoming" | b"--incoming" | b"-loadvm" | b"--loadvm"))
}

pub fn add(
    served: &Arc<Served>,
    pid: u32,
    uffd_features: u64,
    fds: Vec<OwnedFd>,
    spans: &[(Span, u32)],
) -> anyhow::Result<()> {
    let vm = &served.vm;
    let (uffds, control) = match descriptors(fds) {
        Ok(descriptors) => descriptors,
        Err(error) => {
            let reason = format!("process {pid} is not served: {error:#}");
            served.hold_unserved(pid, reason)?;
            return Err(error);
        }
    };
    let epoch = vm.state.epoch();
    let view = Arc::new(View::new(pid, uffds, uffd_features, Arc::new(ClientPeer::new(control, epoch))));
    let added = vm.add_view(view, spans);
    let reason = match &added {
        Ok(bad) if bad.is_empty() => return Ok(()),
        Ok(bad) => {
            let what: Vec<String> = bad.iter().map(|(number, error)| format!("region {number}: {error}")).collect();
            let reason = format!("RAM that process {pid} announced cannot be registered there ({})", what.join("; "));
            vm.report("view-incomplete", reason.clone());
            reason
        }
        Err(error) => format!("process {pid} is not served: {error}"),
    };
    served.hold_unserved(pid, reason)?;
    Ok(added.map(drop)?)
}

fn descriptors(mut fds: Vec<OwnedFd>) -> anyhow::Result<(Vec<Uffd>, OwnedFd)> {
    let control = fds.pop().context("a view needs descriptors, none came")?;
    anyhow::ensure!(!fds.is_empty(), "a view needs a userfaultfd, none came");
    Ok((fds.into_iter().map(Uffd::from).collect(), control))
}
