//! The socket to an agent: the host's end of its VMM's virtio-serial port.
//!
//! Before: the client in the VMM's process has sent it. After: bytes go to and from the guest as far as they are taken.
//! Threads: a fault worker notices input; the VM's agent task does everything else.
//! Promise: nothing here waits, whatever the VMM does to the socket; output that the guest does not read is dropped
//! beyond a bound; input wakes a thread once, until all of it was read.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketType};

use crate::run::queue::{GroupId, Next};
use crate::run::serve::{After, Serve};
use crate::run::servers::{Served, Servers};
use crate::vm::guest::told::Told;

/// Most bytes that wait for the guest: some messages of the longest kind.
const BEHIND: usize = 256 << 10;

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

    /// The workers that are bound to a CPU are for faults.
    fn roams(&self) -> bool {
        true
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Read {
    Bytes(usize),
    /// No input; the task is notified of the next.
    Nothing,
    /// The VMM has closed the socket.
    Gone,
}

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
    /// A channel to this port. Fails if it is no connected Unix stream socket, or the kernel does not watch it.
    pub fn open(port: OwnedFd, group: GroupId, told: &Arc<Told>) -> io::Result<Self> {
        use rustix::net::sockopt::{socket_domain, socket_type};
        // Reading a file could wait for its file system.
        if (socket_domain(&port)?, socket_type(&port)?) != (AddressFamily::UNIX, SocketType::STREAM) {
            return Err(io::Error::other("the VMM gave a port that is no Unix stream socket"));
        }
        let (socket, told) = (Arc::new(port), told.clone());
        let served = Servers::of_process()?.add(group, socket.clone(), |_| Box::new(Port(told)))?;
        let channel = Self { socket, served, out: Vec::new() };
        channel.served.listen_once()?;
        Ok(channel)
    }

    /// Reads bytes of the guest. Never waits. Fails if the socket is broken.
    pub fn read(&mut self, buffer: &mut [u8]) -> io::Result<Read> {
        loop {
            return match rustix::net::recv(&*self.socket, &mut *buffer, RecvFlags::DONTWAIT) {
                Ok((_, 0)) => Ok(Read::Gone),
                Ok((_, count)) => Ok(Read::Bytes(count)),
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => self.served.listen_once().map(|()| Read::Nothing),
                Err(error) => Err(error.into()),
            };
        }
    }

    /// Queues bytes for the guest. Returns false and drops them if too much is unread.
    pub fn send(&mut self, bytes: &[u8]) -> bool {
        let fits = self.out.len() + bytes.len() <= BEHIND;
        if fits {
            self.out.extend_from_slice(bytes);
        }
        fits
    }

    /// Sends as much as the guest's socket takes now. Fails if the VMM has closed the socket.
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

    /// A channel whose task counts its runs. All runs that its opening causes are over.
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

    fn until_more(runs: &AtomicU32, than: u32) {
        let began = Instant::now();
        while runs.load(Ordering::SeqCst) <= than {
            assert!(began.elapsed() < Duration::from_secs(60), "no run after {than}");
            std::thread::yield_now();
        }
    }

    #[test]
    fn input_wakes_the_task_once_until_all_of_it_was_read() {
        let (mut channel, mut peer, runs) = counted();
        for _ in 0..20 {
            let before = runs.load(Ordering::SeqCst);
            peer.write_all(&[1]).expect("written");
            until_more(&runs, before);
            // The other channel's input comes later, so the visit for this one is over when the other one is handled.
            (0..100).for_each(|_| peer.write_all(&[1]).expect("written"));
            let (_channel, mut other, of_other) = counted();
            let of_this = of_other.load(Ordering::SeqCst);
            other.write_all(&[1]).expect("written");
            until_more(&of_other, of_this);
            // A worker that gets no CPU is helped by another one, which visits, too.
            let woken = runs.load(Ordering::SeqCst) - before;
            assert!(woken <= 3, "{woken} times");
            while !matches!(channel.read(&mut [0; 8]), Ok(Read::Nothing)) {}
        }
    }

    #[test]
    fn closed_peers_leave_no_descriptor_and_one_that_never_reads_costs_bounded_memory() {
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
        // Other tests of this process open descriptors, too.
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
    fn only_a_connected_unix_stream_socket_is_a_port() {
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
