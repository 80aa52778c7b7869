//! Who else maps a VM's RAM? A process that does, and has not attached, bypasses our userfaultfd: it would read zeros
//! where pages are far. A VM with such a process is not reclaimed from until it attaches or goes.
//!
//! Before: a VM came, or a limit is to be set. After: who maps which file, and who could not be looked at.
//! Threads: the engine's watch, the API's, the keeper's search; never one that takes orders or clients, because reading
//! another process's `/proc/PID/maps` needs a lock of that process, which a process in trouble may hold for ever.
//! Promise: a look ends. A process that cannot be looked at is passed over and named.

use std::collections::{HashMap, HashSet};
use std::io::{self, BufRead, BufReader};
use std::sync::{Arc, LazyLock, Mutex, PoisonError, mpsc};
use std::time::Duration;

use ballast_sys::kcmp;
use ballast_sys::memfd::FileId;

use rustix::fs::{AtFlags, CWD, Statx, StatxFlags, makedev, statx};

use crate::keeper::fence::Process;

/// How long one process may keep us waiting. One that takes longer is passed over from then on.
const PATIENCE: Duration = Duration::from_millis(500);
/// From one look at a suspect to the next. A child of the VMM between `vfork` and `exec` maps all its parent maps, for
/// some milliseconds.
const SECOND_LOOK: Duration = Duration::from_millis(500);

/// Processes whose maps could not be read in time; each has cost one thread, which waits on and takes it off this list.
static STUCK: LazyLock<Mutex<HashSet<Process>>> = LazyLock::new(Mutex::default);

/// What a look has found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Look {
    /// Processes that map some of the files, and which.
    pub mapping: HashMap<Process, HashSet<FileId>>,
    /// Processes that could not be looked at in time.
    pub unreadable: Vec<Process>,
}

/// What a process maps of these files. A seam: what reads may hang, which no test can make `/proc` do.
type Read = dyn Fn(u32, &HashSet<FileId>) -> io::Result<HashSet<FileId>> + Send + Sync;

/// Look through all processes. Those we may not look at are passed over, as are those that end meanwhile. Whoever could
/// not be looked at for any other reason (no descriptors left, say) is unreadable, and so are we if `/proc` is.
pub fn look(files: &HashSet<FileId>) -> Look {
    let pids = match pids() {
        Ok(pids) => pids,
        Err(error) => {
            tracing::error!("Looking through /proc: {error}");
            return Look { unreadable: Process::this().into_iter().collect(), ..Look::default() };
        }
    };
    look_at(pids, files, &(Arc::new(mapped) as Arc<Read>), PATIENCE)
}

fn pids() -> io::Result<Vec<u32>> {
    let processes = std::fs::read_dir("/proc")?;
    Ok(processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect())
}

/// The same, and a second look at those processes that are outside `known`: only who is seen twice is a stranger. A process
/// that runs in the address space of one of `attached` (a child that QEMU keeps to tear its memory down) touches memory as that
/// one does, through the same userfaultfds: it is none.
pub fn strangers(
    files: &HashSet<FileId>,
    attached: HashSet<u32>,
    known: impl Fn(&Process, &HashSet<FileId>) -> bool,
) -> Look {
    let again = |suspects| {
        std::thread::sleep(SECOND_LOOK);
        // Where the kernel cannot say, it stays suspect.
        let read = move |pid, files: &HashSet<FileId>| {
            let is_same = |other: &u32| kcmp::same_memory(*other, pid).unwrap_or(false);
            if attached.iter().any(is_same) { Ok(HashSet::new()) } else { mapped(pid, files) }
        };
        look_at(suspects, files, &(Arc::new(read) as Arc<Read>), PATIENCE)
    };
    confirm(look(files), known, again)
}

