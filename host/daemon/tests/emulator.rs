//! QEMU as a management program starts it: through the link that acts as the emulator, with libvirt's command line.
//!
//! Needs QEMU and userfaultfd. No guest is needed: QEMU's firmware runs, or the vCPUs are stopped.
//! Promise: the tests change no word of a domain's command line that `ballast` does not change itself.

mod common;

use std::io::Write;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use ballast_api::{SourceKind, VmPatch};
use ballast_base::MIB;
use ballast_testvm::qemu::{QEMU, qemu_missing};
use common::{Daemon, built, missing, until};

const UUID: &str = "8fd83c3e-6ee5-4d23-9ca4-3f9b7e5f0b11";

struct Emulator(tempfile::TempDir);

impl Emulator {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        symlink(built("ballast"), dir.path().join(QEMU)).expect("a link");
        Self(dir)
    }

    fn command(&self, socket: &Path, file: Option<&str>) -> Command {
        let mut command = Command::new(self.0.path().join(QEMU));
        let options = self.0.path().join("emulator");
        if let Some(text) = file {
            std::fs::write(&options, text).expect("write");
        }
        // Only libvirt's environment.
        let path = std::env::var_os("PATH").unwrap_or_default();
        command.env_clear().env("PATH", path).env("LC_ALL", "C").env("BALLAST_SOCKET", socket);
        command.env("BALLAST_EMULATOR", options).stdin(Stdio::null());
        command
    }

    fn ask(&self, words: &str) -> Output {
        let nobody = Path::new("/nonexistent/attach.sock");
        self.command(nobody, None).args(words.split(' ')).output().expect("start it")
    }
}

/// A domain as libvirt 9.0 starts it, except for its disks.
struct Domain(Child);

impl Domain {
    fn start(daemon: &Daemon, emulator: &Emulator, name: &str, uuid: &str, file: Option<&str>) -> Self {
        Self::start_with(daemon, emulator, [name, uuid], file, None)
    }

