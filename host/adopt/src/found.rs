//! Finds VMMs among the processes of this host.
//!
//! Before: a pid, or nothing. After: a VMM that can be adopted, or a reason why that process cannot.
//! Threads: any. Promise: pids are reused, but a descriptor of a process is not: all facts about a process are about
//! one process.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use ballast_base::Bytes;
use ballast_sys::process::{Process, command_line};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::maps::{self, NoRam, Ram};
use crate::vmm::Vmm;

/// A VMM that was found.
#[derive(Debug)]
pub struct Found {
    /// The process.
    pub process: Process,
    /// The VM that it runs.
    pub vmm: Vmm,
    pub(crate) pidfd: OwnedFd,
    pub(crate) ram: Vec<Ram>,
}

/// Why a process is not adopted.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// No process has this pid.
    #[error("no process has this pid")]
    NoProcess,
    /// The process has no memory of its own.
    #[error("it is a thread of the kernel")]
    KernelThread,
    /// The process runs another program.
    #[error("it runs {0}, which is no VMM that Ballast knows (QEMU, Cloud Hypervisor, Firecracker)")]
    NotVmm(String),
    /// The process was started for Ballast.
    #[error("it has Ballast's library, so it is paged, not adopted")]
    Paged,
    /// The process's memory does not match its command line.
    #[error(transparent)]
    NoRam(#[from] NoRam),
    /// The kernel could not answer.
    #[error("{0}")]
    Kernel(#[from] io::Error),
}

/// Whether this process runs a program that is a VMM. A quick check, for lists of processes.
pub fn is_vmm(pid: u32) -> bool {
    executable(pid).is_ok_and(|name| crate::vmm::Program::of(&name).is_some())
}

/// The pids of all VMMs of this host.
pub fn all() -> Vec<u32> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let mut pids: Vec<u32> =
        entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter(|pid| is_vmm(*pid)).collect();
    pids.sort_unstable();
    pids
}

/// Examines a process.
pub fn look(pid: u32) -> Result<Found, Refusal> {
    let number = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(Refusal::NoProcess)?;
    // All that follows is about this process, or fails: if it ended, the descriptor shows it at the end.
    let pidfd = pidfd_open(number, PidfdFlags::empty()).map_err(|error| match error {
        // INVAL, NOENT: the pid belongs to a thread that is not its process's first.
        rustix::io::Errno::SRCH | rustix::io::Errno::INVAL | rustix::io::Errno::NOENT => Refusal::NoProcess,
        error => Refusal::Kernel(error.into()),
    })?;
    let process = Process::find(pid)?.filter(|process| !process.is_dying()).ok_or(Refusal::NoProcess)?;
    let name = match executable(pid) {
        Ok(name) => name,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(if process.is_dying() { Refusal::NoProcess } else { Refusal::KernelThread });
        }
        Err(error) => return Err(error.into()),
    };
    let read = |file: &str| std::fs::read(format!("/proc/{pid}/{file}"));
    let (line, cgroups) = (command_line(pid)?, read("cgroup").unwrap_or_default());
    let (line, cgroups) = (String::from_utf8_lossy(&line), String::from_utf8_lossy(&cgroups));
    let args: Vec<&str> = line.split('\0').collect();
    let vmm = Vmm::of(&name, &args, &cgroups).ok_or(Refusal::NotVmm(name))?;
    let smaps = read("smaps")?;
    let smaps = String::from_utf8_lossy(&smaps);
    if smaps.contains("libballast_preload") {
        return Err(Refusal::Paged);
    }
    let ram = with_dimms(&smaps, vmm.memory, &vmm)?;
    match Process::find(pid)? {
        Some(still) if still == process && !process.is_dying() => Ok(Found { process, vmm, pidfd, ram }),
        _ => Err(Refusal::NoProcess),
    }
}

/// Its guest RAM now, which its VMM may have mapped anew. `size`: its RAM at boot, if the command line does not state
/// it.
pub(crate) fn ram(pid: u32, vmm: &Vmm, size: Bytes) -> Result<Vec<Ram>, Refusal> {
    let smaps = std::fs::read(format!("/proc/{pid}/smaps"))?;
    Ok(with_dimms(&String::from_utf8_lossy(&smaps), vmm.memory.or(Some(size.0)), vmm)?)
}

fn with_dimms(smaps: &str, wanted: Option<u64>, vmm: &Vmm) -> Result<Vec<Ram>, NoRam> {
    let mut ram = maps::ram(smaps, wanted)?;
    if let (Some(memory), Some(most)) = (vmm.memory, vmm.most) {
        ram.extend(maps::plugged(smaps, &ram, most.saturating_sub(memory)));
        ram.sort_by_key(|part| part.start);
    }
    Ok(ram)
}

/// The file name of a process's program, even if the file was replaced since.
fn executable(pid: u32) -> io::Result<String> {
    let path = std::fs::read_link(format!("/proc/{pid}/exe"))?;
    let name = path.file_name().unwrap_or(Path::new("").as_os_str()).to_string_lossy().into_owned();
    Ok(name.strip_suffix(" (deleted)").map_or(name.clone(), str::to_owned))
}

/// The device that pins all of a VM's memory, if one is passed through.
pub(crate) fn vfio(pid: u32) -> Option<String> {
    let open = std::fs::read_dir(format!("/proc/{pid}/fd")).ok()?.flatten();
    let targets = open.filter_map(|entry| std::fs::read_link(entry.path()).ok());
    let mut targets = targets.map(|target| target.to_string_lossy().into_owned());
    targets.find(|target| target.starts_with("/dev/vfio/") || target.starts_with("anon_inode:[vfio"))
}
