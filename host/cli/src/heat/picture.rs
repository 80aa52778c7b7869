//! Draws a heat map: limit, memory in DRAM and working set over time, and below them the cells, with axes, units and
//! legends.
//!
//! Before: `map` has the figures. After: the bytes of a PNG or SVG file.
//! Threads: one. Units: pixels; seconds to the right; bytes upwards, in the unit that the axis names.
//! Promise: both parts share the time axis.

use std::path::Path;

use anyhow::{Result, anyhow, bail};
use ballast_base::units::{GIB, MIB};
use ballast_heat::ages::Cell;
use plotters::coord::Shift;
use plotters::prelude::*;

use super::canvas::Canvas;
use super::map::{Column, Map};

/// Size of the whole picture.
const SIZE: (u32, u32) = (1100, 760);
/// Height of the title.
const TITLE: u32 = 30;
/// Height of the curves.
const UPPER: u32 = 220;
/// Width of the labels on the left.
const LEFT: u32 = 90;
/// Width of the legends on the right.
const RIGHT: u32 = 170;
/// Font of words.
const FONT: (&str, i32) = ("sans-serif", 16);
/// Height of a line of words.
const LINE: i32 = 20;
/// Colours for memory in DRAM.
const LEVELS: u32 = 16;

const LIMIT: RGBColor = RGBColor(200, 30, 30);
const RESIDENT: RGBColor = RGBColor(120, 120, 120);
const WORKING_SET: RGBColor = RGBColor(20, 90, 170);

/// A curve: seconds, and bytes in the unit of the axis.
type Points = Vec<(f64, f64)>;
type Area<B> = DrawingArea<B, Shift>;
type Drawn<B> = Result<(), DrawingAreaErrorKind<<B as DrawingBackend>::ErrorType>>;

/// The format of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Pixels.
    Png,
    /// Lines and words.
    Svg,
}

impl Format {
    /// The format that the end of the file's name says.
    pub fn of(file: &Path) -> Result<Self> {
        match file.extension().and_then(|end| end.to_str()) {
            Some("png") => Ok(Self::Png),
            Some("svg") => Ok(Self::Svg),
            _ => bail!("Drawing {}: its name must end in .png or .svg", file.display()),
        }
    }
}

impl Map {
    /// The bytes of the file.
    pub fn draw(&self, format: Format) -> Result<Vec<u8>> {
        match format {
            Format::Png => self.png(),
            Format::Svg => {
                let mut text = String::new();
                self.paint(SVGBackend::with_string(&mut text, SIZE))?;
                Ok(text.into_bytes())
            }
        }
    }

    fn png(&self) -> Result<Vec<u8>> {
        let (width, height) = SIZE;
        let mut pixels = vec![0; (width * height * 3) as usize];
        self.paint(Canvas::new(&mut pixels, SIZE))?;
        let mut out = Vec::new();
        let mut encoder = png::Encoder::new(&mut out, width, height);
        encoder.set_color(png::ColorType::Rgb);
        encoder.set_depth(png::BitDepth::Eight);
        encoder.add_text_chunk("Title".into(), self.title.clone())?;
        let mut writer = encoder.write_header()?;
        writer.write_image_data(&pixels)?;
        writer.finish()?;
        Ok(out)
    }

