//! The virtio-serial port: bytes from and to the host.
//!
//! Before: the VMM shows a port of our name; the host may or may not listen. After: the host's bytes were read, and
//! ours were written as far as the host takes them.
//! Promise: only [`Port::wait`] waits for the host, and not longer than its timeout.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::time::Duration;

use ballast_messages::PORT;

use crate::files;

/// Most bytes that the host has not taken yet: reports and ticks beyond this are dropped.
const BEHIND: usize = 512 << 10;

#[derive(Debug)]
pub struct Port {
    file: File,
    out: Vec<u8>,
    sent: usize,
}

/// Finds our port in sysfs, which has the port's name even without udev.
fn find() -> io::Result<PathBuf> {
    let class = fs::read_dir("/sys/class/virtio-ports");
    let ports = class.map_err(|error| io::Error::new(error.kind(), format!("no virtio-serial port: {error}")))?;
    for port in ports.flatten() {
        if files::read(port.path().join("name")).is_ok_and(|name| name == PORT) {
            return Ok(PathBuf::from("/dev").join(port.file_name()));
        }
    }
    Err(io::Error::new(io::ErrorKind::NotFound, format!("no virtio-serial port is named {PORT}")))
}

impl Port {
    /// Fails if there is no port, or another process has it open.
    pub fn open(path: Option<&str>) -> io::Result<Self> {
        let path = path.map_or_else(find, |path| Ok(path.into()))?;
        let open = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(&path);
        let file =
            open.map_err(|error| io::Error::new(error.kind(), format!("opening {}: {error}", path.display())))?;
        Ok(Self { file, out: Vec::new(), sent: 0 })
    }

    /// Waits until the host sends or takes bytes, at most for this time. Returns whether it listens. Fails without a
    /// port.
    pub fn wait(&self, timeout: Duration) -> io::Result<bool> {
        let out = if self.out.is_empty() { 0 } else { libc::POLLOUT };
        let mut fd = libc::pollfd { fd: self.file.as_raw_fd(), events: libc::POLLIN | out, revents: 0 };
        let ms = timeout.as_millis().min(60_000) as i32;
        // SAFETY: one entry, as the count says.
        if unsafe { libc::poll(&mut fd, 1, ms) } < 0 {
            let error = io::Error::last_os_error();
            return if error.kind() == io::ErrorKind::Interrupted { Ok(true) } else { Err(error) };
        }
        if fd.revents & (libc::POLLERR | libc::POLLNVAL) != 0 {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        Ok(fd.revents & libc::POLLHUP == 0)
    }

    /// Reads bytes from the host; returns 0 if there are none. Fails if the port is gone.
    pub fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self.file.read(buffer) {
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => Ok(0),
            other => other,
        }
    }

    /// Returns whether the host has more than [`BEHIND`] bytes to read, so that reports and ticks must be dropped.
    pub fn is_behind(&self) -> bool {
        self.out.len() - self.sent > BEHIND
    }

    /// Drops the bytes that the host has not taken, because a new session begins.
    pub fn forget(&mut self) {
        self.out.clear();
        self.sent = 0;
    }

    /// Sends this as soon as the host takes it.
    pub fn send(&mut self, bytes: &[u8]) {
        self.out.drain(..self.sent);
        self.sent = 0;
        self.out.extend_from_slice(bytes);
    }

    /// Writes as much as the host takes now. Fails if the port is gone.
    pub fn flush(&mut self) -> io::Result<()> {
        while self.sent < self.out.len() {
            // The driver copies a write into one buffer.
            let end = self.out.len().min(self.sent + (32 << 10));
            match self.file.write(&self.out[self.sent..end]) {
                Ok(0) => break,
                Ok(count) => self.sent += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // The host does not take more, or does not listen.
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::BrokenPipe) => break,
                Err(error) => return Err(error),
            }
        }
        if self.sent == self.out.len() {
            self.forget();
        }
        Ok(())
    }
}
