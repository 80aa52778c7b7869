//! Describes the machine of the measurement, and the build.
//!
//! Promise: it only reads; an unreadable value is null.

use std::fs;
use std::process::Command;

use anyhow::{Context, Result};
use ballast_sys::meminfo;
use serde_json::{Value, json};

/// Is this a release build?
pub fn is_release() -> bool {
    !cfg!(debug_assertions)
}

/// The description of the machine that is in every row.
pub fn describe() -> Value {
    let read = |path: &str| fs::read_to_string(path).ok().map(|text| text.trim().to_owned());
    let field = |path, key: &str| {
        let text = read(path)?;
        let line = text.lines().find(|line| line.starts_with(key))?.split_once(':')?.1.trim().to_owned();
        Some(line)
    };
    let huge = "/sys/kernel/mm/transparent_hugepage";
    let load = read("/proc/loadavg").and_then(|text| text.split(' ').next()?.parse::<f64>().ok());
    json!({
        "cpu": field("/proc/cpuinfo", "model name"),
        "cpus": std::thread::available_parallelism().ok().map(usize::from),
        "kernel": read("/proc/sys/kernel/osrelease"),
        "virtualised": field("/proc/cpuinfo", "flags").map(|flags| flags.split(' ').any(|flag| flag == "hypervisor")),
        "mem_total_bytes": meminfo::bytes("MemTotal"),
        "mem_available_bytes": meminfo::bytes("MemAvailable"),
        "load_at_start": load,
        "thp": read(&format!("{huge}/enabled")),
        "thp_shmem": read(&format!("{huge}/shmem_enabled")),
        "clocksource": read("/sys/devices/system/clocksource/clocksource0/current_clocksource"),
        "revision": revision(),
        "build": if is_release() { "release" } else { "debug" },
    })
}

pub(crate) fn rss_anon(pid: u32) -> Result<u64> {
    let path = format!("/proc/{pid}/status");
    let text = fs::read_to_string(&path).with_context(|| format!("Reading {path}"))?;
    meminfo::number_in(&text, "RssAnon").map(|kib| kib * 1024).with_context(|| format!("{path} has no RssAnon"))
}

/// The revision of the sources of this build, if they are still there and under git.
fn revision() -> Option<String> {
    let git = Command::new("git")
        .args(["-C", env!("CARGO_MANIFEST_DIR"), "describe", "--always", "--dirty", "--abbrev=12"])
        .output()
        .ok()?;
    let text = String::from_utf8(git.stdout).ok()?;
    Some(text.trim().to_owned()).filter(|text| git.status.success() && !text.is_empty())
}
