//! Memory of the pool that is allocated on demand: the engine handles each first touch, even after any process was
//! killed, and a touch waits where no page is free.
//!
//! A VM is this program again, run as a test that does nothing unless it is told to be one. A file tells it how much to
//! touch, and it checks all of that again and again.

mod common;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering;
use std::time::Duration;

use ballast_api::policy::Kind;
use ballast_api::{LendRequest, PolicyPatch, PoolRequest, VmClass, VmPatch, VmStat};
use ballast_base::pool::{Nodes, Pages, Take};
use ballast_base::{Bytes, HUGE_SIZE, Hva, MIB};
use ballast_client::pool::take;
use ballast_client::{Client, Ram};
use ballast_sys::{Mapping, memfd};

use common::pooled::{Pooled, mapped};
use common::{missing, until};

const BE_A_VM: &str = "BALLAST_TEST_ON_DEMAND_VM";
const POOL: u64 = 64;
const VM: u64 = 40;
const GREEDY: usize = 4;

fn secret(at: usize) -> u64 {
    at as u64 ^ 0x5ec2_e75e_c2e7_5ec2
}

/// The last order to a VM: its number, how many MiB to touch, and whether repeatedly.
fn told(dir: &Path, name: &str) -> Option<(u64, u64, bool)> {
    let text = std::fs::read_to_string(dir.join(format!("{name}.told"))).ok()?;
    let mut words = text.split(' ').map(|word| word.parse().ok());
    Some((words.next()??, words.next()??, words.next()?? > 0))
}

fn say(dir: &Path, file: &str, text: &str) {
    std::fs::write(dir.join("new").with_extension(file), text).expect("write");
    std::fs::rename(dir.join("new").with_extension(file), dir.join(file)).expect("rename");
}

/// Checks each word of these 2 MiB, or writes it for the first time.
fn look(map: &Mapping, at: usize, is_new: bool) {
    for (number, word) in map.words(at, HUGE_SIZE / 8).iter().enumerate() {
        let (place, expected) = (at + number * 8, if is_new { 0 } else { secret(at + number * 8) });
        assert_eq!(word.load(Ordering::Relaxed), expected, "at {place:#x}, touched before: {}", !is_new);
        if is_new {
            word.store(secret(place), Ordering::Relaxed);
        }
    }
}

#[test]
fn a_vm_that_touches_as_much_as_it_is_told() {
    let Ok(what) = std::env::var(BE_A_VM) else { return };
    let [name, mib, nodes, dir] = what.splitn(4, ' ').collect::<Vec<_>>()[..] else { panic!("{what}") };
    let nodes = if nodes == "any" { Nodes::Any } else { nodes.parse().expect("nodes") };
    let (size, dir) = (Bytes(mib.parse::<u64>().expect("a size") * MIB), Path::new(dir));
    let wanted = Take { name: name.into(), size, pages: Pages::OnDemand, nodes };
    let pieces = take(&dir.join("pool.sock"), &wanted).expect("memory");
    let map = mapped(&pieces);
    let ram = Ram { hva: Hva(map.addr() as u64), extents: pieces, guest_address: None };
    let _client = Client::builder().ram(ram).name(name).socket(dir.join("attach.sock")).attach().expect("attach");
    let parent = rustix::process::getppid();
    let (mut touched, mut done) = (0, 0);
    while rustix::process::getppid() == parent {
        let Some((order, mib, again)) = told(dir, name).filter(|(order, ..)| *order != done) else {
            std::thread::sleep(Duration::from_millis(5));
            continue;
        };
        let (end, threads) = ((mib * MIB) as usize, if again { GREEDY } else { 1 });
        loop {
            std::thread::scope(|scope| {
                for thread in 0..threads {
                    let mine = (thread * HUGE_SIZE..end).step_by(threads * HUGE_SIZE);
                    let map = &map;
                    scope.spawn(move || mine.for_each(|at| look(map, at, at >= touched)));
                }
            });
            touched = touched.max(end);
            say(dir, &format!("{name}.done"), &order.to_string());
            let is_over = told(dir, name).is_none_or(|now| now.0 != order) || rustix::process::getppid() != parent;
            if is_over || !again {
                break;
            }
        }
        done = order;
    }
}

struct Vm {
    process: Child,
    dir: PathBuf,
    name: &'static str,
    orders: u64,
}

impl Vm {
    fn start(pooled: &Pooled, name: &'static str, mib: u64) -> Self {
        Self::of(pooled, name, mib, "any")
    }

