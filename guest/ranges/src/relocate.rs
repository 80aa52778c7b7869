//! Balanced relocation (§3.2.3): which pages to promote and which to demote, the same number of each.
//!
//! Before: ranges in the order of their heat, and where each page is. After: an agent moves the pages, in batches. The
//! paper swaps pages. `move_pages` cannot, so the fast tier keeps a small *reserve* free, and each batch demotes first,
//! then promotes into the freed memory.
//! Units: pages, all of one size that the caller chooses (4 KiB or 2 MiB). Promise: pure; a plan moves no more than its
//! limit, never promotes more than there is room for, and does not move a page if that gains nothing.
//!
//! The paper moves every page of the hottest ranges that fit as a whole. Here, the next range deserves the fast tier,
//! too, with as many pages as still fit: first of all those that are there already, since its pages are equally hot. A
//! page moves only if its range is hotter than that of the page it replaces, by more than [`SPREADS`] standard
//! deviations of the difference. Free memory counts as a page without accesses, so memory that no program touches is
//! not promoted into it.

use std::collections::HashMap;
use std::ops::ControlFlow;

use crate::range::{Range, SAMPLE};

/// Where a page is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier {
    /// Fast memory, which is scarce.
    Fast,
    /// Slow memory.
    Slow,
}

/// Where pages are: a program's page table.
pub trait Placement {
    /// Returns the program that has a range, and how many of its pages may be promoted.
    fn program(&self, range: &Range) -> (usize, u64);

    /// Returns how many pages of a range are present, and how many of these are in fast memory.
    fn count(&self, range: &Range) -> (u64, u64);

    /// Visits the present pages of a range that are in one tier, ascending, until `each` breaks.
    fn visit_in(&self, range: &Range, wanted: Tier, each: &mut dyn FnMut(u64) -> ControlFlow<()>);
}

/// Limits of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Pages that the fast tier can hold of this program.
    pub fast: u64,
    /// Part of these: free now.
    pub free: u64,
    /// Part of these: must be free afterwards.
    pub reserve: u64,
    /// Most promotions until the next plan, which bounds the bandwidth of moves.
    pub most: u64,
}

/// With less, pages of equal heat change places without end, by the noise of samples: simulated, a value of 1 moves
/// 1 GiB a second where this one moves 80 MiB. With 3, the fast tier serves 30 % of the accesses to scattered heat
/// instead of 91 % (1,000 samples a second).
pub const SPREADS: f64 = 2.0;

/// A page moves only if it is hotter than the one it replaces by this part of its own heat. With millions of samples
/// each difference is beyond chance, and pages that are alike would move without end.
const LEAST_GAIN: f64 = 0.2;

/// Pages to move, by their addresses. The hottest are promoted first, the coldest demoted first.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// From the slow to the fast tier.
    pub promote: Vec<u64>,
    /// From the fast to the slow tier.
    pub demote: Vec<u64>,
    /// The last entries of both lists are pairs that change places. For each pair: how many more samples a byte of the
    /// promoted page has than a byte of the demoted page, in the counts of their ranges.
    pub gains: Vec<f64>,
}

impl Plan {
    /// Returns the index, in the other list, of the page that changes places with page `at` of the list of moves to a
    /// tier. `None`: this page moves alone.
    pub fn partner(&self, to: Tier, at: usize) -> Option<usize> {
        let alone = |list: &[u64]| list.len().saturating_sub(self.gains.len());
        let (own, other) = match to {
            Tier::Fast => (&self.promote, &self.demote),
            Tier::Slow => (&self.demote, &self.promote),
        };
        Some(at.checked_sub(alone(own))? + alone(other))
    }
}

struct Candidate<'a> {
    address: u64,
    range: &'a Range,
}

/// Returns how much hotter one range is than the other, per byte, if it is beyond chance and worth a move.
fn gain(hot: &Range, cold: &Range) -> Option<f64> {
    let rate = |range: &Range| {
        let samples = |number: u64| number as f64 / SAMPLE as f64;
        let bytes = range.bytes() as f64;
        (samples(range.count) / bytes, samples(range.variance) / bytes / bytes)
    };
    let ((hot_rate, hot_variance), (cold_rate, cold_variance)) = (rate(hot), rate(cold));
    let gain = hot_rate - cold_rate;
    (gain > SPREADS * (hot_variance + cold_variance).sqrt() && gain > LEAST_GAIN * hot_rate).then_some(gain)
}

