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

use crate::heat::Kind;

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
}

impl Program {
    /// Start it with additional environment variables. Returns when all its memory is present.
    pub fn start(kind: Kind, mib: usize, environment: &[(&str, &str)]) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["gups", kind.name(), &mib.to_string()]).envs(environment.iter().copied());
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().context("Starting the program")?;
        let input = child.stdin.take().context("its input")?;
        let output = BufReader::new(child.stdout.take().context("its output")?);
        let units = (mib << 20) / HUGE_SIZE;
        let mut program = Self { child, input, output, address: 0, kind, units, phase: 0 };
        program.address = program.answer("at")?;
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

    /// Returns the share of its accesses that the fast tier serves. Fails if a page is not present.
    pub fn hit(&self, tiers: &Tiers) -> Result<f64> {
        let process = Remote::open(self.pid())?;
        let whole = self.units as u64 * PAGES_PER_UNIT;
        let mut looks = 0;
        let pages = loop {
            let mut pages = Pages::default();
            pages.set_areas(vec![(self.address, self.address + (self.units * HUGE_SIZE) as u64)]);
            while pages.rounds() == 0 {
                pages.look(&process, tiers, 1 << 16)?;
            }
            if pages.count().0 == whole {
                break pages;
            }
            // A page that is being moved is in no table.
            looks += 1;
            if looks == MOST_LOOKS {
                bail!("{} of the program's {whole} pages are present", pages.count().0);
            }
            std::thread::sleep(LOOK_AGAIN);
        };
        let fast = |unit: usize| {
            let first = self.address + (unit * HUGE_SIZE) as u64;
            let each = (0..PAGES_PER_UNIT).filter_map(|page| pages.fast_share(first + page * PAGE_SIZE as u64));
            each.sum::<f64>() / PAGES_PER_UNIT as f64
        };
        let shares = self.kind.shares(self.units, self.phase);
        Ok(shares.iter().enumerate().map(|(unit, share)| share * fast(unit)).sum())
    }

    /// Returns the best possible share with the fast memory that this program has or could take.
    pub fn oracle(&self, files: &Files, tiers: &Tiers) -> Result<f64> {
        let process = Remote::open(self.pid())?;
        let mut pages = Pages::default();
        pages.set_areas(vec![(self.address, self.address + (self.units * HUGE_SIZE) as u64)]);
        while pages.rounds() == 0 {
            pages.look(&process, tiers, 1 << 16)?;
        }
        let mut free = 0;
        for node in &tiers.list[0].nodes {
            let now = usage(files, *node)?;
            free += now.free.saturating_sub(now.high) / PAGE_SIZE as u64;
        }
        let mut left = (pages.count().1 + free) as f64;
        let mut shares = self.kind.shares(self.units, self.phase);
        shares.sort_by(|a, b| b.total_cmp(a));
        let mut hit = 0.0;
        for share in shares {
            let part = (left / PAGES_PER_UNIT as f64).min(1.0);
            hit += share * part;
            left -= part * PAGES_PER_UNIT as f64;
        }
        Ok(hit)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
