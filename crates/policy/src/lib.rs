//! How much, from whom: policies as pure functions from a [`Snapshot`] to a [`Plan`].
//!
//! ```text
//! sample (daemon) ─► Snapshot ─► ladder (host state) ─► frame (bounds) ─► policy ─► solve ─► Plan ─► apply (daemon)
//!                                        └────────────── State, in and out ──────────┘
//! ```
//!
//! A reader's way through it: [`words`] (what operators say of a VM), [`snapshot`] (what goes in and comes out),
//! [`reason`] (why, as data), [`solve`](mod@solve) (dividing a budget exactly), `frame` (what all policies share), then
//! [`Maestro`], [`Gain`], [`Pressure`], [`Fixed`], [`Ratio`], and [`replay`] (a recording under another policy).
//!
//! Before: the daemon samples all VMs. After: it sets one limit per VM and nothing else.
//! Threads: none. Units: in the names; memory is in bytes, and every limit is a whole number of pages.
//! Promise: no clock, no I/O, no randomness, no unsafe code. The same snapshot and state give the same plan, on any
//! machine; both serialise, so that a recording can be played again. The pager cannot name this crate: no fault waits
//! for a decision.
#![forbid(unsafe_code)]

mod frame;
mod gain;
pub mod ladder;
mod maestro;
mod pressure;
pub mod reason;
pub mod replay;
mod simple;
pub mod snapshot;
pub mod solve;
pub mod words;

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

pub use frame::{External, check_external};
pub use gain::{Gain, Sums};
pub use ladder::{HostState, Ladder};
pub use maestro::Maestro;
pub use pressure::Pressure;
pub use reason::Reason;
pub use simple::{Fixed, Ratio};
pub use snapshot::{Action, Decision, HostSample, Plan, Snapshot, VmSample, WorkingSet};
pub use words::{Class, Settings};

/// One way to divide memory. In-tree policies implement this; other programs use the API.
pub trait Policy: fmt::Debug + Send + Sync {
    /// The word operators type.
    fn name(&self) -> &'static str;

    /// What each VM is to have now. `state` is all that the policy remembers from one decision to the next.
    fn decide(&self, snapshot: &Snapshot, state: &mut State) -> Plan;
}

/// The policies there are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Nobody decides: each VM has what its operator said.
    #[default]
    None,
    /// Equal parts.
    Fixed,
    /// The same fraction of each VM's size.
    Ratio,
    /// By working set and fault counts, least squares.
    Maestro,
    /// As little as the stall of each VM allows.
    Pressure,
    /// Where a byte more saves most time, of the VM and of the host.
    Gain,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 6] = [Self::None, Self::Fixed, Self::Ratio, Self::Maestro, Self::Pressure, Self::Gain];

    /// The word operators type.
    pub const fn word(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Fixed => "fixed",
            Self::Ratio => "ratio",
            Self::Maestro => "maestro",
            Self::Pressure => "pressure",
            Self::Gain => "gain",
        }
    }

    /// The policy of that kind; none for [`Kind::None`].
    pub fn policy(self, params: Params) -> Option<Box<dyn Policy>> {
        Some(match self {
            Self::None => return None,
            Self::Fixed => Box::new(Fixed),
            Self::Ratio => Box::new(Ratio),
            Self::Maestro => Box::new(Maestro { window_ms: params.window_ms }),
            Self::Pressure => {
                Box::new(Pressure { threshold: params.threshold, watermark_bytes: params.watermark_bytes })
            }
            Self::Gain => Box::new(Gain),
        })
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.word())
    }
}

impl FromStr for Kind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|kind| kind.word() == text);
        found.ok_or_else(|| format!("{text:?} is no policy; there are none, fixed, ratio, maestro, pressure and gain"))
    }
}

/// What operators can set of policies.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    /// Maestro's window W, over which faults count.
    pub window_ms: u64,
    /// Share of time a VM may stall before the pressure policy gives memory back. Blowfish uses 0.04.
    pub threshold: f64,
    /// Allowance beyond what is resident that the pressure policy leaves a VM before it takes cold memory.
    pub watermark_bytes: u64,
}

impl Params {
    /// Values with which a policy makes sense, or which one does not.
    pub fn check(&self) -> Result<(), String> {
        if !(100..=3_600_000).contains(&self.window_ms) {
            return Err(format!("a window of {} ms is out of range: 0.1 s to 3600 s", self.window_ms));
        }
        // Also false for what is not a number.
        if !(self.threshold > 0.0 && self.threshold <= 1.0) {
            return Err(format!("a threshold of {} is out of range: above 0, at most 1", self.threshold));
        }
        if self.watermark_bytes > 1 << 50 {
            return Err("a watermark of more than 1 PiB".into());
        }
        Ok(())
    }
}

impl Default for Params {
    fn default() -> Self {
        Self { window_ms: 10_000, threshold: 0.04, watermark_bytes: 100 * ballast_base::MIB }
    }
}

/// How the control loop runs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Setup {
    /// Who decides.
    pub policy: Kind,
    /// How often; by default as often as the paper that measures most of this (Blowfish, section 5.3) looks at its VMs.
    pub tick_ms: u64,
    /// DRAM for all guests together; without it, what the host can spare.
    pub budget_bytes: Option<u64>,
    /// What can be set of policies.
    pub params: Params,
}

impl Setup {
    /// Is every value in its range?
    pub fn check(&self) -> Result<(), String> {
        if !(10..=600_000).contains(&self.tick_ms) {
            return Err(format!("a tick of {} ms is out of range: 10 ms to 600 s", self.tick_ms));
        }
        if self.budget_bytes.is_some_and(|budget| budget < ballast_base::MIB) {
            return Err("a budget below 1 MiB".into());
        }
        self.params.check()
    }
}

impl Default for Setup {
    fn default() -> Self {
        Self { policy: Kind::None, tick_ms: 500, budget_bytes: None, params: Params::default() }
    }
}

/// All that policies remember between decisions. Each uses its part; switching policies keeps the rest.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// How hard-pressed the host is, and since when.
    pub ladder: Ladder,
    /// By VM id.
    pub vms: BTreeMap<String, VmState>,
}

/// The same of one VM.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct VmState {
    /// Restores so far, at times, oldest first: at most one window of them.
    pub restores: Vec<(u64, u64)>,
    /// The target at the last decision.
    #[serde(default)]
    pub target_bytes: Option<u64>,
    /// What an unmeasured VM is taken to need.
    #[serde(default)]
    pub need: Option<Need>,
    /// What the gain policy remembers.
    #[serde(default)]
    pub gain: Sums,
    /// Until when the pressure policy takes nothing after it had to give back.
    pub pause_until_ms: u64,
    /// How long the last such pause was.
    pub pause_ms: u64,
    /// When the pressure policy last gave back.
    pub raised_at_ms: u64,
}

/// What Maestro takes a VM to need, where nobody measures its working set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Need {
    /// When.
    pub at_ms: u64,
    /// How much.
    pub bytes: u64,
    /// Restores by then.
    pub restores: u64,
}

impl State {
    /// What is remembered of a VM, made if need be.
    pub(crate) fn vm(&mut self, id: &str) -> &mut VmState {
        if !self.vms.contains_key(id) {
            self.vms.insert(id.to_owned(), VmState::default());
        }
        self.vms.get_mut(id).expect("inserted above")
    }

    /// Forget VMs that are gone.
    pub(crate) fn keep_only(&mut self, snapshot: &Snapshot) {
        self.vms.retain(|id, _| snapshot.vms.iter().any(|vm| vm.id == *id));
    }
}
