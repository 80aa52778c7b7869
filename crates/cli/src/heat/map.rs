//! A heat map over time: a column for each cycle over all memory, a row for each piece of the address space.
//!
//! Before: a recording is read. After: PNG or SVG bytes. Units: seconds to the right, addresses downwards.
//! Promise: a picture of at most some thousand pixels on a side, whatever the recording holds.

use std::fmt::Write;
use std::path::Path;

use anyhow::{Result, bail};
use ballast_heat::ages::Cell;
use ballast_heat::record::Recording;
use ballast_heat::{Phase, Settings, heat};

/// Pieces of the address space.
const ROWS: usize = 256;
/// Columns beyond this are thinned out.
const MOST_COLUMNS: usize = 1024;
/// Pixels of a row.
const ROW_HEIGHT: usize = 2;
/// About as wide as the picture becomes when there are few columns.
const WIDTH: usize = 1024;

/// How to write it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Pixels only.
    Png,
    /// With a scale and words.
    Svg,
}

impl Format {
    /// By the end of the file's name.
    pub fn of(file: &Path) -> Result<Self> {
        match file.extension().and_then(|end| end.to_str()) {
            Some("png") => Ok(Self::Png),
            Some("svg") => Ok(Self::Svg),
            _ => bail!("Drawing {}: its name must end in .png or .svg", file.display()),
        }
    }
}

/// The colours of one cycle.
struct Column {
    at_s: f64,
    cells: Vec<Cell>,
}

/// A map ready to be drawn.
pub struct Map {
    title: String,
    columns: Vec<Column>,
}

impl Map {
    /// From a recording; `None` if it has no cycle over all memory.
    pub fn of(recording: &Recording) -> Option<Self> {
        let coarse = recording.cycles().filter(|cycle| cycle.phase == Phase::Coarse).count();
        let every = coarse.div_ceil(MOST_COLUMNS).max(1);
        let (mut columns, mut seen) = (Vec::new(), 0);
        recording.replay(Settings::default(), |tracker, cycle| {
            if cycle.phase == Phase::Coarse {
                if seen % every == 0 {
                    let cells = heat(tracker, cycle.ended, ROWS).strip;
                    columns.push(Column { at_s: cycle.ended.as_secs_f64(), cells });
                }
                seen += 1;
            }
        });
        let title = format!("touched memory by address, {} cycles of {}", seen, recording.source);
        (!columns.is_empty()).then_some(Self { title, columns })
    }

    /// Pixels of a column.
    fn column_width(&self) -> usize {
        (WIDTH / self.columns.len()).clamp(1, 64)
    }

    /// As a file's bytes.
    pub fn draw(&self, format: Format) -> Result<Vec<u8>> {
        match format {
            Format::Png => self.png(),
            Format::Svg => Ok(self.svg().into_bytes()),
        }
    }

    fn png(&self) -> Result<Vec<u8>> {
        let scale = self.column_width();
        let (width, height) = (self.columns.len() * scale, ROWS * ROW_HEIGHT);
        let mut pixels = Vec::with_capacity(width * height * 3);
        for row in 0..height {
            for column in &self.columns {
                let colour = colour(&column.cells[row / ROW_HEIGHT]);
                pixels.extend(colour.iter().cycle().take(3 * scale));
            }
        }
        let mut out = Vec::new();
        let mut encoder = png::Encoder::new(&mut out, width as u32, height as u32);
        encoder.set_color(png::ColorType::Rgb);
        encoder.set_depth(png::BitDepth::Eight);
        encoder.add_text_chunk("Title".into(), self.title.clone())?;
        let mut writer = encoder.write_header()?;
        writer.write_image_data(&pixels)?;
        writer.finish()?;
        Ok(out)
    }

