//! `ballast bench` as a script runs it: rows have their keys, and the machine is as before, even after a kill.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use ballast_testkit::skip;
use rustix::fs::{FlockOperation, flock};
use serde_json::Value;

const BENCH: &str = env!("CARGO_BIN_EXE_ballast-bench");

/// Returns true, and prints a skip, if something is missing that every bench needs.
fn no_bench() -> bool {
    let (needs, why) = if !rustix::process::geteuid().is_root() {
        ("root", "this user is not root")
    } else if !Path::new(BENCH).with_file_name("ballastd").is_file() {
        ("ballastd", "ballastd is not built beside ballast-bench (cargo build -p ballast-daemon)")
    } else if !Path::new("/dev/zram0").exists() {
        ("zram", "there is no /dev/zram0")
    } else {
        return false;
    };
    skip(needs, why);
    true
}

/// The settings of the machine that a bench may change. They are read while no bench runs: each bench holds this lock
/// as long as it has changed a setting. The used part of a swap is left out, because the host may use its swap.
fn machine() -> String {
    let lock = File::open("/sys/block").expect("sysfs");
    flock(&lock, FlockOperation::LockExclusive).expect("lock");
    let zram = ["/sys/block/zram0/disksize", "/sys/block/zram0/comp_algorithm"];
    let files = zram.iter().chain(&["/proc/sys/vm/page-cluster"]);
    let settings: String = files.map(|path| std::fs::read_to_string(path).unwrap_or_default()).collect();
    let swaps = std::fs::read_to_string("/proc/swaps").unwrap_or_default();
    let names = swaps.lines().filter_map(|line| line.split_ascii_whitespace().next());
    settings + &names.collect::<Vec<_>>().join(" ")
}

fn rows(arguments: &[&str]) -> Vec<Value> {
    let dir = tempfile::tempdir().expect("a directory");
    let mut bench = Command::new(BENCH);
    bench.arg("bench").args(arguments).args(["--quick", "--json"]).env("TMPDIR", dir.path());
    let output = bench.output().expect("start ballast-bench");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {said}");
    // The output is not a terminal, so it has no control sequences.
    assert!(!said.contains('\x1b'), "{said}");
    let left: Vec<_> = std::fs::read_dir(dir.path()).expect("read").flatten().map(|entry| entry.file_name()).collect();
    assert!(left.is_empty(), "{arguments:?} left {left:?}");
    let text = String::from_utf8_lossy(&output.stdout);
    let rows: Vec<Value> =
        text.lines().map(|line| serde_json::from_str(line).expect("one JSON object a line")).collect();
    // A bench announces each row that it measures, and reports at once what cannot be measured.
    let has_figure = |row: &Value| row.as_object().is_some_and(|row| row.values().any(Value::is_f64));
    let announced = said.lines().any(|line| line.starts_with(&format!("ballast bench: {}, ", arguments[0])));
    assert!(announced || !rows.iter().any(has_figure), "{said}");
    rows
}

/// Assert that the row has this figure, with its spread and noise.
fn assert_figure(row: &Value, key: &str) {
    for suffix in ["", "_min", "_max", "_aa_pct"] {
        assert!(row[format!("{key}{suffix}")].is_number(), "{key}{suffix} in {row}");
    }
}

#[test]
fn real_runs_redis_on_both_sides_and_finds_every_byte() {
    if no_bench() {
        return;
    }
    let protocol = ballast_realmem::protocol::Protocol::Redis;
    if let Some(why) = ballast_realmem::server::missing(protocol) {
        return skip("real-programs", why);
    }
    let before = machine();
    let rows = rows(&["real"]);
    assert_eq!(machine(), before);
    let [row] = &rows[..] else { panic!("one row, not {rows:?}") };
    for key in ["real_speed", "real_restores_per_s", "real_wrong_bytes"] {
        for side in ["", "_kernel"] {
            assert!(row[format!("{key}{side}")].is_number(), "{key}{side} in {row}");
        }
    }
    assert!(row["real_engine_us_per_fault"].as_f64() > Some(0.0), "the limit was felt: {row}");
    assert_eq!([&row["real_wrong_bytes"], &row["real_wrong_bytes_kernel"]], [0.0, 0.0], "{row}");
}

#[test]
fn the_rows_of_a_quick_restore_have_their_keys_and_the_machine_is_as_it_was() {
    if no_bench() {
        return;
    }
    let before = machine();
    let rows = rows(&["restore"]);
    let data: Vec<&str> = rows.iter().filter_map(|row| row["data"].as_str()).collect();
    assert_eq!(data, ["half_compressible", "incompressible"]);
    for row in &rows {
        assert_eq!((row["bench"].as_str(), row["guest"].as_str()), (Some("restore"), Some("native")));
        for key in
            ["restore_us_p50", "restore_us_p90", "restore_us_p99", "restore_us_max", "plain_us_p50", "floor_us_p50"]
        {
            assert_figure(row, key);
        }
        let kernel = ["kernel_swapin_us_p50", "kernel_swapin_us_p99", "ratio_restore_p50", "ratio_restore_p99"];
        // Where another swap device is active, or memory cgroups are missing, the row must say so.
        let measured = row["not_measured"].is_null();
        kernel.iter().for_each(|key| assert_eq!(row[key].is_number(), measured, "{key} in {row}"));
        assert!(row["host"]["kernel"].is_string() && row["host"]["build"].is_string(), "{row}");
    }
    assert_eq!(machine(), before);
}

#[test]
fn a_bench_that_is_killed_leaves_no_swap_no_setting_and_no_process_behind() {
    if no_bench() {
        return;
    }
    let before = machine();
    let mut bench = Command::new(BENCH)
        .args(["bench", "reclaim", "--json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("start ballast");
    let owned = || {
        let text = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", bench.id())).unwrap_or_default();
        text.split_ascii_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<u32>>()
    };
    // Guard, keeper, and a guest or more: the bench is at work. It waits for the benches of all other tests.
    let start = Instant::now();
    while owned().len() < 4 {
        assert!(start.elapsed() < Duration::from_secs(1200), "the bench starts no guests");
        std::thread::sleep(Duration::from_millis(5));
    }
    let children = owned();
    bench.kill().expect("kill");
    bench.wait().expect("reap");
    // The helpers of the bench hold the other end until the last of them has ended.
    bench.stdout.take().expect("piped").read_to_end(&mut Vec::new()).expect("read to the end");
    assert_eq!(machine(), before);
    let alive = |pid: &u32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        stat.rsplit(") ").next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with(['Z', 'X']))
    };
    let start = Instant::now();
    while children.iter().any(alive) {
        assert!(start.elapsed() < Duration::from_secs(60), "still alive: {children:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
    let cgroups = format!("/sys/fs/cgroup/memory/ballast-bench-{}-1", bench.id());
    assert!(!Path::new(&cgroups).exists());
}
