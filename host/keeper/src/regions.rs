//! The files of a VM as the keeper holds them: its state file, its stores' files, and the files of its regions.
//!
//! Before: an attach was admitted. After: each region of the client has its number in the state file.
//! Promise: two regions never share bytes of a file, and a region's number means the same bytes for ever. No engine
//! gets the files before the state file names it, nor while an engine that is not ours may change them.

use std::collections::{HashMap, HashSet};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;

use anyhow::{Context, bail};
use ballast_base::extent::MAX_EXTENTS;
use ballast_base::wire::{Attach, MAX_FILES, Span, VmId};
use ballast_handover::arena;
use ballast_handover::kept::{KeptVm, Number};
use ballast_handover::orders::Order;
use ballast_handover::state_file::{RegionRecord, StateFile};
use ballast_sys::file_ranges::FileRanges;
use ballast_sys::memfd::{self, FileId};
use ballast_sys::process::Process;

use crate::admit::Ram;
use crate::fence::{self, Left};
use crate::store_files::Files;
use crate::taken;
use ballast_sys::slow_fd::SlowFd;

pub(crate) struct Held {
    state: StateFile,
    /// The state file again, for orders to the engine.
    file: Arc<SlowFd>,
    stores: Vec<Files>,
    /// The files of each region, by its number; `None` for a region that was unplugged, or that no process has brought
    /// back yet.
    ram: Vec<Option<RamFiles>>,
    uid: u32,
    vmm: String,
    /// Why nothing may be reclaimed.
    pinned: Option<String>,
    /// See [`Attach::may_pin`].
    may_pin: bool,
}

pub(crate) type Given = (Order, Vec<Arc<SlowFd>>);

pub type RamFiles = Vec<(Arc<SlowFd>, FileId)>;

impl Held {
    pub fn create(attach: &Attach, uid: u32) -> anyhow::Result<Self> {
        let mut id = [0; 16];
        let filled = rustix::rand::getrandom(&mut id, rustix::rand::GetRandomFlags::empty());
        if filled != Ok(id.len()) {
            bail!("the kernel gave no random numbers for the VM's id");
        }
        let state = StateFile::create(VmId(id), &attach.name)?;
        state.set_limit(attach.limit);
        // Empty: the engine formats it, so a VM can attach while there is no engine.
        let arena = arena::create().context("Making the store's file")?;
        rustix::fs::fchmod(&arena, rustix::fs::Mode::from_raw_mode(0o600))?;
        let arena = Files::ram(SlowFd::from(arena));
        Self::new(state, vec![arena], attach.vmm.clone(), uid)
    }

    pub fn new(state: StateFile, stores: Vec<Files>, vmm: String, uid: u32) -> anyhow::Result<Self> {
        let duplicate = state.fd().try_clone_to_owned().context("Duplicating a descriptor")?;
        Ok(Self {
            ram: state.regions().iter().map(|_| None).collect(),
            state,
            file: Arc::new(SlowFd::from(duplicate)),
            stores,
            uid,
            vmm,
            pinned: None,
            may_pin: false,
        })
    }

    pub fn of(vm: &KeptVm) -> anyhow::Result<Self> {
        let state = StateFile::open(taken::fd(vm.state)?)?;
        let name = state.name();
        let stores = vm.stores.iter().map(|(store, files)| {
            let files = files.iter().map(|number| Ok(Arc::new(taken::sent(*number)?)));
            Ok(Files::of(*store, files.collect::<anyhow::Result<_>>()?))
        });
        let stores = stores.collect::<anyhow::Result<_>>()?;
        let mut held = Self::new(state, stores, vm.vmm.clone(), vm.uid)?;
        let (count, kept) = (held.ram.len(), vm.ram.len());
        anyhow::ensure!(count == kept, "VM {name} has {count} regions, and {kept} were written down");
        let mut known: HashMap<Number, Arc<SlowFd>> = HashMap::new();
        for (ram, kept) in held.ram.iter_mut().zip(&vm.ram) {
            let Some(kept) = kept else { continue };
            let mut files = Vec::new();
            for (number, dev, ino) in kept {
                let fd = match known.get(number) {
                    Some(fd) => fd.clone(),
                    None => Arc::new(taken::sent(*number)?),
                };
                known.insert(*number, fd.clone());
                files.push((fd, FileId { dev: *dev, ino: *ino }));
            }
            *ram = Some(files);
        }
        held.pinned = vm.pinned.clone();
        held.may_pin = vm.may_pin;
        Ok(held)
    }

