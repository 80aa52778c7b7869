//! `LD_PRELOAD` library that attaches an unmodified VMM (QEMU) to Ballast by watching how it handles guest RAM.
//!
//! Before: `ballast run` checks the command line and starts the VMM with this library. After: `ballast_client` does the
//! work. Threads: only the client's one. Units: bytes and host virtual addresses.
//! Promise: a call that is not about guest RAM goes through unchanged; no panic leaves a hook; what cannot be made safe
//! fails loudly instead of losing a byte.
//!
//! # Intercepted symbols
//!
//! | Symbol | Why |
//! |---|---|
//! | `mmap`, `mmap64` | finds guest RAM (shared, readable and writable, shmem file, 2 MiB or more) and attaches or adds it; puts big reservations on 2 MiB borders; notices RAM being mapped over: what is far there comes back first, and that part stays |
//! | `munmap` | RAM is unplugged: the keeper hears of it first |
//! | `mremap` | refused for guest RAM: a moved mapping loses its userfaultfd |
//! | `fallocate`, `fallocate64` | punching RAM is a discard: the engine hears of it first. Filling RAM is refused: it would put zeros where pages are far |
//! | `posix_fallocate`, `posix_fallocate64` | filling RAM is refused, as above |
//! | `madvise` | `MADV_REMOVE` on RAM is a discard. (`MADV_DONTNEED` of a shared mapping drops no data: goes through) |
//! | `mlock`, `mlock2`, `mlockall` | locked memory must not be taken: pins the VM |
//! | `ioctl` | VFIO, iommufd, vDPA and udmabuf take hold of RAM pages for long: pins the VM. |
//! | `sendmsg` | a RAM file on its way to another process (vhost-user): pins the VM and brings every page back first, because the other process's touches raise no faults here |
//! | `execve`, `execv`, `execvp`, `execvpe`, `fexecve`, `execveat` | the VMM may hand its RAM to the program that takes its place (QEMU's `cpr-exec`): every page is brought back first, or the call fails with EAGAIN. A child's `exec` goes through |
//!
//! # Memory that is pinned for a while
//!
//! Direct I/O, vhost, SCSI pass-through, and plain reads of some file systems (FUSE past the page cache, so virtiofs, 9p, CIFS
//! without a cache) have the kernel or a device write to RAM past the page table. They are not watched for: a VM of this library
//! *may pin* from the start, and the engine asks of each page whether somebody holds it, or waits.
//!
//! Not seen, and not supported: `userfaultfd` used by the VMM itself on guest RAM (postcopy migration, background
//! snapshots: registering fails with EBUSY on one side), `read`/`write`/`ftruncate` on the RAM file; memory registered for RDMA or
//! with io_uring, where the engine cannot ask who holds a page; `exec` by way of `syscall`, `execl` and its like (of a VMM
//! that executes itself this way, pages are written back when it is seen to be gone, and may come too late); a static VMM
//! binary.
//!
//! # Environment
//!
//! `BALLAST_SOCKET`, `BALLAST_VM_NAME`, `BALLAST_LIMIT` (bytes), `BALLAST_FAULT_LANES` (1 to 8), `BALLAST_REQUIRE=1`
//! (no keeper: exit before the guest starts).
//! The library takes itself out of `LD_PRELOAD` at start, so programs started by the VMM do not load it.

mod decide;
mod hooks;
mod next;
mod start;