/// Returns whether a range is hotter than memory without accesses.
fn is_touched(range: &Range) -> bool {
    gain(range, &Range { count: 0, variance: 0, ..*range }).is_some()
}

/// Pages of the ranges that deserve the fast tier and are not in it, hottest first; how many ranges deserve it as a
/// whole; and how many pages of the next one do.
fn promotions<'a>(ranked: &'a [Range], pages: &dyn Placement, limits: Limits) -> (Vec<Candidate<'a>>, usize, u64) {
    let mut room = limits.fast.saturating_sub(limits.reserve);
    let most = usize::try_from(limits.most).unwrap_or(usize::MAX);
    let mut found: Vec<Candidate<'a>> = Vec::new();
    let mut of_program: HashMap<usize, u64> = HashMap::new();
    for (at, range) in ranked.iter().enumerate() {
        let (present, fast) = pages.count(range);
        let (program, its_most) = pages.program(range);
        let its = of_program.entry(program).or_default();
        // Pages that may not be promoted need no room, nor do pages without accesses.
        let may = if is_touched(range) { its_most.saturating_sub(*its) } else { 0 };
        let wanted = fast + (present - fast).min(may);
        let is_whole = wanted <= room;
        let part = wanted.min(room);
        let (before, missing) = (found.len(), usize::try_from(part.saturating_sub(fast)).unwrap_or(usize::MAX));
        let most = most.min(before.saturating_add(missing));
        if found.len() < most {
            pages.visit_in(range, Tier::Slow, &mut |address| {
                found.push(Candidate { address, range });
                if found.len() < most { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
            });
        }
        *its += (found.len() - before) as u64;
        if !is_whole {
            return (found, at, part);
        }
        room -= wanted;
    }
    (found, ranked.len(), 0)
}

/// Pages in the fast tier that do not deserve it, coldest first, at most `most`. `part` pages of range `whole` do.
fn demotions<'a>(
    ranked: &'a [Range],
    pages: &dyn Placement,
    whole: usize,
    part: u64,
    most: usize,
) -> Vec<Candidate<'a>> {
    let mut found: Vec<Candidate<'a>> = Vec::new();
    for (at, range) in ranked.iter().enumerate().skip(whole).rev() {
        if found.len() >= most {
            break;
        }
        let mut kept = if at == whole { part } else { 0 };
        pages.visit_in(range, Tier::Fast, &mut |address| {
            match kept.checked_sub(1) {
                Some(left) => kept = left,
                None => found.push(Candidate { address, range }),
            }
            if found.len() < most { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        });
    }
    found
}

/// Plans moves for ranges that [`crate::rank`] has ordered.
pub fn plan(ranked: &[Range], pages: &dyn Placement, limits: Limits) -> Plan {
    let (mut promote, whole, part) = promotions(ranked, pages, limits);
    // Pages that may be promoted without a demotion, and pages that must be demoted without a promotion.
    let to_count = |pages: u64| usize::try_from(pages).unwrap_or(usize::MAX);
    let spare = to_count(limits.free.saturating_sub(limits.reserve)).min(promote.len());
    let owed = to_count(limits.reserve.saturating_sub(limits.free).min(limits.most));
    let mut demote = demotions(ranked, pages, whole, part, (promote.len() - spare).saturating_add(owed));
    let pairs = promote[spare..].iter().zip(demote.iter().skip(owed));
    let gains: Vec<f64> = pairs.map_while(|(hot, cold)| gain(hot.range, cold.range)).collect();
    promote.truncate(spare + gains.len());
    demote.truncate(owed + gains.len());
    let addresses = |list: Vec<Candidate<'_>>| list.into_iter().map(|page| page.address).collect();
    Plan { promote: addresses(promote), demote: addresses(demote), gains }
}
