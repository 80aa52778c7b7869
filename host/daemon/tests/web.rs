//! Operators' views: the page of `ballast web` in a real browser over a real daemon and VMs, metrics and rules by
//! Prometheus's own tool, and events as they come.
//!
//! Needs Chromium, Python, and what `scripts/web-tools.sh` fetches; `BALLAST_PICTURES=DIR` keeps the screenshots.

mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use ballast_testkit::program::Ends;

use common::guest::Guest;
use common::{Daemon, until};

struct Web {
    _program: Ends,
    address: String,
}

impl Web {
    fn start(daemon: &Daemon) -> Self {
        let mut command = daemon.ballast();
        let mut child =
            command.arg("web").stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("ballast is built");
        let mut address = String::new();
        let mut said = BufReader::new(child.stdout.take().expect("piped"));
        said.read_line(&mut address).expect("an address");
        Self { _program: Ends(child), address: address.trim().to_owned() }
    }

    fn ask(&self, method: &str, path: &str, host: Option<&str>) -> (u16, String) {
        let place = self.address.strip_prefix("http://").and_then(|rest| rest.split('/').next()).expect("a host");
        let mut stream = TcpStream::connect(place).expect("connect");
        let host = host.unwrap_or(place);
        write!(stream, "{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n").expect("sent");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer");
        let status = answer.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
        (status, answer)
    }

    /// The path `rest` below the path that begins with the token.
    fn path(&self, rest: &str) -> String {
        format!("/{}{rest}", self.address.splitn(4, '/').nth(3).expect("a token"))
    }
}

#[test]
fn the_page_needs_its_token_and_its_host_name_and_changes_nothing() {
    let daemon = Daemon::start("");
    let web = Web::start(&daemon);
    for (method, path, host, wanted) in [
        ("GET", web.path(""), None, 200),
        ("GET", web.path("app.js"), None, 200),
        ("GET", web.path("api/v1/host"), None, 200),
        ("GET", web.path("api/v1/vms/nobody"), None, 404),
        ("GET", "/".into(), None, 404),
        ("GET", "/0123456789abcdef0123456789abcdef/".into(), None, 404),
        ("GET", "/api/v1/host".into(), None, 404),
        ("GET", web.path("../../etc/passwd"), None, 404),
        ("GET", web.path("api/v1/host"), Some("evil.example"), 421),
        ("GET", web.path(""), Some(""), 421),
        ("PATCH", web.path("api/v1/vms"), None, 405),
        ("PUT", web.path("api/v1/upgrade"), None, 405),
    ] {
        let (status, answer) = web.ask(method, &path, host);
        assert_eq!(status, wanted, "{method} {path} as {host:?}: {answer}");
        assert!(answer.contains("content-security-policy: default-src 'none'"), "{answer}");
    }
    let (_, host) = web.ask("GET", &web.path("api/v1/host"), None);
    assert!(host.contains(&format!("\"engine_pid\":{}", daemon.host().engine_pid)), "{host}");
}

#[test]
fn a_browser_shows_host_and_vms_without_a_finding_of_accessibility() {
    let chromium = Command::new("chromium").arg("--version").output().err();
    if common::raw::no_uffd() || common::missing("chromium", chromium.map(|error| error.to_string())) {
        return;
    }
    let daemon = Daemon::start("heat.track = true\n[policy]\nname = \"maestro\"\nbudget = \"80M\"\n");
    let guests = [
        Guest::start(&daemon, "web", "--workload hotset --ram 48M"),
        Guest::start(&daemon, "database", "--workload zipf --ram 64M"),
    ];
    until("the history begins", || daemon.api.host_history(60).is_ok_and(|past| past.at_unix_s.len() > 1));
    let web = Web::start(&daemon);
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let pictures = std::env::var_os("BALLAST_PICTURES").map_or_else(|| daemon.dir().to_owned(), PathBuf::from);
    let mut drive = Command::new("python3");
    drive.arg(root.join("lab/web/drive.py")).arg(&web.address).arg(pictures);
    let axe = root.join("target/web/axe.min.js");
    if !common::missing("axe", (!axe.is_file()).then(|| "scripts/web-tools.sh was not run".to_owned())) {
        drive.arg(axe);
    }
    let ended = drive.args(["database", "web"]).output().expect("python3 starts");
    let said = String::from_utf8_lossy(&ended.stdout);
    println!("{said}");
    assert!(ended.status.success(), "{said}{}", String::from_utf8_lossy(&ended.stderr));
    guests.into_iter().for_each(|guest| drop(guest.finish()));
}

