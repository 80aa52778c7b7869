//! Swap for a test or a demo: what the host has, or a zram device of its own.
//!
//! Before: a test needs the kernel to page memory out. After: the kernel can, until [`Swap`] is dropped.
//! Threads: any; a second one waits, in this process or another. Promise: a device in use is not touched, and all is as
//! it was when it is dropped.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// Where zram devices are. A lock on it is a lock on the host's swap, also for `ballast bench`.
const BLOCK: &str = "/sys/block";

/// Undoes all when its input ends, however this process ends.
const GUARD: &str = r#"trap '' INT TERM HUP; cat >/dev/null; swapoff "$1"; echo 1 >"$2/reset""#;

/// Swap that is there while this is.
#[derive(Debug)]
pub struct Swap {
    /// It undoes what was done, if anything was.
    guard: Option<Child>,
    _lock: Option<File>,
}

impl Swap {
    /// Take the host's swap, or make some of this size.
    ///
    /// # Errors
    /// The reason why there is none.
    pub fn new(size: &str) -> Result<Self, String> {
        let of = |what: &Path, error: std::io::Error| format!("{}: {error}", what.display());
        let lock = File::open(BLOCK).and_then(|lock| lock.lock().map(|()| lock));
        let lock = lock.map_err(|error| of(Path::new(BLOCK), error))?;
        let swaps = fs::read_to_string("/proc/swaps").map_err(|error| of(Path::new("/proc/swaps"), error))?;
        if swaps.lines().count() > 1 {
            return Ok(Self { guard: None, _lock: None });
        }
        let entries = fs::read_dir(BLOCK).map_err(|error| of(Path::new(BLOCK), error))?.flatten();
        let is_zram = |entry: &fs::DirEntry| entry.file_name().to_string_lossy().starts_with("zram");
        let is_unused = |path: &PathBuf| fs::read_to_string(path.join("disksize")).is_ok_and(|text| text.trim() == "0");
        let unused = entries.filter(is_zram).map(|entry| entry.path()).find(is_unused);
        let block = unused.ok_or("there is no zram device that is not in use")?;
        let device = Path::new("/dev").join(block.file_name().unwrap_or_default());
        // Its compression is set before its size. Not every kernel has this one.
        let _ = fs::write(block.join("comp_algorithm"), "lz4");
        let mut guard = Command::new("sh");
        let guard = guard.args(["-c", GUARD, "sh"]).args([&device, &block]).stdin(Stdio::piped()).stderr(Stdio::null());
        let guard = guard.spawn().map_err(|error| of(Path::new("sh"), error))?;
        let swap = Self { guard: Some(guard), _lock: Some(lock) };
        fs::write(block.join("disksize"), size).map_err(|error| of(&block, error))?;
        for program in ["mkswap", "swapon"] {
            let done = Command::new(program).arg(&device).output().map_err(|error| of(Path::new(program), error))?;
            if !done.status.success() {
                return Err(format!("{program}: {}", String::from_utf8_lossy(&done.stderr)));
            }
        }
        Ok(swap)
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        let Some(guard) = &mut self.guard else { return };
        drop(guard.stdin.take());
        let _ = guard.wait();
    }
}
