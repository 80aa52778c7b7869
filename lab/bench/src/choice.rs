//! Which pages of a real guest are taken: by its agent's reports, or by the host's own tracking.
//!
//! Before: the guest's image is there (`agent`). After: for one program and one side, the share of evicted pages that
//! were restored within 10 s, and how much memory can be taken while few pages are restored.
//! Threads: the bench's one. Units: in every key. Promise: the guest compares all its bytes at the end.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use ballast_api::{NodeBalloon, VmPatch, VmStat};
use ballast_base::{KIB, MIB, PAGE_SIZE};
use ballast_testvm::qemu::load::{self, Dataset, Mix};

use crate::booted::{Booted, COUNTED, Figures, MEMORY, SETTLES, TAKEN, TIMEOUT, mib, percent, restored};
use crate::options::Part;
use crate::rig::Bench;
use crate::stats::mean;

/// The key of the memory that can be taken.
pub(crate) const RECLAIMED: &str = "reclaimed_mib";
/// Memory that the balloon is asked for.
const BALLOON: u64 = 32 * MIB;
/// Data of Redis, and of the programs of `tier-guest`.
const VALUE: u64 = 4 * KIB;
const DATA: u64 = 128 * MIB;
/// Most restored pages a second while memory is taken: a twentieth of the pages that a program here goes through. If a
/// far page costs a program as long as its work on a page, that is 5 % of its time. Stall is no measure: a pass takes a
/// minute, as in a large guest, so hardly any of the time is stall even if every page is far.
const RESTORED: f64 = (DATA / PAGE_SIZE as u64) as f64 / 64.0 / 20.0;
/// Time without a limit before that, more than a pass.
const RETURN: Duration = Duration::from_secs(70);
/// How often the limit changes. The second half of these times counts.
const STEP: Duration = Duration::from_secs(5);
const STEPS: u32 = 28;

/// What runs in the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Load {
    /// Files that are read every second, every 15 s and never (`agent-load`).
    Files,
    /// Redis, a tenth of whose keys has nine tenths of the accesses (`redis-load`).
    Redis,
    /// memcached, the same, with a client in the guest (`program-load`, as those that follow).
    Memcached,
    /// Breadth-first searches of a road network, a minute each.
    Bfs,
    /// k-means, a minute for each pass.
    Kmeans,
    /// GCC's compiler, one file again and again.
    Compiler,
}

impl Load {
    pub(crate) const ALL: [Self; 6] =
        [Self::Files, Self::Redis, Self::Memcached, Self::Bfs, Self::Kmeans, Self::Compiler];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Files => "files",
            Self::Redis => "redis",
            Self::Memcached => "memcached",
            Self::Bfs => "bfs",
            Self::Kmeans => "kmeans",
            Self::Compiler => "compiler",
        }
    }

    pub(crate) fn part(self) -> Part {
        match self {
            Self::Files => Part::Files,
            Self::Redis => Part::Redis,
            Self::Memcached => Part::Memcached,
            Self::Bfs => Part::Bfs,
            Self::Kmeans => Part::Kmeans,
            Self::Compiler => Part::Compiler,
        }
    }

    /// Time in which agent and host learn what is hot: of a program that is paced, some of its passes.
    fn settles(self) -> Duration {
        match self {
            Self::Bfs | Self::Kmeans | Self::Compiler => SETTLES * 3,
            Self::Files | Self::Redis | Self::Memcached => SETTLES,
        }
    }

    fn command(self) -> String {
        match self {
            Self::Files => "agent-load".into(),
            Self::Redis => "redis-load".into(),
            program => format!("program-load {} {}", program.name(), DATA / MIB),
        }
    }
}

/// The program in the guest, and for Redis its data.
struct Work {
    address: SocketAddr,
    redis: Option<Dataset>,
}

impl Work {
    /// Lets it work for this time; the clients of Redis are here.
    fn run(&mut self, time: Duration) -> Result<()> {
        let Some(data) = &mut self.redis else {
            std::thread::sleep(time);
            return Ok(());
        };
        let done = load::throughput(self.address, data, &Mix { duration: time, ..Mix::default() })?;
        let wrong = done.reads.wrong + done.reads.missing;
        ensure!(wrong == 0, "WRONG DATA: {wrong} values of Redis: {:?}", done.reads.first_wrong);
        Ok(())
    }
}

/// Measures one side in a guest of its own.
pub(crate) fn measure(bench: &mut Bench, load: Load, side: &str) -> Result<Figures> {
    let by_agent = side == "agent";
    let alone = if by_agent { "" } else { " alone" };
    let mut vm = Booted::new(bench, MEMORY, &[], &format!("{}{alone}", load.command()))?;
    vm.expect("filled")?;
    let mut work = Work { address: vm.guest.redis_addr(), redis: None };
    if load == Load::Redis {
        let data = Dataset::new((DATA / VALUE) as usize, VALUE as usize, 1);
        load::load(work.address, &data)?;
        work.redis = Some(data);
    }
    work.run(load.settles())?;
    let mut figures = wrong_choices(bench, &vm, &mut work, side)?;
    if !bench.options.choices {
        figures.extend(most(bench, &mut vm, &mut work, load, side)?);
    }
    bench.daemon.api().set_limit(&vm.name, None)?;
    if by_agent {
        figures.push(("balloon_error_pct".into(), balloon(bench, &vm)?));
    }
    if let Some(data) = &work.redis {
        let read = load::verify(work.address, data)?;
        ensure!(read.verified == data.keys(), "WRONG DATA: {} bytes of Redis", read.bytes_lost);
    }
    vm.end(bench)?;
    Ok(figures)
}

