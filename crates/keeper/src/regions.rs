//! A VM as the keeper holds it: its state file, its arena, its file store, and which descriptor is which region.
//!
//! Before: an attach was admitted. After: every region a client named has the number the state file knows it by.
//! Promise: two regions never share bytes of a file, and a region's number means the same bytes for ever.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use ballast_base::wire::{Attach, RegionInfo, VmId};
use ballast_base::{Extent, Extents};
use ballast_handover::arena;
use ballast_handover::state_file::{RegionRecord, StateFile};
use ballast_sys::memfd::{self, FileId};
use ballast_sys::process::Process;

use crate::admit;
use crate::closer::{Closer, SentFd};
use crate::lost::Search;

/// A VM.
pub struct VmEntry {
    /// What outlives engines.
    pub state: StateFile,
    /// The same file, and the store's, for the engine.
    pub files: [Arc<SentFd>; 2],
    /// The file of its file store, as a place only, and its index, if it has one.
    pub file_store: Option<[Arc<SentFd>; 2]>,
    /// By region number; `None` for a region that was unplugged, or that nobody has brought back yet.
    pub ram: Vec<Option<(Arc<SentFd>, FileId)>>,
    /// Whose it is.
    pub uid: u32,
    /// The VMM program.
    pub vmm: String,
    /// Why nothing may be reclaimed.
    pub pinned: Option<String>,
    /// See [`Attach::may_pin`].
    pub may_pin: bool,
    /// Set while some of its regions are missing: no engine has it then.
    pub search: Option<Search>,
    /// Set while its last engine, which is dead, may still change something of it: no other has it then.
    pub fenced: Option<Fenced>,
}

/// A VM that waits for the end of its last engine.
pub struct Fenced {
    pub since: Instant,
    /// Since when nobody serves it, on the monotonic clock.
    pub unserved_since_ns: Option<u64>,
    /// The engine in whose events it was said: the next one's list begins anew.
    pub told: Option<Process>,
}

impl VmEntry {
    /// A VM nobody has seen before.
    pub fn create(attach: &Attach, uid: u32, closer: &Arc<Closer>) -> Result<Self, String> {
        let mut id = [0; 16];
        let filled = rustix::rand::getrandom(&mut id, rustix::rand::GetRandomFlags::empty());
        if filled != Ok(id.len()) {
            return Err("the kernel gave no random numbers for the VM's id".into());
        }
        let state = StateFile::create(VmId(id), &attach.name).map_err(|error| format!("{error}"))?;
        state.set_limit(attach.limit);
        // The engine lays it out: a VM can attach while there is none.
        let arena = arena::create().map_err(|error| format!("Making the store's file: {error}"))?;
        rustix::fs::fchmod(&arena, rustix::fs::Mode::from_raw_mode(0o600)).map_err(|error| error.to_string())?;
        Self::new(state, SentFd::new(arena, uid, closer.clone()), None, attach, uid, closer)
    }

    /// A VM of these files.
    pub fn new(
        state: StateFile,
        arena: SentFd,
        file_store: Option<[SentFd; 2]>,
        attach: &Attach,
        uid: u32,
        closer: &Arc<Closer>,
    ) -> Result<Self, String> {
        let duplicate =
            state.fd().try_clone_to_owned().map_err(|error| format!("Duplicating a descriptor: {error}"))?;
        Ok(Self {
            ram: state.regions().iter().map(|_| None).collect(),
            state,
            files: [Arc::new(SentFd::new(duplicate, uid, closer.clone())), Arc::new(arena)],
            file_store: file_store.map(|files| files.map(Arc::new)),
            uid,
            vmm: attach.vmm.clone(),
            pinned: None,
            may_pin: false,
            search: None,
            fenced: None,
        })
    }

    /// Has the engine been given it?
    pub fn is_handed_over(&self) -> bool {
        self.search.is_none() && self.fenced.is_none()
    }

    /// What travels beside `OpenVm`.
    pub fn descriptors(&self) -> Vec<Arc<SentFd>> {
        let [state, _] = &self.files;
        let ram = self.ram.iter().map(|ram| ram.as_ref().map_or(state, |(fd, _)| fd));
        self.files.iter().chain(self.file_store.iter().flatten()).chain(ram).cloned().collect()
    }

