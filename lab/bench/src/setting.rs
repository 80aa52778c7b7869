//! A setting of the machine that is restored to its old value.
//!
//! Before: this is root, and a setting has a file in `/proc` or `/sys`. After: the value is as it was.
//! Threads: one. Units: none. Promise: a value that could not be restored is named on standard error.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

pub(crate) fn warn(what: &str, result: std::io::Result<()>) {
    if let Err(error) = result {
        eprintln!("ballast bench: {what}: {error}");
    }
}

#[derive(Debug)]
pub struct Setting {
    path: PathBuf,
    before: String,
}

impl Setting {
    /// Change a setting; `None` if it has this value already.
    pub fn change(path: impl Into<PathBuf>, value: &str) -> Result<Option<Self>> {
        let path = path.into();
        let before = selected(&read(&path)?).to_owned();
        if before == value {
            return Ok(None);
        }
        fs::write(&path, value).with_context(|| format!("Writing {value:?} to {}", path.display()))?;
        Ok(Some(Self { path, before }))
    }
}

impl Drop for Setting {
    fn drop(&mut self) {
        warn(
            &format!("putting {:?} back into {}", self.before, self.path.display()),
            fs::write(&self.path, &self.before),
        );
    }
}

pub(crate) fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("Reading {}", path.display()))
}

/// The word in brackets of a list of choices, or the whole text.
pub(crate) fn selected(text: &str) -> &str {
    let chosen = text.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
    chosen.map_or(text.trim(), |(word, _)| word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_setting_is_put_back_and_an_equal_one_is_left_alone() {
        let file = tempfile::NamedTempFile::new().expect("file");
        fs::write(file.path(), "[one] two\n").expect("write");
        assert!(Setting::change(file.path(), "one").expect("no change").is_none());
        let setting = Setting::change(file.path(), "two").expect("change");
        assert_eq!(fs::read_to_string(file.path()).expect("read"), "two");
        drop(setting);
        assert_eq!(fs::read_to_string(file.path()).expect("read"), "one");
    }
}
