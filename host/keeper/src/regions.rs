//! A VM as the keeper holds it: its state file, its arena, its file store, and the descriptors of its regions.
//!
//! Before: an attach was admitted. After: every region of a client has its number in the state file.
//! Promise: two regions never share bytes of a file, and a region's number means the same bytes for ever.

use std::collections::{HashMap, HashSet, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use ballast_base::extent::MAX_EXTENTS;
use ballast_base::wire::{Attach, MAX_FILES, Span, VmId};
use ballast_handover::arena;
use ballast_handover::state_file::{RegionRecord, StateFile};
use ballast_sys::file_ranges::FileRanges;
use ballast_sys::memfd::{self, FileId};
use ballast_sys::process::Process;
use ballast_sys::same_file::same_file;

use crate::admit::Ram;
use crate::closer::{Closer, SentFd};
use crate::losses::Losses;
use crate::lost::Search;
use crate::store_files::Files;

/// A VM.
pub struct VmEntry {
    /// The state file, which outlives engines.
    pub state: StateFile,
    /// The same file, for the engine.
    file: Arc<SentFd>,
    /// The files of its stores.
    pub stores: Vec<Files>,
    /// The files of each region, by its number; `None` for one that was unplugged, or that no process has brought back
    /// yet.
    pub ram: Vec<Option<RamFiles>>,
    /// Its user.
    pub uid: u32,
    /// The VMM program.
    pub vmm: String,
    /// Why nothing may be reclaimed.
    pub pinned: Option<String>,
    /// See [`Attach::may_pin`].
    pub may_pin: bool,
    /// When the files of regions are looked for that were unplugged and that no process has any more. `None`: no region
    /// of it was ever unplugged, and no process of several has ended.
    pub looks_at: Option<Instant>,
    /// Set while some of its regions are missing: no engine has it then.
    pub search: Option<Search>,
    /// Which engine has it, if one has.
    pub at: At,
    /// How many engines had opened it when the last one was named.
    pub named_at: u64,
    /// Set while a thread of its last, dead engine may still change it: no other engine has it then.
    pub fenced: Option<Fenced>,
    /// The number of the last question to an upgrade's new engine about this VM. The reply to an earlier question is
    /// about the VM before its processes went and attached again.
    pub question: Option<u64>,
    /// Its engine lacked something for it, and is to open it again.
    pub lost: Option<Lost>,
    /// How often that was so.
    pub losses: Losses,
    /// Control sockets of processes that are gone, which the engine may have still.
    gone: VecDeque<Arc<SentFd>>,
}

/// Control sockets that are kept. An engine has closed older ones, or hangs with the VM.
const MOST_GONE: usize = 16;

/// The engine lacked something for a VM.
pub struct Lost {
    /// When it is given the VM again.
    pub again_at: Instant,
    /// Since when a process of it is not served, on the monotonic clock.
    pub unserved_since_ns: u64,
}

/// The engine that has a VM, or will get it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum At {
    /// The keeper's engine.
    Engine,
    /// This order tells the keeper's engine to do nothing for it any more except to serve its faults.
    Resting(u64),
    /// The keeper's engine serves its faults, and so does the next one, which has it when the first has closed it.
    Both,
    /// The keeper's engine closes it: since when, and by which order. The next engine gets it then.
    Parting(Instant, u64),
    /// The next engine.
    Next,
}

/// What a newcomer's RAM is to a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kin {
    /// No byte of it has the numbers (device, inode, offset) of one of the VM's.
    None,
    /// Some of its files are the VM's.
    Same,
    /// It has a file with the numbers of one of the VM's, and that is another file.
    Other,
    /// It has a file with the numbers of one of the VM's, which no process has brought back, or which cannot be
    /// compared.
    Unknown,
}

/// The files of a region.
pub type RamFiles = Vec<(Arc<SentFd>, FileId)>;

/// A VM that waits for the end of its last engine.
pub struct Fenced {
    pub since: Instant,
    /// Since when no engine serves it, on the monotonic clock.
    pub unserved_since_ns: Option<u64>,
    /// The engine that got the event; the next one has a new list.
    pub told: Option<Process>,
}

impl VmEntry {
    /// A VM that no keeper has seen before.
    pub fn create(attach: &Attach, uid: u32, closer: &Arc<Closer>) -> Result<Self, String> {
        let mut id = [0; 16];
        let filled = rustix::rand::getrandom(&mut id, rustix::rand::GetRandomFlags::empty());
        if filled != Ok(id.len()) {
            return Err("the kernel gave no random numbers for the VM's id".into());
        }
        let state = StateFile::create(VmId(id), &attach.name).map_err(|error| format!("{error}"))?;
        state.set_limit(attach.limit);
        // The engine lays it out: a VM can attach while there is no engine.
        let arena = arena::create().map_err(|error| format!("Making the store's file: {error}"))?;
        rustix::fs::fchmod(&arena, rustix::fs::Mode::from_raw_mode(0o600)).map_err(|error| error.to_string())?;
        let arena = Files::ram(SentFd::new(arena, uid, closer.clone()).checked());
        Self::new(state, vec![arena], attach.vmm.clone(), uid, closer)
    }

