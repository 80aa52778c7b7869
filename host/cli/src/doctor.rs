//! `ballast doctor`: tries the kernel's features that Ballast uses. It needs no daemon; if one runs, it also lists the
//! guests that keep their free memory. `--store` prints the daemon's findings about the remote store.

use std::fmt::Write;

use anyhow::{Context, Result};
use ballast_api::{Client, HostStat, RemoteFinding};
use ballast_sys::probe::{self, Feature, Presence};
use serde::Serialize;

use crate::adopt::SwapFindings;
use crate::exit::Exit;
use crate::show;

#[derive(Serialize)]
struct Findings<'a> {
    kernel: &'a str,
    ok: bool,
    features: Vec<Row<'a>>,
    swap: &'a SwapFindings,
}

#[derive(Serialize)]
struct Row<'a> {
    name: &'a str,
    present: &'a str,
    required: bool,
    since: &'a str,
    detail: &'a str,
    without: &'a str,
}

impl<'a> Row<'a> {
    fn of(feature: &'a Feature) -> Self {
        let (present, why) = match &feature.present {
            Presence::Yes => ("yes", ""),
            Presence::Warn => ("warn", ""),
            Presence::No => ("no", ""),
            Presence::Unknown(why) => ("unknown", why.as_str()),
        };
        let detail = if why.is_empty() { &feature.detail } else { why };
        let Feature { name, since, without, required, .. } = feature;
        Self { name, present, required: *required, since, detail, without }
    }
}

/// Probes and prints. The exit code tells whether a VM can be managed here.
pub fn run(client: Option<Client>, json: bool) -> Result<Exit> {
    let (kernel, features) = (probe::kernel_release(), probe::probe());
    let ok = !features.iter().any(Feature::is_missing);
    let vms = client.and_then(|client| client.vms().ok()).unwrap_or_default();
    let swap = SwapFindings::now(&vms);
    let report = Findings { kernel: &kernel, ok, features: features.iter().map(Row::of).collect(), swap: &swap };
    if json {
        show::json(&report)?
    } else {
        let kept = vms.iter().filter_map(show::keeps_free_memory);
        show::print(&kept.fold(describe(&report), |text, sentence| text + &sentence + "\n"))?
    }
    Ok(if ok { Exit::Ok } else { Exit::Failure })
}

/// Prints the engine's findings about the remote store. The exit code tells whether pages may be lost.
pub fn store(host: &HostStat, json: bool) -> Result<Exit> {
    let remote = host.remote.as_ref().context("No remote store is set: see [remote] in ballastd.toml")?;
    let ok = !remote.findings.iter().any(|finding| finding.serious);
    if json {
        show::json(&remote.findings)?;
    } else {
        let line =
            |finding: &RemoteFinding| format!("{} {}\n", if finding.serious { "WRONG" } else { "note " }, finding.text);
        let nodes = remote.nodes.len();
        let verdict =
            if ok { "nothing that would lose pages was found" } else { "pages may be lost, or are not stored" };
        let text: String = remote.findings.iter().map(line).collect();
        show::print(&format!("{text}{nodes} nodes: {verdict}\n"))?;
    }
    Ok(if ok { Exit::Ok } else { Exit::Failure })
}

fn describe(report: &Findings<'_>) -> String {
    let mut table = show::table(&["", "FEATURE", "SINCE", "FOUND", "WITHOUT IT"]);
    for row in &report.features {
        let mark = match (row.present, row.required) {
            ("yes", _) => "ok",
            ("warn", _) => "warn",
            ("no", true) => "MISSING",
            ("no", false) => "no",
            (_, true) => "UNKNOWN",
            (_, false) => "?",
        };
        let lost = if row.present == "yes" { "" } else { row.without };
        table.add_row([mark, row.name, row.since, row.detail, lost]);
    }
    let mut text = show::lines(&table);
    let count = |required: bool, present: bool| {
        report
            .features
            .iter()
            .filter(|row| row.required == required && matches!(row.present, "yes" | "warn") == present)
            .count()
    };
    let verdict = match count(true, false) {
        0 => format!("all {} required features are there", count(true, true)),
        missing => format!("{missing} required features are missing or could not be tried: VMs cannot be managed here"),
    };
    let _ = writeln!(
        text,
        "\nLinux {}: {verdict}; of the others, {} are there and {} are not.",
        report.kernel,
        count(false, true),
        count(false, false)
    );
    text + &report.swap.describe()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_required_feature_is_shown_with_what_is_lost() {
        let row = |name, present, required| Row {
            name,
            present,
            required,
            since: "Linux 1.0",
            detail: "found",
            without: "LOST",
        };
        let features = vec![
            row("good", "yes", true),
            row("bad", "no", true),
            row("odd", "unknown", false),
            row("set", "warn", false),
        ];
        let text = describe(&Findings { kernel: "6.1", ok: false, features, swap: &SwapFindings::now(&[]) });
        let line = |name: &str| text.lines().find(|line| line.contains(name)).expect("a line").to_owned();
        assert!(line("good").starts_with("ok") && !line("good").contains("LOST"), "{text}");
        assert!(line("bad").starts_with("MISSING") && line("bad").contains("LOST"), "{text}");
        assert!(line("odd").starts_with('?'), "{text}");
        assert!(line("set").starts_with("warn") && line("set").contains("LOST"), "{text}");
        assert!(text.contains("1 required features are missing or could not be tried"), "{text}");
    }
}
