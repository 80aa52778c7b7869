//! The effect on VMs when another engine replaces the serving one.
//!
//! Before: VMs that are held to half of their RAM read all of it repeatedly. After: a row has the times of touches with
//! an upgrade in the middle and without one, the time for which each VM had no engine, the failed requests, and the
//! faults of a VM that only faults (`probe`).
//! Threads: the bench's one; one sends API requests all the time; VMs are processes. Units: in the names.
//! Promise: every word that is read is compared: wrong data ends the bench. Turns with and without an upgrade
//! alternate. `BALLAST_NEXT` names the `ballastd` of another build; upgrades alternate between it and the bench's own.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use ballast_api::{Client, UpgradeRequest, UpgradeStage, UpgradeStat};
use ballast_base::units::MIB;
use ballast_sys::clock::monotonic_ns;
use ballast_sys::{Uffd, program};
use ballast_testhost::until;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};

use crate::density::fleet::{Fleet, Side, Turn};
use crate::order::Slice;
use crate::probe::Probe;
use crate::report::Row;
use crate::rig::Bench;
use crate::waits::Waits;

/// Uncounted time before a turn, in which all VMs begin to read.
const LEAD: Duration = Duration::from_millis(300);
/// Counted time. The upgrade begins with it.
const TIME: Duration = Duration::from_millis(1500);
const LONGEST: Duration = Duration::from_secs(120);

pub(crate) fn run(bench: &mut Bench, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    let (vms, turns) = if bench.options.quick { (2, 4) } else { (4, 20) };
    let ram_bytes = 32 * MIB;
    let mut row = bench.row(&format!("{turns} upgrades under {vms} VMs that read"));
    row.fact("vms", vms);
    row.fact("ram_bytes", ram_bytes);
    row.fact("limited_to_bytes", ram_bytes / 2);
    let own = program::find("ballastd").context("Finding the daemon")?;
    let next = std::env::var_os("BALLAST_NEXT").map_or_else(|| own.clone(), PathBuf::from);
    row.fact("two_builds", next != own);
    let mut fleet = Fleet::start(bench, Side::Ballast, vms, ram_bytes)?;
    fleet.fill(bench)?;
    fleet.limit(bench)?;
    fleet.squeezed(bench)?;
    let (mut steady, mut under): (Vec<Turn>, Vec<(Turn, UpgradeStat)>) = Default::default();
    let (failed, asked) = (AtomicU64::new(0), AtomicU64::new(0));
    for round in bench.progress.over("upgrade", 0..turns) {
        steady.push(fleet.read(LEAD, TIME, || Ok(()))?.0);
        let program = if round % 2 == 0 { &next } else { &own };
        let socket = bench.daemon.dir().join("api.sock");
        let is_over = AtomicBool::new(false);
        let turn = std::thread::scope(|scope| {
            scope.spawn(|| list_vms(&socket, vms, &is_over, &asked, &failed));
            let turn = fleet.read(LEAD, TIME, || upgrade(&socket, program.display().to_string()));
            is_over.store(true, Relaxed);
            turn
        });
        under.push(turn?);
    }
    fleet.verify()?;
    let mut probe = Probe::start(bench)?;
    // Each round has one window without an upgrade, one with, and one more without: the two without show the noise. The
    // last window of a round has an upgrade and a thread that raises no faults: it shows the CPU time that the upgrade
    // takes from the thread.
    let mut probed: [Vec<Slice>; 3] = Default::default();
    let mut computed = Vec::new();
    let (mut touches, mut cut) = (0, 0);
    for round in bench.progress.over("probe", 0..turns) {
        let program = if round % 2 == 0 { &next } else { &own };
        let socket = bench.daemon.dir().join("api.sock");
        let steady = probe.turn(bench, || Ok(()))?.0;
        let (under, window, _) = probe.turn(bench, || upgrade(&socket, program.display().to_string()))?;
        let again = probe.turn(bench, || Ok(()))?.0;
        let back = if round % 2 == 0 { &own } else { &next };
        let (without, at, _) = probe.compute(|| upgrade(&socket, back.display().to_string()))?;
        computed.push(at.of(&without));
        cut += u64::from(window.is_cut);
        touches += under.touches;
        for (slices, turn) in probed.iter_mut().zip([&steady, &under, &again]) {
            slices.push(window.of(turn));
        }
    }
    row.figure_of("steady_fault_us_p99", &steady, |turn| turn.p99_us);
    row.figure_of("upgrade_fault_us_p99", &under, |(turn, _)| turn.p99_us);
    row.figure_of("steady_fault_us_longest", &steady, |turn| turn.worst_ms * 1e3);
    row.figure_of("upgrade_fault_us_longest", &under, |(turn, _)| turn.worst_ms * 1e3);
    for (when, slices) in ["steady", "upgrade", "steady_again"].into_iter().zip(&probed) {
        let mut us = |key: &str, ns: fn(&Slice) -> u64| {
            row.figure_of(&format!("{when}_probe_{key}"), slices, |slice| ns(slice) as f64 / 1e3);
        };
        us("us_p99", |slice| slice.faults.percentile_ns(0.99));
        us("us_p999", |slice| slice.faults.percentile_ns(0.999));
        us("us_longest", |slice| slice.faults.worst_ns());
        us("unserved_us_longest", |slice| slice.gaps.worst_ns());
    }
    row.figure_of("upgrade_computing_us_longest", &computed, |slice| slice.gaps.worst_ns() as f64 / 1e3);
    row.fact("probe_faults", touches);
    row.fact("probe_windows_cut", cut);
    row.figure_of("upgrade_gap_us", &under, |(_, stat)| stat.longest_gap_us as f64);
    row.figure_of("upgrade_switch_us", &under, |(_, stat)| stat.longest_switch_us as f64);
    row.figure_of("upgrade_ms", &under, |(_, stat)| stat.took_us as f64 / 1e3);
    let second = second_reader().context("Becoming one more reader of a userfaultfd")?;
    row.fact("second_reader_us_p50", second.percentile_ns(0.5) as f64 / 1e3);
    row.fact("second_reader_us_p99", second.percentile_ns(0.99) as f64 / 1e3);
    row.fact("api_requests", asked.load(Relaxed));
    row.fact("failed_ops", failed.load(Relaxed));
    // A wrong byte would have ended the bench.
    row.fact("wrong_bytes", 0);
    each(row)
}

