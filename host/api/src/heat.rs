//! How hot a VM's memory is, in the API.
//!
//! Before: `heat` computed it from access cycles. After: JSON, and `ballast vm heat`.
//! Units: in the field names; an age is the time since the last touch that tracking has seen.
//! Promise: the ages add up to `present_bytes`.

use std::time::Duration;

use ballast_heat::ages::BUCKETS_S;
use ballast_heat::{Heat, ages};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Most cells a strip may be asked for.
pub const MAX_CELLS: usize = 4096;
/// Cells of a strip unless asked otherwise.
pub const DEFAULT_CELLS: usize = 64;

/// A change to how a VM is tracked. Only the keys that are present change anything; unknown keys are refused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct HeatPatch {
    /// Whether to track it, until its engine is replaced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub track: Option<bool>,
}

/// How hot a VM's memory is. Only memory in DRAM counts; far memory is not included.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VmHeat {
    /// The VM.
    pub name: String,
    /// It is to be tracked.
    pub track: bool,
    /// It is tracked now: not while it is blocked.
    pub is_tracked: bool,
    /// Cycles over all memory so far; with 0 the figures below mean nothing yet.
    pub cycles: u64,
    /// Fine cycles so far.
    pub fine_cycles: u64,
    /// Time between cycles, now.
    pub period_ms: u64,
    /// Share of one CPU that tracking takes.
    pub cpu_percent: f64,
    /// Share of the time that guest threads wait for tracking.
    pub guest_percent: f64,
    /// Tracked memory that is present.
    pub present_bytes: u64,
    /// Working set: memory touched within `wss_span_s`. Of the touched huge pages with fine scans, the pages that the
    /// last three saw touched count; the others count with the same share of their pages.
    pub wss_bytes: u64,
    /// The working set if a touched huge page counts as a whole.
    pub wss_huge_bytes: u64,
    /// Duration of the last three cycles.
    pub wss_span_s: f64,
    /// Part of the touched huge pages that had a fine scan: this part of the estimate is measured.
    pub known_percent: f64,
    /// Memory by age, youngest first.
    pub ages: Vec<AgeBucket>,
    /// Hot huge pages with few hot pages in them.
    pub bloated_units: u64,
    /// Cold memory in them.
    pub bloat_bytes: u64,
    /// The guest's address space in equal pieces, region after region.
    pub strip: Vec<HeatCell>,
}

/// Memory of one age.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AgeBucket {
    /// Touched within this time, and not within that of the bucket before; null: all older memory.
    pub up_to_s: Option<u64>,
    /// The amount.
    pub bytes: u64,
}

/// One piece of a guest's address space.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct HeatCell {
    /// Share of it in DRAM, 0 to 1.
    pub present: f64,
    /// Share of it touched in the last three cycles, 0 to 1.
    pub hot: f64,
    /// Time since its last touch; null if none of it is in DRAM.
    pub age_s: Option<f64>,
}

impl VmHeat {
    /// The report of a VM from the result of `heat`.
    pub fn new(name: String, track: bool, is_tracked: bool, heat: &Heat) -> Self {
        let seconds = |time: Duration| time.as_secs_f64();
        // Digits beyond the precision are cut off, to keep the JSON of a long strip short.
        let rounded = |share: f64| (share * 1e4).round() / 1e4;
        let cell = |cell: &ages::Cell| HeatCell {
            present: rounded(cell.present),
            hot: rounded(cell.hot),
            age_s: cell.age.map(seconds),
        };
        let ends = BUCKETS_S.iter().map(|end| Some(*end)).chain([None]);
        Self {
            name,
            track,
            is_tracked,
            cycles: heat.cycles,
            fine_cycles: heat.fine_cycles,
            period_ms: heat.period.as_millis() as u64,
            cpu_percent: rounded(heat.cpu_share * 100.0),
            guest_percent: rounded(heat.guest_share * 100.0),
            present_bytes: heat.present_bytes,
            wss_bytes: heat.wss_bytes,
            wss_huge_bytes: heat.wss_huge_bytes,
            wss_span_s: seconds(heat.wss_span),
            known_percent: rounded(heat.known_share * 100.0),
            ages: ends.zip(heat.ages).map(|(up_to_s, bytes)| AgeBucket { up_to_s, bytes }).collect(),
            bloated_units: heat.bloated_units,
            bloat_bytes: heat.bloat_bytes,
            strip: heat.strip.iter().map(cell).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heat_survives_the_way_through_json() {
        let drawn = Heat {
            cycles: 3,
            wss_bytes: 4096,
            ages: [1; BUCKETS_S.len() + 1],
            strip: vec![ages::Cell { present: 0.5, hot: 1.0 / 3.0, age: Some(Duration::from_millis(1500)) }],
            ..Heat::default()
        };
        let heat = VmHeat::new("web".into(), true, false, &drawn);
        assert_eq!((heat.ages.len(), heat.ages[0].up_to_s, heat.ages[11].up_to_s), (12, Some(1), None));
        assert_eq!(heat.strip[0], HeatCell { present: 0.5, hot: 0.3333, age_s: Some(1.5) });
        let text = serde_json::to_string(&heat).expect("serialise");
        assert_eq!(serde_json::from_str::<VmHeat>(&text).expect("parse"), heat);
    }
}
