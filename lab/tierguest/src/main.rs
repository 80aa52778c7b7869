//! `tier-guest`: measures and tests tiering inside a guest with two tiers of memory.
//!
//! ```text
//! tier-guest gups KIND MIB                     the program with known heat
//! tier-guest compare KIND MIB SECONDS WAY...   each way on a fresh program; a line of JSON for each
//!                                              KIND: contiguous, scattered, moving, xs
//! tier-guest settle KIND MIB                   waits until the agent has moved what is hot to the fast tier
//! tier-guest sparse MIB                        a program that khugepaged makes huge pages of, one page in each hot
//! tier-guest kmeans|memcached|compiler MIB      a program that touches most of its memory rarely
//! tier-guest check MIB                         the promises of `ballast-tier`; exit code 1 if one fails
//! ```
//!
//! Before: root starts it in a guest with two tiers (`scripts/tier-suite.sh`). After: stdout has rows, each behind
//! `tier-guest: `. Threads: one; the measured program is a process. Units: in each key.

mod check;
mod clusters;
mod compiler;
mod counted;
mod gups;
mod heat;
mod judge;
mod load;
mod sections;
mod sparse;
mod ways;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use ballast_tier::Tiers;
use ballast_tier::kernel_files::Files;
use serde_json::json;

use heat::Kind;
use judge::{Look, Program};
use ways::{Running, Way};

/// Phases of [`Kind::Moving`] in the measured time. The heat moves between them.
const PHASES: u64 = 4;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let result = match words.as_slice() {
        ["gups", kind, mib] => parse(kind, mib).and_then(|(kind, mib)| gups::run(kind, mib)),
        ["compare", kind, mib, seconds, ways @ ..] => compare(kind, mib, seconds, ways),
        ["settle", kind, mib] => parse(kind, mib).and_then(|(kind, mib)| check::settle(kind, mib)),
        [name @ ("kmeans" | "memcached" | "compiler"), mib] => {
            mib.parse().context("MiB").and_then(|mib| load::run(name, mib))
        }
        ["sparse", mib] => mib.parse().context("MiB").and_then(sparse::run),
        ["check", mib] => mib.parse().context("MiB").and_then(check::run),
        _ => Err(anyhow::anyhow!(
            "usage: tier-guest gups KIND MIB | compare KIND MIB SECONDS WAY... | settle KIND MIB | sparse MIB | \
             kmeans|memcached|compiler MIB | check MIB"
        )),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("tier-guest failed: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn parse(kind: &str, mib: &str) -> Result<(Kind, usize)> {
    Ok((Kind::parse(kind).with_context(|| format!("no kind {kind}"))?, mib.parse().context("MiB")?))
}

/// Returns a number of `/proc/vmstat`.
fn counter(files: &Files, name: &str) -> Result<u64> {
    let text = files.text("/proc/vmstat")?;
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
    value.with_context(|| format!("/proc/vmstat has no {name}"))
}

/// Measures each way on a fresh program.
fn compare(kind: &str, mib: &str, seconds: &str, ways: &[&str]) -> Result<()> {
    let (kind, mib) = parse(kind, mib)?;
    let seconds: u64 = seconds.parse().context("seconds")?;
    let files = Files::default();
    let tiers = Tiers::detect(&files)?;
    if tiers.list.len() < 2 {
        bail!("this guest has one tier");
    }
    for name in ways {
        let way = Way::parse(name).with_context(|| format!("no way {name}"))?;
        let mut program = Program::with(kind, mib, &[])?;
        let mut first = program.look(&files, &tiers)?;
        if kind.is_counted() {
            std::thread::sleep(Duration::from_secs(2));
            first = program.look(&files, &tiers)?;
        }
        let (moved, updates) = (counter(&files, "pgmigrate_success")?, program.count()?);
        let mut running = match Running::start(way, &files, &tiers) {
            Ok(running) => running,
            Err(error) => {
                let row = json!({"way": way.name(), "kind": kind.name(), "missing": format!("{error:#}")});
                println!("tier-guest: {row}");
                continue;
            }
        };
        let began = Instant::now();
        let (mut course, mut moves, mut looks) = (Vec::new(), Vec::new(), Vec::new());
        let mut next = Duration::from_secs(1);
        let mut phase = 0;
        while began.elapsed() < Duration::from_secs(seconds) {
            running.epoch()?;
            let now = began.elapsed();
            let wanted = (now.as_secs() * PHASES / seconds.max(1)).min(PHASES - 1);
            if kind == Kind::Moving && wanted != phase {
                phase = wanted;
                program.set_phase(phase)?;
            }
            if now >= next {
                next = now + Duration::from_secs(1);
                let look = program.look(&files, &tiers)?;
                course.push((look.hit * 1000.0).round() / 10.0);
                moves.push(counter(&files, "pgmigrate_success")? - moved);
                looks.push(look);
            }
        }
        let lasted = began.elapsed().as_secs_f64();
        let settled = &looks[looks.len() / 2..];
        let mean = |part: fn(&Look) -> f64| 100.0 * settled.iter().map(part).sum::<f64>() / settled.len().max(1) as f64;
        let mut row = json!({
            "way": way.name(), "kind": kind.name(), "memory_mib": mib, "seconds": lasted,
            "fmem_hit_pct": mean(|look| look.hit), "fmem_hit_pct_first": first.hit * 100.0,
            "fmem_hit_pct_last": course.last(), "fmem_hit_pct_oracle": mean(|look| look.oracle),
            "fmem_hit_pct_oracle_lasting": mean(|look| look.lasting),
            "course_pct": course, "course_moved": moves,
            "pages_moved": counter(&files, "pgmigrate_success")? - moved,
            "updates_per_s": (program.count()? - updates) as f64 / lasted,
        });
        if let Some(tierer) = &running.tierer {
            let status = tierer.status();
            row["ranges"] = json!(status.ranges);
            row["samples_per_s"] = json!(status.samples as f64 / lasted);
            row["cpu_pct"] = json!(status.cpu_us as f64 / lasted / 1e4);
            row["classifier_cpu_pct"] = json!(status.classifier_cpu_us as f64 / lasted / 1e4);
            row["estimated_hit_pct"] = json!(status.fast_hit_pct);
            row["moves"] = json!(status.moves);
        }
        println!("tier-guest: {row}");
    }
    Ok(())
}
