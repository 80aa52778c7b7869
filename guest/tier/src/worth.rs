//! Whether moves paid: the promised and the actual benefit of each program's promotions.
//!
//! Before: pages were promoted because they were accessed more often than those that they replace. After: for the next
//! epochs the accesses to both are compared with the promise of the plan. A promise is for each sample of the program:
//! while the program sleeps, nothing is expected. A program whose promotions bring nothing (it goes through its memory
//! in order, or its phases are short) may have ever fewer promoted, down to 1/32 of what may be moved, and as many as
//! before soon after they pay again. The papers have no such check: if the hottest memory was just used and will not be
//! used again soon, their moves cost bandwidth and gain nothing.
//! Threads: the tierer's. Units: epochs, units of 2 MiB, samples in [`SAMPLE`]ths for each epoch.
//! Promise: at most the units moved in [`JUDGED`] epochs are remembered; a program never loses all of its promotions.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use ballast_base::PAGES_PER_UNIT;
use ballast_ranges::{SAMPLE, UNIT};

/// Epochs for which the accesses to moved pages are compared with the promise.
const JUDGED: u64 = 8;
/// Each epoch these sums lose a tenth.
const KEPT: f64 = 0.9;
/// Promotions do not pay if they bring less than this part of their promise. With a quarter, heat that jumps every 2 s
/// is followed half as well.
const PAYS: f64 = 0.1;
/// If less than this was promised, nothing is known.
const FEW: f64 = 10.0 * SAMPLE as f64;
/// A program's part of what may be moved is 1/2^N, up to this N.
const MOST_HALVINGS: u32 = 5;
/// A program is forgotten when its sums are below this.
const NOTHING: f64 = 0.01;

/// A unit of a program, by its process id.
type Place = (u32, u64);

/// The program whose pages were promoted, and its samples of an epoch then.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct By {
    pub pid: u32,
    pub rate: f64,
}

#[derive(Clone, Copy, Debug)]
struct Moved {
    epoch: u64,
    by: By,
    /// Share of the unit's pages that was moved; negative if they were demoted.
    part: f64,
    /// Promised samples for each sample of the program.
    promised: f64,
    /// The unit's recent samples at the last look.
    recent: u64,
}

/// Promised and actual benefit of a program's promotions.
#[derive(Clone, Copy, Debug, Default)]
struct Account {
    promised: f64,
    delivered: f64,
    halvings: u32,
}

impl Account {
    fn judge(&mut self) {
        if self.promised <= FEW {
            self.halvings = self.halvings.saturating_sub(1);
        } else if self.delivered >= PAYS * self.promised {
            self.halvings /= 2;
        } else if self.halvings < MOST_HALVINGS {
            self.halvings += 1;
            // Half as much is promised from now on, and the new promises weigh as much as the former ones.
            (self.promised, self.delivered) = (self.promised / 2.0, self.delivered / 2.0);
        }
    }
}

/// Units that were moved in the last epochs, and the accounts of programs.
#[derive(Debug, Default)]
pub(crate) struct Worth {
    moved: HashMap<Place, Moved>,
    programs: HashMap<u32, Account>,
}

