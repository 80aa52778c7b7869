//! The measured program: it does random updates of memory, most of them of its hot part.
//!
//! Before: the program is started with a kind and a size. It writes `at ADDRESS` when all of its memory is present.
//! After: it updates words until its input ends. `phase N` moves the heat. Threads: one updates words, one reads
//! commands, one flushes TLBs. Units: sizes are MiB, a unit is 2 MiB.
//! Promise: first, memory is touched once in the order of its addresses.
//!
//! Emulated CPUs need the flusher: their TLB holds all of the memory, so a monitor that clears accessed bits without a
//! flush (DAMON) finds no further accesses. The flusher maps and unmaps more pages than the kernel flushes one by one.
//! This empties the TLBs of the CPUs that run this program.

use std::io::{self, BufRead, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use ballast_base::{HUGE_SIZE, PAGE_SIZE};
use ballast_sys::Anon;

use crate::heat::{BLOCKS, HOT_SHARE, Kind, random};

const FLUSH_EVERY: Duration = Duration::from_millis(20);
/// Pages that the flusher unmaps. The kernel flushes the whole TLB above its ceiling of 33 pages.
const FLUSHED: usize = 64;
const BATCH: u64 = 4096;

/// The word at this offset from the first multiple of 2 MiB.
fn word(memory: &Anon, offset: usize) -> &AtomicU64 {
    memory.word(memory.addr().next_multiple_of(HUGE_SIZE) - memory.addr() + offset)
}

pub fn run(kind: Kind, mib: usize) -> Result<()> {
    let units = (mib << 20) / HUGE_SIZE;
    if units < 8 {
        bail!("{mib} MiB is too little: at least 16");
    }
    // One more unit, because the first aligned unit may begin later.
    let memory = Anon::new((units + 1) * HUGE_SIZE).context("Mapping memory")?;
    for page in 0..units * HUGE_SIZE / PAGE_SIZE {
        word(&memory, page * PAGE_SIZE).store(1, Ordering::Relaxed);
    }
    let phase = Arc::new(AtomicU64::new(0));
    let address = memory.addr().next_multiple_of(HUGE_SIZE);
    let worker_phase = Arc::clone(&phase);
    std::thread::spawn(move || update(&memory, kind, units, &worker_phase));
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
    for line in io::stdin().lock().lines() {
        let line = line?;
        match line.split_once(' ') {
            Some(("phase", number)) => phase.store(number.parse().context("a phase")?, Ordering::Relaxed),
            _ => bail!("no command: {line:?}"),
        }
    }
    Ok(())
}

fn update(memory: &Anon, kind: Kind, units: usize, phase: &AtomicU64) {
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
            let at = (random(&mut state) % (BLOCK as u64 / 8)) as usize * 8;
            word(memory, block * BLOCK + at).fetch_add(1, Ordering::Relaxed);
        }
    }
}
