//! The history of the host and of each VM, for charts: each is a ring of samples in a file.
//!
//! Before: the engine runs. After: the API has a sample for each 10 s of the last hour, and for each minute of the last
//! day. Files are in the runtime directory, so they outlive an engine, a keeper and an upgrade, and end with the host.
//! Threads: one writes; any may read. Units: in the names.
//! Promise: a ring takes [`BYTES`] of a tmpfs, and no memory of this process. A file that is damaged, or of another
//! build, is replaced by an empty one. A failed write costs one sample.

use std::collections::HashMap;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ballast_api::{History, HostStat, VmStat};
use ballast_base::PAGE_SIZE;
use ballast_sys::lock::Lock;

pub const STEP: Duration = Duration::from_secs(10);
/// Seconds per sample and number of samples: for the last hour, and for the last day.
const FINE: (u32, u32) = (10, 360);
const COARSE: (u32, u32) = (60, 1440);
const SAMPLE: usize = 36;
const MAGIC: [u8; 8] = *b"blsthst1";
pub const BYTES: usize = MAGIC.len() + (FINE.1 + COARSE.1) as usize * SAMPLE;
const _: () = assert!(BYTES <= 64 << 10);
/// The file of the host. Files of VMs have their ids as names.
const HOST: &str = "host";
const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Sample {
    at_unix_s: u32,
    size: u32,
    resident: u32,
    far: u32,
    zero: u32,
    limit: u32,
    other: u32,
    store: u32,
    stall_permille: u16,
    restores_per_s: u16,
}

#[derive(Clone, Copy, Debug, Default)]
struct Before {
    stall_us: u64,
    restored: u64,
    at_unix_s: u32,
}

#[derive(Debug)]
pub struct Past {
    dir: PathBuf,
    before: Mutex<HashMap<String, Before>>,
}

impl Sample {
    fn bytes(self) -> [u8; SAMPLE] {
        let words = [
            self.at_unix_s,
            self.size,
            self.resident,
            self.far,
            self.zero,
            self.limit,
            self.other,
            self.store,
            u32::from(self.stall_permille) | u32::from(self.restores_per_s) << 16,
        ];
        let mut bytes = [0; SAMPLE];
        for (place, word) in bytes.chunks_exact_mut(4).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    fn of(bytes: &[u8]) -> Self {
        let word = |at: usize| u32::from_le_bytes(bytes[at * 4..][..4].try_into().expect("four bytes"));
        Self {
            at_unix_s: word(0),
            size: word(1),
            resident: word(2),
            far: word(3),
            zero: word(4),
            limit: word(5),
            other: word(6),
            store: word(7),
            stall_permille: word(8) as u16,
            restores_per_s: (word(8) >> 16) as u16,
        }
    }
}

fn pages(bytes: u64) -> u32 {
    (bytes / PAGE_SIZE as u64).min(u64::from(NONE - 1)) as u32
}

fn now_s() -> u32 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() as u32)
}

fn place((step, count): (u32, u32), first: u32, at_unix_s: u32) -> u64 {
    (MAGIC.len() + (first + at_unix_s / step % count) as usize * SAMPLE) as u64
}

impl Past {
    pub fn new(dir: PathBuf) -> io::Result<Self> {
        DirBuilder::new().recursive(true).mode(0o700).create(&dir)?;
        Ok(Self { dir, before: Mutex::default() })
    }

    /// Takes a sample of the host and of all its VMs. `wss` returns the working set of a tracked VM. Rings of VMs that
    /// are gone are deleted.
    pub fn add(&self, host: &HostStat, vms: &[VmStat], wss: impl Fn(&str) -> Option<u64>) {
        self.add_at(now_s(), host, vms, wss);
    }

