//! The load of a server: pipelined requests from another CPU, every byte of the replies checked.
//!
//! Before: a server listens. After: [`Window`]s with speed, latencies and wrong bytes.
//! Threads: the caller's, which stays on [`LOAD_CPU`]. Units: requests, microseconds.
//! Promise: a value of another key or version than the last one written is a wrong value, and so is a missing one.
//!
//! [`DEPTH`] requests are sent at once, and then the replies to the previous batch are read, on another connection: so
//! the server always has work. A load that waits for each reply measures how soon the kernel wakes two processes (6,000
//! or 25,000 requests a second, by the placement of the threads). With two connections only, the server has a third of
//! its CPU left. A key belongs to one connection, so each read has one right answer.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::keys::{Keys, Request, Sequence};
use crate::protocol::{Protocol, Reply, VALUE, fill};
use crate::server::{LOAD_CPU, Server, stay_on};

/// Requests under way at a time on each connection.
pub const DEPTH: usize = 16;
const CONNECTIONS: usize = 8;

/// A load on one server.
#[derive(Debug)]
pub struct Load {
    connections: Vec<Connection>,
    protocol: Protocol,
    keys: Keys,
    versions: Vec<u32>,
    out: Vec<u8>,
}

/// A connection, and the requests under way on it.
#[derive(Debug)]
struct Connection {
    stream: UnixStream,
    /// Requests of the next batch.
    next: Vec<Request>,
    /// Requests that were sent, with the version that each must find, and the time of sending.
    sent: Vec<(Request, u32)>,
    at: Instant,
    buffer: Vec<u8>,
}

/// The results of one interval.
#[derive(Clone, Debug, Default)]
pub struct Window {
    /// Requests a second.
    pub per_s: f64,
    /// Values that were not as written.
    pub wrong: u64,
    /// Microseconds from sending [`DEPTH`] requests to the last reply: median, 95 and 99 %.
    pub p50_us: f64,
    /// See [`Self::p50_us`].
    pub p95_us: f64,
    /// See [`Self::p50_us`].
    pub p99_us: f64,
}

impl Load {
    /// Connects, and writes every key once.
    pub fn begin(server: &Server, protocol: Protocol, sequence: Sequence, keys: u32, seed: u64) -> Result<Self> {
        stay_on(LOAD_CPU).with_context(|| format!("Staying on CPU {LOAD_CPU}"))?;
        let connect = || -> Result<Connection> {
            let stream = server.connect()?;
            stream.set_read_timeout(Some(Duration::from_secs(60))).context("Setting a timeout")?;
            let buffer = vec![0; DEPTH * (VALUE + 128)];
            Ok(Connection { stream, next: Vec::new(), sent: Vec::new(), at: Instant::now(), buffer })
        };
        let mut load = Self {
            connections: (0..CONNECTIONS).map(|_| connect()).collect::<Result<_>>()?,
            protocol,
            keys: Keys::new(sequence, keys, seed),
            versions: vec![0; keys as usize],
            out: Vec::new(),
        };
        let unconfirmed = load.all(true)?;
        ensure!(unconfirmed == 0, "the server does not confirm {unconfirmed} writes");
        Ok(load)
    }

    /// Sends requests for this long.
    pub fn run(&mut self, time: Duration) -> Result<Window> {
        let mut window = Window::default();
        let start = Instant::now();
        let mut took = Vec::new();
        while start.elapsed() < time {
            let request = self.keys.next_request();
            window.wrong += self.request(request, &mut took)?;
        }
        window.wrong += self.finish(&mut took)?;
        window.per_s = (took.len() * DEPTH) as f64 / start.elapsed().as_secs_f64();
        took.sort_unstable_by(f64::total_cmp);
        let at = |part: f64| took.get((took.len() as f64 * part) as usize).copied().unwrap_or(0.0);
        (window.p50_us, window.p95_us, window.p99_us) = (at(0.5), at(0.95), at(0.99));
        Ok(window)
    }

    /// Sends this many requests, and adds the microseconds of each [`DEPTH`] of them. Returns how many values were
    /// wrong.
    pub fn burst(&mut self, requests: u32, took: &mut Vec<f64>) -> Result<u64> {
        let mut wrong = 0;
        for _ in 0..requests {
            let request = self.keys.next_request();
            wrong += self.request(request, took)?;
        }
        Ok(wrong + self.finish(took)?)
    }

    /// Reads every key once; returns the number of wrong values.
    pub fn check_all(&mut self) -> Result<u64> {
        self.all(false)
    }

    /// Writes or reads every key once; returns the number of wrong replies.
    fn all(&mut self, write: bool) -> Result<u64> {
        let (mut wrong, mut took) = (0, Vec::new());
        for key in 0..self.versions.len() as u32 {
            wrong += self.request(Request { key, write }, &mut took)?;
        }
        Ok(wrong + self.finish(&mut took)?)
    }

    /// Adds a request to the next batch of its key's connection, and sends that batch when it is full. Returns the
    /// number of wrong values in the batch before it.
    fn request(&mut self, request: Request, took: &mut Vec<f64>) -> Result<u64> {
        let at = request.key as usize % CONNECTIONS;
        self.connections[at].next.push(request);
        if self.connections[at].next.len() < DEPTH {
            return Ok(0);
        }
        let wrong = self.receive(at, took)?;
        self.send(at)?;
        Ok(wrong)
    }

    /// Sends the incomplete batches and reads all replies.
    fn finish(&mut self, took: &mut Vec<f64>) -> Result<u64> {
        let mut wrong = 0;
        for at in 0..CONNECTIONS {
            wrong += self.receive(at, took)?;
            self.send(at)?;
            wrong += self.receive(at, took)?;
        }
        Ok(wrong)
    }

    fn send(&mut self, at: usize) -> Result<()> {
        let mut value = [0; VALUE];
        let connection = &mut self.connections[at];
        self.out.clear();
        for request in connection.next.drain(..) {
            let version = &mut self.versions[request.key as usize];
            if request.write {
                *version += 1;
                fill(&mut value, request.key, *version);
                self.protocol.set(&mut self.out, request.key, &value);
            } else {
                self.protocol.get(&mut self.out, request.key);
            }
            connection.sent.push((request, *version));
        }
        connection.at = Instant::now();
        connection.stream.write_all(&self.out).context("Writing to the server")
    }

    /// Reads the replies to the last batch of a connection; returns the number of wrong values.
    fn receive(&mut self, at: usize, took: &mut Vec<f64>) -> Result<u64> {
        let mut value = [0; VALUE];
        let Connection { stream, sent, at, buffer, .. } = &mut self.connections[at];
        let (mut filled, mut parsed, mut wrong) = (0, 0, 0);
        let is_whole = sent.len() == DEPTH;
        for (request, version) in sent.drain(..) {
            while self.protocol.reply(&buffer[parsed..filled])?.is_none() {
                let got = stream.read(&mut buffer[filled..]).context("Reading from the server")?;
                ensure!(got > 0, "the server closed the connection");
                filled += got;
            }
            let Some((reply, len)) = self.protocol.reply(&buffer[parsed..filled])? else { continue };
            parsed += len;
            let is_right = match reply {
                Reply::Stored => request.write,
                Reply::Missing => false,
                Reply::Value(found) => {
                    fill(&mut value, request.key, version);
                    !request.write && found == value
                }
            };
            wrong += u64::from(!is_right);
        }
        if is_whole {
            took.push(at.elapsed().as_secs_f64() * 1e6);
        }
        Ok(wrong)
    }
}
