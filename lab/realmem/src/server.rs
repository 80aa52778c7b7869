//! A server of the distribution as a guest: on one CPU, its large memory in one memfd or its own.
//!
//! Before: `scripts/real-programs.sh` has unpacked the servers. After: it listens on a Unix socket; a drop ends it.
//! Threads: the caller's. Units: MiB for the memfd. Promise: no service of the machine is started or touched.

use std::fs;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use ballast_testkit::program::Ends;
use rustix::thread::{CpuSet, sched_setaffinity};

use crate::protocol::Protocol;

/// The preload library, as a file: for a program with its own allocator, and for a program with the C library's.
pub(crate) const LIBRARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/librealmem.so"));
pub(crate) const LIBRARY_MALLOC: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/librealmem-malloc.so"));
/// The dynamic loader: it runs a program with libraries in another place.
const LOADER: &str = "/lib64/ld-linux-x86-64.so.2";
/// Size of the memfd in MiB: more than any program needs, since the memfd is sparse.
pub const MEMFD_MIB: u64 = 4096;
const START: Duration = Duration::from_secs(20);
/// The CPU of the server. The load has [`LOAD_CPU`].
pub const SERVER_CPU: usize = 0;
/// The CPU of the load.
pub const LOAD_CPU: usize = 1;

/// The place of a server's large memory.
#[derive(Clone, Debug)]
pub enum Memory {
    /// Where the program puts it: private, anonymous.
    Private,
    /// As `Private`, in 2 MiB pages: jemalloc asks the kernel for them.
    Huge,
    /// In a shared memfd.
    Shared,
    /// In one private mapping, as in a VMM that runs without Ballast.
    Mapping,
    /// In one private mapping of a process that looks like a VMM (Firecracker), so that a daemon can adopt it.
    Vmm,
    /// In a shared memfd that is attached to a daemon.
    Attached {
        /// `libballast_client.so`.
        client: PathBuf,
        /// The keeper's socket.
        socket: PathBuf,
        /// The VM's name.
        name: String,
    },
}

/// A running server.
#[derive(Debug)]
pub struct Server {
    child: Ends,
    socket: PathBuf,
    _dir: tempfile::TempDir,
}

/// The directory with the unpacked servers, by `BALLAST_REAL_DIR` or `target/real` of this checkout.
pub(crate) fn programs() -> PathBuf {
    std::env::var_os("BALLAST_REAL_DIR")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/real"), PathBuf::from)
}

/// The reason why no server can run here, if there is one.
pub fn missing(protocol: Protocol) -> Option<String> {
    let program = programs().join("bin").join(program_of(protocol));
    (!program.exists()).then(|| format!("there is no {} (scripts/real-programs.sh gets it)", program.display()))
}

fn program_of(protocol: Protocol) -> &'static str {
    match protocol {
        Protocol::Redis => "redis-server",
        Protocol::Memcached => "memcached",
    }
}

impl Server {
    /// Starts a server. `place` gets its process id before it has touched memory.
    pub fn start(protocol: Protocol, memory: &Memory, place: impl FnOnce(u32) -> Result<()>) -> Result<Self> {
        let dir = tempfile::Builder::new().prefix("realmem-").tempdir().context("Making a directory")?;
        let (programs, socket) = (programs(), dir.path().join("socket"));
        let library = match protocol {
            Protocol::Redis => LIBRARY,
            Protocol::Memcached => LIBRARY_MALLOC,
        };
        let mut command = command(Path::new(LOADER), dir.path(), memory, library)?;
        command.arg("--library-path").arg(programs.join("lib")).arg(programs.join("bin").join(program_of(protocol)));
        match protocol {
            Protocol::Redis => {
                command.args(["--port", "0", "--save", "", "--appendonly", "no", "--daemonize", "no", "--unixsocket"]);
                command.arg(&socket);
            }
            Protocol::Memcached => {
                command.args(["-U", "0", "-u", "root", "-t", "1", "-m", "1600", "-s"]).arg(&socket);
            }
        }
        let child = command.spawn().with_context(|| format!("Starting {}", program_of(protocol)))?;
        let mut server = Self { child: Ends(child), socket, _dir: dir };
        place(server.pid())?;
        server.wait()?;
        Ok(server)
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.0.id()
    }

    /// Connects to it.
    pub fn connect(&self) -> Result<UnixStream> {
        UnixStream::connect(&self.socket).with_context(|| format!("Connecting to {}", self.socket.display()))
    }

    fn wait(&mut self) -> Result<()> {
        let start = Instant::now();
        while UnixStream::connect(&self.socket).is_err() {
            if let Some(status) = self.child.0.try_wait().context("Reading the status of the server")? {
                bail!("the server ended at once ({status})");
            }
            if start.elapsed() > START {
                bail!("the server does not listen after {} s", START.as_secs());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }
}

/// A command on [`SERVER_CPU`] in this directory, without input and output, whose large memory is where `memory` says.
pub(crate) fn command(program: &Path, dir: &Path, memory: &Memory, library: &[u8]) -> Result<Command> {
    let mut command = match memory {
        Memory::Vmm => {
            // A daemon knows a VMM by its program's file; here that is the loader.
            let vmm = dir.join("firecracker");
            fs::copy(LOADER, &vmm).with_context(|| format!("Copying {LOADER}"))?;
            let mut command = Command::new(vmm);
            command.args((program != Path::new(LOADER)).then_some(program));
            command
        }
        _ => Command::new(program),
    };
    if matches!(memory, Memory::Mapping | Memory::Vmm) {
        command.env("REALMEM_PRIVATE", "1");
    }
    if matches!(memory, Memory::Huge) {
        command.env("MALLOC_CONF", "thp:always");
    }
    if !matches!(memory, Memory::Private | Memory::Huge) {
        let path = dir.join("librealmem.so");
        fs::write(&path, library).with_context(|| format!("Writing {}", path.display()))?;
        command.env("LD_PRELOAD", &path).env("REALMEM_MIB", MEMFD_MIB.to_string());
    }
    if let Memory::Attached { client, socket, name } = memory {
        command.env("REALMEM_CLIENT", client).env("REALMEM_NAME", name).env("BALLAST_SOCKET", socket);
    }
    command.current_dir(dir).stdin(Stdio::null()).stdout(Stdio::null());
    // SAFETY: sched_setaffinity is async-signal-safe, and nothing is allocated.
    unsafe { command.pre_exec(|| Ok(stay_on(SERVER_CPU)?)) };
    Ok(command)
}

/// Keeps the calling thread on this CPU.
pub fn stay_on(cpu: usize) -> rustix::io::Result<()> {
    let mut here = CpuSet::new();
    here.set(cpu);
    sched_setaffinity(None, &here)
}
