//! Finds processes that map a VM's RAM. A process that maps it, but has not attached, bypasses our userfaultfd: it
//! would read zeros where pages are far. No page of the VM is reclaimed until that process attaches or ends.
//!
//! Before: a VM attached, or a limit was set. After: it is known which processes map which file, and which could not be
//! examined.
//! Threads: the engine's scan for foreign mappers, and the keeper's search; never a thread that takes orders, clients
//! or requests, because a read of another process's `/proc/PID/maps` takes its `mmap_lock`, which a stuck process may
//! hold forever.
//! Promise: a scan ends. A process that cannot be examined is skipped and named; its last known maps still count. A
//! scan that fails says so, and nobody takes it for a scan that found nothing. A process that has not run since the
//! last scan has an unchanged map and is not read again, so the cost of a scan depends on the processes that ran since.

use std::collections::{HashMap, HashSet};
use std::io;
use std::os::unix::fs::DirEntryExt;
use std::sync::{Arc, LazyLock, Mutex, mpsc};
use std::time::Duration;

use ballast_sys::lock::Lock;
use ballast_sys::memfd::FileId;
use ballast_sys::process::Process;
use ballast_sys::{clock, kcmp, priority};

pub use crate::maps::Mapped;
use crate::maps::mapped;
use crate::places::Places;

/// Longest wait for one process. A slower one is skipped until its read is done.
pub(crate) const READ_TIMEOUT: Duration = Duration::from_secs(3);
/// Time between the two reads of a suspect. A child of the VMM between `vfork` and `exec` maps everything that its
/// parent maps, for some milliseconds.
const SECOND_SCAN: Duration = Duration::from_millis(500);

/// Processes whose maps could not be read in time. For each, a thread still waits, and then removes the process here.
pub(crate) static STUCK: LazyLock<Mutex<HashSet<Process>>> = LazyLock::new(Mutex::default);

/// The result of a scan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scan {
    /// Processes that map parts of the files.
    pub mapping: HashMap<Process, Mapped>,
    /// Processes that could not be read in time.
    pub unreadable: Vec<Process>,
    /// The scan lacked a resource (descriptors, memory, a thread): processes may be missing here.
    pub failed: bool,
}

/// Reads the files that a process maps or has open. Replaced in tests, because no test can make `/proc` hang.
pub(crate) type Read = dyn Fn(u32) -> io::Result<Mapped> + Send + Sync;

/// The processes of the host, and the files that each of them maps.
#[derive(Debug, Default)]
pub struct Processes {
    known: HashMap<u32, Known>,
}

#[derive(Debug)]
struct Known {
    /// The inode of its directory in `/proc`, which distinguishes it from a later process with the same pid.
    entry: u64,
    /// Its CPU time before its map was read. A map changes only while its process runs. The kernel may charge the time
    /// of a running thread later, as if the process had mapped something right after the scan: the next scan sees it.
    ran: Duration,
    /// Files in memory that it maps; `None` if it maps none of them, as most processes.
    files: Option<(Process, Mapped)>,
}

/// The places where each process is served. A process without an entry is served nowhere.
pub type Announced = Arc<HashMap<u32, Places>>;

impl Processes {
    /// Scans all processes. Processes that we may not read, or that end during the scan, are skipped. The scan has
    /// failed if any other process could not be read (for lack of descriptors, say), or if `/proc` could not.
    pub fn scan(&mut self, files: &HashSet<FileId>, announced: &Announced) -> Scan {
        // A process may have announced other places since it was last read.
        for pid in announced.keys() {
            self.known.entry(*pid).and_modify(|known| known.ran = Duration::MAX);
        }
        match entries() {
            Ok(entries) => {
                let announced = announced.clone();
                let read: Arc<Read> = Arc::new(move |pid| mapped(pid, announced.get(&pid)));
                self.scan_these(entries, files, &read)
            }
            Err(error) => {
                tracing::error!("Reading /proc: {error}");
                Scan { failed: true, ..Scan::default() }
            }
        }
    }

