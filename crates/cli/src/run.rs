//! `ballast run`: start a VMM so that Ballast manages its guest RAM.
//!
//! Before: the operator's own command line. After: the same program in this process's place, with the preload library.
//! Promise: a VMM that could not be managed is not started, and the error says why. Without `--add-memory-backend`
//! and `--tiers` the command line is unchanged, but for three things at its end: QEMU gets one more monitor, for the
//! preload library alone; a balloon device for free page reporting, unless `--no-balloon` declines it; and with
//! `--agent` a virtio-serial port for the agent in the guest.

mod agent_port;
mod command_line;
mod free_pages;
mod monitor;
mod options;
mod stand_in;
mod tiers;

use std::convert::Infallible;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, anyhow, bail};
use ballast_base::pool::{Nodes, Pages};
use ballast_base::wire::check_name;
use ballast_base::{Bytes, HUGE_SIZE, PAGE_SIZE};
use ballast_sys::memfd;

use agent_port::AgentPort;
use command_line::{Backing, Edit, inspect};
use free_pages::{Reporting, reporting};
use monitor::Monitor;
use tiers::Tiers;

/// Start a VMM under Ballast, in place of this process.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: ballast run --limit 512M --add-memory-backend -- qemu-system-x86_64 -m 1G disk.qcow2")]
pub struct RunArgs {
    /// Name of the VM [default: QEMU's -name, else vm-PID]
    #[arg(long)]
    name: Option<String>,
    /// Most DRAM the VM may use, such as 512M
    #[arg(long)]
    limit: Option<Bytes>,
    /// Add the QEMU flags that make guest RAM a shared memfd, if they are missing
    #[arg(long)]
    add_memory_backend: bool,
    /// Take guest RAM from the pool, in pages of 2 MiB (2M, or mix, which has whole GiB of addresses first; on-demand:
    /// each when it is touched), of 1 GiB (1G), in which nothing is ever paged, or of 4 KiB (4K). QEMU only
    #[arg(long, value_name = "2M|mix|1G|on-demand|4K", conflicts_with_all = ["optional", "add_memory_backend"])]
    pool: Option<Pages>,
    /// Take it from these nodes: one (1), as much of each (0,1), or these amounts (0=3G,1=1G) [default: one that has it
    /// all, else as much of each]
    #[arg(long, value_name = "NODES", requires = "pool")]
    pool_nodes: Option<Nodes>,
    /// Give the guest its RAM as two NUMA nodes of different speed, fast=1G,slow=3G; SIZE@N is of node N of the host.
    /// QEMU only
    #[arg(long, value_name = "fast=SIZE,slow=SIZE", conflicts_with_all = ["optional", "pool"])]
    tiers: Option<Tiers>,
    /// Give the guest a virtio-serial port for ballast-agent, which tells the host what is cold there. QEMU only
    #[arg(long, conflicts_with = "optional")]
    agent: bool,
    /// Do not give QEMU's guest a balloon device to report its free memory with, which is then discarded, not stored
    #[arg(long)]
    no_balloon: bool,
    /// Run unmanaged, with a warning, if the keeper does not answer
    #[arg(long)]
    optional: bool,
    /// Socket on which the keeper takes VMs
    #[arg(long, value_name = "PATH", env = "BALLAST_SOCKET", default_value = "/run/ballast/attach.sock")]
    attach_socket: PathBuf,
    /// The VMM and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "VMM")]
    command: Vec<OsString>,
}

