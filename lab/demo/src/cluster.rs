//! `ballast demo --cluster`: a VM's cold memory on a cluster of six servers, one of which is killed in the middle.
//!
//! Before: `scripts/valkey.sh` unpacked a server, and the guest image is there. After: a small table; every process
//! that the demo started has ended. Threads: one that kills. Units: MiB in the table.
//! Promise: every figure is measured in this run; *bytes lost* comes from comparing every byte of every key.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use ballast_api::VmStat;
use ballast_base::Bytes;
use ballast_base::units::{GIB, MIB};
use ballast_testhost::until;
use ballast_testvm::qemu::load::{self, Dataset, Mix};
use ballast_testvm::valkey::{Layout, Valkey, valkey_missing};

use crate::guest::{each, throughput};
use crate::host::{BOOT_TIMEOUT, DemoArgs, Host, LIMIT_TIMEOUT, Missing, VALUE};
use crate::report::{mib, print_table};

pub(super) fn run(args: &DemoArgs) -> Result<()> {
    if let Some(why) = valkey_missing() {
        return Err(Missing(why).into());
    }
    let start = Instant::now();
    let say = |text: &str| println!("[{:5.1} s] {text}", start.elapsed().as_secs_f64());
    say("starting a cluster: three primaries, each with a replica");
    let layout = Layout { maxmemory: Bytes(GIB), ..Layout::default() };
    let mut valkey = Valkey::start(layout).context("Starting a cluster")?;
    let settings = format!("[remote]\nnodes = [{:?}]\nbudget = \"1G\"\nafter_s = 1\n", valkey.addr(1));
    let host = Host::with_settings(&settings)?;
    say("booting an unmodified Debian guest with Redis under `ballast run`");
    let mut guests = vec![host.boot("demo-c", args.memory)?];
    guests[0].qemu.wait_ready(BOOT_TIMEOUT)?;
    let keys = (args.data.0 as usize / VALUE).max(1);
    say(&format!("loading {} into it from the host: {keys} keys of {VALUE} bytes", args.data));
    guests[0].data = Dataset::new(keys, VALUE, 1);
    each(&mut guests, |guest| load::load(guest.qemu.redis_addr(), &guest.data))?;
    let mix = Mix { duration: Duration::from_secs(args.seconds), ..Mix::default() };
    let before_ops = throughput(&mut guests, &mix)?[0];
    let before = host.stats(&guests)?.remove(0);
    let limit = before.resident_bytes / 2 / MIB * MIB;
    say(&format!("limiting it to half of what it holds, {}; what is cold goes on to the cluster", Bytes(limit)));
    host.api().set_limit(&guests[0].name, Some(limit))?;
    host.wait_for_limits(&guests, &[limit])?;
    let there = wait_until_there(&host, &guests[0].name)?;
    say(&format!("{} of {} far are in the cluster alone", Bytes(there.far_remote_bytes), Bytes(there.far_bytes)));

    say("measuring throughput, and killing a primary in the middle");
    let (ops, killed) = std::thread::scope(|scope| {
        let killer = scope.spawn(|| {
            std::thread::sleep(mix.duration / 2);
            valkey.kill(0);
        });
        (throughput(&mut guests, &mix), killer.join())
    });
    killed.map_err(|_| anyhow!("the killer panicked"))?;
    let killed_ops = ops?[0];
    say("its replica has taken over; reading back every key and comparing every byte");
    let verified = each(&mut guests, |guest| load::verify(guest.qemu.redis_addr(), &guest.data))?.remove(0);
    let after_ops = throughput(&mut guests, &mix)?[0];
    let end = host.stats(&guests)?.remove(0);
    let header = [
        "VM",
        "resident\nbefore MiB",
        "resident\nafter MiB",
        "far\nMiB",
        "in the\ncluster MiB",
        "ops/s\nbefore",
        "ops/s, node\nkilled",
        "ops/s\nafter",
        "longest\nwait ms",
        "keys\nverified",
        "bytes\nlost",
    ];
    let row = [
        guests[0].name.clone(),
        mib(before.resident_bytes),
        mib(there.resident_bytes),
        mib(there.far_bytes),
        mib(there.far_remote_bytes),
        format!("{before_ops:.0}"),
        format!("{killed_ops:.0}"),
        format!("{after_ops:.0}"),
        // The longest time that a thread of the guest waited for a page.
        format!("{:.0}", end.fault_latency.max_us / 1e3),
        format!("{} of {keys}", verified.verified),
        verified.bytes_lost.to_string(),
    ];
    print_table(header, std::iter::once(row));
    println!(
        "One of {} servers was killed; the guest waited for its pages until the replica had its slots. {:.0} s in all.",
        valkey.len(),
        start.elapsed().as_secs_f64()
    );
    println!("Where to go next: docs/remote.md for a cluster of your own.");
    ensure!(verified.bytes_lost == 0, "{} bytes were lost", verified.bytes_lost);
    Ok(())
}

fn wait_until_there(host: &Host, name: &str) -> Result<VmStat> {
    until("most far pages are not in the cluster", LIMIT_TIMEOUT, || {
        let is_there = |stat: &VmStat| stat.far_remote_bytes > 0 && stat.far_remote_bytes * 10 >= stat.far_bytes * 8;
        Ok(Some(host.api().vm(name)?).filter(is_there))
    })
}
