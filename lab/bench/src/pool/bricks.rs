//! Real memory for a pool: files, filled before any request, and a VM's RAM mapped from them.
//!
//! Before: `ready` gives a size. After: it requests memory as a VMM does. The pool's state is in
//! shared memory, too, as in a daemon.
//! Threads: the bench's one. Units: bytes in files; slices in the pool.
//! Promise: a slice is zeroed through a mapping of the bench's own before the pool may give it away again, and
//! [`Ram::check_and_mark`] checks that.

use std::num::{NonZeroU32, NonZeroU64};

use anyhow::{Context, Result, bail, ensure};
use ballast_base::{Bytes, PAGE_SIZE};
use ballast_pool::Shared;
use ballast_pool::map::request::on_one_node;
use ballast_pool::map::{
    Domain, Extent, FRAME_SLICES, GuestIdx, Layout, Mode, NodeIdx, NodeSpec, Pool, Request, SLICE_SIZE, SliceIdx, VmId,
};
use ballast_sys::{Mapping, memfd};
use rustix::fd::OwnedFd;
use rustix::mm::{Advice, MapFlags, ProtFlags};

/// One file of the pool.
struct Brick {
    file: OwnedFd,
    /// For zeroing.
    map: Mapping,
}

/// A pool with memory.
pub(super) struct Bricks {
    pool: Pool<Shared>,
    bricks: Vec<Brick>,
    slices: u32,
    /// Slices of a brick.
    brick: u32,
    vms: u64,
}

impl Bricks {
    /// Reserve, fill and zero this number of slices. Huge pages must be there.
    pub(super) fn new(slices: u32) -> Result<Self> {
        let brick = slices.min(FRAME_SLICES);
        let layout = Layout::new(&[NodeSpec { numa: 0, slices }], brick, 16)?;
        let size = (layout.words() * 8).next_multiple_of(PAGE_SIZE);
        let state = memfd::create("ballast-bench-pool", Bytes(size as u64)).context("Making the pool's state")?;
        let words = Shared::new(state, size).context("Mapping the pool's state")?;
        let mut pool = Pool::create(words, &layout)?;
        let bytes = u64::from(brick) * SLICE_SIZE;
        let mut bricks = Vec::new();
        for _ in 0..slices / brick {
            let file = memfd::create_huge("ballast-bench-brick", Bytes(bytes)).context("Making a brick")?;
            let map = Mapping::shared(&file, 0, bytes as usize).context("Mapping a brick")?;
            bricks.push(Brick { file, map });
        }
        pool.reserve(Extent { start: SliceIdx(0), slices })?;
        let mut made = Self { pool, bricks, slices, brick, vms: 0 };
        made.fill()?;
        Ok(made)
    }

    /// Have the kernel fill every brick, which zeroes it.
    fn fill(&mut self) -> Result<()> {
        while let Some(dirty) = self.pool.next_dirty(u32::MAX) {
            let (bricks, brick) = (&self.bricks, self.brick);
            let zeroed = dirty.zero(|extent| {
                let (map, offset, len) = place(bricks, brick, extent);
                map.populate(offset, len).context("Filling a brick")
            });
            self.pool.clean(zeroed.map_err(|(_, error): (_, anyhow::Error)| error)?);
        }
        Ok(())
    }

    /// Bytes of the pool's state and its look-ups.
    pub(super) fn state_bytes(&self) -> u64 {
        self.pool.metadata_bytes()
    }

    /// RAM of the whole pool for one VM, as a VMM would have it: mapped in pieces, each from its file, and populated.
    pub(super) fn request(&mut self) -> Result<Ram> {
        self.vms += 1;
        let vm = VmId(NonZeroU64::new(self.vms).context("an id")?);
        let parts = on_one_node(&[(GuestIdx(0), self.slices)], NodeIdx(0));
        let domain = Domain(NonZeroU32::MIN);
        let grant = self.pool.allocate(&Request { vm, domain, mode: Mode::Mix, parts })?;
        let ram = Ram::reserve(u64::from(self.slices) * SLICE_SIZE)?;
        for piece in &grant.segments {
            for brick in self.pool.bricks(piece.extent) {
                let start = piece.extent.start.0.max(brick.start.0);
                let end = piece.extent.end().min(brick.end());
                let guest = u64::from(piece.guest.0 + (start - piece.extent.start.0)) * SLICE_SIZE;
                let offset = u64::from(start - brick.start.0) * SLICE_SIZE;
                let file = &self.bricks[(brick.start.0 / self.brick) as usize].file;
                ram.map(guest, file, offset, u64::from(end - start) * SLICE_SIZE)?;
            }
        }
        ram.populate()?;
        Ok(ram)
    }

