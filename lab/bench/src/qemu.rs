//! A guest in QEMU: an unmodified kernel, and in it the bench program of `testvm`, which touches its own memory.
//!
//! Before: `guest` was asked for one. After: the bench has times that the guest's own clock measured.
//! Threads: QEMU's, in its process; it is stopped while pages go out. All of guest RAM goes out, with the guest's
//! kernel. Units: an operation is the touch of one page by one word.
//! Promise: the same QEMU, with the same command line, runs on all sides: under `ballast run`, or in a memory cgroup
//! whose pages the kernel swaps. QEMU ends with this process.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use ballast_base::{Bytes, Hva, MIB};
use ballast_sys::program;
use ballast_testvm::qemu::{Accel, QemuGuest};

use crate::order::{Answer, Backing, Data, GuestConfig, GuestKind, Out, Role, Touched};
use crate::report::Row;
use crate::stats::Summary;
use crate::worker::ROLE_COMMAND;
use crate::{cpu, swap, swaps};

/// RAM of a guest beyond its data: the kernel, and the initrd twice.
const BESIDE: Bytes = Bytes(160 * MIB);
/// Longest time until a guest has booted or done an order: an interpreted one on a busy machine is slow.
const TIMEOUT: Duration = Duration::from_secs(180);
/// The name of QEMU's memory files.
const RAM_NAME: &str = "memfd:memory-backend-memfd";

pub(crate) struct Vmm {
    qemu: QemuGuest,
    ram: PathBuf,
    /// Where RAM is mapped: address and length.
    mapped: (Hva, u64),
    /// If no side takes its pages: their number.
    stays: Option<u64>,
}

impl Vmm {
    /// Boot, and fill memory.
    pub(crate) fn start(config: &GuestConfig) -> Result<Self> {
        let own = std::env::current_exe().context("Finding this program's own file")?;
        let own = own.to_string_lossy().into_owned();
        let procs = if let Backing::Kernel { procs } = &config.backing { Some(procs.clone()) } else { None };
        let mut prefix = vec![own, ROLE_COMMAND.into(), serde_json::to_string(&Role::Become { procs })?];
        prefix.push("--".into());
        if let Backing::Ballast { socket, name } = &config.backing {
            let socket = socket.to_string_lossy();
            let words = ["run", "--name", name, "--attach-socket", &socket, "--"].map(str::to_owned);
            let ballast = program::find("ballast").context("Finding what starts QEMU")?;
            prefix.push(ballast.to_string_lossy().into_owned());
            prefix.extend(words);
        }
        let memory = Bytes((ballast_base::PageCount(config.pages).bytes().0 + BESIDE.0).next_multiple_of(2 * MIB));
        let mut qemu =
            QemuGuest::builder().name("bench").memory(memory).prefix(prefix).dir(&config.dir).bench().spawn()?;
        qemu.wait_ready(TIMEOUT)?;
        qemu.tell(&format!("f {} {}", config.pages, u8::from(config.data == Data::Incompressible)))?;
        ensure!(qemu.answer(TIMEOUT)? == "filled", "the guest does not fill its memory");
        let pid = qemu.pid();
        let stays = matches!(config.backing, Backing::Floor).then_some(config.pages);
        Ok(Self { qemu, ram: ram_of(pid)?, mapped: mapping_of(pid)?, stays })
    }

    /// RAM, as others can open it.
    pub(crate) fn ram(&self) -> &Path {
        &self.ram
    }

    /// QEMU.
    pub(crate) fn pid(&self) -> u32 {
        self.qemu.pid()
    }

    /// Stop the virtual CPU.
    pub(crate) fn hold(&mut self) -> Result<()> {
        Ok(self.qemu.qmp()?.pause()?)
    }

    /// On the kernel's side, page out all of guest RAM to swap. (The floor's stays.)
    pub(crate) fn page_out(&mut self) -> Result<Out> {
        if let Some(pages) = self.stays {
            return Ok(Out { pages, ..Out::default() });
        }
        let (before, start, cpu) = (swaps::used_pages()?, Instant::now(), cpu::of_thread()?);
        swap::page_out_of(self.pid(), self.mapped.0, self.mapped.1).context("Paging QEMU's memory out")?;
        let (wall_us, cpu_us) = (start.elapsed().as_secs_f64() * 1e6, cpu::of_thread()? - cpu);
        // The kernel does not show swapped pages of a memory file as holes; the swap is ours alone.
        Ok(Out { pages: swaps::used_pages()?.saturating_sub(before), wall_us, cpu_us, ..Out::default() })
    }

