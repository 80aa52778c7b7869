//! `ballast vm heat`: ages and working set of one VM, recordings of its access cycles, and a map of them over time.
//!
//! Before: the engine tracks the VM, or a recording was made. After: a table and a strip, JSON, a file, a picture.
//! Units: as in the API. Promise: a recording grows with whole frames only, so that one cut short is still readable; a
//! damaged one is refused, and nothing is drawn from it.

mod canvas;
mod map;
mod picture;

use std::fmt::Write as _;
use std::fs::File;
use std::io::{Read, Write as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use ballast_api::{Client, DEFAULT_CELLS, HeatCell, Track, VmHeat};
use ballast_base::Bytes;
use ballast_heat::record::{Frame, Memory, Recording, header};
use ballast_heat::{Heat, Settings};
use clap::Args;

use crate::names::explain;
use crate::show;
use map::Map;
use picture::Format;

/// Show the heat of a VM or of a recording
#[derive(Debug, Args)]
pub struct HeatArgs {
    /// The VM's name
    #[arg(required_unless_present = "replay")]
    pub name: Option<String>,
    /// Watch for --seconds and append each access cycle to this file
    #[arg(long, value_name = "FILE", conflicts_with = "replay")]
    pub record: Option<PathBuf>,
    /// Show a recording instead of a VM
    #[arg(long, value_name = "FILE", conflicts_with = "name")]
    pub replay: Option<PathBuf>,
    /// Draw a heat map over time to this .png or .svg file, from the recording or by watching for --seconds
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// First set when to track this VM, until its engine is replaced: auto (while it has a limit), on or off
    #[arg(long, value_name = "auto|on|off", conflicts_with = "replay", value_parser = track)]
    pub track: Option<Track>,
    /// How long to watch
    #[arg(long, default_value = "60", value_name = "SECONDS")]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub seconds: u64,
}

fn track(text: &str) -> Result<Track, String> {
    let known = [Track::Auto, Track::On, Track::Off];
    known.into_iter().find(|track| track.to_string() == text).ok_or_else(|| "write auto, on or off".into())
}

/// Longest recording in bytes: it is read into memory.
const MOST_BYTES: u64 = 1 << 30;
/// Time between two requests for cycles.
const PERIOD: Duration = Duration::from_secs(1);

/// Run the command.
pub fn run(client: &Client, args: &HeatArgs, json: bool) -> Result<()> {
    let format = args.out.as_deref().map(Format::of).transpose()?;
    let (heat, recording) = match (&args.replay, &args.name) {
        (Some(file), _) => {
            let recording = read(file)?;
            (replayed(file, &recording), Some(recording))
        }
        (None, Some(name)) => {
            if let Some(track) = args.track {
                client.set_track(name, track).map_err(|error| explain(client, name, error))?;
            }
            let recording = match args.record.is_some() || args.out.is_some() {
                true => Some(watch(client, name, args.record.as_deref(), Duration::from_secs(args.seconds))?),
                false => None,
            };
            let heat = client.heat(name, DEFAULT_CELLS).map_err(|error| explain(client, name, error))?;
            (heat, recording)
        }
        (None, None) => bail!("a VM's name or --replay is needed"),
    };
    if let (Some(out), Some(format), Some(recording)) = (&args.out, format, &recording) {
        let Some(map) = Map::of(recording) else {
            bail!("Drawing {}: no cycle over all memory was seen, so there is nothing to draw", out.display());
        };
        let bytes = map.draw(format)?;
        std::fs::write(out, bytes).with_context(|| format!("Writing the heat map to {}", out.display()))?;
    }
    if json { show::json(&heat) } else { Ok(show::print(&screen(&heat, args.replay.is_some()))?) }
}

fn read(file: &Path) -> Result<Recording> {
    let mut bytes = Vec::new();
    File::open(file)
        .and_then(|file| file.take(MOST_BYTES + 1).read_to_end(&mut bytes))
        .with_context(|| format!("Reading the recording {}", file.display()))?;
    if bytes.len() as u64 > MOST_BYTES {
        bail!("Reading the recording {}: it is longer than {}", file.display(), Bytes(MOST_BYTES));
    }
    Recording::decode(&bytes).with_context(|| format!("Reading the recording {}", file.display()))
}

/// The heat at the end of a recording.
fn replayed(file: &Path, recording: &Recording) -> VmHeat {
    let tracker = recording.replay(Settings::default(), |_, _| ());
    let end = recording.cycles().next_back().map_or(Duration::ZERO, |cycle| cycle.ended);
    let heat: Heat = ballast_heat::heat(&tracker, end, DEFAULT_CELLS);
    let name = file.file_name().unwrap_or(file.as_os_str()).to_string_lossy().into_owned();
    VmHeat::new(name, Track::Off, None, &heat)
}

/// Request cycles each second; write them to the file, if there is one, as they come.
fn watch(client: &Client, name: &str, file: Option<&Path>, time: Duration) -> Result<Recording> {
    let ask = |after| -> Result<Recording> {
        let bytes = client.heat_cycles(name, after).map_err(|error| explain(client, name, error))?;
        Recording::decode(&bytes).with_context(|| format!("Recording VM {name}"))
    };
    let mut whole = ask(0)?;
    let mut after = whole.cycles().next_back().map_or(0, |cycle| cycle.number);
    if client.heat(name, 1)?.source.is_none() {
        bail!("Recording VM {name}: it is not tracked, so there is nothing to record; `--track on` starts tracking");
    }
    whole.frames.clear();
    let writing = || format!("Writing the recording {}", file.unwrap_or(Path::new("")).display());
    let mut out = file.map(File::create).transpose().with_context(writing)?;
    if let Some(out) = &mut out {
        out.write_all(&header(&whole.source)).with_context(writing)?;
    }
    let begun = Instant::now();
    let mut layout = None;
    while begun.elapsed() < time {
        std::thread::sleep(PERIOD.min(time.saturating_sub(begun.elapsed())));
        let mut frames = ask(after)?.frames;
        if frames.iter().any(|frame| matches!(frame, Frame::Cycle(_))) {
            let vm = client.vm(name).map_err(|error| explain(client, name, error))?;
            let limit = [vm.limit_bytes, vm.target_bytes].into_iter().flatten().min();
            frames.push(Frame::Memory(Memory { limit, resident: vm.resident_bytes }));
        }
        for frame in frames {
            match &frame {
                // Each response has it; only changes go into the recording.
                Frame::Layout(pages) if layout.as_ref() == Some(pages) => continue,
                Frame::Layout(pages) => layout = Some(pages.clone()),
                Frame::Cycle(cycle) => after = cycle.number,
                Frame::Memory(_) => {}
            }
            if let Some(out) = &mut out {
                out.write_all(&frame.encode()).with_context(writing)?;
            }
            whole.frames.push(frame);
        }
    }
    Ok(whole)
}

/// The report, on one screen.
fn screen(heat: &VmHeat, is_recording: bool) -> String {
    let mut text = String::new();
    // Writing to a String cannot fail.
    if let Some(source) = &heat.source {
        let _ = writeln!(
            text,
            "{}: tracked by {} every {:.1} s; {} cycles, {} fine cycles; takes {:.2} % of a CPU and {:.2} % of the \
             guest's time",
            heat.name,
            source.name,
            heat.period_ms as f64 / 1000.0,
            show::grouped(heat.cycles),
            show::grouped(heat.fine_cycles),
            heat.cpu_percent,
            heat.guest_percent,
        );
    } else {
        let now = match is_recording {
            true => "a recording".to_owned(),
            false => format!("not tracked now (track {})", heat.track),
        };
        let _ = writeln!(text, "{}: {} cycles; {now}", heat.name, show::grouped(heat.cycles));
    }
    if heat.cycles == 0 {
        text += "No cycle has ended yet, so nothing is known of its memory.\n";
        return text;
    }
    let _ = writeln!(
        text,
        "working set {} of {} in DRAM: touched within {:.1} s ({} by huge pages; fine scans of {:.0} % of those)",
        show::size(heat.wss_bytes),
        show::size(heat.present_bytes),
        heat.wss_span_s,
        show::size(heat.wss_huge_bytes),
        heat.known_percent,
    );
    let _ = writeln!(text, "\n{}", ages(heat));
    let percentiles: Vec<String> =
        heat.percentiles.iter().map(|point| format!("{} % {}", point.percent, age(point.age_s))).collect();
    let _ = writeln!(text, "touched within: {}", percentiles.join(", "));
    let generations: Vec<String> = heat.generations_bytes.iter().map(|bytes| show::size(*bytes)).collect();
    let _ = writeln!(text, "generations, youngest first: {}", generations.join(", "));
    let _ = writeln!(
        text,
        "hot huge pages with hardly anything hot inside: {}; {} of them is cold",
        show::grouped(heat.bloated_units),
        show::size(heat.bloat_bytes)
    );
    let _ = writeln!(text, "\n|{}|", strip(&heat.strip));
    text += "low to high addresses; share touched within the working set's time:  \
             . none  - some  ░ ▒ ▓ █ most  ' ' not in DRAM\n";
    text
}

fn ages(heat: &VmHeat) -> String {
    const BAR: f64 = 30.0;
    let mut table = show::table(&["AGE", ">MEMORY", ">SHARE", ">SO FAR", ""]);
    let mut so_far = 0;
    for bucket in &heat.ages {
        so_far += bucket.bytes;
        let name = bucket.up_to_s.map_or("older".into(), |end| format!("<= {}", age(end as f64)));
        let share = if heat.present_bytes == 0 { 0.0 } else { bucket.bytes as f64 / heat.present_bytes as f64 };
        table.add_row([
            name,
            show::size(bucket.bytes),
            show::percent(bucket.bytes, heat.present_bytes),
            show::percent(so_far, heat.present_bytes),
            "#".repeat((share * BAR).ceil() as usize),
        ]);
    }
    show::lines(&table)
}

/// `0.5 s`, `30 s`, `5 min`, `2 h`.
fn age(seconds: f64) -> String {
    match seconds {
        ..10.0 if seconds.fract() != 0.0 => format!("{seconds:.1} s"),
        ..120.0 if seconds < 60.0 || seconds % 60.0 != 0.0 => format!("{seconds:.0} s"),
        ..3600.0 => format!("{:.0} min", seconds / 60.0),
        _ => format!("{:.0} h", seconds / 3600.0),
    }
}

/// One character for each cell.
fn strip(cells: &[HeatCell]) -> String {
    let shade = |cell: &HeatCell| match (cell.present, cell.hot) {
        (present, _) if present <= 0.0 => ' ',
        (_, hot) if hot <= 0.0 => '.',
        (_, ..0.1) => '-',
        (_, ..0.3) => '░',
        (_, ..0.55) => '▒',
        (_, ..0.8) => '▓',
        _ => '█',
    };
    cells.iter().map(shade).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_strip_has_a_character_for_each_cell_from_absent_to_hot() {
        let cell = |present, hot| HeatCell { present, hot, age_s: None };
        let cells = [(0.0, 0.0), (1.0, 0.0), (1.0, 0.05), (0.5, 0.2), (1.0, 0.5), (1.0, 0.7), (1.0, 1.0)];
        assert_eq!(strip(&cells.map(|(present, hot)| cell(present, hot))), " .-░▒▓█");
    }

    #[test]
    fn ages_are_shown_in_the_unit_that_fits() {
        let told = [0.0, 0.4, 2.0, 9.96, 59.0, 60.0, 90.0, 300.0, 3600.0].map(age);
        assert_eq!(told, ["0 s", "0.4 s", "2 s", "10.0 s", "59 s", "1 min", "90 s", "5 min", "1 h"]);
    }
}
