//! `ballast demo`: takes half of the resident memory of real VMs, kills the engine, and checks every byte. Two VMs are
//! started for Ballast; a third is a plain one that is adopted while it runs, where the host can swap.
//!
//! Before: `scripts/setup.sh` and `scripts/guest-image.sh` made QEMU and a guest image available. After: stdout has a
//! table, and every process that the demo started has ended.
//! Threads: one per guest where both are worked on at once. Units: bytes and seconds, MiB in the table.
//! Promise: every figure is measured in this run; *bytes lost* comes from comparing every byte of every key.

mod cluster;
mod guest;
mod host;
mod measure;
mod report;

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use ballast_api::{VmKind, VmStat};
use ballast_base::Bytes;
use ballast_base::units::MIB;
use ballast_testkit::swap::Swap;
use ballast_testvm::qemu::load::{Dataset, Mix};
use ballast_testvm::qemu::{load, qemu_missing};

use guest::{each, throughput};
use host::{BOOT_TIMEOUT, Host, VALUE};
use measure::HostMemory;
use report::{Report, VmReport};

pub use host::{DemoArgs, Missing};

const PLAIN: &str = "demo-plain";

/// A figure that only VMs of the pager have.
fn of_pager(vm: &VmStat, figure: f64) -> Option<f64> {
    (vm.kind == VmKind::Paged).then_some(figure)
}

/// Run the demo and print its figures. Fails if a byte was lost, or if the kernel counts less than 90 % of the memory
/// that the figures call freed.
pub fn run(args: DemoArgs) -> Result<()> {
    if let Some(why) = qemu_missing() {
        return Err(Missing(why).into());
    }
    ensure!(args.data.0 + 160 * MIB <= args.memory.0, "--data {} does not fit --memory {}", args.data, args.memory);
    if args.cluster {
        return cluster::run(&args);
    }
    let start = Instant::now();
    let say = |text: &str| println!("[{:5.1} s] {text}", start.elapsed().as_secs_f64());
    // Dropped last: the pages in swap must be back by then.
    let swap = Swap::new("4G");
    let host = Host::with_settings("")?;
    let keys = (args.data.0 as usize / VALUE).max(1);

    say("booting two unmodified Debian guests with Redis under `ballast run`");
    let mut guests =
        ["demo-a", "demo-b"].iter().map(|name| host.boot(name, args.memory)).collect::<Result<Vec<_>>>()?;
    match &swap {
        Ok(_) => {
            say("and a third one without Ballast: private memory, no library");
            guests.push(host.boot_plain(PLAIN, args.memory)?);
        }
        Err(why) => say(&format!("no third guest, to be adopted: the kernel cannot swap here ({why})")),
    }
    for guest in &mut guests {
        guest.qemu.wait_ready(BOOT_TIMEOUT)?;
    }
    say(&format!("loading {} into each from the host: {keys} keys of {VALUE} bytes", args.data));
    for (number, guest) in guests.iter_mut().enumerate() {
        guest.data = Dataset::new(keys, VALUE, 1 + number as u64);
    }
    each(&mut guests, |guest| load::load(guest.qemu.redis_addr(), &guest.data))?;

    if let Some(plain) = guests.iter().find(|guest| guest.name == PLAIN) {
        host.adopt(plain)?;
        say("adopting the third one as it runs: `ballast adopt demo-plain`");
    }

    let mix = Mix { duration: Duration::from_secs(args.seconds), ..Mix::default() };
    say("measuring throughput without limits");
    let before_ops = throughput(&mut guests, &mix)?;
    let before = host.stats(&guests)?;
    let host_before = HostMemory::now()?;

    let limits: Vec<u64> = before.iter().map(|vm| vm.resident_bytes / 2 / MIB * MIB).collect();
    let said: Vec<String> = limits.iter().map(|limit| Bytes(*limit).to_string()).collect();
    say(&format!("limiting each to half of what it holds: {}", said.join(", ")));
    for (guest, limit) in guests.iter().zip(&limits) {
        host.api().set_limit(&guest.name, Some(*limit))?;
    }
    host.wait_for_limits(&guests, &limits)?;
    let after = host.stats(&guests)?;
    let host_after = HostMemory::now()?;
    say(&format!(
        "resident fell from {} to {}; the kernel counts {} more memory available",
        Bytes(before.iter().map(|vm| vm.resident_bytes).sum()),
        Bytes(after.iter().map(|vm| vm.resident_bytes).sum()),
        Bytes(host_after.available.saturating_sub(host_before.available)),
    ));

    say("measuring throughput under the limits, and killing the engine in the middle");
    let (under_ops, killed_pid) = std::thread::scope(|scope| {
        let killer = scope.spawn(|| {
            std::thread::sleep(mix.duration / 2);
            host.kill_engine()
        });
        let ops = throughput(&mut guests, &mix);
        (ops, killer.join())
    });
    let (under_ops, killed_pid) = (under_ops?, killed_pid.map_err(|_| anyhow::anyhow!("the killer panicked"))??);
    let successor = host.api().host()?;
    ensure!(successor.engine_pid != killed_pid, "engine {killed_pid} was killed and still answers");
    say(&format!("engine {killed_pid} was killed; engine {} serves on", successor.engine_pid));

    say("reading back every key and comparing every byte");
    let verified = each(&mut guests, |guest| load::verify(guest.qemu.redis_addr(), &guest.data))?;
    let end = host.stats(&guests)?;

    say("removing the limits");
    for guest in &guests {
        host.api().set_limit(&guest.name, None)?;
    }
    let after_ops = throughput(&mut guests, &mix)?;

    let vms = (0..guests.len())
        .map(|i| VmReport {
            vm: guests[i].name.clone(),
            size_bytes: before[i].size_bytes,
            resident_before_bytes: before[i].resident_bytes,
            resident_after_bytes: after[i].resident_bytes,
            far_bytes: after[i].far_bytes,
            ops_per_s_before: before_ops[i],
            ops_per_s_under: under_ops[i],
            ops_per_s_after: after_ops[i],
            faults: end[i].faults.total(),
            kind: end[i].kind,
            restore_us_p50: of_pager(&end[i], end[i].restore_latency.p50_us),
            restore_us_p99: of_pager(&end[i], end[i].restore_latency.p99_us),
            keys: keys as u64,
            keys_verified: verified[i].verified as u64,
            bytes_lost: verified[i].bytes_lost,
        })
        .collect();
    let swap_bytes = host_after.zram.saturating_sub(host_before.zram);
    let claimed = report::freed(&before, &after).saturating_sub(swap_bytes);
    let report = Report {
        vms,
        freed_claimed_bytes: claimed,
        freed_measured_bytes: host_after.available.saturating_sub(host_before.available),
        freed_shmem_bytes: host_before.shmem.saturating_sub(host_after.shmem),
        store_bytes: after.iter().map(|vm| vm.store_bytes).sum(),
        swap_bytes,
        engine_kills: successor.engine_restarts,
        seconds: start.elapsed().as_secs_f64(),
    };
    report.print();
    ensure!(report.bytes_lost() == 0, "{} bytes were lost", report.bytes_lost());
    // Both figures count the whole host. MemAvailable does not show the freed memory if another program takes it
    // meanwhile. Shmem does: it counts guest RAM and the store.
    let freed = report.freed_measured_bytes.max(report.freed_shmem_bytes);
    ensure!(
        freed as f64 >= 0.9 * claimed as f64,
        "the table claims {} freed, but the kernel counts only {} less in use",
        Bytes(claimed),
        Bytes(freed)
    );
    Ok(())
}
