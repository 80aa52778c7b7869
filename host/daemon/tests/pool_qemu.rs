//! Unmodified QEMU with its RAM on the pool, by `ballast run --pool`: it boots, is paged in huge pages, and returns
//! memory that its guest frees. When it is killed, all of its memory returns zeroed.
//!
//! Needs what `pool.rs` and `qemu.rs` need: root, huge pages, QEMU and the guest image.

mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering;
use std::time::Duration;

use ballast_api::{PoolPages, VmClass};
use ballast_base::pool::{Nodes, Pages, Take};
use ballast_base::{Bytes, GIB, HUGE_SIZE, MIB};
use ballast_client::pool::take;
use ballast_testvm::qemu::load::{Dataset, load, verify};
use ballast_testvm::qemu::{QEMU, QemuGuest, qemu_missing};

use serde_json::{Value, json};

use common::pooled::{Pooled, end, mapped};
use common::{built, kill, missing, until};

const POOL: u64 = 320;
const MEMORY: u64 = 256 * MIB;
const TIMEOUT: Duration = Duration::from_secs(180);

fn on_the_pool(pooled: &Pooled, name: &str, pages: &str) -> Vec<String> {
    let (program, socket) =
        (built("ballast").display().to_string(), pooled.daemon().attach_socket().display().to_string());
    [&program, "run", "--name", name, "--attach-socket", &socket, "--pool", pages, "--"].map(str::to_owned).to_vec()
}

/// Allocated bytes of the memfd that stands in for a QEMU's RAM.
fn stand_in_bytes(pid: u32) -> u64 {
    let fds = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("QEMU runs").flatten().map(|entry| entry.path());
    let is_stand_in = |path: &PathBuf| {
        std::fs::read_link(path).is_ok_and(|target| target.to_string_lossy().contains("memory-backend-memfd"))
    };
    let path = fds.into_iter().find(is_stand_in).expect("a memfd stands in for RAM");
    std::fs::metadata(path).expect("stat").blocks() * 512
}

#[test]
fn a_debian_guest_on_the_pool_is_paged_and_its_memory_returns_zeroed() {
    if missing("qemu", qemu_missing())
        || missing("uffd", ballast_sys::Uffd::create(ballast_sys::uffd::HUGETLB_FEATURES).err())
    {
        return;
    }
    let Some(pooled) = Pooled::start("quarantine_ms = 500\n", POOL) else { return };
    let daemon = pooled.daemon();
    let builder = QemuGuest::builder().memory(Bytes(MEMORY)).huge_pages().balloon();
    let mut guest = builder.name("pooled").prefix(on_the_pool(&pooled, "pooled", "2M")).spawn().expect("QEMU starts");
    until("the VM is attached", || {
        assert!(guest.exited().is_none(), "QEMU ended: {}", guest.stderr_log());
        daemon.api.vm("pooled").is_ok()
    });
    let pool = pooled.stat();
    assert_eq!(pool.vms.iter().map(|vm| (vm.name.as_str(), vm.bytes)).collect::<Vec<_>>(), [("pooled", MEMORY)]);
    assert_eq!((daemon.vm("pooled").size_bytes, pool.nodes[0].used_bytes), (MEMORY, MEMORY));
    guest.wait_ready(TIMEOUT).expect("the guest boots");
    assert_eq!(stand_in_bytes(guest.pid()), 0, "nothing but the pool's memory is mapped");

    let data = Dataset::new(3072, 16 << 10, 5);
    load(guest.redis_addr(), &data).expect("Redis takes the data");
    // The guest's free memory leaves the pool's files, not the memfd that QEMU punches.
    until("the guest reports free pages", || daemon.vm("pooled").reclaim.discarded_pages > 0);
    until("they are the host's", || daemon.vm("pooled").resident_bytes < MEMORY);
    let limit = (daemon.vm("pooled").resident_bytes / 2).next_multiple_of(HUGE_SIZE as u64);
    daemon.api.set_limit("pooled", Some(limit)).expect("set a limit");
    until("resident is at the limit", || daemon.vm("pooled").resident_bytes <= limit);
    let vm = daemon.vm("pooled");
    assert!(vm.far_bytes > 0 && vm.far_bytes.is_multiple_of(HUGE_SIZE as u64), "{vm:?}");
    daemon.replace_engine();
    let read = verify(guest.redis_addr(), &data).expect("Redis answers");
    assert_eq!((read.verified, read.wrong, read.missing), (data.keys(), 0, 0), "{read:?}\n{}", daemon.log());

    kill(guest.pid());
    until("QEMU is gone", || guest.exited().is_some());
    until("the VM is gone", || pooled.stat().vms.is_empty());
    pooled.settled(POOL);
    assert_eq!(pooled.pages() * HUGE_SIZE as u64, POOL * MIB, "a page is lost, or one too many");
    let wanted = Take { name: "next".into(), size: Bytes(POOL * MIB), pages: Pages::Slices, nodes: Nodes::Any };
    let pieces = take(&pooled.dir.join("pool.sock"), &wanted).expect("all of it");
    let map = mapped(&pieces);
    let is_zero = map.words(0, map.len() / 8).iter().all(|word| word.load(Ordering::Relaxed) == 0);
    assert!(is_zero, "somebody finds what the guest left");
}

