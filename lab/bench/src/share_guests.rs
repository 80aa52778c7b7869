//! Three real guests with Redis and the same data; two are busy, the third is cold. HugeScope's experiment (4.6).
//!
//! Before: a bench without guests. After: a row has what compression alone, a group and KSM save, their CPU time, and
//! what the two busy guests serve meanwhile and afterwards, over what they served before.
//! Threads: one client for each busy guest. Units: MiB; saved memory is net of what the engine itself uses more, and
//! without pages of zeros. Promise: each value that is read is checked, and all values of all guests at the end. Under
//! an emulated CPU the rates mean little.

use std::time::Duration;

use anyhow::{Result, ensure};
use ballast_base::{Bytes, KIB, MIB};
use ballast_testvm::qemu::QemuGuest;
use ballast_testvm::qemu::load::{self, Dataset, Mix};

use crate::booted::{TIMEOUT, mib, words_before};
use crate::cpu;
use crate::ksm::Ksm;
use crate::report::Row;
use crate::rig::Bench;
use crate::share::{GROUP, GUESTS, own_mib};
use crate::subject::in_turn;

const MEMORY: Bytes = Bytes(256 * MIB);
const VALUE: u64 = 4 * KIB;
/// Data of each guest, as values.
const DATA: u64 = 96 * MIB;
/// What a limit takes of a busy guest and of the cold one.
const TAKEN: [u64; GUESTS as usize] = [96 * MIB, 96 * MIB, 144 * MIB];
/// How many guests are busy.
const BUSY: usize = 2;
/// How long the busy guests serve before, while memory goes or merges, and afterwards.
const SERVE: Duration = Duration::from_secs(20);
const GOES: Duration = Duration::from_secs(40);

/// The ways to save memory, by turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Compressed,
    Share,
    Ksm,
}

const WAYS: [Way; 3] = [Way::Compressed, Way::Share, Way::Ksm];

impl Way {
    fn name(self) -> &'static str {
        match self {
            Self::Compressed => "compressed",
            Self::Share => "share",
            Self::Ksm => "ksm",
        }
    }
}

#[derive(Default)]
struct Series {
    saved_mib: Vec<f64>,
    /// In percent of the data of all guests; what else a guest holds counts as saved, too.
    saved_pct: Vec<f64>,
    cpu_s: Vec<f64>,
    /// What was served meanwhile and afterwards, over what was served before.
    ratio: Vec<f64>,
    settled_ratio: Vec<f64>,
}

pub(crate) fn run(bench: &mut Bench, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    let mut row = bench.row("three guests with Redis and the same data, one cold");
    let rounds = if bench.options.quick { 1 } else { 3 };
    row.fact("guest_bytes", MEMORY.0);
    row.fact("data_bytes", DATA);
    row.fact("repetitions", rounds);
    let mut series: [Series; 3] = Default::default();
    for round in bench.progress.over("round", 1..=rounds) {
        for way in in_turn(WAYS, round) {
            let of = &mut series[way as usize];
            match way {
                Way::Compressed => bench.with_settings("", |bench| measure(bench, way, of))?,
                Way::Share => bench.with_settings(GROUP, |bench| measure(bench, way, of))?,
                Way::Ksm => measure(bench, way, of)?,
            }
        }
    }
    for (way, of) in WAYS.into_iter().zip(&series) {
        let name = way.name();
        row.figure(&format!("{name}_saved_mib"), &of.saved_mib);
        row.figure(&format!("{name}_saved_pct"), &of.saved_pct);
        row.figure(&format!("{name}_cpu_s"), &of.cpu_s);
        row.figure(&format!("{name}_throughput_ratio"), &of.ratio);
        row.figure(&format!("{name}_settled_throughput_ratio"), &of.settled_ratio);
    }
    let [alone, share, _] = &series;
    let points = share.saved_pct.iter().zip(&alone.saved_pct).map(|(share, alone)| share - alone);
    row.figure("share_points_over_compression", &points.collect::<Vec<_>>());
    each(row)
}

