//! The shipped unit, in a separate systemd: installed, reloaded and restarted under a guest that writes and verifies
//! all the time. Needs root (userfaultfd, mounts) and systemd's program; the machine need not run it.
//!
//! systemd runs as the manager of a user, in a mount namespace in which `/usr/local/bin` and `/run` are directories of
//! the test. So the unit's own command lines run, and the machine is neither seen nor changed.

mod common;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use ballast_api::{Client, HostStat};

use common::guest::{Guest, moves};
use common::{BUSY, built, missing, until};

const SYSTEMD: &str = "/lib/systemd/systemd";

struct Systemd {
    dir: tempfile::TempDir,
    manager: Child,
    api: Client,
    /// The value of [`MAPPINGS`] before the unit raised it.
    mappings: String,
}

/// A setting that the unit raises.
const MAPPINGS: &str = "/proc/sys/vm/max_map_count";

impl Systemd {
    /// `None` if it cannot run here.
    fn start() -> Option<Self> {
        let root = rustix::process::geteuid().is_root();
        let has = |program: &str| Path::new(program).exists();
        let why = match (root, has(SYSTEMD) && has("/usr/bin/systemctl") && has("/usr/bin/unshare")) {
            (false, _) => Some("this is not root"),
            (_, false) => Some("no systemd, systemctl or unshare"),
            _ => None,
        };
        if missing("systemd", why) {
            return None;
        }
        let mappings = std::fs::read_to_string(MAPPINGS).expect("a setting");
        let dir = tempfile::Builder::new().prefix("ballast-test-").tempdir().expect("temporary directory");
        let at = |name: &str| dir.path().join(name);
        // Without the second directory, systemd thinks that another init booted the machine.
        for made in ["bin", "run/systemd/system", "home/.config/systemd/user"] {
            std::fs::create_dir_all(at(made)).expect("a directory");
        }
        let unit = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/ballastd.service");
        std::fs::copy(unit, at("home/.config/systemd/user/ballastd.service")).expect("the unit");
        let log = std::fs::File::create(at("log")).expect("a log");
        let begin = format!("mount --bind bin /usr/local/bin && mount --bind run /run && exec {SYSTEMD} --user");
        let manager = Command::new("unshare")
            .args(["--mount", "--propagation", "private", "sh", "-c", &begin])
            .current_dir(dir.path())
            .env("XDG_RUNTIME_DIR", "/run")
            .env("XDG_CONFIG_HOME", at("home/.config"))
            .env("HOME", at("home"))
            .env("SYSTEMD_LOG_TARGET", "console")
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a descriptor"))
            .stderr(log)
            .spawn()
            .expect("start unshare");
        let api = Client::new(at("run/ballast/api.sock")).expect("client").retry_for(Duration::from_secs(30));
        let mut systemd = Self { dir, manager, api, mappings };
        let mut ended = None;
        until("systemd serves, or ends", || {
            ended = systemd.manager.try_wait().expect("ours");
            ended.is_some() || systemd.control(&["show", "-p", "Version"]).status.success()
        });
        let why = ended.map(|how| format!("it ended with {how}: {}", systemd.read("log")));
        (!missing("systemd", why)).then_some(systemd)
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.at(name)).unwrap_or_default()
    }

    fn control(&self, args: &[&str]) -> Output {
        let run = self.at("run");
        let mut command = Command::new("systemctl");
        command.env("XDG_RUNTIME_DIR", run).arg("--user").args(args).stdin(Stdio::null());
        command.output().expect("run systemctl")
    }

    fn does(&self, args: &[&str]) -> String {
        let output = self.control(args);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "systemctl {args:?}: {said}\n{}", self.read("log"));
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    }

    fn property(&self, name: &str) -> String {
        self.does(&["show", "--value", "-p", name, "ballastd"])
    }

    /// As the command `install` would: a new file replaces the old one.
    fn install(&self, from: &Path, name: &str) {
        let new = self.at("bin").join(format!("{name}.new"));
        std::fs::copy(from, &new).expect("a copy");
        std::fs::rename(new, self.at("bin").join(name)).expect("renamed");
    }

    /// Waits for an answer: a started service need not have its socket yet.
    fn host(&self) -> HostStat {
        let mut host = None;
        until("it answers", || {
            host = self.api.host().ok();
            host.is_some()
        });
        host.expect("it answered")
    }
}

