//! How much of the pool is lent, by the host's state: more while the host is short, and no more while it has spare
//! memory.
//!
//! Before: an operator said how much may be lent. After: `pool` lends from the reserve, or takes memory back.
//! Threads: the pool's. Units: bytes, milliseconds.
//! Promise: memory of VMs is not lent. Memory does not oscillate: it returns only when the host does not need it.

use ballast_base::{Bytes, HUGE_SIZE};
use ballast_policy::{HostSample, HostState, Ladder};
use ballast_pool::{Error, Reserve};

pub const POLL_EVERY_MS: u64 = 1_000;
/// Time before the next try, if nothing could be lent, because VMs have all of it, or nothing could be taken back,
/// because the kernel found no pages.
const AGAIN_MS: u64 = 10_000;
/// Multiple of the host's least free memory. That much is free after a loan, and stays free when memory returns: it is
/// well beyond the state `high`.
const AIM: u64 = 2;

#[derive(Debug, Default)]
pub struct Lender {
    ladder: Ladder,
    looked_ms: Option<u64>,
    not_before_ms: u64,
}

impl Lender {
    /// Checks the host if it is time, and lends or takes back. Returns a message for operators. The kernel may refuse.
    pub fn adjust(&mut self, reserve: &mut Reserve, at_ms: u64) -> Result<Option<String>, Error> {
        if self.looked_ms.is_some_and(|looked| at_ms < looked + POLL_EVERY_MS) {
            return Ok(None);
        }
        self.looked_ms = Some(at_ms);
        let Some(lending) = reserve.lending()? else { return Ok(None) };
        let sample = reserve.host_memory()?;
        let (free_bytes, min_free_bytes) = (sample.spare.0, HostSample::min_free(sample.total.0));
        let host = HostSample { free_bytes, min_free_bytes, ..HostSample::default() };
        let (state, _) = self.ladder.update(&host, at_ms);
        let before = reserve.lent();
        let aim = decide(state, free_bytes, min_free_bytes, before.0);
        let aim = aim.min(lending.most.0).max(lending.least.0);
        let is_back = aim < before.0;
        if aim == before.0 || at_ms < self.not_before_ms {
            return Ok(None);
        }
        reserve.lend(Bytes(aim), None)?;
        let now = reserve.lent();
        if now == before {
            self.not_before_ms = at_ms + AGAIN_MS;
        }
        Ok((now != before).then(|| {
            let why = if is_back { "has memory to spare" } else { "is short of memory" };
            format!("the host {why} ({} free): {now} of the pool are lent, {before} before", Bytes(free_bytes))
        }))
    }
}

