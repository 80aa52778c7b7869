//! A private ballastd in a temporary directory, for benches and the demo.
//!
//! Before: `ballastd` lies beside this program or on `PATH`. After: keeper and engine have ended, and the directory is
//! gone.
//! Threads: the caller's. Keeper and engine are processes. Promise: no other daemon on the machine is affected.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use ballast_api::Client;
use ballast_sys::program;

/// Calls `find` repeatedly until it returns a value. Fails after `timeout`.
pub fn until<T>(what: &str, timeout: Duration, mut find: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let start = Instant::now();
    loop {
        if let Some(found) = find()? {
            return Ok(found);
        }
        ensure!(start.elapsed() < timeout, "after {timeout:?}: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Time that the daemon may take for a simple step.
const SOON: Duration = Duration::from_secs(10);

/// A running daemon.
#[derive(Debug)]
pub struct Daemon {
    dir: tempfile::TempDir,
    keeper: Child,
    api: Client,
}

impl Daemon {
    /// Start `ballastd` with these settings, in TOML.
    pub fn with_settings(settings: &str) -> Result<Self> {
        let ballastd = find()?;
        let dir = tempfile::Builder::new().prefix("ballast-own-").tempdir().context("Making a directory")?;
        std::fs::write(dir.path().join("ballastd.toml"), settings).context("Writing settings")?;
        let keeper = spawn_keeper(&ballastd, dir.path())?;
        let api = Client::new(dir.path().join("api.sock"))?.retry_for(Duration::from_secs(20));
        let mut daemon = Self { dir, keeper, api };
        until("ballastd does not open its API socket", SOON, || {
            if let Some(status) = daemon.keeper.try_wait().context("Reading the status of ballastd")? {
                bail!("ballastd ended at once ({status}):\n{}", daemon.log());
            }
            Ok(daemon.dir().join("api.sock").exists().then_some(()))
        })?;
        daemon.api.host().context("Waiting for ballastd to answer")?;
        Ok(daemon)
    }

    /// Kill the keeper, and wait for its end. Its engine goes on.
    pub fn kill_keeper(&mut self) -> Result<()> {
        self.keeper.kill().context("Killing the keeper")?;
        self.keeper.wait().map(drop).context("Waiting for the keeper to end")
    }

    /// Start another keeper after [`Self::kill_keeper`]. Attached VMs come back to it.
    pub fn start_keeper(&mut self) -> Result<()> {
        self.keeper = spawn_keeper(&find()?, self.dir())?;
        Ok(())
    }

    /// The client of its API.
    pub fn api(&self) -> &Client {
        &self.api
    }

    /// Wait until the API lists a VM. The reply to an attach comes shortly before that.
    pub fn wait_for_vm(&self, name: &str) -> Result<()> {
        until(&format!("the API does not list the VM {name}"), SOON, || match self.api.vm(name) {
            Err(error) if error.is_no_such_vm() => Ok(None),
            answer => answer.map(|_| Some(())).with_context(|| format!("Waiting for the VM {name}")),
        })
    }

    /// Wait until the API no longer lists a VM. Its process ends shortly before that.
    pub fn wait_until_gone(&self, name: &str) -> Result<()> {
        until(&format!("the API still lists the VM {name}"), SOON, || {
            Ok(self.api.vm(name).is_err_and(|error| error.is_no_such_vm()).then_some(()))
        })
    }

    /// The directory of sockets and log.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// The socket to which VMMs attach.
    pub fn attach_socket(&self) -> PathBuf {
        self.dir().join("attach.sock")
    }

    /// The command line before that of a QEMU that becomes a VM of this name, by `ballast run` with these options.
    pub fn run_words(&self, name: &str, options: &[&str]) -> Result<Vec<String>> {
        let ballast = program::find("ballast").context("Finding what starts QEMU")?;
        let [ballast, socket] = [ballast, self.attach_socket()].map(|path| path.to_string_lossy().into_owned());
        let words = [&[&ballast, "run"], options, &["--name", name, "--attach-socket", &socket, "--"]];
        Ok(words.concat().into_iter().map(str::to_owned).collect())
    }

    /// The keeper's process id.
    pub fn keeper_pid(&self) -> u32 {
        self.keeper.id()
    }

    /// The log of keeper and engine.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.dir().join("ballastd.log")).unwrap_or_default()
    }
}

fn find() -> Result<PathBuf> {
    program::find("ballastd").context("Finding the daemon")
}

fn spawn_keeper(ballastd: &Path, dir: &Path) -> Result<Child> {
    let log = std::fs::File::options().create(true).append(true).open(dir.join("ballastd.log"));
    Command::new(ballastd)
        .arg("--config")
        .arg(dir.join("ballastd.toml"))
        .arg("--runtime-dir")
        .arg(dir)
        .stdin(Stdio::null())
        .stderr(log.context("Making the log")?)
        .spawn()
        .with_context(|| format!("Starting {}", ballastd.display()))
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // The VMs have ended. The engine outlives its keeper, but ends when it has no VM.
        let _ = self.keeper.kill();
        let _ = self.keeper.wait();
    }
}
