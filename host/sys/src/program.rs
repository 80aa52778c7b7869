//! Finds another program: beside this one, else on `PATH`.
//!
//! Before: a command needs another program. After: it has the path, to start the program or exec it.
//! Threads: any. Promise: a program beside this one comes first, so that programs of one build run together.

use std::io;
use std::path::PathBuf;

/// The path of the program with this file name, or an error that lists where it was searched.
pub fn find(name: &str) -> io::Result<PathBuf> {
    let own = std::env::current_exe()?;
    let path = std::env::var_os("PATH").unwrap_or_default();
    let beside = own.with_file_name(name);
    // An entry that is not absolute depends on the current directory, where another user's program may be.
    let listed = std::env::split_paths(&path).filter(|place| place.is_absolute()).map(|place| place.join(name));
    std::iter::once(beside.clone()).chain(listed).find(|file| file.is_file()).ok_or_else(|| {
        io::Error::new(io::ErrorKind::NotFound, format!("{name} is neither at {} nor on PATH", beside.display()))
    })
}
