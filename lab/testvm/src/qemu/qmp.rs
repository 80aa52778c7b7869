//! QMP: QEMU's monitor, a line of JSON each way.
//!
//! Before: [`super::QemuGuest::qmp`] connects. After: tests plug memory, move the balloon, ask for the status.
//! Threads: none; calls block, events that arrive in between are kept.
//! Units: sizes are bytes, as QEMU has them.
//! Promise: an error carries the command and QEMU's own words.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use ballast_base::Bytes;
use serde_json::{Value, json};

/// How long QEMU may take for one answer. TCG on a busy machine is slow.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A refused or broken conversation.
#[derive(Debug, thiserror::Error)]
pub enum QmpError {
    /// QEMU said no (sender of the command).
    #[error("QMP {command}: {answer}")]
    Refused {
        /// The command.
        command: String,
        /// QEMU's description.
        answer: String,
    },
    /// The socket failed, closed, or stayed silent for a minute.
    #[error("Talking QMP to the guest")]
    Io(#[from] io::Error),
    /// Not JSON.
    #[error("Reading QEMU's QMP answer")]
    Json(#[from] serde_json::Error),
}

/// One conversation with a monitor.
#[derive(Debug)]
pub struct Qmp {
    stream: BufReader<UnixStream>,
    events: Vec<Value>,
}

impl Qmp {
    /// Hear the greeting, leave negotiation mode.
    pub(super) fn greet(stream: UnixStream) -> Result<Self, QmpError> {
        stream.set_read_timeout(Some(TIMEOUT))?;
        let mut qmp = Self { stream: BufReader::new(stream), events: Vec::new() };
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

    /// Send any command and return what it returns.
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
            match heard.get_mut("return") {
                Some(value) => return Ok(value.take()),
                None => self.events.push(heard),
            }
        }
    }

    /// Events heard so far, oldest first; they are forgotten here.
    pub fn take_events(&mut self) -> Vec<Value> {
        std::mem::take(&mut self.events)
    }

    /// `running`, `paused`, `shutdown`...
    pub fn status(&mut self) -> Result<String, QmpError> {
        let answer = self.command("query-status", json!({}))?;
        Ok(answer.get("status").and_then(Value::as_str).unwrap_or("unknown").to_string())
    }

    /// Plug in a DIMM of `size`, a shared memfd like the RAM at boot. The backend is `{id}-mem`, the device `id`.
    /// Needs [`super::Builder::hotplug_room`].
    pub fn plug_dimm(&mut self, id: &str, size: Bytes) -> Result<(), QmpError> {
        let backend = format!("{id}-mem");
        self.command(
            "object-add",
            json!({ "qom-type": "memory-backend-memfd", "id": backend, "size": size.0, "share": true }),
        )?;
        self.command("device_add", json!({ "driver": "pc-dimm", "id": id, "memdev": backend }))?;
        Ok(())
    }

    /// Ask the guest to let the DIMM go; it is out when [`Self::dimms`] no longer lists it. Then [`Self::drop_dimm`].
    pub fn unplug_dimm(&mut self, id: &str) -> Result<(), QmpError> {
        self.command("device_del", json!({ "id": id })).map(drop)
    }

    /// Give up the memory behind an unplugged DIMM: QEMU unmaps it.
    pub fn drop_dimm(&mut self, id: &str) -> Result<(), QmpError> {
        self.command("object-del", json!({ "id": format!("{id}-mem") })).map(drop)
    }

    /// Ids of the DIMMs that are in.
    pub fn dimms(&mut self) -> Result<Vec<String>, QmpError> {
        let answer = self.command("query-memory-devices", json!({}))?;
        let list = answer.as_array().cloned().unwrap_or_default();
        Ok(list.iter().filter_map(|entry| entry["data"]["id"].as_str().map(str::to_string)).collect())
    }

    /// Ask the balloon to leave the guest `memory`; it moves there over time.
    pub fn set_balloon(&mut self, memory: Bytes) -> Result<(), QmpError> {
        self.command("balloon", json!({ "value": memory.0 })).map(drop)
    }

    /// What the balloon leaves the guest now.
    pub fn balloon(&mut self) -> Result<Bytes, QmpError> {
        let answer = self.command("query-balloon", json!({}))?;
        Ok(Bytes(answer.get("actual").and_then(Value::as_u64).unwrap_or(0)))
    }

    /// Stop the vCPUs.
    pub fn pause(&mut self) -> Result<(), QmpError> {
        self.command("stop", json!({})).map(drop)
    }

    /// Let them run again.
    pub fn resume(&mut self) -> Result<(), QmpError> {
        self.command("cont", json!({})).map(drop)
    }
}
