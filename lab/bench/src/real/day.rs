//! A day of a host in ten minutes: twenty Redis servers that come, work, rest, wake and go, with Ballast and without.
//!
//! Before: as for `bench real`. After: one row with the host's memory second by second for each side, and the latency
//! of the requests. Units: bytes; seconds since the day began; microseconds for 16 requests. Promise: the days of all
//! sides have one seed, so a server comes, works and goes at one time in each; memory in use is what the host has less
//! than before the day, with stores, swap and daemons in it; every byte of a reply is checked.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use ballast_api::PolicyPatch;
use ballast_policy::Kind;
use ballast_realmem::keys::Sequence;
use ballast_realmem::load::Load;
use ballast_realmem::protocol::Protocol;
use ballast_realmem::server::Server;
use ballast_sys::meminfo;
use ballast_testkit::random::Random;
use serde_json::json;

use super::running::{has_swap, memory_of, needs, vm_of};
use super::turn::SEED;
use crate::options::{RealProgram as Program, RealSide as Side};
use crate::report::Row;
use crate::rig::Bench;
use crate::stats::{mean, percentile};

/// A second of the bench is two and a half minutes of the day.
const DAY_S: u64 = 576;
const DAY_QUICK_S: u64 = 12;
const SERVERS: usize = 20;
const SERVERS_QUICK: usize = 3;
/// Requests a second of a server that works.
const REQUESTS: u32 = 2000;
/// Keys of 1 KiB of a server, from the fewest to the most.
const KEYS: (u64, u64) = (100_000, 600_000);
const KEYS_QUICK: (u64, u64) = (20_000, 40_000);

/// What a server does, in seconds since the day began.
struct Life {
    keys: u32,
    from: u64,
    to: u64,
    /// It works in these.
    work: Vec<(u64, u64)>,
}

/// The lives of one day. A life is a third of the day to all of it; a server works a sixth to a half of its life.
fn lives(day: u64, servers: usize, keys: (u64, u64)) -> Vec<Life> {
    let mut random = Random(SEED);
    let mut from_to = |low: u64, high: u64| low + random.word() % (high - low + 1);
    (0..servers)
        .map(|_| {
            let keys = from_to(keys.0, keys.1) as u32;
            let length = from_to(day / 3, day);
            let from = from_to(0, day - length);
            let to = from + length;
            let (mut work, mut at) = (Vec::new(), from);
            while at < to {
                let end = (at + from_to(day / 48 + 1, day / 16 + 1)).min(to);
                work.push((at, end));
                at = end + from_to(day / 24 + 1, day / 6 + 1);
            }
            Life { keys, from, to, work }
        })
        .collect()
}

/// The figures of a side.
#[derive(Default)]
struct Day {
    used: Vec<i64>,
    p99_us: Vec<f64>,
    all_us: Vec<f64>,
    ended: u32,
    wrong: u64,
    asked: u64,
}

pub(super) fn run(bench: &mut Bench, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    needs(&[Program::Redis])?;
    let (day, servers, keys) = match bench.options.quick {
        true => (DAY_QUICK_S, SERVERS_QUICK, KEYS_QUICK),
        false => (DAY_S, SERVERS, KEYS),
    };
    let lives = lives(day, servers, keys);
    let mut row = bench.row("a day of a host");
    row.fact("servers", servers);
    row.fact("day_s", day);
    let sides = match bench.options.real.side {
        Some(side) => vec![side],
        None => vec![Side::Kernel, Side::Ballast, Side::Adopted],
    };
    for side in sides {
        // The kernel's side is the host without a limit, and needs no swap.
        if side == Side::Adopted && !has_swap(bench, side, &mut row) {
            continue;
        }
        let found = live(bench, &lives, day, side)?;
        // The kernel alone has no limit to hold, so it is the host without Ballast.
        let end = if side == Side::Kernel { "_without" } else { side.end_of_keys() };
        let used: Vec<f64> = found.used.iter().map(|bytes| *bytes as f64).collect();
        row.figure(&format!("day_used_bytes_mean{end}"), &[mean(&used)]);
        row.figure(&format!("day_used_bytes_most{end}"), &[used.iter().copied().fold(0.0, f64::max)]);
        let mut all = found.all_us;
        all.sort_unstable_by(f64::total_cmp);
        let at = |part| percentile(&all, part).unwrap_or_default();
        for (key, part) in [("p50", 0.5), ("p95", 0.95), ("p99", 0.99)] {
            row.figure(&format!("day_us_of_16_{key}{end}"), &[at(part)]);
        }
        row.figure(&format!("day_worst_ms_of_16{end}"), &[at(1.0) / 1e3]);
        row.figure(&format!("day_requests{end}"), &[found.asked as f64]);
        row.figure(&format!("day_ended_servers{end}"), &[f64::from(found.ended)]);
        row.figure(&format!("day_wrong_bytes{end}"), &[found.wrong as f64]);
        row.fact(&format!("used_bytes{end}"), json!(found.used));
        row.fact(&format!("p99_us_of_16{end}"), json!(found.p99_us.iter().map(|us| us.round()).collect::<Vec<_>>()));
    }
    each(row)
}