/// Become the VMM. Returns only if that fails.
pub fn run(args: RunArgs) -> Result<Infallible> {
    let (program, rest) = args.command.split_first().ok_or_else(|| anyhow!("no VMM was named"))?;
    let mut rest = rest.to_vec();
    let (mut name, mut monitor, mut agent) = (args.name, None, None);
    if is_qemu(program) {
        let words = |rest: &[OsString]| rest.iter().map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>();
        if let Some(tiers) = args.tiers {
            let edits = tiers.edits(&words(&rest)).map_err(|reason| anyhow!(reason))?;
            apply(&mut rest, edits);
        }
        let words = words(&rest);
        let backing = match (args.pool, args.add_memory_backend) {
            (Some(pages), _) => Backing::Pool(pages),
            (None, true) => Backing::Memfd,
            (None, false) => Backing::AsGiven,
        };
        let plan = inspect(&words, backing, &is_ram_file).map_err(|reason| anyhow!(reason))?;
        for note in &plan.notes {
            eprintln!("ballast: {note}");
        }
        apply(&mut rest, plan.edits);
        name = name.or(plan.name);
        monitor = Some(Monitor::new().context("Making a monitor for QEMU")?);
        if args.agent {
            agent = Some(AgentPort::new().context("Making a port for the agent")?);
        }
        // RAM that is held for a device, or locked, is not to be discarded.
        if !args.no_balloon && args.pool.is_none() && !plan.is_pinned {
            match reporting(&program.to_string_lossy(), &words, &is_huge_file) {
                Reporting::Add(edits) => apply(&mut rest, edits.into()),
                Reporting::Advise(note) => eprintln!("ballast: {note}"),
                Reporting::Leave => {}
            }
        }
    } else if args.agent {
        bail!("--agent is for QEMU; give another VMM the port as docs/agent.md says");
    } else if args.tiers.is_some() {
        bail!("--tiers is for QEMU; give the guest of another VMM its nodes by that VMM's own words");
    } else if args.pool.is_some() {
        bail!("--pool is for QEMU; another VMM takes memory of the pool by the client library");
    }
    check_filter(program, &rest)?;
    let name = name.unwrap_or_else(|| format!("vm-{}", std::process::id()));
    check_name(&name).map_err(|reason| anyhow!(reason))?;
    check_program(program)?;
    let preload = find_preload()?;
    let mut list = preload.clone().into_os_string();
    if let Some(others) = std::env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
        list.push(":");
        list.push(others);
    }

    let mut command = Command::new(program);
    command.args(&rest);
    if let Some(monitor) = &monitor {
        monitor.give(&mut command);
    }
    // Without `--agent`, an operator may have named the socket of a port of QEMU's own.
    if let Some(agent) = &agent {
        agent.give(&mut command);
    }
    command.env("LD_PRELOAD", list).env("BALLAST_SOCKET", &args.attach_socket);
    command.env("BALLAST_VM_NAME", name).env("BALLAST_REQUIRE", if args.optional { "0" } else { "1" });
    match args.limit {
        Some(limit) => command.env("BALLAST_LIMIT", limit.0.to_string()),
        None => command.env_remove("BALLAST_LIMIT"),
    };
    match args.pool {
        Some(pages) => {
            // The pool's socket is beside the keeper's.
            let socket = args.attach_socket.with_file_name("pool.sock");
            // RAM may be plugged after `-daemonize` has changed the working directory.
            let socket = std::path::absolute(&socket).unwrap_or(socket);
            command.env("BALLAST_POOL", pages.to_string()).env("BALLAST_POOL_SOCKET", socket)
        }
        None => command.env_remove("BALLAST_POOL"),
    };
    match args.pool_nodes {
        Some(nodes) => command.env("BALLAST_POOL_NODES", nodes.to_string()),
        None => command.env_remove("BALLAST_POOL_NODES"),
    };
    Err(command.exec()).with_context(|| format!("Starting {}", program.display()))
}

/// Makes these changes.
fn apply(words: &mut Vec<OsString>, edits: Vec<Edit>) {
    for edit in edits {
        match edit {
            Edit::Replace(index, word) => words[index] = word.into(),
            Edit::Append(word) => words.push(word.into()),
        }
    }
}

fn is_qemu(program: &OsStr) -> bool {
    let name = Path::new(program).file_name().unwrap_or_default().to_string_lossy();
    name.starts_with("qemu-system-") || matches!(&*name, "qemu-kvm" | "kvm" | "qemu")
}

/// Refuse a Cloud Hypervisor that filters its system calls: the kernel kills it at the first one of the client library,
/// and no message says why.
fn check_filter(program: &OsStr, words: &[OsString]) -> Result<()> {
    let name = Path::new(program).file_name().unwrap_or_default().to_string_lossy();
    let is_off = |at: usize| {
        let word = words[at].to_string_lossy();
        let next = words.get(at + 1).map(|next| next.to_string_lossy());
        let value = if word == "--seccomp" { next.as_deref() } else { word.strip_prefix("--seccomp=") };
        matches!(value, Some("false" | "log"))
    };
    if name.starts_with("cloud-hypervisor") && !(0..words.len()).any(is_off) {
        bail!(
            "{name} filters its system calls, and the kernel would kill it at the first one that the preload library \
             makes; write --seccomp false (--seccomp log does as well, with a line in the kernel's log for each)"
        );
    }
    Ok(())
}

/// Is the file (or the folder it would be made in) in a tmpfs, or in a hugetlbfs of 2 MiB pages?
fn is_ram_file(path: &str) -> bool {
    let path = Path::new(path);
    let place = if path.exists() { path } else { path.parent().unwrap_or(path) };
    std::fs::File::open(place)
        .is_ok_and(|file| memfd::check_ram_file(file).is_ok_and(|page| page.0 <= HUGE_SIZE as u64))
}

/// The same for a hugetlbfs alone.
fn is_huge_file(path: &str) -> bool {
    let path = Path::new(path);
    let place = if path.exists() { path } else { path.parent().unwrap_or(path) };
    let page = std::fs::File::open(place).ok().and_then(|file| memfd::ram_page(file).ok().flatten());
    page.is_some_and(|page| page.0 > PAGE_SIZE as u64)
}

