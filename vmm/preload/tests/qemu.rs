//! Unmodified QEMU with the preload library against a scripted keeper: all RAM is found, at start and plugged later. No
//! guest boots; the firmware touches the memory.

mod common;
#[path = "../../client/tests/double/mod.rs"]
mod double;

use std::process::Command;

use ballast_base::wire::{ClientToKeeper, KeeperToClient};
use ballast_base::{Bytes, GIB, HUGE_SIZE, MIB};
use ballast_sys::memfd;
use ballast_sys::uffd::FillOutcome;
use ballast_testkit::missing;
use common::{Driven, preloaded};
use double::{Keeper, Session};
use serde_json::json;

const QEMU: &str = "qemu-system-x86_64";

/// A keeper; `None`, with a printed skip, where QEMU cannot attach.
fn keeper() -> Option<Keeper> {
    let works = Command::new(QEMU).arg("--version").output().is_ok_and(|output| output.status.success());
    let missing = missing("qemu", (!works).then_some("qemu-system-x86_64 is not installed"));
    Keeper::start().filter(|_| !missing)
}

/// QEMU with these words, stopped before its first instruction, with QMP on its standard input and output.
fn qemu(keeper: &Keeper, words: &str) -> Command {
    let mut command = preloaded(QEMU, &keeper.path);
    command.args("-nodefaults -display none -accel tcg -S -qmp stdio".split(' ')).args(words.split(' '));
    command
}

fn backend(id: &str, size: &str) -> String {
    format!("-object memory-backend-memfd,id={id},size={size},share=on")
}

/// Accepts the next AddRegion. Returns its length and address.
fn accept_region(session: &Session) -> (Bytes, u64) {
    let (message, fds) = session.request();
    let ClientToKeeper::AddRegion { region, .. } = message else { panic!("{message:?}") };
    assert_eq!(memfd::size(&fds[0]).expect("stat"), region.span.len);
    session.answer(&KeeperToClient::Ok);
    (region.span.len, region.span.hva.0)
}

#[test]
fn ram_around_the_pci_hole_is_one_region_aligned_to_huge_pages_and_runs_zapped() {
    let Some(keeper) = keeper() else { return };
    let words = format!("-machine q35,memory-backend=ram0 -m 5G {}", backend("ram0", "5G"));
    let mut qemu = Driven::start(qemu(&keeper, &words));
    let session = keeper.client();
    assert_eq!(session.attach.vmm, QEMU);
    assert_eq!(session.attach.name, "preload-test");
    let info = session.attach.regions[0].clone();
    assert_eq!((session.attach.regions.len(), info.span.len, info.extents[0].offset), (1, Bytes(5 * GIB), Bytes(0)));
    assert_eq!(session.attach.shards, 1, "a VM of this size needs no more, on however many CPUs");
    assert!(session.attach.may_pin, "QEMU promises nothing");
    assert!(info.span.hva.0.is_multiple_of(HUGE_SIZE as u64), "{} can have no huge pages", info.span.hva);
    session.accept();
    qemu.qmp_start();

    // All RAM is zapped, and this process serves the faults; the firmware must not notice.
    session.register_all();
    assert_eq!(session.zap(1, vec![session.whole(0)]), None);
    qemu.qmp("cont", json!({}));
    let mut minor_or_fresh = 0;
    while minor_or_fresh < 100 {
        let fault = session.next_fault();
        let present = session.uffd.map_existing(fault.addr, 4096).expect("continue");
        if present == FillOutcome::NotInFile {
            session.uffd.zero_page(fault.addr).expect("zero");
        } else if present != FillOutcome::Done {
            session.uffd.wake(fault.addr, 4096).expect("wake");
        }
        minor_or_fresh += 1;
    }
    session.uffd.unregister(info.span.hva, info.span.len.0).expect("unregister");
    assert_eq!(qemu.qmp("query-status", json!({}))["status"], "running");
    assert_eq!(qemu.quit().0, Some(0));
}

