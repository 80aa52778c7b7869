//! The worker of adopted VMs: holds each to its limit, and notices VMMs that start and end.
//!
//! Before: the engine began. After: it ends with the engine.
//! Threads: this one, and one for each VM whose memory is being restored.
//! Promise: without a limit, and without `[adopt] all`, it sleeps until a VMM ends. VMs above their limits take turns,
//! one step each.

use std::collections::HashSet;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ballast_adopt::swap::Swap;
use ballast_base::wire::check_name;
use ballast_sys::priority::run_first;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::vm::AdoptedVm;
use super::{AdoptedVms, Taken};
use crate::engine::host::Host;

const FINDS_EVERY: Duration = Duration::from_secs(2);
const SWAP_EVERY: Duration = Duration::from_millis(100);
/// Time between checks whether an adopted VM has attached, has executed a program, or its name was taken.
const CHECKS_EVERY: Duration = Duration::from_secs(5);

pub fn start(host: Arc<Host>) -> std::io::Result<()> {
    std::thread::Builder::new().name("adopted".into()).spawn(move || {
        let mut worker = Worker {
            host,
            looks: Instant::now(),
            checks: Instant::now(),
            swap: (Swap::default(), None),
            refused: HashSet::new(),
        };
        // The kernel has no fault of an adopted VM wait for reclaim. At the guests' own priority, on a host whose CPUs
        // are all busy, VMs would read their pages back as fast as they go out.
        run_first();
        loop {
            worker.turn();
        }
    })?;
    Ok(())
}

pub fn taken(host: &Host) -> Taken {
    let mut taken = Taken::default();
    for served in host.all() {
        taken.pids.extend(served.vm.views().iter().map(|view| view.pid));
        taken.names.insert(served.vm.state.name());
    }
    taken
}

pub fn bring_back(host: Arc<Host>, vm: Arc<AdoptedVm>) -> std::io::Result<()> {
    if vm.leaves.swap(true, Ordering::AcqRel) {
        // A thread brings it back.
        return Ok(());
    }
    vm.change(|terms| (terms.limit, terms.target) = (None, None));
    // An engine that begins meanwhile must not hold it to its old limit.
    host.adopted.keep();
    let leaving = vm.clone();
    let thread = std::thread::Builder::new().name("bring-back".into()).spawn(move || {
        vm.finish_step();
        match vm.vm.bring_back() {
            Err(error) if !vm.vm.has_ended() => {
                vm.leaves.store(false, Ordering::Release);
                let text = format!("not all of its memory was restored, so it stays adopted: {error}");
                host.events.add(Some(vm.name()), "restore-failed", text);
            }
            _ => host.adopted.forget(&vm, true),
        }
    });
    if let Err(error) = thread {
        leaving.leaves.store(false, Ordering::Release);
        return Err(error);
    }
    Ok(())
}

struct Worker {
    host: Arc<Host>,
    looks: Instant,
    checks: Instant,
    swap: (Swap, Option<Instant>),
    /// VMMs that were refused, and for which that was reported.
    refused: HashSet<u32>,
}

impl Worker {
    fn turn(&mut self) {
        let adopted = self.host.adopted.clone();
        let vms = if adopted.works() { adopted.all() } else { Vec::new() };
        let ended = self.sleep(&adopted, &vms);
        if !adopted.works() {
            return;
        }
        for vm in &ended {
            adopted.forget(vm, false);
        }
        let now = Instant::now();
        if adopted.all && self.looks <= now {
            self.looks = now + FINDS_EVERY;
            self.adopt_all(&adopted);
        }
        if !vms.is_empty() && self.checks <= now {
            self.checks = now + CHECKS_EVERY;
            self.check(&adopted, &vms);
        }
        let is_due = |vm: &&Arc<AdoptedVm>| !ended.iter().any(|ended| Arc::ptr_eq(ended, vm));
        for vm in vms.iter().filter(is_due).filter(|vm| vm.due().is_some_and(|due| due <= now)) {
            let swap = self.swap_now();
            vm.work(&swap, &self.host.events);
        }
    }

    /// Sleeps until a VMM ends, terms change, or work is due. Returns the VMs that ended.
    fn sleep(&self, adopted: &AdoptedVms, vms: &[Arc<AdoptedVm>]) -> Vec<Arc<AdoptedVm>> {
        let looks = (adopted.all && adopted.works()).then_some(self.looks);
        let checks = (!vms.is_empty()).then_some(self.checks);
        let due = vms.iter().filter_map(|vm| vm.due()).chain(looks).chain(checks).min();
        let wait = due.map(|due| due.saturating_duration_since(Instant::now()));
        let wait = wait.map(|wait| Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: i64::from(wait.subsec_nanos()) });
        let wake = [PollFd::from_borrowed_fd(adopted.wake.as_fd(), PollFlags::IN)];
        let ends = vms.iter().map(|vm| PollFd::from_borrowed_fd(vm.vm.pidfd().as_fd(), PollFlags::IN));
        let mut fds: Vec<PollFd<'_>> = wake.into_iter().chain(ends).collect();
        if poll(&mut fds, wait.as_ref()).is_err() {
            return Vec::new();
        }
        if !fds[0].revents().is_empty() {
            let _ = rustix::io::read(&adopted.wake, &mut [0u8; 8]);
        }
        let has_ended = |(vm, fd): (&Arc<AdoptedVm>, &PollFd<'_>)| (!fd.revents().is_empty()).then(|| vm.clone());
        vms.iter().zip(&fds[1..]).filter_map(has_ended).collect()
    }

    fn swap_now(&mut self) -> Swap {
        let now = Instant::now();
        if self.swap.1.is_none_or(|at| now >= at + SWAP_EVERY) {
            self.swap = (Swap::now(), Some(now));
        }
        self.swap.0.clone()
    }

    fn adopt_all(&mut self, adopted: &AdoptedVms) {
        let (_, refused) = adopted.adopt_all(&taken(&self.host), true);
        self.refused.retain(|pid| refused.iter().any(|refusal| refusal.pid == *pid));
        for refusal in refused {
            if self.refused.insert(refusal.pid) {
                self.host.events.add(None, "adopted-not", refusal.reason);
            }
        }
    }

    /// Releases VMs that have attached, adopts again those that executed a program, and gives another name to those
    /// whose name an attached VM has.
    fn check(&self, adopted: &AdoptedVms, vms: &[Arc<AdoptedVm>]) {
        let taken = taken(&self.host);
        for vm in vms {
            let (name, pid) = (vm.name(), vm.vm.process.pid);
            if taken.pids.contains(&pid) {
                adopted.forget(vm, true);
            } else if vm.vm.has_executed() {
                adopted.renew(vm);
            } else if taken.names.contains(&name) {
                let next = format!("{name}-{pid}");
                let next = if check_name(&next).is_ok() { next } else { format!("vm-{pid}") };
                let text = format!("{name} is the name of a VM that attached: this one is {next} now");
                vm.change(|terms| terms.name.clone_from(&next));
                adopted.keep();
                self.host.events.add(Some(next), "renamed", text);
            }
        }
    }
}