/// Requests the list of VMs until the turn is over. A list that does not come at once, or lacks a VM, counts as failed.
fn list_vms(socket: &Path, vms: usize, is_over: &AtomicBool, asked: &AtomicU64, failed: &AtomicU64) {
    while !is_over.load(Relaxed) {
        asked.fetch_add(1, Relaxed);
        let client = Client::new(socket).map(|client| client.retry_for(Duration::ZERO));
        let list = client.map_err(anyhow::Error::from).and_then(|client| Ok(client.vms()?));
        if list.map_or(true, |list| list.len() != vms) {
            failed.fetch_add(1, Relaxed);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The time to become a second reader of a userfaultfd that has a waiter, as between two engines. No fault waits.
fn second_reader() -> Result<Waits> {
    let (uffd, _) = Uffd::create(0)?;
    let waits_on = EventFlags::IN | EventFlags::ET;
    let (first, second) = (epoll::create(CreateFlags::CLOEXEC)?, epoll::create(CreateFlags::CLOEXEC)?);
    epoll::add(&first, &uffd, EventData::new_u64(1), waits_on)?;
    let mut took = Waits::default();
    for _ in 0..10_000 {
        let begin = monotonic_ns();
        epoll::add(&second, &uffd, EventData::new_u64(1), waits_on)?;
        took.add(monotonic_ns() - begin);
        epoll::delete(&second, &uffd)?;
    }
    Ok(took)
}

fn upgrade(socket: &Path, program: String) -> Result<UpgradeStat> {
    let client = Client::new(socket)?.retry_for(LONGEST);
    client.begin_upgrade(&UpgradeRequest { program: Some(program) })?;
    until("the upgrade does not end", LONGEST, || {
        let now = client.upgrade()?;
        match now.stage {
            UpgradeStage::Done => Ok(Some(now)),
            UpgradeStage::Failed => bail!("the upgrade failed: {}", now.message),
            _ => Ok(None),
        }
    })
}
