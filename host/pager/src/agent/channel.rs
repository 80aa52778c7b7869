//! The socket to an agent: the other end of its VMM's virtio-serial port.
//!
//! Before: the client in the VMM's process has sent the port's host end. After: bytes from and to the guest, as far as
//! either side takes them.
//! Threads: a fault worker notes that there is input; all else is the task of the VM's. Promise: nothing here waits,
//! whatever the VMM does to the socket, and no descriptor comes from there; output that the guest does not take is
//! dropped beyond a bound; input wakes a thread once, until all of it was read.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use ballast_sys::scm;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SendFlags, SocketType};

use crate::run::queue::{GroupId, Next};
use crate::run::serve::{After, Serve};
use crate::run::servers::{Served, Servers};
use crate::vm::guest::told::Told;

/// Most bytes that wait until the guest takes them: some of the longest messages.
const BEHIND: usize = 256 << 10;

/// Notifies the task of input.
struct Port(Arc<Told>);

impl Serve for Port {
    fn serve(&mut self, _now: Instant, _until: Instant) -> After {
        self.0.notifier.notify();
        After::next(Next::Idle)
    }

    fn panicked(&mut self, _times: u32) -> bool {
        true
    }

    fn end(&mut self) {}

    /// The workers of CPUs are for faults.
    fn roams(&self) -> bool {
        true
    }
}

/// Result of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Read {
    /// This number of bytes.
    Bytes(usize),
    /// There is no input; the task is notified when there is.
    Nothing,
    /// The VMM has closed it.
    Gone,
}

/// A connection to the port of an agent.
pub(crate) struct Channel {
    socket: Arc<OwnedFd>,
    served: Served,
    out: Vec<u8>,
}

impl Drop for Channel {
    fn drop(&mut self) {
        self.served.close();
    }
}

impl std::fmt::Debug for Channel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Channel").field("behind", &self.out.len()).finish_non_exhaustive()
    }
}

impl Channel {
    /// A conversation on this port, for the VM of this group.
    ///
    /// # Errors
    /// It is no connected Unix stream socket, or the kernel does not watch it.
    pub fn open(port: OwnedFd, group: GroupId, told: &Arc<Told>) -> io::Result<Self> {
        use rustix::net::sockopt::{socket_domain, socket_type};
        // The read of a file could wait for its file system.
        if (socket_domain(&port)?, socket_type(&port)?) != (AddressFamily::UNIX, SocketType::STREAM) {
            return Err(io::Error::other("the VMM gave a port that is no Unix stream socket"));
        }
        scm::refuse_descriptors(&port);
        let (socket, told) = (Arc::new(port), told.clone());
        let served = Servers::of_process()?.add(group, socket.clone(), |_| Box::new(Port(told)))?;
        let channel = Self { socket, served, out: Vec::new() };
        channel.served.listen_once()?;
        Ok(channel)
    }

    /// Reads bytes of the guest.
    ///
    /// # Errors
    /// The socket is broken, or brings descriptors.
    pub fn read(&mut self, buffer: &mut [u8]) -> io::Result<Read> {
        match scm::try_read_plain(&*self.socket, buffer) {
            Ok(0) => Ok(Read::Gone),
            Ok(count) => Ok(Read::Bytes(count)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.served.listen_once().map(|()| Read::Nothing)
            }
            Err(error) => Err(error),
        }
    }

    /// Sends this as soon as the guest takes it. Returns false and drops it if too much is unread.
    pub fn send(&mut self, bytes: &[u8]) -> bool {
        let fits = self.out.len() + bytes.len() <= BEHIND;
        if fits {
            self.out.extend_from_slice(bytes);
        }
        fits
    }