#[test]
fn the_page_reports_what_a_host_lacks_which_vm_has_it_and_that_the_daemon_is_gone() {
    let chromium = Command::new("chromium").arg("--version").output().err();
    if common::raw::no_uffd() || common::missing("chromium", chromium.map(|error| error.to_string())) {
        return;
    }
    let daemon = Daemon::start("quarantine_ms = 5\nstore_budget = \"8M\"\n");
    let guest = Guest::start(&daemon, "greedy", "--workload idle --ram 64M --limit 16M --incompressible");
    let web = Web::start(&daemon);
    let drive = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../lab/web/drive.py");
    let dir = tempfile::tempdir().expect("a directory");
    let pictures = std::env::var_os("BALLAST_PICTURES").map_or_else(|| dir.path().to_owned(), PathBuf::from);
    let mut command = Command::new("python3");
    command.arg(drive).arg(&web.address).arg(&pictures);
    command.args(["--broken", "The store is full", "they may have: greedy", "the store has no room for it"]);
    let mut child = command.stdout(Stdio::piped()).spawn().expect("python3 starts");
    let mut said = BufReader::new(child.stdout.take().expect("piped")).lines().map_while(Result::ok);
    let broken = said.find(|line| line.starts_with("broken"));
    drop(guest.finish());
    drop(daemon);
    let banner = said.find(|line| line.starts_with("banner"));
    assert!(child.wait().expect("it ends").success());
    assert_eq!(broken.as_deref(), Some("broken 1"));
    assert!(banner.is_some_and(|text| text.contains("VMs that touch far memory wait until it does")));
}

#[test]
fn top_shows_real_vms() {
    let Some(daemon) = Daemon::with_uffd("quarantine_ms = 5\n") else { return };
    let guest = Guest::start(&daemon, "web", "--workload uniform --ram 32M --limit 16M");
    common::until("it waits, and says why", || {
        daemon.api.vm("web").is_ok_and(|vm| vm.why.is_some_and(|why| why.contains("its operator's limit holds it")))
    });
    let ended = daemon.ballast().args(["top", "--once"]).output().expect("it runs");
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    let frame = String::from_utf8(ended.stdout).expect("UTF-8");
    assert!(frame.contains("16 MiB") && frame.contains("\nweb "), "{frame}");
    drop(guest.finish());
}

#[test]
fn promtool_finds_nothing_in_the_metrics_and_the_rules() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let promtool = root.join("target/web/promtool");
    if common::raw::no_uffd() || common::missing("promtool", (!promtool.is_file()).then(|| "not fetched".to_owned())) {
        return;
    }
    let rules = root.join("configs/prometheus/ballast.rules.yml");
    assert!(Command::new(&promtool).args(["check", "rules"]).arg(rules).status().expect("it runs").success());
    let daemon = Daemon::start("");
    let guest = Guest::start(&daemon, "web", "--workload idle --ram 16M");
    let mut check = Command::new(&promtool).args(["check", "metrics"]).stdin(Stdio::piped()).spawn().expect("it runs");
    let page = daemon.api.metrics().expect("metrics");
    check.stdin.take().expect("piped").write_all(page.as_bytes()).expect("written");
    assert!(check.wait().expect("it ends").success(), "{page}");
    drop(guest.finish());
}

#[test]
fn events_are_followed_over_the_death_of_an_engine() {
    follow_over_a_death(|daemon| {
        let mut command = daemon.ballast();
        command.args(["events", "--follow", "--vm", "web"]);
        command
    });
}

#[test]
fn the_example_in_python_follows_events_over_the_death_of_an_engine() {
    let python = Command::new("python3").arg("--version").output().err();
    if common::missing("python3", python.map(|error| error.to_string())) {
        return;
    }
    follow_over_a_death(|daemon| {
        let mut command = Command::new("python3");
        command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/follow.py"));
        command.arg(daemon.dir().join("api.sock"));
        command
    });
}

fn follow_over_a_death(command: impl FnOnce(&Daemon) -> Command) {
    let Some(daemon) = Daemon::with_uffd("") else { return };
    let mut command = command(&daemon);
    let mut child = command.stdout(Stdio::piped()).spawn().expect("ballast is built");
    let mut said = BufReader::new(child.stdout.take().expect("piped")).lines();
    let _ends = Ends(child);
    let mut next = |wanted: &str| said.by_ref().map_while(Result::ok).find(|line| line.contains(wanted));
    let guest = Guest::start(&daemon, "web", "--workload idle --ram 16M");
    assert!(next("attached").is_some());
    daemon.replace_engine();
    until("the VM is open", || daemon.api.set_limit("web", Some(8 << 20)).is_ok());
    assert!(next("limit").is_some());
    drop(guest.finish());
}