/// A guest, the name of its VM if it is one of Ballast's, and its data.
struct Guest {
    qemu: QemuGuest,
    name: Option<String>,
    data: Dataset,
}

impl Guest {
    fn boot(bench: &mut Bench, way: Way) -> Result<Self> {
        let name = (way != Way::Ksm).then(|| bench.vm_name());
        let prefix = words_before(name.as_deref().map(|name| (&*bench, name, &[][..])))?;
        // Without Ballast its RAM is private, and QEMU asks for merges.
        let builder = QemuGuest::builder().name("bench").memory(MEMORY).shared_memory(name.is_some());
        let mut qemu = builder.prefix(prefix).spawn()?;
        qemu.wait_ready(TIMEOUT)?;
        if let Some(name) = &name {
            bench.daemon.wait_for_vm(name)?;
        }
        let data = Dataset::new((DATA / VALUE) as usize, VALUE as usize, 1);
        load::load(qemu.redis_addr(), &data)?;
        Ok(Self { qemu, name, data })
    }

    /// Serves for this time; returns operations per second.
    fn serve(&mut self, duration: Duration, seed: u64) -> Result<f64> {
        let done = load::throughput(self.qemu.redis_addr(), &mut self.data, &Mix { duration, seed, ..Mix::default() })?;
        let wrong = done.reads.wrong + done.reads.missing;
        ensure!(wrong == 0, "WRONG DATA: {wrong} values of Redis: {:?}", done.reads.first_wrong);
        Ok(done.ops_per_s())
    }

    fn verify(&self) -> Result<()> {
        let read = load::verify(self.qemu.redis_addr(), &self.data)?;
        ensure!(read.verified == self.data.keys(), "WRONG DATA: {} bytes of Redis", read.bytes_lost);
        Ok(())
    }
}

/// The busy guests serve; returns operations per second of all together.
fn serve(guests: &mut [Guest], duration: Duration, seed: u64) -> Result<f64> {
    let rates = std::thread::scope(|scope| {
        let clients: Vec<_> =
            guests.iter_mut().take(BUSY).map(|guest| scope.spawn(move || guest.serve(duration, seed))).collect();
        clients.into_iter().map(|client| client.join().expect("a client does not panic")).collect::<Result<Vec<_>>>()
    })?;
    Ok(rates.iter().sum())
}

fn measure(bench: &mut Bench, way: Way, series: &mut Series) -> Result<()> {
    let mut guests = (0..GUESTS).map(|_| Guest::boot(bench, way)).collect::<Result<Vec<_>>>()?;
    // Both busy guests do the same, so what they hold stays equal.
    let before = serve(&mut guests, SERVE, 1)?;
    let engine = bench.engine_pid()?;
    let (own, cpu_us) = (own_mib(engine)?, cpu::of_threads(engine, |_| true)?);
    let ksm = if way == Way::Ksm { Some(Ksm::start()?) } else { None };
    for (guest, taken) in guests.iter().zip(TAKEN) {
        if let Some(name) = &guest.name {
            let resident = bench.daemon.api().vm(name)?.resident_bytes;
            bench.daemon.api().set_limit(name, Some(resident.saturating_sub(taken)))?;
        }
    }
    series.ratio.push(serve(&mut guests, GOES, 2)? / before);
    let (saved, cpu_us) = match &ksm {
        Some(ksm) => (ksm.saved_mib()?, ksm.cpu_us()?),
        None => {
            let host = bench.daemon.api().host()?;
            let saved = mib(host.far_bytes) - mib(host.store_bytes) - (own_mib(engine)? - own);
            (saved, cpu::of_threads(engine, |_| true)? - cpu_us)
        }
    };
    series.saved_mib.push(saved);
    series.saved_pct.push(saved * 100.0 / mib(u64::from(GUESTS) * DATA));
    series.cpu_s.push(cpu_us / 1e6);
    series.settled_ratio.push(serve(&mut guests, SERVE, 3)? / before);
    drop(ksm);
    for name in guests.iter().filter_map(|guest| guest.name.as_ref()) {
        bench.daemon.api().set_limit(name, None)?;
    }
    guests.iter().try_for_each(Guest::verify)
}
