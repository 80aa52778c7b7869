//! The port of the guest's agent, as `ballast run --agent` or the operator names it.
//!
//! Before: `ballast run` has made a pair of sockets, one of which is QEMU's port. After: the client gives the other one
//! to each engine that asks. An operator who configures QEMU by hand names the path of a socket instead.
//! Threads: any.

use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::sync::Mutex;

use ballast_client::{AgentPort, Builder};
use ballast_sys::lock::Lock;

pub use ballast_client::AGENT_VARIABLE as VARIABLE;

use crate::{guest, shape};

static PORT: Mutex<Option<AgentPort>> = Mutex::new(None);

pub fn take_named() {
    if let Ok(value) = std::env::var(VARIABLE) {
        take(&value);
    }
}

/// Takes the port in this value of the variable: a path, or two descriptor numbers, our end and the VMM's.
fn take(value: &str) {
    let numbers: Option<Vec<RawFd>> = value.split(',').map(|number| number.parse().ok()).collect();
    let port = match numbers.as_deref() {
        Some([ours, theirs]) => {
            // Programs that the VMM starts do not inherit the descriptors.
            // SAFETY: changes a flag of a descriptor, or returns EBADF.
            let set = |fd| unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) } == 0;
            // The program that started the VMM may have closed them, and opened other files under their numbers.
            let open = [*ours, *theirs].map(|fd| guest::is_socket(fd) && set(fd));
            // SAFETY: it is open, and `ballast run` made it for this library alone.
            (open == [true, true]).then(|| AgentPort::Connected(unsafe { OwnedFd::from_raw_fd(*ours) }))
        }
        _ => Some(AgentPort::Listening(value.into())),
    };
    *PORT.locked() = port;
}

pub fn give_port(builder: Builder) -> Builder {
    // A program that starts QEMU passes the port on; any other program that attaches is the VMM.
    if !shape::is_qemu_here() {
        take_named();
    }
    let port = PORT.locked().take();
    if let Some(port) = port { builder.agent_port(port) } else { builder }
}
