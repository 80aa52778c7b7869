//! A row of results: one JSON object, or a small table for people.
//!
//! Before: a bench has measured its repetitions. After: `main` prints the row.
//! Threads: none. Units: in every key. Promise: every figure has its spread and its A/A noise; a figure that could not
//! be measured is null, and the row has the reason.

use std::fmt::Write as _;

use comfy_table::{CellAlignment, Table, presets};
use serde_json::{Map, Value, json};

use crate::stats::{Spread, aa_noise_pct, median_ci95, ratios};

pub const NOT_MEASURED: &str = "not measured";

/// One row.
#[derive(Clone, Debug, Default)]
pub struct Row {
    title: String,
    facts: Vec<(String, Value)>,
    figures: Vec<(String, Option<Figure>)>,
    missing: Vec<String>,
}

#[derive(Clone, Copy, Debug)]
struct Figure {
    spread: Spread,
    aa_pct: Option<f64>,
    /// The 95 % interval of the median, for differences that are smaller than their spread.
    ci95: Option<(f64, f64)>,
}

/// Values by key, in the order of their first measurement.
#[derive(Debug, Default)]
pub(crate) struct Figures(Vec<(String, Vec<f64>)>);

impl Figures {
    pub(crate) fn add(&mut self, key: &str, value: f64) {
        match self.0.iter_mut().find(|(known, _)| known == key) {
            Some((_, values)) => values.push(value),
            None => self.0.push((key.to_owned(), vec![value])),
        }
    }

    /// The values of a key; none if it was not measured.
    pub(crate) fn of(&self, key: &str) -> &[f64] {
        self.0.iter().find(|(known, _)| known == key).map_or(&[], |(_, values)| values)
    }
}

impl Row {
    /// A row of this bench.
    pub fn new(bench: &str, guest: &str, what: &str) -> Self {
        let mut row = Self { title: format!("{bench}, {guest} guest, {what}"), ..Self::default() };
        row.fact("bench", bench);
        row.fact("guest", guest);
        row
    }

    pub(crate) fn title(&self) -> &str {
        &self.title
    }

    /// Add a value that was not measured in repetitions.
    pub fn fact(&mut self, key: &str, value: impl Into<Value>) {
        self.facts.push((key.to_owned(), value.into()));
    }

    /// Add a figure from its repetitions, in the order they were measured.
    pub fn figure(&mut self, key: &str, values: &[f64]) {
        let figure = Spread::of(values).map(|spread| Figure { spread, aa_pct: aa_noise_pct(values), ci95: None });
        self.figures.push((key.to_owned(), figure));
    }

    /// Adds the figure that `figure` computes from each of these.
    pub(crate) fn figure_of<T>(&mut self, key: &str, all: &[T], figure: impl Fn(&T) -> f64) {
        self.figure(key, &all.iter().map(figure).collect::<Vec<_>>());
    }

    pub(crate) fn figures(&mut self, figures: &Figures) {
        figures.0.iter().for_each(|(key, values)| self.figure(key, values));
    }

    pub(crate) fn differences(&mut self, figures: &Figures) {
        figures.0.iter().for_each(|(key, values)| self.difference(key, values));
    }

    /// Add a difference, which may be zero: its noise cannot be given in percent of itself.
    pub fn difference(&mut self, key: &str, values: &[f64]) {
        let ci95 = median_ci95(values);
        self.figures.push((key.to_owned(), Spread::of(values).map(|spread| Figure { spread, aa_pct: None, ci95 })));
    }

    /// Add a ratio of two sides, repetition by repetition.
    pub fn ratio(&mut self, key: &str, ours: &[f64], theirs: &[f64]) {
        self.figure(key, &ratios(ours, theirs));
    }

    /// Add a reason for missing figures, once.
    pub fn because(&mut self, why: &str) {
        if !self.missing.iter().any(|said| said == why) {
            self.missing.push(why.to_owned());
        }
    }

