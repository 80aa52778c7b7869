//! The pages that are taken from a real guest: by its agent's reports, or by the host's own tracking.
//!
//! Before: the guest's image is there (`agent`). After: for one program and one side, the share of evicted pages that
//! were restored within 10 s, and how much memory can be taken while few pages are restored.
//! Threads: the bench's one. Units: in every key. Promise: the guest compares all its bytes at the end.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use ballast_api::VmStat;
use ballast_base::{MIB, PAGE_SIZE};

use crate::booted::{Booted, COUNTED, SETTLES, TAKEN, TIMEOUT, mib, percent, restored};
use crate::options::Part;
use crate::rig::Bench;
use crate::stats::mean;

pub(crate) const RECLAIMED: &str = "reclaimed_mib";
/// Data of a program of `tier-guest`.
const DATA: u64 = 128 * MIB;
/// Most restored pages a second while memory is taken: a twentieth of the pages that a program here passes through. If
/// a far page costs a program as much time as its own work on a page, that is 5 % of its time. Stall time is not a
/// measure: a pass takes a minute, as in a large guest, so even with every page far hardly any of the time is a stall.
const RESTORED: f64 = (DATA / PAGE_SIZE as u64) as f64 / 64.0 / 20.0;
/// Time without a limit before the limit falls: more than a pass.
const RETURN: Duration = Duration::from_secs(70);
/// Time between two changes of the limit. The second half of these steps counts.
const STEP: Duration = Duration::from_secs(5);
const STEPS: u32 = 28;

/// A program in the guest (`program-load`).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    pub(crate) part: Part,
    pub(crate) name: &'static str,
    /// Time in which agent and host learn what is hot: for a paced program, some of its passes.
    settles: Duration,
    /// The program reports how long its requests took.
    has_requests: bool,
}

/// memcached, in which a tenth of the keys has nine tenths of the accesses; k-means, with a minute for each pass; GCC's
/// compiler, which compiles one file again and again.
pub(crate) const LOADS: [Load; 3] = [
    Load { part: Part::Memcached, name: "memcached", settles: SETTLES, has_requests: true },
    Load { part: Part::Kmeans, name: "kmeans", settles: SETTLES.saturating_mul(3), has_requests: false },
    Load { part: Part::Compiler, name: "compiler", settles: SETTLES.saturating_mul(3), has_requests: false },
];

pub(crate) fn measure(bench: &mut Bench, load: Load, side: &str) -> Result<Vec<(String, f64)>> {
    let alone = if side == "agent" { "" } else { " alone" };
    let mut vm = Booted::new(bench, &format!("program-load {} {}{alone}", load.name, DATA / MIB))?;
    vm.expect("filled")?;
    bench.daemon.api().set_track(&vm.name, side == "host")?;
    std::thread::sleep(load.settles);
    let mut figures = wrong_choices(bench, &vm, side)?;
    figures.extend(most(bench, &mut vm, load, side)?);
    bench.daemon.api().set_limit(&vm.name, None)?;
    vm.end(bench)?;
    Ok(figures)
}

/// The limit takes memory at once. Measures how much of it is back soon.
fn wrong_choices(bench: &Bench, vm: &Booted, side: &str) -> Result<Vec<(String, f64)>> {
    let tracked = |bench: &Bench| bench.daemon.api().heat(&vm.name, 1);
    let (before, heat) = (vm.stat(bench)?, tracked(bench)?);
    let began = Instant::now();
    let limit = before.resident_bytes.saturating_sub(TAKEN);
    bench.daemon.api().set_limit(&vm.name, Some(limit))?;
    std::thread::sleep(COUNTED);
    let after = vm.stat(bench)?;
    let lasted_us = began.elapsed().as_micros() as f64;
    let agent = |stat: &VmStat| stat.agent.clone().context("the guest has the port of an agent");
    let (was, now) = (agent(&before)?, agent(&after)?);
    let judged = now.by_agent.judged_pages + now.by_host.judged_pages;
    let wrong = now.by_agent.wrong_pages + now.by_host.wrong_pages;
    let cycles = tracked(bench)?.cycles - heat.cycles;
    let grown = |of: fn(&VmStat) -> u64| of(&after) - of(&before);
    // Pages of zeros come back without a store.
    let evicted = grown(|stat| stat.reclaim.evicted_pages);
    let soon = grown(|stat| stat.reclaim.restored_soon_pages);
    let of = |key: &str| format!("{key}_{side}");
    let mut figures = vec![
        (of("wrong_reclaim_pct"), percent(soon, evicted)),
        (of("restored_of_evicted_pct"), percent(grown(restored), evicted)),
        (of("zeros_mib"), mib(grown(|stat| stat.reclaim.evicted_zero_pages) * PAGE_SIZE as u64)),
        (of("wrong_picks_pct"), percent(wrong, judged)),
        (of("judged_by_agent_pct"), percent(now.by_agent.judged_pages, judged)),
        (of("tracking_cycles"), cycles as f64),
        (of("engine_cpu_pct"), grown(|stat| stat.engine_time.tasks_us) as f64 * 100.0 / lasted_us),
    ];
    if side == "agent" {
        ensure!(now.reports > was.reports, "the agent does not report: {now:?}");
        figures.push(("agent_cpu_pct".into(), (now.cpu_us - was.cpu_us) as f64 * 100.0 / lasted_us));
    }
    Ok(figures)
}

