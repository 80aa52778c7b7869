//! Bricks: the pool's files, each with a name in a hugetlbfs that nobody but root can enter.
//!
//! Before: the state says which brick is whose. After: descriptors, pages taken out of files and put into them.
//! Threads: the owner's; [`refill`] a worker's. Units: bytes; bricks by their number.
//! Promise: each descriptor that leaves was opened through a door of its VM's own (`sys/src/huge_files.rs`), so that
//! the kernel can say when the last is gone. A file that a VM had is never another VM's.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ballast_base::Bytes;
use ballast_sys::{huge_files, memfd};

/// The files.
#[derive(Debug)]
pub struct Files {
    dir: PathBuf,
    brick: Bytes,
    open: BTreeMap<u32, Arc<OwnedFd>>,
}

impl Files {
    /// In a hugetlbfs at this directory, which is made if need be.
    pub fn open(dir: &Path, brick: Bytes) -> io::Result<Self> {
        match std::fs::DirBuilder::new().mode(0o700).create(dir) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        huge_files::mount(dir)?;
        Ok(Self { dir: dir.into(), brick, open: BTreeMap::new() })
    }

    /// A brick, which is made if it is not there.
    pub fn get(&mut self, number: u32) -> io::Result<Arc<OwnedFd>> {
        let Entry::Vacant(place) = self.open.entry(number) else { return Ok(self.open[&number].clone()) };
        let path = path(&self.dir, number);
        let file =
            std::fs::File::options().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)?;
        file.set_len(self.brick.0)?;
        Ok(place.insert(Arc::new(file.into())).clone())
    }

    /// A VM is to get bricks: make the door through which they are opened for it.
    pub fn open_door(&self, vm: u64) -> io::Result<()> {
        huge_files::open_door(&self.dir, &self.door(vm))
    }

    /// An opening of a brick for this VM.
    pub fn hand_out(&mut self, number: u32, vm: u64) -> io::Result<OwnedFd> {
        self.get(number)?;
        let file = path(&self.door(vm), number);
        Ok(std::fs::File::options().read(true).write(true).open(file)?.into())
    }

    /// Has nobody anything that was opened for this VM? Then its door is taken away.
    pub fn close_door(&self, vm: u64) -> io::Result<bool> {
        huge_files::close_door(&self.door(vm))
    }

    /// The VMs that have doors.
    pub fn doors(&self) -> io::Result<Vec<u64>> {
        Ok(self.names()?.iter().filter_map(|name| u64::from_str_radix(name.strip_prefix("vm-")?, 16).ok()).collect())
    }

    fn door(&self, vm: u64) -> PathBuf {
        self.dir.join(format!("vm-{vm:016x}"))
    }

    /// Put a new file in the place of a brick that nobody has, one of holes.
    pub fn replace(&mut self, number: u32) -> io::Result<()> {
        // Its pages are freed now, even those beyond its size, whichever process names it.
        rustix::fs::ftruncate(&*self.get(number)?, 0)?;
        self.open.remove(&number);
        std::fs::remove_file(path(&self.dir, number))
    }

    /// The bricks that there are.
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

/// Put other pages, which are zero, in the place of what is there, from this node.
pub fn refill(file: &OwnedFd, brick: Bytes, offset: u64, len: u64, node: Option<u32>) -> io::Result<()> {
    if memfd::size(file)? != brick {
        // Its former owner could change its size.
        rustix::fs::ftruncate(file, brick.0)?;
    }
    memfd::punch(file, offset, len)?;
    if node.is_some() {
        huge_files::on_node(node)?;
    }
    memfd::allocate(file, offset, len)
}