    pub fn kept(&self) -> KeptVm {
        let numbers = |files: &Files| files.iter().map(|fd| fd.as_fd().as_raw_fd()).collect();
        let file = |(fd, id): &(Arc<SlowFd>, FileId)| (fd.as_fd().as_raw_fd(), id.dev, id.ino);
        KeptVm {
            state: self.state.fd().as_raw_fd(),
            stores: self.stores.iter().map(|files| (files.store(), numbers(files))).collect(),
            ram: self.ram.iter().map(|ram| ram.as_ref().map(|files| files.iter().map(file).collect())).collect(),
            uid: self.uid,
            vmm: self.vmm.clone(),
            pinned: self.pinned.clone(),
            may_pin: self.may_pin,
        }
    }

    pub fn state(&self) -> &StateFile {
        &self.state
    }

    pub fn uid(&self) -> u32 {
        self.uid
    }

    pub fn stores(&self) -> &[Files] {
        &self.stores
    }

    pub fn add_store(&mut self, files: Files) {
        self.stores.push(files);
    }

    pub fn pin(&mut self, reason: String) {
        self.pinned = Some(reason);
    }

    pub fn is_pinned(&self) -> bool {
        self.pinned.is_some()
    }

    pub fn set_may_pin(&mut self) {
        self.may_pin = true;
    }

    /// Has this engine open the VM: the state file names the engine from now on, beside the leaving engine if
    /// `is_beside`. Returns the order.
    ///
    /// # Errors
    /// A part of an engine may be left that the state file names and that is not one of `ours`.
    pub fn open(&mut self, engine: Process, is_beside: bool, ours: &[Process]) -> Result<Given, io::Result<Left>> {
        match fence::end_for(&self.state, ours.iter().copied()) {
            Ok(Left::Nothing) => {}
            left => return Err(left),
        }
        match is_beside {
            true => self.state.name_beside(engine.pid, engine.start),
            false => self.state.name_engine(engine.pid, engine.start),
        }
        let (fds, files, regions) = self.descriptors();
        let order = Order::OpenVm {
            vm: self.state.id(),
            vmm: self.vmm.clone(),
            pinned: self.pinned.clone(),
            may_pin: self.may_pin,
            stores: Files::counts(&self.stores),
            files,
            beside: is_beside,
            regions,
        };
        Ok((order, fds))
    }

    /// The order to examine the VM and change nothing.
    pub fn check(&self, seq: u64) -> Given {
        let (fds, files, regions) = self.descriptors();
        let (vm, stores) = (self.state.id(), Files::counts(&self.stores));
        (Order::CheckVm { seq, vm, stores, files, regions }, fds)
    }

    /// The order that tells the engine of a region, which this process maps at `span`, or brings with its view.
    pub fn add_region(&self, pid: u32, span: Option<Span>, number: u32) -> Option<Given> {
        let files = self.ram.get(number as usize)?.as_ref()?;
        let fds: Vec<_> = files.iter().map(|(fd, _)| fd.clone()).collect();
        Some((Order::AddRegion { vm: self.state.id(), pid, span, number, files: fds.len() as u8 }, fds))
    }

    pub fn has_removed(&self) -> bool {
        self.state.regions().iter().zip(&self.ram).any(|(record, ram)| record.removed && ram.is_some())
    }

    /// Drops the files of regions that the engine has removed and that no process `has`. A region is kept if it was not
    /// removed by an engine, because the VM was not open or another process still has it: the engine that opens the VM
    /// next needs the files.
    pub fn forget_removed(&mut self, has: &HashSet<u32>) {
        for ((number, record), ram) in (0..).zip(self.state.regions()).zip(&mut self.ram) {
            if record.removed && !has.contains(&number) {
                *ram = None;
            }
        }
    }

    /// The descriptors that travel with `OpenVm`, the number of RAM files, which are the last of them, and the number
    /// of regions in the state file.
    fn descriptors(&self) -> (Vec<Arc<SlowFd>>, u8, u32) {
        let mut seen = HashSet::new();
        // The engine needs no files of an unplugged region, even if a process that could not be served still has it.
        let records = self.state.regions().into_iter().zip(&self.ram);
        let live = records.filter(|(record, _)| !record.removed).filter_map(|(_, ram)| ram.as_ref());
        let ram: Vec<_> = live.flatten().filter(|(_, id)| seen.insert(*id)).collect();
        let stores = self.stores.iter().flat_map(Files::iter);
        let all = std::iter::once(&self.file).chain(stores).chain(ram.iter().map(|(fd, _)| fd));
        (all.cloned().collect(), ram.len() as u8, self.ram.len() as u32)
    }

    /// The parts of files that are RAM of this VM, brought or still missing.
    fn ranges(&self) -> FileRanges {
        let records: Vec<_> = self.state.regions().into_iter().filter(|record| !record.removed).collect();
        records.iter().flat_map(RegionRecord::places).collect()
    }

    pub fn has_any(&self, ram: &FileRanges) -> bool {
        self.ranges().overlap(ram).is_some()
    }

