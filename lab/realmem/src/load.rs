//! The load of a server: pipelined requests from another CPU, every byte of the replies checked.
//!
//! Before: a server listens. After: [`Window`]s with speed, latencies and wrong bytes.
//! Threads: the caller's, which stays on [`LOAD_CPU`]. Units: requests, microseconds.
//! Promise: a value of another key or version than the last one written is a wrong value, and so is a missing one.
//!
//! [`DEPTH`] requests are sent at once, and then their replies are read: a load that waits for each reply measures how
//! soon the kernel wakes two processes (6,000 or 25,000 requests a second, by the placement of the threads).

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::keys::{Keys, Request, Sequence};
use crate::protocol::{Protocol, Reply, VALUE, fill};
use crate::server::{LOAD_CPU, Server, stay_on};

/// Requests under way at a time.
pub const DEPTH: usize = 16;
/// Steps of the fixed loop that tells the speed of the clock: some 20 ms.
const LOOP: u64 = 20_000_000;

/// A load on one server.
#[derive(Debug)]
pub struct Load {
    stream: UnixStream,
    protocol: Protocol,
    keys: Keys,
    /// The number of writes of each key.
    versions: Vec<u32>,
    out: Vec<u8>,
    buffer: Vec<u8>,
}

/// What the load met in one interval.
#[derive(Clone, Debug, Default)]
pub struct Window {
    /// Requests a second.
    pub per_s: f64,
    /// Requests a second, of those a clock of one step a nanosecond would make: speeds of two windows compare so.
    pub speed: f64,
    /// Values that were not as written.
    pub wrong: u64,
    /// Microseconds of [`DEPTH`] requests: median, 95 and 99 %.
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
        let stream = server.connect()?;
        stream.set_read_timeout(Some(Duration::from_secs(60))).context("Setting a timeout")?;
        let mut load = Self {
            stream,
            protocol,
            keys: Keys::new(sequence, keys, seed),
            versions: vec![0; keys as usize],
            out: Vec::new(),
            buffer: Vec::new(),
        };
        for first in (0..keys).step_by(DEPTH) {
            let batch: Vec<_> = (first..keys.min(first + DEPTH as u32)).map(|key| Request { key, write: true }).collect();
            ensure!(load.batch(&batch)? == 0, "the server does not confirm writes");
        }
        Ok(load)
    }

    /// Sends requests for this long.
    pub fn run(&mut self, time: Duration) -> Result<Window> {
        let mut window = Window::default();
        let (clock, start) = (clock_ns(), Instant::now());
        let (mut took, mut batch) = (Vec::new(), Vec::with_capacity(DEPTH));
        while start.elapsed() < time {
            batch.clear();
            batch.extend((0..DEPTH).map(|_| self.keys.next_request()));
            let began = Instant::now();
            window.wrong += self.batch(&batch)?;
            took.push(began.elapsed().as_secs_f64() * 1e6);
        }
        window.per_s = (took.len() * DEPTH) as f64 / start.elapsed().as_secs_f64();
        window.speed = window.per_s * f64::midpoint(clock, clock_ns());
        took.sort_unstable_by(f64::total_cmp);
        let at = |part: f64| took.get((took.len() as f64 * part) as usize).copied().unwrap_or(0.0);
        (window.p50_us, window.p95_us, window.p99_us) = (at(0.5), at(0.95), at(0.99));
        Ok(window)
    }

    /// Reads every key once; returns the number of wrong values.
    pub fn check_all(&mut self) -> Result<u64> {
        let keys = self.versions.len() as u32;
        let mut wrong = 0;
        for first in (0..keys).step_by(DEPTH) {
            let batch: Vec<_> =
                (first..keys.min(first + DEPTH as u32)).map(|key| Request { key, write: false }).collect();
            wrong += self.batch(&batch)?;
        }
        Ok(wrong)
    }

    /// Sends these requests at once and reads their replies; returns the number of wrong values.
    fn batch(&mut self, batch: &[Request]) -> Result<u64> {
        let mut value = [0; VALUE];
        self.out.clear();
        // What each reply must be: a key may be written and read in one batch.
        let mut wanted = [0; DEPTH];
        for (request, wanted) in batch.iter().zip(&mut wanted) {
            let version = &mut self.versions[request.key as usize];
            if request.write {
                *version += 1;
                fill(&mut value, request.key, *version);
                self.protocol.set(&mut self.out, request.key, &value);
            } else {
                self.protocol.get(&mut self.out, request.key);
            }
            *wanted = *version;
        }
        self.stream.write_all(&self.out).context("Writing to the server")?;
        let (mut filled, mut parsed, mut wrong) = (0, 0, 0);
        self.buffer.resize(DEPTH * (VALUE + 128), 0);
        for (request, version) in batch.iter().zip(wanted) {
            while self.protocol.reply(&self.buffer[parsed..filled])?.is_none() {
                let got = self.stream.read(&mut self.buffer[filled..]).context("Reading from the server")?;
                ensure!(got > 0, "the server closed the connection");
                filled += got;
            }
            let Some((reply, len)) = self.protocol.reply(&self.buffer[parsed..filled])? else { continue };
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
        Ok(wrong)
    }
}

/// Nanoseconds of a step of a fixed loop: it tells the clock at which this CPU runs now.
fn clock_ns() -> f64 {
    let start = Instant::now();
    let mut state = 1u64;
    for _ in 0..LOOP {
        state = std::hint::black_box(state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1));
    }
    start.elapsed().as_nanos() as f64 / LOOP as f64
}
