//! The agent in a real guest: Debian's 6.12 kernel under unmodified QEMU and `ballast run --agent`.
//!
//! Needs QEMU and the image of `scripts/agent-image.sh`. Under TCG a boot takes ten seconds or more, so one boot serves
//! several claims. The programs in the guests are `scripts/guest/agent-test`, `free-test` and `tier-test`.

mod common;

use std::time::Duration;

use ballast_api::{AgentStat, AgentState, NodeBalloon, TieringState, VmPatch};
use ballast_base::{Bytes, MIB};
use ballast_testkit::program::Ends;
use ballast_testvm::qemu::{Builder, Image, QemuGuest, qemu_missing};
use common::{Daemon, built, missing, until};

const TIMEOUT: Duration = Duration::from_secs(240);
fn booted(daemon: &Daemon, options: &[&str], with: impl FnOnce(Builder) -> Builder) -> QemuGuest {
    let ballast = built("ballast");
    let (ballast, attach) = (ballast.to_string_lossy(), daemon.attach_socket());
    let attach = attach.to_string_lossy();
    let words = [&[&*ballast, "run", "--agent"], options, &["--name", "guest", "--attach-socket", &attach, "--"]];
    let builder = QemuGuest::builder().name("guest").image(Image::find_with_agent().expect("looked at above"));
    let prefix = words.concat().into_iter().map(str::to_owned);
    let mut guest = with(builder).prefix(prefix).spawn().expect("QEMU starts");
    guest.wait_ready(TIMEOUT).expect("the guest boots");
    guest
}

#[test]
fn a_debian_guest_reports_cold_memory_which_goes_and_the_agent_may_die_and_return() {
    if missing("qemu", qemu_missing()) || missing("agent-image", Image::find_with_agent().err()) {
        return;
    }
    let daemon = Daemon::start("quarantine_ms = 500\n");
    let mut guest = booted(&daemon, &[], |guest| guest.memory(Bytes(256 * MIB)).run("agent-test"));
    let agent = || daemon.vm("guest").agent.unwrap_or_default();
    let until_reporting = |what: &str, is: &dyn Fn(&AgentStat) -> bool| {
        until(what, || {
            let agent = agent();
            agent.state == AgentState::Reporting && is(&agent)
        });
    };
    until_reporting("most of what is cold is told", &|agent| agent.cold_bytes - agent.free_bytes > 64 * MIB);
    let first = agent();
    assert!(first.kernel.starts_with("6.") && first.pieces_proved > 0, "{first:?}");
    assert_eq!((first.rejected_messages, first.garbage_bytes, first.times_ignored), (0, 0, 0), "{first:?}");

    let before = daemon.vm("guest");
    let limit = before.resident_bytes - 64 * MIB;
    daemon.api.set_limit("guest", Some(limit)).expect("limit");
    until("it is within its limit", || daemon.vm("guest").resident_bytes <= limit);

    guest.tell("kill the agent").expect("its console");
    let reports = agent().reports;
    until_reporting("it reports again", &|agent| agent.reports > reports + 1);
    let after = daemon.vm("guest");
    assert!(after.far_bytes > 32 * MIB && after.poisoned_bytes == 0, "{after:?}");
    guest.tell("compare").expect("its console");
    assert_eq!(guest.wait_run(TIMEOUT).expect("it ends"), 0, "{}", guest.serial_log());
}

#[test]
fn memory_that_a_program_of_the_guest_frees_is_discarded_and_never_stored() {
    if missing("qemu", qemu_missing()) || missing("agent-image", Image::find_with_agent().err()) {
        return;
    }
    /// A part of the program's 96 MiB: the kernel reports free blocks of 2 MiB and more.
    const MOST: u64 = 80 * MIB;
    let daemon = Daemon::start("quarantine_ms = 500\n");
    let mut guest = booted(&daemon, &["--balloon"], |guest| guest.memory(Bytes(320 * MIB)).run("free-test"));
    assert_eq!(guest.answer(TIMEOUT).expect("it fills a file"), "kept");
    guest.tell("start the program").expect("its console");
    assert_eq!(guest.answer(TIMEOUT).expect("the program fills its memory"), "filled");
    let filled = daemon.vm("guest").resident_bytes;
    guest.tell("end the program").expect("its console");
    until("the host has it back", || daemon.vm("guest").resident_bytes <= filled - MOST);
    let after = daemon.vm("guest");
    assert_eq!((after.far_bytes, after.zero_bytes, after.reclaim.zapped_pages), (0, 0, 0), "{after:?}");

    let limit = after.resident_bytes - 48 * MIB;
    daemon.api.set_limit("guest", Some(limit)).expect("limit");
    until("it is within its limit", || daemon.vm("guest").resident_bytes <= limit);
    guest.tell("compare").expect("its console");
    assert_eq!(guest.wait_run(TIMEOUT).expect("it ends"), 0, "{}", guest.serial_log());
}

#[test]
fn the_port_of_a_qemu_in_its_own_network_and_pid_namespaces_reaches_the_engine() {
    let is_root = rustix::process::geteuid().is_root();
    if missing("qemu", qemu_missing()) || missing("root", (!is_root).then_some("for namespaces")) {
        return;
    }
    let daemon = Daemon::start("");
    let line = "run --agent --name guest -- qemu-system-x86_64 -S -nodefaults -display none -accel tcg -m 64M \
                -machine pc,memory-backend=r -object memory-backend-memfd,id=r,size=64M,share=on";
    let _qemu = Ends(
        std::process::Command::new("unshare")
            .args(["--net", "--pid", "--fork", "--kill-child"])
            .arg(built("ballast"))
            .args(line.split_whitespace())
            .env("BALLAST_SOCKET", daemon.attach_socket())
            .stdin(std::process::Stdio::null())
            .spawn()
            .expect("unshare"),
    );
    until("the engine has the port", || daemon.api.vm("guest").is_ok_and(|vm| vm.agent.is_some()));
}

