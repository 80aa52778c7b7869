//! The pool's state in a file that is mapped.
//!
//! Before: `reserve` opens or makes the file. After: `ballast-pool` reads and writes its words.
//! Threads: the owner's. Promise: a store is in the file at once, even if this process dies.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::atomic::Ordering;

use ballast_base::PAGE_SIZE;
use ballast_pool::{Damage, Layout, Pool, Words};
use ballast_sys::Mapping;

/// The state of a pool in a file.
#[derive(Debug)]
pub struct Shared(Mapping);

impl Shared {
    /// The words of this mapping.
    pub fn new(mapping: Mapping) -> Self {
        Self(mapping)
    }
}

impl Words for Shared {
    fn count(&self) -> usize {
        self.0.len() / 8
    }

    fn load(&self, at: usize) -> u64 {
        self.0.words(at * 8, 1)[0].load(Ordering::Acquire)
    }

    fn store(&mut self, at: usize, value: u64) {
        self.0.words(at * 8, 1)[0].store(value, Ordering::Release);
    }
}

/// Why there is no usable state.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// The file cannot be opened, made or mapped.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// It is no state of a pool, or a damaged one.
    #[error(transparent)]
    Damage(#[from] Damage),
}

/// Makes a state of holes. It gets its name when it is complete.
pub fn create(path: &Path, layout: &Layout) -> Result<Pool<Shared>, StateError> {
    let new = path.with_extension("new");
    let file = File::options().read(true).write(true).create(true).truncate(true).open(&new)?;
    let size = (layout.words() * 8).next_multiple_of(PAGE_SIZE);
    file.set_len(size as u64)?;
    let pool = Pool::create(Shared::new(Mapping::shared(&file, 0, size)?), layout)?;
    std::fs::rename(&new, path)?;
    Ok(pool)
}

/// Opens one; `None`: there is none.
pub fn open(path: &Path) -> Result<Option<Pool<Shared>>, StateError> {
    let file = match File::options().read(true).write(true).open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file?,
    };
    let size = file.metadata()?.len() as usize / PAGE_SIZE * PAGE_SIZE;
    if size == 0 {
        return Err(Damage::Header("the file is empty".into()).into());
    }
    Ok(Some(Pool::open(Shared::new(Mapping::shared(&file, 0, size)?))?.0))
}
