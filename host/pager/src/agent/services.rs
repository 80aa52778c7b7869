//! Whether the kernel services of a guest are to be tuned (Blowfish, section 4.5).
//!
//! Before: each regular message of an agent has the number of restored pages, and of those restored for khugepaged or
//! compaction. After: the agent is asked to tune these services where they matter, and to stop when no page is far.
//! Threads: the VM's agent task. Units: pages.
//! Promise: a guest that sends false numbers changes only its own services, at most once in [`WINDOW`].
//!
//! Tuning costs the guest huge pages, so it begins only when these restores matter.

use std::time::{Duration, Instant};

use ballast_messages::message::Tick;

/// Period over which restores are counted.
const WINDOW: Duration = Duration::from_secs(10);
/// Restores for services matter if there are this many of them in a period, and they are 1/[`PART`] of all. (Blowfish,
/// section 3.2.3, found 26 %.)
const LEAST: u64 = 64;
const PART: u64 = 10;

#[derive(Debug, Default)]
pub(crate) struct Services {
    is_wanted: bool,
    /// Start of the period; restores, and those for services, at that time.
    before: Option<(Instant, u64, u64)>,
}

impl Services {
    pub fn is_wanted(&self) -> bool {
        self.is_wanted
    }

    /// Evaluates a regular message. Returns whether the decision changed.
    pub fn look(&mut self, tick: &Tick, has_far: bool, now: Instant) -> bool {
        let (since, restores, of_services) = *self.before.get_or_insert((now, tick.restores, tick.service_restores));
        if now.saturating_duration_since(since) < WINDOW {
            return false;
        }
        self.before = Some((now, tick.restores, tick.service_restores));
        // An agent that was restarted counts from zero.
        let all = tick.restores.saturating_sub(restores);
        let of_services = tick.service_restores.saturating_sub(of_services);
        let matter = of_services >= LEAST && of_services >= all / PART;
        let is_wanted = has_far && (self.is_wanted || matter);
        std::mem::replace(&mut self.is_wanted, is_wanted) != is_wanted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn services_are_tuned_when_their_restores_matter_and_until_nothing_is_far() {
        let mut services = Services::default();
        let began = Instant::now();
        let mut look = |windows: u32, restores, service_restores, has_far| {
            let tick = Tick { restores, service_restores, ..Tick::default() };
            let changed = services.look(&tick, has_far, began + WINDOW * windows);
            (changed, services.is_wanted())
        };
        assert_eq!(look(0, 900, 900, true), (false, false), "what was before is not known");
        assert_eq!(look(1, 1000, 963, true), (false, false), "few");
        assert_eq!(look(2, 9000, 1163, true), (false, false), "a small part of all");
        assert_eq!(look(3, 9100, 1263, true), (true, true));
        assert_eq!(look(3, 0, 0, false), (false, true), "once in a window");
        assert_eq!(look(4, 9100, 1263, true), (false, true), "tuned, they cause none");
        assert_eq!(look(5, 0, 0, false), (true, false), "nothing is far");
        assert_eq!(look(6, u64::MAX, u64::MAX, true), (true, true));
    }
}
