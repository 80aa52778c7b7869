//! Bricks: the pool's files, each with a name in a hugetlbfs that only root can enter.
//!
//! Before: the state says which VM has which brick. After: descriptors; pages are removed from files and allocated in
//! them. Threads: the owner's; [`refill`] runs on a worker. Units: bytes; bricks by their number.
//! Promise: each descriptor that is handed out was opened through a door that belongs to one VM
//! (`sys/src/huge_files.rs`), so that the kernel can tell when the last one is closed. A file that one VM had is never
//! given to another VM.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ballast_base::Bytes;
use ballast_sys::hugetlb::{Place, Presence};
use ballast_sys::memfd::FileId;
use ballast_sys::{Mapping, huge_files, memfd};

use crate::host::Page;
use crate::journal;

/// The pool's files.
#[derive(Debug)]
pub struct Files {
    dir: PathBuf,
    brick: Bytes,
    open: BTreeMap<u32, Arc<OwnedFd>>,
}

impl Files {
    /// Opens the file system at this directory. Creates the directory and the mount if they do not exist.
    pub fn open(dir: &Path, page: Page, brick: Bytes) -> io::Result<Self> {
        match std::fs::DirBuilder::new().mode(0o700).create(dir) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        huge_files::mount(dir, page.size(1))?;
        Ok(Self { dir: dir.into(), brick, open: BTreeMap::new() })
    }