    fn svg(&self) -> String {
        const TOP: usize = 24;
        let scale = self.column_width();
        let (width, height) = (self.columns.len() * scale, ROWS * ROW_HEIGHT);
        let mut text = String::new();
        // Writing to a String has no way to fail.
        let _ = writeln!(
            text,
            r#"<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{}" font-family="sans-serif" font-size="12">"#,
            height + 2 * TOP
        );
        let _ = writeln!(text, r#"<text x="2" y="16">{}</text>"#, escaped(&self.title));
        for (index, column) in self.columns.iter().enumerate() {
            let mut row = 0;
            while row < ROWS {
                let here = colour(&column.cells[row]);
                let same = column.cells[row..].iter().take_while(|cell| colour(cell) == here).count();
                let [red, green, blue] = here;
                let _ = writeln!(
                    text,
                    r##"<rect x="{}" y="{}" width="{scale}" height="{}" fill="#{red:02x}{green:02x}{blue:02x}"/>"##,
                    index * scale,
                    TOP + row * ROW_HEIGHT,
                    same * ROW_HEIGHT
                );
                row += same;
            }
        }
        let ends = [self.columns.first(), self.columns.last()].map(|column| column.map_or(0.0, |column| column.at_s));
        let y = height + TOP + 16;
        let _ = writeln!(text, r#"<text x="2" y="{y}">{:.0} s</text>"#, ends[0]);
        let _ = writeln!(text, r#"<text x="{}" y="{y}" text-anchor="end">{:.0} s</text>"#, width - 2, ends[1]);
        text + "</svg>\n"
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}

/// Grey where nothing is in memory; else from dark blue by way of red to light yellow, by the share that was touched.
fn colour(cell: &Cell) -> [u8; 3] {
    const STEPS: [[f64; 3]; 4] =
        [[12.0, 16.0, 64.0], [120.0, 28.0, 109.0], [237.0, 105.0, 37.0], [252.0, 255.0, 164.0]];
    if cell.present <= 0.0 {
        return [200, 200, 200];
    }
    // A little of it touched is what one looks for, so low shares get more of the scale.
    let at = cell.hot.clamp(0.0, 1.0).sqrt() * (STEPS.len() - 1) as f64;
    let step = (at as usize).min(STEPS.len() - 2);
    let part = at - step as f64;
    std::array::from_fn(|i| (STEPS[step][i] + (STEPS[step + 1][i] - STEPS[step][i]) * part).round() as u8)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_heat::record::{Frame, Line, Recorded};
    use ballast_heat::source::{Cost, Seen, UnitId};
    use std::time::Duration;

    fn recording(cycles: u64) -> Recording {
        let line = |unit, touched| Line {
            unit: UnitId { region: 0, unit },
            present: 512,
            seen: Some(Seen::Coarse { touched }),
        };
        let cycle = |number| Recorded {
            number,
            phase: Phase::Coarse,
            begun: Duration::from_secs(number),
            ended: Duration::from_secs(number + 1),
            cost: Cost::default(),
            lines: vec![line(0, true), line(1, false)],
        };
        let frames = std::iter::once(Frame::Layout(vec![4 * 512])).chain((0..cycles).map(|n| Frame::Cycle(cycle(n))));
        Recording { source: "a<b".into(), frames: frames.collect() }
    }

    #[test]
    fn a_png_shows_touched_untouched_and_absent_memory_in_their_colours() {
        let map = Map::of(&recording(3)).expect("cycles");
        let bytes = map.draw(Format::Png).expect("draw");
        let mut reader = png::Decoder::new(std::io::Cursor::new(bytes)).read_info().expect("a PNG");
        let mut pixels = vec![0; reader.output_buffer_size().expect("size")];
        let info = reader.next_frame(&mut pixels).expect("pixels");
        assert_eq!((info.width, info.height), (3 * 64, 512));
        let at = |row: usize| &pixels[row * info.line_size..][..3];
        assert_eq!(at(0), [252, 255, 164]);
        assert_eq!(at(130), [12, 16, 64]);
        assert_eq!(at(400), [200, 200, 200]);
    }

    #[test]
    fn a_long_recording_makes_a_picture_of_bounded_size_and_an_svg_says_what_it_shows() {
        let map = Map::of(&recording(5000)).expect("cycles");
        assert!(map.columns.len() <= MOST_COLUMNS, "{}", map.columns.len());
        let text = Map::of(&recording(2)).expect("cycles").svg();
        assert!(text.contains("2 cycles of a&lt;b") && text.contains(">1 s<") && text.ends_with("</svg>\n"), "{text}");
        assert!(Map::of(&recording(0)).is_none());
    }

    #[test]
    fn the_format_is_in_the_name() {
        assert_eq!(Format::of(Path::new("a.png")).expect("png"), Format::Png);
        assert_eq!(Format::of(Path::new("a.svg")).expect("svg"), Format::Svg);
        assert!(Format::of(Path::new("a.gif")).expect_err("refused").to_string().contains(".png or .svg"));
    }
}