    fn start_with(
        daemon: &Daemon,
        emulator: &Emulator,
        [name, uuid]: [&str; 2],
        file: Option<&str>,
        incoming: Option<&str>,
    ) -> Self {
        let mut command = emulator.command(&daemon.attach_socket(), file);
        command.args(["-name", &format!("guest={name},debug-threads=on"), "-S"]);
        command.args(["-machine", "pc-i440fx-7.2,usb=off,dump-guest-core=off,memory-backend=pc.ram", "-accel", "tcg"]);
        command.args(["-cpu", "qemu64", "-m", "256", "-object"]);
        command.arg(r#"{"qom-type":"memory-backend-ram","id":"pc.ram","size":268435456}"#);
        command.args("-overcommit mem-lock=off -smp 1,sockets=1,cores=1,threads=1 -uuid".split(' ')).arg(uuid);
        command.args("-display none -no-user-config -nodefaults -rtc base=utc -no-shutdown -boot strict=on".split(' '));
        command.args(["-device", r#"{"driver":"piix3-usb-uhci","id":"usb","bus":"pci.0","addr":"0x1.0x2"}"#]);
        command.args(["-device", r#"{"driver":"virtio-balloon-pci","id":"balloon0","bus":"pci.0","addr":"0x2"}"#]);
        command.args("-sandbox on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny".split(' '));
        command.args(["-msg", "timestamp=on"]);
        let monitor = daemon.dir().join(format!("{name}.qmp"));
        command.arg("-qmp").arg(format!("unix:{},server=on,wait=off", monitor.display()));
        if let Some(uri) = incoming {
            command.args(["-incoming", uri]);
        }
        let log = std::fs::File::create(daemon.dir().join("qemu.log")).expect("a log");
        let child = command.stdout(Stdio::null()).stderr(log).spawn().expect("start it");
        let mut domain = Self(child);
        until("it is attached", || {
            let ended = domain.0.try_wait().expect("look at it");
            let log = || std::fs::read_to_string(daemon.dir().join("qemu.log")).unwrap_or_default();
            assert!(ended.is_none(), "QEMU ended: {ended:?}: {}", log());
            daemon.api.vm(name).is_ok()
        });
        domain
    }

    fn destroy(mut self, daemon: &Daemon, name: &str) {
        self.0.kill().expect("kill it");
        self.0.wait().expect("reap it");
        until("it is gone", || daemon.api.vm(name).is_err());
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn queries_reach_qemu_unchanged_without_a_daemon() {
    if missing("qemu", qemu_missing()) {
        return;
    }
    let emulator = Emulator::new();
    for words in ["-version", "--version", "-help", "-M help", "-machine ?", "-cpu help", "-nodefaults -device ?"] {
        let (asked, plain) =
            (emulator.ask(words), Command::new(QEMU).args(words.split(' ')).output().expect("start QEMU"));
        assert_eq!((asked.status, &asked.stderr), (plain.status, &plain.stderr), "{words}");
        // QEMU names itself by the word with which it was started.
        let text = |output: &Output| String::from_utf8_lossy(&output.stdout).into_owned();
        assert_eq!(text(&asked).len(), text(&plain).len(), "{words}");
    }
    let pid = emulator.0.path().join("pid");
    let probe = "-S -no-user-config -nodefaults -nographic -machine none,accel=kvm:tcg -daemonize -pidfile";
    let asked = emulator.ask(&format!("{probe} {}", pid.display()));
    assert!(asked.status.success(), "{}", String::from_utf8_lossy(&asked.stderr));
    let pid: u32 = std::fs::read_to_string(pid).expect("a pid").trim().parse().expect("a number");
    common::kill(pid);
}

#[test]
fn a_stock_domain_is_managed_and_keeps_its_settings_over_its_life() {
    if common::raw::no_uffd() || missing("qemu", qemu_missing()) {
        return;
    }
    let emulator = Emulator::new();
    let mut daemon = Daemon::start("[vm.\"db*\"]\nlimit = \"200M\"\nshares = \"low\"\n[vm.other]\nlimit = \"9M\"\n");
    let domain = Domain::start(&daemon, &emulator, "db", UUID, None);
    let vm = daemon.vm("db");
    assert_eq!((vm.uuid.as_deref(), vm.size_bytes), (Some(UUID), 256 * MIB));
    let from = |vm: &ballast_api::VmStat, setting: &str| {
        vm.sources.iter().find(|from| from.setting == setting).map(|from| (from.source, from.rule.clone()))
    };
    assert_eq!((vm.limit_bytes, vm.settings.shares), (Some(200 * MIB), Some(500)));
    assert_eq!(from(&vm, "limit"), Some((SourceKind::Rule, Some("db*".into()))));

    daemon.api.set_limit("db", Some(64 * MIB)).expect("a limit");
    let patch = VmPatch { reservation_bytes: Some(Some(32 * MIB)), ..VmPatch::default() };
    let warnings = daemon.api.patch_vm("db", &patch).expect("a reservation").warnings;
    assert!(!warnings.iter().any(|warning| warning.contains("ends with the VM")), "{warnings:?}");
    domain.destroy(&daemon, "db");

    // Saved and restored, started again, renamed; between these the daemon dies.
    daemon.kill_and_restart_keeper(true);
    let domain = Domain::start(&daemon, &emulator, "database", UUID, None);
    let vm = daemon.vm("database");
    assert_eq!((vm.limit_bytes, vm.settings.reservation_bytes), (Some(64 * MIB), 32 * MIB));
    let twin = Domain::start(&daemon, &emulator, "twin", UUID, None);
    assert_eq!((daemon.vm("twin").uuid, daemon.vm("twin").limit_bytes), (None, None));
    assert!(!daemon.events("uuid-taken").is_empty());
    twin.destroy(&daemon, "twin");
    assert_eq!(from(&vm, "limit"), Some((SourceKind::Operator, None)));
    // Rules go by the current name; settings that an operator never named come from rules.
    assert_eq!(from(&vm, "shares"), None, "the rule was for another name: {vm:?}");
    daemon.replace_engine();
    assert_eq!(daemon.vm("database").limit_bytes, Some(64 * MIB));
    assert_eq!(from(&daemon.vm("database"), "limit"), Some((SourceKind::Operator, None)));
    // Another domain with the old name has another UUID.
    let other = Domain::start(&daemon, &emulator, "db", "8fd83c3e-6ee5-4d23-9ca4-3f9b7e5f0b12", None);
    assert_eq!(daemon.vm("db").limit_bytes, Some(200 * MIB));
    other.destroy(&daemon, "db");
    domain.destroy(&daemon, "database");

    // A limit of the command line comes first, and `forget` removes the stored settings.
    let domain = Domain::start(&daemon, &emulator, "database", UUID, Some("--limit 128M\n"));
    let vm = daemon.vm("database");
    assert_eq!((vm.limit_bytes, from(&vm, "limit")), (Some(128 * MIB), Some((SourceKind::CommandLine, None))));
    // By the current name, by the name at the last change, or by the UUID.
    assert_eq!(daemon.api.forget("database").expect("forgotten")[0].uuid.as_deref(), Some(UUID));
    assert!(daemon.api.forget(UUID).is_err(), "nothing is left");
    domain.destroy(&daemon, "database");
    let domain = Domain::start(&daemon, &emulator, "database", UUID, Some("# nothing\n"));
    assert_eq!((daemon.vm("database").limit_bytes, daemon.api.kept().expect("list")), (None, Vec::new()));
    domain.destroy(&daemon, "database");
}

#[test]
fn a_limit_holds_while_a_domain_is_loaded_though_each_of_its_zero_pages_is_read() {
    if common::raw::no_uffd() || missing("qemu", qemu_missing()) {
        return;
    }
    const LIMIT: u64 = 64 * MIB;
    let emulator = Emulator::new();
    let daemon = Daemon::start("quarantine_ms = 100\n[vm.loaded]\nlimit = \"64M\"\n");
    let saved = Domain::start(&daemon, &emulator, "saved", UUID, None);
    let stream = daemon.dir().join("stream");
    let from = format!("unix:{}", stream.display());
    let other = "8fd83c3e-6ee5-4d23-9ca4-3f9b7e5f0b12";
    let loaded = Domain::start_with(&daemon, &emulator, ["loaded", other], None, Some(&from));
    until("it waits for the state", || stream.exists());
    let mut qmp = UnixStream::connect(daemon.dir().join("saved.qmp")).expect("its monitor");
    for line in ["qmp_capabilities\"", &format!("migrate\",\"arguments\":{{\"uri\":\"{from}\"}}")] {
        qmp.write_all(format!("{{\"execute\":\"{line}}}\n").as_bytes()).expect("it listens");
    }
    let mut most = 0;
    until("all of it has been read, and is at its limit", || {
        let vm = daemon.vm("loaded");
        most = most.max(vm.resident_bytes);
        vm.untouched_bytes == 0 && vm.resident_bytes <= LIMIT
    });
    println!("restore_resident_over_limit_mib {}", most.saturating_sub(LIMIT) / MIB);
    let unchecked = daemon.host().pin_check_missing;
    if !missing("pins", unchecked.as_deref()) {
        // Faults wait from the ceiling on, which is 1 MiB above the limit, at most 0.1 s each.
        assert!(most < LIMIT + 4 * MIB, "{} KiB above the limit", (most - LIMIT) >> 10);
    }
    let vm = daemon.vm("loaded");
    assert!(vm.zero_bytes >= 180 * MIB && vm.poisoned_bytes == 0, "{vm:?}");
    loaded.destroy(&daemon, "loaded");
    saved.destroy(&daemon, "saved");
}

#[test]
fn a_vmm_of_another_user_attaches_by_the_keepers_device() {
    const NOBODY: &str = "65534";
    let Some(program) = common::vmm::Program::compile() else { return };
    let closed = |dir: &&Path| std::fs::metadata(dir).is_ok_and(|dir| dir.permissions().mode() & 0o1 == 0);
    let temporary = std::env::temp_dir();
    let closed = temporary.ancestors().find(closed).map(|dir| format!("{} is closed to other users", dir.display()));
    if missing("open-tmpdir", closed.as_deref()) {
        return;
    }
    let own = std::fs::metadata("/dev/userfaultfd").is_ok_and(|device| device.permissions().mode() & 0o6 == 0);
    if missing("device", (!own).then_some("/dev/userfaultfd is absent, or any user may open it")) {
        return;
    }
    let daemon = Daemon::start(&format!("attach_group = \"{NOBODY}\"\n"));
    std::fs::set_permissions(daemon.dir(), PermissionsExt::from_mode(0o755)).expect("mode");
    let before = ["setpriv", "--reuid", NOBODY, "--regid", NOBODY, "--clear-groups"];
    let mut vmm = program.launch_behind(&before, Some((&daemon, "other")), ["ram", "memfd", "4096"]);
    until("it is attached", || daemon.api.vm("other").is_ok());
    daemon.api.set_limit("other", Some(4 * MIB)).expect("a limit");
    until("it is at its limit", || daemon.vm("other").resident_bytes <= 4 * MIB);
    assert_eq!(vmm.ask("verify"), "wrong 0");
}
