//! Far pages of a VM whose processes are gone, or of RAM that is unplugged: they are dropped, or written back if a
//! process can still reach their files.
//!
//! Before: the keeper ordered the VM closed, and its workers have ended. After: no process can ever reach its RAM
//! files, or its far pages are in them again.
//! Threads: the VM's worker, which other processes and a lack of memory may delay.
//! Promise: a file that no process can reach is dropped at once. A file that a process can reach gets its pages back,
//! whatever the limit was, as far as the host has memory. A process that reads the file before that reads zeros: a VMM
//! that wants to pass its memory on has it restored first (see `preload`).

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ballast_base::wire::VmId;
use ballast_base::{Bytes, Hva, PageCount};
use ballast_handover::{holder, mappers};
use ballast_pager::vm::region::Region;
use ballast_pager::vm::view::View;
use ballast_sys::lock::Lock;
use ballast_sys::meminfo;
use ballast_sys::process::Process;

use super::served::Served;
use super::shared::{Closing, Engine};

/// Part of the host's memory that is left to others: 1/N of all.
const LEFT_TO_OTHERS: u64 = 32;
/// A client waits 5 s for an unplug, and other orders about its VM wait as long.
const RETURNS_WITHIN: Duration = Duration::from_secs(4);
/// Time between checks whether a process can reach the files: a file may be deleted, or a process may end.
const POLL_EVERY: Duration = Duration::from_secs(1);
/// Checks whether a process still has the files take at most 1/N of the time.
const LOOKS_PART: u32 = 20;
const PAUSE: Duration = Duration::from_millis(100);

/// Whether this process is this engine's parent, which a dead process is not.
fn is_parent(pid: u32) -> bool {
    rustix::process::getppid().is_some_and(|parent| parent.as_raw_nonzero().get() as u32 == pid)
}

impl Engine {
    pub(super) fn begin_closing(&self, vm: VmId) -> Closing {
        let closing = Closing::default();
        self.closing.locked().insert(vm, closing.clone());
        closing
    }

    pub(super) fn end_closing(&self, vm: VmId, closing: &Closing) {
        let mut all = self.closing.locked();
        if all.get(&vm).is_some_and(|other| Arc::ptr_eq(other, closing)) {
            all.remove(&vm);
        }
    }

    /// The VM will be opened again, because only its attach socket was cut: its far pages may stay far.
    pub(super) fn stop_writing_back(&self, vm: VmId) {
        if let Some(closing) = self.closing.locked().get(&vm) {
            closing.store(true, Ordering::Release);
        }
    }

    /// Ends the far pages of a VM that is closed, unless it is opened again: they are written back if a process can
    /// reach their file, and dropped from the stores. A process may have kept the VM's files, whose memory no budget
    /// counts any more.
    pub(super) fn leave(&self, served: &Served, closing: &Closing) {
        let vm = &served.vm;
        let regions: Vec<_> = vm.regions().into_iter().filter(|region| !region.is_removed()).collect();
        let reachable = match vm.far_in(&regions) {
            Ok(far) if far.0 == 0 => Some(regions.clone()),
            far => self.write_back(served, closing, &regions, far.unwrap_or_default()),
        };
        let Some(reachable) = reachable.filter(|_| !closing.load(Ordering::Acquire)) else {
            // The copies of pages that were written back were freed.
            served.settle();
            if !closing.load(Ordering::Acquire) {
                self.tidy(served);
            }
            return;
        };
        let is_lost = |region: &Arc<Region>| reachable.iter().all(|other| other.number != region.number);
        let (lost, kept): (Vec<_>, Vec<_>) = regions.into_iter().partition(is_lost);
        let forgotten = vm.give_up(&lost).and_then(|()| kept.iter().try_for_each(|region| vm.forget_resident(region)));
        if let Err(error) = forgotten {
            tracing::warn!(vm = vm.state.name(), "Giving back the memory of page-state words: {error}");
        }
        served.store.sweep(std::iter::empty());
        if let Some(group) = &served.group {
            group.end();
        }
        if !vm.state.is_given_up() {
            return self.tidy(served);
        }
        if let Some(remote) = &self.host.remote {
            remote.ended(vm.state.id());
        }
        // No thread puts more into the store any more, so all of it is emptied at once. The copies of a VM that is
        // opened again are freed one by one.
        if let Some(file) = served.file.opened() {
            let empty = move || {
                let emptied = file.wait_for_writes().map(|()| file.sweep(std::iter::empty()));
                if let Err(error) = emptied {
                    tracing::warn!("Emptying the file store of a VM that is gone: {error}");
                }
            };
            if let Err(error) = std::thread::Builder::new().name("empty".into()).spawn(empty) {
                tracing::warn!("Starting a thread: {error}");
            }
        }
    }

