//! `ballast vm heat`: ages and working set of one VM.
//!
//! Before: the engine tracks the VM. After: a table and a strip, or JSON. Units: as in the API.

use std::fmt::Write as _;

use anyhow::Result;
use ballast_api::{Client, DEFAULT_CELLS, HeatCell, VmHeat};
use ballast_base::Invalid;
use clap::Args;

use crate::names::explain;
use crate::show;

#[derive(Debug, Args)]
pub struct HeatArgs {
    /// The VM's name
    pub name: String,
    /// First set whether to track this VM, until its engine is replaced: on or off
    #[arg(long, value_name = "on|off", value_parser = track)]
    pub track: Option<bool>,
}

fn track(text: &str) -> Result<bool, Invalid> {
    match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err("write on or off".into()),
    }
}

pub fn run(client: &Client, args: &HeatArgs, json: bool) -> Result<()> {
    let heat = match args.track {
        Some(track) => client.set_track(&args.name, track),
        None => client.heat(&args.name, DEFAULT_CELLS),
    };
    let heat = heat.map_err(|error| explain(client, &args.name, error))?;
    show::answer(json, &heat, screen)
}

fn screen(heat: &VmHeat) -> String {
    let mut text = String::new();
    let cycles = show::grouped(heat.cycles);
    if heat.is_tracked {
        let _ = writeln!(
            text,
            "{}: tracked every {:.1} s; {cycles} cycles, {} fine cycles; takes {:.2} % of a CPU and {:.2} % of the \
             guest's time",
            heat.name,
            heat.period_ms as f64 / 1000.0,
            show::grouped(heat.fine_cycles),
            heat.cpu_percent,
            heat.guest_percent,
        );
    } else {
        let track = if heat.track { "on" } else { "off" };
        let _ = writeln!(text, "{}: {cycles} cycles; not tracked now (track {track})", heat.name);
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