    fn add_at(&self, at_unix_s: u32, host: &HostStat, vms: &[VmStat], wss: impl Fn(&str) -> Option<u64>) {
        let mut before = self.before.locked();
        let (mut next, mut worst, mut restores) = (HashMap::new(), 0, 0u32);
        for vm in vms.iter().filter(|vm| is_name(&vm.id)) {
            let now = Before {
                stall_us: vm.stall.some.total_us,
                restored: vm.faults.restored_pages + vm.reclaim.prefetched_pages,
                at_unix_s,
            };
            let (stall_permille, restores_per_s) = rates(before.get(&vm.id), now);
            (worst, restores) = (worst.max(stall_permille), restores.saturating_add(restores_per_s.into()));
            let limit = vm.lower_limit();
            let sample = Sample {
                at_unix_s,
                size: pages(vm.size_bytes),
                resident: pages(vm.resident_bytes),
                far: pages(vm.far_bytes),
                zero: pages(vm.zero_bytes),
                limit: limit.map_or(NONE, pages),
                other: wss(&vm.name).map_or(NONE, pages),
                store: pages(vm.store_bytes),
                stall_permille,
                restores_per_s,
            };
            self.write(&vm.id, sample);
            next.insert(vm.id.clone(), now);
        }
        let all = Sample {
            at_unix_s,
            size: pages(host.size_bytes),
            resident: pages(host.resident_bytes),
            far: pages(host.far_bytes),
            zero: pages(host.zero_bytes),
            limit: NONE,
            other: pages(host.mem_available_bytes),
            store: pages(host.store_bytes),
            stall_permille: worst,
            restores_per_s: restores.min(u16::MAX.into()) as u16,
        };
        self.write(HOST, all);
        for gone in before.keys().filter(|id| !next.contains_key(*id)) {
            let _ = std::fs::remove_file(self.dir.join(gone));
        }
        *before = next;
    }

    /// Deletes the rings of VMs that are not among these, because they ended while no engine ran.
    pub fn keep_only(&self, ids: &[String]) {
        let Ok(entries) = std::fs::read_dir(&self.dir) else { return };
        let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
        for name in names.filter(|name| name != HOST && !ids.contains(name)) {
            let _ = std::fs::remove_file(self.dir.join(name));
        }
    }

    pub fn of_host(&self, minutes: u64) -> History {
        self.read(HOST, minutes)
    }

    pub fn of_vm(&self, id: &str, minutes: u64) -> History {
        if is_name(id) { self.read(id, minutes) } else { History::default() }
    }

    fn open(&self, name: &str) -> io::Result<File> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let file = options.open(self.dir.join(name))?;
        let mut magic = [0; MAGIC.len()];
        if file.metadata()?.len() != BYTES as u64 || file.read_exact_at(&mut magic, 0).is_err() || magic != MAGIC {
            file.set_len(0)?;
            file.set_len(BYTES as u64)?;
            file.write_all_at(&MAGIC, 0)?;
        }
        Ok(file)
    }

    fn write(&self, name: &str, sample: Sample) {
        let written = self.open(name).and_then(|file| {
            file.write_all_at(&sample.bytes(), place(FINE, 0, sample.at_unix_s))?;
            let at = place(COARSE, FINE.1, sample.at_unix_s);
            let mut bytes = [0; SAMPLE];
            file.read_exact_at(&mut bytes, at)?;
            let old = Sample::of(&bytes);
            let mut of_minute = sample;
            if old.at_unix_s / COARSE.0 == sample.at_unix_s / COARSE.0 {
                of_minute.stall_permille = of_minute.stall_permille.max(old.stall_permille);
                of_minute.restores_per_s = of_minute.restores_per_s.max(old.restores_per_s);
            }
            file.write_all_at(&of_minute.bytes(), at)
        });
        if let Err(error) = written {
            tracing::debug!(%error, name, "a sample of the past could not be written");
        }
    }

    fn read(&self, name: &str, minutes: u64) -> History {
        let (ring, first) = if minutes <= 60 { (FINE, 0) } else { (COARSE, FINE.1) };
        let mut history = History { step_s: ring.0, ..History::default() };
        let mut bytes = vec![0; ring.1 as usize * SAMPLE];
        let start = (MAGIC.len() + first as usize * SAMPLE) as u64;
        let read = File::open(self.dir.join(name)).and_then(|file| file.read_exact_at(&mut bytes, start));
        if read.is_err() {
            return history;
        }
        let since = u64::from(now_s()).saturating_sub(minutes * 60);
        let mut samples: Vec<Sample> = bytes.chunks_exact(SAMPLE).map(Sample::of).collect();
        samples.retain(|sample| u64::from(sample.at_unix_s) >= since && sample.at_unix_s > 0);
        samples.sort_by_key(|sample| sample.at_unix_s);
        let bytes = |pages: u32| u64::from(pages) * PAGE_SIZE as u64;
        for sample in samples {
            let number = |pages: u32| (pages != NONE).then(|| bytes(pages));
            history.at_unix_s.push(sample.at_unix_s);
            history.size_bytes.push(bytes(sample.size));
            history.resident_bytes.push(bytes(sample.resident));
            history.far_bytes.push(bytes(sample.far));
            history.zero_bytes.push(bytes(sample.zero));
            history.limit_bytes.push(number(sample.limit));
            history.other_bytes.push(number(sample.other));
            history.store_bytes.push(bytes(sample.store));
            history.stall_permille.push(sample.stall_permille);
            history.restores_per_s.push(sample.restores_per_s.into());
        }
        history
    }
}