    /// The files of a closed VM outlive it, and it may be opened again: removes its freed pages from the cluster,
    /// without a wait. A file store's freed pages are removed when the store is opened again.
    fn tidy(&self, served: &Served) {
        if let Some(remote) = &self.host.remote {
            remote.closed(served.vm.state.id());
        }
    }

    /// Writes back the far pages of a closed VM, if a process can reach them and the VM is not opened again. Returns
    /// the regions without far pages if a process can reach only those; `None` if it can reach others: the copies of
    /// their pages are kept, because a process may attach again.
    fn write_back(
        &self,
        served: &Served,
        closing: &Closing,
        regions: &[Arc<Region>],
        far: PageCount,
    ) -> Option<Vec<Arc<Region>>> {
        let (vm, name) = (&served.vm, served.vm.state.name());
        let pids = served.pids();
        let (reachable, who) = self.reachable(regions, &pids, &[]);
        let Some(who) = who else { return Some(Vec::new()) };
        let event = |kind: &str, message: String| self.events.add(Some(name.clone()), kind, message);
        event("writing-back", format!("the process of VM {name} is gone, but {who}: {} go back into it", far.bytes()));
        let (mut looked, mut every, mut told) = (Instant::now(), POLL_EVERY, false);
        let done = vm.write_back(&reachable, &mut || {
            loop {
                if looked.elapsed() > every {
                    let begun = Instant::now();
                    if self.reachable(&reachable, &pids, &[]).1.is_none() {
                        return false;
                    }
                    // A process may make each check take seconds.
                    looked = Instant::now();
                    every = POLL_EVERY.max((looked - begun) * LOOKS_PART);
                }
                if closing.load(Ordering::Acquire) {
                    return false;
                }
                let [free, all] = ["MemAvailable", "MemTotal"].map(meminfo::bytes);
                if free.zip(all).is_none_or(|(free, all)| free > all / LEFT_TO_OTHERS) {
                    return true;
                }
                if !told {
                    told = true;
                    event(
                        "write-back-waits",
                        format!("what was far of VM {name} cannot go back: the host has no memory"),
                    );
                }
                std::thread::sleep(PAUSE);
            }
        });
        match done {
            Ok(done) if done.stopped => {
                tracing::info!(vm = name, "writing back was stopped: {who}, but no longer");
                Some(Vec::new())
            }
            Ok(done) => {
                event("written-back", format!("{} of VM {name} are back in its RAM file", done.pages.bytes()));
                Some(reachable)
            }
            Err(error) => {
                let left = vm.far_in(&reachable).map_or(Bytes(0), |pages| pages.bytes());
                let text = format!("{left} of VM {name} are lost, though {who}: writing them back: {error}");
                event("write-back-failed", text);
                None
            }
        }
    }

    /// Unplugs RAM of a process. If other processes have its file, its far pages are written back first. If that takes
    /// too long, other orders about the VM have their turn: the region stays a part of the VM, and its pages are
    /// written back when the VM ends, or when all of it is restored.
    pub(super) fn unplug(&self, served: &Arc<Served>, view: &View, start: Hva, number: Option<u32>) -> io::Result<()> {
        let held = served.vm.begin_unplug();
        let unplugged = self.unplug_held(served, view, start, number);
        // Scans for foreign mappers that began during the unplug do not count.
        served.hold_unchecked();
        drop(held);
        unplugged.and(self.request_scan(served).map_err(io::Error::other))
    }

    fn unplug_held(&self, served: &Served, view: &View, start: Hva, number: Option<u32>) -> io::Result<()> {
        let vm = &served.vm;
        let known = view.find(start).map(|(number, _)| number).or(number);
        let region = known.and_then(|number| vm.region(number)).filter(|region| !region.is_removed());
        let is_last = |region: &Region| {
            !vm.views().iter().any(|other| other.pid != view.pid && other.base(region.number).is_some())
        };
        let returned = region.filter(|region| is_last(region)).map_or(Ok(true), |region| self.returns(served, region));
        if matches!(returned, Ok(true)) {
            return vm.remove_region(view, start, number).map(drop);
        }
        vm.forget_span(view, start);
        Err(self.is_late(served, returned))
    }

    /// Writes far pages of unplugged RAM back to its file, if other processes have the file. Returns false if that
    /// takes too long.
    fn returns(&self, served: &Served, region: Arc<Region>) -> io::Result<bool> {
        if self.others_have(served, &region) { self.go_back(served, region) } else { Ok(true) }
    }