/// The limit takes memory at once; how much of that is back soon?
fn wrong_choices(bench: &Bench, vm: &Booted, work: &mut Work, side: &str) -> Result<Figures> {
    let tracked = |bench: &Bench| bench.daemon.api().heat(&vm.name, 1);
    let (before, heat) = (vm.stat(bench)?, tracked(bench)?);
    let began = Instant::now();
    let limit = before.resident_bytes.saturating_sub(TAKEN);
    bench.daemon.api().set_limit(&vm.name, Some(limit))?;
    work.run(COUNTED)?;
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
        (of("restored_soon_pages"), soon as f64),
        (of("restored_of_evicted_pct"), percent(grown(restored), evicted)),
        (of("restored_pages"), grown(restored) as f64),
        (of("evicted_mib"), mib(evicted * PAGE_SIZE as u64)),
        (of("zeros_mib"), mib(grown(|stat| stat.reclaim.evicted_zero_pages) * PAGE_SIZE as u64)),
        (of("wrong_picks_pct"), percent(wrong, judged)),
        (of("judged_pages"), judged as f64),
        (of("judged_by_agent_pct"), percent(now.by_agent.judged_pages, judged)),
        (of("quarantine_hit_pages"), grown(|stat| stat.reclaim.quarantine_hit_pages) as f64),
        (of("tracking_cycles"), cycles as f64),
        (of("engine_cpu_pct"), grown(|stat| stat.engine_time.tasks_us) as f64 * 100.0 / lasted_us),
    ];
    if side == "agent" {
        ensure!(now.reports > was.reports, "the agent does not report: {now:?}");
        figures.push(("agent_cpu_pct".into(), (now.cpu_us - was.cpu_us) as f64 * 100.0 / lasted_us));
    }
    Ok(figures)
}

/// The limit falls step by step while few pages are restored, and rises when there are more.
fn most(bench: &Bench, vm: &mut Booted, work: &mut Work, load: Load, side: &str) -> Result<Figures> {
    bench.daemon.api().set_limit(&vm.name, None)?;
    work.run(RETURN / 2)?;
    requests(vm, load)?;
    work.run(RETURN / 2)?;
    let without = requests(vm, load)?;
    let first = vm.stat(bench)?;
    let mut limit = first.resident_bytes;
    // The state at the end of each step, and when that was.
    let mut steps = vec![(first, Instant::now())];
    for step in 0..STEPS {
        if step == STEPS / 2 {
            requests(vm, load)?;
        }
        work.run(STEP)?;
        let (now, at) = (vm.stat(bench)?, Instant::now());
        let (was, began) = &steps[steps.len() - 1];
        let rate = (restored(&now) - restored(was)) as f64 / (at - *began).as_secs_f64();
        limit = match rate {
            low if low < RESTORED / 2.0 => limit.min(now.resident_bytes) / 16 * 15,
            below if below < RESTORED => limit / 64 * 63,
            // What comes back below the limit is of an earlier step.
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
        (of("stall_throttled_pct"), of_time((now.faults.throttled_us - was.faults.throttled_us) as f64)),
        (of("restored_pages_per_s"), each_s(restored)),
        (of("minor_faults_per_s"), each_s(|stat| stat.faults.minor)),
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

/// How long the requests took that a program of the guest has served since it was last asked: three percentiles in us.
fn requests(vm: &mut Booted, load: Load) -> Result<Option<[f64; 3]>> {
    if load != Load::Memcached {
        return Ok(None);
    }
    vm.guest.tell("requests")?;
    let said = vm.guest.answer(TIMEOUT)?;
    let words: Vec<f64> = said.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    let [_, p50, p95, p99] = words[..] else { bail!("the guest says {said:?} of its requests") };
    Ok(Some([p50, p95, p99]))
}

/// Has the agent hold memory; returns by how much it misses, in percent.
fn balloon(bench: &Bench, vm: &Booted) -> Result<f64> {
    let patch = |bytes| VmPatch { balloon: Some(NodeBalloon { node: 0, bytes }), ..VmPatch::default() };
    bench.daemon.api().patch_vm(&vm.name, &patch(BALLOON))?;
    let held = || -> Result<u64> {
        Ok(vm.stat(bench)?.agent.and_then(|agent| Some(agent.nodes.first()?.balloon_bytes)).unwrap_or(0))
    };
    let began = Instant::now();
    while held()? != BALLOON && began.elapsed() < Duration::from_secs(30) {
        std::thread::sleep(Duration::from_millis(200));
    }
    let error = percent(held()?.abs_diff(BALLOON), BALLOON);
    bench.daemon.api().patch_vm(&vm.name, &patch(0))?;
    Ok(error)
}
