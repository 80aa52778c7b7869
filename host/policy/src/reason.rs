//! Reasons of a limit: data for programs, and one sentence each for people.
//!
//! Before: the ladder, the frame and the policies record their reasons. After: `ballast explain`, the decision log.
//! Promise: a sentence says nothing that its data does not.

use std::fmt;

use ballast_base::Bytes;
use serde::{Deserialize, Serialize};

use crate::host_state::HostState;

/// One thing that led to a decision.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Reason {
    /// Its shares are 0.
    HandsOff,
    /// Nothing may be reclaimed from it.
    Held {
        /// Why.
        why: String,
    },
    /// The budget holds the most that all VMs may have.
    Enough {
        /// What they may have.
        most_bytes: u64,
        /// What there is.
        budget_bytes: u64,
    },
    /// The budget holds less than the most that all VMs may have.
    Scarce {
        /// What they may have.
        most_bytes: u64,
        /// What there is.
        budget_bytes: u64,
    },
    /// Protected memory exceeds the budget: no VM has more than its protected memory.
    ProtectedOnly {
        /// Sum of protected or reserved memory.
        protected_bytes: u64,
        /// What there is.
        budget_bytes: u64,
    },
    /// The reservations exceed the budget: each VM has its own, and the budget is exceeded.
    ReservedOnly {
        /// Sum of the reservations.
        reserved_bytes: u64,
        /// What there is.
        budget_bytes: u64,
    },
    /// Maestro: the estimated need of the VM.
    Need {
        /// Its working set.
        working_set_bytes: u64,
        /// The working set is an estimate.
        estimated: bool,
        /// Headroom beyond it.
        headroom_bytes: u64,
        /// Memory added for its restores in the window.
        fault_weight_bytes: u64,
        /// Restores in the window.
        restores: u64,
        /// Its shares.
        shares: u32,
    },
    /// Gain: the time that one more MiB would save this VM and the others.
    Gain {
        /// Share of the time it waits for its memory.
        waits: f64,
        /// Share of a CPU that the host works for its restores.
        works: f64,
        /// Far memory that it wants.
        wanted_bytes: u64,
        /// Microseconds in a second that a MiB more is worth, which counts more the slower the VM is.
        worth_us_per_mib: f64,
        /// The same of the others, on average.
        others_us_per_mib: f64,
        /// Its shares.
        shares: u32,
    },
    /// Gain: its measured working set and headroom count as wanted, whatever it waits.
    Headroom {
        /// Its working set.
        working_set_bytes: u64,
        /// Headroom beyond it.
        headroom_bytes: u64,
    },
    /// It has the least it may have.
    AtReservation {
        /// Its reservation, or the smallest limit there is.
        reservation_bytes: u64,
    },
    /// It has the most it may have, which is its operator's limit.
    AtLimit {
        /// The limit.
        limit_bytes: u64,
    },
    /// Pressure: unused allowance beyond the watermark was taken, which costs nothing.
    FreeFirst {
        /// How much.
        taken_bytes: u64,
        /// Allowance that is left.
        watermark_bytes: u64,
    },
    /// Pressure: it stalls less than the threshold, so a little cold memory is taken.
    Probe {
        /// Its stall, share of time.
        stall: f64,
        /// What it may be.
        threshold: f64,
        /// How much is taken.
        step_bytes: u64,
    },
    /// Pressure: it stalls more than the threshold, so memory is returned.
    BackOff {
        /// Its stall, share of time.
        stall: f64,
        /// What it may be.
        threshold: f64,
        /// How much is given.
        step_bytes: u64,
    },
    /// Pressure: it stalled recently, so nothing is taken for now.
    Paused {
        /// Remaining time.
        left_ms: u64,
    },
    /// Pressure: reclaim has not yet taken what the last limit asks for.
    CatchingUp {
        /// Resident memory.
        resident_bytes: u64,
    },
    /// The host is short, so less than the budget is divided.
    Tightened {
        /// The state.
        state: HostState,
        /// The difference.
        by_bytes: u64,
    },
    /// Its limit would have changed by no more than this share of it, so it stays.
    Settled {
        /// 1/N of the limit.
        one_in: u64,
    },
    /// It would lose more, but loses no more than this share of its limit at a time.
    Gently {
        /// 1/N of the limit.
        one_in: u64,
    },
    /// Its memory comes on demand, of a pool that has promised more than it has, and this is its part of that.
    Pool {
        /// The policy that divides it.
        policy: String,
        /// What the pool has for VMs on demand.
        has_bytes: u64,
        /// What they were promised.
        promised_bytes: u64,
        /// What is left for touches.
        free_bytes: u64,
    },
    /// Another program decided.
    External {
        /// Name of the program.
        policy: String,
    },
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let size = |bytes: &u64| Bytes(*bytes);
        let percent = |share: &f64| share * 100.0;
        match self {
            Self::HandsOff => write!(f, "its shares are 0: no policy touches it"),
            Self::Held { why } => write!(f, "nothing is reclaimed from it: {why}"),
            Self::Enough { most_bytes, budget_bytes } => {
                write!(f, "the budget of {} holds the {} that all VMs may have", size(budget_bytes), size(most_bytes))
            }
            Self::Scarce { most_bytes, budget_bytes } => {
                write!(f, "all VMs may have {} and there are {}", size(most_bytes), size(budget_bytes))
            }
            Self::ProtectedOnly { protected_bytes, budget_bytes } => write!(
                f,
                "{} are protected and there are {}: no VM keeps more than that",
                size(protected_bytes),
                size(budget_bytes)
            ),
            Self::ReservedOnly { reserved_bytes, budget_bytes } => write!(
                f,
                "{} are reserved and there are only {}: each VM keeps its reservation and no more",
                size(reserved_bytes),
                size(budget_bytes)
            ),
            Self::Need { working_set_bytes, estimated, headroom_bytes, fault_weight_bytes, restores, shares } => {
                let guess = if *estimated { " (an estimate from resident memory and refaults)" } else { "" };
                write!(f, "its working set is {}{guess}", size(working_set_bytes))?;
                if *headroom_bytes > 0 {
                    write!(f, ", with {} of headroom", size(headroom_bytes))?;
                }
                write!(f, "; far memory was touched {restores} times in the window")?;
                if *fault_weight_bytes > 0 {
                    write!(f, ", which weighs like {} more", size(fault_weight_bytes))?;
                }
                write!(f, "; it has {shares} shares")
            }
            Self::Gain { waits, works, wanted_bytes, worth_us_per_mib, others_us_per_mib, shares } => write!(
                f,
                "it waited {:.2} % of the time for its memory, and the host worked {:.2} % of a CPU for it; \
                 it wants {} that are far; another MiB is worth {:.0} us in a second to it, and {:.0} us to the \
                 others; it has {shares} shares",
                percent(waits),
                percent(works),
                size(wanted_bytes),
                worth_us_per_mib,
                others_us_per_mib
            ),
            Self::Headroom { working_set_bytes, headroom_bytes } => write!(
                f,
                "its working set of {} and {} of headroom count as wanted, whatever it waits",
                size(working_set_bytes),
                size(headroom_bytes)
            ),
            Self::AtReservation { reservation_bytes } => {
                write!(f, "it keeps the {} below which nothing is taken", size(reservation_bytes))
            }
            Self::AtLimit { limit_bytes } => write!(f, "its operator set a limit of {}", size(limit_bytes)),
            Self::FreeFirst { taken_bytes, watermark_bytes } => write!(
                f,
                "{} that it did not use were taken first, down to a watermark of {}",
                size(taken_bytes),
                size(watermark_bytes)
            ),
            Self::Probe { stall, threshold, step_bytes } => write!(
                f,
                "it stalled {:.2} % of the time, less than {:.2} %: {} less",
                percent(stall),
                percent(threshold),
                size(step_bytes)
            ),
            Self::BackOff { stall, threshold, step_bytes } => write!(
                f,
                "it stalled {:.2} % of the time, more than {:.2} %: {} more, and a pause",
                percent(stall),
                percent(threshold),
                size(step_bytes)
            ),
            Self::Paused { left_ms } => {
                write!(f, "it stalled not long ago: nothing is taken for another {:.1} s", *left_ms as f64 / 1e3)
            }
            Self::CatchingUp { resident_bytes } => {
                write!(f, "{} are resident still: reclaim is on its way to the last limit", size(resident_bytes))
            }
            Self::Tightened { state, by_bytes } => {
                write!(f, "the host is in state {state}: {} of the budget are kept back", size(by_bytes))
            }
            Self::Settled { one_in } => {
                write!(f, "its limit would have changed by at most 1/{one_in}, so it stays")
            }
            Self::Gently { one_in } => {
                write!(f, "it would lose more, but loses at most 1/{one_in} of its limit at a time")
            }
            Self::Pool { policy, has_bytes, promised_bytes, free_bytes } => write!(
                f,
                "the pool has {} for VMs on demand, which were promised {}, and {} are left for touches: {policy} \
                 divides it among them",
                size(has_bytes),
                size(promised_bytes),
                size(free_bytes)
            ),
            Self::External { policy } => write!(f, "the program {policy} decided"),
        }
    }
}
