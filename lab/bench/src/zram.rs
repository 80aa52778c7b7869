//! The kernel's swap for a bench: a zram device as the only swap, with Ballast's compression where the kernel has it; or a
//! file on a disk.
//!
//! Before: root, an unused zram device, no other swap. After: everything is as it was.
//! Threads: one. Units: bytes. Promise: a device that is in use is never touched, and what was changed is put back when
//! [`Swap`] is dropped, in reverse order. Two benches do not disturb each other: the second waits for the first. What a
//! bench left that was killed together with its guard is put back by the next ([`crate::leftover`]).

use std::fs::{self, File};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use ballast_base::{Bytes, GIB, PAGE_SIZE};
use ballast_sys::swap;
use rustix::fs::{FallocateFlags, FlockOperation, flock};

use crate::guard::warn;
use crate::leftover;

/// Address space of the device; memory is used as pages arrive.
const SIZE: Bytes = Bytes(8 * GIB);
const BLOCK: &str = "/sys/block";
pub(crate) const PAGE_CLUSTER: &str = "/proc/sys/vm/page-cluster";
pub(crate) const ZSWAP: &str = "/sys/module/zswap/parameters/enabled";

/// A setting that has its old value again when this is dropped.
#[derive(Debug)]
pub struct Setting {
    path: PathBuf,
    before: String,
}

impl Setting {
    /// Change it; `None` if it has this value already.
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

impl Setting {
    /// One that was changed before, by a bench that did not live to put it back.
    pub fn changed(path: PathBuf, before: String) -> Self {
        Self { path, before }
    }

    /// Where it is, and its old value.
    pub fn before(&self) -> (&Path, &str) {
        (&self.path, &self.before)
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
fn selected(text: &str) -> &str {
    let chosen = text.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
    chosen.map_or(text.trim(), |(word, _)| word)
}

/// A sized zram device: empty and without memory again when dropped.
#[derive(Debug)]
pub(crate) struct Sized(pub PathBuf);

impl Drop for Sized {
    fn drop(&mut self) {
        warn(&format!("resetting {}", self.0.display()), fs::write(self.0.join("reset"), "1"));
    }
}

/// An active swap device.
#[derive(Debug)]
pub(crate) struct Active(pub PathBuf);

impl Drop for Active {
    fn drop(&mut self) {
        warn(&format!("ending swap on {}", self.0.display()), swap::off(&self.0));
    }
}

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

/// A file that is removed when this is dropped.
#[derive(Debug)]
pub(crate) struct Named(pub PathBuf);

impl Drop for Named {
    fn drop(&mut self) {
        warn(&format!("removing {}", self.0.display()), fs::remove_file(&self.0));
    }
}

/// Wait for other benches, and make sure that there is no other swap.
fn alone() -> Result<File> {
    let lock = lock()?;
    leftover::put_back()?;
    if let Some(other) = swaps()?.first() {
        bail!("another swap device is active ({other}): what it takes could not be told apart (swapoff {other})");
    }
    Ok(lock)
}

/// Held by whoever changes the machine.
pub(crate) fn lock() -> Result<File> {
    ensure!(rustix::process::geteuid().is_root(), "the kernel's swap can be measured by root only");
    let lock = File::open(BLOCK).with_context(|| format!("Opening {BLOCK}"))?;
    if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
        eprintln!("ballast bench: waiting for another bench to end");
        flock(&lock, FlockOperation::LockExclusive).context("Waiting for another bench")?;
    }
    Ok(lock)
}

/// One page at a time, as Ballast; and no compressed pool in front of the device.
fn plainly(settings: &mut Vec<Setting>) -> Result<()> {
    settings.extend(Setting::change(PAGE_CLUSTER, "0")?);
    let zswap = Path::new(ZSWAP);
    if zswap.exists() {
        settings.extend(Setting::change(zswap, "N")?);
    }
    Ok(())
}

/// The zram devices: their directories in sysfs, their nodes, and whether somebody uses them.
pub(crate) fn devices() -> Result<Vec<(PathBuf, PathBuf, bool)>> {
    let mut devices = Vec::new();
    for entry in fs::read_dir(BLOCK).with_context(|| format!("Reading {BLOCK}"))? {
        let block = entry?.path();
        let Some(name) = block.file_name().and_then(|name| name.to_str()).filter(|name| name.starts_with("zram"))
        else {
            continue;
        };
        let device = Path::new("/dev").join(name);
        let used = read(&block.join("disksize"))?.trim() != "0";
        devices.push((block.clone(), device, used));
    }
    Ok(devices)
}

/// A zram device nobody uses: its directory in sysfs and its node.
fn unused() -> Result<(PathBuf, PathBuf)> {
    let devices = devices()?;
    let found = devices.len();
    match devices.into_iter().find(|(_, device, used)| !used && device.exists()) {
        Some((block, device, _)) => Ok((block, device)),
        None if found == 0 => bail!("the kernel has no zram device (modprobe zram)"),
        None => bail!("all {found} zram devices are in use (one more: cat /sys/class/zram-control/hot_add)"),
    }
}

/// The active swap devices.
pub(crate) fn swaps() -> Result<Vec<String>> {
    let text = read(Path::new("/proc/swaps"))?;
    Ok(text.lines().skip(1).filter_map(|line| line.split_ascii_whitespace().next()).map(str::to_owned).collect())
}

/// Pages on all swap devices.
pub(crate) fn used_pages() -> Result<u64> {
    let text = read(Path::new("/proc/swaps"))?;
    let used_kib = |line: &str| line.split_ascii_whitespace().nth(3)?.parse::<u64>().ok();
    Ok(text.lines().skip(1).filter_map(used_kib).sum::<u64>() * 1024 / PAGE_SIZE as u64)
}

/// Memory a zram device of this name uses for its pages, in bytes; and its compression.
pub(crate) fn used(device: &Path) -> Result<(u64, String)> {
    let block = Path::new(BLOCK).join(device.file_name().context("a device has a name")?);
    let stat = read(&block.join("mm_stat"))?;
    let used = stat.split_ascii_whitespace().nth(2).and_then(|bytes| bytes.parse().ok());
    Ok((
        used.with_context(|| format!("mm_stat says {stat:?}"))?,
        selected(&read(&block.join("comp_algorithm"))?).into(),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_needs::skip;

    /// What a bench may change, as it is now.
    fn machine() -> Vec<String> {
        let zram = |file| fs::read_to_string(Path::new("/sys/block/zram0").join(file)).unwrap_or_default();
        let page_cluster = fs::read_to_string("/proc/sys/vm/page-cluster").expect("page-cluster");
        vec![zram("disksize"), zram("comp_algorithm"), page_cluster, format!("{:?}", swaps().expect("swaps"))]
    }

    /// The same while no bench runs, without what one left. `None`, said aloud, if that cannot be had.
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
        // Taken before the look at the machine, so that a bench that runs meanwhile is waited for.
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
    fn what_a_bench_left_that_died_with_its_guard_is_put_back_by_the_next() {
        let Some(before) = machine_before() else { return };
        let dir = tempfile::tempdir().expect("a directory");
        match Swap::new() {
            // What a killed process leaves: everything but its lock.
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