#[test]
fn numa_nodes_and_hot_plugged_ram_are_added_and_unplugged_ram_is_removed() {
    let Some(keeper) = keeper() else { return };
    let words = format!(
        "-machine q35 -m 192M,slots=2,maxmem=4G -smp 2 {} {} -numa node,memdev=n0,cpus=0 -numa node,memdev=n1,cpus=1",
        backend("n0", "128M"),
        backend("n1", "64M")
    );
    let mut command = qemu(&keeper, &words);
    command.env("BALLAST_FAULT_WORKERS", "2");
    let mut qemu = Driven::start(command);
    let session = keeper.client();
    assert_eq!((session.attach.regions[0].span.len, session.attach.shards), (Bytes(128 * MIB), 2));
    session.accept();
    assert_eq!(accept_region(&session).0, Bytes(64 * MIB));
    qemu.qmp_start();

    let plug = std::thread::scope(|scope| {
        let asked = scope.spawn(|| {
            let backend = json!({ "qom-type": "memory-backend-memfd", "id": "m2", "size": 256 * MIB, "share": true });
            qemu.qmp("object-add", backend);
            qemu.qmp("device_add", json!({ "driver": "pc-dimm", "id": "d2", "memdev": "m2" }));
        });
        let region = accept_region(&session);
        asked.join().expect("plugged");
        region
    });
    assert_eq!(plug.0, Bytes(256 * MIB));

    // A backend that no device uses is unplugged by deleting it.
    let spare = std::thread::scope(|scope| {
        let asked = scope.spawn(|| {
            qemu.qmp(
                "object-add",
                json!({ "qom-type": "memory-backend-memfd", "id": "m3", "size": 32 * MIB, "share": true }),
            );
        });
        let region = accept_region(&session);
        asked.join().expect("plugged");
        region
    });
    // QEMU frees the backend after a grace period that passes only while the machine runs.
    qemu.qmp("cont", json!({}));
    qemu.qmp("object-del", json!({ "id": "m3" }));
    let (message, _) = session.request();
    assert_eq!(message, ClientToKeeper::RemoveRegion(ballast_base::Hva(spare.1)));
    session.answer(&KeeperToClient::Ok);
    // The client forgets the region after it has received the reply, which may be after the first of these zaps.
    while session.zap(2, vec![(ballast_base::Hva(spare.1), 4096)]).is_none() {}
    assert_eq!(session.zap(3, vec![(ballast_base::Hva(plug.1), plug.0.0)]), None);
    assert_eq!(qemu.quit().0, Some(0));
}

#[test]
fn without_a_keeper_a_required_attach_ends_qemu_and_an_optional_one_warns() {
    let Some(keeper) = keeper() else { return };
    let words = format!("-machine pc,memory-backend=ram0 -m 64M {}", backend("ram0", "64M"));
    let mut required = qemu(&keeper, &words);
    let mut optional = qemu(&keeper, &words);
    optional.env_remove("BALLAST_REQUIRE");
    keeper.die();
    let (code, text) = {
        required.stdin(std::process::Stdio::null());
        Driven::start(required).finish()
    };
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("is ballastd running?"), "{text}");
    let mut optional = Driven::start(optional);
    optional.qmp_start();
    let (code, text) = optional.quit();
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("runs unmanaged"), "{text}");
}

#[test]
fn locked_memory_attaches_pinned() {
    let Some(keeper) = keeper() else { return };
    let words = format!("-overcommit mem-lock=on -machine pc,memory-backend=ram0 -m 64M {}", backend("ram0", "64M"));
    let mut qemu = Driven::start(qemu(&keeper, &words));
    let session = keeper.client();
    let early = session.attach.pinned.clone();
    session.accept();
    let reason = early.unwrap_or_else(|| {
        let (message, _) = session.request();
        session.answer(&KeeperToClient::Ok);
        let ClientToKeeper::Pin(reason) = message else { panic!("{message:?}") };
        reason
    });
    assert_eq!(reason, "memory is locked (mlock)");
    qemu.qmp_start();
    assert_eq!(qemu.quit().0, Some(0));
}

#[test]
fn a_sandboxed_preallocated_qemu_attaches_and_zaps() {
    let Some(keeper) = keeper() else { return };
    let words = format!(
        "-sandbox on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny \
         -machine pc,memory-backend=ram0 -m 64M {},prealloc=on",
        backend("ram0", "64M")
    );
    let words = words.split_whitespace().collect::<Vec<_>>().join(" ");
    let mut qemu = Driven::start(qemu(&keeper, &words));
    let session = keeper.client();
    session.accept();
    qemu.qmp_start();
    session.register_all();
    assert_eq!(session.zap(1, vec![session.whole(0)]), None);
    let (start, len) = session.whole(0);
    assert_eq!(session.uffd.map_existing(start, len).expect("continue"), FillOutcome::Done);
    assert_eq!(qemu.quit().0, Some(0));
}