    fn paint<B: DrawingBackend<ErrorType: 'static>>(&self, backend: B) -> Result<()> {
        let area = backend.into_drawing_area();
        self.draw_on(&area).map_err(|error| anyhow!("Drawing the heat map: {error}"))
    }

    fn draw_on<B: DrawingBackend<ErrorType: 'static>>(&self, area: &Area<B>) -> Drawn<B> {
        area.fill(&WHITE)?;
        area.draw(&Text::new(self.title.clone(), (LEFT as i32, 8), FONT))?;
        let (_, rest) = area.split_vertically(TITLE);
        let (upper, lower) = rest.split_vertically(UPPER);
        let (upper, upper_legend) = upper.split_horizontally(SIZE.0 - RIGHT);
        let (lower, lower_legend) = lower.split_horizontally(SIZE.0 - RIGHT);
        self.draw_curves(&upper, &upper_legend)?;
        self.draw_cells(&lower)?;
        draw_scale(&lower_legend)?;
        area.present()
    }

    /// Begin of the first column, in seconds.
    fn begin(&self) -> f64 {
        self.columns.first().map_or(0.0, |column| column.from_s)
    }

    fn times(&self) -> std::ops::Range<f64> {
        let end = self.columns.last().map_or(0.0, |column| column.to_s);
        // An axis must have a length.
        0.0..(end - self.begin()).max(0.001)
    }

    fn draw_curves<B: DrawingBackend<ErrorType: 'static>>(&self, area: &Area<B>, legend: &Area<B>) -> Drawn<B> {
        let had = self.memory.iter().flat_map(|(_, memory)| [memory.resident, memory.limit.unwrap_or(0)]);
        let most = self.columns.iter().map(|column| column.wss_bytes).chain(had).max().unwrap_or(0).max(1);
        let (unit, name) = unit(most);
        let mut chart = ChartBuilder::on(area)
            .set_label_area_size(LabelAreaPosition::Left, LEFT)
            .margin_top(6)
            .margin_bottom(10)
            .build_cartesian_2d(self.times(), 0.0..most as f64 / unit * 1.05)?;
        chart
            .configure_mesh()
            .disable_x_axis()
            .y_desc(name)
            .y_labels(5)
            .x_labels(10)
            .light_line_style(TRANSPARENT)
            .y_label_formatter(&|value| number(*value))
            .label_style(FONT)
            .axis_desc_style(FONT)
            .draw()?;
        let point = |at: f64, bytes: u64| (at - self.begin(), bytes as f64 / unit);
        let limits = self.memory.iter().map(|(at, memory)| (*at, memory.limit)).collect::<Vec<_>>();
        let in_dram = self.memory.iter().map(|(at, memory)| point(*at, memory.resident)).collect();
        let steps = |column: &Column| [(column.from_s, column.wss_bytes), (column.to_s, column.wss_bytes)];
        let wss = self.columns.iter().flat_map(steps).map(|(at, bytes)| point(at, bytes)).collect();
        let limits = stretches(&limits, self.begin() + self.times().end);
        let limits = limits.into_iter().map(|ends| ends.map(|(at, bytes)| point(at, bytes)).to_vec()).collect();
        let curves: [(&str, RGBColor, Vec<Points>); 3] =
            [("limit", LIMIT, limits), ("in DRAM", RESIDENT, vec![in_dram]), ("working set", WORKING_SET, vec![wss])];
        for (y, (name, colour, curves)) in (14..).step_by(LINE as usize).zip(curves) {
            let name = if curves.iter().all(Vec::is_empty) { format!("{name}: none") } else { name.to_owned() };
            for points in curves {
                chart.draw_series(LineSeries::new(points, colour.stroke_width(2)))?;
            }
            legend.draw(&PathElement::new([(8, y + 8), (30, y + 8)], colour.stroke_width(2)))?;
            legend.draw(&Text::new(name, (38, y), FONT))?;
        }
        Ok(())
    }

    fn draw_cells<B: DrawingBackend<ErrorType: 'static>>(&self, area: &Area<B>) -> Drawn<B> {
        let (unit, name) = unit(self.ram_bytes);
        let ram = (self.ram_bytes as f64 / unit).max(0.001);
        let mut chart = ChartBuilder::on(area)
            .set_label_area_size(LabelAreaPosition::Left, LEFT)
            .set_label_area_size(LabelAreaPosition::Bottom, 46)
            .margin_bottom(4)
            .build_cartesian_2d(self.times(), 0.0..ram)?;
        chart
            .configure_mesh()
            .disable_mesh()
            .x_desc("seconds since the first cycle")
            .y_desc(format!("guest RAM from its start, {name}"))
            .x_labels(10)
            .y_labels(8)
            .x_label_formatter(&|value| number(*value))
            .y_label_formatter(&|value| number(*value))
            .label_style(FONT)
            .axis_desc_style(FONT)
            .draw()?;
        for column in &self.columns {
            let height = ram / column.cells.len().max(1) as f64;
            let mut row = 0;
            while let Some(cell) = column.cells.get(row) {
                let level = level(cell);
                let same = column.cells[row..].iter().take_while(|cell| self::level(cell) == level).count();
                let [from, to] = [column.from_s, column.to_s].map(|at| at - self.begin());
                let corners = [(from, row as f64 * height), (to, (row + same) as f64 * height)];
                chart.draw_series([Rectangle::new(corners, colour(level).filled())])?;
                row += same;
            }
        }
        Ok(())
    }
}

/// The stretches of time with one limit each, as their two ends.
fn stretches(limits: &[(f64, Option<u64>)], end: f64) -> Vec<[(f64, u64); 2]> {
    let until = limits.iter().skip(1).map(|(at, _)| *at).chain([end]);
    limits
        .iter()
        .zip(until)
        .filter_map(|((at, limit), until)| limit.map(|limit| [(*at, limit), (until, limit)]))
        .collect()
}

/// The legend of the colours.
fn draw_scale<B: DrawingBackend<ErrorType: 'static>>(area: &Area<B>) -> Drawn<B> {
    const TOP: i32 = 2 * LINE + 4;
    const STEP: i32 = 14;
    const BOTTOM: i32 = TOP + LEVELS as i32 * STEP;
    for (y, words) in [(0, "share touched"), (LINE, "in recent cycles")] {
        area.draw(&Text::new(words, (8, y), FONT))?;
    }
    let square = |y: i32, level| Rectangle::new([(8, y), (30, y + STEP)], colour(level).filled());
    for level in 0..LEVELS {
        area.draw(&square(BOTTOM - (level as i32 + 1) * STEP, Some(level)))?;
    }
    for (share, words) in [(1.0, "100 %"), (0.5, "50 %"), (0.1, "10 %"), (0.0, "nothing")] {
        let middle = BOTTOM - level_of(share) as i32 * STEP - STEP / 2;
        area.draw(&Text::new(words, (38, middle - LINE / 2 + 2), FONT))?;
    }
    area.draw(&square(BOTTOM + STEP, None))?;
    area.draw(&Text::new("not in DRAM", (38, BOTTOM + STEP - 1), FONT))
}

