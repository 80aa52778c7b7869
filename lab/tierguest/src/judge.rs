//! The share of the program's accesses that the fast tier serves, by the places of its pages and its heat, untimed.
//!
//! Before: the program runs as a process of its own. After: the caller has the true share, and the best possible one
//! (oracle). Units: shares of 1. Promise: the share is that of the page table at that moment. The oracle has no more
//! memory than the program could have.

use std::io::{BufRead, BufReader, Write};
use std::process::{ChildStdin, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use ballast_base::{HUGE_SIZE, PAGE_SIZE, PAGES_PER_UNIT};
use ballast_sys::Remote;
use ballast_testkit::program::Ends;
use ballast_tier::Tiers;
use ballast_tier::kernel_files::Files;
use ballast_tier::nodes::usage;
use ballast_tier::pages::Pages;

use crate::heat::{BLOCKS, Kind};

/// Most reads of the page table while pages of the program are being moved, and below, the time between two reads.
const MOST_LOOKS: u32 = 100;
const LOOK_AGAIN: Duration = Duration::from_millis(30);
/// Pages of a unit, and of a block of [`crate::heat`].
const UNIT: usize = PAGES_PER_UNIT as usize;
const BLOCK: usize = UNIT / BLOCKS;

/// A running program. Dropping it ends the program.
pub struct Program {
    child: Ends,
    input: ChildStdin,
    address: u64,
    kind: Kind,
    units: usize,
    phase: u64,
}

impl Program {
    /// Starts it with these additional environment variables. Returns when all its memory is present.
    pub fn start(kind: Kind, mib: usize, environment: &[(&str, &str)]) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["gups", kind.name(), &mib.to_string()]).envs(environment.iter().copied());
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().context("Starting the program")?;
        let input = child.stdin.take().context("its input")?;
        let mut output = BufReader::new(child.stdout.take().context("its output")?);
        let child = Ends(child);
        let mut line = String::new();
        output.read_line(&mut line)?;
        let address = line.trim().strip_prefix("at ").and_then(|address| address.parse().ok());
        let address = address.with_context(|| format!("the program printed {line:?} instead of its address"))?;
        Ok(Self { child, input, address, kind, units: (mib << 20) / HUGE_SIZE, phase: 0 })
    }

    pub fn pid(&self) -> u32 {
        self.child.0.id()
    }

    pub fn set_phase(&mut self, phase: u64) -> Result<()> {
        self.phase = phase;
        writeln!(self.input, "phase {phase}").context("Moving the heat")
    }

    fn weights(&self) -> Vec<f64> {
        let shares = self.kind.shares(self.units, self.phase);
        shares.iter().flat_map(|share| std::iter::repeat_n(share / BLOCK as f64, BLOCK)).collect()
    }

    /// Returns which part of each page the fast tier has. Fails if a page is never present.
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

    /// Returns the share of its accesses that the fast tier serves.
    pub fn hit(&self, tiers: &Tiers) -> Result<f64> {
        Ok(served(&self.weights(), &self.places(tiers)?))
    }

    /// Returns the best possible share with the fast memory that this program has or could take.
    pub fn oracle(&self, files: &Files, tiers: &Tiers) -> Result<f64> {
        Ok(best(&self.weights(), room(&self.places(tiers)?, files, tiers)?))
    }
}

/// Returns the part of all weights that is in the fast tier. `places` is the part of each page that is there.
fn served(weights: &[f64], places: &[f64]) -> f64 {
    let all = weights.iter().sum::<f64>().max(f64::MIN_POSITIVE);
    weights.iter().zip(places).map(|(weight, place)| weight * place).sum::<f64>() / all
}

/// Returns the largest part of all weights that fits into `room` pages.
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

/// Returns how many pages of fast memory the program has, by the places of its pages, or could take.
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
}
