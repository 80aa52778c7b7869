//! `LD_PRELOAD` library that attaches an unmodified VMM (QEMU) to Ballast by watching how it handles guest RAM.
//!
//! Before: `ballast run` checks the command line and starts the VMM with this library. After: `ballast_client` does the
//! work.
//! Threads: the client's one, and one that asks QEMU's monitor (`guest`). Units: bytes and host virtual addresses.
//! Promise: a call that does not concern guest RAM goes through unchanged; no panic leaves a hook; a call that cannot
//! be made safe fails with a message instead of losing a byte.
//!
//! # Intercepted symbols
//!
//! - `mmap`, `mmap64`: find guest RAM (shared, readable and writable, shmem file, 2 MiB or more, and under QEMU in its
//!   own reservation: `shape`), and attach or add it. They align large reservations to 2 MiB. Before RAM is mapped
//!   over, its far pages are restored, because the call may fail; that part is never reclaimed again. If the keeper is
//!   not ready for plugged RAM within seconds, the call fails with ENOMEM, and nothing of the mapping is left. A second
//!   mapping of RAM, of whatever kind, pins the VM and restores each page first, or fails with EAGAIN (`twice`).
//! - `munmap`: RAM is unplugged; the keeper is told first.
//! - `mremap`: refused for guest RAM, because a moved or second mapping has no userfaultfd.
//! - `fallocate`, `fallocate64`: to punch RAM is a discard; the engine is told first. To fill RAM is refused, because
//!   it would put zeros where pages are far.
//! - `posix_fallocate`, `posix_fallocate64`: to fill RAM is refused, as above.
//! - `madvise`: `MADV_REMOVE` on RAM is a discard. `MADV_DONTNEED` of a shared mapping drops no data and goes through.
//! - `mlock`, `mlock2`, `mlockall`: locked memory must not be reclaimed; the call pins the VM.
//! - `ioctl`: VFIO, iommufd, vDPA, udmabuf and SEV hold long-term references to RAM pages; the call pins the VM. If a
//!   vCPU runs before any RAM was found, RAM is private: with `BALLAST_REQUIRE=1` the VMM stops, else it runs
//!   unmanaged. A vCPU's reset is completed when it runs (`asleep`).
//! - `lseek`, `lseek64`: refused on a RAM file with `SEEK_DATA` and `SEEK_HOLE` (EINVAL), because holes may be far
//!   pages. A VMM that saves memory by its file's data (Cloud Hypervisor from 52) then saves all of it, through the
//!   mapping.
//! - `pread`, `pread64`, `sendfile`, `sendfile64`, `copy_file_range`: refused from a RAM file, which has zeros where
//!   pages are far.
//! - `sendmsg`: a RAM file goes to another process (vhost-user). The call pins the VM and restores every page first,
//!   because the other process's touches raise no faults here.
//! - `execve`, `execv`, `execvp`, `execvpe`, `fexecve`, `execveat`: the VMM may hand its RAM to the program that takes
//!   its place (QEMU's `cpr-exec`). Every page is restored first, or the call fails with EAGAIN. A child's `exec` goes
//!   through. On the way to the VMM (`ballast run -- env ... qemu-system-x86_64`) they fail if they lose the library
//!   (`through`).
//! - `posix_spawn`, `posix_spawnp`: a program that starts QEMU in a child hands the library on, or the call fails.
//! - `ppoll`: under TCG no call starts a vCPU; QEMU's main loop shows that the machine is made (`main_loop`).
//!
//! # Memory of the pool
//!
//! With `BALLAST_POOL` a memfd of huge pages is never mapped; memory of the pool is mapped instead (`pool`). A punch of
//! the memfd punches that memory. The memfd itself stays empty, so calls by which others would take it for RAM are
//! refused: to send it, to give it to a device or a DMA buffer by its descriptor, and to execute another program.
//!
//! # Memory that may be pinned for a while
//!
//! With direct I/O, vhost, SCSI pass-through, and plain reads of some file systems (FUSE past the page cache, so
//! virtiofs, 9p, CIFS without a cache), the kernel or a device writes to RAM past the page table. The library does not
//! intercept these: a VM of this library *may pin* from the start, and the engine checks references to a page, or
//! waits.
//!
//! Not intercepted, and not supported: `userfaultfd` used by the VMM itself on guest RAM (postcopy migration,
//! background snapshots: registering fails with EBUSY on one side); `read`, `readv`, `preadv`, `splice`, `write` and
//! `ftruncate` on the RAM file; memory registered for RDMA or with io_uring, where the engine cannot check references
//! to a page; a system call that the VMM makes through `syscall` or by its own instruction, and `execl`: the engine's
//! scan finds a second mapping within seconds, and pages of a VMM that executes another program this way are written
//! back when its end is noticed (the keeper reports `sight-lost`), which may be too late; a static VMM binary.
//!
//! # Live migration
//!
//! QEMU sends the pages that its dirty log names. Under KVM the kernel logs a page when it maps it writable, which is
//! after the fault was served, and each read of the log takes the write permission away again. Under TCG, QEMU before
//! 9.0 reads its log without a reset of the vCPUs' TLBs (`cpu_physical_memory_sync_dirty_bitmap`; QEMU's commit
//! 03bfc2188f06 adds it), so that a store to a page that was sent is not logged, with this library or without it. A
//! store that waits for a far page is logged: after each read of the log QEMU waits until every vCPU has ended its
//! block of code (`tcg_log_global_after_sync`).
//!
//! # Environment
//!
//! `BALLAST_SOCKET`, `BALLAST_VM_NAME` and `BALLAST_VM_UUID` (else QEMU's own: `identity`), `BALLAST_LIMIT` (bytes),
//! `BALLAST_FAULT_WORKERS` (1 to 8), `BALLAST_REQUIRE=1` (no keeper: exit before the guest starts), `BALLAST_MONITOR`
//! (two descriptors: `guest`), `BALLAST_AGENT` (two descriptors, or a path: `agent`), `BALLAST_POOL`,
//! `BALLAST_POOL_NODES` and `BALLAST_POOL_SOCKET` (`pool`).
//! `BALLAST_STARTED` (pid of what `ballast run` became: `through`). The library removes itself from `LD_PRELOAD` in
//! QEMU at start, and in another VMM when it attaches, so that programs started by the VMM do not load it. Programs
//! that start the VMM (`taskset`, a shell) pass it on.

mod agent;
mod announce;
#[cfg(target_arch = "x86_64")]
mod asleep;
mod decide;
mod exec;
mod guest;
mod hooks;
mod identity;
mod main_loop;
mod missed;
mod mode;
mod monitor;
mod next;
mod pool;
mod reads;
mod shape;
mod start;
mod through;
mod twice;
