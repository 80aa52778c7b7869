//! Memory of the pool that comes as it is touched: every first touch is the engine's, also after any process was
//! killed, and where no page is free it waits.
//!
//! A VM is this program again, as a test that does nothing unless it is told to be one. It touches as much as a file
//! says, and looks at all that it has touched again and again.

mod common;

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering;
use std::time::Duration;

use ballast_api::{LendRequest, VmStat};
use ballast_base::pool::{Nodes, Pages, Take};
use ballast_base::{Bytes, HUGE_SIZE, Hva, MIB, PAGE_SIZE};
use ballast_client::pool::take;
use ballast_client::{Client, Ram};
use ballast_sys::{Mapping, memfd};

use common::pooled::Pooled;
use common::{missing, until};

const BE_A_VM: &str = "BALLAST_TEST_ON_DEMAND_VM";
const POOL: u64 = 64;
const VM: u64 = 40;

/// What a VM writes to a word.
fn secret(at: usize) -> u64 {
    at as u64 ^ 0x5ec2_e75e_c2e7_5ec2
}

#[test]
fn a_vm_that_touches_as_much_as_it_is_told() {
    let Ok(dir) = std::env::var(BE_A_VM).map(PathBuf::from) else { return };
    let wanted = Take { name: "demand".into(), size: Bytes(VM * MIB), pages: Pages::OnDemand, nodes: Nodes::Any };
    let pieces = take(&dir.join("pool.sock"), &wanted).expect("memory");
    assert_eq!(pieces.len(), 1);
    let map = Mapping::shared(&pieces[0].fd, 0, (VM * MIB) as usize).expect("map");
    let ram = Ram { hva: Hva(map.addr() as u64), extents: pieces, guest_address: None };
    let _client = Client::builder().ram(ram).name("demand").socket(dir.join("attach.sock")).attach().expect("attach");
    let parent = rustix::process::getppid();
    let mut touched = 0;
    while rustix::process::getppid() == parent {
        let wanted = std::fs::read_to_string(dir.join("touch")).ok().and_then(|text| text.parse().ok()).unwrap_or(0u64);
        for page in (0..(wanted * MIB) as usize).step_by(PAGE_SIZE) {
            let word = &map.words(page, 1)[0];
            if page < touched {
                assert_eq!(word.load(Ordering::Relaxed), secret(page), "at {page:#x}");
            } else {
                assert_eq!(word.swap(secret(page), Ordering::Relaxed), 0, "at {page:#x}, touched for the first time");
                touched = page + PAGE_SIZE;
            }
        }
        std::fs::write(dir.join("touched.new"), wanted.to_string()).expect("say so");
        std::fs::rename(dir.join("touched.new"), dir.join("touched")).expect("say so");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A VM that was told nothing yet.
struct Vm(Child, PathBuf);

impl Vm {
    fn start(pooled: &Pooled) -> Self {
        let mut command = Command::new(std::env::current_exe().expect("own program"));
        command.args(["--exact", "a_vm_that_touches_as_much_as_it_is_told", "--nocapture"]);
        command.env(BE_A_VM, &pooled.dir).stdout(Stdio::null());
        let vm = Self(command.spawn().expect("start"), pooled.dir.clone());
        until("the VM is attached", || pooled.daemon().api.vm("demand").is_ok());
        vm
    }

    fn tell(&self, mib: u64) {
        std::fs::write(self.1.join("touch.new"), mib.to_string()).expect("write");
        std::fs::rename(self.1.join("touch.new"), self.1.join("touch")).expect("rename");
    }

    fn has_touched(&mut self, mib: u64) -> bool {
        assert_eq!(self.0.try_wait().expect("look").map(|status| status.to_string()), None, "it ended");
        std::fs::read_to_string(self.1.join("touched")).is_ok_and(|text| text == mib.to_string())
    }

    /// Have it touch so much, and look at it again.
    fn touch(&mut self, mib: u64) {
        let _ = std::fs::remove_file(self.1.join("touched"));
        self.tell(mib);
        until("it has touched it", || self.has_touched(mib));
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn pool() -> Option<Pooled> {
    if missing("uffd", ballast_sys::Uffd::create(ballast_sys::uffd::HUGETLB_FEATURES).err()) {
        return None;
    }
    let pooled = Pooled::start("quarantine_ms = 50\n", POOL)?;
    pooled.settled(POOL);
    Some(pooled)
}

#[test]
fn a_vm_on_demand_has_what_it_touches_and_the_rest_is_promised_also_after_any_process_was_killed() {
    let Some(mut pooled) = pool() else { return };
    let mut vm = Vm::start(&pooled);
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
    // No more is promised than is there: to a VM, whichever way, or to the host.
    for pages in [Pages::OnDemand, Pages::Slices] {
        let wanted = Take { name: "next".into(), size: Bytes(32 * MIB), pages, nodes: Nodes::Any };
        let said = take(&pooled.dir.join("pool.sock"), &wanted).expect_err("too much").to_string();
        assert!(said.contains("40 MiB are promised to VMs on demand, and 24 MiB are left"), "{said}");
    }
    let one = Nodes::One(0);
    let wanted = Take { name: "next".into(), size: Bytes(2 * MIB), pages: Pages::OnDemand, nodes: one };
    let said = take(&pooled.dir.join("pool.sock"), &wanted).expect_err("of a node").to_string();
    assert!(said.contains("of any node"), "{said}");
    let lend = |bytes| LendRequest { bytes, ..LendRequest::default() };
    let lent = pooled.daemon().api.lend_pool(&lend(POOL * MIB)).expect("lend");
    assert!(lent.nodes[0].lent_bytes <= (POOL - VM) * MIB, "{lent:?}");
    pooled.daemon().api.lend_pool(&lend(0)).expect("take back");

    // Touches wait for the next engine, and find zeros there. It sets aside what its predecessor did.
    let old = pooled.daemon().engine_pid().expect("it runs");
    common::kill(old);
    vm.tell(20);
    pooled.daemon().wait_for_engine_after(old);
    until("it goes on", || vm.has_touched(20));
    for with_engine in [false, true] {
        let daemon = pooled.daemon.as_mut().expect("it runs");
        vm.tell(if with_engine { 30 } else { 24 });
        daemon.kill_and_restart_keeper(with_engine);
        until("it goes on", || vm.has_touched(if with_engine { 30 } else { 24 }));
    }
    until("the next engine has the pool", || !pooled.stat().vms.is_empty());
    assert_eq!(seen(&pooled), (VM, 30, VM));

    // It is paged like any other VM on huge pages, and its free pages are the next touches'.
    pooled.daemon().api.set_limit("demand", Some(16 * MIB)).expect("limit");
    until("it is within its limit", || {
        let vm = stat(&pooled);
        vm.resident_bytes <= 16 * MIB && vm.far_bytes > 0
    });
    vm.touch(VM);
    let (promised, touched, _) = seen(&pooled);
    assert!(promised == VM && touched <= 24, "{touched} MiB");
    pooled.daemon().api.set_limit("demand", None).expect("no limit");
    vm.touch(VM);
    drop(vm);
    until("nothing is promised", || pooled.stat().promised_bytes == 0);
    pooled.settled(POOL);
    assert_eq!((pooled.pages(), pooled.stat().aside_bytes), (POOL / 2, 0), "a page is lost, or one too many");
}

#[test]
fn a_first_touch_for_which_no_page_is_free_waits_and_goes_on_when_another_page_of_the_vm_is_far() {
    let Some(pooled) = pool() else { return };
    let mut vm = Vm::start(&pooled);
    vm.touch(20);
    // Another user of huge pages has all that are free.
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
    // It is not the kernel's touch, which would end the VM; what it has goes far, and makes room.
    pooled.daemon().api.set_limit("demand", Some(16 * MIB)).expect("limit");
    until("it goes on", || vm.has_touched(24));
    drop(hog);
    // All else that is not limited leaves userfaultfd; this does not.
    pooled.daemon().api.set_limit("demand", None).expect("no limit");
    let all_is_registered = || pooled.daemon().api.vm("demand").is_ok_and(|vm| vm.registered_bytes == VM * MIB);
    assert!(all_is_registered());
    vm.touch(VM);
    assert!(all_is_registered());
    drop(vm);
    pooled.settled(POOL);
    assert_eq!(pooled.pages(), POOL / 2, "a page is lost, or one too many");
}
