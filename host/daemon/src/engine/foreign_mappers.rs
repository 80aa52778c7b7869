//! The scan for foreign mappers: no page leaves a VM while a process maps the VM's RAM but has not attached.
//!
//! Before: a view was added, a limit was set, or [`EVERY`] has passed. After: VMs with foreign mappers are held, and
//! their pages are restored; a VM whose foreign mappers are gone is released.
//! Threads: one, which other processes may delay; pages are restored on a thread of the VM.
//! Promise: a VM is not reclaimed before the end of a scan that began after its view or its first limit was known. All
//! requests during a scan share the next one, so the cost does not depend on their number. Processes that cannot be
//! examined are reported once. A failed scan releases no VM, and is repeated after 5 s. Nor is a VM released if, during
//! the scan, its RAM was being unplugged or one of its processes was about to be served.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use ballast_handover::mappers::{self, Mapped, Processes, Scan};
use ballast_handover::places::{Place, Places};
use ballast_pager::vm::Hold;
use ballast_pager::vm::region::Region;
use ballast_pager::vm::view::View;
use ballast_sys::file_ranges::FileRanges;
use ballast_sys::kcmp;
use ballast_sys::memfd::FileId;
use ballast_sys::priority::{run_beside, run_first};
use ballast_sys::process::Process;

use super::host::Host;
use super::huge_pages::HugePages;
use super::served::Served;

const EVERY: Duration = Duration::from_secs(5);
/// A pause lasts this many times the duration of the last scan, at most [`LONGEST_REST`], so that VMs that come one
/// after another share scans.
const REST: u32 = 4;
const LONGEST_REST: Duration = Duration::from_millis(250);

/// Starts the scanning thread, which scans at once for a VM that is sent to it.
pub fn start(host: Arc<Host>) -> anyhow::Result<mpsc::Sender<Arc<Served>>> {
    let (sender, asked) = mpsc::channel::<Arc<Served>>();
    let mut scanner = Scanner { host, processes: Processes::default(), unreadable: HashSet::new(), failed: false };
    std::thread::Builder::new().name("mapper-scan".into()).spawn(move || {
        loop {
            match asked.recv_timeout(EVERY) {
                Ok(_) => asked.try_iter().for_each(drop),
                Err(mpsc::RecvTimeoutError::Timeout) => {}
                Err(mpsc::RecvTimeoutError::Disconnected) => return,
            }
            let begun = Instant::now();
            scanner.scan();
            std::thread::sleep((begun.elapsed() * REST).min(LONGEST_REST));
        }
    })?;
    Ok(sender)
}

struct Scanner {
    host: Arc<Host>,
    processes: Processes,
    /// Processes that could not be examined, as last reported.
    unreadable: HashSet<Process>,
    /// Whether the last scan failed, as last reported.
    failed: bool,
}

impl Scanner {
    fn scan(&mut self) {
        let wanted: Vec<(Arc<Served>, u64)> = self.host.all().into_iter().filter_map(wants_scan).collect();
        if wanted.is_empty() {
            return;
        }
        // A VM that waits for its first scan grows beyond its limit. No VM waits for other scans.
        let waits = |(served, _): &(Arc<Served>, u64)| {
            served.vm.is_held_for(Hold::Unchecked) && served.vm.effective_limit().is_some()
        };
        if wanted.iter().any(waits) {
            run_first()
        } else {
            run_beside()
        }
        let owners: Vec<Owner> = wanted.iter().map(|(served, _)| Owner::of(served)).collect();
        let scan = scan_for_foreign_mappers(&mut self.processes, &owners);
        if scan.failed != self.failed {
            let (kind, text) = if scan.failed {
                (
                    "scan-failed",
                    "processes cannot be examined, so no VM that waits for it is reclaimed from (see the log)",
                )
            } else {
                ("scan-works", "processes can be examined again")
            };
            self.host.events.add(None, kind, text.into());
        }
        self.failed = scan.failed;
        let huge_pages = HugePages::now();
        for ((served, asked), owner) in wanted.iter().zip(&owners) {
            conclude(served, *asked, owner, &scan);
            let spared = "khugepaged spares this VM's RAM now";
            judge(served, Hold::HugePages, "huge-pages", huge_pages.danger(served), spared);
        }
        let unreadable: HashSet<Process> = scan.unreadable.into_iter().collect();
        for process in unreadable.difference(&self.unreadable) {
            self.host.events.add(None, "not-looked-at", unreadable_text(*process));
        }
        self.unreadable = unreadable;
    }
}

