//! State of the gain policy for one VM: sums of its waiting and its refaults, which decay exponentially.
//!
//! Before: a sample of the VM. After: `gain` estimates the time that a byte more would save. Units: bytes, seconds.
//! Promise: a counter or a clock that went back begins new sums.

use serde::{Deserialize, Serialize};

use crate::snapshot::VmSample;

/// Time in which the sums decay to 1/e, in milliseconds.
const DECAY_MS: f64 = 5_000.0;
/// Refaults that suffice for an estimate. With more, the sums decay faster, so that a jump of the demand shows at once;
/// but at most by this factor, or each phase of a program would move limits.
const ENOUGH_REFAULTS: f64 = 2_000.0;
const DECAY_FACTOR_LEAST: f64 = 0.3;
/// 1/DOUBT of a VM's memory counts as wanted. In any VM some pages refault at once because they were evicted by
/// mistake; more memory would not save those refaults.
const DOUBT: u64 = 32;
/// CPU seconds for each restore, and for each byte of it, with the eviction that makes room for it. Measured with the
/// benches `balance` and `huge`.
const WORK_S: f64 = 15e-6;
const WORK_S_PER_BYTE: f64 = 2.5e-6 / ballast_base::PAGE_SIZE as f64;
/// Most of the time that a VM counts as waiting, as a share.
const WAITS_AT_MOST: f64 = 0.9;

/// Sums of one VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sums {
    /// Time of the last sample.
    pub at_ms: u64,
    /// Sum of all refault intervals until then, since the VM attached, in page-milliseconds.
    pub refault_page_ms: u64,
    /// Restores until then.
    pub restores: u64,
    /// Sum of the reciprocals of all refault intervals until then, in 1/1000 Hz.
    pub refault_milli_hz: u64,
    /// Far memory at the last sample.
    pub far_bytes: u64,
    /// Resident memory at the last sample.
    pub resident_bytes: u64,
    /// Seconds, decayed.
    pub time_s: f64,
    /// Seconds of waiting, decayed.
    pub waited_s: f64,
    /// Restores, decayed.
    pub returned: f64,
    /// Sum of the reciprocals of refault intervals, in Hz, decayed.
    pub returned_hz: f64,
    /// Restored bytes times their refault intervals, in byte-seconds, decayed.
    pub refault_byte_s: f64,
}

impl Sums {
    /// Adds the time since the last sample.
    pub(crate) fn add(&mut self, vm: &VmSample, at_ms: u64) {
        let VmSample { refault_page_ms, restores, refault_milli_hz, far_bytes, resident_bytes, .. } = *vm;
        let now = Self { at_ms, refault_page_ms, restores, refault_milli_hz, far_bytes, resident_bytes, ..*self };
        let before = std::mem::replace(self, now);
        if before.at_ms == 0 || before.at_ms > at_ms || before.refault_page_ms > vm.refault_page_ms {
            // The first sample, or a sample of another run of the VM.
            *self = Self {
                at_ms,
                refault_page_ms,
                restores,
                refault_milli_hz,
                far_bytes,
                resident_bytes,
                ..Self::default()
            };
            return;
        }
        let elapsed_ms = (at_ms - before.at_ms) as f64;
        let enough = (ENOUGH_REFAULTS / before.returned.max(1.0)).clamp(DECAY_FACTOR_LEAST, 1.0);
        let kept = (-elapsed_ms / (DECAY_MS * enough)).exp();
        let intervals = (vm.refault_page_ms - before.refault_page_ms) as f64 / 1e3 * vm.page_bytes as f64;
        // An idle VM refaults pages that were far for long. It never wants more than was far.
        let most = before.far_bytes.max(vm.far_bytes) as f64 * elapsed_ms / 1e3;
        self.time_s = before.time_s * kept + elapsed_ms / 1e3;
        self.waited_s = before.waited_s * kept + vm.worst_stall() * elapsed_ms / 1e3;
        let returned = vm.restores.saturating_sub(before.restores) as f64;
        self.returned = before.returned * kept + returned;
        self.returned_hz =
            before.returned_hz * kept + refault_milli_hz.saturating_sub(before.refault_milli_hz) as f64 / 1e3;
        self.refault_byte_s = before.refault_byte_s * kept + intervals.min(most);
    }

    /// Share of the time that the VM waited.
    pub(crate) fn waits(&self) -> f64 {
        if self.time_s > 0.0 { (self.waited_s / self.time_s).min(WAITS_AT_MOST) } else { 0.0 }
    }

    /// Share of a CPU that the host worked for the VM.
    pub(crate) fn works(&self, page_bytes: u64) -> f64 {
        let each_s = WORK_S + WORK_S_PER_BYTE * page_bytes as f64;
        if self.time_s > 0.0 { self.returned * each_s / self.time_s } else { 0.0 }
    }

    /// Far memory in use (Little's law: refaults per second times their mean interval).
    pub(crate) fn wanted_bytes(&self) -> f64 {
        if self.time_s > 0.0 { self.refault_byte_s / self.time_s } else { 0.0 }
    }

    /// Far memory that is needed soonest: refaults per second over their mean frequency.
    pub(crate) fn wanted_soon_bytes(&self, page_bytes: u64) -> f64 {
        // No refault, or a recording without intervals.
        if self.returned_hz <= 0.0 || self.time_s <= 0.0 {
            return self.wanted_bytes();
        }
        self.returned * self.returned / self.returned_hz / self.time_s * page_bytes as f64
    }

    /// Seconds per second that one more byte saves: the VM's, which count more the slower it is, and the host's.
    pub(crate) fn saves(&self, has_bytes: u64, page_bytes: u64) -> f64 {
        let fair = (1.0 - self.waits()).powi(2);
        let wanted = self.wanted_soon_bytes(page_bytes);
        (self.waits() / fair + self.works(page_bytes)) / (wanted + (has_bytes / DOUBT).max(1) as f64)
    }
}