/// The unit in which a size is a readable number.
fn unit(bytes: u64) -> (f64, &'static str) {
    if bytes >= 4 * GIB { (GIB as f64, "GiB") } else { (MIB as f64, "MiB") }
}

fn number(value: f64) -> String {
    if value.fract() == 0.0 { format!("{value:.0}") } else { format!("{value:.1}") }
}

/// The colour's number; `None` if nothing is in memory.
fn level(cell: &Cell) -> Option<u32> {
    (cell.present > 0.0).then(|| level_of(cell.hot))
}

/// Low shares matter most, so they get more of the scale. A cell without touches has a level of its own.
fn level_of(share: f64) -> u32 {
    if share <= 0.0 { 0 } else { 1 + (share.clamp(0.0, 1.0).sqrt() * f64::from(LEVELS - 2)).round() as u32 }
}

/// Grey where nothing is in memory; otherwise from dark blue over red to light yellow.
fn colour(level: Option<u32>) -> RGBColor {
    const STEPS: [[f64; 3]; 4] =
        [[12.0, 16.0, 64.0], [120.0, 28.0, 109.0], [237.0, 105.0, 37.0], [252.0, 255.0, 164.0]];
    let Some(level) = level else { return RGBColor(200, 200, 200) };
    let at = f64::from(level) / f64::from(LEVELS - 1) * (STEPS.len() - 1) as f64;
    let step = (at as usize).min(STEPS.len() - 2);
    let mix = |i: usize| (STEPS[step][i] + (STEPS[step + 1][i] - STEPS[step][i]) * (at - step as f64)).round() as u8;
    RGBColor(mix(0), mix(1), mix(2))
}

#[cfg(test)]
mod tests {
    use super::super::map::tests::recording;
    use super::*;

    #[test]
    fn a_limit_is_drawn_only_while_it_holds() {
        let limits = [(1.0, None), (2.0, Some(7)), (4.0, None), (5.0, Some(8))];
        assert_eq!(stretches(&limits, 9.0), [[(2.0, 7), (4.0, 7)], [(5.0, 8), (9.0, 8)]]);
        assert_eq!(stretches(&[], 9.0), Vec::<[(f64, u64); 2]>::new());
    }

    #[test]
    fn no_touch_and_few_touches_have_different_colours_and_all_touched_is_the_lightest() {
        assert_eq!([0.0, 1.0].map(level_of), [0, LEVELS - 1]);
        assert!(level_of(0.001) > 0 && colour(Some(0)) != colour(Some(1)));
        assert_eq!(colour(Some(LEVELS - 1)), RGBColor(252, 255, 164));
    }

    #[test]
    fn a_png_shows_touched_untouched_and_absent_memory_from_low_addresses_to_high() {
        let map = Map::of(&recording(3)).expect("cycles");
        let bytes = map.draw(Format::Png).expect("draw");
        let mut reader = png::Decoder::new(std::io::Cursor::new(bytes)).read_info().expect("a PNG");
        let mut pixels = vec![0; reader.output_buffer_size().expect("size")];
        let info = reader.next_frame(&mut pixels).expect("pixels");
        assert_eq!((info.width, info.height), SIZE);
        // The colours upwards in the middle of the picture, each once. Those of the frame and the curves are above.
        let column = (0..info.height as usize).rev().map(|row| &pixels[row * info.line_size + 1500..][..3]);
        let mut colours: Vec<&[u8]> = column.skip_while(|colour| *colour != [252, 255, 164]).collect();
        colours.dedup();
        assert_eq!(colours[..3], [[252, 255, 164], [12, 16, 64], [200, 200, 200]]);
    }

    #[test]
    fn an_svg_says_in_words_what_is_drawn_and_in_which_units() {
        let text = String::from_utf8(Map::of(&recording(2)).expect("cycles").draw(Format::Svg).expect("draw"));
        let text = text.expect("UTF-8");
        for words in [
            "2 cycles of a&lt;b",
            "seconds since the first cycle",
            "guest RAM from its start, MiB",
            "working set",
            "limit",
            "in DRAM",
            "not in DRAM",
            "share touched",
            "100 %",
        ] {
            assert!(text.contains(words), "no {words:?} in {text}");
        }
    }

    #[test]
    fn the_format_is_in_the_name() {
        assert_eq!(Format::of(Path::new("a.png")).expect("png"), Format::Png);
        assert_eq!(Format::of(Path::new("a.svg")).expect("svg"), Format::Svg);
        assert!(Format::of(Path::new("a.gif")).expect_err("refused").to_string().contains(".png or .svg"));
    }
}