#[test]
fn the_port_of_a_qemu_that_goes_into_the_background_reaches_the_engine() {
    if missing("qemu", qemu_missing()) {
        return;
    }
    let daemon = Daemon::start("");
    // As Proxmox starts it, except for `-id`, an option of Proxmox's own QEMU.
    let uuid = "8fd83c3e-6ee5-4d23-9ca4-3f9b7e5f0b11";
    let line = "run --agent --add-memory-backend -- qemu-system-x86_64 -name guest,debug-threads=on -daemonize -S \
                -nodefaults -display none -accel tcg -smp 1,sockets=1,cores=1,maxcpus=1 -m 64 \
                -object memory-backend-ram,id=ram-node0,size=64M -numa node,nodeid=0,cpus=0,memdev=ram-node0";
    let pid = daemon.dir().join("pid");
    let status = std::process::Command::new(built("ballast"))
        .args(line.split_whitespace())
        .args(["-smbios", &format!("type=1,uuid={uuid}"), "-pidfile"])
        .arg(&pid)
        .env("BALLAST_SOCKET", daemon.attach_socket())
        .stdin(std::process::Stdio::null())
        .status();
    assert!(status.expect("start it").success());
    until("the engine has the port", || daemon.api.vm("guest").is_ok_and(|vm| vm.agent.is_some()));
    assert_eq!(daemon.vm("guest").uuid.as_deref(), Some(uuid));
    let pid: u32 = std::fs::read_to_string(pid).expect("a pid").trim().parse().expect("a number");
    assert_eq!(daemon.vm("guest").pid, pid, "the process that stays");
    common::kill(pid);
}

fn balloon(node: u32, bytes: u64) -> VmPatch {
    VmPatch { balloon: Some(NodeBalloon { node, bytes }), ..VmPatch::default() }
}

#[test]
fn a_guest_with_tiers_moves_hot_memory_to_the_fast_one_and_the_host_learns_it() {
    if missing("qemu", qemu_missing()) || missing("agent-image", Image::find_with_agent().err()) {
        return;
    }
    let daemon = Daemon::start("quarantine_ms = 500\n");
    let mut guest = booted(&daemon, &["--tiers", "fast=256M,slow=384M"], |guest| {
        guest.memory(Bytes(640 * MIB)).shared_memory(false).run("tier-test")
    });
    let settled = guest.answer(TIMEOUT).unwrap_or_else(|error| panic!("{error}: {}", guest.serial_log()));
    assert_eq!(settled, "settled");
    let vm = daemon.vm("guest");
    let sizes: Vec<u64> = vm.regions.iter().map(|region| region.size_bytes / MIB).collect();
    assert_eq!(sizes, [256, 384], "a backend for each tier");
    let tiering = || daemon.vm("guest").agent.and_then(|agent| agent.tiering).unwrap_or_default();
    until("what it moved is told", || {
        let tiering = tiering();
        tiering.promoted_bytes > 0 && tiering.fast_hits_bp.is_some_and(|share| share > 5_000)
    });
    let tiering = tiering();
    assert_eq!((tiering.state, tiering.programs), (TieringState::Working, 1));
    let nodes: Vec<(u32, Option<u32>)> = tiering.tiers.iter().map(|tier| (tier.node, tier.latency_ns)).collect();
    assert_eq!(nodes, [(0, Some(69)), (1, Some(177))]);
    assert!(tiering.managed_bytes >= 256 * MIB && tiering.demoted_bytes > 0, "{tiering:?}");

    // The composition changes while the guest runs: a part of the slow node belongs to the host.
    let held = |node: usize| daemon.vm("guest").agent.map_or(1, |agent| agent.nodes[node].balloon_bytes);
    daemon.api.patch_vm("guest", &balloon(1, 96 * MIB)).expect("it has an agent");
    until("the agent holds it, to the page", || held(1) == 96 * MIB);
    assert_eq!(held(0), 0, "the other node keeps all");

    // The program fills the fast node: tiering first moves the coldest memory away.
    daemon.api.patch_vm("guest", &balloon(0, 48 * MIB)).expect("it has an agent");
    until("the agent holds a part of the fast node, too", || held(0) == 48 * MIB);
    daemon.api.patch_vm("guest", &balloon(0, 0)).expect("it has an agent");
    until("the guest has that part back", || held(0) == 0);

    // Memory that the agent holds is zeros, and is evicted first. Free memory that the guest returns makes room, too.
    until("half of it is far", || {
        let vm = daemon.vm("guest");
        let is_far = vm.zero_bytes > 48 * MIB;
        if !is_far && vm.limit_bytes.is_none_or(|limit| vm.resident_bytes <= limit) {
            daemon.api.set_limit("guest", Some(vm.resident_bytes - 64 * MIB)).expect("limit");
        }
        is_far
    });
    let after = daemon.vm("guest");
    assert!(
        after.reclaim.evicted_pages <= after.reclaim.evicted_zero_pages / 3 && after.poisoned_bytes == 0,
        "{after:?}"
    );
    daemon.api.set_limit("guest", None).expect("limit");
    daemon.api.patch_vm("guest", &balloon(1, 0)).expect("it has an agent");
    until("the guest has it back", || held(0) + held(1) == 0);
    guest.tell("end").expect("its console");
    assert_eq!(guest.wait_run(TIMEOUT).expect("it ends"), 0, "{}", guest.serial_log());
}
