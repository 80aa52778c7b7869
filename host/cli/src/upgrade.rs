//! `ballast upgrade`: a new engine replaces the serving one, and the keeper becomes its program.
//!
//! Before: an operator has another `ballastd`. After: its engine serves all VMs, or the old one still does and the
//! command says why.
//! Promise: standard output has only the result; progress is on standard error. The command may be ended at any time:
//! the upgrade continues without it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use ballast_api::{Client, UpgradeRequest, UpgradeStage, UpgradeStat};
use ballast_base::text::lines_shown;

use crate::show;

const POLL_EVERY: Duration = Duration::from_millis(20);
/// Longest silence of the API, which responds when all VMs have moved.
const SILENCE: Duration = Duration::from_secs(60);

pub fn run(client: Client, program: Option<PathBuf>, json: bool) -> Result<()> {
    let client = client.retry_for(SILENCE);
    let program = program.map(|path| absolute(&path)).transpose()?;
    let begun = client.begin_upgrade(&UpgradeRequest { program })?;
    let mut now = begun.clone();
    let mut shown = None;
    while !matches!(now.stage, UpgradeStage::Done | UpgradeStage::Failed) {
        if !json && shown != Some((now.stage, now.checked, now.moved)) {
            shown = Some((now.stage, now.checked, now.moved));
            eprintln!("{}", lines_shown(&progress(&now)));
        }
        std::thread::sleep(POLL_EVERY);
        now = client.upgrade().context("Asking for the state of the upgrade")?;
        if now.number != begun.number {
            bail!("the keeper was replaced during the upgrade: `ballast host` says which engine serves");
        }
    }
    if json {
        show::json(&now)?;
    } else if now.stage == UpgradeStage::Done {
        show::print(&result(&now))?;
    }
    if now.stage == UpgradeStage::Failed {
        bail!("No engine of {}: {}. The old engine serves all VMs", now.program, now.message);
    }
    Ok(())
}

/// The daemon has a working directory of its own.
fn absolute(path: &Path) -> Result<String> {
    let path = std::path::absolute(path).with_context(|| format!("Finding {}", path.display()))?;
    path.into_os_string().into_string().map_err(|path| anyhow::anyhow!("{} is not UTF-8", path.display()))
}

fn progress(now: &UpgradeStat) -> String {
    match now.stage {
        UpgradeStage::Checking => format!("checked {} of {} VMs; nothing has changed yet", now.checked, now.vms),
        UpgradeStage::Returning => format!("failed ({}): VMs go back", now.message),
        _ => format!("moved {} of {} VMs", now.moved, now.vms),
    }
}

fn result(now: &UpgradeStat) -> String {
    let also = if now.message.is_empty() { String::new() } else { format!(" ({})", now.message) };
    let served = match now.longest_gap_us {
        0 => "served at every moment".into(),
        gap_us => format!("without an engine for {:.1} ms at most", gap_us as f64 / 1e3),
    };
    let (program, moved, took_ms) = (&now.program, now.moved, now.took_us as f64 / 1e3);
    let keeper = match now.keeper_replaced {
        Some(true) => "\nthe keeper was replaced, too".into(),
        Some(false) => format!("\nthe keeper was not replaced: {}", now.keeper_message),
        None => String::new(),
    };
    format!("an engine of {program} serves {moved} VMs, after {took_ms:.0} ms; each was {served}{also}{keeper}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_result_says_how_long_it_took_and_what_it_cost() {
        let now = UpgradeStat {
            program: "/p".into(),
            moved: 3,
            took_us: 81_500,
            longest_gap_us: 4_200,
            ..UpgradeStat::default()
        };
        let said = "an engine of /p serves 3 VMs, after 82 ms; each was without an engine for 4.2 ms at most\n";
        assert_eq!(result(&now), said);
        let said = "an engine of /p serves 3 VMs, after 82 ms; each was served at every moment\n";
        let now = UpgradeStat { longest_gap_us: 0, ..now };
        assert_eq!(result(&now), said);
        let replaced = result(&UpgradeStat { keeper_replaced: Some(true), ..now.clone() });
        assert!(replaced.ends_with("\nthe keeper was replaced, too\n"), "{replaced}");
        let (keeper_replaced, keeper_message) = (Some(false), "too old".into());
        let stays = result(&UpgradeStat { keeper_replaced, keeper_message, ..now });
        assert!(stays.ends_with("\nthe keeper was not replaced: too old\n"), "{stays}");
    }
}
