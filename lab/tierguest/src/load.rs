//! Programs most of whose memory is touched rarely, for `ballast bench guest`.
//!
//! Before: a program is started with a size. It writes `filled` when all its memory is present. After: it does a piece
//! of work each 100 ms, or later if it is slowed down. In reply to a line `requests` it writes the number of requests
//! since the last such line, and their times; at any other line it ends, and all of its memory is compared. Threads:
//! one works, one reads commands. Units: the size is MiB, times are us.
//!
//! A guest of the bench is small, and a program would pass through all of its memory in a second. So work is paced: one
//! pass takes a minute, as in a large guest.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::clusters::Clusters;
use crate::compiler::Compiler;
use crate::heat::random;

const EVERY: Duration = Duration::from_millis(100);
const PIECES: usize = 640;

trait Load: Send {
    /// Does a piece of work, and adds the time of each of its requests; a piece without requests counts as one request.
    fn work(&mut self, took: &mut Vec<Duration>) -> Result<()>;
    /// Compares all of its memory. Returns the number of wrong values.
    fn wrong(&mut self) -> Result<usize>;
}

/// Runs until the final comparison is done.
pub fn run(name: &str, mib: usize) -> Result<()> {
    let mut load: Box<dyn Load> = match name {
        "kmeans" => Box::new(Kmeans::new(mib)),
        "memcached" => Box::new(Memcached::new(mib)?),
        "compiler" => Box::new(Compiler::new(mib)?),
        _ => bail!("no program {name}"),
    };
    let ends = Arc::new(AtomicBool::new(false));
    let its_end = Arc::clone(&ends);
    let served = Arc::new(Mutex::new(Vec::new()));
    let its_served = Arc::clone(&served);
    let worker = std::thread::spawn(move || -> Result<Box<dyn Load>> {
        let mut next = Instant::now();
        while !its_end.load(Ordering::Relaxed) {
            let (began, mut took) = (Instant::now(), Vec::new());
            load.work(&mut took)?;
            if took.is_empty() {
                took.push(began.elapsed());
            }
            lock(&its_served).append(&mut took);
            next = (next + EVERY).max(Instant::now());
            std::thread::sleep(next.saturating_duration_since(Instant::now()));
        }
        Ok(load)
    });
    let mut out = io::stdout();
    writeln!(out, "BALLAST-SAYS filled").and_then(|()| out.flush())?;
    for line in io::stdin().lock().lines() {
        if line? != "requests" {
            break;
        }
        let said = summary(std::mem::take(&mut *lock(&served)));
        writeln!(out, "BALLAST-SAYS {said}").and_then(|()| out.flush())?;
    }
    ends.store(true, Ordering::Relaxed);
    let mut load = worker.join().ok().context("the worker panicked")??;
    match load.wrong()? {
        0 => Ok(()),
        wrong => bail!("{wrong} items are wrong"),
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The number of requests, and the median, 95th and 99th percentile of their times in us.
fn summary(mut took: Vec<Duration>) -> String {
    took.sort_unstable();
    let at = |percent: usize| took.get(took.len() * percent / 100).map_or(0, Duration::as_micros);
    format!("requests {} {} {} {}", took.len(), at(50), at(95), at(99))
}

const VALUES: usize = 16;
type Point = [i32; VALUES];

/// k-means: each pass assigns each point to its nearest cluster.
struct Kmeans {
    points: Vec<Point>,
    at: usize,
    clusters: Clusters<VALUES>,
}

fn point(number: usize) -> Point {
    let mut seed = number as u64 + 1;
    std::array::from_fn(|_| (random(&mut seed) >> 40) as i32)
}

impl Kmeans {
    fn new(mib: usize) -> Self {
        let points: Vec<Point> = (0..(mib << 20) / size_of::<Point>()).map(point).collect();
        let clusters = Clusters::new(std::array::from_fn(|cluster| points[cluster]));
        Self { points, at: 0, clusters }
    }
}

impl Load for Kmeans {
    fn work(&mut self, _: &mut Vec<Duration>) -> Result<()> {
        let end = (self.at + self.points.len() / PIECES).min(self.points.len());
        self.points[self.at..end].iter().for_each(|point| self.clusters.add(point));
        self.at = end;
        if end == self.points.len() {
            self.clusters.end_pass();
            self.at = 0;
        }
        Ok(())
    }

    fn wrong(&mut self) -> Result<usize> {
        Ok(self.points.iter().enumerate().filter(|(number, now)| **now != point(*number)).count())
    }
}

/// Reads of memcached; nine in ten are of a tenth of its values.
struct Memcached {
    server: Child,
    connection: BufReader<UnixStream>,
    keys: u64,
    seed: u64,
}

const SOCKET: &str = "/tmp/memcached";
/// Bytes of a value: with its key and header it fills most of a page.
const VALUE: usize = 3900;
const READS: usize = 64;

fn value(key: u64) -> Vec<u8> {
    let mut seed = key + 1;
    let words = std::iter::repeat_with(|| random(&mut seed).to_le_bytes());
    words.flatten().take(VALUE).collect()
}

impl Memcached {
    fn new(mib: usize) -> Result<Self> {
        let server = Command::new("memcached").args(["-u", "root", "-t", "1", "-s", SOCKET, "-m", "512"]).spawn();
        let server = server.context("Starting memcached")?;
        let began = Instant::now();
        let connection = loop {
            match UnixStream::connect(SOCKET) {
                Ok(connection) => break BufReader::new(connection),
                Err(error) if began.elapsed() > Duration::from_secs(60) => return Err(error).context("memcached"),
                Err(_) => std::thread::sleep(EVERY),
            }
        };
        let mut this = Self { server, connection, keys: ((mib << 20) / VALUE) as u64, seed: 7 };
        for key in 0..this.keys {
            let head = format!("set {key} 0 0 {VALUE}\r\n");
            this.connection.get_mut().write_all(&[head.as_bytes(), &value(key), b"\r\n"].concat())?;
            let said = this.line()?;
            if said != "STORED" {
                bail!("memcached says {said:?}");
            }
        }
        Ok(this)
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.connection.read_line(&mut line)?;
        Ok(line.trim_end().to_owned())
    }

    /// The value of this key; a value is never empty.
    fn read(&mut self, key: u64) -> Result<Vec<u8>> {
        self.connection.get_mut().write_all(format!("get {key}\r\n").as_bytes())?;
        if self.line()? == "END" {
            return Ok(Vec::new());
        }
        let mut bytes = vec![0; VALUE + 2];
        self.connection.read_exact(&mut bytes)?;
        self.line()?;
        bytes.truncate(VALUE);
        Ok(bytes)
    }
}

impl Load for Memcached {
    fn work(&mut self, took: &mut Vec<Duration>) -> Result<()> {
        for _ in 0..READS {
            let now = random(&mut self.seed);
            let hot = self.keys / 10;
            let key = if now.is_multiple_of(10) { hot + (now >> 8) % (self.keys - hot) } else { (now >> 8) % hot };
            let began = Instant::now();
            let found = self.read(key)?;
            took.push(began.elapsed());
            if found != value(key) {
                bail!("the value of {key} is wrong");
            }
        }
        Ok(())
    }

    fn wrong(&mut self) -> Result<usize> {
        let mut wrong = 0;
        for key in 0..self.keys {
            wrong += usize::from(self.read(key)? != value(key));
        }
        self.server.kill()?;
        Ok(wrong)
    }
}

impl Load for Compiler {
    fn work(&mut self, _: &mut Vec<Duration>) -> Result<()> {
        if !self.compile()? {
            bail!("the compiler wrote something else");
        }
        Ok(())
    }

    fn wrong(&mut self) -> Result<usize> {
        Ok(usize::from(!self.compile()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_changes_nothing_that_is_compared_and_what_is_wrong_is_found() {
        let mut kmeans = Kmeans::new(1);
        (0..2 * PIECES).for_each(|_| kmeans.work(&mut Vec::new()).expect("a piece of work"));
        assert_eq!(kmeans.wrong().expect("compared"), 0);
        kmeans.points[7][1] = 5;
        assert_eq!(kmeans.wrong().expect("compared"), 1);
    }
}
