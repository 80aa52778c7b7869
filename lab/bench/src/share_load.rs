//! The price of sharing for guests that work: three guests with three pages of four in common read and write two thirds
//! of their pages, as key-value stores do, and the last third is cold.
//!
//! Before: `share` has measured what sharing saves. After: a row has the pages per second that the guests serve while
//! nothing shares, while their cold third goes into a group, and while KSM merges private twins; what each saved by
//! then, and its CPU time.
//! Threads: a process for each guest; the twins are threads of this one. Units: pages per second, MiB, seconds.
//! Promise: sides by turns; every page that is read is checked, and all of a guest's bytes at the end.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use ballast_base::PAGE_SIZE;
use ballast_base::units::MIB;

use crate::cpu;
use crate::ksm::Ksm;
use crate::native::{self, Ram};
use crate::order::{Data, GuestKind};
use crate::report::Row;
use crate::rig::Bench;
use crate::share::{GROUP, GUESTS, own_mib, twin};
use crate::subject::{Subject, Way, in_turn, serve};

const TIMEOUT: Duration = Duration::from_secs(60);

/// The sides, by turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Alone,
    Share,
    /// Twins, and nothing merges them.
    Twins,
    Ksm,
}

const SIDES: [Side; 4] = [Side::Alone, Side::Share, Side::Twins, Side::Ksm];

#[derive(Default)]
struct Series {
    per_s: Vec<f64>,
    /// When all that goes, or merges, has.
    settled_per_s: Vec<f64>,
    saved_mib: Vec<f64>,
    cpu_s: Vec<f64>,
    /// CPU time of the engine, or of ksmd, in the settled time.
    settled_cpu_s: Vec<f64>,
}

pub(crate) fn run(bench: &mut Bench, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    let mut row = bench.row("three guests at work, a third of each cold");
    if !bench.options.is(GuestKind::Native) {
        row.because("what guests hold is made by the bench (--guest native)");
        ["share_throughput_ratio", "ksm_throughput_ratio"].iter().for_each(|key| row.figure(key, &[]));
        return each(row);
    }
    let (count, rounds, ms) = if bench.options.quick { (4096, 2, 2000) } else { (16_384, 5, 5000) };
    let hot = count * 2 / 3;
    row.fact("pages_per_guest", count);
    row.fact("hot_pages", hot);
    row.fact("serve_ms", ms);
    row.fact("repetitions", rounds);
    let mut series: [Series; 4] = Default::default();
    for round in bench.progress.over("round", 0..=rounds) {
        // Round 0 warms up.
        let mut warm_up: [Series; 4] = Default::default();
        let of = if round == 0 { &mut warm_up } else { &mut series };
        bench.with_settings(GROUP, |bench| {
            for side in in_turn(SIDES, round) {
                let of = &mut of[side as usize];
                match side {
                    Side::Alone | Side::Share => guests(bench, side, (count, hot, ms), of)?,
                    Side::Twins | Side::Ksm => {
                        if let Err(error) = twins(side, (count, hot, ms), of) {
                            ensure!(!format!("{error:#}").contains("WRONG DATA"), error);
                            row.because(&format!("KSM: {error:#}"));
                        }
                    }
                }
            }
            Ok(())
        })?;
    }
    let [alone, share, twins, ksm] = &series;
    for (name, of) in [("alone", alone), ("share", share), ("twins", twins), ("ksm", ksm)] {
        row.figure(&format!("{name}_pages_per_s"), &of.per_s);
        row.figure(&format!("{name}_settled_pages_per_s"), &of.settled_per_s);
    }
    for (name, of) in [("share", share), ("ksm", ksm)] {
        row.figure(&format!("load_{name}_saved_mib"), &of.saved_mib);
        row.figure(&format!("load_{name}_cpu_s"), &of.cpu_s);
        row.figure(&format!("load_{name}_settled_cpu_s"), &of.settled_cpu_s);
    }
    row.ratio("share_throughput_ratio", &share.per_s, &alone.per_s);
    row.ratio("ksm_throughput_ratio", &ksm.per_s, &twins.per_s);
    row.ratio("share_settled_throughput_ratio", &share.settled_per_s, &alone.settled_per_s);
    row.ratio("ksm_settled_throughput_ratio", &ksm.settled_per_s, &twins.settled_per_s);
    each(row)
}

