//! The memory cgroup (version 2) of a VMM, and what it allows.
//!
//! Before: a process was found. After: the kernel reclaims memory of its cgroup, or there is a reason not to request
//! it.
//! Threads: any. Units: bytes and microseconds.
//! Promise: only `memory.reclaim` is written, which changes no setting, and only in a cgroup that no other process
//! shares.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// Where the kernel mounts cgroup version 2: alone, or beside version 1.
const MOUNTS: [&str; 2] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];

/// A VMM's own cgroup with the memory controller.
#[derive(Debug)]
pub struct Cgroup {
    directory: PathBuf,
    /// Whether the kernel takes a swappiness for one reclaim (Linux 6.10).
    takes_swappiness: AtomicBool,
}

/// Why the cgroup of a VMM is not used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotOwn {
    /// It has cgroups of version 1 only, or is in the root.
    #[error("it has no memory cgroup of version 2")]
    None,
    /// The kernel is older than 5.19.
    #[error("this kernel has no memory.reclaim")]
    NoReclaim,
    /// Other processes are in the cgroup.
    #[error("it shares the cgroup {0} with {1} other processes")]
    Shared(PathBuf, usize),
    /// The process was moved since it was adopted.
    #[error("it has left the cgroup {0}")]
    Left(PathBuf),
    /// The kernel would reclaim files only.
    #[error("vm.swappiness is 0, and this kernel takes none for one reclaim")]
    Swappiness,
    /// `memory.reclaim` cannot be opened for writing.
    #[error("{0}/memory.reclaim cannot be written: {1}")]
    ReadOnly(PathBuf, String),
}

/// The outcome of a reclaim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reclaimed {
    /// All of the requested bytes.
    All,
    /// Fewer bytes.
    Less,
}

impl Cgroup {
    /// The cgroup of a process, if it has one of its own.
    pub fn own(pid: u32) -> Result<Self, NotOwn> {
        let (mount, cgroups) = (mount().ok_or(NotOwn::None)?, cgroups(pid));
        Self::own_in(mount, &cgroups, pid)
    }

    fn own_in(mount: &Path, cgroups: &str, pid: u32) -> Result<Self, NotOwn> {
        let directory = ancestors(mount, cgroups)
            .into_iter()
            .find(|directory| directory.join("memory.current").exists())
            .ok_or(NotOwn::None)?;
        let others = members(&directory).into_iter().filter(|member| *member != pid).count();
        if others > 0 {
            return Err(NotOwn::Shared(directory, others));
        }
        if !directory.join("memory.reclaim").exists() {
            return Err(NotOwn::NoReclaim);
        }
        let cgroup = Self { directory, takes_swappiness: AtomicBool::new(true) };
        match cgroup.open() {
            Ok(_) => Ok(cgroup),
            Err(error) => Err(NotOwn::ReadOnly(cgroup.directory, error.to_string())),
        }
    }

    /// The directory of the cgroup.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Whether this process is still in the cgroup, and alone.
    pub fn is_own(&self, pid: u32) -> bool {
        let members = members(&self.directory);
        !members.is_empty() && members.iter().all(|member| *member == pid)
    }

    fn open(&self) -> io::Result<std::fs::File> {
        std::fs::File::options().write(true).open(self.directory.join("memory.reclaim"))
    }

    /// Has the kernel reclaim this many bytes now, from guest RAM rather than files where the kernel takes a
    /// swappiness.
    pub fn reclaim(&self, bytes: u64) -> io::Result<Reclaimed> {
        const MOSTLY_SWAP: &str = "swappiness=200";
        let takes = self.takes_swappiness.load(Ordering::Relaxed);
        let order = if takes { format!("{bytes} {MOSTLY_SWAP}") } else { bytes.to_string() };
        match self.open()?.write_all(order.as_bytes()) {
            Ok(()) => Ok(Reclaimed::All),
            Err(error) if takes && error.raw_os_error() == Some(rustix::io::Errno::INVAL.raw_os_error()) => {
                self.takes_swappiness.store(false, Ordering::Relaxed);
                self.reclaim(bytes)
            }
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                Ok(Reclaimed::Less)
            }
            Err(error) => Err(error),
        }
    }

    /// The reason why a reclaim would take no guest RAM: the system's swappiness is 0, and the kernel takes none for
    /// one reclaim.
    pub fn takes_no_swap(&self) -> Option<NotOwn> {
        let is_zero = std::fs::read_to_string("/proc/sys/vm/swappiness").is_ok_and(|text| text.trim() == "0");
        (is_zero && !self.takes_swappiness.load(Ordering::Relaxed)).then_some(NotOwn::Swappiness)
    }

    /// The reason why the cgroup is not used while it is not the process's own.
    pub fn not_own(&self, pid: u32) -> NotOwn {
        let members = members(&self.directory);
        let others = members.iter().filter(|member| **member != pid).count();
        if others == members.len() {
            NotOwn::Left(self.directory.clone())
        } else {
            NotOwn::Shared(self.directory.clone(), others)
        }
    }
}

