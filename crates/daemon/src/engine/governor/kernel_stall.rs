//! The kernel's own pressure stall information of a VM that has a cgroup to itself.
//!
//! Before: the sampler asks once per tick. After: the policy sees the larger of the two stalls: Ballast's own, which
//! the kernel does not see, and the kernel's, for example of a cgroup limit below the VM's. Units: microseconds.
//! Promise: an unreadable value is no stall; a cgroup with other processes in it has no value.

use std::path::{Path, PathBuf};

/// Where the kernel mounts cgroup version 2, alone and beside version 1.
const MOUNTS: [&str; 2] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];

/// Total microseconds in which some thread waited for memory, if these processes have a cgroup of their own.
pub fn some_us(pids: &[u32]) -> Option<u64> {
    let pid = pids.first()?;
    let cgroups = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
    let directory = directory(&cgroups)?;
    let members = std::fs::read_to_string(directory.join("cgroup.procs")).ok()?;
    if !members.lines().all(|member| member.parse().is_ok_and(|member| pids.contains(&member))) {
        return None;
    }
    total_us(&std::fs::read_to_string(directory.join("memory.pressure")).ok()?)
}

/// The directory of the version 2 cgroup; `None` for the root, which all share.
fn directory(cgroups: &str) -> Option<PathBuf> {
    let path = cgroups.lines().find_map(|line| line.strip_prefix("0::/"))?.trim_end();
    let mut mounts = MOUNTS.iter().map(Path::new).filter(|mount| mount.join("cgroup.controllers").exists());
    (!path.is_empty()).then(|| mounts.next().map(|mount| mount.join(path))).flatten()
}

/// The total of the line *some*.
fn total_us(pressure: &str) -> Option<u64> {
    let some = pressure.lines().find(|line| line.starts_with("some "))?;
    some.rsplit_once("total=")?.1.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_lines_are_understood_and_the_root_is_nobodys_own() {
        let pressure = "some avg10=0.00 avg60=0.10 avg300=0.00 total=12345\nfull avg10=0.00 total=99\n";
        assert_eq!(total_us(pressure), Some(12345));
        assert_eq!(total_us("some avg10=0.00"), None);
        assert_eq!(directory("12:memory:/a\n0::/\n"), None);
        assert_eq!(directory("12:memory:/a\n"), None);
        if let Some(directory) = directory("1:name=systemd:/x\n0::/vms/web\n") {
            assert!(directory.ends_with("vms/web"), "{directory:?}");
        }
        assert_eq!(some_us(&[]), None);
    }
}
