//! Draws a day of a host: the memory in use with Ballast and without, and below that the latency of requests.
//!
//! Before: the row of `bench real --part day` has a value for each second and side. After: it is an SVG. Threads: none.
//! Units: hours of the day, GiB, milliseconds.

use anyhow::{Context, Result};
use ballast_base::GIB;
use plotters::style::RGBColor;
use serde_json::Value;

use super::course::{Curves, picture, series};
use super::ranges::{KERNEL, OURS, PLAIN};
use crate::stats::median;

const HOURS: f64 = 24.0;
/// Seconds over which a curve of latencies is smoothed, by their median.
const SMOOTH: usize = 15;
const SIDES: [(&str, &str, RGBColor); 3] =
    [("without", "_without", KERNEL), ("Ballast", "", OURS), ("adopted", "_adopted", PLAIN)];

pub(super) fn draw(row: &Value) -> Result<(String, String)> {
    let day = row["day_s"].as_f64().context("the row has no day_s")?;
    let servers = row["servers"].as_u64().context("the row has no servers")?;
    let curve = |key: &str, unit: f64, smooth: usize| -> Result<Curves> {
        let mut curves = Curves::new();
        for (name, end, colour) in SIDES {
            if row.get(format!("{key}{end}")).is_none() {
                continue;
            }
            let values: Vec<f64> = series(row, &format!("{key}{end}"))?.into_iter().flatten().collect();
            let points = values
                .chunks(smooth)
                .enumerate()
                .filter_map(|(at, part)| Some(((at * smooth) as f64 * HOURS / day, median(part)? / unit)));
            curves.push((name, colour, vec![points.collect()]));
        }
        Ok(curves)
    };
    let memory = curve("used_bytes", GIB as f64, 1)?;
    let latency = curve("p99_us_of_16", 1e3, SMOOTH)?;
    let title = format!("A day of a host with {servers} servers: its memory in use, and p99 of 16 requests");
    let text = picture(&title, ("hours (a day in ten minutes)", HOURS), &[("GiB", memory), ("ms", latency)])?;
    Ok((title, text))
}
