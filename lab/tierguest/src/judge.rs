//! The share of the program's accesses that the fast tier serves. It is computed from the places of its pages and from
//! its heat. Nothing is timed.
//!
//! Before: the program runs as a process of its own. After: the caller has the true share, and the best possible one
//! (oracle). Units: shares of 1. Promise: the share is that of the page table at that moment. The oracle has no more
//! memory than the program could have.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use ballast_base::{HUGE_SIZE, PAGE_SIZE, PAGES_PER_UNIT};
use ballast_sys::Remote;
use ballast_tier::Tiers;
use ballast_tier::kernel_files::Files;
use ballast_tier::nodes::usage;
use ballast_tier::pages::Pages;

use crate::gups::Backing;
use crate::heat::{BLOCKS, Kind};

/// How often the page table is read while pages of the program are on their way, and the time between two.
const MOST_LOOKS: u32 = 100;
const LOOK_AGAIN: Duration = Duration::from_millis(30);

/// A running program. Dropping it ends the program.
pub struct Program {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    address: u64,
    kind: Kind,
    units: usize,
    phase: u64,
    /// Accesses of each block at the last count, and their shares between the last two.
    counted: Vec<u64>,
    shares: Vec<f64>,
}

impl Program {
    /// Start it with additional environment variables. Returns when all its memory is present.
    pub fn start(kind: Kind, mib: usize, environment: &[(&str, &str)]) -> Result<Self> {
        Self::with(kind, mib, Backing::Anon, environment)
    }

    /// The same with memory of this kind.
    pub fn with(kind: Kind, mib: usize, backing: Backing, environment: &[(&str, &str)]) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["gups", kind.name(), &mib.to_string(), backing.name()]).envs(environment.iter().copied());
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().context("Starting the program")?;
        let input = child.stdin.take().context("its input")?;
        let output = BufReader::new(child.stdout.take().context("its output")?);
        let units = (mib << 20) / HUGE_SIZE;
        let mut program =
            Self { child, input, output, address: 0, kind, units, phase: 0, counted: Vec::new(), shares: Vec::new() };
        program.address = program.answer("at")?;
        program.recount()?;
        Ok(program)
    }

    fn answer(&mut self, word: &str) -> Result<u64> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        let number = line.trim().strip_prefix(word).and_then(|rest| rest.trim().parse().ok());
        number.with_context(|| format!("the program printed {line:?} instead of {word}"))
    }

    /// Returns its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Move the heat.
    pub fn set_phase(&mut self, phase: u64) -> Result<()> {
        self.phase = phase;
        writeln!(self.input, "phase {phase}").context("Moving the heat")
    }

    /// Returns the number of updates so far.
    pub fn count(&mut self) -> Result<u64> {
        writeln!(self.input, "count")?;
        self.answer("count")
    }

    /// Have it say how many accesses each block had, where it counts them: the shares are those since the last call.
    pub fn recount(&mut self) -> Result<()> {
        if !self.kind.is_counted() {
            return Ok(());
        }
        writeln!(self.input, "blocks")?;
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        let counts: Vec<u64> = line.split_ascii_whitespace().skip(1).flat_map(str::parse).collect();
        if counts.len() != self.units * BLOCKS {
            bail!("the program counts {} blocks", counts.len());
        }
        let before = std::mem::replace(&mut self.counted, counts);
        let since = self.counted.iter().enumerate().map(|(at, now)| now - before.get(at).copied().unwrap_or(0));
        self.shares = to_shares(&since.collect::<Vec<u64>>());
        Ok(())
    }

    /// Returns the shares of accesses of each block: where they are counted, between the last two counts.
    fn shares(&self) -> Vec<f64> {
        if self.kind.is_counted() { self.shares.clone() } else { self.kind.shares(self.units, self.phase) }
    }

    /// Make its memory that of a VM of the daemon with this socket.
    pub fn attach(&mut self, socket: &str) -> Result<()> {
        writeln!(self.input, "attach {socket}")?;
        self.answer("attached").map(drop)
    }

    /// Returns, for each of its pages, the part of it that the fast tier has. Fails if a page is never present.
    fn places(&self, tiers: &Tiers) -> Result<Vec<f64>> {
        let process = Remote::open(self.pid())?;
        let whole = self.units * PAGES_PER_UNIT as usize;
        let mut found: Vec<Option<f64>> = vec![None; whole];
        for _ in 0..MOST_LOOKS {
            let mut pages = Pages::default();
            pages.set_areas(vec![(self.address, self.address + (self.units * HUGE_SIZE) as u64)]);
            while pages.rounds() == 0 {
                pages.look(&process, tiers, 1 << 16)?;
            }
            for (page, found) in found.iter_mut().enumerate().filter(|(_, found)| found.is_none()) {
                *found = pages.fast_share(self.address + (page * PAGE_SIZE) as u64);
            }
            if found.iter().all(Option::is_some) {
                return Ok(found.into_iter().flatten().collect());
            }
            // A page that is being moved, or watched by a scan, is in no table.
            std::thread::sleep(LOOK_AGAIN);
        }
        bail!("{} of the program's {whole} pages are present", found.iter().flatten().count());
    }

    /// Returns the share of its accesses that the fast tier serves.
    pub fn hit(&self, tiers: &Tiers) -> Result<f64> {
        let block = PAGES_PER_UNIT as usize / BLOCKS;
        let places = self.places(tiers)?;
        let fast = places.chunks(block).map(|pages| pages.iter().sum::<f64>() / block as f64);
        Ok(self.shares().iter().zip(fast).map(|(share, fast)| share * fast).sum())
    }

    /// Returns how many pages of fast memory this program has or could take.
    pub fn room(&self, files: &Files, tiers: &Tiers) -> Result<f64> {
        let mut free = 0;
        for node in &tiers.list[0].nodes {
            let now = usage(files, *node)?;
            free += now.free.saturating_sub(now.high) / PAGE_SIZE as u64;
        }
        Ok(self.places(tiers)?.iter().sum::<f64>() + free as f64)
    }

    /// Returns the best possible share with that, placed in base pages, and in units of 2 MiB.
    pub fn oracles(&self, files: &Files, tiers: &Tiers) -> Result<(f64, f64)> {
        let room = self.room(files, tiers)?;
        let best = |mut shares: Vec<f64>, pages: f64| {
            shares.sort_by(|a, b| b.total_cmp(a));
            let part = |at: usize| (room / pages - at as f64).clamp(0.0, 1.0);
            shares.iter().enumerate().map(|(at, share)| share * part(at)).sum::<f64>()
        };
        // Where accesses are counted: of all so far, so that it is the best that one placement can do.
        let blocks = if self.kind.is_counted() { to_shares(&self.counted) } else { self.shares() };
        let units = blocks.chunks(BLOCKS).map(|unit| unit.iter().sum()).collect();
        Ok((best(blocks, PAGES_PER_UNIT as f64 / BLOCKS as f64), best(units, PAGES_PER_UNIT as f64)))
    }

    /// Returns the best possible share with the fast memory that this program has or could take.
    pub fn oracle(&self, files: &Files, tiers: &Tiers) -> Result<f64> {
        Ok(self.oracles(files, tiers)?.0)
    }
}

fn to_shares(counts: &[u64]) -> Vec<f64> {
    let all = counts.iter().sum::<u64>().max(1) as f64;
    counts.iter().map(|count| *count as f64 / all).collect()
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
