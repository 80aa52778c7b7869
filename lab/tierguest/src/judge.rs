//! The share of the program's accesses that the fast tier serves. It is computed from the places of its pages and from
//! its heat, which is set or counted by the program. Nothing is timed.
//!
//! Before: the program runs as a process of its own. After: the caller has the true share, and the best possible one
//! (oracle). Units: shares of 1. Promise: the share is that of the page table at that moment; where accesses are
//! counted, the mean of those before and after them. The oracle has no more memory than the program could have.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use ballast_base::{HUGE_SIZE, PAGE_SIZE, PAGES_PER_UNIT};
use ballast_sys::Remote;
use ballast_testkit::program::Ends;
use ballast_tier::Tiers;
use ballast_tier::kernel_files::Files;
use ballast_tier::nodes::usage;
use ballast_tier::pages::Pages;

use crate::heat::{BLOCKS, Kind};

/// How often the page table is read while pages of the program are on their way, and the time between two.
const MOST_LOOKS: u32 = 100;
const LOOK_AGAIN: Duration = Duration::from_millis(30);
/// Pages of a unit, and of a block of [`crate::heat`].
const UNIT: usize = PAGES_PER_UNIT as usize;
const BLOCK: usize = UNIT / BLOCKS;

/// A running program. Dropping it ends the program.
pub struct Program {
    child: Ends,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    address: u64,
    kind: Kind,
    units: usize,
    phase: u64,
    /// Where accesses are counted.
    counts: Counts,
    /// The part of each page that the fast tier had at the last look.
    places: Vec<f64>,
}

/// What a program has counted, by page.
#[derive(Default)]
struct Counts {
    /// Its numbers at the last count, modulo 2^32.
    last: Vec<u32>,
    /// Accesses between the last two counts.
    window: Vec<f64>,
    /// Accesses since the first count.
    all: Vec<f64>,
}

impl Counts {
    fn add(&mut self, now: Vec<u32>) {
        if self.last.is_empty() {
            (self.window, self.all) = (vec![0.0; now.len()], vec![0.0; now.len()]);
        } else {
            let since = now.iter().zip(&self.last).map(|(now, last)| f64::from(now.wrapping_sub(*last)));
            self.window = since.collect();
            self.all.iter_mut().zip(&self.window).for_each(|(all, window)| *all += window);
        }
        self.last = now;
    }
}

/// Shares of the program's accesses that the fast tier serves, and could.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Look {
    /// Served.
    pub hit: f64,
    /// The best choice of pages, for the accesses since the last look.
    pub oracle: f64,
    /// The best choice of pages that never changes, for all accesses so far; of the present heat where that is known.
    pub lasting: f64,
}

impl Program {
    /// Start it with additional environment variables. Returns when all its memory is present.
    pub fn start(kind: Kind, mib: usize, environment: &[(&str, &str)]) -> Result<Self> {
        ensure!(!kind.is_counted(), "{} counts its accesses: only `compare` asks it", kind.name());
        Self::with(kind, mib, environment)
    }