fn unreadable_text(process: Process) -> String {
    format!(
        "the memory map of process {} cannot be read: if it maps RAM of a VM and has not attached, it may read zeros",
        mappers::name(process)
    )
}

/// Whether a VM needs a scan: its pages may be evicted, it waits for one, or it has a foreign mapper that may be gone.
/// Returns the VM with the number of the scan that it waits for.
fn wants_scan(served: Arc<Served>) -> Option<(Arc<Served>, u64)> {
    let vm = &served.vm;
    let asked = served.asked();
    let may_lose_pages = vm.effective_limit().is_some() && !vm.is_pinned() && !vm.views().is_empty();
    let wants = may_lose_pages || vm.is_held_for(Hold::Unchecked) || vm.is_held_for(Hold::Shared);
    wants.then_some((served, asked))
}

fn ram_of(regions: &[Arc<Region>]) -> FileRanges {
    regions.iter().filter(|region| !region.is_removed()).flat_map(|region| region.places()).collect()
}

struct Owner {
    ram: FileRanges,
    /// Its processes, each with the RAM that it must not map: a region that the keeper did not take from it, say.
    outside: HashMap<u32, FileRanges>,
    /// The places where its processes announced to map it, if known. Elsewhere their faults are not served.
    places: HashMap<u32, Places>,
    /// It is unknown what its processes must not map: one that is about to be served has no view yet, or one that
    /// unplugs RAM still maps it where it is no longer served.
    is_changing: bool,
}

impl Owner {
    fn of(served: &Served) -> Self {
        let vm = &served.vm;
        // Read first, so that an unplug that ends now still counts.
        let is_unplugging = vm.is_held_for(Hold::Unplug);
        // Read before the RAM, so that a region that is unplugged now counts in neither.
        let regions = vm.regions();
        let ram = ram_of(&regions);
        let views = vm.views();
        let mut places = HashMap::new();
        let mut outside = |pid| {
            let view = views.iter().find(|view| view.pid == pid && !is_unplugging)?;
            let inside = regions.iter().filter(|region| view.base(region.number).is_some());
            places.insert(pid, inside.clone().flat_map(|region| places_of(region, view)).collect());
            Some(ram.without(&inside.flat_map(|region| region.places()).collect()))
        };
        let pids: Vec<_> = served.pids().into_iter().map(|pid| (pid, outside(pid))).collect();
        let is_changing = is_unplugging || pids.iter().any(|(_, outside)| outside.is_none());
        let pids = pids.into_iter().map(|(pid, outside)| (pid, outside.unwrap_or_default()));
        // This engine queries the pages of a hugetlbfs file through a mapping that it never touches.
        let outside = pids.chain([(std::process::id(), FileRanges::default())]).collect();
        Self { ram, outside, places, is_changing }
    }

    /// Whether this process maps RAM that it must not map, or maps it elsewhere than announced. `found`: its mappings.
    fn is_foreign(&self, process: &Process, found: &Mapped) -> bool {
        self.outside.get(&process.pid).unwrap_or(&self.ram).overlap(&found.files).is_some()
            || self.maps_elsewhere(process, found)
    }

    fn maps_elsewhere(&self, process: &Process, found: &Mapped) -> bool {
        self.places.contains_key(&process.pid) && self.ram.overlap(&found.elsewhere).is_some()
    }
}

