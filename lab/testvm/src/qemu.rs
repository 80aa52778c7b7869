//! Real guests: an unmodified QEMU, a Debian kernel and Redis, started, watched and stopped by a test.
//!
//! Before: `scripts/guest-image.sh` made kernel and initrd. After: [`load`] fills Redis and checks every byte of it.
//! Threads: one per guest copies the serial console to a file and wakes who waits for READY.
//! Units: sizes are `Bytes`; ports are on 127.0.0.1 and were free when they were picked.
//! Promise: a guest that dies early is an error with its last console lines, never a timeout; dropping a guest kills it.

mod builder;
mod console;
mod initrd;
pub mod load;
mod qmp;
#[cfg(test)]
mod tests;

use std::io::{self, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ExitStatus};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};

use console::{Console, Said};

pub use builder::{Accel, Balloon, Builder};
pub use qmp::{Qmp, QmpError};

/// The program started; found on PATH.
pub const QEMU: &str = "qemu-system-x86_64";
/// Console lines kept for error messages.
const TAIL_LINES: usize = 30;
/// How often a waiter looks whether the process is still there, should the console stay open after its death.
const LIVENESS: Duration = Duration::from_millis(200);

/// What can go wrong with a guest.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The machine lacks something a guest needs (operator).
    #[error("No QEMU guest can run here: {0}")]
    Missing(String),
    /// A file or process call failed (kernel).
    #[error("{doing} guest {guest}")]
    Io {
        /// The activity.
        doing: &'static str,
        /// The guest's name.
        guest: String,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// The process ended while something was expected of it (guest, or whoever built its command line).
    #[error("Guest {guest} ended early ({status}); its last words:\n{tail}")]
    Ended {
        /// The guest's name.
        guest: String,
        /// Exit status, or that the console was closed.
        status: String,
        /// Last lines of the console and of QEMU's error output.
        tail: String,
    },
    /// The console did not say what was waited for in time (guest).
    #[error("Guest {guest} did not say {want} within {waited_s} s; its last words:\n{tail}")]
    Timeout {
        /// The guest's name.
        guest: String,
        /// The awaited word.
        want: &'static str,
        /// Patience that ran out.
        waited_s: u64,
        /// Last lines of the console and of QEMU's error output.
        tail: String,
    },
    /// The monitor refused or broke off.
    #[error(transparent)]
    Qmp(#[from] QmpError),
}

/// Kernel and initrd of a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// bzImage.
    pub kernel: PathBuf,
    /// The initrd whose /init says `BALLAST-READY`.
    pub initrd: PathBuf,
}

impl Image {
    /// The image in `$BALLAST_GUEST_DIR`, or in `target/guest` of this directory or a parent of it.
    pub fn find() -> Result<Self, Error> {
        let dirs = match std::env::var_os("BALLAST_GUEST_DIR") {
            Some(dir) => vec![PathBuf::from(dir)],
            None => {
                let here = std::env::current_dir().unwrap_or_default();
                here.ancestors().map(|dir| dir.join("target/guest")).collect()
            }
        };
        dirs.iter()
            .map(|dir| Self { kernel: dir.join("vmlinuz"), initrd: dir.join("initrd.img") })
            .find(|image| image.kernel.is_file() && image.initrd.is_file())
            .ok_or_else(|| Error::Missing("no guest image in target/guest; run scripts/guest-image.sh".into()))
    }
}

/// Why no QEMU guest can run here, if so.
pub fn qemu_missing() -> Option<String> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    if !std::env::split_paths(&path).any(|dir| dir.join(QEMU).is_file()) {
        return Some(format!("{QEMU} is not installed; run scripts/setup.sh"));
    }
    Image::find().err().map(|error| error.to_string())
}

/// A running guest. Dropping it kills it.
#[derive(Debug)]
pub struct QemuGuest {
    name: String,
    child: Child,
    input: Option<ChildStdin>,
    console: Arc<Console>,
    redis_port: u16,
    dir: PathBuf,
    _owned_dir: Option<tempfile::TempDir>,
}

impl QemuGuest {
    /// A guest with every default.
    pub fn builder() -> Builder {
        Builder::new()
    }

    /// Wait until the guest serves (or, with [`Builder::run`], until its command starts).
    pub fn wait_ready(&mut self, patience: Duration) -> Result<(), Error> {
        self.wait_for("BALLAST-READY", patience, |said| said.ready.then_some(()))
    }

    /// Wait until the command given to [`Builder::run`] ended, and return its exit status. Its output is in
    /// [`Self::serial_log`].
    pub fn wait_run(&mut self, patience: Duration) -> Result<i32, Error> {
        self.wait_for("BALLAST-EXIT", patience, |said| said.exit)
    }

