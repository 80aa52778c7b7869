//! The measured program: it does random updates of memory, most of them of its hot part.
//!
//! Before: it is started with a kind, a size, and the kind of its memory. It writes `at ADDRESS` when all of that is
//! present. After: it updates words until its input ends. `phase N` moves the heat. `count` writes the number of
//! updates; where accesses are counted by page ([`crate::work`]), `pages` writes a line and these numbers (4 bytes
//! each, modulo 2^32). `attach SOCKET` makes its memory that of a VM of the daemon there.
//! Threads: one updates words, one reads commands, one flushes TLBs. Units: sizes are MiB, a unit is 2 MiB.
//! Promise: first, memory is touched once in the order of its addresses. Pages have 4 KiB, or are huge where that is
//! asked for.
//!
//! Emulated CPUs need the flusher: their TLB holds all of the memory, so a monitor that clears accessed bits without a
//! flush (DAMON) finds no further accesses. The flusher maps and unmaps more pages than the kernel flushes one by one.
//! This empties the TLBs of the CPUs that run this program.

use std::io::{self, BufRead, Write};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use ballast_base::{Bytes, HUGE_SIZE, Hva, PAGE_SIZE};
use ballast_client::Client;
use ballast_sys::remote::Collapsed;
use ballast_sys::{Anon, Mapping, Remote, memfd};

use crate::counted::Counted;
use crate::heat::{BLOCKS, HOT_SHARE, Kind, random};
use crate::work;

/// The memory of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// Its own, as of any program.
    Anon,
    /// A memory file in base pages, as that of a VMM.
    Shared,
    /// The same in huge pages.
    Huge,
}

impl Backing {
    /// Returns the backing of this name.
    pub fn parse(name: &str) -> Option<Self> {
        [Self::Anon, Self::Shared, Self::Huge].into_iter().find(|backing| backing.name() == name)
    }

    /// Returns its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Anon => "anon",
            Self::Shared => "shared",
            Self::Huge => "huge",
        }
    }
}

/// Memory, from an address that is a multiple of 2 MiB on.
enum Memory {
    Anon(Anon),
    File(Mapping, OwnedFd),
}

impl Memory {
    fn new(backing: Backing, bytes: usize) -> Result<Self> {
        if backing == Backing::Anon {
            // One unit more, so that aligned units fit.
            return Ok(Self::Anon(Anon::new(bytes + HUGE_SIZE).context("Mapping memory")?));
        }
        let file = memfd::create("guest", Bytes(bytes as u64)).context("Making a memory file")?;
        Ok(Self::File(Mapping::shared(&file, 0, bytes).context("Mapping it")?, file))
    }

    fn address(&self) -> usize {
        match self {
            Self::Anon(memory) => memory.addr().next_multiple_of(HUGE_SIZE),
            Self::File(memory, _) => memory.addr(),
        }
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        match self {
            Self::Anon(memory) => memory.word(self.address() - memory.addr() + offset),
            Self::File(memory, _) => &memory.words(offset, 1)[0],
        }
    }
}

const FLUSH_EVERY: Duration = Duration::from_millis(20);
/// Pages that the flusher unmaps. The kernel flushes the whole TLB above its ceiling of 33 pages.
const FLUSHED: usize = 64;
/// How often a unit that is busy is tried again.
const MOST_TRIES: usize = 100;
/// Updates between two reads of the phase.
const BATCH: u64 = 4096;