fn decide(state: HostState, free: u64, min_free: u64, lent: u64) -> u64 {
    const SLICE: u64 = HUGE_SIZE as u64;
    let aim = min_free * AIM;
    match state {
        HostState::Soft | HostState::Hard | HostState::Low => {
            lent.saturating_add(aim.saturating_sub(free).next_multiple_of(SLICE))
        }
        // Lent memory that is in use is not free: only free memory beyond the aim returns.
        HostState::High => lent.saturating_sub(free.saturating_sub(aim) / SLICE * SLICE),
        HostState::Clear => lent,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_base::MIB;
    use ballast_pool::{Host, Want};
    use ballast_testkit::skip;
    use std::path::Path;

    const PAGES: &str = "sys/devices/system/node/node0/hugepages/hugepages-2048kB";

    fn host(root: &Path) -> Host {
        let write = |file: &str, text: &str| {
            let file = root.join(file);
            std::fs::create_dir_all(file.parent().expect("a folder")).expect("make");
            std::fs::write(file, text).expect("write");
        };
        write("sys/devices/system/node/has_memory", "0\n");
        let line = |key: &str, kib: u64| format!("Node 0 {key}: {kib} kB\n");
        let all = [("MemTotal", 16 << 20), ("MemFree", 8 << 20), ("Active(file)", 0), ("Inactive(file)", 0)];
        write("sys/devices/system/node/node0/meminfo", &all.map(|(key, kib)| line(key, kib)).concat());
        for (file, count) in [("nr_hugepages", 5), ("free_hugepages", 5), ("surplus_hugepages", 0)] {
            write(&format!("{PAGES}/{file}"), &format!("{count}\n"));
        }
        Host::at(root)
    }

    #[test]
    fn memory_is_lent_while_the_host_is_short_and_returns_even_in_the_next_engine() {
        if !rustix::process::geteuid().is_root() {
            return skip("root", "only root mounts file systems");
        }
        let root = tempfile::tempdir().expect("a directory");
        let place = tempfile::Builder::new().prefix("ballast-pool-").tempdir_in("/dev/shm").expect("a directory");
        let dir = place.path().join("pool");
        let host = host(root.path());
        let has = |mib: u64| {
            let text = format!("MemAvailable: {} kB\n", mib << 10);
            std::fs::write(root.path().join("proc/meminfo"), text).expect("write");
        };
        std::fs::create_dir_all(root.path().join("proc")).expect("make");
        has(8 << 10);
        let open = || Reserve::open(&dir, host.clone());
        let mut reserve = open().expect("open");
        let said = reserve.set_lending(Some(Bytes(MIB))).expect_err("no pool").to_string();
        assert!(said.contains("nothing is reserved"), "{said}");
        if let Err(why) = reserve.grow(Want::Bytes(Bytes(1 << 30)), None, None) {
            return skip("hugetlb", why);
        }
        let mount = dir.join(ballast_pool::FILES);
        finally(
            || drop(std::process::Command::new("umount").arg("--lazy").arg(&mount).status()),
            || {
                let pages = || host.pages(0).expect("pages").total;
                assert_eq!(pages(), 5 + 512);
                let mut lender = Lender::default();
                // No operator has allowed a loan.
                has(100);
                assert_eq!(lender.adjust(&mut reserve, 0).expect("adjusted"), None);
                has(8 << 10);
                let mut lender = Lender::default();
                reserve.lend(Bytes(32 * MIB), None).expect("lend");
                reserve.set_lending(Some(Bytes(512 * MIB))).expect("set");
                let mut adjust = |reserve: &mut Reserve, at_ms| lender.adjust(reserve, at_ms).expect("adjusted");
                assert_eq!((adjust(&mut reserve, 0), reserve.lent()), (None, Bytes(32 * MIB)), "the host is well");
                // 256 MiB must stay free; the aim is twice that.
                has(100);
                let told = adjust(&mut reserve, 1_000).expect("it is short");
                assert!(told.contains("is short of memory (100 MiB free): 444 MiB of the pool are lent"), "{told}");
                assert_eq!((reserve.lent(), pages()), (Bytes(444 * MIB), 5 + 512 - 222));
                assert_eq!(adjust(&mut reserve, 1_001), None, "not so soon again");
                has(50);
                assert!(adjust(&mut reserve, 2_000).is_some());
                assert_eq!(reserve.lent(), Bytes(512 * MIB), "and no more");
                drop(reserve);
                let mut reserve = open().expect("open");
                let mut lender = Lender::default();
                let mut adjust = |reserve: &mut Reserve, at_ms| lender.adjust(reserve, at_ms).expect("adjusted");
                assert_eq!((adjust(&mut reserve, 0), reserve.lent()), (None, Bytes(512 * MIB)));
                has(700);
                assert_eq!(adjust(&mut reserve, 1_000), None, "it has not been well for long");
                let back = adjust(&mut reserve, 7_000).expect("it is well");
                assert!(back.contains("has memory to spare"), "{back}");
                assert_eq!(reserve.lent(), Bytes(324 * MIB), "what it can spare");
                has(4 << 10);
                assert!(adjust(&mut reserve, 8_000).is_some());
                assert_eq!(
                    (reserve.lent(), pages()),
                    (Bytes(32 * MIB), 5 + 512 - 16),
                    "what was lent before, stays lent"
                );
                reserve.set_lending(None).expect("set");
                has(50);
                assert_eq!(adjust(&mut reserve, 9_000), None);
            },
        );
    }

    /// Runs `first`, and then `last` even if `first` panics.
    fn finally(last: impl FnOnce(), first: impl FnOnce()) {
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(first));
        last();
        if let Err(panic) = done {
            std::panic::resume_unwind(panic);
        }
    }
}