    /// The same of any kind.
    pub fn with(kind: Kind, mib: usize, environment: &[(&str, &str)]) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["gups", kind.name(), &mib.to_string()]).envs(environment.iter().copied());
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().context("Starting the program")?;
        let input = child.stdin.take().context("its input")?;
        let output = BufReader::new(child.stdout.take().context("its output")?);
        let units = (mib << 20) / HUGE_SIZE;
        let (counts, places) = (Counts::default(), Vec::new());
        let mut program = Self { child: Ends(child), input, output, address: 0, kind, units, phase: 0, counts, places };
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
        self.child.0.id()
    }

    /// Move the heat.
    pub fn set_phase(&mut self, phase: u64) -> Result<()> {
        self.phase = phase;
        writeln!(self.input, "phase {phase}").context("Moving the heat")
    }

    /// Returns the number of updates so far; where accesses are counted, of those since the first look.
    pub fn count(&mut self) -> Result<u64> {
        if self.kind.is_counted() {
            return Ok(self.counts.all.iter().sum::<f64>() as u64);
        }
        writeln!(self.input, "count")?;
        self.answer("count")
    }

    /// Have it say how many accesses each page had.
    fn recount(&mut self) -> Result<()> {
        writeln!(self.input, "pages")?;
        let whole = self.units * UNIT * size_of::<u32>();
        let said = self.answer("pages")?;
        ensure!(said == whole as u64, "the program counts pages in {said} bytes");
        let mut bytes = vec![0; whole];
        self.output.read_exact(&mut bytes)?;
        let number = |four: &[u8]| u32::from_le_bytes([four[0], four[1], four[2], four[3]]);
        self.counts.add(bytes.chunks_exact(4).map(number).collect());
        Ok(())
    }

    /// Returns the weight of each page in the accesses: where they are counted, between the last two looks.
    fn weights(&self) -> Vec<f64> {
        if self.kind.is_counted() {
            return self.counts.window.clone();
        }
        let shares = self.kind.shares(self.units, self.phase);
        shares.iter().flat_map(|share| std::iter::repeat_n(share / BLOCK as f64, BLOCK)).collect()
    }

    /// Returns, for each of its pages, the part of it that the fast tier has. Fails if a page is never present.
    fn places(&self, tiers: &Tiers) -> Result<Vec<f64>> {
        let process = Remote::open(self.pid())?;
        let whole = self.units * UNIT;
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

    /// Returns the share of its accesses that the fast tier serves; not where accesses are counted.
    pub fn hit(&self, tiers: &Tiers) -> Result<f64> {
        Ok(served(&self.weights(), &self.places(tiers)?))
    }

    /// Returns the best possible share with the fast memory that this program has or could take; not where accesses are
    /// counted.
    pub fn oracle(&self, files: &Files, tiers: &Tiers) -> Result<f64> {
        Ok(best(&self.weights(), room(&self.places(tiers)?, files, tiers)?))
    }

    /// Looks at its pages and its accesses. Where these are counted, the first call begins to.
    pub fn look(&mut self, files: &Files, tiers: &Tiers) -> Result<Look> {
        let places = self.places(tiers)?;
        let before = std::mem::replace(&mut self.places, places);
        if self.kind.is_counted() {
            self.recount()?;
        }
        let weights = self.weights();
        // A page that has come meanwhile counts as half there: it may have come because of the accesses.
        let hit = match before.is_empty() || !self.kind.is_counted() {
            true => served(&weights, &self.places),
            false => (served(&weights, &before) + served(&weights, &self.places)) / 2.0,
        };
        let room = room(&self.places, files, tiers)?;
        let oracle = best(&weights, room);
        let lasting = if self.kind.is_counted() { best(&self.counts.all, room) } else { oracle };
        Ok(Look { hit, oracle, lasting })
    }
}

/// Returns the part of all weights that is in the fast tier, of which each page has a part.
fn served(weights: &[f64], places: &[f64]) -> f64 {
    let all = weights.iter().sum::<f64>().max(f64::MIN_POSITIVE);
    weights.iter().zip(places).map(|(weight, place)| weight * place).sum::<f64>() / all
}

/// Returns the largest part of all weights that `room` of them can have.
fn best(weights: &[f64], room: f64) -> f64 {
    let all = weights.iter().sum::<f64>().max(f64::MIN_POSITIVE);
    let whole = room.max(0.0) as usize;
    if whole >= weights.len() {
        return weights.iter().sum::<f64>() / all;
    }
    let mut sorted = weights.to_vec();
    let (first, next, _) = sorted.select_nth_unstable_by(whole, |a, b| b.total_cmp(a));
    (first.iter().sum::<f64>() + *next * room.max(0.0).fract()) / all
}

/// Returns how many pages of fast memory a program has, with these places of its pages, or could take.
fn room(places: &[f64], files: &Files, tiers: &Tiers) -> Result<f64> {
    let mut free = 0;
    for node in &tiers.list[0].nodes {
        let now = usage(files, *node)?;
        free += now.free.saturating_sub(now.high) / PAGE_SIZE as u64;
    }
    Ok(places.iter().sum::<f64>() + free as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_choice_takes_the_heaviest_pages_and_a_part_of_the_next_one() {
        let weights = [1.0, 5.0, 0.0, 4.0];
        assert_eq!([0.0, 1.0, 1.5, 2.0, 3.0, 9.0].map(|room| best(&weights, room)), [0.0, 0.5, 0.7, 0.9, 1.0, 1.0]);
        assert_eq!(best(&weights, -3.0), 0.0);
        assert_eq!((best(&[0.0; 3], 2.0), best(&[], 1.0)), (0.0, 0.0));
        assert_eq!(served(&weights, &[1.0, 0.5, 1.0, 0.0]), 0.35);
    }

    #[test]
    fn counts_are_of_the_time_between_two_of_them_also_when_they_wrap() {
        let mut counts = Counts::default();
        counts.add(vec![u32::MAX, 10]);
        assert_eq!((&counts.window[..], &counts.all[..]), (&[0.0, 0.0][..], &[0.0, 0.0][..]));
        counts.add(vec![4, 10]);
        counts.add(vec![5, 12]);
        assert_eq!((&counts.window[..], &counts.all[..]), (&[1.0, 2.0][..], &[6.0, 2.0][..]));
    }
}
