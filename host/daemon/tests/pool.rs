//! The pool in a real daemon: no VM finds another VM's data, when any process is killed at any time.
//!
//! A VM is this program again, run as a test that does nothing unless it is told to be one: it takes memory, searches
//! it for non-zero bytes, and writes a secret into each page until it is killed.

mod common;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use ballast_api::{LendRequest, PoolPages, PoolRequest, PoolStat, UpgradeRequest, UpgradeStage, VmClass};
use ballast_base::pool::{Nodes, Pages, Take};
use ballast_base::{Bytes, GIB, Hva, MIB, PAGE_SIZE};
use ballast_client::Ram;
use ballast_client::pool::take;
use ballast_pool::Reserve;
use ballast_testkit::random::Random;

use common::pooled::{Pooled, end, mapped};
use common::{missing, until};

const SECRET: u64 = 0x5ec2_e75e_c2e7_5ec2;
const BE_A_VM: &str = "BALLAST_TEST_POOL_VM";
/// Exit status of a VM that found another VM's data.
const FOUND: i32 = 77;

fn lend(bytes: u64) -> LendRequest {
    LendRequest { bytes, ..LendRequest::default() }
}

impl Pooled {
    fn vm(&self, name: &str, mib: u64) -> Child {
        let mut command = Command::new(std::env::current_exe().expect("own program"));
        command.args(["--exact", "a_vm_that_searches_for_others_data", "--nocapture"]);
        command.env(BE_A_VM, format!("{name} {mib} {}", self.dir.join("pool.sock").display()));
        command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("start")
    }

    fn searched(&self, vm: &mut Child, name: &str) {
        until("the VM has looked through all of its memory", || {
            let ended = vm.try_wait().expect("look").map(|status| status.code());
            assert_eq!(ended, None, "a VM found another one's memory ({FOUND}), or got none");
            self.dir.join(format!("{name}.searched")).exists()
        });
    }
}