/// The limit falls step by step while few pages are restored, and rises when more are restored.
fn most(bench: &Bench, vm: &mut Booted, load: Load, side: &str) -> Result<Vec<(String, f64)>> {
    bench.daemon.api().set_limit(&vm.name, None)?;
    std::thread::sleep(RETURN / 2);
    requests(vm, load)?;
    std::thread::sleep(RETURN / 2);
    let without = requests(vm, load)?;
    let first = vm.stat(bench)?;
    let mut limit = first.resident_bytes;
    // The state at the end of each step, and its time.
    let mut steps = vec![(first, Instant::now())];
    for step in 0..STEPS {
        if step == STEPS / 2 {
            requests(vm, load)?;
        }
        std::thread::sleep(STEP);
        let (now, at) = (vm.stat(bench)?, Instant::now());
        let (was, began) = &steps[steps.len() - 1];
        let rate = (restored(&now) - restored(was)) as f64 / (at - *began).as_secs_f64();
        limit = match rate {
            low if low < RESTORED / 2.0 => limit.min(now.resident_bytes) / 16 * 15,
            below if below < RESTORED => limit / 64 * 63,
            // Pages that come back below the limit were taken by an earlier step.
            _ if now.resident_bytes < limit => limit,
            _ => now.resident_bytes / 16 * 17,
        };
        bench.daemon.api().set_limit(&vm.name, Some(limit.max(MIB)))?;
        steps.push((now, at));
    }
    let under = requests(vm, load)?;
    let counted = &steps[STEPS as usize / 2..];
    let taken = |(stat, _): &(VmStat, Instant)| mib(stat.size_bytes.saturating_sub(stat.resident_bytes));
    let taken: Vec<f64> = counted[1..].iter().map(taken).collect();
    let ((was, began), (now, ended)) = (&counted[0], &counted[counted.len() - 1]);
    let lasted = *ended - *began;
    let of_time = |us: f64| us * 100.0 / lasted.as_micros() as f64;
    let each_s = |of: fn(&VmStat) -> u64| (of(now) - of(was)) as f64 / lasted.as_secs_f64();
    let of = |key: &str| format!("{key}_{side}");
    let engine_us = |stat: &VmStat| stat.engine_time.faults_us + stat.engine_time.tasks_us;
    let agent_us = |stat: &VmStat| stat.agent.as_ref().map_or(0, |agent| agent.cpu_us);
    let mut figures = vec![
        (of(RECLAIMED), mean(&taken)),
        (of("reclaimed_of_ram_pct"), mean(&taken) * 100.0 / mib(now.size_bytes)),
        (of("stall_pct"), of_time((now.stall.some.total_us - was.stall.some.total_us) as f64)),
        (of("restored_pages_per_s"), each_s(restored)),
        (of("taken_engine_cpu_pct"), of_time((engine_us(now) - engine_us(was)) as f64)),
        (of("taken_agent_cpu_pct"), of_time((agent_us(now) - agent_us(was)) as f64)),
    ];
    if let (Some(without), Some(under)) = (without, under) {
        for (percentile, (before, after)) in ["p50", "p95", "p99"].iter().zip(without.into_iter().zip(under)) {
            figures.push((of(&format!("request_us_{percentile}_alone")), before));
            figures.push((of(&format!("request_us_{percentile}")), after));
            figures.push((of(&format!("request_{percentile}_slowdown")), after / before));
        }
    }
    Ok(figures)
}

/// Times of the requests that a program in the guest has served since the last query: three percentiles in us.
fn requests(vm: &mut Booted, load: Load) -> Result<Option<[f64; 3]>> {
    if !load.has_requests {
        return Ok(None);
    }
    vm.guest.tell("requests")?;
    let said = vm.guest.answer(TIMEOUT)?;
    let words: Vec<f64> = said.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    let [_, p50, p95, p99] = words[..] else { bail!("the guest says {said:?} of its requests") };
    Ok(Some([p50, p95, p99]))
}
