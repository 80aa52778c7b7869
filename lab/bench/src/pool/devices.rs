//! Disk and network of a real guest on memory of the daemon's pool, beside one on huge pages without Ballast (the
//! paper's figure 11).
//!
//! Before: the pool has as much as a guest's RAM, and the host as much in huge pages. After: there is a row.
//! Threads: the bench's one; guests are QEMUs. Units: MiB per second. Promise: both guests run all the time and take
//! turns; devices write to their memory (virtio-blk reads a file of the host's page cache, virtio-net serves a client
//! here). Under an emulated CPU only the ratio says something.

use std::fs::File;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ballast_base::{Bytes, KIB, MIB};
use ballast_testvm::qemu::load::{self, Dataset, Mix};
use ballast_testvm::qemu::{QemuGuest, qemu_missing};

use crate::booted::{TIMEOUT, words_before};
use crate::report::Row;
use crate::rig::Bench;

/// RAM of a guest.
pub(super) const RAM: Bytes = Bytes(512 * MIB);
/// The guest's disk, which is read from start to end without its page cache.
const DISK: u64 = 128 * MIB;
const VALUE: usize = 64 * KIB as usize;
const VALUES: usize = 256;
const SERVES: Duration = Duration::from_secs(3);
const AGAIN: Duration = Duration::from_millis(100);
/// What runs in the guest: Redis, and a read of the disk for each line.
const COMMAND: &str = "redis-server --port 6379 --bind 0.0.0.0 --protected-mode no --dir /tmp --loglevel warning & \
                       while read -r _; do \
                       dd if=/dev/vda of=/dev/null bs=1M iflag=direct; echo BALLAST-SAYS read; done";

/// A guest on either side.
struct Guest {
    qemu: QemuGuest,
    data: Dataset,
}

impl Guest {
    fn boot(bench: &mut Bench, on_pool: bool, disk: &str) -> Result<Self> {
        let name = bench.vm_name();
        let options = ["--pool=2M"];
        let prefix = words_before(on_pool.then_some((&*bench, &*name, &options[..])))?;
        let builder = QemuGuest::builder().name("bench").memory(RAM).run(COMMAND);
        let builder = if on_pool {
            builder.shared_memory(false)
        } else {
            let huge = "hugetlb=on,hugetlbsize=2M";
            builder.memory_object(&format!("memory-backend-memfd,id=ram0,size={},share=on,{huge}", RAM.0))
        };
        let drive = ["-drive".to_owned(), format!("file={disk},format=raw,if=virtio,readonly=on")];
        let mut qemu = builder.prefix(prefix).extra_args(drive).spawn()?;
        qemu.wait_ready(TIMEOUT)?;
        if on_pool {
            bench.daemon.wait_for_vm(&name)?;
        }
        let data = Dataset::new(VALUES, VALUE, 1);
        // Redis is not there as soon as the command runs.
        let start = Instant::now();
        while let Err(error) = load::load(qemu.redis_addr(), &data) {
            ensure!(start.elapsed() < TIMEOUT, error);
            std::thread::sleep(AGAIN);
        }
        Ok(Self { qemu, data })
    }

    /// Reads the disk once.
    fn disk(&mut self) -> Result<f64> {
        let began = Instant::now();
        self.qemu.tell("read")?;
        let said = self.qemu.answer(TIMEOUT)?;
        ensure!(said == "read", "the guest says {said:?}: {}", self.qemu.serial_log());
        Ok((DISK / MIB) as f64 / began.elapsed().as_secs_f64())
    }

    /// Serves values, of which each is compared.
    fn network(&mut self) -> Result<f64> {
        let mix = Mix { duration: SERVES, hot_keys: 1.0, writes: 0.0, ..Mix::default() };
        let done = load::throughput(self.qemu.redis_addr(), &mut self.data, &mix)?;
        let wrong = done.reads.wrong + done.reads.missing;
        ensure!(wrong == 0, "WRONG DATA: {wrong} values of Redis: {:?}", done.reads.first_wrong);
        Ok(done.ops_per_s() * VALUE as f64 / MIB as f64)
    }
}

/// The row.
pub(super) fn row(bench: &mut Bench, mut row: Row, rounds: u32) -> Result<Row> {
    row.fact("measures", "devices");
    row.fact("ram_bytes", RAM.0);
    if let Some(why) = qemu_missing() {
        row.because(&why);
    } else {
        let file = tempfile::NamedTempFile::new().context("Making a disk")?;
        fill(file.as_file()).context("Filling a disk")?;
        let disk = file.path().to_string_lossy().into_owned();
        let mut guests = [Guest::boot(bench, true, &disk)?, Guest::boot(bench, false, &disk)?];
        let mut rates: [[Vec<f64>; 2]; 2] = Default::default();
        let progress = bench.progress.clone();
        for round in progress.over("round", 0..=rounds) {
            for side in if round % 2 == 0 { [0, 1] } else { [1, 0] } {
                let measured = [guests[side].disk()?, guests[side].network()?];
                // The first round warms up.
                if round > 0 {
                    rates[side].iter_mut().zip(measured).for_each(|(all, rate)| all.push(rate));
                }
            }
        }
        let [pool, hugetlb] = &rates;
        for (at, name) in ["disk", "network"].into_iter().enumerate() {
            row.figure(&format!("pool_{name}_mib_per_s"), &pool[at]);
            row.figure(&format!("hugetlb_{name}_mib_per_s"), &hugetlb[at]);
            row.ratio(&format!("ratio_{name}_pool"), &pool[at], &hugetlb[at]);
        }
    }
    Ok(row)
}

/// Gives the file its bytes, so that the host has them in its page cache.
fn fill(file: &File) -> std::io::Result<()> {
    let bytes = Dataset::new(1, MIB as usize, 2).value(0);
    (0..DISK / MIB).try_for_each(|at| std::os::unix::fs::FileExt::write_all_at(file, &bytes, at * MIB))
}