/// Measure guests of Ballast, which give up their cold third meanwhile, or have no limit.
fn guests(bench: &mut Bench, side: Side, (count, hot, ms): (u64, u64, u64), series: &mut Series) -> Result<()> {
    let new = |guest| Subject::new(bench, Way::Ballast, count, Data::Equal(guest));
    let mut guests = (0..GUESTS).map(new).collect::<Result<Vec<_>>>()?;
    let engine = bench.engine_pid()?;
    let (own, cpu_us) = (own_mib(engine)?, cpu::of_threads(engine, |_| true)?);
    // Reclaim goes on until 1/32 of the limit, and at least a MiB, is free.
    let limit = hot * PAGE_SIZE as u64;
    let limit = limit + (limit / 32).max(MIB);
    if side == Side::Share {
        guests.iter_mut().try_for_each(|guest| guest.hold_to(bench, limit))?;
    }
    series.per_s.push(serve(&mut guests, hot, ms)?);
    if side == Side::Share {
        let (host, own) = (bench.daemon.api().host()?, own_mib(engine)? - own);
        series.saved_mib.push((host.far_bytes as f64 - host.store_bytes as f64) / MIB as f64 - own);
        series.cpu_s.push((cpu::of_threads(engine, |_| true)? - cpu_us) / 1e6);
        let begun = Instant::now();
        while guests
            .iter()
            .map(Subject::resident)
            .collect::<Result<Vec<_>>>()?
            .iter()
            .any(|pages| pages.bytes().0 > limit)
        {
            ensure!(begun.elapsed() < TIMEOUT, "the cold third has not gone within {TIMEOUT:?}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    let cpu_us = cpu::of_threads(engine, |_| true)?;
    series.settled_per_s.push(serve(&mut guests, hot, ms)?);
    if side == Side::Share {
        series.settled_cpu_s.push((cpu::of_threads(engine, |_| true)? - cpu_us) / 1e6);
    }
    guests.iter_mut().try_for_each(Subject::verify)
}

/// Measure threads with the same content in private memory, which KSM merges meanwhile or nothing does.
fn twins(side: Side, (count, hot, ms): (u64, u64, u64), series: &mut Series) -> Result<()> {
    let twins = (0..GUESTS).map(|guest| twin(guest, count).map(Ram::Private)).collect::<Result<Vec<_>>>()?;
    let ksm = if side == Side::Ksm { Some(Ksm::start()?) } else { None };
    series.per_s.push(serve_twins(&twins, hot, ms)?);
    if let Some(ksm) = &ksm {
        series.saved_mib.push(ksm.saved_mib()?);
        series.cpu_s.push(ksm.cpu_us()? / 1e6);
        ksm.settle()?;
    }
    let cpu_us = ksm.as_ref().map(Ksm::cpu_us).transpose()?;
    series.settled_per_s.push(serve_twins(&twins, hot, ms)?);
    if let (Some(ksm), Some(cpu_us)) = (&ksm, cpu_us) {
        series.settled_cpu_s.push((ksm.cpu_us()? - cpu_us) / 1e6);
    }
    Ok(())
}

/// Have these twins serve their first `hot` pages, all at once. Returns the pages per second of all together.
fn serve_twins(twins: &[Ram], hot: u64, ms: u64) -> Result<f64> {
    let time = Duration::from_millis(ms);
    let served = std::thread::scope(|scope| {
        let serve = |ram| move || native::serve(ram, &mut native::first_words(ram, hot), time);
        let threads: Vec<_> = twins.iter().map(|ram| scope.spawn(serve(ram))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a twin does not panic")).collect::<Vec<_>>()
    });
    let (pages, wrong) = served.iter().fold((0, 0), |(pages, wrong), served| (pages + served.0, wrong + served.1));
    ensure!(wrong == 0, "WRONG DATA: {wrong} of {pages} pages of a twin began with another word");
    Ok(pages as f64 / time.as_secs_f64())
}