fn is_name(id: &str) -> bool {
    !id.is_empty()
        && id != HOST
        && id.len() < 100
        && id.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
}

/// Stall in thousandths of the time, and restores per second.
fn rates(before: Option<&Before>, now: Before) -> (u16, u16) {
    let Some(before) = before.filter(|before| before.at_unix_s < now.at_unix_s) else { return (0, 0) };
    let seconds = u64::from(now.at_unix_s - before.at_unix_s);
    let stall = now.stall_us.saturating_sub(before.stall_us) / (seconds * 1000);
    let restores = now.restored.saturating_sub(before.restored) / seconds;
    (stall.min(1000) as u16, restores.min(u16::MAX.into()) as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vm(id: &str, resident_bytes: u64, restored: u64) -> VmStat {
        let mut vm =
            VmStat { id: id.into(), name: id.into(), size_bytes: 1 << 30, resident_bytes, ..VmStat::default() };
        vm.faults.restored_pages = restored;
        vm.stall.some.total_us = restored * 1000;
        vm
    }

    #[test]
    fn samples_are_read_in_order_even_by_the_next_engine() {
        let dir = tempfile::tempdir().expect("a directory");
        let now = now_s() / 60 * 60;
        let past = Past::new(dir.path().join("history")).expect("made");
        for number in 0..12 {
            let vms = [vm("a1", (number + 1) << 20, number * 50)];
            past.add_at(now - 120 + number as u32 * 10, &HostStat::default(), &vms, |_| None);
        }
        let next = Past::new(dir.path().join("history")).expect("it is there");
        let fine = next.of_vm("a1", 5);
        assert_eq!(fine.resident_bytes, (1..=12).map(|mib| mib << 20).collect::<Vec<u64>>());
        assert_eq!((fine.step_s, fine.restores_per_s[0], fine.restores_per_s[1]), (10, 0, 5));
        assert_eq!(fine.stall_permille[1..], [5; 11]);
        let coarse = next.of_vm("a1", 1440);
        assert_eq!((coarse.step_s, coarse.resident_bytes), (60, vec![6 << 20, 12 << 20]));
        assert_eq!(next.of_host(60).at_unix_s.len(), 12);
        assert_eq!(next.of_vm("other", 60).at_unix_s.len(), 0);
    }

    #[test]
    fn a_ring_ends_with_its_vm_and_a_damaged_file_is_started_anew() {
        let dir = tempfile::tempdir().expect("a directory");
        let past = Past::new(dir.path().to_owned()).expect("made");
        past.add(&HostStat::default(), &[vm("a1", 1, 0), vm("b2", 1, 0)], |_| None);
        assert_eq!(std::fs::metadata(dir.path().join("a1")).expect("a file").len(), BYTES as u64);
        past.add(&HostStat::default(), &[vm("b2", 1, 0)], |_| None);
        assert!(!dir.path().join("a1").exists() && dir.path().join("b2").exists());
        std::fs::write(dir.path().join("b2"), [7; 100]).expect("written");
        past.add(&HostStat::default(), &[vm("b2", 1 << 20, 0)], |_| None);
        assert_eq!(past.of_vm("b2", 60).resident_bytes, [1 << 20]);
        past.keep_only(&[]);
        assert!(!dir.path().join("b2").exists() && dir.path().join("host").exists());
    }

    #[test]
    fn no_id_is_a_path() {
        let dir = tempfile::tempdir().expect("a directory");
        let past = Past::new(dir.path().join("h")).expect("made");
        past.add(&HostStat::default(), &[vm("../x", 1, 0), vm("", 1, 0), vm("host", 1, 0)], |_| None);
        assert!(!dir.path().join("x").exists());
        assert_eq!(past.of_vm("../x", 60), History::default());
    }
}
