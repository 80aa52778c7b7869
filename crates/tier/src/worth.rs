//! Whether moves paid: what each program's promotions promised, and what they brought.
//!
//! Before: a plan promotes pages because they were accessed more often than those that they replace. After: for the
//! next epochs the accesses to both are compared with that promise. A program whose promotions bring nothing (it goes
//! through its memory in order, or its phases are short) may have ever fewer promoted, down to 1/32 of what may be
//! moved, and as many as before when they pay again. The papers have nothing like it: where the hottest memory is that
//! which was just used and will not be used again soon, their moves cost bandwidth and gain nothing.
//! Threads: the tierer's. Units: epochs, units of 2 MiB, samples in [`SAMPLE`]ths for each epoch.
//! Promise: at most the units moved in [`JUDGED`] epochs are remembered; a program never loses all of its promotions.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use ballast_base::PAGES_PER_UNIT;
use ballast_ranges::{SAMPLE, UNIT};

/// Epochs for which the accesses to what was moved are compared with the promise.
const JUDGED: u64 = 8;
/// Each epoch these sums lose a tenth.
const KEPT: f64 = 0.9;
/// Promotions do not pay if they bring less than this part of their promise. With a quarter, heat that jumps every 2 s
/// is followed half as well.
const PAYS: f64 = 0.1;
/// Less than this was promised: nothing is known.
const FEW: f64 = 10.0 * SAMPLE as f64;
/// A program's part of what may be moved is 1/2^N, up to this N.
const MOST_HALVINGS: u32 = 5;

/// A unit of a program, by its process id.
type Place = (u32, u64);

/// A unit of which pages were moved.
#[derive(Clone, Copy, Debug)]
struct Moved {
    epoch: u64,
    /// The program whose pages were promoted for it.
    by: u32,
    /// Part of its pages, negative if they were demoted, and what they promised for an epoch.
    part: f64,
    promised: f64,
    /// Its recent samples at the last look.
    recent: u64,
}

/// Promises of a program, and what they brought.
#[derive(Clone, Copy, Debug, Default)]
struct Account {
    promised: f64,
    delivered: f64,
    halvings: u32,
}

/// What was moved in the last epochs, and what that was worth.
#[derive(Debug, Default)]
pub(crate) struct Worth {
    moved: HashMap<Place, Moved>,
    programs: HashMap<u32, Account>,
}

impl Worth {
    /// An epoch has ended. `recent` is the count of a unit as [`ballast_ranges::Classifier::recent`] returns it;
    /// `None`: that program is not managed any more.
    pub fn judge(&mut self, epoch: u64, recent: impl Fn(u32, u64) -> Option<u64>) {
        for account in self.programs.values_mut() {
            (account.promised, account.delivered) = (account.promised * KEPT, account.delivered * KEPT);
        }
        let programs = &mut self.programs;
        self.moved.retain(|(pid, unit), moved| {
            if epoch.saturating_sub(moved.epoch) > JUDGED {
                return false;
            }
            let Some(now) = recent(*pid, *unit * UNIT) else { return false };
            // Counts were halved since: `now` is half of what was left and what is new.
            let new = (2 * now).saturating_sub(moved.recent) as f64;
            moved.recent = now;
            let account = programs.entry(moved.by).or_default();
            account.promised += moved.promised;
            account.delivered += new * moved.part;
            true
        });
        for account in programs.values_mut() {
            let is_lost = account.promised > FEW && account.delivered < PAYS * account.promised;
            account.halvings =
                if is_lost { (account.halvings + 1).min(MOST_HALVINGS) } else { account.halvings.saturating_sub(1) };
        }
        programs.retain(|_, account| account.halvings > 0 || account.promised >= 1.0);
    }

    /// Returns how many pages of this program may be promoted, where `most` may be of all programs.
    pub fn most(&self, pid: u32, most: u64) -> u64 {
        let halvings = self.programs.get(&pid).map_or(0, |account| account.halvings);
        (most >> halvings).max(1)
    }