    pub(crate) fn scan_these(&mut self, entries: Vec<(u32, u64)>, files: &HashSet<FileId>, read: &Arc<Read>) -> Scan {
        let mut before = std::mem::take(&mut self.known);
        // The CPU time is read before the map, so that the next scan notices a change in between.
        let mut changed = HashMap::new();
        for (pid, entry) in entries {
            let ran = clock::process_time(pid);
            match before.remove(&pid) {
                Some(known) if known.entry == entry && Some(known.ran) == ran => drop(self.known.insert(pid, known)),
                known => drop(changed.insert(pid, (entry, ran, known.filter(|known| known.entry == entry)))),
            }
        }
        let pids = changed.keys().copied().collect();
        let Scan { mut mapping, unreadable, failed } = scan_these(pids, read, READ_TIMEOUT);
        for pid in unreadable.iter().map(|process| &process.pid) {
            // Its last known maps still count. The process is read again, because its CPU time is now newer than these
            // maps.
            let known = changed.remove(pid).and_then(|(_, _, known)| known);
            self.known.extend(known.map(|known| (*pid, known)));
        }
        let mut found: HashMap<u32, _> =
            mapping.drain().map(|(process, files)| (process.pid, (process, files))).collect();
        for (pid, (entry, ran, known)) in changed {
            if failed && !found.contains_key(&pid) {
                self.known.extend(known.map(|known| (pid, known)));
                continue;
            }
            let files = found.remove(&pid);
            self.known.extend(ran.map(|ran| (pid, Known { entry, ran, files })));
        }
        // The files of a process that ended at once, or has no clock, count, but it is not remembered.
        mapping.extend(found.into_values());
        mapping.extend(self.known.values().filter_map(|known| known.files.clone()));
        mapping.values_mut().for_each(|found| found.retain(|file| files.contains(&file)));
        mapping.retain(|_, found| !found.files.is_empty());
        Scan { mapping, unreadable, failed }
    }

    /// Makes the next scan read each process.
    #[cfg(test)]
    pub(crate) fn forget_times(&mut self) {
        self.known.values_mut().for_each(|known| known.ran = Duration::MAX);
    }
}

/// Scans all processes once.
pub fn scan(files: &HashSet<FileId>) -> Scan {
    Processes::default().scan(files, &Announced::default())
}

/// The pids of all processes, and the inodes of their directories in `/proc`.
pub(crate) fn entries() -> io::Result<Vec<(u32, u64)>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc")? {
        let entry = entry?;
        found.extend(entry.file_name().to_str().and_then(|name| Some((name.parse().ok()?, entry.ino()))));
    }
    Ok(found)
}

/// A scan, with a second read of those processes that are outside `known`: only a process seen twice is a foreign
/// mapper. A process in the address space of one of `attached` (a child that QEMU keeps to tear its memory down) is no
/// foreign mapper, because its touches fault through the same userfaultfds.
pub fn foreign_mappers(
    processes: &mut Processes,
    files: &HashSet<FileId>,
    attached: HashSet<u32>,
    announced: &Announced,
    known: impl Fn(&Process, &Mapped) -> bool,
) -> Scan {
    let first = processes.scan(files, announced);
    let announced = announced.clone();
    let again = |suspects| {
        std::thread::sleep(SECOND_SCAN);
        // If the kernel cannot tell, the process stays suspect.
        let read = move |pid| {
            let is_same = |other: &u32| *other != pid && kcmp::same_memory(*other, pid).unwrap_or(false);
            if attached.iter().any(is_same) {
                return Ok(Mapped::default());
            }
            mapped(pid, announced.get(&pid))
        };
        scan_these(suspects, &(Arc::new(read) as Arc<Read>), READ_TIMEOUT)
    };
    confirm(first, known, again)
}