    /// A VM of these files.
    pub fn new(
        state: StateFile,
        stores: Vec<Files>,
        vmm: String,
        uid: u32,
        closer: &Arc<Closer>,
    ) -> Result<Self, String> {
        let duplicate =
            state.fd().try_clone_to_owned().map_err(|error| format!("Duplicating a descriptor: {error}"))?;
        Ok(Self {
            ram: state.regions().iter().map(|_| None).collect(),
            state,
            file: Arc::new(SentFd::new(duplicate, uid, closer.clone()).checked()),
            stores,
            uid,
            vmm,
            pinned: None,
            may_pin: false,
            looks_at: None,
            search: None,
            at: At::Engine,
            named_at: 0,
            fenced: None,
            question: None,
            lost: None,
            losses: Losses::default(),
            gone: VecDeque::new(),
        })
    }

    /// Keep the control socket of a process that is gone. With descriptors in it, its last close may wait for ever, and
    /// must not be the engine's.
    pub fn keep_control(&mut self, control: Arc<SentFd>) {
        self.gone.push_back(control);
        if self.gone.len() > MOST_GONE {
            self.gone.pop_front();
        }
    }

    /// Has the engine been given it?
    pub fn is_handed_over(&self) -> bool {
        let is_on_its_way = matches!(self.at, At::Resting(_) | At::Parting(..));
        self.search.is_none() && self.fenced.is_none() && !is_on_its_way
    }

    /// Its state file names this engine from now on; beside the one that leaves, if both are to have it.
    pub fn name_engine(&mut self, engine: Process) {
        self.named_at = self.state.epoch();
        match self.at {
            At::Both => self.state.name_beside(engine.pid, engine.start),
            _ => self.state.name_engine(engine.pid, engine.start),
        }
    }

    /// Has an engine opened it since its state file names that one?
    pub fn is_opened_since_named(&self) -> bool {
        self.state.epoch() > self.named_at
    }

    /// The descriptors that travel with `OpenVm`, how many of the last of these are RAM files, and how many regions
    /// these belong to.
    pub fn descriptors(&self) -> (Vec<Arc<SentFd>>, u8, u32) {
        let mut seen = HashSet::new();
        // The engine needs no files of an unplugged region, even if a process that could not be served still has it.
        let records = self.state.regions().into_iter().zip(&self.ram);
        let live = records.filter(|(record, _)| !record.removed).filter_map(|(_, ram)| ram.as_ref());
        let ram: Vec<_> = live.flatten().filter(|(_, id)| seen.insert(*id)).collect();
        let stores = self.stores.iter().flat_map(Files::iter);
        let all = std::iter::once(&self.file).chain(stores).chain(ram.iter().map(|(fd, _)| fd));
        (all.cloned().collect(), ram.len() as u8, self.ram.len() as u32)
    }

    /// The bytes of files that are RAM of this VM, brought or still missing.
    fn ranges(&self) -> FileRanges {
        let records: Vec<_> = self.state.regions().into_iter().filter(|record| !record.removed).collect();
        records.iter().flat_map(RegionRecord::places).collect()
    }

    /// Is any of these bytes RAM of this VM?
    pub fn has_any(&self, ram: &FileRanges) -> bool {
        self.ranges().overlap(ram).is_some()
    }

    /// What is this RAM to the VM? Equal numbers alone prove nothing (see [`same_file`]).
    pub fn kin(&self, ram: &[Ram]) -> Kin {
        if !self.has_any(&Ram::ranges(ram)) {
            return Kin::None;
        }
        let ours: HashSet<FileId> = self.ranges().files().collect();
        let mut kin = Kin::Same;
        for (fd, id) in ram.iter().flat_map(|ram| &ram.files).filter(|(_, id)| ours.contains(id)) {
            match self.held(*id).map(|held| same_file(held, fd)) {
                Some(Ok(true)) => {}
                Some(Ok(false)) => return Kin::Other,
                Some(Err(error)) => {
                    tracing::debug!(vm = self.state.name(), "Comparing a RAM file with one of this VM: {error}");
                    kin = Kin::Unknown;
                }
                None => kin = Kin::Unknown,
            }
        }
        kin
    }

    /// The VM's file with these numbers, if a process has brought it.
    fn held(&self, id: FileId) -> Option<&Arc<SentFd>> {
        self.ram.iter().flatten().flatten().find(|(_, own)| *own == id).map(|(fd, _)| fd)
    }

    /// Is each of this region's files that has the numbers of one that the VM has that file?
    pub fn check_files(&self, ram: &Ram) -> Result<(), String> {
        for (fd, id) in &ram.files {
            let (name, at) = (self.state.name(), ram.span.hva);
            match self.held(*id).map(|held| same_file(held, fd)) {
                None | Some(Ok(true)) => {}
                Some(Ok(false)) => {
                    let FileId { dev, ino } = id;
                    return Err(format!(
                        "a file of region {at} has the device ({dev:#x}) and inode ({ino}) of a RAM file of VM \
                         {name:?} and is another file"
                    ));
                }
                Some(Err(error)) => {
                    return Err(format!("Comparing a file of region {at} with one of VM {name:?}: {error}"));
                }
            }
        }
        Ok(())
    }

