//! The number of huge pages that are not the pool's, while that of the pool changes.
//!
//! Before: `reserve` is about to change how many pages the kernel reserves. After: it has. If it dies in between, the
//! next owner sets the number to what was noted and what the state says that the pool has.
//! Promise: the file is there as a whole, or not at all.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// For each node by its number: pages of others.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Others(pub BTreeMap<u32, u64>);

/// Where it is.
#[derive(Debug)]
pub struct Journal(PathBuf);

impl Journal {
    /// In this directory.
    pub fn at(dir: &Path) -> Self {
        Self(dir.join("journal.json"))
    }

    /// A change begins.
    pub fn begin(&self, others: &Others) -> io::Result<()> {
        store(&self.0, others)
    }

    /// It is done.
    pub fn end(&self) -> io::Result<()> {
        remove(&self.0)
    }

    /// What was under way when the last owner ended.
    pub fn pending(&self) -> io::Result<Option<Others>> {
        load(&self.0)
    }
}

/// Write a small file as a whole.
pub fn store<T: Serialize>(path: &Path, value: &T) -> io::Result<()> {
    let new = path.with_extension("new");
    std::fs::write(&new, serde_json::to_vec(value)?)?;
    std::fs::rename(&new, path)
}

/// Remove it, if it is there.
pub fn remove(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Read it; `None`: it is not there.
pub fn load<T: DeserializeOwned>(path: &Path) -> io::Result<Option<T>> {
    match std::fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        bytes => Ok(Some(serde_json::from_slice(&bytes?)?)),
    }
}