fn confirm(
    first: Look,
    known: impl Fn(&Process, &HashSet<FileId>) -> bool,
    again: impl FnOnce(Vec<u32>) -> Look,
) -> Look {
    let Look { mut mapping, unreadable } = first;
    mapping.retain(|process, files| !known(process, files));
    if !mapping.is_empty() {
        let second = again(mapping.keys().map(|process| process.pid).collect());
        // By process, not by pid: the pid may be another's by now. One that cannot be looked at any more stays suspect.
        mapping.retain(|process, _| second.mapping.contains_key(process) || second.unreadable.contains(process));
    }
    Look { mapping, unreadable }
}

fn stuck() -> std::sync::MutexGuard<'static, HashSet<Process>> {
    STUCK.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One thread reads after the other process; when it hangs, it is left behind and another goes on.
fn look_at(mut pids: Vec<u32>, files: &HashSet<FileId>, read: &Arc<Read>, patience: Duration) -> Look {
    let mut look = Look::default();
    let find = |pid| Process::find(pid).ok().flatten();
    let known_stuck: HashSet<Process> = stuck().clone();
    pids.retain(|pid| {
        let process = known_stuck.iter().find(|process| process.pid == *pid);
        let hangs = process.filter(|process| find(process.pid) == Some(**process));
        look.unreadable.extend(hangs);
        hangs.is_none()
    });
    let files = Arc::new(files.clone());
    let mut left = pids.as_slice();
    while !left.is_empty() {
        let (answer, answers) = mpsc::channel();
        let (batch, files, read) = (left.to_vec(), files.clone(), read.clone());
        let reader = std::thread::Builder::new().name("look".into()).spawn(move || {
            for pid in batch {
                let process = find(pid);
                let found = read(pid, &files);
                // Both under the lock, so that whoever gave up on this process either finds the answer or is taken off.
                let mut stuck = stuck();
                process.map(|process| stuck.remove(&process));
                if answer.send(found).is_err() {
                    return;
                }
            }
        });
        if let Err(error) = reader {
            tracing::error!("Starting a thread that looks at processes: {error}");
            look.unreadable.extend(left.iter().filter_map(|pid| find(*pid)));
            return look;
        }
        while let Some((pid, rest)) = left.split_first() {
            left = rest;
            let process = find(*pid);
            let answer = answers.recv_timeout(patience).ok().or_else(|| {
                let mut stuck = stuck();
                let answer = answers.try_recv().ok();
                if answer.is_none() {
                    stuck.extend(process);
                }
                answer
            });
            match (answer, process) {
                (Some(Err(error)), process) => {
                    tracing::warn!(pid, "Reading the memory map of this process: {error}");
                    look.unreadable.extend(process);
                }
                (Some(Ok(found)), Some(process)) if !found.is_empty() => {
                    look.mapping.insert(process, found);
                }
                (Some(_), _) => {}
                (None, process) => {
                    tracing::warn!(pid, "the memory map of this process cannot be read: it is passed over");
                    look.unreadable.extend(process);
                    break;
                }
            }
        }
    }
    look
}

/// Who may still come to these files, other than those processes: has one of them open, or maps one? Descriptors are looked at
/// first, because they can be of any process. A process that cannot be looked at is taken for one that does not.
pub fn holder(files: &HashSet<FileId>, but: &HashSet<u32>) -> io::Result<Option<Process>> {
    let readers: [Arc<Read>; 2] = [Arc::new(opened), Arc::new(mapped)];
    for read in readers {
        let look = look_at(pids()?, files, &read, PATIENCE);
        if let Some(process) = look.mapping.into_keys().find(|process| !but.contains(&process.pid)) {
            return Ok(Some(process));
        }
    }
    Ok(None)
}

/// What a process is called, for people.
pub fn name(process: Process) -> String {
    let name = std::fs::read_to_string(format!("/proc/{}/comm", process.pid)).unwrap_or_default();
    format!("{} ({})", process.pid, name.trim())
}