    fn go_back(&self, served: &Served, region: Arc<Region>) -> io::Result<bool> {
        let (vm, begun) = (&served.vm, Instant::now());
        let mut go_on = || begun.elapsed() < RETURNS_WITHIN && !vm.is_stopping();
        vm.write_back(&[region], &mut go_on).map(|done| !done.stopped)
    }

    /// The error that the pages were not written back, with the reason.
    fn is_late(&self, served: &Served, returned: io::Result<bool>) -> io::Error {
        let name = served.vm.state.name();
        let text =
            format!("RAM of VM {name} was unplugged, whose file others have, and what is far of it is not back yet");
        self.events.add(Some(name), "write-back-waits", text);
        let late = || io::Error::new(io::ErrorKind::TimedOut, "what is far of it is not back in its file yet");
        returned.err().unwrap_or_else(late)
    }

    /// A process of the VM is gone. RAM that another process has unplugged, and that only this one still had, is no
    /// longer a part of the VM.
    pub(super) fn remove_view(&self, served: &Arc<Served>, pid: u32) -> anyhow::Result<()> {
        let vm = &served.vm;
        vm.remove_view(pid);
        served.forget_pid(pid);
        if vm.views().is_empty() {
            return Ok(());
        }
        let mut removed = Ok(());
        for region in vm.left_unplugged() {
            let (held, number) = (vm.begin_unplug(), region.number);
            // The process may only seem to be gone, and come back; or another process has the file and may attach.
            let done = match self.reachable(std::slice::from_ref(&region), &[pid], &served.pids()).1 {
                None => vm.remove_left(number),
                // The region stays a part of the VM: a process with the file finds its bytes there.
                Some(_) => match self.go_back(served, region) {
                    Ok(true) => Ok(()),
                    late => Err(self.is_late(served, late)),
                },
            };
            removed = removed.and(done);
            served.hold_unchecked();
            drop(held);
            self.request_scan(served)?;
        }
        Ok(removed?)
    }

    fn others_have(&self, served: &Served, region: &Arc<Region>) -> bool {
        let regions = std::slice::from_ref(region);
        // A lost table has no counts, so its pages may be far.
        if served.vm.far_in(regions).is_ok_and(|far| far.0 == 0) {
            return false;
        }
        self.reachable(regions, &[], &served.pids()).1.is_some()
    }

    pub(super) fn is_held(&self, served: &Served) -> bool {
        self.holder(&served.vm.regions(), &served.pids(), &[]).is_some()
    }

    /// A process that has a file of these regions, other than this engine and its keeper. A process that cannot be
    /// examined may have one.
    fn holder(&self, regions: &[Arc<Region>], suspects: &[u32], but: &[u32]) -> Option<Process> {
        // If the keeper died, its pid may be another process's by now.
        let keeper = Some(self.host.begin.keeper_pid).filter(|keeper| is_parent(*keeper));
        let ours = keeper.into_iter().chain([self.me.pid]).chain(but.iter().copied()).collect();
        let files = regions.iter().flat_map(|region| region.files()).map(|file| file.id).collect();
        holder::find(&files, &ours, suspects).unwrap_or(Some(self.me))
    }

    /// The regions whose files a process can reach, and how. `suspects`: processes that had the files; `but`: processes
    /// that do not count.
    fn reachable(&self, regions: &[Arc<Region>], suspects: &[u32], but: &[u32]) -> (Vec<Arc<Region>>, Option<String>) {
        let linked: Vec<_> = regions
            .iter()
            .filter(|region| region.files().iter().any(|file| file.links().is_ok_and(|links| links > 0)))
            // The pool's files have names, but only the pool can reach them, and it zeroes them.
            .filter(|region| !region.files().iter().all(|file| self.host.pool.has(file.id)))
            .collect();
        let by_name = (!linked.is_empty()).then(|| "its RAM file still has a name".to_owned());
        let mut reachable: Vec<_> = linked.into_iter().cloned().collect();
        let mut who = by_name;
        let others = regions.iter().filter(|region| reachable.iter().all(|other| other.number != region.number));
        let others: Vec<_> = others.cloned().collect();
        // Nearly always no process has any of them: one check is for all.
        let first = if others.is_empty() { None } else { self.holder(&others, suspects, but) };
        if first.is_none() {
            return (reachable, who);
        }
        let is_one = others.len() == 1;
        let held: Vec<_> = others
            .iter()
            .filter(|region| {
                let look = || self.holder(std::slice::from_ref(region), suspects, but);
                let holder = if is_one { first } else { look() };
                if let Some(process) = holder {
                    who.get_or_insert_with(|| format!("process {} still has its RAM file", mappers::name(process)));
                }
                holder.is_some()
            })
            .cloned()
            .collect();
        reachable.extend(held);
        (reachable, who)
    }
}
