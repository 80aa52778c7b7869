//! Plots of the headlines, made from the rows of benches: `ballast-bench plot`.
//!
//! Before: `ballast bench WHAT --json` wrote rows to files. After: each headline in them has an SVG.
//! Threads: none. Units: in the axes. Promise: all figures come from rows; a range is that of the rounds, or the
//! confidence interval of the median. A picture says in words what it shows and which file its rows are in; equal rows
//! make equal pictures, so a test finds those of `docs/pictures` that are older than their rows.
//!
//! | File | Headline |
//! |---|---|
//! | `restore.svg` | time of a touch of a far page |
//! | `reclaim.svg` | rate at which cold pages leave DRAM |
//! | `idle.svg` | cost of the attachment |
//! | `balance.svg` | eight VMs in less memory than they want |
//! | `real-five.svg` | memory of a real program that can be far for 5 % of its speed |
//! | `real-eight.svg` | eight real programs in less memory than they want |
//! | `vm-under-limit.svg` | one VM under a limit, over time |
//! | `day.svg` | a day of a host |

mod course;
mod day;
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
    let charts = [
        ("restore", "restore", "restore_us_p50", restore(&rows)),
        ("reclaim", "reclaim", "reclaim_pages_per_s", reclaim(&rows)),
        ("idle", "idle", "idle_overhead_pct", idle(&rows)),
        ("balance", "balance", "geomean_slowdown", balance(&rows)),
        ("real-five", "real", "five_far_pct", five(&rows)),
        ("real-eight", "real", "eight_slowdown_gain", eight(&rows)),
    ];
    let mut written = Vec::new();
    let mut write = |name: &str, text: String| -> Result<()> {
        let file = out.join(name).with_extension("svg");
        std::fs::write(&file, text + "\n").with_context(|| format!("Writing {}", file.display()))?;
        written.push(file);
        Ok(())
    };
    for (name, bench, key, chart) in charts {
        if !chart.is_empty() {
            let words = format!("{} Rows: {}.", chart.in_words(), rows.file_of(bench, key));
            write(name, described(&chart.draw()?, &chart.title, &words)?)?;
        }
    }
    if let Some(row) = rows.of("limit", "t_s").last() {
        let (title, text) = course::draw(row)?;
        let words = format!(
            "Above, over time: the limit, the memory in DRAM and the far memory. Below: refaults and quarantine hits. \
             Rows: {}.",
            rows.file_of("limit", "t_s")
        );
        write("vm-under-limit", described(&text, &title, &words)?)?;
    }
    if let Some(row) = rows.of("real", "day_s").last() {
        let (title, text) = day::draw(row)?;
        let words = format!(
            "Above, over time: the host's memory in use without Ballast, with it, and with adopted VMs. Below: the \
             latency of requests. Rows: {}.",
            rows.file_of("real", "day_s")
        );
        write("day", described(&text, &title, &words)?)?;
    }
    ensure!(
        !written.is_empty(),
        "these files have no row of restore, reclaim, idle, balance, limit or a day of real programs"
    );
    Ok(written)
}

/// The picture with a title, and a description for readers who cannot see it.
fn described(svg: &str, title: &str, words: &str) -> Result<String> {
    let plain = |text: &str| text.replace('&', "&amp;").replace('<', "&lt;");
    let (head, rest) = svg.split_once('>').context("the picture has no element")?;
    Ok(format!("{head} role=\"img\">\n<title>{}</title>\n<desc>{}</desc>{rest}", plain(title), plain(words)))
}

fn word(row: &Value, key: &str) -> String {
    row[key].as_str().unwrap_or_default().replace('_', "-")
}

/// The points of these keys, in multiples of `unit`.
fn points<const N: usize>(row: &Value, keys: [String; N], unit: f64) -> Vec<Option<Point>> {
    keys.iter().map(|key| Point::of(row, key, unit)).collect()
}

fn restore(rows: &Rows) -> Chart {
    let row = rows.of("restore", "restore_us_p50").find(|row| row["data"] == "half_compressible");
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
    // A large guest has another row.
    let mut seen = Vec::new();
    let first = rows.of("reclaim", "reclaim_pages_per_s").filter(|row| {
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
        groups: rows
            .of("idle", "idle_overhead_pct")
            .map(|row| (word(row, "workload"), points(row, keys.clone(), 1.0)))
            .collect(),
    }
}

fn balance(rows: &Rows) -> Chart {
    let title = "Eight VMs in less memory than they want: geometric mean of slowdowns";
    let keys = ["", "maestro_", "kernel_"].map(|side| format!("{side}geomean_slowdown"));
    by_level(title, rows.of("balance", "geomean_slowdown"), keys)
}

fn eight(rows: &Rows) -> Chart {
    let title = "Eight real programs in less memory than they want: geometric mean of slowdowns";
    let keys = ["gain", "maestro", "kernel"].map(|side| format!("eight_slowdown_{side}"));
    by_level(title, rows.of("real", "eight_slowdown_gain"), keys)
}

/// Slowdowns at each level of memory: the keys of Ballast with `gain` and with `maestro`, and of the kernel.
fn by_level<'a>(title: &str, rows: impl Iterator<Item = &'a Value>, keys: [String; 3]) -> Chart {
    // Other parts of the bench have other rows.
    let levels = rows.filter_map(|row| Some((row["level_pct"].as_u64()?, row)));
    Chart {
        title: title.into(),
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

fn five(rows: &Rows) -> Chart {
    let keys = ["", "_adopted", "_kernel"].map(|side| format!("five_far_pct{side}"));
    Chart {
        title: "Memory that can be far for 5 % of a program's speed".into(),
        axis: "% of its memory",
        logarithmic: false,
        sides: vec![OUR_SIDE, Side("adopted", PLAIN), SWAP],
        groups: rows
            .of("real", "five_far_pct")
            .map(|row| (word(row, "program"), points(row, keys.clone(), 1.0)))
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pictures_of_the_docs_are_those_of_the_newest_rows_and_say_what_they_show() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let listed = |place: &str, ending: &str| {
            let entries = std::fs::read_dir(root.join(place)).expect("a directory").flatten();
            let mut files: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
            files.retain(|path| path.extension().is_some_and(|found| found == ending));
            files.sort();
            files
        };
        let dir = tempfile::tempdir().expect("a directory");
        for file in run(&listed("lab/notebook", "jsonl"), dir.path()).expect("plots") {
            let name = file.file_name().expect("a name");
            let [drawn, kept] = [file.clone(), root.join("docs/pictures").join(name)]
                .map(|path| std::fs::read_to_string(path).unwrap_or_default());
            let again = "ballast-bench plot lab/notebook/*.jsonl --out docs/pictures";
            assert!(drawn == kept, "docs/pictures/{} is not the picture of its rows: {again}", name.display());
        }
        for picture in listed("docs/pictures", "svg") {
            let text = std::fs::read_to_string(&picture).expect("a picture");
            assert!(text.contains("<title>") && text.contains("<desc>"), "{} has no words", picture.display());
        }
    }
}