/// Which of these files the process has open. The kernel says a descriptor's inode number without asking the file's own file
/// system, which may not answer; only a file whose number is right is asked, and in a way that does not wait.
fn opened(pid: u32, files: &HashSet<FileId>) -> io::Result<HashSet<FileId>> {
    let mut found = HashSet::new();
    // A process that is ending has no descriptors any more, and one that we may not look at shows none.
    let Ok(descriptors) = std::fs::read_dir(format!("/proc/{pid}/fdinfo")) else { return Ok(found) };
    for descriptor in descriptors.flatten() {
        let Ok(info) = std::fs::read_to_string(descriptor.path()) else { continue };
        let ino = info.lines().find_map(|line| line.strip_prefix("ino:")?.trim().parse().ok());
        let path = format!("/proc/{pid}/fd/{}", descriptor.file_name().to_string_lossy());
        let same_number = files.iter().filter(|file| ino.is_none_or(|ino: u64| ino == file.ino));
        for file in same_number {
            let stat = statx(CWD, &path, AtFlags::STATX_DONT_SYNC, StatxFlags::BASIC_STATS);
            let is_it =
                |stat: Statx| makedev(stat.stx_dev_major, stat.stx_dev_minor) == file.dev && stat.stx_ino == file.ino;
            found.extend(stat.is_ok_and(is_it).then_some(*file));
        }
    }
    Ok(found)
}

fn mapped(pid: u32, files: &HashSet<FileId>) -> io::Result<HashSet<FileId>> {
    let read = || -> io::Result<HashSet<FileId>> {
        let maps = BufReader::new(std::fs::File::open(format!("/proc/{pid}/maps"))?);
        let mut found = HashSet::new();
        // Split as bytes: a path may be anything.
        for line in maps.split(b'\n') {
            found.extend(file_of(&String::from_utf8_lossy(&line?)).filter(|id| files.contains(id)));
        }
        Ok(found)
    };
    let passed_over = |error: &io::Error| {
        use io::ErrorKind::{NotFound, PermissionDenied};
        // The third is a process that ended while it was read.
        matches!(error.kind(), NotFound | PermissionDenied)
            || error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error())
    };
    read().or_else(|error| if passed_over(&error) { Ok(HashSet::new()) } else { Err(error) })
}

