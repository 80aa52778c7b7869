//! The KVM guest: a program in long mode with user privilege, without a kernel, that reports by port I/O.
//!
//! Before: `vm` has the memory of RAM and workers. After: each vCPU runs the guest program over its worker's job.
//! Threads: one per vCPU, in `run_vcpu`. Units: guest virtual and guest physical addresses are equal.
//! Promise: guest RAM is a memory slot of its own, over the mapping of `GuestRam`. Program, page tables, stacks and
//! jobs are in another slot. An unexpected exit ends the run with an error that has the vCPU's registers.
//!
//! ```text
//! 0            page 0 unused, program at 0x10000, task state, tables, jobs, stacks, versions     slot 0 (private)
//! 4 GiB ..     guest RAM                                                                        slot 1
//! ```
//! The guest has user privilege and no kernel, because some hosts run KVM on shadow page tables. There, a kernel may
//! not boot, while user-mode code runs at full speed. Two settings let `out` leave the guest. The first is an I/O
//! privilege level of 3: such hosts drop it from the flags. The second is the I/O permission map of the task state:
//! QEMU's emulation of nested AMD virtualization ignores it in a busy task state, and KVM accepts no other state.

use std::sync::Mutex;

use anyhow::{Context, Result, bail, ensure};
use ballast_base::{Bytes, GIB, HUGE_SIZE, PAGE_SIZE};
use ballast_sys::lock::Lock;
use kvm_bindings::{KVM_MAX_CPUID_ENTRIES, kvm_regs, kvm_segment, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};

use crate::guest::{self, IMAGE_ADDR, Port};
use crate::private::{Places, Private, STACK_LEN};
use crate::ram::GuestRam;

/// The guest program: code and constants, linked at [`IMAGE_ADDR`]. Its first byte is its entry point.
const IMAGE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/guest.bin"));

const RAM_ADDR: u64 = 4 * GIB;
/// Most bytes of private memory: in the physical address space of a PC, devices begin here.
const PRIVATE_MAX: u64 = 3 * GIB;
/// Most bytes of RAM: one third-level table maps 512 GiB, and RAM begins at 4 GiB.
const RAM_MAX: u64 = 508 * GIB;

/// Page-table entry bits: present, writable, user, accessed, dirty, and (for a 2 MiB page) huge.
const TABLE: u64 = 0b0110_0111;
const HUGE: u64 = TABLE | 1 << 7;

const RFLAGS_FIXED: u64 = 1 << 1;
const RFLAGS_IOPL_3: u64 = 3 << 12;
/// Byte offset of the field of a 64-bit task state that has the start of the I/O permission map; and the length of the
/// task state, with a map of all 65536 ports (a clear bit allows the port) and the byte of ones that ends the map.
const TASK_MAP_AT: usize = 0x66;
const TASK_LEN: usize = 0x68 + (1 << 16) / 8 + 1;
/// CR0: PE, MP, ET, NE, WP, AM, PG.
const CR0: u64 = 1 | 1 << 1 | 1 << 4 | 1 << 5 | 1 << 16 | 1 << 18 | 1 << 31;
/// CR4: PAE for long mode; OSFXSR and OSXMMEXCPT for SSE.
const CR4: u64 = 1 << 5 | 1 << 9 | 1 << 10;
/// EFER: LME, LMA.
const EFER: u64 = 1 << 8 | 1 << 10;

/// Returns the reason if KVM cannot be used here. A test prints it when it skips.
pub fn kvm_missing() -> Option<String> {
    Machine::new().err().map(|error| format!("{error:#}"))
}

/// A KVM virtual machine, with its vCPUs that have not started.
#[derive(Debug)]
pub(crate) struct Machine {
    // Fields drop in the order of declaration. `Vm` drops its memory after this machine.
    vcpus: Mutex<Vec<Option<VcpuFd>>>,
    vm: VmFd,
    kvm: Kvm,
    tables: u64,
    task: u64,
}

impl Machine {
    pub fn new() -> Result<Self> {
        ensure!(!IMAGE.is_empty(), "the guest program exists for x86-64 only");
        let kvm = Kvm::new().context("/dev/kvm")?;
        let vm = kvm.create_vm().context("/dev/kvm")?;
        Ok(Self { vcpus: Mutex::default(), vm, kvm, tables: 0, task: 0 })
    }

    /// The bytes of private memory that the program, the task state and the page tables need.
    pub fn private_len(ram: Bytes) -> usize {
        let directories = 4 + ram.0.div_ceil(GIB) as usize;
        let image = IMAGE.len().next_multiple_of(PAGE_SIZE);
        IMAGE_ADDR as usize + image + TASK_LEN.next_multiple_of(PAGE_SIZE) + (2 + directories) * PAGE_SIZE
    }