/// The preload library: `$BALLAST_PRELOAD`, else beside this program, else in `../lib/ballast`.
fn find_preload() -> Result<PathBuf> {
    const LIBRARY: &str = "libballast_preload.so";
    let here = std::env::current_exe().context("Finding this program's own path")?;
    let folder = here.parent().unwrap_or(Path::new("/"));
    let places = match std::env::var_os("BALLAST_PRELOAD") {
        Some(path) => vec![PathBuf::from(path)],
        None => vec![folder.join(LIBRARY), folder.join("../lib/ballast").join(LIBRARY)],
    };
    let Some(found) = places.iter().find(|path| path.is_file()) else {
        let tried: Vec<_> = places.iter().map(|path| path.display().to_string()).collect();
        bail!("the preload library is not there; tried {} (set BALLAST_PRELOAD to its path)", tried.join(" and "));
    };
    let path = found.canonicalize().with_context(|| format!("Finding {}", found.display()))?;
    if path.to_string_lossy().contains([' ', ':']) {
        bail!("the path {} has a blank or a colon in it, which LD_PRELOAD cannot name", path.display());
    }
    Ok(path)
}

/// Refuse a program that the dynamic loader would start without the preload library: it would run unmanaged, and no
/// error would say so.
fn check_program(program: &OsStr) -> Result<()> {
    let candidates: Vec<PathBuf> = if program.to_string_lossy().contains('/') {
        vec![program.into()]
    } else {
        std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()).map(|dir| dir.join(program)).collect()
    };
    // `exec` will report a missing one.
    let Some(path) = candidates.into_iter().find(|path| path.is_file()) else { return Ok(()) };
    let mode = std::fs::metadata(&path).map_or(0, |meta| meta.permissions().mode());
    if mode & 0o6000 != 0 {
        bail!("{} is set-user-ID or set-group-ID; the system loads no preload library into it", path.display());
    }
    if File::open(&path).and_then(|file| is_static(&file)).unwrap_or(false) {
        bail!(
            "{} is linked statically; a preload library cannot be loaded into it (use the client crate)",
            path.display()
        );
    }
    Ok(())
}

/// Is this a 64-bit ELF program that names no dynamic loader? Only its headers are read: a VMM has tens of MiB.
fn is_static(program: &File) -> std::io::Result<bool> {
    const PT_INTERP: u32 = 3;
    let mut header = [0; 64];
    program.read_exact_at(&mut header, 0)?;
    let number =
        |at: usize, len: usize| header[at..at + len].iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte));
    let (start, size, count) = (number(32, 8), number(54, 2) as usize, number(56, 2) as usize);
    // The kernel runs no program with headers of another size.
    if !header.starts_with(b"\x7fELF\x02\x01") || size != 56 {
        return Ok(false);
    }
    let mut headers = vec![0; size * count];
    program.read_exact_at(&mut headers, start)?;
    Ok(!headers.chunks(size).any(|header| header.starts_with(&PT_INTERP.to_le_bytes())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cloud_hypervisor_that_filters_its_system_calls_is_refused_with_the_words_to_write() {
        let check = |program: &str, words: &str| {
            let words: Vec<OsString> = words.split_ascii_whitespace().map(OsString::from).collect();
            check_filter(program.as_ref(), &words)
        };
        for words in ["", "--memory size=1G,shared=on", "--seccomp true", "--seccomp", "--seccomp=true --kernel false"]
        {
            let error = check("/usr/bin/cloud-hypervisor", words).expect_err(words).to_string();
            assert!(error.contains("--seccomp false"), "{words}: {error}");
        }
        for words in ["--seccomp false --kernel k", "--kernel k --seccomp=false", "--seccomp log"] {
            check("cloud-hypervisor-static", words).expect(words);
        }
        check("crosvm", "run").expect("another VMM");
    }

    #[test]
    fn qemu_and_static_programs_are_recognised() {
        assert!(is_qemu("/usr/bin/qemu-system-aarch64".as_ref()) && is_qemu("kvm".as_ref()));
        assert!(!is_qemu("cloud-hypervisor".as_ref()));
        let dir = tempfile::tempdir().expect("a directory");
        let is_static = |bytes: &[u8]| {
            std::fs::write(dir.path().join("program"), bytes).expect("write");
            is_static(&File::open(dir.path().join("program")).expect("it is there")).unwrap_or(false)
        };
        // A header, and two program headers at the end of the file, as after `patchelf`.
        let program = |kinds: [u32; 2]| {
            let mut bytes = vec![0; 5000 + 2 * 56];
            bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
            bytes[32..40].copy_from_slice(&5000_u64.to_le_bytes());
            bytes[54..58].copy_from_slice(&[56, 0, 2, 0]);
            kinds
                .iter()
                .zip([5000, 5056])
                .for_each(|(kind, at)| bytes[at..at + 4].copy_from_slice(&kind.to_le_bytes()));
            bytes
        };
        assert!(is_static(&program([1, 2])) && !is_static(&program([1, 3])) && !is_static(&program([3, 1])));
        assert!(!is_static(&program([1, 2])[..5060]), "half of it says nothing");
        assert!(!is_static(b"#!/bin/sh") && !is_static(b"\x7fELF\x02\x01"));
        assert!(!super::is_static(&File::open("/proc/self/exe").expect("own image")).expect("read"));
    }
}
