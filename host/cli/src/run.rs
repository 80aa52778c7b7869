//! `ballast run`: start a VMM so that Ballast manages its guest RAM.
//!
//! Before: the operator's own command line. After: the same program in this process's place, with the preload library.
//! Promise: a VMM that could not be managed is not started, and the error says why. The guest gets only hardware that
//! an option names (`--agent`, `--balloon`, `--tiers`). Without such an option the command line is unchanged, but for
//! one more monitor of QEMU at its end, for the preload library alone. A QEMU that is only queried for its features
//! gets none.

mod command_line;
mod ends;
mod free_pages;
mod options;
mod shared;
mod stand_in;
mod through;
mod tiers;

use std::convert::Infallible;
use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, anyhow, bail};
use ballast_base::pool::{Nodes, Pages};
use ballast_base::wire::{check_name, shown_name};
use ballast_base::{Bytes, HUGE_SIZE, Invalid, PAGE_SIZE};
use ballast_sys::memfd;

use command_line::{Backing, Edit, PINNED, inspect};
use ends::Ends;
use free_pages::{Reporting, reporting};
use options::{is_probe, is_without_machine, options};
use tiers::Tiers;

/// Start a VMM under Ballast, in place of this process.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: ballast run --limit 512M --add-memory-backend -- qemu-system-x86_64 -m 1G disk.qcow2")]
pub struct RunArgs {
    /// Name of the VM [default: BALLAST_VM_NAME, else QEMU's -name, else vm-PID]
    #[arg(long)]
    name: Option<String>,
    /// Most DRAM the VM may use, such as 512M
    #[arg(long)]
    limit: Option<Bytes>,
    /// Make guest RAM of QEMU a shared memfd: add the flags if they are missing, change a backend of private memory
    #[arg(long)]
    add_memory_backend: bool,
    /// Take guest RAM from the pool, in pages of 2 MiB (2M, or mix, which has whole GiB of addresses first; on-demand:
    /// each when it is touched), or of 1 GiB (1G), in which nothing is ever paged. QEMU only
    #[arg(long, value_name = "2M|mix|1G|on-demand", conflicts_with_all = ["optional", "add_memory_backend"])]
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
    /// Give QEMU's guest a balloon device to report its free memory with, which is then discarded, not stored
    #[arg(long)]
    balloon: bool,
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

/// Becomes the VMM. Returns only if that fails.
pub fn run(args: RunArgs) -> Result<Infallible> {
    let program = args.command.first().ok_or_else(|| anyhow!("no VMM was named"))?.clone();
    let qemu = through::qemu_in(&args.command);
    let mut before = args.command.clone();
    let mut rest = before.split_off(qemu.map_or(1, |index| index + 1));
    let (mut monitor, mut agent) = (None, None);
    if let Some(qemu) = qemu {
        let words = |rest: &[OsString]| rest.iter().map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>();
        let given = options(&words(&rest))?;
        if is_probe(&given) || is_without_machine(&given) {
            // There is no guest: a management program queries this QEMU's features.
            return Err(Command::new(&program).args(&args.command[1..]).exec())
                .with_context(|| format!("Starting {}", program.display()));
        }
        if let Some(tiers) = args.tiers {
            let edits = tiers.edits(&words(&rest))?;
            apply(&mut rest, edits);
        }
        let words = words(&rest);
        let backing = match (args.pool, args.add_memory_backend) {
            (Some(pages), _) => Backing::Pool(pages),
            (None, true) => Backing::Memfd,
            (None, false) => Backing::AsGiven,
        };
        let plan = inspect(&words, backing, &is_ram_file)?;
        for note in &plan.notes {
            crate::show::say(note);
        }
        apply(&mut rest, plan.edits);
        monitor = Some(Ends::new().context("Making a monitor for QEMU")?);
        if args.agent {
            agent = Some(Ends::new().context("Making a port for the agent")?);
        }
        match free_pages(&args, &args.command[qemu].to_string_lossy(), &words, plan.is_pinned)? {
            Reporting::Add(edits) => apply(&mut rest, edits.into()),
            Reporting::Advise(note) => crate::show::say(&note),
            Reporting::Leave => {}
        }
    } else {
        refuse_for_others(&args)?;
    }
    check_filter(&program, &rest)?;
    if let Some(name) = &args.name {
        check_name(&shown_name(name))?;
    }
    through::check_programs(&before)?;
    let preload = find_preload()?;
    let mut list = preload.clone().into_os_string();
    if let Some(others) = std::env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
        list.push(":");
        list.push(others);
    }

