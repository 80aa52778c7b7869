//! Who else maps a VM's RAM? A process that does, and has not attached, bypasses our userfaultfd: it would read zeros
//! where pages are far. A VM with such a process is not reclaimed from until it attaches or goes.
//!
//! Threads: the engine's watch and the API's; never the one that takes orders, because reading another process's
//! `/proc/PID/maps` needs a lock of that process, which a process in trouble may hold for ever.

use std::collections::HashSet;
use std::io::{BufRead, BufReader};
use std::sync::{Arc, LazyLock, Mutex, mpsc};
use std::time::Duration;

use ballast_sys::memfd::FileId;

/// How long one process may keep us waiting. One that takes longer is passed over from then on.
const PATIENCE: Duration = Duration::from_millis(500);

/// Processes whose maps could not be read in time; each has cost one thread, which waits on.
static STUCK: LazyLock<Mutex<HashSet<u32>>> = LazyLock::new(Mutex::default);

/// The first process outside `known` that maps one of these files: pid and program name.
///
/// Reads `/proc/*/maps`; processes we may not look at are passed over, as are those that end meanwhile.
pub fn stranger(files: &HashSet<FileId>, known: &HashSet<u32>) -> Option<(u32, String)> {
    let files = Arc::new(files.clone());
    let processes = std::fs::read_dir("/proc").ok()?;
    let mut pids = processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let pid = pids.find(|pid: &u32| !known.contains(pid) && maps_any_in_time(*pid, &files))?;
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    Some((pid, name.trim().to_owned()))
}

fn maps_any_in_time(pid: u32, files: &Arc<HashSet<FileId>>) -> bool {
    if STUCK.lock().expect("no panic while held").contains(&pid) {
        return false;
    }
    let (answer, found) = mpsc::channel();
    let files = files.clone();
    let looking = std::thread::Builder::new().name("look".into()).spawn(move || answer.send(maps_any(pid, &files)));
    match looking.map(|_| found.recv_timeout(PATIENCE)) {
        Ok(Ok(found)) => found,
        Ok(Err(mpsc::RecvTimeoutError::Timeout)) => {
            tracing::warn!(pid, "the memory map of this process cannot be read: it is not looked at any more");
            STUCK.lock().expect("no panic while held").insert(pid);
            false
        }
        _ => false,
    }
}

fn maps_any(pid: u32, files: &HashSet<FileId>) -> bool {
    let Ok(maps) = std::fs::File::open(format!("/proc/{pid}/maps")) else { return false };
    // Split as bytes: a path may be anything.
    let lines = BufReader::new(maps).split(b'\n').map_while(Result::ok);
    lines.into_iter().any(|line| file_of(&String::from_utf8_lossy(&line)).is_some_and(|id| files.contains(&id)))
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

    #[test]
    fn a_process_that_maps_the_file_is_found_unless_it_is_known() {
        let fd = memfd::create("ballast-test", Bytes(4096)).expect("memfd");
        let files = HashSet::from([memfd::file_id(&fd).expect("stat")]);
        let me = std::process::id();
        assert_eq!(stranger(&files, &HashSet::new()), None, "holding a descriptor is not mapping");
        let _mapping = Mapping::shared(&fd, 0, 4096).expect("map");
        assert_eq!(stranger(&files, &HashSet::new()).map(|found| found.0), Some(me));
        assert_eq!(stranger(&files, &HashSet::from([me])), None);
    }

    #[test]
    fn odd_lines_of_maps_are_passed_over() {
        assert_eq!(file_of("7f00-7f01 rw-s 0 00:01 77 /memfd:x (deleted)").map(|id| id.ino), Some(77));
        for line in ["", "7f00-7f01", "7f00-7f01 rw-p 0 zz:00 1", "7f00-7f01 rw-p 00000000 00:00 [heap]"] {
            assert_eq!(file_of(line), None, "{line}");
        }
    }
}
