//! Formats figures as words and columns, equally for every command.

use std::io::{self, IsTerminal, Write};

use ballast_api::{VmClass, VmStat};
use ballast_base::text::lines_shown;
use ballast_base::{Bytes, KIB};
use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use ratatui::crossterm::terminal;
use serde::Serialize;

pub fn size(bytes: u64) -> String {
    Bytes(bytes).to_string()
}

/// A note about the cost of a guest that has returned no free memory, if this one has not.
pub fn keeps_free_memory(vm: &VmStat) -> Option<String> {
    // Memory that it returns before any of its memory was watched is not counted.
    let is_asked = vm.class != VmClass::Pinned && vm.reclaim.zapped_pages > 0 && vm.reclaim.discarded_pages == 0;
    is_asked.then(|| {
        format!(
            "{}: its guest has given back no watched memory so far. Without a balloon that has free page reporting \
             (`ballast run --balloon`) its free memory is stored, not discarded.",
            vm.name
        )
    })
}

pub fn limit(bytes: Option<u64>) -> String {
    bytes.map_or_else(|| "none".into(), size)
}

pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() * 4 / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Whole KiB, grouped. Every size of a VM is a whole number of pages, so nothing is lost.
pub fn kib(bytes: u64) -> String {
    grouped(bytes / KIB)
}

pub fn percent(part: u64, whole: u64) -> String {
    let share = if whole == 0 { 0.0 } else { part as f64 * 100.0 / whole as f64 };
    format!("{share:.1} %")
}

/// Microseconds, with a decimal if the number is small.
pub fn micros(value: f64) -> String {
    if value < 100.0 { format!("{value:.1}") } else { format!("{value:.0}") }
}

/// Milliseconds since 1970 as `2026-01-31 12:00:00.000 UTC`.
pub fn time(unix_ms: u64) -> String {
    let (days, ms) = (unix_ms / 86_400_000, unix_ms % 86_400_000);
    let (year, month, day) = civil(days);
    let (hour, minute, second) = (ms / 3_600_000, ms / 60_000 % 60, ms / 1000 % 60);
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}.{:03} UTC", ms % 1000)
}

/// The date `days` days after 1970-01-01: years, then months, are taken off while they fit.
fn civil(mut days: u64) -> (u64, u64, u64) {
    let leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    const DAYS_IN_400_YEARS: u64 = 146_097;
    let mut year = 1970 + days / DAYS_IN_400_YEARS * 400;
    days %= DAYS_IN_400_YEARS;
    while days >= 365 + u64::from(leap(year)) {
        days -= 365 + u64::from(leap(year));
        year += 1;
    }
    let lengths = [31, 28 + u64::from(leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 1;
    for length in lengths {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    (year, month, days + 1)
}

/// A duration in seconds as `3d 4h`, `2h 5m`, `5m 7s` or `7s`.
pub fn age(seconds: u64) -> String {
    match seconds {
        86_400.. => format!("{}d {}h", seconds / 86_400, seconds / 3600 % 24),
        3600.. => format!("{}h {}m", seconds / 3600, seconds / 60 % 60),
        60.. => format!("{}m {}s", seconds / 60, seconds % 60),
        _ => format!("{seconds}s"),
    }
}

/// A table without lines. Columns named with a leading `>` are aligned right.
pub fn table(head: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    if io::stdout().is_terminal()
        && let Ok((width @ 1.., _)) = terminal::size()
    {
        table.set_content_arrangement(ContentArrangement::Dynamic).set_width(width);
    }
    table.set_header(head.iter().map(|name| name.trim_start_matches('>')));
    for (at, name) in head.iter().enumerate() {
        if let Some(column) = table.column_mut(at) {
            column.set_padding((0, 2));
            if name.starts_with('>') {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
    }
    table
}

pub fn lines(table: &Table) -> String {
    table.lines().map(|line| format!("{}\n", line.trim_end())).collect()
}

/// Prints text for people, with control characters escaped, because others chose parts of it. A reader that has ended
/// (`| head`) is no error.
pub fn print(text: &str) -> io::Result<()> {
    print_as_it_is(&lines_shown(text)).map(drop)
}

/// Prints a line for people on standard error, after the command's name.
pub fn say(text: &str) {
    eprintln!("ballast: {}", lines_shown(text));
}

/// Prints text for programs. Returns whether the output is still read.
pub fn print_as_it_is(text: &str) -> io::Result<bool> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(error),
    }
}

/// Prints a value: as JSON for programs, or as text for people.
pub fn answer<T: Serialize>(json: bool, value: &T, text: impl FnOnce(&T) -> String) -> anyhow::Result<()> {
    if json { self::json(value) } else { Ok(print(&text(value))?) }
}

pub fn json(value: &impl Serialize) -> anyhow::Result<()> {
    print_as_it_is(&(serde_json::to_string_pretty(value)? + "\n"))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_grouped_in_thousands() {
        assert_eq!([0, 999, 1000, 1_048_576].map(grouped), ["0", "999", "1,000", "1,048,576"]);
    }

    #[test]
    fn times_are_calendar_times() {
        assert_eq!(time(0), "1970-01-01 00:00:00.000 UTC");
        assert_eq!(time(951_782_400_000), "2000-02-29 00:00:00.000 UTC");
        assert_eq!(time(1_798_761_599_999), "2026-12-31 23:59:59.999 UTC");
        assert_eq!(time(13_569_465_600_000), "2400-01-01 00:00:00.000 UTC");
    }

    #[test]
    fn ages_use_two_units() {
        assert_eq!([7, 307, 7500, 273_600].map(age), ["7s", "5m 7s", "2h 5m", "3d 4h"]);
    }
}