fn places_of(region: &Region, view: &View) -> Vec<Place> {
    let Some(base) = view.base(region.number) else { return Vec::new() };
    let mut next = base.0;
    let place = |(file, from, to)| {
        let start = next;
        next += to - from;
        Place { start, end: next, file, offset: from }
    };
    region.places().into_iter().map(place).collect()
}

fn scan_for_foreign_mappers(processes: &mut Processes, owners: &[Owner]) -> Scan {
    let mut of_file: HashMap<FileId, Vec<&Owner>> = HashMap::new();
    for owner in owners {
        owner.ram.files().for_each(|file| of_file.entry(file).or_default().push(owner));
    }
    let all = of_file.keys().copied().collect();
    let attached = owners.iter().flat_map(|owner| owner.outside.keys()).copied().collect();
    let mut announced: HashMap<u32, Vec<Place>> = HashMap::new();
    for (pid, places) in owners.iter().flat_map(|owner| &owner.places) {
        announced.entry(*pid).or_default().extend(places.iter());
    }
    let announced = announced.into_iter().map(|(pid, places)| (pid, places.into_iter().collect())).collect();
    // A process is known if it is served wherever it maps a VM's RAM. Of a file that several VMs share, only their own
    // parts count.
    mappers::foreign_mappers(processes, &all, attached, &Arc::new(announced), |process, found| {
        let mut owners = found.files.files().filter_map(|file| of_file.get(&file)).flatten();
        owners.all(|owner| !owner.is_foreign(process, found))
    })
}

/// Holds or releases this VM after a scan. When the scan began, the VM was `before`, and `asked` scans of it had been
/// requested.
fn conclude(served: &Arc<Served>, asked: u64, before: &Owner, scan: &Scan) {
    // The current state: a region may have been plugged since the scan began.
    let mut owner = Owner::of(served);
    if owner.places != before.places {
        // The scan compared processes with the places that they had announced before.
        owner.places.clear();
        owner.is_changing = true;
    }
    let found = foreign_mapper(served, &owner, scan);
    let releases = !scan.failed && !before.is_changing && !owner.is_changing;
    if found.is_some() || releases {
        judge(served, Hold::Shared, "ram-shared", found, "no other process maps this VM's RAM any more");
    }
    if releases {
        served.checked(asked);
    }
}

fn foreign_mapper(served: &Served, owner: &Owner, scan: &Scan) -> Option<String> {
    if let Some(reason) = served.unserved() {
        return Some(reason);
    }
    let foreign_mappers = scan.mapping.iter().filter(|(process, found)| owner.is_foreign(process, found));
    let (process, mapped) = foreign_mappers.min_by_key(|(process, _)| process.pid)?;
    let who = mappers::name(*process);
    if owner.outside.get(&process.pid).is_some_and(|outside| outside.overlap(&mapped.files).is_some()) {
        return Some(format!(
            "process {who} maps RAM of this VM that it is not served in, so no page may leave the VM"
        ));
    }
    if owner.maps_elsewhere(process, mapped) {
        return Some(format!(
            "process {who} maps RAM of this VM at other addresses than it has announced, where it is not served, so no \
             page may leave the VM"
        ));
    }
    let unknown = if kcmp::is_available() {
        ""
    } else {
        " (this kernel has no kcmp, so a child that runs in the VMM's own memory cannot be told from others)"
    };
    Some(format!("process {who} maps this VM's RAM and has not attached to Ballast, so no page may leave it{unknown}"))
}

