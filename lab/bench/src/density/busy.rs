//! All VMs read all of their memory at once, each limited to half of it. `ballast bench density` runs it.
//!
//! Before: a daemon without VMs. After: a row has throughput, waits and fairness of both sides; another row has a
//! guest's wait when the engine is killed.
//! Threads: the bench's one. Units: in every key. Promise: the worst touch of a turn is the worst of all guests.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use ballast_api::Client;
use ballast_testhost::until;
use rustix::process::{Pid, Signal, kill_process};

use super::fleet::{Fleet, Side, Turn};
use crate::order::Data;
use crate::report::Row;
use crate::rig::Bench;
use crate::subject::in_turn;

/// Number and length of the measurements.
struct Plan {
    turns: u64,
    /// Time that is not counted before each turn, and the time by which each guest lengthens it.
    lead: Duration,
    lead_per_vm: Duration,
    time: Duration,
}

const FULL: Plan = Plan {
    turns: 4,
    lead: Duration::from_secs(2),
    lead_per_vm: Duration::from_millis(10),
    time: Duration::from_secs(6),
};
const HASTY: Plan = Plan {
    turns: 2,
    lead: Duration::from_millis(500),
    lead_per_vm: Duration::from_millis(20),
    time: Duration::from_millis(500),
};

fn report(row: &mut Row, prefix: &str, turns: &[Turn]) {
    let mut figure = |key: &str, of: fn(&Turn) -> f64| {
        row.figure_of(&format!("{prefix}density_{key}"), turns, of);
    };
    figure("touches_per_s", |turn| turn.touches_per_s);
    figure("p99_us", |turn| turn.p99_us);
    figure("worst_page_ms", |turn| turn.worst_ms);
    figure("fairness", |turn| turn.fairness);
}

fn squeezed(bench: &mut Bench, side: Side, vms: usize, ram_bytes: u64, row: &mut Row) -> Result<Fleet> {
    let mut fleet = Fleet::start(bench, side, vms, ram_bytes)?;
    fleet.fill(bench)?;
    fleet.limit(bench)?;
    if side == Side::Ballast {
        row.fact("vms_above_limit_at_start", fleet.squeezed(bench)?);
    }
    Ok(fleet)
}

fn begin_row(bench: &Bench, measures: &str, vms: usize, ram_bytes: u64, plan: &Plan) -> Row {
    let mut row = bench.row(&format!("{vms} {measures} VMs"));
    row.fact("measures", measures);
    row.fact("vms", vms);
    row.fact("ram_bytes", ram_bytes);
    row.fact("limited_to_bytes", ram_bytes / 2);
    row.fact("data", Data::HalfCompressible.name());
    row.fact("repetitions", plan.turns);
    row.fact("turn_ms", plan.time.as_millis() as u64);
    row
}

pub(super) fn row(bench: &mut Bench, vms: usize, ram_bytes: u64) -> Result<Row> {
    let plan = if bench.options.quick { HASTY } else { FULL };
    let lead = plan.lead + plan.lead_per_vm * u32::try_from(vms)?;
    let mut row = begin_row(bench, "busy", vms, ram_bytes, &plan);
    let mut sides = vec![(squeezed(bench, Side::Ballast, vms, ram_bytes, &mut row)?, Vec::new())];
    match bench.kernel.clone().map(drop) {
        Ok(()) => match squeezed(bench, Side::Kernel, vms, ram_bytes, &mut row) {
            Ok(fleet) => sides.push((fleet, Vec::new())),
            Err(error) => row.because(&format!("{error:#}")),
        },
        Err(why) => row.because(&why),
    }
    for round in bench.progress.over("turn", 0..plan.turns) {
        for (fleet, turns) in in_turn(sides.iter_mut(), round) {
            turns.push(fleet.read(lead, plan.time, || Ok(()))?.0);
        }
    }
    let mut sides = sides.into_iter();
    let (mut ballast, ours) = sides.next().context("there is a side")?;
    let theirs = sides.next().map(|(_, turns)| turns).unwrap_or_default();
    report(&mut row, "", &ours);
    report(&mut row, "kernel_", &theirs);
    let speed = |turns: &[Turn]| turns.iter().map(|turn| turn.touches_per_s).collect::<Vec<_>>();
    row.ratio("density_ratio_kernel", &speed(&ours), &speed(&theirs));
    if bench.options.quick {
        ballast.verify()?;
    }
    Ok(row)
}

/// Kills the engine while all guests read, once in each turn, and in as many turns keeper and engine. The longest touch
/// is at least as long as reported: it may have ended after its turn.
pub(super) fn recovery_row(bench: &mut Bench, vms: usize, ram_bytes: u64) -> Result<Row> {
    let plan = if bench.options.quick { HASTY } else { FULL };
    let lead = plan.lead + plan.lead_per_vm * u32::try_from(vms)?;
    let mut row = begin_row(bench, "recovering", vms, ram_bytes, &plan);
    let mut fleet = squeezed(bench, Side::Ballast, vms, ram_bytes, &mut row)?;
    for (prefix, whom) in [("density_recover", Whom::Engine), ("density_recover_both", Whom::Both)] {
        let mut turns = Vec::new();
        for _ in bench.progress.over("kill", 0..plan.turns) {
            turns.push(killed(bench, &mut fleet, whom, lead, plan.time)?);
        }
        row.figure_of(&format!("{prefix}_ms_max"), &turns, |(turn, _)| turn.worst_ms);
        row.figure_of(&format!("{prefix}_api_ms"), &turns, |(_, api_ms)| *api_ms);
    }
    if bench.options.quick {
        fleet.verify()?;
    }
    Ok(row)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Whom {
    Engine,
    /// Engine and keeper; another keeper is started at once.
    Both,
}

/// Kills the engine, or keeper and engine. Also returns the milliseconds until the next engine's API replies, or until
/// it has all VMs if the keeper was killed, too.
fn killed(bench: &mut Bench, fleet: &mut Fleet, whom: Whom, lead: Duration, time: Duration) -> Result<(Turn, f64)> {
    let (before, vms) = (bench.engine_pid()?, fleet.len());
    let kill = || {
        let killed = Instant::now();
        if whom == Whom::Both {
            bench.daemon.kill_keeper()?;
        }
        let pid = Pid::from_raw(before.cast_signed()).context("the engine has no process id")?;
        kill_process(pid, Signal::KILL).context("Killing the engine")?;
        if whom == Whom::Both {
            bench.daemon.start_keeper()?;
            bench.guard.end_process(bench.daemon.keeper_pid())?;
        }
        // A new client: it repeats requests that were cut off for some seconds only.
        let api = Client::new(bench.daemon.dir().join("api.sock"))?.retry_for(Duration::from_secs(60));
        let serves = || api.host().is_ok_and(|host| host.engine_pid != before);
        until("no new engine serves the API", Duration::from_secs(120), || {
            let has_all = || whom == Whom::Engine || api.vms().is_ok_and(|list| list.len() == vms);
            Ok((serves() && has_all()).then_some(()))
        })?;
        Ok(killed.elapsed().as_secs_f64() * 1e3)
    };
    fleet.read(lead, time, kill)
}
