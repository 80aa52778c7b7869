//! Draws medians with their ranges, side by side in groups.
//!
//! Before: `plot` has the points. After: it has an SVG with axes, units, a legend and the value of each median.
//! Threads: none. Units: pixels; the axis names the unit of the values.
//! Promise: a linear axis begins at zero, or below it if values do; a logarithmic one says so.

use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::rows::Point;

const SIZE: (u32, u32) = (760, 360);
const LEFT: u32 = 70;
const BOTTOM: u32 = 34;
const TOP: u32 = 64;
const FONT: (&str, i32) = ("sans-serif", 14);
const TITLE: (&str, i32) = ("sans-serif", 16);

/// A side of the comparison: its name, and its colour in every chart.
#[derive(Clone, Copy)]
pub(super) struct Side(pub &'static str, pub RGBColor);

pub(super) const OURS: RGBColor = RGBColor(20, 90, 170);
pub(super) const OUR_OTHER: RGBColor = RGBColor(120, 170, 220);
pub(super) const KERNEL: RGBColor = RGBColor(200, 90, 30);
pub(super) const PLAIN: RGBColor = RGBColor(110, 110, 110);
pub(super) const FLOOR: RGBColor = RGBColor(170, 170, 170);

pub(super) struct Chart {
    pub title: String,
    /// The quantity of the axis, with its unit.
    pub axis: &'static str,
    pub logarithmic: bool,
    pub sides: Vec<Side>,
    /// Each group has a point for each side, or none where nothing was measured.
    pub groups: Vec<(String, Vec<Option<Point>>)>,
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

impl Chart {
    pub(super) fn is_empty(&self) -> bool {
        self.points().next().is_none()
    }

    fn points(&self) -> impl Iterator<Item = &Point> {
        self.groups.iter().flat_map(|(_, points)| points.iter().flatten())
    }

    /// All medians in words, for readers who cannot see the picture.
    pub(super) fn in_words(&self) -> String {
        let groups = self.groups.iter().map(|(name, points)| {
            let medians = points.iter().zip(&self.sides).filter_map(|(point, Side(side, _))| {
                let Point { median, low, high } = point.as_ref()?;
                Some(format!("{side} {} [{} to {}]", number(*median), number(*low), number(*high)))
            });
            format!("{name}: {}", medians.collect::<Vec<_>>().join(", "))
        });
        format!("Medians and ranges, {}. {}.", self.axis, groups.collect::<Vec<_>>().join("; "))
    }

    pub(super) fn draw(&self) -> Result<String> {
        let mut text = String::new();
        let area = SVGBackend::with_string(&mut text, SIZE).into_drawing_area();
        self.draw_on(&area).map_err(|error| anyhow!("Drawing {:?}: {error}", self.title))?;
        drop(area);
        Ok(text)
    }

    fn height(&self, value: f64) -> f64 {
        if self.logarithmic { value.max(f64::MIN_POSITIVE).log10() } else { value }
    }

    fn axis_range(&self) -> std::ops::Range<f64> {
        let low = self.points().map(|point| self.height(point.low)).fold(f64::INFINITY, f64::min);
        let high = self.points().map(|point| self.height(point.high)).fold(f64::NEG_INFINITY, f64::max);
        if self.logarithmic { low.floor()..(high + 0.1).ceil() } else { (low * 1.1).min(0.0)..high.max(0.001) * 1.1 }
    }

    fn draw_on(&self, area: &Area<'_>) -> Result<(), Box<dyn std::error::Error>> {
        area.fill(&WHITE)?;
        area.draw(&Text::new(self.title.clone(), (14, 10), TITLE))?;
        let mut x = LEFT as i32;
        for Side(name, colour) in &self.sides {
            area.draw(&Circle::new((x, 46), 5, colour.filled()))?;
            area.draw(&Text::new(*name, (x + 10, 38), FONT))?;
            x += 34 + 8 * name.len() as i32;
        }
        let groups = self.groups.len() as f64;
        let range = self.axis_range();
        let decades = (range.end - range.start).round() as usize + 1;
        let floor = range.start;
        let mut chart = ChartBuilder::on(area)
            .margin_top(TOP)
            .margin_right(14)
            .margin_left(8)
            .set_label_area_size(LabelAreaPosition::Left, LEFT)
            .set_label_area_size(LabelAreaPosition::Bottom, BOTTOM)
            .build_cartesian_2d(0.0..groups, range)?;
        let label = |value: &f64| if self.logarithmic { number(10f64.powf(*value)) } else { number(*value) };
        chart
            .configure_mesh()
            .disable_x_mesh()
            .x_labels(0)
            .y_labels(if self.logarithmic { decades } else { 6 })
            .light_line_style(TRANSPARENT)
            .y_desc(self.axis)
            .y_label_formatter(&label)
            .label_style(FONT)
            .axis_desc_style(FONT)
            .draw()?;
        let style = |vertical| FONT.into_text_style(area).pos(Pos::new(HPos::Center, vertical));
        for (at, (name, points)) in self.groups.iter().enumerate() {
            let (x, y) = chart.backend_coord(&(at as f64 + 0.5, floor));
            area.draw(&Text::new(name.clone(), (x, y + 8), style(VPos::Top)))?;
            let step = 0.8 / points.len().max(1) as f64;
            for (side, (point, Side(_, colour))) in points.iter().zip(&self.sides).enumerate() {
                let Some(point) = point else { continue };
                let x = at as f64 + 0.1 + step * (side as f64 + 0.5);
                let [low, median, high] = [point.low, point.median, point.high].map(|value| self.height(value));
                chart.draw_series([PathElement::new([(x, low), (x, high)], colour.stroke_width(2))])?;
                chart.draw_series([Circle::new((x, median), 5, colour.filled())])?;
                let (x, y) = chart.backend_coord(&(x, high));
                area.draw(&Text::new(number(point.median), (x, y - 6), style(VPos::Bottom)))?;
            }
        }
        area.present()?;
        Ok(())
    }
}

/// Three digits, without zeros at the end.
fn number(value: f64) -> String {
    let text = match value.abs() {
        100.0.. => format!("{value:.0}"),
        10.0.. => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    };
    let short = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    if short == "-0" { "0".into() } else { short.into() }
}