/// QEMU without a guest: its firmware only.
fn bare(pooled: &Pooled, name: &str, memory: &str, pages: &str) -> Command {
    let words = on_the_pool(pooled, name, pages);
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]).args([QEMU, "-nodefaults", "-display", "none", "-accel", "tcg", "-S", "-m", memory]);
    command
}

#[test]
fn memory_that_is_unplugged_returns_to_the_pool_while_its_vm_runs_on() {
    if missing("qemu", qemu_missing())
        || missing("uffd", ballast_sys::Uffd::create(ballast_sys::uffd::HUGETLB_FEATURES).err())
    {
        return;
    }
    let Some(pooled) = Pooled::start("quarantine_ms = 50\n", 128) else { return };
    plug_and_unplug(&pooled, 32 * MIB, 64 * MIB, Some(48 * MIB));
}

#[test]
fn a_qemu_on_1_gib_pages_is_pinned_its_dimm_returns_and_half_a_page_is_refused() {
    if missing("qemu", qemu_missing())
        || missing("uffd", ballast_sys::Uffd::create(ballast_sys::uffd::HUGETLB_FEATURES).err())
    {
        return;
    }
    let Some(pooled) = Pooled::of("", 2 << 10, PoolPages::Gib) else { return };
    let text = refused(&pooled, "1536M");
    assert!(text.contains("no multiple of 1 GiB"), "{text}");
    plug_and_unplug(&pooled, GIB, GIB, None);
}

#[test]
fn a_qemu_on_demand_has_only_what_its_firmware_touches_and_so_has_its_dimm() {
    if missing("qemu", qemu_missing())
        || missing("uffd", ballast_sys::Uffd::create(ballast_sys::uffd::HUGETLB_FEATURES).err())
    {
        return;
    }
    let Some(pooled) = Pooled::start("", 128) else { return };
    pooled.settled(128);
    let mut command = bare(&pooled, "demand", "64M,slots=2,maxmem=4G", "on-demand");
    command.args(["-object", "memory-backend-memfd,id=m,size=32M,share=on,hugetlb=on,hugetlbsize=2M"]);
    command.args(["-device", "pc-dimm,id=d,memdev=m"]);
    let mut child = command.spawn().expect("QEMU starts");
    let api = &pooled.daemon().api;
    until("it is attached, with its DIMM", || {
        assert!(child.try_wait().expect("look").is_none(), "QEMU ended");
        api.vm("demand").is_ok_and(|vm| vm.size_bytes == 96 * MIB)
    });
    let pool = pooled.stat();
    assert_eq!((pool.promised_bytes, pool.vms.len()), (96 * MIB, 2), "{pool:?}");
    assert!(pool.touched_bytes < 64 * MIB, "{pool:?}");
    assert_eq!(stand_in_bytes(child.id()), 0);
    end(&mut child);
    pooled.settled(128);
    assert_eq!(pooled.pages(), 64, "a page is lost, or one too many");
}

