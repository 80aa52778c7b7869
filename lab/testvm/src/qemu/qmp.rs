//! QMP, the protocol of QEMU's monitor: one line of JSON per message.
//!
//! Before: [`super::QemuGuest::qmp`] connects. After: tests plug memory and move the balloon.
//! Threads: none. Calls block. Events are skipped.
//! Units: sizes are bytes, as in QEMU.
//! Promise: the error of a refused command has the command and QEMU's description.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use ballast_base::Bytes;
use serde_json::{Value, json};

/// Limit for one reply of QEMU. TCG on a busy machine is slow.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A connection to a monitor.
#[derive(Debug)]
pub struct Qmp {
    stream: BufReader<UnixStream>,
}

impl Qmp {
    pub(super) fn greet(stream: UnixStream) -> Result<Self> {
        stream.set_read_timeout(Some(TIMEOUT))?;
        let mut qmp = Self { stream: BufReader::new(stream) };
        qmp.hear()?;
        qmp.command("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    fn hear(&mut self) -> Result<Value> {
        let mut line = String::new();
        let read = self.stream.read_line(&mut line).context("Reading QEMU's QMP answer")?;
        ensure!(read > 0, "QEMU closed its monitor");
        serde_json::from_str(&line).context("Reading QEMU's QMP answer")
    }

    /// Send a command. Returns its result.
    pub fn command(&mut self, command: &str, arguments: Value) -> Result<Value> {
        let mut line = json!({ "execute": command, "arguments": arguments }).to_string();
        line.push('\n');
        self.stream.get_mut().write_all(line.as_bytes())?;
        loop {
            let mut heard = self.hear()?;
            if let Some(error) = heard.get("error") {
                let answer = error.get("desc").and_then(Value::as_str).unwrap_or("no reason given");
                bail!("QMP {command}: {answer}");
            }
            if let Some(value) = heard.get_mut("return") {
                return Ok(value.take());
            }
        }
    }

    /// Plug in a DIMM of `size`, backed by a shared memfd. The backend is `{id}-mem`, the device `id`. It needs
    /// [`super::Builder::hotplug_room`].
    pub fn plug_dimm(&mut self, id: &str, size: Bytes) -> Result<()> {
        let backend = format!("{id}-mem");
        self.command(
            "object-add",
            json!({ "qom-type": "memory-backend-memfd", "id": backend, "size": size.0, "share": true }),
        )?;
        self.command("device_add", json!({ "driver": "pc-dimm", "id": id, "memdev": backend }))?;
        Ok(())
    }

    /// Ask the guest to unplug the DIMM. When [`Self::dimms`] no longer lists it, call [`Self::drop_dimm`].
    pub fn unplug_dimm(&mut self, id: &str) -> Result<()> {
        self.command("device_del", json!({ "id": id })).map(drop)
    }

    /// Delete the memory backend of an unplugged DIMM. QEMU unmaps it.
    pub fn drop_dimm(&mut self, id: &str) -> Result<()> {
        self.command("object-del", json!({ "id": format!("{id}-mem") })).map(drop)
    }

    /// Returns the ids of the plugged DIMMs.
    pub fn dimms(&mut self) -> Result<Vec<String>> {
        let answer = self.command("query-memory-devices", json!({}))?;
        let list = answer.as_array().cloned().unwrap_or_default();
        Ok(list.iter().filter_map(|entry| entry["data"]["id"].as_str().map(str::to_string)).collect())
    }

    /// Set the balloon's target: after some time, the balloon leaves the guest `memory`.
    pub fn set_balloon(&mut self, memory: Bytes) -> Result<()> {
        self.command("balloon", json!({ "value": memory.0 })).map(drop)
    }

    /// Returns the memory that the balloon leaves the guest now.
    pub fn balloon(&mut self) -> Result<Bytes> {
        let answer = self.command("query-balloon", json!({}))?;
        Ok(Bytes(answer.get("actual").and_then(Value::as_u64).unwrap_or(0)))
    }
}