    let mut command = Command::new(&program);
    command.args(&before[1..]).args(&rest);
    if let Some(monitor) = &monitor {
        monitor.give_monitor(&mut command);
    }
    // Without `--agent`, an operator may have named the socket of a port of QEMU's own.
    if let Some(agent) = &agent {
        agent.give_agent_port(&mut command);
    }
    command.env("LD_PRELOAD", list).env("BALLAST_SOCKET", &args.attach_socket);
    // Without the variable, the library in QEMU reads QEMU's own name for the VM.
    if let Some(name) = &args.name {
        command.env("BALLAST_VM_NAME", name);
    }
    command.env("BALLAST_REQUIRE", if args.optional { "0" } else { "1" });
    command.env("BALLAST_STARTED", std::process::id().to_string());
    match args.limit {
        Some(limit) => command.env("BALLAST_LIMIT", limit.0.to_string()),
        None => command.env_remove("BALLAST_LIMIT"),
    };
    match args.pool {
        Some(pages) => {
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

/// Whether an emulator of ours could page the guest of QEMU with these arguments. If an option holds the guest's RAM,
/// returns the note that nothing would be taken from the guest.
pub fn check(words: &[String]) -> Result<Option<String>, Invalid> {
    let plan = inspect(words, Backing::Memfd, &is_ram_file)?;
    Ok(plan.notes.into_iter().find(|note| note.contains(PINNED)))
}

/// Whether the guest gets a device to report its free memory, or a note about the cost of its absence. RAM that is held
/// for a device, or locked, must not be discarded.
fn free_pages(args: &RunArgs, program: &str, words: &[String], is_pinned: bool) -> Result<Reporting> {
    if args.pool.is_some() || is_pinned {
        return match args.balloon {
            true => bail!("--balloon: nothing is taken from a pinned VM, and RAM of the pool is not discarded"),
            false => Ok(Reporting::Leave),
        };
    }
    Ok(reporting(args.balloon, program, words, &is_huge_file)?)
}

/// Refuses options that only QEMU can carry out, if the command has no QEMU.
fn refuse_for_others(args: &RunArgs) -> Result<()> {
    let is_there = [
        (args.agent, "--agent", "give another VMM the port as docs/agent.md says"),
        (args.tiers.is_some(), "--tiers", "give the guest of another VMM its nodes by that VMM's own words"),
        (args.pool.is_some(), "--pool", "another VMM takes memory of the pool by the client library"),
        (args.add_memory_backend, "--add-memory-backend", "write the options of shared memory for this VMM"),
        (args.balloon, "--balloon", "give another VMM a balloon by that VMM's own words"),
    ];
    match is_there.into_iter().find(|(is_there, ..)| *is_there) {
        Some((_, option, advice)) => bail!("{option} is for QEMU, which is no word of this command; {advice}"),
        None => Ok(()),
    }
}

fn apply(words: &mut Vec<OsString>, edits: Vec<Edit>) {
    for edit in edits {
        match edit {
            Edit::Replace(index, word) => words[index] = word.into(),
            Edit::Append(word) => words.push(word.into()),
        }
    }
}

/// Refuses a Cloud Hypervisor that filters its system calls: the kernel would kill it at the first call of the client
/// library, and no message would say why.
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

/// Whether the file (or the folder in which it would be made) is in a tmpfs, or in a hugetlbfs of 2 MiB pages.
fn is_ram_file(path: &str) -> bool {
    matches!(ram_page(path), Some(PAGE_SIZE | HUGE_SIZE))
}

fn is_huge_file(path: &str) -> bool {
    ram_page(path).is_some_and(|page| page > PAGE_SIZE)
}

/// Bytes of the pages of a file in a tmpfs or in a hugetlbfs.
fn ram_page(path: &str) -> Option<usize> {
    let path = Path::new(path);
    let place = if path.exists() { path } else { path.parent().unwrap_or(path) };
    Some(memfd::ram_page(std::fs::File::open(place).ok()?).ok()??.0 as usize)
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
}