/// Plugs a DIMM of `dimm` bytes into a QEMU with `base` bytes, twice. The VM is held to the limit, or pinned.
fn plug_and_unplug(pooled: &Pooled, base: u64, dimm: u64, limit: Option<u64>) {
    let daemon = pooled.daemon();
    let page = pooled.host.page();
    let all: u64 = pooled.stat().nodes.iter().map(|node| node.reserved_bytes).sum();
    // Otherwise the VM gets zeroed memory anywhere, and shares files with its DIMM.
    pooled.settled(all / MIB);
    let mut command = bare(pooled, "dimms", &format!("{}M,slots=2,maxmem=4G", base / MIB), page.files());
    command.args(["-qmp", "stdio"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().expect("QEMU starts");
    let (mut input, output) = (child.stdin.take().expect("piped"), child.stdout.take().expect("piped"));
    let mut lines = BufReader::new(output).lines();
    let mut qmp = |command: &str, arguments: Value| {
        let line = json!({ "execute": command, "arguments": arguments }).to_string();
        input.write_all(format!("{line}\n").as_bytes()).expect("QEMU listens");
        loop {
            let answer: Value = serde_json::from_str(&lines.next().expect("a line").expect("text")).expect("JSON");
            assert!(answer.get("error").is_none(), "{command}: {answer}");
            if answer.get("return").is_some() {
                return;
            }
        }
    };
    qmp("qmp_capabilities", json!({}));
    // QEMU unmaps freed memory after a grace period that only passes while the machine runs.
    qmp("cont", json!({}));
    let used = || pooled.stat().nodes.iter().map(|node| node.used_bytes).sum::<u64>();
    until("it is attached", || daemon.api.vm("dimms").is_ok() && used() == base);
    for (round, engine_dies) in [false, true].into_iter().enumerate() {
        let id = format!("dimm{round}");
        let backend = json!({ "qom-type": "memory-backend-memfd", "id": id, "size": dimm, "share": true,
            "hugetlb": true, "hugetlbsize": page.bytes() });
        qmp("object-add", backend);
        until("it is plugged", || daemon.vm("dimms").size_bytes == base + dimm);
        assert_eq!(used(), base + dimm);
        assert_eq!(stand_in_bytes(child.id()), 0);
        match limit {
            Some(limit) => {
                daemon.api.set_limit("dimms", Some(limit)).expect("limit");
                until("it is at its limit", || daemon.vm("dimms").resident_bytes <= limit);
            }
            None => assert_eq!(daemon.vm("dimms").class, VmClass::Pinned),
        }
        if engine_dies {
            daemon.replace_engine();
            until("the next engine has the pool", || used() == base + dimm);
        }
        qmp("object-del", json!({ "id": id }));
        until("it is unplugged", || daemon.vm("dimms").size_bytes == base);
        until("its memory is the pool's again", || {
            let node = &pooled.stat().nodes[0];
            (node.used_bytes, node.ready_bytes) == (base, all - base)
        });
        if limit.is_some() {
            daemon.api.set_limit("dimms", None).expect("no limit");
        }
    }
    // Another VM gets the memory while this one runs.
    let pages = page.files().parse::<Pages>().expect("pages");
    let wanted = Take { name: "next".into(), size: Bytes(all - base), pages, nodes: Nodes::Any };
    let next = take(&pooled.dir.join("pool.sock"), &wanted).expect("all that is left");
    qmp("query-status", json!({}));
    drop(next);
    end(&mut child);
    pooled.settled(all / MIB);
    assert_eq!(pooled.pages() * page.bytes(), all, "a page is lost, or one too many");
}

#[test]
fn a_qemu_for_which_the_pool_has_too_little_does_not_start_and_reports_why() {
    if missing("qemu", qemu_missing()) {
        return;
    }
    let Some(pooled) = Pooled::start("", 64) else { return };
    let text = refused(&pooled, "128M");
    assert!(text.contains("RAM of 128 MiB from the pool") && text.contains("it wants 64 slices"), "{text}");
    let text = refused(&pooled, "63M");
    assert!(text.contains("no multiple of 2 MiB"), "{text}");
    until("nobody has memory", || pooled.stat().vms.is_empty());
    pooled.settled(64);
}

fn refused(pooled: &Pooled, memory: &str) -> String {
    let mut qemu = bare(pooled, "refused", memory, pooled.host.page().files())
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("start");
    let mut text = String::new();
    qemu.stderr.take().expect("piped").read_to_string(&mut text).expect("read");
    assert!(!qemu.wait().expect("reap").success(), "{text}");
    text
}