#[test]
fn a_vm_that_searches_for_others_data() {
    let Ok(told) = std::env::var(BE_A_VM) else { return };
    let [name, mib, socket] = told.splitn(3, ' ').collect::<Vec<_>>()[..] else { panic!("{told}") };
    let size = Bytes(mib.parse::<u64>().expect("a number") * MIB);
    // Of a 1 GiB page, one word of each 64 bytes is searched and written.
    let (pages, step) = match name {
        _ if name.contains("gib") => (Pages::Gib, 8),
        _ => (Pages::Slices, 1),
    };
    // A VM on demand is attached before it touches anything.
    let pages = if name.starts_with("demand") { Pages::OnDemand } else { pages };
    let wanted = Take { name: name.into(), size, pages, nodes: Nodes::Any };
    let Ok(pieces) = take(Path::new(socket), &wanted) else { std::process::exit(0) };
    let map = mapped(&pieces);
    let attach = |pieces| {
        let ram = Ram { hva: Hva(map.addr() as u64), extents: pieces, guest_address: None };
        let builder = ballast_client::Client::builder().ram(ram).name(name);
        builder.socket(Path::new(socket).with_file_name("attach.sock")).attach()
    };
    let mut pieces = Some(pieces);
    let on_demand = (pages == Pages::OnDemand).then(|| attach(pieces.take().unwrap_or_default()));
    if let Some(Err(_)) = on_demand {
        std::process::exit(0);
    }
    for page in (0..map.len()).step_by(PAGE_SIZE) {
        let words = map.words(page, PAGE_SIZE / 8);
        if words.iter().step_by(step).any(|word| word.load(Ordering::Relaxed) != 0) {
            std::process::exit(FOUND);
        }
        words.iter().step_by(step).for_each(|word| word.store(SECRET, Ordering::Relaxed));
    }
    std::fs::write(Path::new(socket).with_file_name(format!("{name}.searched")), "").expect("say so");
    let _attached = pieces.filter(|_| name.starts_with("managed")).map(|pieces| attach(pieces).expect("attach"));
    // A failed test leaves no VM behind.
    let parent = rustix::process::getppid();
    while rustix::process::getppid() == parent {
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_managed_vm_pages_in_huge_pages_of_the_pool_without_a_write_back_at_its_end() {
    let Some(pooled) = Pooled::start("", 64) else { return };
    if missing("uffd", ballast_sys::Uffd::create(ballast_sys::uffd::HUGETLB_FEATURES).err()) {
        return;
    }
    let mut vm = pooled.vm("managed", 40);
    let api = &pooled.daemon().api;
    until("the VM is attached", || api.vm("managed").is_ok_and(|vm| vm.resident_bytes == 40 * MIB));
    api.set_limit("managed", Some(20 * MIB)).expect("limit");
    until("half of it is far", || api.vm("managed").is_ok_and(|vm| vm.far_bytes >= 20 * MIB));
    end(&mut vm);
    pooled.settled(64);
    let events = api.events().expect("events");
    assert!(events.iter().all(|event| event.kind != "writing-back"), "{events:?}");
    assert_eq!(pooled.pages(), 32);
    let mut next = pooled.vm("next", 64);
    pooled.searched(&mut next, "next");
    end(&mut next);
}

#[test]
fn memory_of_a_killed_vm_returns_zeroed_and_a_new_engine_knows_all_owners() {
    let Some(pooled) = Pooled::start("", 64) else { return };
    let mut vm = pooled.vm("first", 32);
    // Until the VM has received its memory, it requests it from the next engine again.
    pooled.searched(&mut vm, "first");
    assert!(pooled.stat().vms.iter().any(|vm| vm.name == "first" && vm.bytes == 32 * MIB));
    pooled.daemon().replace_engine();
    until("the next engine has the pool", || pooled.stat().nodes.iter().any(|node| node.used_bytes == 32 * MIB));
    assert_eq!(pooled.stat().vms[0].name, "first");
    end(&mut vm);
    let mut next = pooled.vm("next", 64);
    pooled.searched(&mut next, "next");
    end(&mut next);
    pooled.settled(64);
    assert_eq!(pooled.pages(), 32);
    let lent = pooled.daemon().api.lend_pool(&lend(64 * MIB)).expect("lend");
    assert_eq!((lent.nodes[0].lent_bytes, pooled.pages()), (64 * MIB, 0));
    // A loan for the time that the host is short, up to an amount: the next engine keeps it until another command.
    let when_short = LendRequest { when_short: true, ..lend(128 * MIB) };
    let set = pooled.daemon().api.lend_pool(&when_short).expect("lend");
    assert_eq!((set.lent_when_short_bytes, set.nodes[0].lent_bytes), (128 * MIB, 64 * MIB));
    pooled.daemon().replace_engine();
    until("the next engine has the pool", || pooled.stat().lent_when_short_bytes == 128 * MIB);
    let said = pooled.daemon().api.lend_pool(&LendRequest { node: Some(0), ..when_short }).expect_err("of a node");
    assert!(said.to_string().contains("of all nodes"), "{said}");
    let ended = pooled.daemon().api.lend_pool(&lend(64 * MIB)).expect("lend");
    assert_eq!(ended.lent_when_short_bytes, 0);
    let said = pooled.daemon().api.lend_pool(&LendRequest { node: Some(99), ..lend(0) }).expect_err("no such node");
    assert!(said.to_string().contains("the pool has no node 99"), "{said}");
}

#[test]
fn a_vm_on_pages_of_a_gib_is_pinned_through_deaths_and_the_next_finds_zeros() {
    let Some(mut pooled) = Pooled::of("", 2 << 10, PoolPages::Gib) else { return };
    if missing("uffd", ballast_sys::Uffd::create(ballast_sys::uffd::HUGETLB_FEATURES).err()) {
        return;
    }
    let name = "managed-gib";
    let mut vm = pooled.vm(name, 1 << 10);
    let is_pinned = |pooled: &Pooled| {
        pooled.daemon().api.vm(name).is_ok_and(|vm| vm.class == VmClass::Pinned && vm.resident_bytes == GIB)
    };
    until("the VM is attached and pinned", || is_pinned(&pooled));
    let api = &pooled.daemon().api;
    let why = api.vm(name).expect("it is there").status_reason.unwrap_or_default();
    assert!(why.contains("pages of 1 GiB"), "{why}");
    let said = api.set_limit(name, Some(512 * MIB)).expect_err("a limit").to_string();
    assert!(said.contains("pages of 1 GiB"), "{said}");
    let has = |pooled: &Pooled, used: u64| {
        let pool = pooled.stat();
        pool.nodes.iter().map(|node| node.used_bytes).sum::<u64>() == used && pool.vms.len() == usize::from(used > 0)
    };
    pooled.daemon().replace_engine();
    until("the next engine has the pool and the VM", || has(&pooled, GIB) && is_pinned(&pooled));
    for with_engine in [false, true] {
        pooled.daemon.as_mut().expect("it runs").kill_and_restart_keeper(with_engine);
        until("the next keeper's engine has both", || has(&pooled, GIB) && is_pinned(&pooled));
    }
    // Only zeroed memory is lent, and the new engine zeroes the free page once more.
    pooled.settled(1 << 10);
    let lent = pooled.daemon().api.lend_pool(&LendRequest { pages: PoolPages::Gib, ..lend(2 * GIB) }).expect("lend");
    let gib = lent.gib.expect("it is there");
    assert_eq!((gib.nodes[0].lent_bytes, pooled.pages()), (GIB, 1), "{:?}", gib.notes);
    end(&mut vm);
    until("its page is back", || has(&pooled, 0));
    pooled.settled(1 << 10);
    let mut next = pooled.vm("next-gib", 1 << 10);
    pooled.searched(&mut next, "next-gib");
    end(&mut next);
    pooled.settled(1 << 10);
    assert_eq!(pooled.pages(), 1, "a page is lost, or one too many");
    let metrics = pooled.daemon().api.metrics().expect("metrics");
    assert!(metrics.contains("ballast_pool_ready_gib_bytes{node=\"0\",pages=\"1G\"} 1073741824"), "{metrics}");
}

struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn memory_is_taken_and_lent_during_upgrades_and_no_request_is_refused() {
    let Some(pooled) = Pooled::start("", 64) else { return };
    let this = PathBuf::from(env!("CARGO_BIN_EXE_ballastd"));
    let other = pooled.dir.join("ballastd-other");
    let next = std::env::var_os("BALLAST_NEXT").map_or_else(|| this.clone(), PathBuf::from);
    std::os::unix::fs::symlink(next, &other).expect("a link");
    let (stop, taken, lent) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    let (api, socket) = (&pooled.daemon().api, pooled.dir.join("pool.sock"));
    let takes = |name: &str| {
        while !stop.load(Ordering::Relaxed) {
            let size = Bytes(12 * MIB);
            let pieces = take(&socket, &Take { name: name.into(), size, pages: Pages::Slices, nodes: Nodes::Any });
            let pieces = pieces.unwrap_or_else(|error| panic!("{error}\n{}", pooled.daemon().log()));
            let map = mapped(&pieces);
            for page in (0..map.len()).step_by(PAGE_SIZE) {
                let word = &map.words(page, 1)[0];
                assert_eq!(word.swap(SECRET, Ordering::Relaxed), 0, "another VM's memory was there");
            }
            taken.fetch_add(1, Ordering::Relaxed);
        }
    };
    let lends = || {
        let api = ballast_api::Client::new(pooled.dir.join("api.sock")).expect("client");
        while !stop.load(Ordering::Relaxed) {
            let bytes = if lent.load(Ordering::Relaxed) % 2 == 0 { 8 * MIB } else { 0 };
            api.lend_pool(&lend(bytes)).expect("lent");
            let pool = api.pool().expect("the pool");
            let all: u64 = pool.nodes.iter().map(|node| node.reserved_bytes + node.lent_bytes).sum();
            assert_eq!(all, 64 * MIB, "an engine that has not got the pool answered");
            lent.fetch_add(1, Ordering::Relaxed);
        }
    };
    std::thread::scope(|scope| {
        // Even if this thread panics.
        let _stop = Stop(&stop);
        let threads = [scope.spawn(|| takes("one")), scope.spawn(|| takes("two")), scope.spawn(lends)];
        for round in 0..6 {
            let counts = || [&taken, &lent].map(|count| count.load(Ordering::Relaxed));
            let before = counts();
            let alive = || assert!(threads.iter().all(|thread| !thread.is_finished()), "it ended too early");
            let program = if round % 2 == 0 { &other } else { &this };
            let program = Some(program.display().to_string());
            until("it begins", || api.begin_upgrade(&UpgradeRequest { program: program.clone() }).is_ok());
            until("the upgrade is done", || {
                let stage = api.upgrade().expect("answered").stage;
                assert_ne!(stage, UpgradeStage::Failed, "{}", pooled.daemon().log());
                stage == UpgradeStage::Done
            });
            until("memory was taken and lent meanwhile", || {
                alive();
                counts().iter().zip(before).all(|(now, before)| *now > before + 1)
            });
        }
    });
    api.lend_pool(&lend(0)).expect("all is taken back");
    until("nobody has memory", || pooled.stat().vms.is_empty());
    pooled.settled(64);
    assert_eq!(pooled.pages(), 32, "a page is lost, or one too many");
}

#[test]
fn no_vm_finds_anothers_memory_and_no_page_is_lost_whatever_is_killed() {
    let Some(mut pooled) = Pooled::start("", 64) else { return };
    let kills = std::env::var("BALLAST_POOL_KILLS").ok().and_then(|text| text.parse().ok()).unwrap_or(20);
    let lent = |pool: &PoolStat| pool.nodes.first().map(|node| node.lent_bytes);
    let mut rng = Random::seeded("BALLAST_POOL_SEED");
    let mut vms: Vec<Child> = Vec::new();
    let mut lenders = Vec::new();
    let is_on_demand_there = ballast_sys::Uffd::create(ballast_sys::uffd::HUGETLB_FEATURES).is_ok();
    if is_on_demand_there && pooled.host.nodes().expect("nodes").len() == 1 {
        let more = PoolRequest { bytes: Some(64 * MIB), overcommit_percent: Some(150), ..PoolRequest::default() };
        pooled.daemon().api.reserve_pool(&more).expect("more may be promised");
    }
    let end = |mut vm: Child| {
        let _ = vm.kill();
        let status = vm.wait().expect("reap");
        assert_ne!(status.code(), Some(FOUND), "a VM found another one's memory");
    };
    for number in 0..kills {
        // Some request more than is left, and wait for another VM's memory.
        let kind = if is_on_demand_there && rng.index(3) == 0 { "demand" } else { "vm" };
        vms.push(pooled.vm(&format!("{kind}-{number}"), [2, 10, 16, 24, 40][rng.index(5)]));
        std::thread::sleep(Duration::from_millis(rng.index(40) as u64));
        match rng.index(6) {
            0 => {
                // The last engine may be dead, and the next one not started.
                if let Some(old) = pooled.daemon().engine_pid() {
                    common::kill(old);
                    if rng.index(2) == 0 {
                        pooled.daemon().wait_for_engine_after(old);
                    }
                }
            }
            1 => {
                // The current engine may be about to end.
                let daemon = pooled.daemon.as_mut().expect("it runs");
                if let Some(engine) = daemon.engine_pid() {
                    daemon.kill_and_restart_keeper_of(engine, rng.index(2) == 0);
                }
            }
            2 | 3 => {
                // The next round sometimes kills the daemon in the middle of the loan.
                let api = ballast_api::Client::new(pooled.dir.join("api.sock")).expect("client");
                let bytes = rng.index(40) as u64 * MIB;
                let lender = move || drop(api.lend_pool(&lend(bytes)));
                lenders.push(std::thread::spawn(lender));
            }
            _ => {}
        }
        while vms.len() > 3 {
            let which = rng.index(vms.len());
            end(vms.swap_remove(which));
        }
    }
    vms.into_iter().for_each(end);
    // A request that was cut off is repeated: only now is none in progress.
    lenders.into_iter().for_each(|lender| lender.join().expect("joined"));
    until("all is taken back", || {
        let taken = pooled.daemon().api.lend_pool(&lend(0));
        taken.is_ok_and(|pool| lent(&pool) == Some(0))
    });
    // A request of a dead VM may still be answered, and its memory returns.
    until("nobody has memory", || pooled.stat().vms.is_empty());
    pooled.settled(64);
    assert_eq!(pooled.pages(), 32, "a page is lost, or one too many");
    // Without VMs, the pool must be whole.
    let daemon = pooled.daemon.as_mut().expect("it runs");
    let engine = daemon.engine_pid();
    daemon.kill_keeper();
    if let Some(engine) = engine {
        common::kill(engine);
    }
    let mut opened = None;
    until("the engine is gone", || {
        opened = Reserve::open(&pooled.part(), pooled.host.clone()).ok();
        opened.is_some()
    });
    opened.expect("opened").validate().expect("valid");
}
