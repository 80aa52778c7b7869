//! A running guest in QEMU: reads its console, writes its input, and kills it.
//!
//! Before: `builder` started it. After: it has ended; dropping it kills it.
//! Threads: the caller's; one more reads the console. Units: ports of 127.0.0.1.
//! Promise: a wait ends with an error when the guest has ended.

use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ExitStatus};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::console::{Console, Said, TAIL_LINES};
use super::qmp::Qmp;

/// Interval at which a waiter checks that the process runs: the console may stay open after its end.
const LIVENESS: Duration = Duration::from_millis(200);

/// A running guest. Dropping it kills it.
#[derive(Debug)]
pub struct QemuGuest {
    pub(super) name: String,
    pub(super) child: Child,
    pub(super) input: Option<ChildStdin>,
    pub(super) console: Arc<Console>,
    pub(super) redis_port: u16,
    /// The directory of the logs and of the monitor's socket.
    pub(super) dir: tempfile::TempDir,
}

impl QemuGuest {
    /// Wait until Redis serves, or, with [`super::Builder::run`], until the command starts.
    pub fn wait_ready(&mut self, timeout: Duration) -> Result<()> {
        self.wait_for("BALLAST-READY", timeout, |said| said.ready.then_some(()))
    }

    /// Wait until the command of [`super::Builder::run`] has ended. Returns its status. [`Self::serial_log`] has its
    /// output.
    pub fn wait_run(&mut self, timeout: Duration) -> Result<i32> {
        self.wait_for("BALLAST-EXIT", timeout, |said| said.exit)
    }

    /// Write a line to its console. [`Self::answer`] returns the reply of the command ([`super::Builder::run`]).
    pub fn tell(&mut self, line: &str) -> Result<()> {
        let input = self.input.as_mut().context("a guest has no input")?;
        input.write_all(format!("{line}\n").as_bytes()).context("Telling a guest")
    }

    /// Wait for the next line with `BALLAST-SAYS`. Returns the rest of it.
    pub fn answer(&mut self, timeout: Duration) -> Result<String> {
        self.wait_for("BALLAST-SAYS", timeout, |said| said.answers.pop_front())
    }

    fn wait_for<T>(
        &mut self,
        want: &'static str,
        timeout: Duration,
        found: impl Fn(&mut Said) -> Option<T>,
    ) -> Result<T> {
        let deadline = Instant::now() + timeout;
        let console = Arc::clone(&self.console);
        let mut said = console.lock();
        loop {
            if let Some(found) = found(&mut said) {
                return Ok(found);
            }
            let status = self.child.try_wait().ok().flatten();
            // The last output of an ended process may still be in the pipe. It is complete when the console is closed.
            // Another process may hold the console open: then one check without new lines is enough.
            if said.closed || (status.is_some() && said.quiet_since_death) {
                drop(said);
                let status = self.reap(status);
                bail!("guest {} ended early ({status}); its last output:\n{}", self.name, self.tail());
            }
            said.quiet_since_death = status.is_some();
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                drop(said);
                let (guest, s) = (&self.name, timeout.as_secs());
                bail!("guest {guest} did not print {want} within {s} s; its last output:\n{}", self.tail());
            }
            said = console.changed.wait_timeout(said, left.min(LIVENESS)).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Returns the exit status as text, or says that the process closed its console and still runs.
    fn reap(&mut self, status: Option<ExitStatus>) -> String {
        let deadline = Instant::now() + Duration::from_secs(2);
        let mut status = status;
        while status.is_none() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
            status = self.child.try_wait().ok().flatten();
        }
        status.map_or_else(|| "it closed its console".into(), |status| status.to_string())
    }

    /// The address of its Redis.
    pub fn redis_addr(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.redis_port).into()
    }

    /// Connect to its monitor, which serves one connection at a time: drop the last one first.
    pub fn qmp(&mut self) -> Result<Qmp> {
        let path = self.qmp_path();
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            match UnixStream::connect(&path) {
                Ok(stream) => return Qmp::greet(stream),
                // QEMU creates the socket shortly after its start.
                Err(_) if Instant::now() < deadline && matches!(self.child.try_wait(), Ok(None)) => {
                    std::thread::sleep(Duration::from_millis(10));
                }
                Err(error) => return Err(error).context("Connecting to the monitor of a guest"),
            }
        }
    }

    /// The monitor's socket.
    pub fn qmp_path(&self) -> PathBuf {
        self.dir.path().join("qmp")
    }

    /// The process that was started: QEMU, because a prefix becomes QEMU.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The output of the console so far.
    pub fn serial_log(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(self.dir.path().join("serial.log")).unwrap_or_default()).into_owned()
    }

    /// The standard error of QEMU and of a prefix.
    pub fn stderr_log(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(self.dir.path().join("stderr.log")).unwrap_or_default()).into_owned()
    }

    /// The exit status, if the process has ended.
    pub fn exited(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// Kill it, and wait for its end. A second call has no effect.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// The last lines of both logs.
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
