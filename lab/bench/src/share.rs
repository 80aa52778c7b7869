//! Three real guests with Redis and equal data; two are busy, the third is cold. HugeScope's experiment (4.6).
//!
//! Before: a bench without guests. After: a row has the memory that compression alone, a group and KSM save, their CPU
//! time, and the rate of the two busy guests during and after that, divided by their rate before. Threads: one client
//! for each busy guest. Units: MiB; saved memory is net of the growth of the engine itself, and without pages of zeros.
//! Promise: each value that is read is checked, and all values of all guests at the end. Under an emulated CPU the
//! rates mean little.

use std::time::Duration;

use anyhow::{Result, bail, ensure};
use ballast_base::{Bytes, KIB, MIB};
use ballast_testvm::qemu::load::{self, Dataset, Mix};
use ballast_testvm::qemu::{QemuGuest, qemu_missing};

use crate::booted::{TIMEOUT, mib, words_before};
use crate::cpu;
use crate::ksm::Ksm;
use crate::machine;
use crate::report::{Figures, Row};
use crate::rig::Bench;
use crate::subject::in_turn;

const GUESTS: u8 = 3;
/// The setting that puts all guests of this bench into one group.
const GROUP: &str = "[dedup]\nguests = [\"bench-*\"]\n";
const MEMORY: Bytes = Bytes(256 * MIB);
const VALUE: u64 = 4 * KIB;
/// Data of each guest, as values.
const DATA: u64 = 96 * MIB;
/// Memory that a limit takes from each guest: the busy ones, then the cold one.
const TAKEN: [u64; GUESTS as usize] = [96 * MIB, 96 * MIB, 144 * MIB];
const BUSY: usize = 2;
/// How long the busy guests serve before memory goes, and while memory goes or merges and afterwards.
const SERVE: Duration = Duration::from_secs(20);
const GOES: Duration = Duration::from_secs(40);

/// The ways to save memory, in turns, with the settings of their daemon, if there is one.
const WAYS: [(&str, Option<&str>); 3] = [("compressed", Some("")), ("share", Some(GROUP)), ("ksm", None)];

pub(crate) fn run(bench: &mut Bench, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    if let Some(why) = qemu_missing() {
        bail!("no guest in QEMU can run here: {why}");
    }
    let mut row = bench.row("three guests with Redis and the same data, one cold");
    let rounds = if bench.options.quick { 1 } else { 3 };
    row.fact("guest_bytes", MEMORY.0);
    row.fact("data_bytes", DATA);
    row.fact("repetitions", rounds);
    let mut figures = Figures::default();
    for round in bench.progress.over("round", 1..=rounds) {
        for (name, settings) in in_turn(WAYS, round) {
            bench.with_settings(settings.unwrap_or_default(), |bench| {
                measure(bench, name, settings.is_none(), &mut figures)
            })?;
        }
    }
    row.figures(&figures);
    // In percent of the data of all guests; other memory of a guest that goes counts as saved, too.
    let points = figures.of("share_saved_pct").iter().zip(figures.of("compressed_saved_pct"));
    row.figure("share_points_over_compression", &points.map(|(share, alone)| share - alone).collect::<Vec<_>>());
    each(row)
}

/// A guest, its data, and the name of its VM if Ballast manages it.
struct Guest {
    qemu: QemuGuest,
    name: Option<String>,
    data: Dataset,
}

impl Guest {
    fn boot(bench: &mut Bench, is_ksm: bool) -> Result<Self> {
        let name = (!is_ksm).then(|| bench.vm_name());
        let run = name.as_ref().map_or(Ok(Vec::new()), |name| bench.daemon.run_words(name, &[]))?;
        let prefix = words_before(run)?;
        // Without Ballast the RAM is private, and QEMU asks KSM to merge it.
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

    /// Serves for this long; returns operations per second.
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

fn own_mib(engine: u32) -> Result<f64> {
    Ok(mib(machine::rss_anon(engine)?))
}

/// Lets the busy guests serve; returns the sum of their operations per second.
fn serve(guests: &mut [Guest], duration: Duration, seed: u64) -> Result<f64> {
    let rates = std::thread::scope(|scope| {
        let clients: Vec<_> =
            guests.iter_mut().take(BUSY).map(|guest| scope.spawn(move || guest.serve(duration, seed))).collect();
        clients.into_iter().map(|client| client.join().expect("a client does not panic")).collect::<Result<Vec<_>>>()
    })?;
    Ok(rates.iter().sum())
}

fn measure(bench: &mut Bench, name: &str, is_ksm: bool, figures: &mut Figures) -> Result<()> {
    let mut guests = (0..GUESTS).map(|_| Guest::boot(bench, is_ksm)).collect::<Result<Vec<_>>>()?;
    // Both busy guests do the same operations, so their data stays equal.
    let before = serve(&mut guests, SERVE, 1)?;
    let engine = bench.engine_pid()?;
    let (own, cpu_us) = (own_mib(engine)?, cpu::of_threads(engine, |_| true)?);
    let ksm = if is_ksm { Some(Ksm::start()?) } else { None };
    for (guest, taken) in guests.iter().zip(TAKEN) {
        if let Some(name) = &guest.name {
            let resident = bench.daemon.api().vm(name)?.resident_bytes;
            bench.daemon.api().set_limit(name, Some(resident.saturating_sub(taken)))?;
        }
    }
    // The rate while memory goes and afterwards, divided by the rate before.
    let ratio = serve(&mut guests, GOES, 2)? / before;
    let (saved, cpu_us) = match &ksm {
        Some(ksm) => (ksm.saved_mib()?, ksm.cpu_us()?),
        None => {
            let host = bench.daemon.api().host()?;
            let saved = mib(host.far_bytes) - mib(host.store_bytes) - (own_mib(engine)? - own);
            (saved, cpu::of_threads(engine, |_| true)? - cpu_us)
        }
    };
    for (key, value) in [
        ("saved_mib", saved),
        ("saved_pct", saved * 100.0 / mib(u64::from(GUESTS) * DATA)),
        ("cpu_s", cpu_us / 1e6),
        ("throughput_ratio", ratio),
        ("settled_throughput_ratio", serve(&mut guests, SERVE, 3)? / before),
    ] {
        figures.add(&format!("{name}_{key}"), value);
    }
    drop(ksm);
    for name in guests.iter().filter_map(|guest| guest.name.as_ref()) {
        bench.daemon.api().set_limit(name, None)?;
    }
    guests.iter().try_for_each(Guest::verify)
}