impl Worth {
    /// An epoch has ended. `recent` is the count of a unit as [`ballast_ranges::Fitted::recent`] returns it, and `new`
    /// the samples of a program in this epoch; `None`: that program is not managed any more.
    pub fn judge(&mut self, epoch: u64, recent: impl Fn(u32, u64) -> Option<u64>, new: impl Fn(u32) -> Option<u64>) {
        for account in self.programs.values_mut() {
            (account.promised, account.delivered) = (account.promised * KEPT, account.delivered * KEPT);
        }
        let programs = &mut self.programs;
        self.moved.retain(|(pid, unit), moved| {
            if epoch.saturating_sub(moved.epoch) > JUDGED {
                return false;
            }
            let Some(now) = recent(*pid, *unit * UNIT) else { return false };
            let Some(of_program) = new(moved.by.pid) else { return false };
            // Counts were halved since: `now` is half of the former count and the new samples.
            let new = (2 * now).saturating_sub(moved.recent) as f64;
            moved.recent = now;
            let account = programs.entry(moved.by.pid).or_default();
            account.promised += moved.promised * of_program as f64;
            // Accesses of others while the program sleeps say nothing about its promotions.
            let part = if moved.part < 0.0 { moved.part * moved.by.awake(of_program) } else { moved.part };
            account.delivered += new * part;
            true
        });
        programs.values_mut().for_each(Account::judge);
        programs.retain(|_, account| account.halvings > 0 || account.promised >= NOTHING);
    }

    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.moved.len() + self.programs.len()
    }

    /// Returns how many pages of this program may be promoted, if `most` pages of all programs may be.
    pub fn most(&self, pid: u32, most: u64) -> u64 {
        let halvings = self.programs.get(&pid).map_or(0, |account| account.halvings);
        (most >> halvings).max(1)
    }

    /// Records that a page was promoted (`gains`: the promised samples in an epoch) or, without `gains`, demoted for a
    /// page of program `by`. `recent` returns the count of the page's unit.
    pub fn moved(
        &mut self,
        epoch: u64,
        (pid, address): (u32, u64),
        by: By,
        gains: Option<f64>,
        recent: impl FnOnce() -> u64,
    ) {
        let part = if gains.is_some() { 1.0 } else { -1.0 } / PAGES_PER_UNIT as f64;
        // Of moves there and back, the last one says where the unit's pages are. Moves in one direction add up, also
        // over epochs in which little may be moved.
        let goes_on = |last: &Moved| last.by.pid == by.pid && last.part * part >= 0.0;
        let moved = match self.moved.entry((pid, address / UNIT)) {
            Entry::Occupied(last) if goes_on(last.get()) => last.into_mut(),
            entry => entry.insert_entry(Moved { epoch, by, part: 0.0, promised: 0.0, recent: recent() }).into_mut(),
        };
        (moved.epoch, moved.by) = (epoch, by);
        moved.part += part;
        moved.promised += gains.unwrap_or(0.0) / by.rate.max(1.0);
        // Pages that went back without a partner, and come again, count once.
        let too_many = moved.part.abs().max(1.0);
        (moved.part, moved.promised) = (moved.part / too_many, moved.promised / too_many);
    }
}

