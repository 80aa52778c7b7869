//! The pool's state in a file that is mapped.
//!
//! Before: `reserve` opens or makes the file. After: [`crate::map`] reads and writes its words.
//! Threads: the owner's. Promise: a store is in the file at once, even if this process dies. The used part of the file
//! has memory before it is touched: in a full file system, a touch of a hole would end the process (`SIGBUS`).

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::Ordering;

use crate::map::{Damage, Layout, Pool, Words};
use ballast_base::{Bytes, PAGE_SIZE};
use ballast_sys::{Mapping, memfd};

/// The state of a pool in a file.
#[derive(Debug)]
pub struct Shared {
    file: OwnedFd,
    mapping: Mapping,
}

impl Shared {
    /// The words of a file of this size.
    pub fn new(file: OwnedFd, size: usize) -> io::Result<Self> {
        Ok(Self { mapping: Mapping::shared(&file, 0, size)?, file })
    }
}

impl Words for Shared {
    fn count(&self) -> usize {
        self.mapping.len() / 8
    }

    fn load(&self, at: usize) -> u64 {
        self.mapping.words(at * 8, 1)[0].load(Ordering::Acquire)
    }

    fn store(&mut self, at: usize, value: u64) {
        self.mapping.words(at * 8, 1)[0].store(value, Ordering::Release);
    }

    fn back(&mut self, words: Range<usize>) -> io::Result<()> {
        let (offset, len) = (words.start as u64 * 8, words.len() as u64 * 8);
        if len == 0 {
            return Ok(());
        }
        memfd::allocate(&self.file, offset, len)
            .map_err(|error| io::Error::new(error.kind(), format!("allocating {} of its file: {error}", Bytes(len))))
    }
}

/// The reason why there is no usable state.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// The file cannot be opened, made or mapped.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The file is not the state of a pool, or is damaged.
    #[error(transparent)]
    Damage(#[from] Damage),
}

/// Makes an empty state. Its file gets its name when it is complete.
pub fn create(path: &Path, layout: &Layout) -> Result<Pool<Shared>, StateError> {
    let new = path.with_extension("new");
    let file = File::options().read(true).write(true).create(true).truncate(true).open(&new)?;
    let size = (layout.words() * 8).next_multiple_of(PAGE_SIZE);
    file.set_len(size as u64)?;
    let mut words = Shared::new(file.into(), size)?;
    words.back(layout.used_when_new())?;
    let pool = Pool::create(words, layout)?;
    std::fs::rename(&new, path)?;
    Ok(pool)
}

/// Opens a state; `None` if there is no file.
pub fn open(path: &Path) -> Result<Option<Pool<Shared>>, StateError> {
    let file = match File::options().read(true).write(true).open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file?,
    };
    let size = file.metadata()?.len() as usize / PAGE_SIZE * PAGE_SIZE;
    if size == 0 {
        return Err(Damage::Header("the file is empty".into()).into());
    }
    let mut words = Shared::new(file.into(), size)?;
    // The header was written, so the words that it names have memory.
    for used in Layout::used(&words)? {
        words.back(used)?;
    }
    Ok(Some(Pool::open(words)?.0))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;
    use crate::map::NodeSpec;

    #[test]
    fn what_is_used_of_a_state_that_is_made_or_opened_has_memory_and_the_rest_has_none() {
        let dir = tempfile::tempdir_in("/dev/shm").expect("a directory");
        let path = dir.path().join("state");
        let layout = Layout::new(&[NodeSpec { numa: 0, slices: 100_000 }], 512, 100).expect("a layout");
        let used = (layout.used_when_new().len() * 8).next_multiple_of(PAGE_SIZE) as u64;
        let is_all_there = || std::fs::metadata(&path).expect("made").blocks() * 512 == used;
        drop(create(&path, &layout).expect("made"));
        assert!(is_all_there(), "it was made with holes, or takes more than it uses");
        // The file as a program of an earlier version leaves it: with holes.
        let file = File::options().write(true).open(&path).expect("open");
        let (from, len) = (PAGE_SIZE as u64, file.metadata().expect("made").len() - PAGE_SIZE as u64);
        memfd::punch(&file, from, len).expect("punch");
        assert!(!is_all_there());
        drop(open(&path).expect("read").expect("it is there"));
        assert!(is_all_there(), "it was opened with holes, or takes more than it uses");
    }
}
