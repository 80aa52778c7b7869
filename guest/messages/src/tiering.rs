//! What an agent says of tiering in its guest: a part of each tick.
//!
//! Before: the agent moves memory between nodes of its guest, or cannot. After: its statistics, on the host.
//! Units: pages, microseconds. Promise: as in `message`: decoded values are bounded, and are claims of the guest.

use crate::bytes::{Reader, Refused, Writer};

/// Most tiers of a guest in a message.
const MAX_TIERS: usize = 16;

/// Whether the agent moves memory between tiers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum TieringState {
    /// The guest's owner does not want it.
    #[default]
    Off = 0,
    /// It cannot; the note says why.
    Unable = 1,
    /// Another program moves memory by heat, so this one does not; the note says which.
    Aside = 2,
    /// It moves hot memory to the fast tier.
    Working = 3,
}

impl TieringState {
    fn of(number: u8) -> Self {
        [Self::Off, Self::Unable, Self::Aside].get(usize::from(number)).copied().unwrap_or(Self::Working)
    }
}

/// A tier of the guest's memory: nodes of one speed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierUse {
    /// The first of its nodes.
    pub node: u32,
    /// Its memory.
    pub pages: u64,
    /// Pages of it that are free in the kernel's allocator.
    pub free: u64,
    /// Read latency that the guest's firmware states; zero: none.
    pub latency_ns: u32,
}

/// Statistics of tiering inside the guest (Demeter, section 3.3). Counters begin with the agent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tiering {
    /// What it does.
    pub state: TieringState,
    /// The reason why it moves nothing, or no more.
    pub note: String,
    /// The tiers, the fastest first.
    pub tiers: Vec<TierUse>,
    /// Programs whose memory is managed.
    pub programs: u64,
    /// Pages of these programs that can be moved.
    pub managed: u64,
    /// The part of these pages that is in the fast tier.
    pub managed_fast: u64,
    /// In the last epoch, the share of sampled accesses that the fast tier served, in 1/10,000; `None` without samples.
    pub hits: Option<u32>,
    /// Accesses sampled.
    pub samples: u64,
    /// Ranges, each of which is equally hot.
    pub ranges: u64,
    /// Pages moved to the fast tier.
    pub promoted: u64,
    /// Pages moved to a slow tier.
    pub demoted: u64,
    /// Pages that were to be moved and stayed.
    pub stayed: u64,
    /// CPU time of tiering, of the kernel's monitor for it included, in microseconds.
    pub cpu_us: u64,
}

pub(crate) fn put(body: &mut Writer, tiering: &Tiering) {
    body.u8(tiering.state as u8);
    body.text(&tiering.note);
    body.list(&tiering.tiers[..tiering.tiers.len().min(MAX_TIERS)], |body, tier| {
        body.u32(tier.node);
        body.u64(tier.pages);
        body.u64(tier.free);
        body.u32(tier.latency_ns);
    });
    // One more than the share: zero is none.
    body.u32(tiering.hits.map_or(0, |share| share.saturating_add(1)));
    for number in [tiering.programs, tiering.managed, tiering.managed_fast, tiering.samples, tiering.ranges] {
        body.u64(number);
    }
    for number in [tiering.promoted, tiering.demoted, tiering.stayed] {
        body.u64(number);
    }
    body.u64(tiering.cpu_us);
}

pub(crate) fn get(body: &mut Reader<'_>) -> Result<Tiering, Refused> {
    Ok(Tiering {
        state: TieringState::of(body.u8()?),
        note: body.text()?,
        tiers: body.list(MAX_TIERS, 24, |body| {
            Ok(TierUse { node: body.u32()?, pages: body.u64()?, free: body.u64()?, latency_ns: body.u32()? })
        })?,
        hits: body.u32()?.checked_sub(1),
        programs: body.u64()?,
        managed: body.u64()?,
        managed_fast: body.u64()?,
        samples: body.u64()?,
        ranges: body.u64()?,
        promoted: body.u64()?,
        demoted: body.u64()?,
        stayed: body.u64()?,
        cpu_us: body.u64()?,
    })
}

#[cfg(test)]
pub(crate) fn sample() -> Tiering {
    let tiers = vec![TierUse { node: 0, pages: 9, free: 8, latency_ns: 70 }];
    let state = TieringState::Working;
    Tiering { state, tiers, hits: Some(0), cpu_us: 5, ..Tiering::default() }
}