    /// The JSON object. `KEY` is the median, with `KEY_min`, `KEY_max`, and `KEY_aa_pct` or `KEY_ci95_low` and `_high`.
    pub fn json(&self, machine: &Value) -> Value {
        let mut object: Map<String, Value> = self.facts.iter().cloned().collect();
        for (key, figure) in &self.figures {
            object.insert(key.clone(), figure.map_or(Value::Null, |figure| rounded(figure.spread.median)));
            if let Some(Figure { spread, aa_pct, ci95 }) = figure {
                object.insert(format!("{key}_min"), rounded(spread.min));
                object.insert(format!("{key}_max"), rounded(spread.max));
                if let Some((low, high)) = ci95 {
                    object.insert(format!("{key}_ci95_low"), rounded(*low));
                    object.insert(format!("{key}_ci95_high"), rounded(*high));
                } else {
                    object.insert(format!("{key}_aa_pct"), aa_pct.map_or(Value::Null, rounded));
                }
            }
        }
        if !self.missing.is_empty() {
            object.insert(NOT_MEASURED.replace(' ', "_"), json!(self.missing));
        }
        object.insert("host".into(), machine.clone());
        Value::Object(object)
    }

    /// The text for people.
    pub fn text(&self) -> String {
        let mut text = format!("{}\n", self.title);
        let mut line = String::new();
        // Lists are for programs, and not printed.
        let is_told = |key: &str, value: &Value| !matches!(key, "bench" | "guest") && !value.is_array();
        for (key, value) in self.facts.iter().filter(|(key, value)| is_told(key, value)) {
            // Writing to a String cannot fail.
            let _ = write!(line, "  {key} {}", value.as_str().map_or_else(|| value.to_string(), str::to_owned));
        }
        let _ = writeln!(text, "{line}");
        let mut table = Table::new();
        table.load_style(presets::NOTHING).set_header(["  FIGURE", "MEDIAN", "LOWEST", "HIGHEST", "A/A %"]);
        for (key, figure) in &self.figures {
            let key = format!("  {key}");
            match figure {
                None => table.add_row([key, NOT_MEASURED.into()]),
                Some(Figure { spread, aa_pct, ci95 }) => {
                    let range = ci95.map(|(low, high)| format!("95 %: {} to {}", plain(low), plain(high)));
                    let aa = aa_pct.map(plain).or(range).unwrap_or("-".into());
                    table.add_row([key, plain(spread.median), plain(spread.min), plain(spread.max), aa])
                }
            };
        }
        table.column_iter_mut().skip(1).for_each(|column| column.set_cell_alignment(CellAlignment::Right));
        table.lines().for_each(|line| {
            let _ = writeln!(text, "{}", line.trim_end());
        });
        self.missing.iter().for_each(|why| {
            let _ = writeln!(text, "  {NOT_MEASURED}: {why}");
        });
        text
    }
}

/// The value with four significant digits: a measurement has no more.
pub(crate) fn rounded(value: f64) -> Value {
    if value == 0.0 || !value.is_finite() {
        return json!(value);
    }
    let scale = 10f64.powi(3 - value.abs().log10().floor() as i32);
    json!((value * scale).round() / scale)
}

fn plain(value: f64) -> String {
    if value.abs() >= 1000.0 { format!("{value:.0}") } else { rounded(value).to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_has_its_spread_and_noise_and_a_missing_one_is_null_with_the_reason() {
        let mut row = Row::new("restore", "native", "some data");
        row.figure("a_us", &[2.0, 2.2, 4.0, 4.4]);
        row.figure("b_us", &[]);
        row.because("no zram");
        row.because("no zram");
        let json = row.json(&json!({"cpus": 2}));
        assert_eq!((&json["a_us"], &json["a_us_min"], &json["a_us_max"]), (&json!(3.1), &json!(2.0), &json!(4.4)));
        assert_eq!(json["a_us_aa_pct"], json!(10.0));
        assert_eq!((&json["b_us"], &json["not_measured"]), (&Value::Null, &json!(["no zram"])));
        assert_eq!((&json["bench"], &json["host"]["cpus"]), (&json!("restore"), &json!(2)));
        let text = row.text();
        assert!(text.contains("not measured: no zram") && text.contains("a_us"), "{text}");
        row.difference("c_pct", &[-1.0, 0.0, 1.0]);
        let json = row.json(&Value::Null);
        assert_eq!((&json["c_pct"], &json["c_pct_aa_pct"]), (&json!(0.0), &Value::Null));
        assert!(json["c_pct_ci95_low"].as_f64() < json["c_pct_ci95_high"].as_f64(), "{json}");
    }
}