    /// Regions that are not unplugged and whose RAM no process has brought.
    pub fn missing(&self) -> Vec<(u32, RegionRecord)> {
        let records = self.state.regions().into_iter().zip(&self.ram).enumerate();
        let missing = records.filter(|(_, (record, ram))| !record.removed && ram.is_none());
        missing.map(|(number, (record, _))| (number as u32, record)).collect()
    }

    /// Give every region of an attach its number: those of the state file are matched, and if `may_add`, new ones are
    /// added and their numbers put into `added`, also when something fails afterwards. Without it an unknown region is
    /// refused.
    pub fn number(&mut self, ram: Vec<Ram>, may_add: bool, added: &mut Vec<u32>) -> Result<Vec<(Span, u32)>, String> {
        let mut spans = Vec::new();
        for ram in ram {
            self.check_files(&ram)?;
            let number = match self.find(&ram, &spans) {
                Some(number) => number,
                None if may_add => {
                    added.push(self.append(&ram)?);
                    self.ram.len() as u32 - 1
                }
                None => {
                    let name = self.state.name();
                    return Err(format!(
                        "region {} is not RAM of VM {name:?}, whose other RAM this process maps",
                        ram.span.hva
                    ));
                }
            };
            spans.push((ram.span, number));
            self.bring(number, ram.files);
        }
        Ok(spans)
    }

    /// Are a region's files here?
    pub fn bring(&mut self, number: u32, files: RamFiles) {
        let known: HashMap<FileId, Arc<SentFd>> =
            self.ram.iter().flatten().flatten().map(|(fd, id)| (*id, fd.clone())).collect();
        let once = |(fd, id): (Arc<SentFd>, FileId)| (known.get(&id).cloned().unwrap_or(fd), id);
        self.ram[number as usize].get_or_insert_with(|| files.into_iter().map(once).collect());
    }

    /// The number of a region that is known, unless it is `taken`.
    pub fn find(&self, ram: &Ram, taken: &[(Span, u32)]) -> Option<u32> {
        let same = |(number, record): &(usize, RegionRecord)| {
            !record.removed
                && record.places().eq(ram.places())
                && !taken.iter().any(|(_, other)| *other == *number as u32)
        };
        self.state.regions().into_iter().enumerate().find(same).map(|(number, _)| number as u32)
    }

    /// Add a region, without its descriptors yet.
    pub fn append(&mut self, ram: &Ram) -> Result<u32, String> {
        let (at, ranges) = (ram.span.hva, Ram::ranges(std::slice::from_ref(ram)));
        let mut files: HashSet<FileId> = ram.files.iter().map(|(_, id)| *id).collect();
        let mut extents = ram.extents.list().len();
        for (number, record) in self.state.regions().into_iter().enumerate() {
            let overlap = record.places().collect::<FileRanges>().overlap(&ranges);
            match overlap {
                Some(_) if record.given_up => {
                    return Err(format!(
                        "region {at} was taken for unplugged because its process stayed away for {:?}: its far pages \
                         are lost",
                        crate::lost::LONGEST_WAIT
                    ));
                }
                Some((_, offset)) if !record.removed => {
                    return Err(format!(
                        "region {at} overlaps, at offset {offset:#x} of its file, region {number} of this VM"
                    ));
                }
                _ if !record.removed => {
                    files.extend(record.files);
                    extents += record.extents.list().len();
                }
                _ => {}
            }
        }
        if files.len() > MAX_FILES {
            return Err(format!(
                "region {at} would be the {}th RAM file of this VM; {MAX_FILES} are allowed",
                files.len()
            ));
        }
        if extents > MAX_EXTENTS {
            return Err(format!(
                "with region {at} the RAM of this VM would be in {extents} extents; {MAX_EXTENTS} are allowed"
            ));
        }
        let ids: Vec<_> = ram.files.iter().map(|(_, id)| *id).collect();
        let number = self.state.add_region(&ids, &ram.extents, ram.guest_address).map_err(|error| error.to_string())?;
        self.ram.push(None);
        Ok(number)
    }

    /// Treat missing regions as unplugged. If a process still maps one, `permanently` is false, and a process that
    /// brings it later is refused, because it would read zeros.
    pub fn give_up_missing(&mut self, permanently: bool) {
        for (number, _) in self.missing() {
            if permanently {
                self.state.remove_region(number);
            } else {
                self.state.give_up_region(number);
            }
        }
    }

    /// Read-only descriptors of its files, for the client to keep for the next keeper.
    pub fn escrow(&self) -> Result<Vec<OwnedFd>, String> {
        let mut reopened = vec![memfd::reopen(self.file.as_fd(), false)];
        for files in &self.stores {
            match files.escrow(self.state.id()) {
                Ok(files) => reopened.extend(files.into_iter().map(Ok)),
                Err(error) => reopened.push(Err(error)),
            }
        }
        let all = reopened.into_iter().collect::<std::io::Result<_>>();
        all.map_err(|error| format!("Opening the state files read-only: {error}"))
    }
}
