//! State that VMM threads and the service thread share, and messages to the operator.
//!
//! Before: `builder` has created the userfaultfds. After: `client` and `service` use it for the life of the process.
//! Threads: any. Units: in the types.
//! Promise: locks are taken in the order gate, link, table; `control` is apart.

use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ballast_base::Uuid;
use ballast_sys::{Uffd, log_line};

use crate::agent_port::AgentPort;
use crate::control::ControlSocket;
use crate::link::Link;
use crate::regions::Table;
use crate::zapped::ZapGate;

pub(crate) type FailStop = Arc<dyn Fn(&str) + Send + Sync>;

/// Timeouts and pauses of the client. Tests set shorter ones.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// Time from the attach message, or from new RAM, to the reply. If a part of that RAM is far, an engine must serve
    /// faults first, possibly one that replaces a hung engine.
    pub handshake: Duration,
    /// Time from a request or a discard to its reply.
    pub answer: Duration,
    /// Pause before each reconnect.
    pub again: Duration,
    /// Pause after a refused resume.
    pub refused_pause: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            handshake: Duration::from_secs(30),
            answer: Duration::from_secs(5),
            again: Duration::from_millis(50),
            refused_pause: Duration::from_secs(2),
        }
    }
}

pub(crate) struct Shared {
    pub socket: PathBuf,
    pub name: String,
    pub uuid: Option<Uuid>,
    pub limit: Option<u64>,
    pub vmm: String,
    /// The userfaultfds, in a fixed order: a page belongs to one of them permanently.
    pub uffds: Vec<Uffd>,
    pub features: u64,
    pub table: Mutex<Table>,
    pub gate: ZapGate,
    pub link: Link,
    pub control: ControlSocket,
    pub fail_stop: Mutex<FailStop>,
    pub timing: Timing,
    pub agent_port: Option<AgentPort>,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("name", &self.name).field("socket", &self.socket).finish_non_exhaustive()
    }
}

/// Prints a line for the operator on the VMM's standard error. It is lost if it cannot be written at once: a pipe
/// without a reader must not stop a guest.
#[doc(hidden)]
pub fn announce(text: &str) {
    log_line::put(std::io::stderr().as_fd(), &format!("ballast: {text}"));
}

pub(crate) fn cut(text: String) -> String {
    log_line::cut_at(text, 256)
}
