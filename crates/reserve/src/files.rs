//! Bricks: the pool's files, each with a name in a hugetlbfs that nobody but root can enter.
//!
//! Before: the state says which brick is whose. After: descriptors, pages taken out of files and put into them.
//! Threads: the owner's; [`refill`] a worker's. Units: bytes; bricks by their number.
//! Promise: each descriptor that leaves is an opening of its own, so that the kernel can say when the last is gone. A
//! file that a VM had is never another VM's.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
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

    /// An opening of a brick for somebody else.
    pub fn hand_out(&mut self, number: u32) -> io::Result<OwnedFd> {
        memfd::reopen(self.get(number)?.as_fd(), true)
    }

    /// Has anybody else a brick?
    pub fn is_held(&mut self, number: u32) -> io::Result<bool> {
        Ok(!huge_files::is_only_holder(&*self.get(number)?)?)
    }

    /// Put a new file in the place of a brick that nobody has, one of holes. A descriptor that only names the old one
    /// (`O_PATH`) counts for none, and whoever kept one could open it again.
    pub fn replace(&mut self, number: u32) -> io::Result<()> {
        // Its pages go now, also those beyond its size, whoever names it.
        rustix::fs::ftruncate(&*self.get(number)?, 0)?;
        self.open.remove(&number);
        std::fs::remove_file(path(&self.dir, number))
    }

    /// The bricks that there are.
    pub fn numbers(&self) -> io::Result<Vec<u32>> {
        let names = std::fs::read_dir(&self.dir)?.map(|entry| Ok(entry?.file_name()));
        let names = names.collect::<io::Result<Vec<_>>>()?;
        Ok(names.iter().filter_map(|name| name.to_str()?.strip_prefix("brick-")?.parse().ok()).collect())
    }
}

fn path(dir: &Path, number: u32) -> PathBuf {
    dir.join(format!("brick-{number}"))
}

/// Put other pages, which are zero, in the place of what is there, from this node.
pub fn refill(file: &OwnedFd, brick: Bytes, offset: u64, len: u64, node: Option<u32>) -> io::Result<()> {
    if memfd::size(file)? != brick {
        // Who had it could make it any size.
        rustix::fs::ftruncate(file, brick.0)?;
    }
    memfd::punch(file, offset, len)?;
    if node.is_some() {
        huge_files::on_node(node)?;
    }
    memfd::allocate(file, offset, len)
}