    pub fn missing(&self) -> Vec<(u32, RegionRecord)> {
        let records = self.state.regions().into_iter().zip(&self.ram).enumerate();
        let missing = records.filter(|(_, (record, ram))| !record.removed && ram.is_none());
        missing.map(|(number, (record, _))| (number as u32, record)).collect()
    }

    /// Gives each region of an attach its number. Regions of the state file are matched. If `may_add`, new regions are
    /// added, and their numbers put into `added`, even if a later step fails; otherwise a new region is refused.
    pub fn number(&mut self, ram: Vec<Ram>, may_add: bool, added: &mut Vec<u32>) -> anyhow::Result<Vec<(Span, u32)>> {
        let mut spans = Vec::new();
        for ram in ram {
            let number = match self.find(&ram, &spans) {
                Some(number) => number,
                None if may_add => {
                    added.push(self.append(&ram)?);
                    self.ram.len() as u32 - 1
                }
                None => {
                    let name = self.state.name();
                    bail!("region {} is not RAM of VM {name:?}, whose other RAM this process maps", ram.span.hva);
                }
            };
            spans.push((ram.span, number));
            self.bring(number, ram.files);
        }
        Ok(spans)
    }

    /// Keeps the files of a region that a process has brought, unless they are here already.
    pub fn bring(&mut self, number: u32, files: RamFiles) {
        let known: HashMap<FileId, Arc<SlowFd>> =
            self.ram.iter().flatten().flatten().map(|(fd, id)| (*id, fd.clone())).collect();
        let once = |(fd, id): (Arc<SlowFd>, FileId)| (known.get(&id).cloned().unwrap_or(fd), id);
        self.ram[number as usize].get_or_insert_with(|| files.into_iter().map(once).collect());
    }

    /// The number of this region in the state file, unless it is `taken`.
    pub fn find(&self, ram: &Ram, taken: &[(Span, u32)]) -> Option<u32> {
        let same = |(number, record): &(usize, RegionRecord)| {
            !record.removed
                && record.places().eq(ram.places())
                && !taken.iter().any(|(_, other)| *other == *number as u32)
        };
        self.state.regions().into_iter().enumerate().find(same).map(|(number, _)| number as u32)
    }

    pub fn append(&mut self, ram: &Ram) -> anyhow::Result<u32> {
        let (at, ranges) = (ram.span.hva, Ram::ranges(std::slice::from_ref(ram)));
        let mut files: HashSet<FileId> = ram.files.iter().map(|(_, id)| *id).collect();
        let mut extents = ram.extents.list().len();
        for (number, record) in self.state.regions().into_iter().enumerate() {
            let overlap = record.places().collect::<FileRanges>().overlap(&ranges);
            match overlap {
                Some(_) if record.given_up => {
                    bail!(
                        "region {at} was taken for unplugged because its process stayed away for {:?}: its far pages \
                         are lost",
                        crate::lost::LONGEST_WAIT
                    );
                }
                Some((_, offset)) if !record.removed => {
                    bail!("region {at} overlaps, at offset {offset:#x} of its file, region {number} of this VM");
                }
                _ if !record.removed => {
                    files.extend(record.files);
                    extents += record.extents.list().len();
                }
                _ => {}
            }
        }
        if files.len() > MAX_FILES {
            bail!("region {at} would be the {}th RAM file of this VM; {MAX_FILES} are allowed", files.len());
        }
        if extents > MAX_EXTENTS {
            bail!("with region {at} the RAM of this VM would be in {extents} extents; {MAX_EXTENTS} are allowed");
        }
        let ids: Vec<_> = ram.files.iter().map(|(_, id)| *id).collect();
        let number = self.state.add_region(&ids, &ram.extents, ram.guest_address)?;
        self.ram.push(None);
        Ok(number)
    }

    pub fn missing_files(&self) -> HashSet<FileId> {
        self.missing().into_iter().flat_map(|(_, record)| record.files).collect()
    }

    /// Treats missing regions as unplugged. If a process may still map one, `permanently` is false: a process that
    /// brings the region later is refused, because it would read zeros.
    pub fn give_up_missing(&mut self, permanently: bool) {
        for (number, _) in self.missing() {
            if permanently {
                self.state.remove_region(number);
            } else {
                self.state.give_up_region(number);
            }
        }
    }

    /// Read-only descriptors of the VM's files, which the client keeps for the next keeper.
    pub fn escrow(&self) -> anyhow::Result<Vec<OwnedFd>> {
        let mut reopened = vec![memfd::reopen(self.file.as_fd(), false)];
        for files in &self.stores {
            match files.escrow(self.state.id()) {
                Ok(files) => reopened.extend(files.into_iter().map(Ok)),
                Err(error) => reopened.push(Err(error)),
            }
        }
        reopened.into_iter().collect::<io::Result<_>>().context("Opening the state files read-only")
    }
}
