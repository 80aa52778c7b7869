//! Draws one VM under a limit, over time: its memory, and below that its faults.
//!
//! Before: the row of `bench limit` has a value for each sample. After: it is an SVG with axes and units.
//! Threads: none. Units: pixels; seconds to the right; the axes name their units.
//! Promise: both parts share the time axis.

use anyhow::{Context, Result, anyhow, ensure};
use ballast_base::MIB;
use plotters::coord::Shift;
use plotters::prelude::*;
use serde_json::Value;

const SIZE: (u32, u32) = (860, 460);
const TITLE: u32 = 34;
const PART: u32 = 200;
const LEFT: u32 = 80;
const RIGHT: u32 = 150;
const FONT: (&str, i32) = ("sans-serif", 14);
const TITLE_FONT: (&str, i32) = ("sans-serif", 16);

const LIMIT: RGBColor = RGBColor(200, 30, 30);
const OURS: RGBColor = RGBColor(20, 90, 170);
const OTHER: RGBColor = RGBColor(200, 130, 30);

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
/// Curves of a part: name, colour, and stretches of points.
pub(super) type Curves = Vec<(&'static str, RGBColor, Vec<Vec<(f64, f64)>>)>;

pub(super) fn draw(row: &Value) -> Result<(String, String)> {
    let times = series(row, "t_s")?;
    let ram = row["ram_bytes"].as_f64().context("the row has no ram_bytes")?;
    let all = |key: &str, unit: f64| -> Result<Vec<(f64, Option<f64>)>> {
        let values = series(row, key)?;
        ensure!(values.len() == times.len(), "{key} has {} values for {} times", values.len(), times.len());
        Ok(times.iter().zip(values).filter_map(|(at, value)| Some(((*at)?, value.map(|value| value / unit)))).collect())
    };
    let mib = MIB as f64;
    let memory: Curves = vec![
        ("limit", LIMIT, stretches(&all("limit_bytes", mib)?)),
        ("in DRAM", OURS, stretches(&all("resident_bytes", mib)?)),
        ("far", OTHER, stretches(&all("far_bytes", mib)?)),
    ];
    let faults: Curves = vec![
        ("refaults", OURS, stretches(&all("refaults_per_s", 1e3)?)),
        ("quarantine hits", OTHER, stretches(&all("quarantine_hits_per_s", 1e3)?)),
    ];
    let end = times.iter().flatten().copied().fold(0.001, f64::max);
    let limit = row["limited_to_bytes"].as_f64().context("the row has no limited_to_bytes")?;
    let title = format!("A VM of {:.0} MiB before, under and after a limit of {:.0} MiB", ram / mib, limit / mib);
    let text = picture(&title, ("seconds", end), &[("MiB", memory), ("1000 faults/s", faults)])?;
    Ok((title, text))
}

/// Draws two parts, one below the other, over one time axis with this name and end.
pub(super) fn picture(title: &str, time: (&str, f64), parts: &[(&str, Curves); 2]) -> Result<String> {
    let mut text = String::new();
    let area = SVGBackend::with_string(&mut text, SIZE).into_drawing_area();
    paint(&area, title, time, parts).map_err(|error| anyhow!("Drawing {title:?}: {error}"))?;
    drop(area);
    Ok(text)
}

/// The values of a key, sample by sample; `None` where the row has null.
pub(super) fn series(row: &Value, key: &str) -> Result<Vec<Option<f64>>> {
    let values = row[key].as_array().with_context(|| format!("the row has no list {key}"))?;
    Ok(values.iter().map(Value::as_f64).collect())
}

pub(super) fn stretches(points: &[(f64, Option<f64>)]) -> Vec<Vec<(f64, f64)>> {
    let parts = points.split(|(_, value)| value.is_none()).filter(|part| !part.is_empty());
    parts.map(|part| part.iter().filter_map(|(at, value)| Some((*at, (*value)?))).collect()).collect()
}

fn paint(
    area: &Area<'_>,
    title: &str,
    (unit, end): (&str, f64),
    parts: &[(&str, Curves); 2],
) -> Result<(), Box<dyn std::error::Error>> {
    area.fill(&WHITE)?;
    area.draw(&Text::new(title.to_owned(), (14, 10), TITLE_FONT))?;
    let (_, mut rest) = area.split_vertically(TITLE);
    for (number, (axis, curves)) in parts.iter().enumerate() {
        let is_last = number + 1 == parts.len();
        let (part, below) = if is_last { (rest.clone(), None) } else { split(&rest) };
        let (part, legend) = part.split_horizontally(SIZE.0 - RIGHT);
        let most = curves.iter().flat_map(|(_, _, lines)| lines.iter().flatten()).map(|(_, value)| *value);
        let most = most.fold(0.001, f64::max);
        let mut chart = ChartBuilder::on(&part)
            .margin_top(8)
            .margin_left(8)
            .margin_bottom(6)
            .set_label_area_size(LabelAreaPosition::Left, LEFT)
            .set_label_area_size(LabelAreaPosition::Bottom, if is_last { 42 } else { 0 })
            .build_cartesian_2d(0.0..end, 0.0..most * 1.08)?;
        let mut mesh = chart.configure_mesh();
        mesh.y_desc(*axis).y_labels(5).x_labels(10).light_line_style(TRANSPARENT).label_style(FONT);
        mesh.axis_desc_style(FONT).y_label_formatter(&label).x_label_formatter(&label);
        if is_last {
            mesh.x_desc(unit);
        }
        mesh.draw()?;
        for (y, (name, colour, lines)) in (12..).step_by(20).zip(curves) {
            for points in lines {
                chart.draw_series(LineSeries::new(points.iter().copied(), colour.stroke_width(2)))?;
            }
            legend.draw(&PathElement::new([(8, y + 7), (28, y + 7)], colour.stroke_width(2)))?;
            legend.draw(&Text::new(*name, (34, y), FONT))?;
        }
        if let Some(below) = below {
            rest = below;
        }
    }
    area.present()?;
    Ok(())
}

fn split<'a>(area: &Area<'a>) -> (Area<'a>, Option<Area<'a>>) {
    let (part, below) = area.split_vertically(PART);
    (part, Some(below))
}

fn label(value: &f64) -> String {
    if value.fract().abs() < 1e-9 { format!("{value:.0}") } else { format!("{value:.1}") }
}