/// Device and inode of a line of `/proc/PID/maps`: `start-end perms offset major:minor inode path`.
fn file_of(line: &str) -> Option<FileId> {
    let mut fields = line.split_ascii_whitespace().skip(3);
    let (major, minor) = fields.next()?.split_once(':')?;
    let dev = rustix::fs::makedev(u32::from_str_radix(major, 16).ok()?, u32::from_str_radix(minor, 16).ok()?);
    let ino = fields.next()?.parse().ok()?;
    Some(FileId { dev, ino })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_base::Bytes;
    use ballast_sys::{Mapping, memfd};

    fn one_file() -> HashSet<FileId> {
        HashSet::from([FileId { dev: 1, ino: 1 }])
    }

    #[test]
    fn a_process_that_maps_the_file_is_found_unless_it_is_known() {
        let fd = memfd::create("ballast-test", Bytes(4096)).expect("memfd");
        let files = HashSet::from([memfd::file_id(&fd).expect("stat")]);
        let me = Process::this().expect("this process");
        let nobody = |_: &Process, _: &HashSet<FileId>| false;
        let strangers = |known: &dyn Fn(&Process, &HashSet<FileId>) -> bool| strangers(&files, HashSet::new(), known);
        assert!(strangers(&nobody).mapping.is_empty(), "holding a descriptor is not mapping");
        let _mapping = Mapping::shared(&fd, 0, 4096).expect("map");
        assert_eq!(strangers(&nobody).mapping, HashMap::from([(me, files.clone())]));
        assert!(strangers(&|process, _| process.pid == me.pid).mapping.is_empty());
    }

    #[test]
    fn who_has_a_file_open_or_maps_it_holds_it_and_nobody_else() {
        let fd = memfd::create("ballast-test", Bytes(4096)).expect("memfd");
        let file = memfd::file_id(&fd).expect("stat");
        let files = HashSet::from([file]);
        let me = Process::this().expect("this process");
        let nobody = HashSet::new();
        assert_eq!(opened(me.pid, &files).expect("readable"), files);
        assert_eq!(holder(&files, &nobody).expect("readable"), Some(me));
        assert_eq!(holder(&files, &HashSet::from([me.pid])).expect("readable"), None);
        let mapping = Mapping::shared(&fd, 0, 4096).expect("map");
        drop(fd);
        assert_eq!(opened(me.pid, &files).expect("readable"), HashSet::new());
        assert_eq!(holder(&files, &nobody).expect("readable"), Some(me), "it is mapped");
        drop(mapping);
        assert_eq!(holder(&files, &nobody).expect("readable"), None);
        assert_eq!(opened(me.pid, &HashSet::from([FileId { dev: 0, ..file }])).expect("readable"), HashSet::new());
    }

    #[test]
    fn who_is_seen_once_only_is_no_stranger_and_who_has_the_pid_of_one_is_none_either() {
        let sees = |process| Look { mapping: HashMap::from([(process, one_file())]), unreadable: Vec::new() };
        let child = Process { pid: 7, start: 1 };
        let confirm_with = |second: Look| confirm(sees(child), |_, _| false, |_| second).mapping.len();
        assert_eq!(confirm_with(Look::default()), 0, "it went on to exec");
        assert_eq!(confirm_with(sees(Process { start: 2, ..child })), 0, "another process");
        assert_eq!(confirm_with(sees(child)), 1);
        let hangs = Look { unreadable: vec![child], ..Look::default() };
        assert_eq!(confirm_with(hangs), 1, "nobody can say that it is gone");
    }

    #[test]
    fn a_process_that_cannot_be_read_is_named_and_the_others_are_looked_at() {
        let children: Vec<_> =
            (0..3).map(|_| std::process::Command::new("sleep").arg("1000").spawn().expect("sleep")).collect();
        let pids: Vec<u32> = children.iter().map(std::process::Child::id).collect();
        let process = |pid| Process::find(pid).expect("readable").expect("running");
        let (release, released) = mpsc::channel::<()>();
        let released = Mutex::new(released);
        let hangs_at = pids[1];
        let read: Arc<Read> = Arc::new(move |pid, files: &HashSet<FileId>| {
            if pid == hangs_at {
                let _ = released.lock().expect("one thread").recv();
            }
            Ok(files.clone())
        });
        for _ in 0..2 {
            let look = look_at(pids.clone(), &one_file(), &read, Duration::from_secs(1));
            assert_eq!(look.unreadable, [process(pids[1])]);
            let found: HashSet<Process> = look.mapping.into_keys().collect();
            assert_eq!(found, HashSet::from([process(pids[0]), process(pids[2])]));
        }
        drop(release);
        while stuck().contains(&process(pids[1])) {
            std::thread::yield_now();
        }
        let look = look_at(pids.clone(), &one_file(), &read, Duration::from_secs(60));
        assert_eq!((look.mapping.len(), look.unreadable), (3, Vec::new()), "it can be read again");
        for mut child in children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    #[test]
    fn a_process_that_could_not_be_read_is_not_taken_for_one_that_maps_nothing() {
        let me = Process::this().expect("this process");
        let read: Arc<Read> = Arc::new(|_, _: &HashSet<FileId>| Err(rustix::io::Errno::MFILE.into()));
        let look = look_at(vec![me.pid], &one_file(), &read, Duration::from_secs(60));
        assert_eq!((look.mapping.len(), look.unreadable), (0, vec![me]));
        assert!(mapped(u32::MAX, &one_file()).expect("gone, which is no error").is_empty());
    }

    #[test]
    fn odd_lines_of_maps_are_passed_over() {
        assert_eq!(file_of("7f00-7f01 rw-s 0 00:01 77 /memfd:x (deleted)").map(|id| id.ino), Some(77));
        for line in ["", "7f00-7f01", "7f00-7f01 rw-p 0 zz:00 1", "7f00-7f01 rw-p 00000000 00:00 [heap]"] {
            assert_eq!(file_of(line), None, "{line}");
        }
    }
}
