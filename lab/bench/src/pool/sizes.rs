//! Memory sizes of VMs, in a cloud that has published them.
//!
//! Before: nothing. After: `churn` draws VMs from it.
//! Source: AzurePublicDatasetV1 (Cortez et al., Resource Central, SOSP 2017; CC-BY 4.0), one region's first-party VMs
//! in 30 days: the memory of all 1,870,433 VMs whose type is in the processed copy at
//! github.com/huaweicloud/trace_generation_rnn (`resources/traces/v1.*.txt`, `resources/maps/flav_map.txt`).
//! Units: MiB. Promise: counts are those of the trace; nothing is fitted.

use ballast_base::MIB;
use ballast_pool::map::SLICE_SIZE;

use crate::stats::random;

/// Memory of a VM in MiB, and the number of VMs with it.
const AZURE: [(u64, u64); 14] = [
    (768, 38_578),
    (1792, 892_166),
    (2048, 534),
    (3584, 464_859),
    (4096, 234),
    (7168, 203_416),
    (8192, 66),
    (14_336, 197_840),
    (16_384, 187),
    (28_672, 420),
    (32_768, 36),
    (57_344, 71_942),
    (65_536, 7),
    (114_688, 148),
];

/// The smallest one, in slices.
pub(super) const SMALLEST: u32 = (AZURE[0].0 * MIB / SLICE_SIZE) as u32;

/// The memory of the next VM, in slices.
pub(super) fn draw(seed: &mut u64) -> u32 {
    let all: u64 = AZURE.iter().map(|(_, count)| count).sum();
    let mut at = ((u128::from(random(seed)) * u128::from(all)) >> 64) as u64;
    let found = AZURE.iter().find(|(_, count)| match at.checked_sub(*count) {
        Some(left) => {
            at = left;
            false
        }
        None => true,
    });
    let mib = found.map_or(AZURE[0].0, |(mib, _)| *mib);
    (mib * MIB / SLICE_SIZE) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_counts_are_those_of_the_trace_and_draws_follow_them() {
        assert_eq!(AZURE.iter().map(|(_, count)| count).sum::<u64>(), 1_870_433);
        let mut seed = 1;
        let draws: Vec<u32> = (0..100_000).map(|_| draw(&mut seed)).collect();
        let share = |mib: u64| draws.iter().filter(|slices| u64::from(**slices) * 2 == mib).count() as f64 / 1e5;
        assert!((share(1792) - 0.477).abs() < 0.01 && (share(57_344) - 0.038).abs() < 0.005);
    }
}