/// A server that is there.
struct Here {
    load: Load,
    server: Server,
    vm: Option<String>,
}

fn live(bench: &mut Bench, lives: &[Life], day: u64, side: Side) -> Result<Day> {
    let policy = |kind: Kind| PolicyPatch { policy: Some(kind), ..PolicyPatch::default() };
    if side != Side::Kernel {
        bench.daemon.api().patch_policy(&policy(Kind::Pressure))?;
    }
    let mut found = Day::default();
    let mut here: Vec<Option<Here>> = lives.iter().map(|_| None).collect();
    let (free, begun) = (available()?, Instant::now());
    for second in 0..day {
        let mut took = Vec::new();
        for (number, (life, place)) in lives.iter().zip(&mut here).enumerate() {
            if second == life.from {
                *place = Some(begin(bench, side, life, SEED + number as u64)?);
            }
            if second >= life.to
                && let Some(one) = place.take()
            {
                end(bench, one)?;
            }
            let Some(one) = place else { continue };
            if life.work.iter().any(|(from, to)| (*from..*to).contains(&second)) {
                match one.load.burst(REQUESTS, &mut took) {
                    Ok(wrong) => found.wrong += wrong,
                    Err(error) => {
                        found.ended += 1;
                        eprintln!("a server ended: {error:#}");
                        *place = None;
                        continue;
                    }
                }
                found.asked += u64::from(REQUESTS);
            }
        }
        found.used.push(free as i64 - available()? as i64);
        took.sort_unstable_by(f64::total_cmp);
        found.p99_us.push(percentile(&took, 0.99).unwrap_or_default());
        found.all_us.append(&mut took);
        // A second that had more to do than it has is longer.
        std::thread::sleep((begun + Duration::from_secs(second + 1)).saturating_duration_since(Instant::now()));
    }
    for mut one in here.into_iter().flatten() {
        found.wrong += one.load.check_all()?;
        end(bench, one)?;
    }
    if side != Side::Kernel {
        bench.daemon.api().patch_policy(&policy(Kind::None))?;
    }
    Ok(found)
}

fn begin(bench: &mut Bench, side: Side, life: &Life, seed: u64) -> Result<Here> {
    let name = bench.vm_name();
    let memory = memory_of(bench, side, &name)?;
    let server = Server::start(Protocol::Redis, &memory, |_| Ok(()))?;
    bench.guard.end_process(server.pid())?;
    let load = Load::begin(&server, Protocol::Redis, Sequence::Random, life.keys, seed)?;
    let vm = vm_of(bench, side, name, server.pid())?;
    Ok(Here { load, server, vm })
}

fn end(bench: &Bench, one: Here) -> Result<()> {
    drop((one.load, one.server));
    one.vm.map_or(Ok(()), |vm| bench.daemon.wait_until_gone(&vm))
}

/// Memory that the kernel calls available, in bytes.
fn available() -> Result<u64> {
    meminfo::bytes("MemAvailable").context("/proc/meminfo has no MemAvailable")
}
