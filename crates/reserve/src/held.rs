//! Memory that the pool filled and that no file has any more: processes still hold it, of VMs that ended.
//!
//! A page that leaves its file stays in use as long as anything refers to it: a pipe, a socket, a device. The pool's
//! base pages are collapsed, and one page that is held keeps the 2 MiB that it is in. The kernel says nowhere which
//! these are: they are in no file, no mapping, and no counter of shared memory. But until a page is free, its memory
//! cgroup is charged for it. So what `ballastd`'s cgroup is charged for, beyond what its counters find in use, is such
//! memory. (What a VM touched itself is charged to the VM's cgroup, which limits it.)
//!
//! Before: VMs ended, and their files were removed. After: `spare` fills others in place of a part of that only.
//! Threads: the owner's. Units: bytes. Promise: of memory that is freed or allocated meanwhile nothing counts as held.
//! Where the kernel does not tell (version 1 of cgroups, the root cgroup), nothing is held.

use std::path::PathBuf;

use ballast_base::{Bytes, MIB};

use crate::host::{Host, Page, ranges};
use crate::owed::most_replaced;
use crate::reserve::Reserve;

/// Where the kernel mounts cgroup version 2, alone and beside version 1.
const MOUNTS: [&str; 2] = ["sys/fs/cgroup", "sys/fs/cgroup/unified"];
/// What is charged and in use (`memory.stat`). All others are parts of these.
const IN_USE: [&str; 3] = ["anon", "file", "kernel"];
/// The same; 0 where the kernel does not count it.
const ALSO_IN_USE: [&str; 2] = ["sock", "hugetlb"];
/// For each processor, the kernel charges up to 64 pages in advance, and counts up to 64 later.
const INEXACT: u64 = MIB / 2;

impl Reserve {
    /// Looks how much is held.
    pub(crate) fn look_what_is_held(&mut self) {
        if self.host.page() == Page::Base {
            self.held = self.host.held().unwrap_or(Bytes(0));
        }
    }

    /// Slices that stay unfilled, because more than a part of the pool is held.
    pub(crate) fn held_beyond(&self) -> u32 {
        let page = self.host.page();
        let Some(live) = self.live.as_ref().filter(|_| page == Page::Base) else { return 0 };
        let has = live.each_node().map(|numa| u64::from(self.has(numa))).sum();
        u32::try_from((self.held.0 / page.bytes()).saturating_sub(most_replaced(has, page))).unwrap_or(u32::MAX)
    }
}

impl Host {
    /// Returns the memory that this process's cgroup is charged for and that is in no use which the kernel counts;
    /// `None` if the kernel does not tell.
    fn held(&self) -> Option<Bytes> {
        let read = |path: PathBuf| std::fs::read_to_string(path).ok();
        let cgroups = read(self.file("proc/self/cgroup"))?;
        let path = cgroups.lines().find_map(|line| line.strip_prefix("0::/"))?.trim_end();
        let mut mounts = MOUNTS.map(|mount| self.file(mount)).into_iter();
        let mount = mounts.find(|mount| mount.join("cgroup.controllers").exists())?;
        let charged = || read(mount.join(path).join("memory.current"))?.trim().parse::<u64>().ok();
        let before = charged()?;
        let stat = read(mount.join(path).join("memory.stat"))?;
        let charged = before.min(charged()?);
        let number = |key: &str| -> Option<u64> {
            stat.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' ')?.parse().ok())
        };
        // Where huge pages are charged as well, and are not counted, nothing can be said.
        let mounts = read(self.file("proc/mounts"))?;
        if mounts.contains("memory_hugetlb_accounting") && number("hugetlb").is_none() {
            return None;
        }
        let in_use = IN_USE.iter().map(|key| number(key)).sum::<Option<u64>>()?;
        let in_use = in_use + ALSO_IN_USE.iter().filter_map(|key| number(key)).sum::<u64>();
        let processors = ranges(read(self.file("sys/devices/system/cpu/online"))?.trim())?.len() as u64;
        Some(Bytes(charged.saturating_sub(in_use + INEXACT * processors)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_charged_and_in_no_use_is_held_and_nothing_is_where_the_kernel_does_not_tell() {
        let root = tempfile::tempdir().expect("a directory");
        let write = |file: &str, text: &str| {
            let file = root.path().join(file);
            std::fs::create_dir_all(file.parent().expect("a folder")).expect("make");
            std::fs::write(file, text).expect("write");
        };
        let host = Host::at(root.path());
        assert_eq!(host.held(), None);
        write("proc/self/cgroup", "4:memory:/x\n0::/system.slice/ballastd.service\n");
        write("proc/mounts", "cgroup2 /sys/fs/cgroup cgroup2 rw,nsdelegate 0 0\n");
        write("sys/fs/cgroup/cgroup.controllers", "cpu memory\n");
        write("sys/devices/system/cpu/online", "0-3,6\n");
        assert_eq!(host.held(), None, "the root cgroup has no such files");
        let cgroup = |file: &str| format!("sys/fs/cgroup/system.slice/ballastd.service/{file}");
        write(&cgroup("memory.current"), &format!("{}\n", 9000 * MIB));
        let stat = format!("anon {}\nfile {}\nkernel {}\nfile_mapped 1\n", 100 * MIB, 700 * MIB, 200 * MIB);
        write(&cgroup("memory.stat"), &stat);
        let held = 8000 * MIB - 5 * INEXACT;
        assert_eq!(host.held(), Some(Bytes(held)));
        write(&cgroup("memory.stat"), &format!("{stat}sock {}\nhugetlb {}\n", MIB, 1023 * MIB));
        assert_eq!(host.held(), Some(Bytes(held - 1024 * MIB)));
        write(&cgroup("memory.current"), "1000\n");
        assert_eq!(host.held(), Some(Bytes(0)));
        write(&cgroup("memory.stat"), "anon 1\nfile 1\n");
        assert_eq!(host.held(), None, "a kernel that does not count its own");
        write(&cgroup("memory.stat"), &stat);
        write("proc/mounts", "cgroup2 /sys/fs/cgroup cgroup2 rw,memory_hugetlb_accounting 0 0\n");
        assert_eq!(host.held(), None, "it cannot be told from huge pages");
    }
}
