//! The kernel's swap for a bench: a zram device as the only swap, with Ballast's compression where the kernel has it;
//! or a file on a disk.
//!
//! Before: this is root, and there is an unused zram device and no other swap. After: everything is as it was.
//! Threads: one. Units: bytes. Promise: a device in use is never touched, and every change is undone when [`Swap`] is
//! dropped, in reverse order. Two benches do not disturb each other: the second waits for the first. The next bench
//! restores what one left behind that was killed together with its guard ([`crate::leftover`]).

use std::fs::{self, File};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use crate::swap;
use anyhow::{Context, Result, bail};
use ballast_base::{Bytes, GIB};
use rustix::fs::FallocateFlags;

use crate::leftover;
use crate::setting::{Setting, read};
use crate::swaps::{Active, Named, PAGE_CLUSTER, Sized, ZSWAP, devices, lock, swaps};

/// Address space of the device; memory is used as pages arrive.
const SIZE: Bytes = Bytes(8 * GIB);

/// The kernel swaps to a zram device of ours. Fields are dropped in this order: the reverse of the making.
#[derive(Debug)]
pub struct Swap {
    active: Active,
    _sized: Sized,
    _settings: Vec<Setting>,
    _lock: File,
}

impl Swap {
    /// Make the device and swap to it.
    pub fn new() -> Result<Self> {
        let lock = alone()?;
        let (block, device) = unused()?;
        let mut settings = Vec::new();
        let algorithm = block.join("comp_algorithm");
        if read(&algorithm)?.split_ascii_whitespace().any(|word| word.trim_matches(['[', ']']) == "lz4") {
            settings.extend(Setting::change(algorithm, "lz4")?);
        }
        plainly(&mut settings)?;
        let disksize = block.join("disksize");
        fs::write(&disksize, SIZE.0.to_string()).with_context(|| format!("Writing {}", disksize.display()))?;
        let sized = Sized(block);
        swap::sign(&device, SIZE, &leftover::note(&settings))
            .with_context(|| format!("Writing a swap header to {}", device.display()))?;
        swap::on(&device, swap::TOP_PRIORITY).with_context(|| format!("Swapping to {}", device.display()))?;
        Ok(Self { active: Active(device), _sized: sized, _settings: settings, _lock: lock })
    }

    /// The device.
    pub fn device(&self) -> &Path {
        &self.active.0
    }
}

/// The kernel swaps to a file of ours. Fields are dropped in this order.
#[derive(Debug)]
pub struct SwapFile {
    active: Active,
    _named: Named,
    _settings: Vec<Setting>,
    _lock: File,
}

impl SwapFile {
    /// Make the file and swap to it.
    pub fn new(dir: &Path, size: Bytes) -> Result<Self> {
        let lock = alone()?;
        let mut settings = Vec::new();
        plainly(&mut settings)?;
        let path = dir.join(format!(".ballast-bench-swap-{}", std::process::id()));
        let file = File::options().write(true).create_new(true).mode(0o600).open(&path);
        let file = file.with_context(|| format!("Making {}", path.display()))?;
        let named = Named(path.clone());
        // All of it, since a swap file has no holes.
        rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, size.0)
            .with_context(|| format!("Allocating {size} for {}", path.display()))?;
        swap::sign(&path, size, &leftover::note(&settings))
            .with_context(|| format!("Writing a swap header to {}", path.display()))?;
        swap::on(&path, swap::TOP_PRIORITY).with_context(|| format!("Swapping to {}", path.display()))?;
        Ok(Self { active: Active(path), _named: named, _settings: settings, _lock: lock })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.active.0
    }
}

/// Wait for other benches, and make sure that there is no other swap.
fn alone() -> Result<File> {
    let lock = lock()?;
    leftover::put_back()?;
    if let Some(other) = swaps()?.first() {
        bail!("another swap device is active ({other}); its pages would count as the bench's (swapoff {other})");
    }
    Ok(lock)
}

/// Make the kernel swap in one page at a time, as Ballast does, with no compressed pool in front of the device.
fn plainly(settings: &mut Vec<Setting>) -> Result<()> {
    settings.extend(Setting::change(PAGE_CLUSTER, "0")?);
    let zswap = Path::new(ZSWAP);
    if zswap.exists() {
        settings.extend(Setting::change(zswap, "N")?);
    }
    Ok(())
}