fn mount() -> Option<&'static Path> {
    static MOUNT: OnceLock<Option<&'static Path>> = OnceLock::new();
    let find = || MOUNTS.iter().map(Path::new).find(|mount| mount.join("cgroup.controllers").exists());
    *MOUNT.get_or_init(find)
}

/// The text of `/proc/PID/cgroup`; empty if the process has ended.
pub fn cgroups(pid: u32) -> String {
    std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default()
}

/// The directories of a process's cgroup and of those above it, except the root.
fn ancestors(mount: &Path, cgroups: &str) -> Vec<PathBuf> {
    let Some(path) = cgroups.lines().find_map(|line| line.strip_prefix("0::/")) else { return Vec::new() };
    let directory = mount.join(path.trim_end_matches(" (deleted)"));
    directory.ancestors().take_while(|at| *at != mount && at.starts_with(mount)).map(Path::to_owned).collect()
}

/// The processes in a cgroup and below it. A threaded cgroup below lists none; the cgroup above it does.
fn members(directory: &Path) -> Vec<u32> {
    let own = std::fs::read_to_string(directory.join("cgroup.procs")).unwrap_or_default();
    let mut found: Vec<u32> = own.lines().filter_map(|line| line.parse().ok()).collect();
    let below = std::fs::read_dir(directory).into_iter().flatten().flatten();
    for entry in below.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
        found.extend(members(&entry.path()));
    }
    found
}

/// Bytes that these cgroups still let into swap, and the directory of the cgroup that allows the fewest; `None` is no
/// bound.
///
/// `cgroups`: the text of `/proc/PID/cgroup`.
pub fn swap_room(cgroups: &str) -> Option<(u64, PathBuf)> {
    swap_room_in(mount()?, cgroups)
}

fn swap_room_in(mount: &Path, cgroups: &str) -> Option<(u64, PathBuf)> {
    let number = |path: PathBuf| std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let room = |directory: PathBuf| {
        let most = number(directory.join("memory.swap.max"))?;
        Some((most.saturating_sub(number(directory.join("memory.swap.current")).unwrap_or(0)), directory))
    };
    ancestors(mount, cgroups).into_iter().filter_map(room).min_by_key(|(room, _)| *room)
}

/// Microseconds in which some thread of these processes waited for memory; `None` without a cgroup of their own.
///
/// `cgroups`: the text of `/proc/PID/cgroup` of one of them.
pub fn stall_us(cgroups: &str, pids: &[u32]) -> Option<u64> {
    stall_us_in(mount()?, cgroups, pids)
}

fn stall_us_in(mount: &Path, cgroups: &str, pids: &[u32]) -> Option<u64> {
    // A threaded cgroup has some threads of a process: libvirt's `emulator` has no vCPU.
    let is_threaded = |directory: &PathBuf| {
        std::fs::read_to_string(directory.join("cgroup.type")).is_ok_and(|kind| kind.trim() == "threaded")
    };
    // The root belongs to no process alone.
    let directory = ancestors(mount, cgroups).into_iter().find(|directory| !is_threaded(directory))?;
    if members(&directory).iter().any(|member| !pids.contains(member)) {
        return None;
    }
    total_us(&std::fs::read_to_string(directory.join("memory.pressure")).ok()?)
}

/// The paths of all cgroups of a process, of both versions.
pub fn paths(pid: u32) -> Vec<String> {
    cgroups(pid).lines().filter_map(|line| line.splitn(3, ':').nth(2)).map(str::to_owned).collect()
}

