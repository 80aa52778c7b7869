//! Swap for a test, a bench or a demo: the host's own, or a new zram device or file.
//!
//! Before: the kernel must page memory out. After: the kernel can, until [`Swap`] is dropped. Threads: any; a second
//! user waits, in this process or another. Promise: a device in use is not touched, and everything is as before when
//! the value is dropped or this process has ended in any way.

use std::fs::{self, File};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// The directory of block devices. A lock on it is a lock on the host's swap.
const BLOCK: &str = "/sys/block";
const PAGE_CLUSTER: &str = "/proc/sys/vm/page-cluster";
const ZSWAP: &str = "/sys/module/zswap/parameters/enabled";

/// Undoes everything when its input ends, even if this process is killed: the first word is the swap, the others are
/// files and the text to write into each. Its output is the lock, which is free when the script has ended.
const GUARD: &str = r#"trap '' INT TERM HUP; cat >/dev/null; swap=$1; shift
swapoff "$swap"; [ ! -f "$swap" ] || rm "$swap"
while [ $# -gt 0 ]; do
    # A killed process leaves its mkswap or swapon behind, which uses the device.
    tries=0; until echo "$2" >"$1" || [ $((tries += 1)) -gt 100 ]; do swapoff "$swap"; sleep 0.1; done
    shift 2
done"#;

/// Swap that is active while this value lives.
#[derive(Debug)]
pub struct Swap {
    device: PathBuf,
    /// Undoes the changes, if there were any.
    guard: Option<Child>,
}

fn read(path: &Path) -> Result<String, String> {
    fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))
}

fn write(path: &Path, text: &str) -> Result<(), String> {
    fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))
}

fn run(program: &str, words: &[&Path]) -> Result<(), String> {
    let done = Command::new(program).args(words).output().map_err(|error| format!("{program}: {error}"))?;
    let said = || format!("{program}: {}", String::from_utf8_lossy(&done.stderr).trim_end());
    done.status.success().then_some(()).ok_or_else(said)
}

/// The lock, and the first active swap.
fn lock() -> Result<(File, Option<PathBuf>), String> {
    let lock = File::open(BLOCK).and_then(|lock| {
        if lock.try_lock().is_err() {
            eprintln!("waiting for another user of the host's swap to end");
            lock.lock()?;
        }
        Ok(lock)
    });
    let lock = lock.map_err(|error| format!("{BLOCK}: {error}"))?;
    let swaps = read(Path::new("/proc/swaps"))?;
    Ok((lock, swaps.lines().nth(1).and_then(|line| line.split_ascii_whitespace().next()).map(PathBuf::from)))
}

/// The lock, if there is no swap.
fn alone() -> Result<File, String> {
    match lock()? {
        (lock, None) => Ok(lock),
        (_, Some(other)) => Err(format!("another swap is active (swapoff {})", other.display())),
    }
}

/// Settings with which the kernel swaps in single pages, without a compressed pool before the device; and their values.
fn plain() -> Result<Vec<(PathBuf, &'static str, String)>, String> {
    let settings = [(PAGE_CLUSTER, "0"), (ZSWAP, "N")].map(|(path, value)| (PathBuf::from(path), value));
    let there = settings.into_iter().filter(|(path, _)| path.exists());
    there.map(|(path, value)| Ok((path.clone(), value, read(&path)?))).collect()
}

impl Swap {
    /// Take the host's swap, or make some of this size in a zram device.
    pub fn new(size: &str) -> Result<Self, String> {
        match lock()? {
            (_, Some(device)) => Ok(Self { device, guard: None }),
            (lock, None) => Self::zram(lock, size, Vec::new()),
        }
    }

    /// Make the only swap, of this size in a zram device. The kernel swaps in one page at a time.
    pub fn only(size: &str) -> Result<Self, String> {
        Self::zram(alone()?, size, plain()?)
    }

    /// As [`Self::only`], in a file of this directory.
    pub fn only_file(dir: &Path, bytes: u64) -> Result<Self, String> {
        let path = dir.join(format!(".ballast-swap-{}", std::process::id()));
        Self::make(alone()?, &path, plain()?, Vec::new(), || {
            let file = File::options().write(true).create_new(true).mode(0o600).open(&path);
            file.map_err(|error| format!("{}: {error}", path.display()))?;
            // Allocated completely, since a swap file has no holes.
            run("fallocate", &[Path::new("-l"), Path::new(&bytes.to_string()), &path])
        })
    }

