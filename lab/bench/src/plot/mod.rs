//! Plots of the headlines, made from the rows of benches: `ballast-bench plot`.
//!
//! Before: `ballast bench WHAT --json` wrote rows to files. After: one SVG for each headline that they have.
//! Threads: none. Units: in the axes. Promise: nothing is drawn that is not in a row; a range is that of the rounds, or
//! the confidence interval of the median.
//!
//! | File | Headline |
//! |---|---|
//! | `restore.svg` | how long a touch of a far page takes |
//! | `reclaim.svg` | how fast cold pages leave DRAM |
//! | `idle.svg` | what being attached costs |
//! | `balance.svg` | eight VMs in less memory than they want |
//! | `vm-under-limit.svg` | one VM under a limit, over time |

mod course;
mod ranges;
mod rows;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use ranges::{Chart, FLOOR, KERNEL, OUR_OTHER, OURS, PLAIN, Side};
use rows::{Point, Rows};

const OUR_SIDE: Side = Side("Ballast", OURS);
const SWAP: Side = Side("kernel, zram", KERNEL);
const HANDLER: Side = Side("plain handler", PLAIN);

/// Draw all headlines that are in these files into a directory. Returns the files that were written.
pub fn run(files: &[PathBuf], out: &Path) -> Result<Vec<PathBuf>> {
    let rows = Rows::read(files)?;
    let charts = [("restore", restore(&rows)), ("reclaim", reclaim(&rows)), ("idle", idle(&rows))];
    let mut written = Vec::new();
    let mut write = |name: &str, text: String| -> Result<()> {
        let file = out.join(name).with_extension("svg");
        std::fs::write(&file, text + "\n").with_context(|| format!("Writing {}", file.display()))?;
        written.push(file);
        Ok(())
    };
    for (name, chart) in charts.into_iter().chain([("balance", balance(&rows))]) {
        if !chart.is_empty() {
            write(name, chart.draw()?)?;
        }
    }
    if let Some(row) = rows.of("limit").last() {
        write("vm-under-limit", course::draw(row)?)?;
    }
    ensure!(
        !written.is_empty(),
        "these files have no row of restore, reclaim, idle, balance or limit with native guests"
    );
    Ok(written)
}

/// A text of a row, with spaces.
fn word(row: &Value, key: &str) -> String {
    row[key].as_str().unwrap_or_default().replace('_', "-")
}

/// The points of these keys.
fn points<const N: usize>(row: &Value, keys: [String; N], unit: f64) -> Vec<Option<Point>> {
    keys.iter().map(|key| Point::of(row, key, unit)).collect()
}

fn restore(rows: &Rows) -> Chart {
    let row = rows.of("restore").find(|row| row["data"] == "half_compressible");
    let groups = row.into_iter().flat_map(|row| {
        ["p50", "p90", "p99"].map(|percentile| {
            let keys = ["restore", "kernel_swapin", "plain", "floor"].map(|side| format!("{side}_us_{percentile}"));
            (percentile.to_owned(), points(row, keys, 1.0))
        })
    });
    Chart {
        title: "A touch of a far page of 4 KiB (half-compressible data)".into(),
        axis: "us, logarithmic",
        logarithmic: true,
        sides: vec![OUR_SIDE, SWAP, HANDLER, Side("floor", FLOOR)],
        groups: groups.collect(),
    }
}

fn reclaim(rows: &Rows) -> Chart {
    // A large guest has a row of its own.
    let mut seen = Vec::new();
    let first = rows.of("reclaim").filter(|row| {
        let data = word(row, "data");
        let is_new = !seen.contains(&data);
        seen.push(data);
        is_new
    });
    let keys = ["reclaim", "kernel_pageout", "plain_pageout"].map(|side| format!("{side}_pages_per_s"));
    Chart {
        title: "Cold pages that leave DRAM, one thread".into(),
        axis: "1000 pages/s",
        logarithmic: false,
        sides: vec![OUR_SIDE, SWAP, HANDLER],
        groups: first.map(|row| (word(row, "data"), points(row, keys.clone(), 1e3))).collect(),
    }
}

fn idle(rows: &Rows) -> Chart {
    let keys = ["idle_overhead_pct", "idle_aa_pct"].map(str::to_owned);
    Chart {
        title: "An idle VM: how much slower it is when it is attached (95 % interval)".into(),
        axis: "% slower",
        logarithmic: false,
        sides: vec![Side("attached", OURS), Side("twice the same (noise)", PLAIN)],
        groups: rows.of("idle").map(|row| (word(row, "workload"), points(row, keys.clone(), 1.0))).collect(),
    }
}

fn balance(rows: &Rows) -> Chart {
    let keys = ["", "maestro_", "kernel_"].map(|side| format!("{side}geomean_slowdown"));
    let levels = rows.of("balance").filter_map(|row| Some((row["level_pct"].as_u64()?, row)));
    let levels = levels.filter(|(_, row)| row["geomean_slowdown"].is_number());
    Chart {
        title: "Eight VMs in less memory than they want: geometric mean of slowdowns".into(),
        axis: "times slower",
        logarithmic: false,
        sides: vec![
            Side("Ballast, gain", OURS),
            Side("Ballast, maestro", OUR_OTHER),
            Side("kernel, one cgroup", KERNEL),
        ],
        groups: levels.map(|(level, row)| (format!("{level} %"), points(row, keys.clone(), 1.0))).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_headline_in_the_rows_has_a_file_and_no_other() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("rows.jsonl");
        let rows = concat!(
            r#"{"bench":"restore","guest":"native","data":"half_compressible","restore_us_p50":0.3}"#,
            "\n",
            r#"{"bench":"balance","guest":"native","level_pct":60,"geomean_slowdown":1.8,"#,
            r#""kernel_geomean_slowdown":2.6}"#,
            "\n",
            r#"{"bench":"balance","guest":"native","pair":"store+scan","pair_slowdown":1.2}"#,
            "\n",
            r#"{"bench":"idle","guest":"kvm","workload":"zipf","idle_overhead_pct":1}"#,
            "\n",
        );
        std::fs::write(&file, rows).expect("rows");
        let written = run(std::slice::from_ref(&file), dir.path()).expect("plots");
        assert_eq!(written, ["restore.svg", "balance.svg"].map(|name| dir.path().join(name)));
        let text = std::fs::read_to_string(&written[1]).expect("a picture");
        assert!(text.contains("60 %") && text.contains("2.6"), "{text}");
        std::fs::write(&file, "").expect("no rows");
        assert!(run(&[file], dir.path()).expect_err("nothing").to_string().contains("no row of restore"));
    }
}