    /// Type a line at its console. The bench program ([`Builder::bench`]) answers with [`Self::answer`].
    pub fn tell(&mut self, line: &str) -> Result<(), Error> {
        let written = match &mut self.input {
            Some(input) => input.write_all(format!("{line}\n").as_bytes()).and_then(|()| input.flush()),
            None => Err(io::ErrorKind::BrokenPipe.into()),
        };
        written.map_err(|source| Error::Io { doing: "Telling", guest: self.name.clone(), source })
    }

    /// Wait for the next line that says `BALLAST-SAYS`; answers what follows.
    pub fn answer(&mut self, patience: Duration) -> Result<String, Error> {
        self.wait_for("BALLAST-SAYS", patience, |said| said.answers.pop_front())
    }

    fn wait_for<T>(
        &mut self,
        want: &'static str,
        patience: Duration,
        found: impl Fn(&mut Said) -> Option<T>,
    ) -> Result<T, Error> {
        let deadline = Instant::now() + patience;
        let console = Arc::clone(&self.console);
        let mut said = console.lock();
        loop {
            if let Some(found) = found(&mut said) {
                return Ok(found);
            }
            let guest = self.name.clone();
            let status = self.child.try_wait().ok().flatten();
            // A dead process's last words may still be in the pipe: only a closed console means "all was said",
            // unless somebody else holds it open.
            if said.closed || (status.is_some() && said.quiet_since_death) {
                drop(said);
                let status = self.reap(status);
                return Err(Error::Ended { guest, status, tail: self.tail() });
            }
            said.quiet_since_death = status.is_some();
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                drop(said);
                return Err(Error::Timeout { guest, want, waited_s: patience.as_secs(), tail: self.tail() });
            }
            said = console.changed.wait_timeout(said, left.min(LIVENESS)).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Words for how the process ended. A closed console without an end is a process that lost its console.
    fn reap(&mut self, status: Option<ExitStatus>) -> String {
        let deadline = Instant::now() + Duration::from_secs(2);
        let mut status = status;
        while status.is_none() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
            status = self.child.try_wait().ok().flatten();
        }
        status.map_or_else(|| "it closed its console".into(), |status| status.to_string())
    }

    /// Where its Redis answers.
    pub fn redis_addr(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.redis_port).into()
    }

    /// A new connection to its monitor, which serves one at a time: drop the last one first.
    pub fn qmp(&mut self) -> Result<Qmp, Error> {
        let path = self.qmp_path();
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            match UnixStream::connect(&path) {
                Ok(stream) => return Ok(Qmp::greet(stream)?),
                // QEMU makes the socket a moment after its start.
                Err(_) if Instant::now() < deadline && matches!(self.child.try_wait(), Ok(None)) => {
                    std::thread::sleep(Duration::from_millis(10));
                }
                Err(source) => {
                    return Err(Error::Io { doing: "Connecting to the monitor of", guest: self.name.clone(), source });
                }
            }
        }
    }

    /// The monitor's socket.
    pub fn qmp_path(&self) -> PathBuf {
        self.dir.join("qmp")
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The process that was started: QEMU, or the first word of the prefix if that does not exec.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The console so far.
    pub fn serial_log(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(self.dir.join("serial.log")).unwrap_or_default()).into_owned()
    }

    /// What QEMU, and any prefix, wrote to standard error.
    pub fn stderr_log(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(self.dir.join("stderr.log")).unwrap_or_default()).into_owned()
    }

    /// How it ended, if it has.
    pub fn exited(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// QEMU's own process: who listens on the monitor's socket.
    pub fn qemu_pid(&self) -> Option<u32> {
        let stream = UnixStream::connect(self.qmp_path()).ok()?;
        let peer = rustix::net::sockopt::socket_peercred(&stream).ok()?;
        u32::try_from(peer.pid.as_raw_nonzero().get()).ok()
    }

    /// Kill it, also behind a prefix that did not exec, and wait for its end. Again is harmless.
    pub fn kill(&mut self) {
        let behind = self.qemu_pid().filter(|&pid| pid != self.child.id());
        let _ = self.child.kill();
        let _ = self.child.wait();
        if let Some(pid) = behind.and_then(|pid| Pid::from_raw(pid as i32)) {
            let _ = rustix::process::kill_process(pid, Signal::KILL);
        }
    }

    /// Last lines of both logs.
    fn tail(&self) -> String {
        let said = self.console.lock().tail.iter().map(|line| format!("  {line}\n")).collect::<String>();
        let stderr = self.stderr_log();
        let lines: Vec<&str> = stderr.lines().collect();
        let skip = lines.len().saturating_sub(TAIL_LINES);
        said + &lines[skip..].iter().map(|line| format!("  stderr: {line}\n")).collect::<String>()
    }
}

impl Drop for QemuGuest {
    fn drop(&mut self) {
        self.kill();
    }
}