/// A zram device that nobody uses: its directory in sysfs and its node.
fn unused() -> Result<(PathBuf, PathBuf)> {
    let devices = devices()?;
    let found = devices.len();
    match devices.into_iter().find(|(_, device, used)| !used && device.exists()) {
        Some((block, device, _)) => Ok((block, device)),
        None if found == 0 => bail!("the kernel has no zram device (modprobe zram)"),
        None => bail!("all {found} zram devices are in use (one more: cat /sys/class/zram-control/hot_add)"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::swaps::{used, used_pages};
    use ballast_testkit::skip;

    /// The settings that a bench may change, as they are now.
    fn machine() -> Vec<String> {
        let zram = |file| fs::read_to_string(Path::new("/sys/block/zram0").join(file)).unwrap_or_default();
        let page_cluster = fs::read_to_string("/proc/sys/vm/page-cluster").expect("page-cluster");
        vec![zram("disksize"), zram("comp_algorithm"), page_cluster, format!("{:?}", swaps().expect("swaps"))]
    }

    /// The settings while no bench runs, without leftovers. Prints a skip and returns `None` if that is impossible.
    fn machine_before() -> Option<Vec<String>> {
        let _held = match lock() {
            Ok(lock) => lock,
            Err(error) => {
                skip("root", format_args!("{error:#}"));
                return None;
            }
        };
        leftover::put_back().expect("what another left");
        Some(machine())
    }

    #[test]
    fn the_swap_is_the_only_one_while_it_lives_and_every_setting_is_put_back() {
        // Read under the lock, so that a bench that runs meanwhile is waited for.
        let Some(before) = machine_before() else { return };
        let swap = match Swap::new() {
            Ok(swap) => swap,
            Err(error) => return skip("zram", format_args!("{error:#}")),
        };
        assert_eq!(swaps().expect("swaps"), [swap.device().to_string_lossy()]);
        assert_eq!(fs::read_to_string("/proc/sys/vm/page-cluster").expect("page-cluster").trim(), "0");
        assert_eq!(used_pages().expect("used"), 0);
        used(swap.device()).expect("statistics");
        // The lock of a swap that is being dropped is given up last.
        drop(swap);
        let _held = lock().expect("lock");
        assert_eq!(machine(), before);
    }

    #[test]
    fn a_swap_file_is_the_only_swap_while_it_lives_and_leaves_nothing() {
        let Some(before) = machine_before() else { return };
        let dir = tempfile::tempdir().expect("a directory");
        let swap = match SwapFile::new(dir.path(), Bytes(16 << 20)) {
            Ok(swap) => swap,
            Err(error) => return skip("swapfile", format_args!("{error:#}")),
        };
        assert_eq!(swaps().expect("swaps"), [swap.path().to_string_lossy()]);
        drop(swap);
        let _held = lock().expect("lock");
        assert_eq!(machine(), before);
        assert_eq!(fs::read_dir(dir.path()).expect("read").count(), 0);
    }

    #[test]
    fn the_next_bench_puts_back_the_changes_of_one_killed_with_its_guard() {
        let Some(before) = machine_before() else { return };
        let dir = tempfile::tempdir().expect("a directory");
        match Swap::new() {
            // A killed process leaves everything but its lock.
            Ok(Swap { active, _sized, _settings, _lock }) => {
                std::mem::forget((active, _sized, _settings));
                drop(_lock);
            }
            Err(error) => return skip("zram", format_args!("{error:#}")),
        }
        match SwapFile::new(dir.path(), Bytes(16 << 20)) {
            Ok(SwapFile { active, _named, _settings, _lock }) => {
                std::mem::forget((active, _named, _settings));
                drop(_lock);
            }
            Err(error) => skip("swapfile", format_args!("{error:#}")),
        }
        let _held = lock().expect("lock");
        leftover::put_back().expect("put back");
        assert_eq!(machine(), before);
        assert_eq!(fs::read_dir(dir.path()).expect("read").count(), 0);
    }
}