    /// Load the program, write the page tables, and add the memory slots. Returns the guest address of RAM.
    pub fn lay_out(&mut self, private: &mut Private, ram: &GuestRam) -> Result<u64> {
        let private_len = private.map.len() as u64;
        ensure!(private_len <= PRIVATE_MAX, "private memory (version words, weights) exceeds 3 GiB");
        ensure!(ram.len() as u64 <= RAM_MAX, "guest RAM exceeds 508 GiB");
        let start = private.take(IMAGE_ADDR as usize + IMAGE.len());
        private.map.copy_in(start + IMAGE_ADDR as usize, IMAGE);

        let task = private.take(TASK_LEN);
        self.task = task as u64;
        private.map.copy_in(task + TASK_MAP_AT, &0x68u16.to_le_bytes());
        private.map.copy_in(task + TASK_LEN - 1, &[0xFF]);

        let mut table = || private.take(PAGE_SIZE);
        let (top, third) = (table(), table());
        self.tables = top as u64;
        let mut directories = Vec::new();
        for (from, len) in [(0, private_len), (RAM_ADDR, ram.len() as u64)] {
            for address in (from..from + len).step_by(GIB as usize) {
                directories.push((address, (from + len).min(address + GIB), table()));
            }
        }
        let set = |table: usize, index: u64, entry: u64| {
            private.map.words(table + index as usize * 8, 1)[0].store(entry, std::sync::atomic::Ordering::Relaxed);
        };
        set(top, 0, third as u64 | TABLE);
        for (from, end, directory) in directories {
            set(third, from / GIB, directory as u64 | TABLE);
            for address in (from..end).step_by(HUGE_SIZE) {
                set(directory, address % GIB / HUGE_SIZE as u64, address | HUGE);
            }
        }
        self.add_slot(0, 0, private.map.addr(), private.map.len())?;
        self.add_slot(1, RAM_ADDR, ram.addr(), ram.len())?;
        Ok(RAM_ADDR)
    }

    fn add_slot(&self, slot: u32, address: u64, host: usize, len: usize) -> Result<()> {
        let region = kvm_userspace_memory_region {
            slot,
            flags: 0,
            guest_phys_addr: address,
            memory_size: len as u64,
            userspace_addr: host as u64,
        };
        // SAFETY: the host range is a live mapping that the owning `Vm` drops after this machine, and the slots do not
        // overlap: slot 0 ends below 3 GiB, slot 1 starts at 4 GiB.
        unsafe { self.vm.set_user_memory_region(region) }.context("KVM: adding a memory slot")
    }

    /// Create a vCPU per worker, ready to run its job.
    pub fn add_vcpus(&mut self, private: &Private, places: &[Places]) -> Result<()> {
        let cpuid = self.kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).context("KVM: reading the supported CPUID")?;
        let mut vcpus = Vec::new();
        for (worker, place) in places.iter().enumerate() {
            let vcpu = self.vm.create_vcpu(worker as u64).context("KVM: creating a vCPU")?;
            vcpu.set_cpuid2(&cpuid).context("KVM: setting the CPUID")?;
            let mut sregs = vcpu.get_sregs().context("KVM: reading the system registers")?;
            let segment = |selector, type_, l| kvm_segment {
                base: 0,
                limit: u32::MAX,
                selector,
                type_,
                present: 1,
                dpl: 3,
                db: 1 - l,
                s: 1,
                l,
                g: 1,
                ..Default::default()
            };
            // Types: 11 = code, readable, accessed; 3 = data, writable, accessed. Selectors carry privilege level 3.
            sregs.cs = segment(0x33, 11, 1);
            sregs.ss = segment(0x2B, 3, 0);
            (sregs.ds, sregs.es, sregs.fs, sregs.gs) = (sregs.ss, sregs.ss, sregs.ss, sregs.ss);
            // Type 11 = busy 64-bit task state. Only its I/O permission map is used.
            let limit = TASK_LEN as u32 - 1;
            sregs.tr =
                kvm_segment { base: self.task, limit, selector: 0x40, type_: 11, present: 1, ..Default::default() };
            // Without descriptor tables: the program loads no segment, and an exception is a shutdown, which ends the
            // run.
            (sregs.gdt.limit, sregs.idt.limit) = (0, 0);
            (sregs.cr0, sregs.cr3, sregs.cr4, sregs.efer) = (CR0, self.tables, CR4, EFER);
            vcpu.set_sregs(&sregs).context("KVM: setting the system registers")?;
            let stack_top = private.address(place.stack + STACK_LEN);
            let regs = kvm_regs {
                rip: IMAGE_ADDR,
                rdi: private.address(place.job),
                // At its entry, a function expects the stack pointer 8 bytes below a multiple of 16.
                rsp: stack_top - 8,
                rflags: RFLAGS_FIXED | RFLAGS_IOPL_3,
                ..Default::default()
            };
            vcpu.set_regs(&regs).context("KVM: setting the registers")?;
            vcpus.push(Some(vcpu));
        }
        *self.vcpus.locked() = vcpus;
        Ok(())
    }

    /// Run one worker's vCPU until its job is done or `port.tell` returns false.
    pub fn run_vcpu(&self, worker: usize, port: &impl Port) -> Result<()> {
        let vcpu = self.vcpus.locked().get_mut(worker).and_then(Option::take);
        let mut vcpu = vcpu.context("this VM has run already")?;
        loop {
            let exit = match vcpu.run() {
                Ok(VcpuExit::IoOut(guest::PORT, &[a, b, c, d])) => match u32::from_le_bytes([a, b, c, d]) {
                    guest::EVENT_DONE => return Ok(()),
                    guest::EVENT_PANIC => "the guest program panicked".to_owned(),
                    event if port.tell(event) => continue,
                    _ => return Ok(()),
                },
                Ok(VcpuExit::Intr) => continue,
                Err(error) if matches!(error.errno(), libc::EINTR | libc::EAGAIN) => continue,
                Ok(exit) => format!("unexpected exit {exit:?}"),
                Err(error) => format!("KVM_RUN failed: {error}"),
            };
            let regs = vcpu.get_regs().unwrap_or_default();
            let cr2 = vcpu.get_sregs().map_or(0, |sregs| sregs.cr2);
            let (rip, rsp) = (regs.rip, regs.rsp);
            bail!("vCPU {worker} stopped: {exit}, at instruction {rip:#x}, stack {rsp:#x}, fault address {cr2:#x}");
        }
    }
}
