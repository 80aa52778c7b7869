//! Journal of a change: the number of huge pages that do not belong to the pool, while the pool's number changes.
//!
//! Before: `reserve` is about to change how many pages the kernel reserves. After: it has changed them. If the owner
//! dies in between, the next owner sets the kernel's number to the noted number plus the number that the pool has by
//! its state.
//! Promise: the file exists completely or not at all.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// Pages that do not belong to the pool, by node number.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Others(pub BTreeMap<u32, u64>);

#[derive(Debug)]
pub struct Journal(PathBuf);

impl Journal {
    pub fn at(dir: &Path) -> Self {
        Self(dir.join("journal.json"))
    }

    /// Notes that a change begins.
    pub fn begin(&self, others: &Others) -> io::Result<()> {
        store(&self.0, others)
    }

    pub fn end(&self) -> io::Result<()> {
        remove(&self.0)
    }

    /// Returns the change that was under way when the last owner of the pool ended.
    pub fn pending(&self) -> io::Result<Option<Others>> {
        load(&self.0)
    }
}

/// Writes a small file atomically.
pub fn store<T: Serialize>(path: &Path, value: &T) -> io::Result<()> {
    let new = path.with_extension("new");
    std::fs::write(&new, serde_json::to_vec(value)?)?;
    std::fs::rename(&new, path)
}

pub fn remove(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

pub fn load<T: DeserializeOwned>(path: &Path) -> io::Result<Option<T>> {
    match std::fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        bytes => Ok(Some(serde_json::from_slice(&bytes?)?)),
    }
}