    /// Continue, and touch every page once.
    pub(crate) fn touch(&mut self, seed: u64) -> Result<Touched> {
        self.qemu.qmp()?.resume()?;
        let numbers = self.ask(&format!("t {seed}"), "touched")?;
        let [count, p50, p90, p99, max, ticks, ns, wrong] = numbers[..] else { bail!("the guest says {numbers:?}") };
        let us = |value: u64| value as f64 * ns as f64 / ticks.max(1) as f64 / 1e3;
        let summary = Summary { count, p50_us: us(p50), p90_us: us(p90), p99_us: us(p99), max_us: us(max) };
        Ok(Touched { summary, faults: summary, wall_us: ns as f64 / 1e3, wrong })
    }

    /// Work for this long, by the guest's clock.
    pub(crate) fn work(&mut self, zipf: bool, ms: u64) -> Result<Answer> {
        let cpu = cpu::of_threads(self.pid(), |_| true)?;
        let numbers = self.ask(&format!("r {} {ms}", u8::from(zipf)), "ran")?;
        let [ops, ns, wrong] = numbers[..] else { bail!("the guest says {numbers:?}") };
        ensure!(wrong == 0, "WRONG DATA: {wrong} words in a QEMU guest");
        let cpu_us = cpu::of_threads(self.pid(), |_| true)? - cpu;
        Ok(Answer::Sliced { ops, wall_us: ns as f64 / 1e3, cpu_us })
    }

    /// Compare every word.
    pub(crate) fn verify(&mut self) -> Result<()> {
        self.qemu.qmp()?.resume()?;
        let wrong = self.ask("v", "verified")?;
        ensure!(wrong == [0], "WRONG DATA: {wrong:?} words in a QEMU guest");
        Ok(())
    }

    fn ask(&mut self, line: &str, name: &str) -> Result<Vec<u64>> {
        self.qemu.tell(line)?;
        let answer = self.qemu.answer(TIMEOUT)?;
        let mut words = answer.split_ascii_whitespace();
        ensure!(words.next() == Some(name), "the guest answers {answer:?} to {line:?}");
        words.map(|word| word.parse().with_context(|| format!("the guest says {answer:?}"))).collect()
    }
}

fn ram_of(pid: u32) -> Result<PathBuf> {
    let fds = format!("/proc/{pid}/fd");
    for entry in std::fs::read_dir(&fds).with_context(|| format!("Reading {fds}"))? {
        let path = entry?.path();
        if std::fs::read_link(&path).is_ok_and(|target| target.to_string_lossy().contains(RAM_NAME)) {
            return Ok(path);
        }
    }
    bail!("QEMU has no memory file")
}

fn mapping_of(pid: u32) -> Result<(Hva, u64)> {
    let path = format!("/proc/{pid}/maps");
    let text = std::fs::read_to_string(&path).with_context(|| format!("Reading {path}"))?;
    let found = text.lines().filter(|line| line.contains(RAM_NAME)).find_map(|line| {
        let (start, end) = line.split(' ').next()?.split_once('-')?;
        let (start, end) = (u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?);
        Some((Hva(start), end - start))
    });
    found.context("QEMU does not map its memory file")
}

/// The facts in every row of such guests.
pub(crate) fn facts(row: &mut Row) {
    row.fact("accelerator", if Accel::detect() == Accel::Kvm { "kvm" } else { "tcg" });
    row.because("a plain handler of a QEMU guest: QEMU gives its memory to the preload library only");
}

/// A row without figures, because such guests cannot measure it.
pub(crate) fn not_measured(bench: &str, what: &str, keys: &[&str]) -> Row {
    let mut row = Row::new(bench, GuestKind::Qemu.name(), what);
    row.because("several interpreted guests on these CPUs measure the interpreter (--guest native or kvm)");
    keys.iter().for_each(|key| row.figure(key, &[]));
    row
}
