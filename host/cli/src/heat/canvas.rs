//! Pixels that plotters draws on, with a built-in font.
//!
//! Before: [`super::picture`] draws. After: an image of three bytes a pixel, row by row, which `png` encodes.
//! Threads: one. Units: pixels. Promise: it needs no fonts of the machine: letters come from a table in the program and
//! have one size. Parts outside the picture are cut off.

use std::convert::Infallible;

use noto_sans_mono_bitmap::{FontWeight, RasterHeight, get_raster, get_raster_width};
use plotters_backend::text_anchor::{HPos, VPos};
use plotters_backend::{BackendColor, BackendCoord, BackendTextStyle, DrawingBackend, DrawingErrorKind};

const WEIGHT: FontWeight = FontWeight::Regular;
const HEIGHT: RasterHeight = RasterHeight::Size16;

type Drawn = Result<(), DrawingErrorKind<Infallible>>;

/// The canvas.
pub struct Canvas<'a> {
    size: (u32, u32),
    pixels: &'a mut [u8],
}

impl<'a> Canvas<'a> {
    /// A picture of this size in these bytes; three for each pixel.
    pub fn new(pixels: &'a mut [u8], size: (u32, u32)) -> Self {
        Self { size, pixels }
    }
}

/// Width and height of a line of text.
fn text_size(text: &str) -> (u32, u32) {
    (text.chars().count() as u32 * get_raster_width(WEIGHT, HEIGHT) as u32, HEIGHT.val() as u32)
}

impl DrawingBackend for Canvas<'_> {
    type ErrorType = Infallible;

    fn get_size(&self) -> (u32, u32) {
        self.size
    }

    fn ensure_prepared(&mut self) -> Drawn {
        Ok(())
    }

    fn present(&mut self) -> Drawn {
        Ok(())
    }

    fn draw_pixel(&mut self, (x, y): BackendCoord, color: BackendColor) -> Drawn {
        let (Ok(x), Ok(y)) = (u32::try_from(x), u32::try_from(y)) else { return Ok(()) };
        if x >= self.size.0 || y >= self.size.1 {
            return Ok(());
        }
        let at = (y * self.size.0 + x) as usize * 3;
        let (red, green, blue) = color.rgb;
        for (old, new) in self.pixels[at..at + 3].iter_mut().zip([red, green, blue]) {
            *old = (f64::from(*old) + (f64::from(new) - f64::from(*old)) * color.alpha).round() as u8;
        }
        Ok(())
    }

    fn draw_text<S: BackendTextStyle>(&mut self, text: &str, style: &S, (x, y): BackendCoord) -> Drawn {
        let (width, height) = text_size(text);
        let anchor = style.anchor();
        let left = match anchor.h_pos {
            HPos::Left => 0,
            HPos::Center => -(width as i32) / 2,
            HPos::Right => -(width as i32),
        };
        let top = match anchor.v_pos {
            VPos::Top => 0,
            VPos::Center => -(height as i32) / 2,
            VPos::Bottom => -(height as i32),
        };
        let (transform, color) = (style.transform(), style.color());
        let mut column = left;
        for letter in text.chars() {
            // The table has the letters of ASCII.
            let Some(raster) = get_raster(letter, WEIGHT, HEIGHT).or_else(|| get_raster('?', WEIGHT, HEIGHT)) else {
                continue;
            };
            for (row, line) in (top..).zip(raster.rows()) {
                for (column, value) in (column..).zip(line) {
                    let (dx, dy) = transform.transform(column, row);
                    let alpha = color.alpha * f64::from(*value) / 255.0;
                    self.draw_pixel((x + dx, y + dy), BackendColor { alpha, ..color })?;
                }
            }
            column += raster.width() as i32;
        }
        Ok(())
    }

    fn estimate_text_size<S: BackendTextStyle>(
        &self,
        text: &str,
        _: &S,
    ) -> Result<(u32, u32), DrawingErrorKind<Infallible>> {
        Ok(text_size(text))
    }
}
