//! Rows of benches, read from the JSON that `ballast bench --json` printed.
//!
//! Before: there are files with one object a line. After: a chart has its points. Threads: none. Units: those of the
//! keys.
//! Promise: a line that is no row is an error with its file and number; a figure that was not measured has no point. If
//! a bench is measured again, its rows are in a later file, and only they count.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

/// All rows of each file, with its name, in the order of the files.
pub(super) struct Rows(Vec<(String, Vec<Value>)>);

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Point {
    pub median: f64,
    pub low: f64,
    pub high: f64,
}

impl Rows {
    pub(super) fn read(files: &[PathBuf]) -> Result<Self> {
        let mut rows = Vec::new();
        for file in files {
            let text = std::fs::read_to_string(file).with_context(|| format!("Reading {}", file.display()))?;
            let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
            rows.push((name, parse(file, &text)?));
        }
        Ok(Self(rows))
    }

    /// The rows of a bench with native guests that have this key, in the last file that has such rows.
    pub(super) fn of<'a>(&'a self, bench: &'a str, key: &'a str) -> impl Iterator<Item = &'a Value> {
        let last = self.last(bench, key).into_iter().flat_map(|(_, rows)| rows);
        last.filter(move |row| is_one(row, bench, key))
    }

    /// The name of the file of [`Self::of`].
    pub(super) fn file_of(&self, bench: &str, key: &str) -> &str {
        self.last(bench, key).map_or("", |(name, _)| name)
    }

    fn last(&self, bench: &str, key: &str) -> Option<&(String, Vec<Value>)> {
        self.0.iter().rfind(|(_, rows)| rows.iter().any(|row| is_one(row, bench, key)))
    }
}

fn is_one(row: &Value, bench: &str, key: &str) -> bool {
    row["bench"] == bench && row["guest"] == "native" && !row[key].is_null()
}

fn parse(file: &Path, text: &str) -> Result<Vec<Value>> {
    let mut rows = Vec::new();
    for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let place = || format!("Reading {}, line {}", file.display(), number + 1);
        let row: Value = serde_json::from_str(line).with_context(place)?;
        ensure!(row["bench"].is_string(), "{}: it is not a row of a bench", place());
        rows.push(row);
    }
    Ok(rows)
}

impl Point {
    /// The figure `key` of a row, divided by `unit`. Its range is that of the rounds, or the confidence interval.
    pub(super) fn of(row: &Value, key: &str, unit: f64) -> Option<Self> {
        let figure = |end: &str| row[format!("{key}{end}")].as_f64().map(|value| value / unit);
        let median = figure("")?;
        let low = figure("_ci95_low").or(figure("_min")).unwrap_or(median);
        Some(Self { median, low, high: figure("_ci95_high").or(figure("_max")).unwrap_or(median) })
    }
}