fn confirm(first: Scan, known: impl Fn(&Process, &Mapped) -> bool, again: impl FnOnce(Vec<u32>) -> Scan) -> Scan {
    let Scan { mut mapping, unreadable, mut failed } = first;
    mapping.retain(|process, files| !known(process, files));
    if !mapping.is_empty() {
        let second = again(mapping.keys().map(|process| process.pid).collect());
        // By process, because another process may have the pid by now. A process that can no longer be read stays
        // suspect.
        let maps = |process: &Process| second.mapping.get(process).is_some_and(|files| !known(process, files));
        let is_there = |process: &Process| maps(process) || second.unreadable.contains(process);
        failed |= second.failed;
        mapping.retain(|process, _| failed || is_there(process));
    }
    Scan { mapping, unreadable, failed }
}

/// Logs only the first failure of a scan: if descriptors are short, many processes cannot be examined.
fn say_first(failed: bool, pid: u32, what: &str, error: &io::Error) {
    if !failed {
        tracing::warn!(pid, "{what}: {error}");
    }
}

fn find(pid: u32) -> Option<Process> {
    Process::find(pid).ok().flatten()
}

fn read_each(pids: Vec<u32>, read: Arc<Read>) -> io::Result<mpsc::Receiver<io::Result<Mapped>>> {
    let (answer, answers) = mpsc::channel();
    let is_urgent = priority::runs_first();
    let body = move || {
        priority::run_first_if(is_urgent);
        for pid in pids {
            let process = find(pid);
            let found = read(pid);
            // Answer and list change under the same lock: a caller that gave up on this process either finds the
            // answer, or the process is removed from the list.
            let mut stuck = STUCK.locked();
            // A late answer is dropped, because the process may have mapped more since.
            process.iter().for_each(|process| _ = stuck.remove(process));
            if answer.send(found).is_err() {
                return;
            }
        }
    };
    std::thread::Builder::new().name("mappers".into()).spawn(body)?;
    Ok(answers)
}

/// Reads these processes. If the thread that reads hangs, a new one reads the rest.
pub(crate) fn scan_these(mut pids: Vec<u32>, read: &Arc<Read>, timeout: Duration) -> Scan {
    let mut scan = Scan::default();
    let named = |pid, scan: &mut Scan| {
        Process::find(pid).unwrap_or_else(|error| {
            // A process that we may not read is skipped, as its map would be.
            if error.kind() != io::ErrorKind::PermissionDenied {
                say_first(scan.failed, pid, "Looking for this process", &error);
                scan.failed = true;
            }
            None
        })
    };
    let known_stuck: HashSet<Process> = STUCK.locked().clone();
    pids.retain(|pid| {
        let process = known_stuck.iter().find(|process| process.pid == *pid);
        let hangs = process.filter(|process| find(process.pid) == Some(**process));
        scan.unreadable.extend(hangs);
        hangs.is_none()
    });
    let mut left = pids.as_slice();
    while !left.is_empty() {
        let answers = match read_each(left.to_vec(), read.clone()) {
            Ok(answers) => answers,
            Err(error) => {
                tracing::error!("Starting a thread that reads memory maps: {error}");
                scan.failed = true;
                return scan;
            }
        };
        while let Some((pid, rest)) = left.split_first() {
            left = rest;
            let process = named(*pid, &mut scan);
            let answer = answers.recv_timeout(timeout).ok().or_else(|| {
                let mut stuck = STUCK.locked();
                let answer = answers.try_recv().ok();
                if answer.is_none() {
                    stuck.extend(process);
                }
                answer
            });
            match (answer, process) {
                (Some(Err(error)), process) => {
                    say_first(scan.failed, *pid, "Reading the memory map of this process", &error);
                    scan.unreadable.extend(process);
                    scan.failed = true;
                }
                (Some(Ok(found)), Some(process)) if !found.files.is_empty() => {
                    scan.mapping.insert(process, found);
                }
                (Some(_), _) => {}
                (None, process) => {
                    tracing::warn!(pid, "the memory map of this process cannot be read: it is passed over");
                    scan.unreadable.extend(process);
                    break;
                }
            }
        }
    }
    scan
}

