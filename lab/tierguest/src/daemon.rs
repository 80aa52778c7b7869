//! A daemon whose VMs have a fast and a slow node of this machine.
//!
//! Before: a program with memory in a file runs. After: it is a VM of the daemon, which moves its memory by its heat.
//! Units: percent of the VM's size. Promise: dropping it ends the daemon; the program keeps its memory.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ballast_tier::Tiers;

/// Longest time until the daemon listens.
const LIMIT: Duration = Duration::from_secs(60);

/// A running daemon.
pub struct Daemon {
    child: Child,
    dir: PathBuf,
}

impl Daemon {
    /// Start this program; a VM may have this part of its memory on the fast node. Tracking may cost so much, if it is
    /// given, in percent.
    pub fn start(program: &str, tiers: &Tiers, fast_percent: u64, cost_percent: Option<&str>) -> Result<Self> {
        let dir = PathBuf::from(format!("/tmp/ballast-{}", std::process::id()));
        std::fs::create_dir_all(&dir)?;
        let (fast, slow) = (tiers.list[0].nodes[0], tiers.list[1].nodes[0]);
        let cost = cost_percent.map_or(String::new(), |cost| format!("[heat]\ncost_percent = {cost}\n"));
        let text = format!("{cost}[tier]\nfast_node = {fast}\nslow_node = {slow}\nfast_percent = {fast_percent}\n");
        let file = dir.join("ballastd.toml");
        std::fs::write(&file, text)?;
        let mut command = Command::new(program);
        command.arg("--config").arg(&file).arg("--runtime-dir").arg(&dir);
        let child = command.stdin(Stdio::null()).stderr(Stdio::null()).spawn().context("Starting the daemon")?;
        let daemon = Self { child, dir };
        let began = Instant::now();
        while !Path::new(&daemon.socket()).exists() {
            ensure!(began.elapsed() < LIMIT, "the daemon does not listen");
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(daemon)
    }

    /// Returns what its API says of the VM: its state, or another resource of it. The API's own client would bring an
    /// asynchronous runtime into a program that small guests load.
    pub fn vm(&self, what: &str) -> Result<serde_json::Value> {
        let mut api = UnixStream::connect(self.dir.join("api.sock"))?;
        let path = format!("/v1/vms/vm/{what}");
        let path = path.trim_end_matches('/');
        write!(api, "GET {path} HTTP/1.1\r\nhost: ballast\r\nconnection: close\r\n\r\n")?;
        let mut answer = String::new();
        api.read_to_string(&mut answer)?;
        let body = answer.split_once("\r\n\r\n").with_context(|| format!("no body: {answer:?}"))?.1;
        serde_json::from_str(body).with_context(|| format!("{path}: {body:?}"))
    }

    /// Returns the socket for VMMs.
    pub fn socket(&self) -> String {
        self.dir.join("attach.sock").to_string_lossy().into_owned()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}
