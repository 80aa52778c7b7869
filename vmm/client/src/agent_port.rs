//! The host's end of the virtio-serial port of the guest's agent.
//!
//! Before: the VMM shows its guest a virtio-serial port. After: each engine gets a descriptor of the port's host end
//! from the service thread whenever it asks, so that the next engine has it, too.
//! Promise: no other user can be at the other end. A socket without a name is known to this process alone; a socket
//! with a name must be in a folder that nobody else may enter.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// The environment variable with a socket's path. Without it and [`crate::Builder::agent_port`], there is no port.
pub const AGENT_VARIABLE: &str = "BALLAST_AGENT";

/// The host's end of the port of the guest's agent.
#[derive(Debug)]
pub enum AgentPort {
    /// A connected Unix stream socket, whose other end is the VMM's port.
    Connected(OwnedFd),
    /// A listening Unix stream socket of the VMM, in a folder of mode 0700 of the VMM's user.
    Listening(PathBuf),
}

impl AgentPort {
    pub(crate) fn of_environment() -> Option<Self> {
        let path = std::env::var_os(AGENT_VARIABLE).filter(|path| !path.is_empty())?;
        Some(Self::Listening(path.into()))
    }

    /// A descriptor for an engine.
    pub(crate) fn open(&self) -> io::Result<OwnedFd> {
        match self {
            Self::Connected(socket) => Ok(rustix::io::fcntl_dupfd_cloexec(socket, 0)?),
            Self::Listening(path) => {
                check_folder(path.parent().unwrap_or(Path::new("/")))?;
                let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
                let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
                let connected = rustix::net::connect(&socket, &SocketAddrUnix::new(path)?);
                connected.map_err(|error| describe(path, error.into()))?;
                Ok(socket)
            }
        }
    }
}

fn describe(path: &Path, error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

/// Whether only this process's user, and root, can put a socket into this folder.
fn check_folder(folder: &Path) -> io::Result<()> {
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let found = std::fs::metadata(folder).map_err(|error| describe(folder, error))?;
    let (mode, owner) = (found.mode() & 0o7777, found.uid());
    if mode & 0o077 == 0 && (owner == 0 || owner == rustix::process::geteuid().as_raw()) {
        return Ok(());
    }
    let what = format!("mode {mode:04o}, owner {owner}: others may be first at a socket there; give it mode 0700");
    Err(describe(folder, io::Error::new(io::ErrorKind::PermissionDenied, what)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::{UnixListener, UnixStream};

    #[test]
    fn each_engine_gets_the_connected_port_and_its_end_closes_nothing() {
        let (ours, mut guest) = UnixStream::pair().expect("a pair");
        let port = AgentPort::Connected(ours.into());
        for _ in 0..2 {
            let mut engine: UnixStream = port.open().expect("a descriptor").into();
            engine.write_all(b"hello").expect("written");
            let mut bytes = [0; 5];
            guest.read_exact(&mut bytes).expect("read");
            assert_eq!(&bytes, b"hello");
        }
    }

    #[test]
    fn a_socket_in_a_folder_that_others_may_enter_is_refused() {
        let dir = tempfile::tempdir().expect("a folder");
        let mode = |mode| std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(mode)).expect("chmod");
        mode(0o700);
        let path = dir.path().join("agent.sock");
        let port = AgentPort::Listening(path.clone());
        let missing = port.open().expect_err("nobody listens").to_string();
        assert!(missing.contains("agent.sock"), "{missing}");
        let listener = UnixListener::bind(&path).expect("bind");
        port.open().expect("it listens");
        listener.accept().expect("connected");
        for open in [0o711, 0o770, 0o1777] {
            mode(open);
            let error = port.open().expect_err("others may be first").to_string();
            assert!(error.contains("give it mode 0700"), "{error}");
        }
        mode(0o700);
        port.open().expect("as before");
    }
}