impl By {
    /// Returns the program's new samples as a share of its rate at the move, 1 at most.
    fn awake(&self, new: u64) -> f64 {
        (new as f64 / self.rate.max(1.0)).min(1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_base::PAGE_SIZE;

    const MOST: u64 = 1 << 15;
    const PID: u32 = 7;
    /// Samples of the program in an epoch in which it works.
    const RATE: u64 = 1000 * SAMPLE;
    const BY: By = By { pid: PID, rate: RATE as f64 };

    /// A program that in each epoch has as many pages of a unit promoted as it may, for as many demoted pages.
    struct Program {
        worth: Worth,
        counts: HashMap<u64, u64>,
    }

    impl Program {
        fn new() -> Self {
            Self { worth: Worth::default(), counts: HashMap::new() }
        }

        /// Runs an epoch in which the program has `samples`, and a promoted unit `seen` samples by the epochs since its
        /// promotion. One more unit is promoted if `promise` is not zero. Returns the program's part of `MOST`.
        fn epoch(&mut self, epoch: u64, samples: u64, promise: u64, seen: impl Fn(u64) -> u64) -> u64 {
            let counts = &mut self.counts;
            counts.iter_mut().for_each(|(unit, count)| *count = (*count + seen(epoch - *unit) * SAMPLE) / 2);
            let recent = |address: u64| counts.get(&(address / UNIT)).copied().unwrap_or(0);
            self.worth.judge(epoch, |pid, address| (pid == PID).then(|| recent(address)), |_| Some(samples));
            if promise > 0 {
                let gains = (promise * SAMPLE) as f64 / PAGES_PER_UNIT as f64;
                for page in 0..self.worth.most(PID, PAGES_PER_UNIT) {
                    let page = page * PAGE_SIZE as u64;
                    self.worth.moved(epoch, (PID, epoch * UNIT + page), BY, Some(gains), || promise * SAMPLE);
                    self.worth.moved(epoch, (PID, ((1 << 20) + epoch) * UNIT + page), BY, None, || 0);
                }
                counts.insert(epoch, promise * SAMPLE);
            }
            self.worth.most(PID, MOST)
        }

        fn after(&mut self, epochs: std::ops::Range<u64>, seen: fn(u64) -> u64) -> u64 {
            epochs.map(|epoch| self.epoch(epoch, RATE, 80, seen)).last().unwrap_or(MOST)
        }
    }

    #[test]
    fn promotions_that_are_not_accessed_again_become_fewer_and_never_none_and_as_many_again_when_they_are() {
        let mut program = Program::new();
        let (as_promised, never) = (|_| 80, |_| 0);
        assert_eq!(program.after(0..40, as_promised), MOST);
        assert_eq!(program.after(40..80, never), MOST >> MOST_HALVINGS);
        assert_eq!(program.worth.most(PID + 1, MOST), MOST, "another program's are its own");
        assert_eq!(program.after(80..92, as_promised), MOST, "within 6 s");
        assert!(program.worth.moved.len() <= 2 * (JUDGED as usize + 2), "{}", program.worth.moved.len());
    }

    #[test]
    fn what_pays_again_soon_after_it_did_not_is_promoted_as_before_within_four_epochs() {
        for lost in [8, 12, 20, 60] {
            let mut program = Program::new();
            assert!(program.after(0..lost, |_| 0) <= MOST >> 4);
            let back = (lost..).find(|epoch| program.after(*epoch..epoch + 1, |_| 80) == MOST).expect("some epoch");
            assert!(back - lost <= 4, "after {lost} epochs of loss, {} more", back - lost);
        }
    }

    #[test]
    fn promotions_pay_that_are_accessed_for_two_epochs_of_eight() {
        assert_eq!(Program::new().after(0..60, |since| if since <= 2 { 80 } else { 0 }), MOST);
    }

    #[test]
    fn a_service_that_works_one_second_in_ten_keeps_its_promotions_and_loses_them_where_they_bring_nothing() {
        let run = |share: u64| {
            let mut program = Program::new();
            let parts = (0..200).map(|epoch| {
                let works = epoch % 20 < 2;
                let (samples, promise) = if works { (RATE, 80) } else { (0, 0) };
                program.epoch(epoch, samples, promise, |_| if works { share } else { 0 })
            });
            parts.collect::<Vec<u64>>()
        };
        assert!(run(80).iter().all(|part| *part == MOST), "{:?}", run(80));
        assert!(run(0).iter().any(|part| *part < MOST));
    }

    #[test]
    fn small_promises_of_a_unit_add_up_over_the_epochs_in_which_its_pages_are_moved() {
        let mut worth = Worth::default();
        for epoch in 0..128 {
            worth.judge(epoch, |_, _| Some(0), |_| Some(RATE));
            // Four pages of each of a few units: a quarter of a sample in all.
            for page in 0..16 {
                let (unit, page) = (page / 4, (epoch * 4 + page % 4) % PAGES_PER_UNIT);
                let address = unit * UNIT + page * PAGE_SIZE as u64;
                worth.moved(epoch, (PID, address), BY, Some(SAMPLE as f64 / 64.0), || 0);
            }
        }
        assert_eq!(worth.most(PID, MOST), MOST >> MOST_HALVINGS);
    }

    #[test]
    fn what_was_demoted_counts_against_what_was_promoted_for_it_and_a_program_that_ends_is_forgotten() {
        let mut worth = Worth::default();
        for page in 0..PAGES_PER_UNIT {
            let page = page * PAGE_SIZE as u64;
            worth.moved(0, (PID, page), BY, Some(4.0), || 0);
            worth.moved(0, (PID + 1, page), BY, None, || 0);
        }
        for epoch in 1..8 {
            worth.judge(epoch, |_, _| Some(1 << 12), |_| Some(RATE));
        }
        assert_eq!(worth.most(PID, MOST), MOST >> MOST_HALVINGS, "both are accessed alike");
        for epoch in 8..200 {
            worth.judge(epoch, |_, _| None, |_| None);
        }
        assert!(worth.moved.is_empty() && worth.programs.is_empty());
    }
}