    /// Is one of these files RAM of this VM, brought or still missing?
    pub fn has_any(&self, mut files: impl Iterator<Item = FileId>) -> bool {
        let regions = self.state.regions();
        files.any(|file| regions.iter().any(|record| !record.removed && record.files.contains(&file)))
    }

    /// Regions that are not unplugged and whose RAM nobody has brought.
    pub fn missing(&self) -> Vec<(u32, RegionRecord)> {
        let records = self.state.regions().into_iter().zip(&self.ram).enumerate();
        let missing = records.filter(|(_, (record, ram))| !record.removed && ram.is_none());
        missing.map(|(number, (record, _))| (number as u32, record)).collect()
    }

    /// Give every region of an attach its number: those of the state file are matched, and if `may_add`, what is new is
    /// added and its number put into `added`, also when something fails afterwards. Without it a region that is not
    /// known is refused.
    pub fn number(
        &mut self,
        regions: &[RegionInfo],
        ram: Vec<(SentFd, FileId)>,
        may_add: bool,
        added: &mut Vec<u32>,
    ) -> Result<Vec<(RegionInfo, u32)>, String> {
        let mut spans = Vec::new();
        for (info, (fd, id)) in regions.iter().zip(ram) {
            let number = match self.find(info, id, &spans) {
                Some(number) => number,
                None if may_add => {
                    added.push(self.append(info, id)?);
                    self.ram.len() as u32 - 1
                }
                None => {
                    let name = self.state.name();
                    return Err(format!(
                        "region {} is not RAM of VM {name:?}, whose other RAM this process maps",
                        info.hva
                    ));
                }
            };
            self.ram[number as usize].get_or_insert_with(|| (Arc::new(fd), id));
            spans.push((*info, number));
        }
        Ok(spans)
    }

    /// The number of a region that is known, unless it is `taken`.
    pub fn find(&self, info: &RegionInfo, file: FileId, taken: &[(RegionInfo, u32)]) -> Option<u32> {
        let same = |(number, record): &(usize, RegionRecord)| {
            !record.removed
                && record.files == [file]
                && Ok(&record.extents) == Extents::one(info.file_offset, info.len).as_ref()
                && !taken.iter().any(|(_, other)| *other == *number as u32)
        };
        self.state.regions().into_iter().enumerate().find(same).map(|(number, _)| number as u32)
    }

    /// Add a region, without its descriptor yet.
    pub fn append(&mut self, info: &RegionInfo, file: FileId) -> Result<u32, String> {
        let extents =
            Extents::one(info.file_offset, info.len).map_err(|error| format!("region {}: {error}", info.hva))?;
        for record in self.state.regions() {
            let overlaps = |(other, extent): (FileId, Extent)| {
                let other_info = RegionInfo { hva: info.hva, len: extent.len, file_offset: extent.offset };
                other == file && admit::overlap(info, &other_info)
            };
            if !record.places().any(overlaps) {
                continue;
            }
            if record.given_up {
                return Err(format!(
                    "region {} was taken for unplugged because its process stayed away for {:?}: its far pages are \
                     lost",
                    info.hva,
                    crate::lost::LONGEST_WAIT
                ));
            }
            if !record.removed {
                return Err(format!("region {} overlaps, in its file, another region of this VM", info.hva));
            }
        }
        let number = self.state.add_region(&[file], &extents, None).map_err(|error| error.to_string())?;
        self.ram.push(None);
        Ok(number)
    }

    /// Take what is missing for unplugged. If a process still maps it, `permanently` is false, and a process that
    /// brings it later is refused rather than shown zeros.
    pub fn give_up_missing(&mut self, permanently: bool) {
        for (number, _) in self.missing() {
            if permanently {
                self.state.remove_region(number);
            } else {
                self.state.give_up_region(number);
            }
        }
    }

    /// Its files once more, read-only: what the client keeps for the next keeper.
    pub fn escrow(&self) -> Result<Vec<OwnedFd>, String> {
        let [state, arena] = self.files.each_ref();
        let mut reopened = vec![memfd::reopen(state.as_fd(), false), memfd::reopen(arena.as_fd(), false)];
        if let Some([file, index]) = &self.file_store {
            // To open it might wait for its disk, and to close it then, too.
            reopened.extend([file.as_fd().try_clone_to_owned(), memfd::reopen(index.as_fd(), false)]);
        }
        let all = reopened.into_iter().collect::<std::io::Result<_>>();
        all.map_err(|error| format!("Opening the state files read-only: {error}"))
    }
}