/// Pid and name of a process, for messages.
pub fn name(process: Process) -> String {
    let name = std::fs::read_to_string(format!("/proc/{}/comm", process.pid)).unwrap_or_default();
    format!("{} ({})", process.pid, name.trim())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use ballast_base::Bytes;
    use ballast_sys::file_ranges::FileRanges;
    use ballast_sys::{Mapping, memfd};

    pub(crate) fn stopped() -> std::process::Child {
        use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
        let child = std::process::Command::new("sleep").arg("1000").spawn().expect("sleep");
        let pid = Pid::from_child(&child);
        kill_process(pid, Signal::STOP).expect("stop it");
        waitpid(Some(pid), WaitOptions::UNTRACED).expect("wait").expect("it is stopped");
        child
    }

    fn one_file() -> HashSet<FileId> {
        HashSet::from([FileId { dev: 1, ino: 1 }])
    }

    fn of_files(files: FileRanges) -> Mapped {
        Mapped { files, ..Mapped::default() }
    }

    fn its_bytes() -> Mapped {
        of_files(one_file().into_iter().map(|file| (file, 0, 4096)).collect())
    }

    #[test]
    fn a_process_that_maps_the_file_is_found_unless_it_is_known() {
        let fd = memfd::create("ballast-test", Bytes(3 * 4096)).expect("memfd");
        let file = memfd::file_id(&fd).expect("stat");
        let files = HashSet::from([file]);
        let me = Process::this().expect("this process");
        let nobody = |_: &Process, _: &Mapped| false;
        let mut processes = Processes::default();
        let mut foreign_mappers = |known: &dyn Fn(&Process, &Mapped) -> bool| {
            foreign_mappers(&mut processes, &files, HashSet::new(), &Announced::default(), known)
        };
        assert!(foreign_mappers(&nobody).mapping.is_empty(), "holding a descriptor is not mapping");
        let _mapping = Mapping::shared(&fd, 4096, 4096).expect("map");
        let mapped: FileRanges = [(file, 4096, 8192)].into_iter().collect();
        assert_eq!(foreign_mappers(&nobody).mapping, HashMap::from([(me, of_files(mapped))]));
        let of_another_part = |_: &Process, found: &Mapped| {
            found.files.overlap(&[(file, 0, 4096), (file, 8192, 12288)].into_iter().collect()).is_none()
        };
        assert!(foreign_mappers(&of_another_part).mapping.is_empty());
        assert!(foreign_mappers(&|process, _| process.pid == me.pid).mapping.is_empty());
    }

    #[test]
    fn a_process_seen_once_is_no_foreign_mapper_nor_is_another_process_with_its_pid() {
        let sees = |process| Scan { mapping: HashMap::from([(process, its_bytes())]), ..Scan::default() };
        let child = Process { pid: 7, start: 1 };
        let confirm_with = |second: Scan| confirm(sees(child), |_, _| false, |_| second).mapping.len();
        assert_eq!(confirm_with(Scan::default()), 0, "it went on to exec");
        assert_eq!(confirm_with(sees(Process { start: 2, ..child })), 0, "another process");
        assert_eq!(confirm_with(sees(child)), 1);
        let hangs = Scan { unreadable: vec![child], ..Scan::default() };
        assert_eq!(confirm_with(hangs), 1, "nobody can say that it is gone");
    }

    #[test]
    fn a_process_that_cannot_be_read_is_named_and_the_others_are_read() {
        let children: Vec<_> =
            (0..3).map(|_| std::process::Command::new("sleep").arg("1000").spawn().expect("sleep")).collect();
        let pids: Vec<u32> = children.iter().map(std::process::Child::id).collect();
        let process = |pid| Process::find(pid).expect("readable").expect("running");
        let (release, released) = mpsc::channel::<()>();
        let released = Mutex::new(released);
        let hangs_at = pids[1];
        let read: Arc<Read> = Arc::new(move |pid| {
            if pid == hangs_at {
                let _ = released.lock().expect("one thread").recv();
            }
            Ok(its_bytes())
        });
        for _ in 0..2 {
            let scan = scan_these(pids.clone(), &read, Duration::from_secs(1));
            assert_eq!(scan.unreadable, [process(pids[1])]);
            let found: HashSet<Process> = scan.mapping.into_keys().collect();
            assert_eq!(found, HashSet::from([process(pids[0]), process(pids[2])]));
        }
        drop(release);
        while STUCK.locked().contains(&process(pids[1])) {
            std::thread::yield_now();
        }
        let scan = scan_these(pids.clone(), &read, Duration::from_secs(60));
        assert_eq!((scan.mapping.len(), scan.unreadable), (3, Vec::new()), "it can be read again");
        for mut child in children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    #[test]
    fn a_process_that_could_not_be_read_is_not_taken_for_one_that_maps_nothing() {
        let me = Process::this().expect("this process");
        let read: Arc<Read> = Arc::new(|_| Err(rustix::io::Errno::MFILE.into()));
        let scan = scan_these(vec![me.pid], &read, Duration::from_secs(60));
        assert_eq!((scan.mapping.len(), scan.unreadable, scan.failed), (0, vec![me], true));
        let mut processes = Processes::default();
        let entry = vec![(me.pid, 1)];
        let maps: Arc<Read> = Arc::new(|_| Ok(its_bytes()));
        assert!(!processes.scan_these(entry.clone(), &one_file(), &maps).failed);
        processes.forget_times();
        let scan = processes.scan_these(entry, &one_file(), &read);
        assert!(scan.failed && scan.mapping.contains_key(&me), "what it was known to map still counts");
        assert!(mapped(u32::MAX, None).expect("gone, which is no error").files.is_empty());
    }

    #[test]
    fn a_process_is_read_again_only_after_it_ran_or_when_another_has_its_pid() {
        let mut other = stopped();
        let (me, pid) = (std::process::id(), other.id());
        let reads = Arc::new(Mutex::new(Vec::new()));
        let said = reads.clone();
        let read: Arc<Read> = Arc::new(move |pid| {
            said.lock().expect("one thread").push(pid);
            Ok(its_bytes())
        });
        let mut processes = Processes::default();
        let mut read_of = |entries: &[(u32, u64)]| {
            let scan = processes.scan_these(entries.to_vec(), &one_file(), &read);
            let mut seen: Vec<u32> = scan.mapping.keys().map(|process| process.pid).collect();
            seen.sort_unstable();
            let mut expected: Vec<u32> = entries.iter().map(|(pid, _)| *pid).collect();
            expected.sort_unstable();
            assert_eq!(seen, expected, "read or not, what it maps is known");
            std::mem::take(&mut *reads.lock().expect("no reader"))
        };
        assert_eq!(read_of(&[(pid, 1)]), [pid]);
        assert_eq!(read_of(&[(pid, 1)]), [0; 0]);
        let ran = clock::process_time(me);
        assert_eq!(read_of(&[(me, 2), (pid, 1)]), [me]);
        while clock::process_time(me) == ran {
            std::hint::spin_loop();
        }
        assert_eq!(read_of(&[(me, 2), (pid, 1)]), [me], "this one has run");
        assert_eq!(read_of(&[(pid, 3)]), [pid], "another process of that number");
        assert_eq!(read_of(&[]), [0; 0]);
        assert_eq!(read_of(&[(pid, 3)]), [pid], "it was forgotten meanwhile");
        other.kill().expect("end it");
        other.wait().expect("reap it");
    }
}