/// Run until the input ends.
pub fn run(kind: Kind, mib: usize, backing: Backing) -> Result<()> {
    let units = (mib << 20) / HUGE_SIZE;
    if units < 8 {
        bail!("{mib} MiB is too little: at least 16");
    }
    let memory = Arc::new(Memory::new(backing, units * HUGE_SIZE)?);
    let this = Remote::open(std::process::id())?;
    for unit in 0..units {
        for page in 0..HUGE_SIZE / PAGE_SIZE {
            memory.word(unit * HUGE_SIZE + page * PAGE_SIZE).store(1, Ordering::Relaxed);
        }
        if backing == Backing::Huge {
            let at = Hva((memory.address() + unit * HUGE_SIZE) as u64);
            let mut outcome = this.collapse(at, HUGE_SIZE as u64)?;
            // The kernel holds a page for a moment.
            for _ in 0..MOST_TRIES {
                if outcome != Collapsed::Busy {
                    break;
                }
                outcome = this.collapse(at, HUGE_SIZE as u64)?;
            }
            // The last unit of a full node stays as it is.
            ensure!(matches!(outcome, Collapsed::Done | Collapsed::NoMemory), "unit {unit}: {outcome:?}");
        }
    }
    let (phase, count) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let address = memory.address();
    let (worker_memory, worker_phase, worker_count) = (Arc::clone(&memory), Arc::clone(&phase), Arc::clone(&count));
    let pages: Arc<Vec<AtomicU32>> = Arc::new((0..units * HUGE_SIZE / PAGE_SIZE).map(|_| AtomicU32::new(0)).collect());
    let worker_pages = Arc::clone(&pages);
    let (ready, is_ready) = mpsc::channel();
    std::thread::spawn(move || {
        if kind.is_counted() {
            let word = |offset: usize| worker_memory.word(offset);
            let words = units * HUGE_SIZE / 8;
            let counted = Counted { word, words, pages: &worker_pages };
            work::run(kind, &counted, &|| ready.send(()).unwrap_or(()));
        } else {
            let _ = ready.send(());
            update(&worker_memory, kind, units, &worker_phase, &worker_count);
        }
    });
    is_ready.recv().context("The worker")?;
    std::thread::spawn(|| -> io::Result<()> {
        loop {
            let flushed = Anon::new(FLUSHED * PAGE_SIZE)?;
            (0..FLUSHED).for_each(|page| flushed.word(page * PAGE_SIZE).store(1, Ordering::Relaxed));
            drop(flushed);
            std::thread::sleep(FLUSH_EVERY);
        }
    });
    let mut out = io::stdout();
    writeln!(out, "at {address}")?;
    out.flush()?;
    let mut client = None;
    for line in io::stdin().lock().lines() {
        let line = line?;
        match line.split_once(' ') {
            Some(("phase", number)) => phase.store(number.parse().context("a phase")?, Ordering::Relaxed),
            Some(("attach", socket)) => {
                let Memory::File(mapping, file) = &*memory else { bail!("its memory is no file") };
                let (at, len) = (Hva(mapping.addr() as u64), Bytes(mapping.len() as u64));
                let client_of = Client::builder().socket(socket).name("vm");
                client = Some(client_of.region(file.try_clone()?, at, len, Bytes(0)).attach().context("Attaching")?);
                writeln!(out, "attached 1")?;
            }
            _ if line == "pages" => {
                let counts = pages.iter().flat_map(|count| count.load(Ordering::Relaxed).to_le_bytes());
                let counts: Vec<u8> = counts.collect();
                writeln!(out, "pages {}", counts.len())?;
                out.write_all(&counts)?;
            }
            _ if line == "count" => writeln!(out, "count {}", count.load(Ordering::Relaxed))?,
            _ => bail!("no command: {line:?}"),
        }
        out.flush()?;
    }
    drop(client);
    Ok(())
}

fn update(memory: &Memory, kind: Kind, units: usize, phase: &AtomicU64, count: &AtomicU64) {
    const BLOCK: usize = HUGE_SIZE / BLOCKS;
    let mut state = 11;
    loop {
        let hot = kind.hot(units, phase.load(Ordering::Relaxed));
        let cold: Vec<usize> = (0..units * BLOCKS).filter(|block| hot.binary_search(block).is_err()).collect();
        for _ in 0..BATCH {
            let now = random(&mut state);
            let is_hot = ((now & 0xffff) as f64) < HOT_SHARE * 65536.0;
            let part = if is_hot { &hot } else { &cold };
            let block = part[(now >> 16 & 0xffff_ffff) as usize % part.len()];
            let word = (random(&mut state) % (BLOCK as u64 / 8)) as usize * 8;
            memory.word(block * BLOCK + word).fetch_add(1, Ordering::Relaxed);
        }
        count.fetch_add(BATCH, Ordering::Relaxed);
    }
}