    fn zram(lock: File, size: &str, settings: Vec<(PathBuf, &'static str, String)>) -> Result<Self, String> {
        let entries = fs::read_dir(BLOCK).map_err(|error| format!("{BLOCK}: {error}"))?.flatten();
        let is_zram = |entry: &fs::DirEntry| entry.file_name().to_string_lossy().starts_with("zram");
        let is_unused = |path: &PathBuf| read(&path.join("disksize")).is_ok_and(|text| text.trim() == "0");
        let unused = entries.filter(is_zram).map(|entry| entry.path()).find(is_unused);
        let block = unused.ok_or("there is no zram device that is not in use (modprobe zram)")?;
        let device = Path::new("/dev").join(block.file_name().unwrap_or_default());
        let algorithm = block.join("comp_algorithm");
        let (choices, mut undo) = (read(&algorithm)?, vec![(block.join("reset"), "1".to_owned())]);
        let before = choices.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
        undo.extend(before.map(|(before, _)| (algorithm.clone(), before.to_owned())));
        Self::make(lock, &device, settings, undo, || {
            // The algorithm must be set before the size. Not every kernel has lz4.
            let _ = fs::write(&algorithm, "lz4");
            write(&block.join("disksize"), size)
        })
    }

    fn make(
        lock: File,
        device: &Path,
        settings: Vec<(PathBuf, &'static str, String)>,
        mut undo: Vec<(PathBuf, String)>,
        make: impl FnOnce() -> Result<(), String>,
    ) -> Result<Self, String> {
        undo.extend(settings.iter().map(|(path, _, before)| (path.clone(), before.trim().to_owned())));
        let mut guard = Command::new("sh");
        guard.args(["-c", GUARD, "sh"]).arg(device);
        for (path, value) in undo {
            guard.arg(path).arg(value);
        }
        let guard = guard.stdin(Stdio::piped()).stdout(lock).stderr(Stdio::null()).spawn();
        // From here on the drop of `swap` undoes everything after an error.
        let swap = Self { device: device.into(), guard: Some(guard.map_err(|error| format!("sh: {error}"))?) };
        settings.iter().try_for_each(|(path, value, _)| write(path, value))?;
        make()?;
        run("mkswap", &[device])?;
        run("swapon", &[device])?;
        Ok(swap)
    }

    /// Its device or file.
    pub fn device(&self) -> &Path {
        &self.device
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        let Some(guard) = &mut self.guard else { return };
        drop(guard.stdin.take());
        let _ = guard.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The settings that may change, read while nobody has the lock.
    fn machine() -> Result<String, String> {
        let _lock = alone()?;
        let files =
            ["/sys/block/zram0/disksize", "/sys/block/zram0/comp_algorithm", PAGE_CLUSTER, ZSWAP, "/proc/swaps"];
        Ok(files.map(|path| fs::read_to_string(path).unwrap_or_default()).concat())
    }

    #[test]
    fn it_is_the_only_swap_while_it_lives_and_leaves_nothing() {
        let before = match machine() {
            Ok(before) => before,
            Err(why) => return crate::skip("swap", why),
        };
        let dir = std::env::temp_dir();
        for needs in ["zram", "swapfile"] {
            let made = if needs == "zram" { Swap::only("64M") } else { Swap::only_file(&dir, 16 << 20) };
            let swap = match made {
                Ok(swap) => swap,
                Err(why) => {
                    crate::skip(needs, why);
                    continue;
                }
            };
            let swaps = fs::read_to_string("/proc/swaps").expect("read");
            assert!(swaps.lines().count() == 2 && swaps.contains(&*swap.device().to_string_lossy()), "{swaps}");
            assert_eq!(fs::read_to_string(PAGE_CLUSTER).expect("read").trim(), "0");
            let file = swap.device().to_owned();
            drop(swap);
            assert_eq!(machine().expect("no swap"), before);
            assert!(!file.is_file(), "{} is left", file.display());
        }
    }
}
