//! QMP, the protocol of QEMU's monitor: one line of JSON per message.
//!
//! Before: [`super::QemuGuest::qmp`] connects. After: tests plug memory, move the balloon and read the status.
//! Threads: none. Calls block. Events are skipped.
//! Units: sizes are bytes, as in QEMU.
//! Promise: the error of a refused command has the command and QEMU's description.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use ballast_base::Bytes;
use serde_json::{Value, json};

/// Limit for one reply of QEMU. TCG on a busy machine is slow.
const TIMEOUT: Duration = Duration::from_secs(60);

/// An error of QMP.
#[derive(Debug, thiserror::Error)]
pub enum QmpError {
    /// QEMU refused the command (its sender caused it).
    #[error("QMP {command}: {answer}")]
    Refused {
        /// The command.
        command: String,
        /// QEMU's description.
        answer: String,
    },
    /// The socket failed, was closed, or had no data for a minute.
    #[error("Talking QMP to the guest")]
    Io(#[from] io::Error),
    /// The reply is not JSON.
    #[error("Reading QEMU's QMP answer")]
    Json(#[from] serde_json::Error),
}

/// A connection to a monitor.
#[derive(Debug)]
pub struct Qmp {
    stream: BufReader<UnixStream>,
}

impl Qmp {
    /// Read the greeting, and leave negotiation mode.
    pub(super) fn greet(stream: UnixStream) -> Result<Self, QmpError> {
        stream.set_read_timeout(Some(TIMEOUT))?;
        let mut qmp = Self { stream: BufReader::new(stream) };
        qmp.hear()?;
        qmp.command("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    fn hear(&mut self) -> Result<Value, QmpError> {
        let mut line = String::new();
        if self.stream.read_line(&mut line)? == 0 {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        Ok(serde_json::from_str(&line)?)
    }

    /// Send a command. Returns its result.
    pub fn command(&mut self, command: &str, arguments: Value) -> Result<Value, QmpError> {
        let mut line = json!({ "execute": command, "arguments": arguments }).to_string();
        line.push('\n');
        self.stream.get_mut().write_all(line.as_bytes())?;
        loop {
            let mut heard = self.hear()?;
            if let Some(error) = heard.get("error") {
                let answer = error.get("desc").and_then(Value::as_str).unwrap_or("no reason given").to_string();
                return Err(QmpError::Refused { command: command.into(), answer });
            }
            // Anything else is an event.
            if let Some(value) = heard.get_mut("return") {
                return Ok(value.take());
            }
        }
    }

    /// Returns the status of the guest, such as `running`, `paused` or `shutdown`.
    pub fn status(&mut self) -> Result<String, QmpError> {
        let answer = self.command("query-status", json!({}))?;
        Ok(answer.get("status").and_then(Value::as_str).unwrap_or("unknown").to_string())
    }

    /// Plug in a DIMM of `size`, backed by a shared memfd. The backend is `{id}-mem`, the device `id`. It needs
    /// [`super::Builder::hotplug_room`].
    pub fn plug_dimm(&mut self, id: &str, size: Bytes) -> Result<(), QmpError> {
        let backend = format!("{id}-mem");
        self.command(
            "object-add",
            json!({ "qom-type": "memory-backend-memfd", "id": backend, "size": size.0, "share": true }),
        )?;
        self.command("device_add", json!({ "driver": "pc-dimm", "id": id, "memdev": backend }))?;
        Ok(())
    }

    /// Ask the guest to unplug the DIMM. When [`Self::dimms`] no longer lists it, call [`Self::drop_dimm`].
    pub fn unplug_dimm(&mut self, id: &str) -> Result<(), QmpError> {
        self.command("device_del", json!({ "id": id })).map(drop)
    }

    /// Delete the memory backend of an unplugged DIMM. QEMU unmaps it.
    pub fn drop_dimm(&mut self, id: &str) -> Result<(), QmpError> {
        self.command("object-del", json!({ "id": format!("{id}-mem") })).map(drop)
    }

    /// Returns the ids of the plugged DIMMs.
    pub fn dimms(&mut self) -> Result<Vec<String>, QmpError> {
        let answer = self.command("query-memory-devices", json!({}))?;
        let list = answer.as_array().cloned().unwrap_or_default();
        Ok(list.iter().filter_map(|entry| entry["data"]["id"].as_str().map(str::to_string)).collect())
    }

    /// Set the balloon's target: it leaves the guest `memory`, after some time.
    pub fn set_balloon(&mut self, memory: Bytes) -> Result<(), QmpError> {
        self.command("balloon", json!({ "value": memory.0 })).map(drop)
    }

    /// Returns the memory that the balloon leaves the guest now.
    pub fn balloon(&mut self) -> Result<Bytes, QmpError> {
        let answer = self.command("query-balloon", json!({}))?;
        Ok(Bytes(answer.get("actual").and_then(Value::as_u64).unwrap_or(0)))
    }

    /// Stop the vCPUs.
    pub fn pause(&mut self) -> Result<(), QmpError> {
        self.command("stop", json!({})).map(drop)
    }

    /// Resume the vCPUs.
    pub fn resume(&mut self) -> Result<(), QmpError> {
        self.command("cont", json!({})).map(drop)
    }
}
