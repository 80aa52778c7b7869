//! The kernel's own pressure stall information of a VM that has a cgroup to itself.
//!
//! Before: the sampler asks once per tick. After: the policy sees the larger of the two stalls: Ballast's own, which
//! the kernel does not see, and the kernel's, for example of a cgroup limit below the VM's. Units: microseconds.
//! Promise: an unreadable value is no stall; a cgroup with other processes in it has no value.

use ballast_adopt::cgroup;

/// Total microseconds in which some thread waited for memory, if these processes have a cgroup of their own.
pub fn some_us(pids: &[u32]) -> Option<u64> {
    let directory = cgroup::directory(*pids.first()?)?;
    let members = std::fs::read_to_string(directory.join("cgroup.procs")).ok()?;
    if !members.lines().all(|member| member.parse().is_ok_and(|member| pids.contains(&member))) {
        return None;
    }
    cgroup::some_us(&directory)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_process_has_no_cgroup() {
        assert_eq!(some_us(&[]), None);
    }
}