    /// A page was promoted for what it gains for an epoch, or (with nothing) demoted for a page of program `by`.
    /// `recent` returns its unit's count.
    pub fn moved(
        &mut self,
        epoch: u64,
        (pid, address): (u32, u64),
        by: u32,
        gains: Option<f64>,
        recent: impl FnOnce() -> u64,
    ) {
        let part = if gains.is_some() { 1.0 } else { -1.0 } / PAGES_PER_UNIT as f64;
        // Only the last move of a unit says where its pages are.
        let goes_on = |last: &Moved| last.epoch == epoch && last.by == by && last.part * part >= 0.0;
        let moved = match self.moved.entry((pid, address / UNIT)) {
            Entry::Occupied(last) if goes_on(last.get()) => last.into_mut(),
            entry => entry.insert_entry(Moved { epoch, by, part: 0.0, promised: 0.0, recent: recent() }).into_mut(),
        };
        moved.part += part;
        moved.promised += gains.unwrap_or(0.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_base::PAGE_SIZE;

    const MOST: u64 = 1 << 15;
    const PID: u32 = 7;

    /// In each epoch a unit is promoted whole, for one that is demoted, and promises this number of samples. Then each
    /// promoted one has as many samples an epoch as `seen` says of the epochs since. Returns the program's part of MOST
    /// after this many epochs.
    fn after(worth: &mut Worth, epochs: std::ops::Range<u64>, promise: u64, seen: fn(u64) -> u64) -> u64 {
        // Of promoted units the counts at the last two looks.
        let mut counts: HashMap<u64, u64> = HashMap::new();
        for epoch in epochs {
            counts.retain(|unit, count| {
                *count = (*count + seen(epoch - *unit) * SAMPLE) / 2;
                true
            });
            worth
                .judge(epoch, |pid, address| (pid == PID).then(|| counts.get(&(address / UNIT)).copied().unwrap_or(0)));
            let gains = (promise * SAMPLE) as f64 / PAGES_PER_UNIT as f64;
            for page in 0..PAGES_PER_UNIT {
                let page = page * PAGE_SIZE as u64;
                worth.moved(epoch, (PID, epoch * UNIT + page), PID, Some(gains), || promise * SAMPLE);
                worth.moved(epoch, (PID, (1 << 20) + epoch * UNIT + page), PID, None, || 0);
            }
            counts.insert(epoch, promise * SAMPLE);
        }
        worth.most(PID, MOST)
    }

    #[test]
    fn promotions_that_are_not_accessed_again_become_fewer_and_never_none_and_as_many_again_when_they_are() {
        let mut worth = Worth::default();
        let (as_promised, never) = (|_| 8, |_| 0);
        assert_eq!(after(&mut worth, 0..40, 8, as_promised), MOST);
        assert_eq!(after(&mut worth, 40..80, 8, never), MOST >> MOST_HALVINGS);
        assert_eq!(worth.most(PID + 1, MOST), MOST, "another program's are its own");
        assert_eq!(after(&mut worth, 80..120, 8, as_promised), MOST);
        assert!(worth.moved.len() <= 2 * (JUDGED as usize + 2), "{}", worth.moved.len());
    }

    #[test]
    fn promotions_pay_that_are_accessed_for_two_epochs_of_eight() {
        assert_eq!(after(&mut Worth::default(), 0..60, 8, |since| if since <= 2 { 8 } else { 0 }), MOST);
    }

    #[test]
    fn what_was_demoted_counts_against_what_was_promoted_for_it_and_a_program_that_ends_is_forgotten() {
        let mut worth = Worth::default();
        for page in 0..PAGES_PER_UNIT {
            let page = page * PAGE_SIZE as u64;
            worth.moved(0, (PID, page), PID, Some(4.0), || 0);
            worth.moved(0, (PID + 1, page), PID, None, || 0);
        }
        for epoch in 1..8 {
            worth.judge(epoch, |_, _| Some(1 << 12));
        }
        assert_eq!(worth.most(PID, MOST), MOST >> MOST_HALVINGS, "both are accessed alike");
        for epoch in 8..200 {
            worth.judge(epoch, |_, _| None);
        }
        assert!(worth.moved.is_empty() && worth.programs.is_empty());
    }
}
