//! A memory cgroup of the bench's own, version 1 or 2.
//!
//! Before: this is root, and a memory controller is mounted. After: the cgroup is removed; its processes have ended.
//! Threads: one. Promise: no other cgroup is changed, except that the root of version 2 enables the memory controller
//! for its children if it does not yet, which is undone.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::setting::warn;

const REMOVAL_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest time in which the kernel must bring the memory below a new limit.
const LIMIT: Duration = Duration::from_secs(60);
pub(crate) const UNLIMITED: u64 = 1 << 50;

#[derive(Debug)]
pub struct Cgroup {
    path: PathBuf,
    /// The file in which the memory controller was enabled for us.
    handed_down: Option<PathBuf>,
}

/// The directory of memory cgroups, and the name of the file that limits a cgroup.
fn root() -> Result<(PathBuf, &'static str)> {
    let mounts = fs::read_to_string("/proc/mounts").context("Reading /proc/mounts")?;
    root_in(&mounts, |path| {
        fs::read_to_string(path.join("cgroup.controllers"))
            .is_ok_and(|text| text.split(' ').any(|w| w.trim() == "memory"))
    })
}

fn root_in(mounts: &str, has_memory: impl Fn(&Path) -> bool) -> Result<(PathBuf, &'static str)> {
    for line in mounts.lines() {
        let mut words = line.split(' ');
        let (Some(path), Some(kind), Some(options)) = (words.nth(1), words.next(), words.next()) else { continue };
        if kind == "cgroup" && options.split(',').any(|option| option == "memory") {
            return Ok((path.into(), "memory.limit_in_bytes"));
        }
        if kind == "cgroup2" && has_memory(Path::new(path)) {
            return Ok((path.into(), "memory.max"));
        }
    }
    bail!("no memory cgroup controller is mounted")
}

impl Cgroup {
    pub fn new(name: &str) -> Result<Self> {
        let (root, limit) = root()?;
        let mut handed_down = None;
        if limit == "memory.max" {
            let control = root.join("cgroup.subtree_control");
            let text = fs::read_to_string(&control).with_context(|| format!("Reading {}", control.display()))?;
            if !text.split_ascii_whitespace().any(|word| word == "memory") {
                fs::write(&control, "+memory").with_context(|| format!("Writing {}", control.display()))?;
                handed_down = Some(control);
            }
        }
        let path = root.join(name);
        // The value exists first, so that its drop disables the controller again if this fails.
        let cgroup = Self { path, handed_down };
        fs::create_dir(&cgroup.path).with_context(|| format!("Making the cgroup {}", cgroup.path.display()))?;
        Ok(cgroup)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Limits the memory of a cgroup made by [`Cgroup::new`]. Version 1 is asked again when it gives up.
pub fn limit(cgroup: &Path, bytes: u64) -> Result<()> {
    let (_, file) = root()?;
    let (file, start) = (cgroup.join(file), Instant::now());
    loop {
        match fs::write(&file, bytes.to_string()) {
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) && start.elapsed() < LIMIT => {}
            other => return other.with_context(|| format!("Writing {bytes} to {}", file.display())),
        }
    }
}

pub fn enter(cgroup: &Path, pid: u32) -> Result<()> {
    fs::write(cgroup.join("cgroup.procs"), pid.to_string())
        .with_context(|| format!("Moving {pid} to {}", cgroup.display()))
}

pub fn usage(cgroup: &Path) -> Result<u64> {
    let (_, file) = root()?;
    let file = cgroup.join(if file == "memory.max" { "memory.current" } else { "memory.usage_in_bytes" });
    let text = fs::read_to_string(&file).with_context(|| format!("Reading {}", file.display()))?;
    text.trim().parse().with_context(|| format!("{} says {text:?}", file.display()))
}

/// Lets the kernel reclaim as much of a cgroup as it can. Ignores its error, which says only that some memory stayed.
pub fn empty(cgroup: &Path) {
    // Version 2 has `memory.reclaim`, version 1 has `memory.force_empty`.
    let all = (1u64 << 40).to_string();
    let _ =
        fs::write(cgroup.join("memory.reclaim"), all).or_else(|_| fs::write(cgroup.join("memory.force_empty"), "0"));
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let start = Instant::now();
        let removed = loop {
            match fs::remove_dir(&self.path) {
                // The processes of the cgroup are ending; there is no event to wait for.
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) && start.elapsed() < REMOVAL_TIMEOUT => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => break Ok(()),
                result => break result,
            }
        };
        warn(&format!("removing the cgroup {}", self.path.display()), removed);
        if let Some(control) = &self.handed_down {
            warn(&format!("putting {} back", control.display()), fs::write(control, "-memory"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_testkit::skip;

    #[test]
    fn version_1_is_found_by_its_option_and_version_2_by_its_controllers() {
        let v1 = "cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\ncgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0\n";
        assert_eq!(root_in(v1, |_| false).expect("found").0, Path::new("/sys/fs/cgroup/memory"));
        let v2 = "cgroup2 /sys/fs/cgroup cgroup2 rw,nsdelegate 0 0\n";
        assert_eq!(root_in(v2, |_| true).expect("found"), ("/sys/fs/cgroup".into(), "memory.max"));
        assert!(root_in(v2, |_| false).expect_err("none").to_string().contains("no memory cgroup"));
    }

    #[test]
    fn a_cgroup_takes_a_limit_and_is_gone_afterwards() {
        let name = format!("ballast-bench-test-{}", std::process::id());
        let cgroup = match Cgroup::new(&name) {
            Ok(cgroup) => cgroup,
            Err(error) => return skip("cgroup", format_args!("{error:#}")),
        };
        let path = cgroup.path().to_owned();
        limit(&path, 64 << 20).expect("limit");
        assert_eq!(usage(&path).expect("usage"), 0);
        assert!(path.exists());
        drop(cgroup);
        assert!(!path.exists());
    }
}