    /// Take back the memory of the VM, and zero it by `zero` through the bench's mappings. Returns the time of that in
    /// microseconds.
    pub(super) fn release(&mut self, ram: Ram, zero: impl Fn(*mut u8, usize)) -> Result<f64> {
        drop(ram);
        self.pool.release(VmId(NonZeroU64::new(self.vms).context("an id")?))?;
        let start = std::time::Instant::now();
        while let Some(dirty) = self.pool.next_dirty(u32::MAX) {
            let (bricks, brick) = (&self.bricks, self.brick);
            let zeroed = dirty.zero(|extent| {
                let (map, offset, len) = place(bricks, brick, extent);
                zero(map.ptr(offset, len), len);
                Ok::<_, std::convert::Infallible>(())
            });
            let Ok(zeroed) = zeroed;
            self.pool.clean(zeroed);
        }
        let took = start.elapsed().as_secs_f64() * 1e6;
        self.pool.validate()?;
        Ok(took)
    }
}

/// The place of these slices of one brick in the bench's own mapping.
fn place(bricks: &[Brick], brick: u32, extent: Extent) -> (&Mapping, usize, usize) {
    let map = &bricks[(extent.start.0 / brick) as usize].map;
    let slices = |slices: u32| slices as usize * SLICE_SIZE as usize;
    (map, slices(extent.start.0 % brick), slices(extent.slices))
}

/// Guest RAM in the address space of a VMM, which the bench plays.
pub(super) struct Ram {
    base: usize,
    len: usize,
    reserved: (usize, usize),
}

impl Ram {
    /// Reserve address space, aligned to 1 GiB.
    fn reserve(len: u64) -> Result<Self> {
        let gib = FRAME_SLICES as usize * SLICE_SIZE as usize;
        let len = len as usize;
        let reserved = len + gib;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a null hint without MAP_FIXED replaces no mapping.
        let at = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), reserved, ProtFlags::empty(), flags) };
        let at = at.context("Reserving addresses")? as usize;
        Ok(Self { base: at.next_multiple_of(gib), len, reserved: (at, reserved) })
    }

    /// Map a piece of a file there.
    fn map(&self, at: u64, file: &OwnedFd, offset: u64, len: u64) -> Result<()> {
        ensure!(at + len <= self.len as u64, "a piece of {len:#x} bytes at {at:#x} is outside of RAM");
        let place = (self.base + at as usize) as *mut std::ffi::c_void;
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::FIXED);
        // SAFETY: the range is inside this value's reservation, as was just checked, and no other code uses it.
        unsafe { rustix::mm::mmap(place, len as usize, prot, flags, file, offset) }.context("Mapping a piece")?;
        Ok(())
    }

    /// Fill the page tables.
    fn populate(&self) -> Result<()> {
        // SAFETY: the range is this value's own; the advice has the effect of touches.
        unsafe { rustix::mm::madvise(self.base as *mut _, self.len, Advice::LinuxPopulateWrite) }
            .context("Filling page tables")
    }

    /// Its first word. The memory is this value's as long as it lives.
    pub(super) fn start(&self) -> *mut u64 {
        self.base as *mut u64
    }

    /// Check a word of each page, which must be zero, and leave a mark there.
    pub(super) fn check_and_mark(&self) -> Result<()> {
        for offset in (0..self.len).step_by(PAGE_SIZE) {
            let word = (self.base + offset + offset / PAGE_SIZE % 512 * 8) as *mut u64;
            // SAFETY: the word is aligned and inside this value's mapping, which nobody else uses.
            let found = unsafe { word.read_volatile() };
            if found != 0 {
                bail!("a VM found {found:#x} at {offset:#x}: memory of another VM");
            }
            // SAFETY: the same word.
            unsafe { word.write_volatile(0x005e_c2e7_005e_c2e7) };
        }
        Ok(())
    }
}

impl Drop for Ram {
    fn drop(&mut self) {
        // SAFETY: this value's own addresses, of which nothing is used any more.
        let _ = unsafe { rustix::mm::munmap(self.reserved.0 as *mut _, self.reserved.1) };
    }
}