    fn of(pooled: &Pooled, name: &'static str, mib: u64, nodes: &str) -> Self {
        let mut command = Command::new(std::env::current_exe().expect("own program"));
        command.args(["--exact", "a_vm_that_touches_as_much_as_it_is_told", "--nocapture"]);
        command.env(BE_A_VM, format!("{name} {mib} {nodes} {}", pooled.dir.display())).stdout(Stdio::null());
        let process = command.spawn().expect("start");
        let vm = Self { process, dir: pooled.dir.clone(), name, orders: 0 };
        let is_served = || pooled.daemon().api.vm(name).is_ok_and(|vm| vm.registered_bytes == mib * MIB);
        until("the VM is attached and served", is_served);
        vm
    }

    fn pages_by_node(&self) -> BTreeMap<u32, u64> {
        let maps = std::fs::read_to_string(format!("/proc/{}/numa_maps", self.process.id())).expect("its maps");
        let mut pages = BTreeMap::new();
        for word in maps.lines().filter(|line| line.contains("/on-demand-")).flat_map(|line| line.split(' ')) {
            if let Some((node, count)) = word.strip_prefix('N').and_then(|word| word.split_once('=')) {
                *pages.entry(node.parse().expect("a node")).or_default() += count.parse::<u64>().expect("a number");
            }
        }
        pages
    }

    fn order(&mut self, mib: u64, again: bool) {
        self.orders += 1;
        say(&self.dir, &format!("{}.told", self.name), &format!("{} {mib} {}", self.orders, u8::from(again)));
    }

    /// Makes it touch `mib` MiB, and check them.
    fn tell(&mut self, mib: u64) {
        self.order(mib, false);
    }

    fn is_done(&mut self) -> bool {
        assert_eq!(self.process.try_wait().expect("look").map(|status| status.to_string()), None, "it ended");
        let done = std::fs::read_to_string(self.dir.join(format!("{}.done", self.name)));
        done.is_ok_and(|text| text == self.orders.to_string())
    }

    fn goes_on(&mut self) {
        until("it has touched and looked at it", || self.is_done());
    }

