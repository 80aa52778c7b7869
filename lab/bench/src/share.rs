//! The sharing of equal pages. Three guests have three of four pages in common, and all pages are far, in a group and
//! not; twins of them are in private memory that the kernel merges. So half of all pages are copies of another, as in
//! three real guests with the same data in Redis.
//!
//! Before: a bench without guests. After: a row has the memory that each way saves, its CPU time, and the rate of
//! restores.
//! Units: saved MiB are of the memory that holds data, none of which is zeros; the memory that the engine itself uses
//! more is subtracted. Promise: every page is verified, and KSM's settings are restored.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use anyhow::{Context, Result};
use ballast_base::PAGE_SIZE;
use ballast_base::units::MIB;
use ballast_sys::Anon;

use crate::ksm::Ksm;
use crate::order::{Data, GuestKind, Pace};
use crate::report::Row;
use crate::rig::Bench;
use crate::setting;
use crate::subject::{Subject, Way, in_turn, out, touch};

pub(crate) const GUESTS: u8 = 3;
/// The setting that puts all guests of this bench into one group.
pub(crate) const GROUP: &str = "[dedup]\nguests = [\"bench-*\"]\n";

/// The figures of one way.
#[derive(Default)]
struct Series {
    saved_mib: Vec<f64>,
    own_mib: Vec<f64>,
    cpu_s: Vec<f64>,
    restore_us: Vec<f64>,
    back_per_s: Vec<f64>,
}

pub(crate) fn run(bench: &mut Bench, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    let mut row = bench.row("three guests, three pages of four equal");
    if !bench.options.is(GuestKind::Native) {
        row.because("what guests hold is made by the bench (--guest native)");
        row.figure("share_points_over_compression", &[]);
        return each(row);
    }
    let (count, rounds) = if bench.options.quick { (4096, 2) } else { (16_384, 5) };
    let data_mib = f64::from(GUESTS) * (count * PAGE_SIZE as u64) as f64 / MIB as f64;
    row.fact("pages_per_guest", count);
    row.fact("data_mib", data_mib as u64);
    row.fact("repetitions", rounds);
    let mut series: [Series; 3] = Default::default();
    for round in bench.progress.over("round", 0..=rounds) {
        // Round 0 warms up.
        let mut warm_up: [Series; 3] = Default::default();
        let of = if round == 0 { &mut warm_up } else { &mut series };
        for (at, settings) in in_turn([(0, ""), (1, GROUP)], round) {
            bench.with_settings(settings, |bench| far(bench, count, round, &mut of[at]))?;
        }
        if let Err(error) = merged(count, &mut of[2]) {
            row.because(&format!("KSM: {error:#}"));
        }
    }
    let [alone, group, ksm] = &series;
    for (name, of) in [("compressed", alone), ("share", group)] {
        row.figure(&format!("{name}_saved_mib"), &of.saved_mib);
        row.figure(&format!("{name}_engine_mib"), &of.own_mib);
        row.figure(&format!("{name}_cpu_s"), &of.cpu_s);
        row.figure(&format!("{name}_restore_us_p50"), &of.restore_us);
        row.figure(&format!("{name}_restore_pages_per_s"), &of.back_per_s);
    }
    let points = |of: &Series| {
        let both = of.saved_mib.iter().zip(&alone.saved_mib);
        both.map(|(saved, alone)| 100.0 * (saved - alone) / data_mib).collect::<Vec<_>>()
    };
    row.figure("share_points_over_compression", &points(group));
    row.ratio("ratio_share_restore_pages_per_s", &group.back_per_s, &alone.back_per_s);
    row.ratio("ratio_share_cpu", &group.cpu_s, &alone.cpu_s);
    row.figure("ksm_saved_mib", &ksm.saved_mib);
    row.figure("ksm_cpu_s", &ksm.cpu_s);
    each(row)
}

/// Anonymous memory of a process.
pub(crate) fn own_mib(pid: u32) -> Result<f64> {
    let path = format!("/proc/{pid}/status");
    let text = setting::read(path.as_ref())?;
    let kib = text.lines().find_map(|line| line.strip_prefix("RssAnon:")?.trim().strip_suffix(" kB")?.parse().ok());
    kib.map(|kib: f64| kib / 1024.0).with_context(|| format!("{path} has no RssAnon"))
}

/// Measure guests whose pages are all paged out and restored.
fn far(bench: &mut Bench, count: u64, seed: u64, series: &mut Series) -> Result<()> {
    let new = |guest| Subject::new(bench, Way::Ballast, count, Data::Equal(guest));
    let mut guests = (0..GUESTS).map(new).collect::<Result<Vec<_>>>()?;
    let engine = bench.engine_pid()?;
    let before = own_mib(engine)?;
    let gone = out(bench, &mut guests.iter_mut().collect::<Vec<_>>())?;
    let (host, own) = (bench.daemon.api().host()?, own_mib(engine)? - before);
    series.saved_mib.push((host.far_bytes as f64 - host.store_bytes as f64) / MIB as f64 - own);
    series.own_mib.push(own);
    series.cpu_s.push(gone.cpu_us / 1e6);
    let begun = Instant::now();
    let touched = touch(&mut guests.iter_mut().collect::<Vec<_>>(), seed, Pace::ALL)?;
    series.back_per_s.push(gone.pages as f64 / begun.elapsed().as_secs_f64());
    let p50: f64 = touched.iter().map(|touched| touched.summary.p50_us).sum();
    series.restore_us.push(p50 / f64::from(GUESTS));
    guests.iter_mut().try_for_each(Subject::verify)
}

/// Private memory with the same content, which KSM may merge.
pub(crate) fn twin(guest: u8, count: u64) -> Result<Anon> {
    let twin = Anon::new(count as usize * PAGE_SIZE).context("Mapping memory")?;
    for page in 0..count {
        let bytes = Data::Equal(guest).page(page);
        for (at, word) in bytes.as_chunks().0.iter().enumerate() {
            let offset = page as usize * PAGE_SIZE + at * 8;
            twin.word(offset).store(u64::from_le_bytes(*word), Relaxed);
        }
    }
    twin.mergeable().context("Asking for a merge")?;
    Ok(twin)
}

/// Measure the same content in private memory of one process, which KSM merges until it merges no further page.
fn merged(count: u64, series: &mut Series) -> Result<()> {
    let _twins = (0..GUESTS).map(|guest| twin(guest, count)).collect::<Result<Vec<_>>>()?;
    let ksm = Ksm::start()?;
    ksm.settle()?;
    series.saved_mib.push(ksm.saved_mib()?);
    series.cpu_s.push(ksm.cpu_us()? / 1e6);
    Ok(())
}
