//! Probes of the machine's settings and devices.
//!
//! Before: nothing. After: [`super::probe`] lists the findings. Threads: any. Promise: nothing is written.

use std::fs;
use std::io;
use std::path::Path;

use super::finding::{Finding, Presence, no, refused, unknown, yes};

/// The kernel's release, such as `6.12.9`.
pub fn kernel_release() -> String {
    fs::read_to_string("/proc/sys/kernel/osrelease").map_or_else(|_| "unknown".into(), |text| text.trim().to_owned())
}

/// The word in brackets of a settings file such as `always [never]`.
pub(super) fn selected(path: &str) -> io::Result<String> {
    let text = fs::read_to_string(path)?;
    let word = text.split_once('[').and_then(|(_, rest)| rest.split_once(']')).map(|(word, _)| word.to_owned());
    word.ok_or_else(|| io::Error::other(format!("{path} selects nothing")))
}

pub(super) fn device(path: &str) -> Finding {
    match fs::File::options().read(true).write(true).open(path) {
        Ok(_) => yes(""),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => no("there, but this user may not open it"),
        Err(error) => refused(path, &error),
    }
}

pub(super) fn readable(path: &str) -> Finding {
    match fs::read(path) {
        Ok(_) => yes(""),
        Err(error) => refused(path, &error),
    }
}

pub(super) fn kvm() -> Finding {
    let flags = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let hardware = ["vmx", "svm"].into_iter().find(|flag| flags.split_ascii_whitespace().any(|word| word == *flag));
    match (device("/dev/kvm"), hardware) {
        ((Presence::Yes, _), Some(flag)) => yes(flag),
        ((Presence::Yes, _), None) => {
            no("/dev/kvm is there but the CPU shows neither vmx nor svm: stock kernels will not boot under it")
        }
        ((_, why), _) if why.is_empty() => no("/dev/kvm cannot be opened"),
        ((_, why), _) => no(why),
    }
}

pub(super) fn cgroup() -> Finding {
    if Path::new("/sys/fs/cgroup/cgroup.controllers").exists() {
        return yes("");
    }
    match fs::read_to_string("/proc/self/cgroup") {
        Ok(text) if text.lines().any(|line| line.contains(":memory:")) => no("version 1"),
        Ok(_) => unknown("no memory controller is mounted"),
        Err(error) => refused("/proc/self/cgroup", &error),
    }
}

pub(super) fn swap() -> Finding {
    let Ok(text) = fs::read_to_string("/proc/swaps") else { return no("the kernel has no swap") };
    let devices: Vec<&str> = text.lines().skip(1).filter_map(|line| line.split_ascii_whitespace().next()).collect();
    if devices.is_empty() { no("none in use") } else { yes(devices.join(", ")) }
}

pub(super) fn open_files() -> Finding {
    const PLENTY: u64 = 4096;
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    match limit.maximum {
        None => yes("unlimited"),
        Some(most) if most >= PLENTY => yes(format!("{most} at most")),
        Some(most) => no(format!("{most} at most; {PLENTY} or more is advised")),
    }
}

pub(super) fn max_map_count() -> Finding {
    const PLENTY: u64 = 65_530;
    match fs::read_to_string("/proc/sys/vm/max_map_count").map(|text| text.trim().parse::<u64>()) {
        Ok(Ok(count)) if count >= PLENTY => yes(count.to_string()),
        Ok(Ok(count)) => no(format!("{count}; the kernel's default of {PLENTY} or more is advised")),
        Ok(Err(error)) => unknown(error.to_string()),
        Err(error) => refused("vm.max_map_count", &error),
    }
}