fn judge(served: &Arc<Served>, kind: Hold, event: &str, reason: Option<String>, over: &str) {
    let vm = &served.vm;
    match (reason, vm.is_held_for(kind)) {
        (Some(reason), false) => {
            vm.report(event, reason.clone());
            if let Err(error) = served.restore(kind, reason, |_| ()) {
                vm.report("restore-failed", format!("Restoring its pages: {error}"));
            }
        }
        // It is held, but its far pages may not be returning: no thread could be started, or a thread met an error.
        (Some(_), true) => {
            if let Err(error) = served.restore_rest() {
                tracing::warn!(vm = vm.state.name(), "Restoring its pages: {error}");
            }
        }
        (None, true) if served.release(kind) => vm.report(event, over.into()),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use ballast_base::Bytes;
    use ballast_base::wire::VmId;
    use ballast_handover::state_file::StateFile;
    use ballast_pager::vm::far::stores::{NearTier, Stores};
    use ballast_pager::vm::region_table::LOST;
    use ballast_pager::vm::stats::Counter;
    use ballast_pager::vm::{Tuning, Vm};
    use ballast_store::{Budget, RamOptions, RamStore};

    use super::*;
    use crate::engine::late;

    fn held() -> Arc<Served> {
        let state = StateFile::create(VmId([6; 16]), "test").expect("state");
        let epoch = state.take_over(std::process::id(), 1, LOST).expect("no journal");
        let store = Arc::new(RamStore::create(RamOptions::new(Budget::new(Bytes(1 << 20)))).expect("store").0);
        let near = vec![NearTier { number: ballast_base::store::RAM_STORE, name: "RAM store", store: store.clone() }];
        let stores = Stores::new(near, Vec::new());
        let vm = Vm::new(state, epoch, stores, Tuning::default(), Arc::new(|_: &str, _| ()));
        let served = Arc::new(Served::new(Arc::new(vm), store, None, late::File::default(), "test".into()));
        served.hold_unchecked();
        served.vm.hold(Hold::Shared, Some("somebody maps it".into()));
        served
    }

    fn holds(served: &Served) -> [bool; 2] {
        [Hold::Shared, Hold::Unchecked].map(|kind| served.vm.is_held_for(kind))
    }

    #[test]
    fn a_scan_during_an_unplug_or_before_a_process_is_served_releases_nothing() {
        let served = held();
        let concludes = |before: &Owner| {
            conclude(&served, served.asked(), before, &Scan::default());
            holds(&served)
        };
        let calm = Owner::of(&served);
        let unplugging = served.vm.begin_unplug();
        let before = Owner::of(&served);
        assert_eq!(concludes(&before), [true; 2], "RAM is unplugged all the time");
        assert_eq!(concludes(&calm), [true; 2], "at its end");
        drop(unplugging);
        assert_eq!(concludes(&before), [true; 2], "at its beginning");
        served.add_pid(7);
        let before = Owner::of(&served);
        assert_eq!(concludes(&calm), [true; 2], "a process has no view at its end");
        served.forget_pid(7);
        assert_eq!(concludes(&before), [true; 2], "it had none at its beginning");
        let failed = Scan { failed: true, ..Scan::default() };
        conclude(&served, served.asked(), &calm, &failed);
        assert_eq!(holds(&served), [true; 2], "not all processes were read");
        assert_eq!(concludes(&calm), [false; 2]);
        let unplugging = served.vm.begin_unplug();
        served.set_unserved(7, "not all of it is served".into());
        assert_eq!(concludes(&calm), [true, false], "it may hold the VM at any time");
        drop(unplugging);
        served.jobs.close();
    }

    #[test]
    fn far_pages_of_a_held_vm_are_restored_if_no_thread_does_so() {
        let served = held();
        served.restore_rest().expect("nothing is far");
        served.vm.stats().add(Counter::Far, 1);
        judge(&served, Hold::Shared, "ram-shared", Some("somebody maps it".into()), "over");
        assert!(served.jobs.has_begun(), "pages stay far while it is held");
        served.jobs.close();
        served.restore_rest().expect_err("no thread can begin");
    }

    #[test]
    fn a_scan_does_not_release_a_vm_with_a_process_that_is_not_served() {
        let served = held();
        served.set_unserved(7, "not all of it is served".into());
        judge(&served, Hold::Shared, "ram-shared", None, "over");
        assert_eq!(holds(&served), [true; 2]);
        served.forget_pid(7);
        judge(&served, Hold::Shared, "ram-shared", None, "over");
        assert_eq!(holds(&served), [false, true]);
    }
}