    /// Writes as much as the guest takes now.
    ///
    /// # Errors
    /// The VMM has closed the socket.
    pub fn flush(&mut self) -> io::Result<()> {
        let mut sent = 0;
        while sent < self.out.len() {
            match rustix::net::send(&*self.socket, &self.out[sent..], SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                Ok(count) => sent += count,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                Err(error) => return Err(error.into()),
            }
        }
        self.out.drain(..sent);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::pool::Pool;
    use std::io::Write;
    use std::os::unix::net::UnixStream;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::{Duration, Instant};

    /// A connection whose task counts its runs, and that was notified of all that came before.
    fn counted() -> (Channel, UnixStream, Arc<AtomicU32>) {
        let (told, runs, pool) = (Arc::<Told>::default(), Arc::new(AtomicU32::new(0)), Pool::of_process());
        let (group, of_task) = (pool.add_group(), runs.clone());
        let task = move |_| {
            of_task.fetch_add(1, Ordering::SeqCst);
            Next::Idle
        };
        told.notifier.connect(pool.add(group, "counted", task).expect("a thread"));
        until_more(&runs, 0);
        let (ours, peer) = UnixStream::pair().expect("a pair");
        let channel = Channel::open(ours.into(), group, &told).expect("a port");
        // A new server is visited once without input.
        until_more(&runs, 1);
        (channel, peer, runs)
    }

    /// Waits until there were more runs than this.
    fn until_more(runs: &AtomicU32, than: u32) {
        let began = Instant::now();
        while runs.load(Ordering::SeqCst) <= than {
            assert!(began.elapsed() < Duration::from_secs(60), "no run after {than}");
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_guest_that_writes_more_often_than_it_is_read_wakes_nobody_until_all_was_read_and_then_the_next_byte_does() {
        let (mut channel, mut peer, runs) = counted();
        for _ in 0..20 {
            let before = runs.load(Ordering::SeqCst);
            peer.write_all(&[1]).expect("written");
            until_more(&runs, before);
            // Another one's input comes after, so its visit would be over as well.
            (0..100).for_each(|_| peer.write_all(&[1]).expect("written"));
            let (_channel, mut other, of_other) = counted();
            let of_this = of_other.load(Ordering::SeqCst);
            other.write_all(&[1]).expect("written");
            until_more(&of_other, of_this);
            // A worker that is found without a CPU is visited by another one as well.
            let woken = runs.load(Ordering::SeqCst) - before;
            assert!(woken <= 3, "{woken} times");
            while !matches!(channel.read(&mut [0; 8]), Ok(Read::Nothing)) {}
        }
    }

    #[test]
    fn a_peer_that_closes_again_and_again_costs_no_descriptor_and_one_that_never_reads_costs_bounded_memory() {
        let (told, group) = (Arc::default(), Pool::of_process().add_group());
        let connect = || -> (Channel, UnixStream) {
            let (ours, peer) = UnixStream::pair().expect("a pair");
            (Channel::open(ours.into(), group, &told).expect("a port"), peer)
        };
        let descriptors = || std::fs::read_dir("/proc/self/fd").expect("descriptors").count();
        let (before, whole) = (descriptors(), ballast_messages::frame(1, 1, &[7; 100]));
        for round in 0..2000 {
            let (mut channel, mut peer) = connect();
            peer.write_all(&whole[..round % whole.len()]).expect("written");
            drop(peer);
            while !matches!(channel.read(&mut [0; 64]), Ok(Read::Gone) | Err(_)) {}
        }
        // Other tests of this process have some, too.
        assert!(descriptors() < before + 500, "{before} before, {} now", descriptors());

        let (mut channel, _peer) = connect();
        let mut dropped = 0;
        for _ in 0..2000 {
            dropped += u32::from(!channel.send(&[0; 10_000]));
            channel.flush().expect("it is open");
            assert!(channel.out.len() <= BEHIND && channel.out.capacity() <= 2 * BEHIND);
        }
        assert!(dropped > 1000, "{dropped}");
    }

    #[test]
    fn a_descriptor_that_a_vmm_has_put_into_its_port_is_not_received() {
        let (told, group) = (Arc::default(), Pool::of_process().add_group());
        let (ours, peer) = UnixStream::pair().expect("a pair");
        let (kept, mut other) = UnixStream::pair().expect("a pair");
        scm::send(&peer, b"words", &[std::os::fd::AsFd::as_fd(&kept)]).expect("sent");
        drop(kept);
        let mut channel = Channel::open(ours.into(), group, &told).expect("a port");
        assert_eq!(channel.read(&mut [0; 8]).expect_err("a descriptor").kind(), io::ErrorKind::InvalidData);
        other.write_all(b"x").expect("it was not closed by this thread");
    }

    #[test]
    fn what_is_no_connected_unix_stream_socket_is_no_port() {
        let (told, group) = (Arc::default(), Pool::of_process().add_group());
        let file = OwnedFd::from(std::fs::File::open("/dev/zero").expect("open"));
        let tcp = OwnedFd::from(std::net::TcpListener::bind("127.0.0.1:0").expect("bind"));
        let (datagrams, _other) = std::os::unix::net::UnixDatagram::pair().expect("a pair");
        for port in [file, tcp, datagrams.into()] {
            Channel::open(port, group, &told).expect_err("it could wait");
        }
        let alone = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).expect("a socket");
        let mut channel = Channel::open(alone, group, &told).expect("it waits for nothing");
        channel.read(&mut [0; 8]).expect_err("it is not connected");
    }
}