impl Drop for Systemd {
    fn drop(&mut self) {
        let _ = std::fs::write(MAPPINGS, &self.mappings);
        // Its VMs are gone by now, so keeper and engine end.
        let _ = self.control(&["kill", "--kill-whom=all", "--signal=KILL", "ballastd"]);
        let _ = self.control(&["exit"]);
        let mut tries = 0..200;
        while tries.next().is_some() && !matches!(self.manager.try_wait(), Ok(Some(_))) {
            std::thread::sleep(Duration::from_millis(50));
        }
        let _ = self.manager.kill();
        let _ = self.manager.wait();
    }
}

fn runs(pid: u32) -> (u64, u64) {
    use std::os::unix::fs::MetadataExt;
    let file = std::fs::metadata(format!("/proc/{pid}/exe")).expect("it runs");
    (file.dev(), file.ino())
}

#[test]
fn the_unit_reloads_to_the_installed_file_or_reports_why_not() {
    let Some(systemd) = Systemd::start() else { return };
    for name in ["ballastd", "ballast"] {
        systemd.install(&built(name), name);
    }
    systemd.does(&["start", "ballastd"]);
    // It counts as started when it answers, so a guest can attach at once.
    let at_once = Client::new(systemd.at("run/ballast/api.sock")).expect("client");
    at_once.host().expect("it answers");
    let ballastd = built("ballastd");
    let at = (&systemd.api, &*systemd.at("run/ballast/attach.sock"));
    let guest = Guest::start_at(&ballastd, at, "victim", BUSY, &[]);
    moves(&systemd.api, "victim");
    let first = systemd.host();
    assert_eq!(systemd.property("MainPID"), first.keeper_pid.to_string());
    assert_eq!(systemd.property("OOMPolicy"), "continue", "an engine that the kernel kills must not end the keeper");
    let old = runs(first.engine_pid);

    // Another file, even if it has equal bytes.
    systemd.install(&ballastd, "ballastd");
    systemd.does(&["reload", "ballastd"]);
    let reloaded = systemd.host();
    let main = systemd.property("MainPID");
    assert_eq!((reloaded.keeper_pid, main), (first.keeper_pid, first.keeper_pid.to_string()), "the keeper stays");
    assert_ne!(reloaded.engine_pid, first.engine_pid);
    let installed = runs(reloaded.engine_pid);
    assert_ne!(installed, old);
    assert_eq!(runs(reloaded.keeper_pid), installed, "{}", systemd.read("log"));
    moves(&systemd.api, "victim");

    // The program cannot be an engine: reload fails, and nothing changes.
    systemd.install(Path::new("/bin/false"), "ballastd");
    let output = systemd.control(&["reload", "ballastd"]);
    assert!(!output.status.success(), "{}", systemd.read("log"));
    let stays = systemd.host();
    assert_eq!((stays.keeper_pid, stays.engine_pid), (reloaded.keeper_pid, reloaded.engine_pid));
    assert_eq!((systemd.property("ActiveState"), runs(stays.engine_pid)), ("active".into(), installed));
    moves(&systemd.api, "victim");

    // A restart ends only the keeper, and its engine serves until the next engine does.
    systemd.install(&ballastd, "ballastd");
    systemd.does(&["restart", "ballastd"]);
    until("the next engine has the VM", || {
        let host = systemd.host();
        host.keeper_pid != first.keeper_pid
            && host.engine_pid != reloaded.engine_pid
            && systemd.api.vm("victim").is_ok()
    });
    assert_eq!(systemd.property("MainPID"), systemd.host().keeper_pid.to_string());
    moves(&systemd.api, "victim");
    guest.finish();
}