/// The total of the line `some`.
fn total_us(pressure: &str) -> Option<u64> {
    let some = pressure.lines().find(|line| line.starts_with("some "))?;
    some.rsplit_once("total=")?.1.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    const PID: u32 = 7;

    /// A tree like libvirt's, with these files in the scope.
    fn tree(files: &[(&str, &str)]) -> (tempfile::TempDir, PathBuf) {
        let root = tempfile::tempdir().expect("a directory");
        let scope = root.path().join("machine.slice/vm.scope");
        fs::create_dir_all(scope.join("libvirt/emulator")).expect("directories");
        for (name, text) in files {
            fs::write(scope.join(name), text).expect("a file");
        }
        (root, scope)
    }

    const EMULATOR: &str = "1:name=systemd:/x\n0::/machine.slice/vm.scope/libvirt/emulator\n";

    #[test]
    fn the_nearest_cgroup_with_memory_is_its_own_if_nobody_else_is_in_it_or_below() {
        let files = [("memory.current", "1"), ("memory.reclaim", ""), ("cgroup.procs", "")];
        let (root, scope) = tree(&files);
        fs::write(scope.join("libvirt/emulator/cgroup.procs"), "7\n").expect("a file");
        let own = Cgroup::own_in(root.path(), EMULATOR, PID).expect("its own");
        assert_eq!(own.directory(), scope);
        assert_eq!(own.reclaim(4096).expect("written"), Reclaimed::All);
        assert_eq!(fs::read_to_string(scope.join("memory.reclaim")).expect("read"), "4096 swappiness=200");
        assert!(own.is_own(PID) && !own.is_own(8));
        fs::write(scope.join("libvirt/emulator/cgroup.procs"), "").expect("a file");
        assert!(!own.is_own(PID), "it was moved");
        assert_eq!(own.not_own(PID), NotOwn::Left(scope.clone()));
        fs::write(scope.join("libvirt/emulator/cgroup.procs"), "7\n").expect("a file");
        fs::write(scope.join("libvirt/cgroup.procs"), "8\n9\n").expect("a file");
        assert!(!own.is_own(PID));
        assert_eq!(own.not_own(PID), NotOwn::Shared(scope.clone(), 2));
        let shared = Cgroup::own_in(root.path(), EMULATOR, PID).expect_err("shared");
        assert_eq!(shared, NotOwn::Shared(scope, 2));
    }

    #[test]
    fn the_kernels_lines_are_understood_and_the_root_is_nobodys_own() {
        let pressure = "some avg10=0.00 avg60=0.10 avg300=0.00 total=12345\nfull avg10=0.00 total=99\n";
        assert_eq!(total_us(pressure), Some(12345));
        assert_eq!(total_us("some avg10=0.00"), None);
        let directory = |cgroups| ancestors(Path::new("/sys/fs/cgroup"), cgroups).into_iter().next();
        assert_eq!(directory("12:memory:/a\n0::/\n"), None);
        assert_eq!(directory("12:memory:/a\n"), None);
        let directory = directory("1:name=systemd:/x\n0::/vms/web\n").expect("one of its own");
        assert!(directory.ends_with("vms/web"), "{directory:?}");
    }

    #[test]
    fn a_cgroup_that_is_not_used_says_why() {
        let (root, _) = tree(&[]);
        let why = |cgroups| Cgroup::own_in(root.path(), cgroups, PID).expect_err("none");
        assert_eq!((why("0::/\n"), why("5:memory:/x\n"), why(EMULATOR)), (NotOwn::None, NotOwn::None, NotOwn::None));
        let (root, scope) = tree(&[("memory.current", "1")]);
        assert_eq!(Cgroup::own_in(root.path(), EMULATOR, PID).expect_err("old"), NotOwn::NoReclaim);
        // A directory cannot be opened for writing, not even by root.
        fs::create_dir(scope.join("memory.reclaim")).expect("a directory");
        let readonly = Cgroup::own_in(root.path(), EMULATOR, PID).expect_err("read-only");
        assert!(matches!(readonly, NotOwn::ReadOnly(..)), "{readonly}");
    }

    #[test]
    fn the_stall_is_that_of_all_threads_although_they_are_in_cgroups_of_their_own() {
        let total = |us: u32| format!("some avg10=0.00 avg60=0.00 avg300=0.00 total={us}\n");
        let (root, scope) = tree(&[]);
        let (libvirt, emulator) = (scope.join("libvirt"), scope.join("libvirt/emulator"));
        for (directory, kind, us) in [(&libvirt, "domain threaded\n", 500), (&emulator, "threaded\n", 3)] {
            fs::write(directory.join("cgroup.type"), kind).expect("a file");
            fs::write(directory.join("memory.pressure"), total(us)).expect("a file");
        }
        fs::write(libvirt.join("cgroup.procs"), "7\n").expect("a file");
        assert_eq!(stall_us_in(root.path(), EMULATOR, &[PID]), Some(500));
        fs::write(libvirt.join("cgroup.procs"), "7\n8\n").expect("a file");
        assert_eq!(stall_us_in(root.path(), EMULATOR, &[PID]), None);
    }

    #[test]
    fn the_least_room_for_swap_of_all_cgroups_above_counts() {
        let (root, scope) = tree(&[("memory.swap.max", "100\n"), ("memory.swap.current", "30\n")]);
        assert_eq!(swap_room_in(root.path(), EMULATOR), Some((70, scope.clone())));
        fs::write(scope.join("libvirt/memory.swap.max"), "max\n").expect("a file");
        assert_eq!(swap_room_in(root.path(), EMULATOR), Some((70, scope.clone())));
        fs::write(scope.join("libvirt/memory.swap.max"), "0\n").expect("a file");
        assert_eq!(swap_room_in(root.path(), EMULATOR), Some((0, scope.join("libvirt"))));
        assert_eq!(swap_room_in(root.path(), "0::/other\n"), None);
    }
}
