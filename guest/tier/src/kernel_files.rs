//! Files of `/proc` and `/sys`: read and written whole, with the path in every error.
//!
//! Before: a root directory, which is `/` except in tests. After: trimmed text and numbers. Threads: any.
//! Promise: an error names the file and the operation; a file without a number is an error and not a zero.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

fn doing<T>(path: &Path, what: &str, result: io::Result<T>) -> io::Result<T> {
    result.map_err(|error| io::Error::new(error.kind(), format!("{what} {}: {error}", path.display())))
}

/// Returns the text of a file, trimmed.
pub fn read(path: impl AsRef<Path>) -> io::Result<String> {
    let path = path.as_ref();
    let read = doing(path, "Reading", fs::read(path))?;
    Ok(String::from_utf8_lossy(&read).trim().to_owned())
}

/// Writes a value to a file of the kernel.
pub fn write(path: impl AsRef<Path>, value: impl ToString) -> io::Result<()> {
    let path = path.as_ref();
    doing(path, "Writing", fs::write(path, value.to_string()))
}

/// Where `/proc` and `/sys` are.
#[derive(Clone, Debug)]
pub struct Files {
    root: PathBuf,
}

impl Default for Files {
    fn default() -> Self {
        Self::below(Path::new("/"))
    }
}

impl Files {
    /// Below this directory.
    pub fn below(root: &Path) -> Self {
        Self { root: root.into() }
    }

    /// A path that begins with `/proc` or `/sys`.
    pub fn path(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    /// Its text, trimmed.
    pub fn text(&self, path: &str) -> io::Result<String> {
        read(self.path(path))
    }

    /// Its text, trimmed; `None` if there is no such file.
    pub fn optional(&self, path: &str) -> io::Result<Option<String>> {
        match self.text(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            // ESRCH: the file of a process that has just ended.
            Err(error) if error.raw_os_error() == Some(3) => Ok(None),
            other => other.map(Some),
        }
    }

    /// Its number.
    pub fn number(&self, path: &str) -> io::Result<u64> {
        let text = self.text(path)?;
        text.parse().map_err(|_| io::Error::other(format!("{} holds no number: {text:?}", self.path(path).display())))
    }

    /// Writes a value to a file.
    pub fn write(&self, path: &str, value: impl ToString) -> io::Result<()> {
        write(self.path(path), value)
    }

    /// The names in a directory; none if it is not there.
    pub fn names(&self, path: &str) -> io::Result<Vec<String>> {
        let path = self.path(path);
        let entries = match fs::read_dir(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => doing(&path, "Listing", entries)?,
        };
        let mut names = Vec::new();
        for entry in entries {
            names.push(doing(&path, "Listing", entry)?.file_name().to_string_lossy().into_owned());
        }
        names.sort_unstable();
        Ok(names)
    }

    /// The numbers that follow `prefix` in the names of a directory, ascending.
    pub fn numbered(&self, path: &str, prefix: &str) -> io::Result<Vec<u32>> {
        let names = self.names(path)?;
        let mut numbers: Vec<u32> = names.iter().filter_map(|name| name.strip_prefix(prefix)?.parse().ok()).collect();
        numbers.sort_unstable();
        Ok(numbers)
    }
}

/// A list as the kernel writes it: `0-3,5`. Words that are no number are left out.
pub fn list(text: &str) -> Vec<u32> {
    let part = |part: &str| {
        let (first, last) = part.trim().split_once('-').unwrap_or((part.trim(), part.trim()));
        let (first, last) = (first.parse::<u32>().ok()?, last.parse::<u32>().ok()?);
        (first <= last).then_some(first..=last)
    };
    text.split(',').filter_map(part).flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_and_nonsense_is_left_out() {
        assert_eq!(list("0-3,5\n"), [0, 1, 2, 3, 5]);
        assert_eq!(list("7"), [7]);
        assert_eq!(list(""), [0; 0]);
        assert_eq!(list("3-1,x,2-,1"), [1]);
    }

    #[test]
    fn an_error_names_the_file_and_what_is_missing_is_none() {
        let root = tempfile::tempdir().expect("directory");
        let files = Files::below(root.path());
        std::fs::create_dir(root.path().join("proc")).expect("directory");
        std::fs::write(root.path().join("proc/x"), "lots\n").expect("file");
        assert!(
            files.number("/proc/x").expect_err("no number").to_string().contains("proc/x holds no number: \"lots\"")
        );
        assert!(files.text("/proc/y").expect_err("none").to_string().contains("Reading"));
        assert_eq!(files.optional("/proc/y").expect("none"), None);
        assert_eq!(files.names("/sys").expect("none"), [""; 0]);
    }
}
