//! What the pool lends by the host's state: more while the host is short, nothing more while it has memory to spare.
//!
//! Before: an operator said how much may be lent. After: `pool` has the reserve lend, or take back.
//! Threads: the pool's. Units: bytes, milliseconds. Promise: nothing that a VM has is lent; no memory goes back and
//! forth: what was lent returns only when the host is well without it.

use ballast_base::{Bytes, GIB, HUGE_SIZE};
use ballast_policy::{HostSample, HostState, Ladder};
use ballast_reserve::{Error, Reserve};

/// How often the host is looked at.
pub const LOOK_EVERY_MS: u64 = 1_000;
/// When nothing could be lent, because VMs have all, or taken back, because the kernel found no pages, it is tried
/// again this much later.
const AGAIN_MS: u64 = 10_000;
/// Of the host's memory, this part is to be free, and at most so much: as for a policy's decisions.
const FREE_PART: u64 = 64;
const MOST_FREE: u64 = GIB;
/// How much of that is free after something was lent, and stays free when it returns: well beyond the state `high`.
const AIM: u64 = 2;

/// Watches the host.
#[derive(Debug, Default)]
pub struct Lender {
    ladder: Ladder,
    looked_ms: Option<u64>,
    /// Nothing is tried before this.
    not_before_ms: u64,
}

impl Lender {
    /// Look at the host if it is time, and have the pool lend or take back. Returns what to tell operators.
    ///
    /// # Errors
    /// If the kernel does not say, or refuses.
    pub fn look(&mut self, reserve: &mut Reserve, at_ms: u64) -> Result<Option<String>, Error> {
        if self.looked_ms.is_some_and(|looked| at_ms < looked + LOOK_EVERY_MS) {
            return Ok(None);
        }
        self.looked_ms = Some(at_ms);
        let Some(lending) = reserve.lending()? else { return Ok(None) };
        let sample = reserve.host_memory()?;
        let (free_bytes, min_free_bytes) = (sample.spare.0, (sample.total.0 / FREE_PART).min(MOST_FREE));
        let host = HostSample { free_bytes, min_free_bytes, ..HostSample::default() };
        let (state, _) = self.ladder.update(&host, at_ms);
        let before = reserve.lent();
        let aim = decide(state, free_bytes, min_free_bytes, before.0);
        let aim = aim.min(lending.most.0).max(lending.least.0);
        let is_back = aim < before.0;
        if aim == before.0 || at_ms < self.not_before_ms {
            return Ok(None);
        }
        reserve.lend(Bytes(aim), None)?;
        let now = reserve.lent();
        if now == before {
            self.not_before_ms = at_ms + AGAIN_MS;
        }
        Ok((now != before).then(|| {
            let why = if is_back { "has memory to spare" } else { "is short of memory" };
            format!("the host {why} ({} free): {now} of the pool are lent, {before} before", Bytes(free_bytes))
        }))
    }
}

/// What should be lent.
fn decide(state: HostState, free: u64, min_free: u64, lent: u64) -> u64 {
    const SLICE: u64 = HUGE_SIZE as u64;
    let aim = min_free * AIM;
    match state {
        HostState::Soft | HostState::Hard | HostState::Low => {
            lent.saturating_add(aim.saturating_sub(free).next_multiple_of(SLICE))
        }
        // What is in use by then was not free: only that much returns which is free beyond the aim.
        HostState::High => lent.saturating_sub(free.saturating_sub(aim) / SLICE * SLICE),
        HostState::Clear => lent,
    }
}