#[test]
fn a_daemonized_qemu_is_attached_from_the_process_that_stays() {
    let Some(keeper) = keeper() else { return };
    let dir = tempfile::tempdir().expect("tempdir");
    let pid_file = dir.path().join("pid");
    let mut command = preloaded(QEMU, &keeper.path);
    command
        .args("-nodefaults -display none -accel tcg -S -daemonize -machine pc,memory-backend=ram0 -m 64M".split(' '))
        .args(backend("ram0", "64M").split(' '))
        .arg("-pidfile")
        .arg(&pid_file)
        .stdin(std::process::Stdio::null());
    let mut parent = command.spawn().expect("start");
    let session = keeper.client();
    session.accept();
    assert!(parent.wait().expect("wait").success());
    let pid: i32 = std::fs::read_to_string(&pid_file).expect("pid file").trim().parse().expect("a number");
    session.ping(1);
    let peer = rustix::net::sockopt::socket_peercred(&session.socket).expect("peer");
    assert_eq!(peer.pid.as_raw_nonzero().get(), pid);
    rustix::process::kill_process(peer.pid, rustix::process::Signal::KILL).expect("kill the daemon");
}

#[test]
fn private_ram_ends_a_qemu_under_tcg_if_required_and_else_the_keeper_is_told() {
    let Some(keeper) = keeper() else { return };
    let words = "-nodefaults -display none -accel tcg -machine pc -m 64M -qmp stdio";
    let mut required = preloaded(QEMU, &keeper.path);
    required.args(words.split(' ')).stdin(std::process::Stdio::null());
    let (code, text) = Driven::start(required).finish();
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("not a shared memory file"), "{text}");

    let mut optional = preloaded(QEMU, &keeper.path);
    optional.args(words.split(' ')).env("BALLAST_REQUIRE", "0");
    let mut optional = Driven::start(optional);
    optional.qmp_start();
    let (code, text) = optional.quit();
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("runs unmanaged"), "{text}");
}

#[test]
fn a_qemu_behind_other_programs_attaches_and_one_without_the_library_is_refused() {
    let Some(keeper) = keeper() else { return };
    let line = format!(
        "{QEMU} -nodefaults -display none -accel tcg -S -qmp stdio -machine pc,memory-backend=ram0 -m 64M {}",
        backend("ram0", "64M")
    );
    for before in ["env A=b nice", "sh -c exec\u{a0}\"$0\"\u{a0}\"$@\"", "sh -c \"$0\"\u{a0}\"$@\""] {
        let words: Vec<String> =
            format!("{before} {line}").split(' ').map(|word| word.replace('\u{a0}', " ")).collect();
        let mut command = preloaded(&words[0], &keeper.path);
        command.args(&words[1..]);
        let mut qemu = Driven::start(command);
        let session = keeper.client();
        assert_eq!(session.attach.vmm, QEMU, "{before}");
        session.accept();
        qemu.qmp_start();
        assert_eq!(qemu.quit().0, Some(0), "{before}");
    }
    for before in ["env -i", "env -u LD_PRELOAD"] {
        let path = std::env::var("PATH").expect("a search path");
        let program = std::env::split_paths(&path).map(|folder| folder.join(QEMU)).find(|path| path.exists());
        let words = format!("{before} {} {line}", program.expect("it is installed").display());
        let words: Vec<&str> = words.split(' ').collect();
        let mut command = preloaded(words[0], &keeper.path);
        command.args(&words[1..]).stdin(std::process::Stdio::null());
        let (code, text) = Driven::start(command).finish();
        assert_eq!(code, Some(126), "{before}: {text}");
        assert!(text.contains("without this library in its environment: refused"), "{before}: {text}");
    }
}

#[test]
fn a_node_with_private_memory_is_reported_though_the_other_one_is_managed() {
    for private in ["memory-backend-ram", "memory-backend-memfd,share=off"] {
        let Some(keeper) = keeper() else { return };
        let words = format!(
            "-machine q35 -m 192M -smp 2 {} -object {private},id=n1,size=128M \
             -numa node,memdev=n0,cpus=0 -numa node,memdev=n1,cpus=1",
            backend("n0", "64M")
        );
        let mut qemu = Driven::start(qemu(&keeper, &words));
        let session = keeper.client();
        session.accept();
        let (message, _) = session.request();
        let ClientToKeeper::Unmanaged { name, len, .. } = message else { panic!("{private}: {message:?}") };
        assert_eq!((&*name, len), ("preload-test", Bytes(128 * MIB)), "{private}");
        session.answer(&KeeperToClient::Ok);
        qemu.qmp_start();
        let (code, text) = qemu.quit();
        assert_eq!(code, Some(0), "{text}");
        assert!(text.contains("128 MiB of private memory are not managed"), "{private}: {text}");
    }
}
