//! The effort of background reclaim: how many pages it keeps in quarantine for a VM within its limit.
//!
//! Before: a round evicted pages, and the guest touched others in quarantine. After: if the guest touched nearly all of
//! them, the next rounds keep half as many there; if some stayed untouched, twice as many.
//! Threads: the VM's reclaim worker. Units: pages. Promise: within six judgements of pages that are cold, the effort is
//! all that was asked for.
//!
//! The reason: a VM whose working set is a few pages larger than the low watermark has no cold page. With a full
//! quarantine, refilled in each round as the guest touches it, reclaim took a fifth of such a guest's speed and evicted
//! nothing. Nothing is urgent below the limit, so a few pages at a time suffice to find out whether that has changed.

/// Most halvings: down to 1/64 of what was asked for.
const HALVINGS: u32 = 6;
/// Fewest pages, so that a small VM is judged by more than one.
const LEAST: u64 = 16;
/// The guest touched nearly all: fewer than 1/N of what left quarantine was evicted.
const NEARLY_ALL: u64 = 8;

/// The effort for one VM.
#[derive(Debug, Default)]
pub(super) struct Effort {
    halvings: u32,
    /// Quarantine hits of the VM when this was judged last, and pages evicted since.
    hits: u64,
    evicted: u64,
}

impl Effort {
    /// Returns how many of the `wanted` pages to keep in quarantine. `hits` are all quarantine hits of the VM so far,
    /// `evicted` is what this round evicted.
    pub fn part_of(&mut self, wanted: u64, hits: u64, evicted: u64) -> u64 {
        self.evicted += evicted;
        let touched = hits.saturating_sub(self.hits);
        if touched + self.evicted >= self.bounded(wanted) {
            self.halvings = match self.evicted * NEARLY_ALL < touched {
                true => (self.halvings + 1).min(HALVINGS),
                false => self.halvings.saturating_sub(1),
            };
            (self.hits, self.evicted) = (hits, 0);
        }
        self.bounded(wanted)
    }

    /// Returns all of the wanted pages, and begins anew: the VM is above its limit, where pages must go although the
    /// guest touches them.
    pub fn all(&mut self, wanted: u64, hits: u64) -> u64 {
        *self = Self { hits, ..Self::default() };
        wanted
    }

    fn bounded(&self, wanted: u64) -> u64 {
        (wanted >> self.halvings).max(LEAST.min(wanted))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_that_touches_all_is_left_alone_and_one_that_leaves_some_is_not() {
        let (mut effort, mut hits) = (Effort::default(), 0);
        assert_eq!(effort.part_of(6400, 0, 0), 6400);
        for wanted in [3200, 1600, 800, 400, 200, 100, 100] {
            hits += 6400;
            assert_eq!(effort.part_of(6400, hits, 0), wanted);
        }
        assert_eq!(effort.part_of(6400, hits + 50, 10), 100, "too few to judge by");
        for wanted in [200, 400, 800, 1600, 3200, 6400, 6400] {
            hits += 100;
            assert_eq!(effort.part_of(6400, hits, 6400), wanted);
        }
        hits += 6400;
        effort.part_of(6400, hits, 0);
        assert_eq!(effort.all(9, hits + 1_000_000), 9);
        assert_eq!(effort.part_of(6400, hits + 1_000_000, 0), 6400, "it was above its limit");
    }

    #[test]
    fn a_small_vm_is_judged_by_some_pages_and_one_that_wants_none_gets_none() {
        let mut effort = Effort::default();
        (1..10).for_each(|times| _ = effort.part_of(64, times * 64, 0));
        assert_eq!((effort.part_of(64, 576, 0), effort.part_of(5, 576, 0), effort.part_of(0, 576, 0)), (16, 5, 0));
    }
}