    fn touch(&mut self, mib: u64) {
        self.tell(mib);
        self.goes_on();
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn pool() -> Option<Pooled> {
    pool_of(1, POOL)
}

fn pool_of(nodes: usize, mib: u64) -> Option<Pooled> {
    let has = ballast_pool::Host::default().nodes().expect("nodes").len();
    let needs = if nodes == 1 { "one-node" } else { "numa" };
    if missing("uffd", ballast_sys::Uffd::create(ballast_sys::uffd::HUGETLB_FEATURES).err())
        || missing(needs, (has != nodes).then(|| format!("this machine has {has} nodes")))
    {
        return None;
    }
    let pooled = Pooled::start("quarantine_ms = 50\n", mib)?;
    pooled.settled(mib);
    Some(pooled)
}

#[test]
fn a_vm_on_demand_has_what_it_touched_and_the_rest_is_promised_even_after_any_kill() {
    let Some(mut pooled) = pool() else { return };
    let mut vm = Vm::start(&pooled, "demand", VM);
    let mib = |bytes: u64| bytes / MIB;
    let seen = |pooled: &Pooled| {
        let pool = pooled.stat();
        assert_eq!(pool.vms.iter().map(|vm| (&*vm.name, vm.bytes)).collect::<Vec<_>>(), [("demand", VM * MIB)]);
        (mib(pool.promised_bytes), mib(pool.touched_bytes), mib(pool.aside_bytes))
    };
    assert_eq!(seen(&pooled), (VM, 0, VM));
    let stat = |pooled: &Pooled| -> VmStat { pooled.daemon().api.vm("demand").expect("it is there") };
    let vm_now = stat(&pooled);
    assert_eq!((vm_now.resident_bytes, vm_now.size_bytes, vm_now.registered_bytes), (0, VM * MIB, VM * MIB));
    vm.touch(10);
    assert_eq!(seen(&pooled), (VM, 10, VM));
    // The pool promises no more than it has: to a VM, in either way, or to the host.
    for pages in [Pages::OnDemand, Pages::Slices] {
        let wanted = Take { name: "next".into(), size: Bytes(32 * MIB), pages, nodes: Nodes::Any };
        let said = take(&pooled.dir.join("pool.sock"), &wanted).expect_err("too much").to_string();
        assert!(said.contains("40 MiB are promised to VMs on demand, and 24 MiB are left"), "{said}");
    }
    let there = Nodes::One(99);
    let wanted = Take { name: "next".into(), size: Bytes(2 * MIB), pages: Pages::OnDemand, nodes: there };
    let said = take(&pooled.dir.join("pool.sock"), &wanted).expect_err("of a node").to_string();
    assert!(said.contains("the pool has no node 99"), "{said}");
    let lend = |bytes| LendRequest { bytes, ..LendRequest::default() };
    let lent = pooled.daemon().api.lend_pool(&lend(POOL * MIB)).expect("lend");
    assert!(lent.nodes[0].lent_bytes <= (POOL - VM) * MIB, "{lent:?}");
    pooled.daemon().api.lend_pool(&lend(0)).expect("take back");

    // Touches wait for the next engine, and find zeros there. That engine sets aside as much as its predecessor.
    let old = pooled.daemon().engine_pid().expect("it runs");
    common::kill(old);
    vm.tell(20);
    pooled.daemon().wait_for_engine_after(old);
    vm.goes_on();
    for with_engine in [false, true] {
        let daemon = pooled.daemon.as_mut().expect("it runs");
        vm.tell(if with_engine { 30 } else { 24 });
        daemon.kill_and_restart_keeper(with_engine);
        vm.goes_on();
    }
    // It sets pages aside in the first round after it has opened the pool.
    until("the next engine has the pool", || {
        let pool = pooled.stat();
        !pool.vms.is_empty() && mib(pool.aside_bytes) == VM
    });
    assert_eq!(seen(&pooled), (VM, 30, VM));

    // The VM is paged as any other on huge pages, and its free pages are for the next touches.
    pooled.daemon().api.set_limit("demand", Some(16 * MIB)).expect("limit");
    until("it is within its limit", || {
        let vm = stat(&pooled);
        vm.resident_bytes <= 16 * MIB && vm.far_bytes > 0
    });
    vm.touch(VM);
    until("it is held to its limit", || {
        let (promised, touched, _) = seen(&pooled);
        promised == VM && touched <= 24
    });
    pooled.daemon().api.set_limit("demand", None).expect("no limit");
    vm.touch(VM);
    drop(vm);
    until("nothing is promised", || pooled.stat().promised_bytes == 0);
    pooled.settled(POOL);
    assert_eq!((pooled.pages(), pooled.stat().aside_bytes), (POOL / 2, 0), "a page is lost, or one too many");
}

#[test]
fn a_first_touch_without_a_free_page_waits_until_another_page_of_the_vm_is_far() {
    let Some(pooled) = pool() else { return };
    let mut vm = Vm::start(&pooled, "demand", VM);
    vm.touch(20);
    // Another user of huge pages has all free ones.
    let free = pooled.host.pages(0).expect("pages").free;
    let size = free * HUGE_SIZE as u64;
    let hog = memfd::create_huge("hog", Bytes(size)).expect("a file");
    memfd::allocate(&hog, 0, size).expect("all free pages");
    assert_eq!(pooled.host.pages(0).expect("pages").free, 0);
    let waited = || pooled.daemon().api.vm("demand").expect("it is there").stall.some.total_us;
    let before = waited();
    vm.tell(24);
    until("a touch waits", || waited() > before + 200_000);
    let before = pooled.daemon().api.vm("demand").expect("it is there").resident_bytes;
    assert_eq!(before, 20 * MIB);
    // The kernel must not handle the touch, which would end the VM; eviction of its other pages makes room.
    pooled.daemon().api.set_limit("demand", Some(16 * MIB)).expect("limit");
    vm.goes_on();
    drop(hog);
    // Other memory without a limit is unregistered; memory on demand is not.
    pooled.daemon().api.set_limit("demand", None).expect("no limit");
    let all_is_registered = || pooled.daemon().api.vm("demand").is_ok_and(|vm| vm.registered_bytes == VM * MIB);
    assert!(all_is_registered());
    vm.touch(VM);
    assert!(all_is_registered());
    drop(vm);
    pooled.settled(POOL);
    assert_eq!(pooled.pages(), POOL / 2, "a page is lost, or one too many");
}

fn overcommit(pooled: &Pooled, mib: u64) {
    let request = PoolRequest { bytes: Some(mib * MIB), overcommit_percent: Some(150), ..PoolRequest::default() };
    let pool = pooled.daemon().api.reserve_pool(&request).expect("reserve");
    assert_eq!((pool.overcommit_percent, pool.for_demand_bytes), (150, mib * MIB));
}

/// The reason why the pool does not promise this much more.
fn refusal(pooled: &Pooled, mib: u64, pages: Pages, nodes: Nodes) -> String {
    let wanted = Take { name: "next".into(), size: Bytes(mib * MIB), pages, nodes };
    take(&pooled.dir.join("pool.sock"), &wanted).expect_err("too much").to_string()
}

#[test]
fn vms_promised_more_than_there_is_touch_all_of_it_in_turn_whatever_is_killed() {
    const EACH: u64 = POOL * 5 / 8;
    let Some(mut pooled) = pool() else { return };
    let mut first = Vm::start(&pooled, "first", EACH);
    let said = refusal(&pooled, EACH, Pages::OnDemand, Nodes::Any);
    assert!(said.contains("40 MiB are promised to VMs on demand, and 24 MiB are left"), "{said}");
    overcommit(&pooled, POOL);
    let mut second = Vm::start(&pooled, "second", EACH);
    for (pages, left) in [(Pages::OnDemand, "16 MiB"), (Pages::Slices, "10 MiB")] {
        let said = refusal(&pooled, 18, pages, Nodes::Any);
        assert!(said.contains(&format!("{left} are left; ")), "{said}");
        assert!(said.contains("are missing: up to 150 % of the 64 MiB"), "{said}");
        assert!(said.contains("which is 70 MiB now"), "a VM keeps an eighth: {said}");
    }
    // Memory that cannot be far is not promised twice.
    let guaranteed = |name: &str, class| {
        let patch = VmPatch { class: Some(Some(class)), ..VmPatch::default() };
        pooled.daemon().api.patch_vm(name, &patch).map(drop).map_err(|error| error.to_string())
    };
    guaranteed("first", VmClass::Guaranteed).expect("the other one can have as much far as is missing");
    let said = guaranteed("second", VmClass::Guaranteed).expect_err("neither could have anything far");
    assert!(said.contains("could have 0 B far at most then, and 32 MiB are missing"), "{said}");
    guaranteed("first", VmClass::Burstable).expect("it takes less");

    for round in 0..4 {
        first.tell(EACH);
        match round {
            1 => pooled.daemon().replace_engine(),
            2 | 3 => pooled.daemon.as_mut().expect("it runs").kill_and_restart_keeper(round == 3),
            _ => {}
        }
        first.goes_on();
        second.touch(EACH);
    }
    let stat = |name: &str| pooled.daemon().vm(name);
    let (one, other) = (stat("first"), stat("second"));
    assert!(one.resident_bytes + other.resident_bytes <= POOL * MIB, "{one:?} {other:?}");
    assert!(one.far_bytes + other.far_bytes > 0 && other.stall.some.total_us > 0, "{one:?} {other:?}");
    let why = pooled.daemon().api.decisions("first").expect("decisions");
    let why: Vec<_> = why.iter().flat_map(|decision| &decision.sentences).collect();
    assert!(
        why.iter().any(|why| why.contains("the pool has 64 MiB for VMs on demand, which were promised 80")),
        "{why:?}"
    );
    // An engine that has not read the pool yet knows the promises.
    let class_of = |name: &str, class| {
        let patch = VmPatch { class: Some(Some(class)), ..VmPatch::default() };
        pooled.daemon().api.patch_vm(name, &patch).map(drop).map_err(|error| error.to_string())
    };
    class_of("first", VmClass::Guaranteed).expect("the other one can have as much far as is missing");
    pooled.daemon().replace_engine();
    let said = class_of("second", VmClass::Guaranteed).expect_err("neither could have anything far");
    assert!(said.contains("far at most then, and"), "{said}");
    class_of("first", VmClass::Burstable).expect("it takes less");
    // When there is enough again, no VM is limited.
    drop(second);
    until("the other one has all it wants", || stat("first").target_bytes.is_none() && pooled.stat().vms.len() == 1);
    first.touch(EACH);
    assert_eq!(stat("first").resident_bytes, EACH * MIB);
    drop(first);
    pooled.settled(POOL);
    assert_eq!(pooled.pages(), POOL / 2, "a page is lost, or one too many");
}

#[test]
fn a_vm_that_touches_all_its_memory_forever_does_not_starve_its_neighbour() {
    const EACH: u64 = POOL * 5 / 8;
    let Some(pooled) = pool() else { return };
    overcommit(&pooled, POOL);
    let mut greedy = Vm::start(&pooled, "greedy", EACH);
    let mut neighbour = Vm::start(&pooled, "neighbour", EACH);
    greedy.order(EACH, true);
    greedy.goes_on();
    neighbour.touch(EACH);
    for policy in [Kind::Gain, Kind::Pressure, Kind::Maestro] {
        let patch = PolicyPatch { policy: Some(policy), ..PolicyPatch::default() };
        pooled.daemon().api.patch_policy(&patch).expect("a policy");
        neighbour.touch(EACH);
    }
    let had = pooled.daemon().vm("neighbour").resident_bytes;
    assert!(had >= 4 * MIB, "it has {had}, and a quarter of an equal part is its own");
    greedy.tell(EACH);
    greedy.goes_on();
    drop((greedy, neighbour));
    pooled.settled(POOL);
    assert_eq!(pooled.pages(), POOL / 2, "a page is lost, or one too many");
}

#[test]
fn pages_on_demand_are_of_the_requested_nodes_even_after_they_were_far() {
    let Some(pooled) = pool_of(2, POOL) else { return };
    let [one, other] = pooled.host.nodes().expect("nodes")[..] else { panic!("there were two") };
    let counts = |pages: &[(u32, u64)]| pages.iter().copied().collect::<BTreeMap<_, _>>();
    // Each node has half of the pool.
    let mut far = Vm::of(&pooled, "far", 24, &other.to_string());
    let mut both = Vm::of(&pooled, "both", 16, &format!("{one},{other}"));
    let said = refusal(&pooled, 2, Pages::OnDemand, Nodes::One(other));
    assert!(said.contains("32 MiB are promised to VMs on demand, and 0 B are left"), "{said}");
    far.touch(24);
    both.touch(16);
    assert_eq!(far.pages_by_node(), counts(&[(other, 12)]));
    assert_eq!(both.pages_by_node(), counts(&[(one, 4), (other, 4)]));
    pooled.daemon().replace_engine();
    pooled.daemon().vm("far");
    pooled.daemon().api.set_limit("far", Some(8 * MIB)).expect("limit");
    until("most of it is far", || pooled.daemon().vm("far").far_bytes >= 14 * MIB);
    pooled.daemon().api.set_limit("far", None).expect("no limit");
    far.touch(24);
    both.touch(16);
    assert_eq!(far.pages_by_node(), counts(&[(other, 12)]));
    // Another VM gets the rest of the first node at once.
    let wanted = Take { name: "next".into(), size: Bytes(16 * MIB), pages: Pages::Slices, nodes: Nodes::Any };
    assert_eq!(take(&pooled.dir.join("pool.sock"), &wanted).expect("it is left").len(), 1);
    drop((far, both));
    pooled.settled(POOL);
    assert_eq!(pooled.pages(), POOL / 2, "a page is lost, or one too many");
}

#[test]
fn a_node_that_promised_too_much_is_divided_and_vms_elsewhere_touch_all_they_have() {
    const EACH: u64 = POOL * 5 / 8;
    let Some(pooled) = pool_of(2, 2 * POOL) else { return };
    overcommit(&pooled, 2 * POOL);
    let [one, other] = pooled.host.nodes().expect("nodes")[..] else { panic!("there were two") };
    let mut first = Vm::of(&pooled, "first", EACH, &one.to_string());
    let mut second = Vm::of(&pooled, "second", EACH, &one.to_string());
    let mut both = Vm::of(&pooled, "both", 16, &format!("{one},{other}"));
    let mut quiet = Vm::of(&pooled, "quiet", EACH, &other.to_string());
    let said = refusal(&pooled, 10, Pages::OnDemand, Nodes::One(one));
    assert!(said.contains(&format!("are left on node {one}; ")), "{said}");
    assert!(said.contains("up to 150 % of the 64 MiB") && said.contains("which is 70 MiB now"), "{said}");
    quiet.touch(EACH);
    for round in 0..2 {
        first.tell(EACH);
        if round == 1 {
            pooled.daemon().replace_engine();
        }
        first.goes_on();
        both.touch(16);
        second.touch(EACH);
        let stat = |name: &str| pooled.daemon().vm(name);
        assert!(stat("first").far_bytes > 0, "{:?}", stat("first"));
        assert_eq!([stat("both").target_bytes, stat("quiet").target_bytes], [None, None]);
        assert_eq!([stat("both").far_bytes, stat("quiet").far_bytes], [0, 0]);
    }
    assert_eq!(quiet.pages_by_node(), BTreeMap::from([(other, EACH / 2)]));
    assert_eq!(both.pages_by_node(), BTreeMap::from([(one, 4), (other, 4)]));
    let events = pooled.daemon().api.events().expect("events");
    let divided = events.iter().filter(|event| event.kind == "pool-divided").map(|event| &event.message);
    let divided: Vec<_> = divided.collect();
    assert!(divided.iter().any(|said| said.contains(&format!("node {one}: of the 64 MiB"))), "{events:?}");
    assert!(!divided.iter().any(|said| said.contains(&format!("node {other}"))), "{divided:?}");
    drop((first, second, both, quiet));
    pooled.settled(2 * POOL);
    assert_eq!(pooled.pages(), POOL, "a page is lost, or one too many");
}