    /// Returns a brick, and creates it if it does not exist. A brick that exists is not changed, since a VM that has it
    /// can hold its lock for any time: a brick gets its size before it gets its name.
    pub fn get(&mut self, number: u32) -> io::Result<Arc<OwnedFd>> {
        let Entry::Vacant(place) = self.open.entry(number) else { return Ok(self.open[&number].clone()) };
        is_mounted(&self.dir)?;
        let path = path(&self.dir, number);
        let mut options = std::fs::File::options();
        let options = options.read(true).write(true);
        let file = match options.open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let made = self.dir.join("new-brick");
                let file = options.create(true).truncate(false).mode(0o600).open(&made)?;
                file.set_len(self.brick.0)?;
                std::fs::rename(made, path)?;
                file
            }
            opened => opened?,
        };
        Ok(place.insert(Arc::new(file.into())).clone())
    }

    /// Creates the door through which bricks are opened for this VM.
    pub fn open_door(&self, vm: u64) -> io::Result<()> {
        huge_files::open_door(&self.dir, &self.door(vm))
    }

    /// Returns a new open file of a brick for this VM.
    pub fn hand_out(&mut self, number: u32, vm: u64) -> io::Result<OwnedFd> {
        self.get(number)?;
        let file = path(&self.door(vm), number);
        Ok(std::fs::File::options().read(true).write(true).open(file)?.into())
    }

    /// Creates an empty file of a VM on demand, for this part of its memory. A mode bit marks it; its group is the
    /// node.
    pub fn make_on_demand(&self, vm: u64, part: usize, size: Bytes, node: Option<u32>) -> io::Result<()> {
        let (mode, path) = (0o600 | memfd::ON_DEMAND, on_demand(&self.dir, vm, part));
        let file = std::fs::File::options().write(true).create_new(true).mode(mode).open(path)?;
        node.map_or(Ok(()), |node| memfd::set_on_demand_node(&file, node))?;
        file.set_len(size.0)
    }

    /// Returns a new open file of such a file, through the VM's door.
    pub fn hand_out_on_demand(&self, vm: u64, part: usize) -> io::Result<OwnedFd> {
        Ok(std::fs::File::options().read(true).write(true).open(on_demand(&self.door(vm), vm, part))?.into())
    }

    /// Returns the memory that such a file has.
    pub fn on_demand_bytes(&self, vm: u64, part: usize) -> io::Result<Bytes> {
        match std::fs::metadata(on_demand(&self.dir, vm, part)) {
            Ok(file) => Ok(Bytes(file.blocks() * 512)),
            // The owner of the pool died before it made the file.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Bytes(0)),
            Err(error) => Err(error),
        }
    }

    /// Returns the identity of such a file, if it was made.
    pub fn on_demand_id(&self, vm: u64, part: usize) -> io::Result<Option<FileId>> {
        match std::fs::metadata(on_demand(&self.dir, vm, part)) {
            Ok(file) => Ok(Some(FileId { dev: file.dev(), ino: file.ino() })),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Returns which of its first `pages` pages failed.
    pub fn failed_on_demand(&self, vm: u64, part: usize, page: Page, pages: u32) -> io::Result<Vec<u32>> {
        let file = match std::fs::File::options().read(true).write(true).open(on_demand(&self.dir, vm, part)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            file => file?,
        };
        // The VMM may have made it shorter.
        let pages = pages.min((memfd::size(&file)?.0 / page.bytes()) as u32);
        if pages == 0 {
            return Ok(Vec::new());
        }
        let presence = Presence::new(Mapping::shared(&file, 0, page.size(pages).0 as usize)?, page.bytes() as usize)?;
        let fails = |at: u32| Ok((presence.place(page.size(at).0 as usize)? == Place::Failed).then_some(at));
        (0..pages).filter_map(|at| fails(at).transpose()).collect()
    }

    /// Removes such a file, which no process has.
    pub fn remove_on_demand(&self, vm: u64, part: usize) -> io::Result<()> {
        journal::remove(&on_demand(&self.dir, vm, part))
    }

    /// Removes the door of this VM if no process has a file open through it. Returns whether it was removed.
    pub fn close_door(&self, vm: u64) -> io::Result<bool> {
        is_mounted(&self.dir)?;
        huge_files::close_door(&self.door(vm))
    }

    /// Returns the VMs that have doors.
    pub fn doors(&self) -> io::Result<Vec<u64>> {
        Ok(self.names()?.iter().filter_map(|name| u64::from_str_radix(name.strip_prefix("vm-")?, 16).ok()).collect())
    }

    fn door(&self, vm: u64) -> PathBuf {
        self.dir.join(format!("vm-{vm:016x}"))
    }

    /// Removes a brick that no process has, so that the next use creates an empty file.
    pub fn replace(&mut self, number: u32) -> io::Result<()> {
        // This frees its pages now, even those beyond a brick's size, although a process may still have the file open.
        rustix::fs::ftruncate(&*self.get(number)?, 0)?;
        self.open.remove(&number);
        std::fs::remove_file(path(&self.dir, number))
    }

    /// Returns the numbers of the existing bricks.
    pub fn numbers(&self) -> io::Result<Vec<u32>> {
        Ok(self.names()?.iter().filter_map(|name| name.strip_prefix("brick-")?.parse().ok()).collect())
    }

    fn names(&self) -> io::Result<Vec<String>> {
        let names = std::fs::read_dir(&self.dir)?.map(|entry| Ok(entry?.file_name().into_string().unwrap_or_default()));
        names.collect()
    }
}

fn path(dir: &Path, number: u32) -> PathBuf {
    dir.join(format!("brick-{number}"))
}

fn on_demand(dir: &Path, vm: u64, part: usize) -> PathBuf {
    let part = if part == 0 { String::new() } else { format!("-{part}") };
    dir.join(format!("on-demand-{vm:016x}{part}"))
}

/// Fails if the mount was removed: processes may still have its files, and the directory does not show them.
fn is_mounted(dir: &Path) -> io::Result<()> {
    match huge_files::is_mount(dir)? {
        true => Ok(()),
        false => Err(io::Error::new(io::ErrorKind::NotFound, format!("{} is not mounted any more", dir.display()))),
    }
}

/// Replaces the pages in this range by newly allocated, zeroed ones of this node.
pub fn refill(file: &OwnedFd, brick: Bytes, offset: u64, len: u64, node: Option<u32>) -> io::Result<()> {
    if node.is_some() {
        huge_files::on_node(node)?;
    }
    if memfd::size(file)? != brick {
        // The former owner could have changed the size of the file.
        rustix::fs::ftruncate(file, brick.0)?;
    }
    memfd::punch(file, offset, len)?;
    memfd::allocate(file, offset, len)
}
