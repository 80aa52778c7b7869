//! Redis in a QEMU guest that is tracked.
//!
//! Before: there is a daemon, and the guest image of `scripts/guest-image.sh`. After: a row has the cost of tracking
//! for a real program in an unmodified kernel, and its estimated working set.
//! Threads: the bench's one, which is Redis's client. Units: operations of Redis, 16 KiB each, as the client counts
//! them.
//! Promise: one guest is tracked and not tracked by turns, as in `overhead`. Every value that is read is compared, and
//! at the end every key. The truth is not known page by page, because the guest decides where a key lies. The row has
//! the amount of data that the client used in the span of the working set; guest and Redis touch more than that.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ballast_api::Track;
use ballast_base::{Bytes, KIB, MIB};
use ballast_sys::program;
use ballast_testvm::qemu::load::{self, Dataset, Mix};
use ballast_testvm::qemu::{Accel, QemuGuest};

use crate::order::Role;
use crate::report::Row;
use crate::rig::Bench;
use crate::worker::ROLE_COMMAND;

const VALUE: u64 = 16 * KIB;
/// RAM of the guest beyond its data: kernel, initrd, Redis itself.
const BESIDE: u64 = 224 * MIB;
/// Longest time until a guest has booted: an interpreted one on a busy machine is slow.
const TIMEOUT: Duration = Duration::from_secs(180);

pub(super) fn run(bench: &mut Bench, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    let (data, half_ms, pairs) = if bench.options.quick { (32 * MIB, 1500, 1) } else { (256 * MIB, 5000, 4) };
    let (mut guest, name) = boot(bench, Bytes(data + BESIDE))?;
    let mut data = Dataset::new((data / VALUE) as usize, VALUE as usize, 1);
    load::load(guest.redis_addr(), &data)?;
    let mut row = bench.row("Redis");
    row.fact("measures", "redis");
    row.fact("accelerator", if Accel::detect() == Accel::Kvm { "kvm" } else { "tcg" });
    let mix = Mix { duration: Duration::from_millis(half_ms), ..Mix::default() };
    row.fact("ram_bytes", bench.daemon.api().vm(&name)?.size_bytes);
    row.fact("data_bytes", data.bytes());
    row.fact("hot_data_bytes", (data.bytes() as f64 * mix.hot_keys) as u64);
    row.fact("hot_ops_share", mix.hot_ops);
    row.fact("on_ms", 2 * half_ms);
    row.fact("pairs", pairs);
    measure(bench, &name, &mut guest, &mut data, mix, pairs, &mut row)?;
    let read = load::verify(guest.redis_addr(), &data)?;
    ensure!(read.verified == data.keys(), "WRONG DATA: {} bytes in a tracked Redis", read.bytes_lost);
    row.because(
        "accuracy and errors: which pages of a guest hold a key is not known; \
         splits, bloat and generations: see the native rows",
    );
    each(row)
}

/// A guest under `ballast run` that ends with this process.
fn boot(bench: &mut Bench, memory: Bytes) -> Result<(QemuGuest, String)> {
    let name = bench.vm_name();
    let own = std::env::current_exe().context("Finding this program's own file")?.to_string_lossy().into_owned();
    let socket = bench.daemon.attach_socket().to_string_lossy().into_owned();
    let role = serde_json::to_string(&Role::Become { procs: None })?;
    let ballast = program::find("ballast").context("Finding what starts QEMU")?.to_string_lossy().into_owned();
    let prefix = [&own, ROLE_COMMAND, &role, "--", &ballast, "run", "--name", &name, "--attach-socket", &socket, "--"];
    let prefix = prefix.map(str::to_owned);
    let mut guest = QemuGuest::builder().name("bench").memory(memory).prefix(prefix).spawn()?;
    guest.wait_ready(TIMEOUT)?;
    bench.daemon.wait_for_vm(&name)?;
    Ok((guest, name))
}

fn measure(
    bench: &Bench,
    name: &str,
    guest: &mut QemuGuest,
    data: &mut Dataset,
    mix: Mix,
    pairs: usize,
    row: &mut Row,
) -> Result<()> {
    let mut seed = 0;
    let (api, keys) = (bench.daemon.api(), data.keys());
    let mut speed = |halves: u32| -> Result<f64> {
        seed += 1;
        let mix = Mix { duration: mix.duration * halves, seed, ..mix };
        let done = load::throughput(guest.redis_addr(), data, &mix)?;
        let wrong = done.reads.wrong + done.reads.missing;
        ensure!(wrong == 0, "WRONG DATA: {wrong} values of a tracked Redis: {:?}", done.reads.first_wrong);
        Ok(done.ops_per_s())
    };
    api.set_track(name, Track::Off)?;
    speed(2)?;
    let (mut overhead, mut noise, mut speeds, mut waited) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let (mut wss, mut huge, mut spans, mut known) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let (mut used, mut cycles) = (Vec::new(), [0; 2]);
    for pair in bench.progress.over("pair", 0..pairs) {
        let (mut off, mut on) = ([0.0; 2], 0.0);
        // The order alternates: a guest that gets faster with time must not seem to gain by tracking.
        for is_on in if pair % 2 == 0 { [false, true] } else { [true, false] } {
            if is_on {
                api.set_track(name, Track::On)?;
                on = speed(2)?;
                let heat = api.heat(name, 1)?;
                waited.push(heat.guest_percent);
                wss.push(heat.wss_bytes as f64);
                huge.push(heat.wss_huge_bytes as f64);
                spans.push(heat.wss_span_s);
                used.push(used_keys(mix.hot_keys, mix.hot_ops, keys as f64, on * heat.wss_span_s) * VALUE as f64);
                known.push(heat.known_percent);
                cycles = [heat.cycles, heat.fine_cycles];
                api.set_track(name, Track::Off)?;
            } else {
                off = [speed(1)?, speed(1)?];
            }
        }
        let free = f64::midpoint(off[0], off[1]);
        overhead.push(100.0 * (1.0 - on / free));
        noise.push(100.0 * (1.0 - off[1] / off[0]));
        speeds.push(free);
    }
    row.fact("cycles", cycles[0]);
    row.fact("fine_cycles", cycles[1]);
    row.difference("overhead_pct", &overhead);
    row.difference("overhead_aa_pct", &noise);
    row.figure("guest_waited_pct", &waited);
    row.figure("ops_per_s", &speeds);
    row.figure("wss_bytes", &wss);
    row.figure("wss_huge_bytes", &huge);
    row.figure("used_data_bytes", &used);
    row.figure("wss_span_s", &spans);
    row.figure("wss_known_pct", &known);
    Ok(())
}

/// The number of keys that `ops` operations use, by the law of [`load::throughput`].
fn used_keys(hot_keys: f64, hot_ops: f64, keys: f64, ops: f64) -> f64 {
    let hot = keys * hot_keys;
    let any = (1.0 - hot_ops) / keys;
    let used = |keys: f64, rate: f64| keys * (1.0 - (-rate * ops).exp());
    used(hot, hot_ops / hot + any) + used(keys - hot, any)
}

#[cfg(test)]
mod tests {
    use super::used_keys;

    #[test]
    fn few_operations_use_a_key_each_and_many_use_all_hot_keys_first() {
        assert!((used_keys(0.1, 0.9, 1000.0, 1.0) - 1.0).abs() < 0.01);
        let some = used_keys(0.1, 0.9, 1000.0, 1000.0);
        assert!((180.0..190.0).contains(&some), "{some}");
        assert!((used_keys(0.1, 0.9, 1000.0, 1e6) - 1000.0).abs() < 1.0);
    }
}
