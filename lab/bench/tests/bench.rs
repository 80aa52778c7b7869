//! `ballast bench` as a script runs it: its rows have their keys, and the machine is as it was, however the bench ends.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use ballast_testkit::{missing, skip};
use rustix::fs::{FlockOperation, flock};
use serde_json::Value;

const BENCH: &str = env!("CARGO_BIN_EXE_ballast-bench");

/// Returns true, and says what is missing, if something is missing that every bench needs.
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
/// as long as anything is changed. The used part of a swap is left out: an active one of the host changes meanwhile.
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

/// The machine before a bench, after the changes of one that was killed together with its guard are put back.
fn machine_before() -> String {
    ballast_bench::put_back_leftovers().expect("put back");
    machine()
}

/// The rows of a bench with `--quick`.
fn rows(arguments: &[&str]) -> Vec<Value> {
    let dir = tempfile::tempdir().expect("a directory");
    let mut bench = Command::new(BENCH);
    bench.arg("bench").args(arguments).args(["--quick", "--json"]).env("TMPDIR", dir.path());
    let output = bench.output().expect("start ballast-bench");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {said}");
    // No terminal, so nothing to draw with.
    assert!(!said.contains('\x1b'), "{said}");
    let left: Vec<_> = std::fs::read_dir(dir.path()).expect("read").flatten().map(|entry| entry.file_name()).collect();
    assert!(left.is_empty(), "{arguments:?} left {left:?}");
    let text = String::from_utf8_lossy(&output.stdout);
    let rows: Vec<Value> =
        text.lines().map(|line| serde_json::from_str(line).expect("one JSON object a line")).collect();
    // A bench announces each row that it measures. It says at once what cannot be measured.
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
fn qemu_guests_have_rows_and_name_the_figures_not_measured() {
    if no_bench() {
        return;
    }
    if missing("qemu", ballast_testvm::qemu::qemu_missing()) {
        return;
    }
    if !Path::new(BENCH).with_file_name("libballast_preload.so").is_file() {
        return skip(
            "preload",
            "ballast and its preload library are not built beside ballast-bench \
             (cargo build -p ballast-cli -p ballast-preload)",
        );
    }
    let before = machine_before();
    let restore = rows(&["restore", "--guest", "qemu"]);
    for row in &restore {
        assert_eq!((row["bench"].as_str(), row["guest"].as_str()), (Some("restore"), Some("qemu")));
        ["restore_us_p50", "restore_us_p99", "floor_us_p50"].iter().for_each(|key| assert_figure(row, key));
        assert!(row["plain_us_p50"].is_null() && row["not_measured"].is_array(), "{row}");
    }
    let idle = rows(&["idle", "--guest", "qemu"]);
    assert_eq!(idle.iter().filter_map(|row| row["workload"].as_str()).collect::<Vec<_>>(), ["hotset", "zipf"]);
    for row in &idle {
        assert!(row["idle_overhead_pct"].is_number() && row["idle_aa_pct"].is_number(), "{row}");
    }
    let [redis] = &rows(&["track", "--guest", "qemu"])[..] else { panic!("one row") };
    for key in ["overhead_pct", "overhead_aa_pct", "ops_per_s", "wss_bytes", "used_data_bytes", "cycles"] {
        assert!(redis[key].is_number() && redis["not_measured"].is_array(), "{key} in {redis}");
    }
    for (bench, key) in [("scale", "scale_2_threads"), ("storm", "storm_victim_p99_ratio")] {
        let rows = rows(&[bench, "--guest", "qemu"]);
        assert!(rows.iter().all(|row| row[key].is_null() && row["not_measured"].is_array()), "{rows:?}");
    }
    assert_eq!(machine(), before);
}

#[test]
fn tiers_compares_hot_ranges_with_an_oracle_and_marks_its_rows_simulated() {
    let rows = rows(&["tiers"]);
    assert!(rows.iter().all(|row| row["simulated"] == true && row["guest"] == "simulated"), "{rows:?}");
    let of = |name: &'static str| rows.iter().filter(move |row| row["measures"] == name);
    let costs = |row: &Value| row["classifier_cpu_pct"].is_number();
    assert!(of("classifier_cpu").count() > 0 && of("classifier_cpu").all(costs), "{rows:?}");
    for row in of("host_tiers") {
        assert_eq!(row["modelled_time"], true);
        for key in ["", "_oracle", "_oracle_2mib", "_whole_pages", "_sampled_5pct", "_first_touch"] {
            assert_figure(row, &format!("host_tier_hit_pct{key}"));
        }
        ["splits", "joins", "moved_mib"].iter().for_each(|key| assert_figure_alone(row, key));
    }
    for row in of("sensitivity") {
        ["", "_published", "_oracle"].iter().for_each(|key| assert_figure(row, &format!("fmem_hit_pct{key}")));
    }
    let is_other = |row: &&Value| row["measures"].is_null();
    let hits: Vec<&Value> = rows.iter().filter(is_other).collect();
    assert!(of("host_tiers").count() > 0 && of("sensitivity").count() > 0 && hits.len() >= 6, "{rows:?}");
    for row in hits {
        let keys = ["oracle", "published", "lru", "first_touch", "by_unit"].map(|key| format!("fmem_hit_pct_{key}"));
        keys.iter()
            .map(String::as_str)
            .chain(["fmem_hit_pct", "ranges", "splits"])
            .for_each(|key| assert_figure(row, key));
        let (ours, oracle) = (row["fmem_hit_pct"].as_f64(), row["fmem_hit_pct_oracle"].as_f64());
        let is_gups = row["workload"].as_str().is_some_and(|name| name.starts_with("gups") && name != "gups_moving");
        let is_full = row["samples_per_s"].as_u64() >= Some(10_000);
        assert!(!(is_gups && is_full) || ours.map(|pct| pct + 2.0) >= oracle, "{row}");
    }
}

#[test]
fn limit_has_samples_over_time_and_a_plot() {
    if no_bench() {
        return;
    }
    let [row] = &rows(&["limit"])[..] else { panic!("one row") };
    let samples = |key: &str| row[key].as_array().unwrap_or_else(|| panic!("{key} in {row}"));
    for key in ["limit_bytes", "resident_bytes", "far_bytes", "refaults_per_s", "quarantine_hits_per_s", "ops_per_s"] {
        assert_eq!(samples(key).len(), samples("t_s").len(), "{key}");
    }
    let limits: Vec<Option<u64>> = samples("limit_bytes").iter().map(Value::as_u64).collect();
    let limited = limits.iter().filter(|limit| limit.is_some()).count();
    assert!(limits[0].is_none() && limited > 2 && limits[limits.len() - 1].is_none(), "{limits:?}");
    let far: Vec<u64> = samples("far_bytes").iter().filter_map(Value::as_u64).collect();
    assert!(far[0] == 0 && far.iter().any(|bytes| *bytes > 0), "{far:?}");

    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("limit.jsonl");
    std::fs::write(&file, row.to_string()).expect("a row");
    let output = Command::new(BENCH).arg("plot").arg(&file).arg("--out").arg(dir.path()).output().expect("start");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let picture = std::fs::read_to_string(dir.path().join("vm-under-limit.svg")).expect("a picture");
    assert!(picture.contains("A VM of 32 MiB") && picture.contains("refaults"), "{picture}");
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
    let before = machine_before();
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
fn pool_has_metadata_churn_and_real_memory_and_returns_the_huge_pages() {
    const HUGE_PAGES: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";
    if no_bench() {
        return;
    }
    let Ok(before) = std::fs::read_to_string(HUGE_PAGES) else { return skip("hugetlb", "there are no huge pages") };
    let rows = rows(&["pool"]);
    let of = |what: &str| rows.iter().filter(|row| row["measures"] == what).collect::<Vec<_>>();
    for row in of("metadata") {
        assert!(row["metadata_bytes_per_gib"].as_f64().is_some_and(|bytes| bytes < 1.2 * 1024.0), "{row}");
        assert_eq!(row["modelled"], true, "{row}");
    }
    assert_eq!((of("metadata").len(), of("churn").len()), (2, 3));
    for row in of("churn") {
        for side in ["", "fenced_", "first_fit_", "buddy_"] {
            assert_eq!(row[format!("{side}sellable_pct")], 100.0, "{side} {row}");
            assert_figure_alone(row, &format!("{side}sellable_1g_pct"));
        }
    }
    // Where memory is short, the rows say so.
    for row in of("ready") {
        for key in ["ready_us", "memfd_touch_ready_us", "memfd_populate_ready_us"] {
            assert_figure(row, key);
        }
        assert!(row["ratio_ready"].is_number() || row["not_measured"].is_array(), "{row}");
    }
    for row in of("sold") {
        let share = |key: &str| row[key].as_f64().unwrap_or_else(|| panic!("{key} in {row}"));
        let all = || share("real_sellable_pct") + share("real_fenced_pct");
        assert!(row["not_measured"].is_array() || (all() - 100.0).abs() < 0.1, "{row}");
    }
    for row in of("speed") {
        assert!(row["ratio_guest_speed_hugetlb"].is_number() || row["not_measured"].is_array(), "{row}");
    }
    for row in of("zeroing") {
        for key in ["zero_memset_gib_per_s", "zero_nontemporal_gib_per_s", "zero_kernel_gib_per_s"] {
            assert_figure(row, key);
        }
    }
    let of_the_daemon = ["start", "on_demand", "overcommit", "guest", "cost", "largest"];
    assert_eq!(of_the_daemon.map(|what| of(what).len()), [1; 6]);
    let measured = |what| of(what).into_iter().filter(|row| row["not_measured"].is_null()).collect::<Vec<_>>();
    for row in measured("start") {
        for key in ["product_ready_us", "hugetlb_ready_us", "memfd_touch_ready_us", "product_pinned_ready_us"] {
            assert_figure_alone(row, key);
        }
        ["qemu_plain_128mib_ms", "qemu_pool_ms", "qemu_pool_locked_ms", "qemu_hugetlb_prealloc_ms"]
            .iter()
            .for_each(|key| assert_figure_alone(row, key));
    }
    for row in measured("on_demand") {
        for side in ["at_once", "on_demand", "hugetlb"] {
            ["ready_us", "touch_us", "touch_us_p50", "touch_us_p99"]
                .iter()
                .for_each(|key| assert_figure_alone(row, &format!("{side}_{key}")));
        }
    }
    for row in measured("overcommit") {
        let of = |key: &str| row[key].as_f64().unwrap_or_else(|| panic!("{key} in {row}"));
        assert!(of("overcommit_refault_mib_per_s") > 0.0 && of("overcommit_refaults_pct") > 10.0, "{row}");
    }
    for row in measured("largest") {
        let of = |key: &str| row[key].as_f64().unwrap_or_else(|| panic!("{key} in {row}"));
        assert!(of("pool_largest_pct") > 0.0 && of("hugetlb_largest_pct") > 0.0, "{row}");
    }
    for row in measured("guest") {
        ["ratio_guest_speed_pool", "ratio_guest_speed_aa"].iter().for_each(|key| assert_figure_alone(row, key));
    }
    for row in measured("cost") {
        let of = |key: &str| row[key].as_f64().unwrap_or_else(|| panic!("{key} in {row}"));
        assert!(of("page_words_bytes_per_gib") > 0.0 && of("pool_state_bytes_per_gib") > 0.0, "{row}");
        // 28 of the 32 KiB of each page, as far as no other program allocated any.
        assert!(of("hvo_freed_bytes_per_gib") > 0.0, "{row}");
        assert!(of("sellable_share_hvo_pct") > of("sellable_share_pct"), "{row}");
        assert!(of("hugetlb_sellable_share_pct") > of("plain_sellable_share_pct"), "{row}");
    }
    assert_eq!(std::fs::read_to_string(HUGE_PAGES).expect("read"), before, "huge pages were kept");
    let left = std::fs::read_to_string("/proc/self/mounts").expect("read");
    assert!(!left.contains("ballast-own-"), "files of the pool stay mounted: {left}");
}

/// Assert that the row has this figure of one repetition.
fn assert_figure_alone(row: &Value, key: &str) {
    assert!(row[key].is_number(), "{key} in {row}");
}

#[test]
fn spill_has_the_rate_to_disk_and_the_time_to_restore_and_leaves_no_swap_file() {
    if no_bench() {
        return;
    }
    let before = machine_before();
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    if let Err(error) = ballast_sys::direct::create_unnamed(dir.path(), ballast_base::Bytes(4096)) {
        return skip("o_direct", error);
    }
    let rows = rows(&["spill", "--dir", dir.path().to_str().expect("a plain path")]);
    assert_eq!(rows.len(), 2);
    for row in &rows {
        for key in ["spill_pages_per_s", "spill_mib_per_s", "file_restore_us_p50", "file_restore_us_p99"] {
            assert_figure(row, key);
        }
        ["floor_pread_us_p50", "floor_pread_us_p99"].iter().for_each(|key| assert_figure(row, key));
        let measured = row["not_measured"].is_null();
        for key in ["kernel_swapfile_out_mib_per_s", "kernel_swapfile_in_us_p50", "ratio_spill"] {
            assert_eq!(row[key].is_number(), measured, "{key} in {row}");
        }
    }
    assert_eq!(std::fs::read_dir(dir.path()).expect("read").count(), 0);
    assert_eq!(machine(), before);
}

#[test]
fn far_compares_the_cluster_with_ram_disk_and_bare_connections() {
    if no_bench() || missing("valkey", ballast_testvm::valkey::valkey_missing()) {
        return;
    }
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    if let Err(error) = ballast_sys::direct::create_unnamed(dir.path(), ballast_base::Bytes(4096)) {
        return skip("o_direct", error);
    }
    let rows = rows(&["far", "--dir", dir.path().to_str().expect("a plain path")]);
    assert_eq!(rows.len(), 1, "a quick bench has one kind of pages");
    for row in &rows {
        for name in ["ram", "file", "far", "far_tls", "bare"] {
            for figure in ["get_us_p50", "get_us_p99", "run64_us_per_page", "spill_pages_per_s"] {
                assert_figure(row, &format!("{name}_{figure}"));
            }
        }
        for name in ["ram", "file", "far", "far_tls"] {
            for figure in ["restore_us_p50", "restore_us_p99", "in_order_us_per_page"] {
                assert_figure(row, &format!("{name}_{figure}"));
            }
        }
        ["ratio_far_restore", "ratio_far_get", "ratio_far_spill"].iter().for_each(|key| assert_figure(row, key));
        assert_eq!(row["far_wrong_bytes"], 0.0);
    }
}

#[test]
fn scale_has_two_vms_ten_vms_two_fault_workers_and_engine_memory() {
    if no_bench() {
        return;
    }
    let rows = rows(&["scale"]);
    let [two, ten, workers, memory] = &rows[..] else { panic!("{rows:?}") };
    ["scale_2_threads", "attach_64_gib_ms"].iter().for_each(|key| assert_figure(two, key));
    ["reclaim_10_pages_per_s", "restore_10_us_p50", "restore_10_us_p99"].iter().for_each(|key| assert_figure(ten, key));
    assert_eq!(ten["vms"], 10);
    ["ratio_restore_2_workers", "restore_2_workers_us_p50"].iter().for_each(|key| assert_figure(workers, key));
    for key in ["engine_overhead_bytes_per_gib", "engine_overhead_half_far_bytes_per_gib"] {
        assert!(memory[key].is_number(), "{key} in {memory}");
    }
    assert!(memory["engine_overhead_half_far_files_bytes_per_gib"].as_f64() > Some(0.0), "{memory}");
}

#[test]
fn density_has_busy_recovering_and_idle_vms_and_checks_every_byte() {
    if no_bench() {
        return;
    }
    let before = machine_before();
    let rows = rows(&["density", "--vms", "3"]);
    let [busy, recovering, idle] = &rows[..] else { panic!("{rows:?}") };
    let facts = |row: &Value| (row["measures"].as_str().map(str::to_owned), row["vms"].as_u64());
    let named = |name: &str| (Some(name.to_owned()), Some(3));
    assert_eq!([facts(busy), facts(recovering), facts(idle)], ["busy", "recovering", "idle"].map(named));
    ["density_touches_per_s", "density_p99_us", "density_worst_page_ms"]
        .iter()
        .for_each(|key| assert_figure(busy, key));
    // Where another swap device is active, or memory cgroups are missing, the row must say so.
    let measured = busy["not_measured"].is_null();
    for key in ["kernel_density_touches_per_s", "density_ratio_kernel", "kernel_density_fairness"] {
        assert_eq!(busy[key].is_number(), measured, "{key} in {busy}");
    }
    for key in ["density_recover_ms_max", "density_recover_touches_per_s", "density_recover_api_ms"] {
        assert!(recovering[key].is_number(), "{key} in {recovering}");
    }
    for key in ["density_list_busy_ms", "density_fairness", "density_busy_pct"] {
        assert!(busy[key].is_number(), "{key} in {busy}");
    }
    for key in ["idle_cpu_pct", "threads", "limit_ms_p99", "attach_ms_p99", "list_ms", "half_far_bytes_per_gib"] {
        assert!(idle[format!("density_{key}")].is_number(), "{key} in {idle}");
    }
    assert_eq!(machine(), before);
}

#[test]
fn upgrade_has_faults_gap_switch_requests_and_a_probe_with_and_without_an_upgrade() {
    if no_bench() {
        return;
    }
    let rows = rows(&["upgrade"]);
    let [row] = &rows[..] else { panic!("{rows:?}") };
    let faults = ["steady_fault_us", "upgrade_fault_us"]
        .iter()
        .flat_map(|key| ["p99", "longest"].map(|end| format!("{key}_{end}")));
    for key in faults.chain(["upgrade_gap_us", "upgrade_switch_us", "upgrade_ms"].map(String::from)) {
        assert_figure_alone(row, &key);
        assert_figure_alone(row, &format!("{key}_max"));
    }
    for when in ["steady", "upgrade", "steady_again"] {
        for key in ["us_p99", "us_p999", "us_longest", "unserved_us_longest"] {
            assert_figure_alone(row, &format!("{when}_probe_{key}_max"));
        }
    }
    assert!(row["probe_faults"].as_u64() > Some(0), "{row}");
    assert!(row["second_reader_us_p50"].as_f64() > Some(0.0), "{row}");
    assert_eq!((row["upgrade_gap_us_max"].as_f64(), row["wrong_bytes"].as_u64()), (Some(0.0), Some(0)), "{row}");
    assert!(row["api_requests"].as_u64() > Some(0) && row["failed_ops"].is_u64(), "{row}");
}

#[test]
fn track_has_a_row_for_each_question_and_each_row_its_keys() {
    if no_bench() {
        return;
    }
    let before = machine_before();
    let rows = rows(&["track"]);
    let of = |what: &str| rows.iter().filter(|row| row["measures"] == what).collect::<Vec<_>>();
    for (what, count, keys) in [
        (
            "accuracy",
            2,
            &[
                "f1_4k",
                "precision_4k",
                "recall_4k",
                "f1_huge_only",
                "f1_sampled_5pct",
                "f1_by_rate_4k",
                "f1_knowing_rates",
                "wss_error_pct",
                "cycles_s",
            ][..],
        ),
        ("units", 1, &["split_us_per_unit", "coalesce_us_per_unit", "kernel_split_us", "kernel_collapse_us"]),
        ("phase", 1, &["wss_error_pct"]),
        ("overhead", 2, &["overhead_pct", "overhead_aa_pct", "guest_waited_pct"]),
        ("bloat", 1, &["reclaimable_pct_100"]),
    ] {
        let rows = of(what);
        assert_eq!(rows.len(), count, "{what}");
        for (row, key) in rows.iter().flat_map(|row| keys.iter().map(move |key| (row, key))) {
            assert!(row[key].is_number(), "{key} in {row}");
        }
    }
    for row in of("accuracy") {
        assert!((0.0..=1.0).contains(&row["f1_4k"].as_f64().expect("a number")), "{row}");
    }
    assert_eq!(machine(), before);
}

#[test]
fn the_rows_of_a_quick_restore_have_their_keys_and_the_machine_is_as_it_was() {
    if no_bench() {
        return;
    }
    let before = machine_before();
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
fn balance_has_levels_a_jump_and_a_pair_and_keeps_every_byte() {
    if no_bench() {
        return;
    }
    let before = machine_before();
    let rows = rows(&["balance"]);
    let levels: Vec<u64> =
        rows.iter().filter(|row| row["vms"] == 8).filter_map(|row| row["level_pct"].as_u64()).collect();
    assert_eq!(levels, [100, 60]);
    let (eight, rest) = rows.split_at(2);
    for row in eight {
        for key in ["geomean_slowdown", "resident_bytes", "slowdown_store_1", "slowdown_scan_2", "engine_cpu_pct"] {
            assert_figure(row, key);
        }
        // Short of memory, the kernel may have ended one of its VMs.
        let measured = row["not_measured"].is_null();
        for key in ["kernel_geomean_slowdown", "improvement_pct"] {
            assert_eq!(row[key].is_number(), measured, "{key} in {row}");
        }
        assert!(row["worst_vm"].is_string() && row["store_bytes"].is_number(), "{row}");
    }
    let [jump, pair, stages, taken] = rest else { panic!("{rest:?}") };
    assert!(jump["converge_s"].is_number() && jump["limit_changes_per_min"].is_number(), "{jump}");
    assert_eq!(pair["pair"], "store+graph");
    assert_figure(pair, "pair_slowdown");
    assert_eq!(stages["pair"], "triangles+means");
    ["pair_slowdown", "slowdown_triangles", "slowdown_means"].iter().for_each(|key| assert_figure(stages, key));
    assert_eq!(taken["workload"], "zipf");
    assert!(taken["reclaim_ratio_at_5pct"].is_number(), "{taken}");
    assert_eq!(machine(), before);
}

#[test]
fn a_bench_that_is_killed_leaves_no_swap_no_setting_and_no_process_behind() {
    if no_bench() {
        return;
    }
    let before = machine_before();
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
    // Guard, keeper, and a guest or more: it is in the middle of its work. It waits for the benches of all other tests.
    let start = Instant::now();
    while owned().len() < 4 {
        assert!(start.elapsed() < Duration::from_secs(1200), "the bench starts no guests");
        std::thread::sleep(Duration::from_millis(5));
    }
    let children = owned();
    bench.kill().expect("kill");
    bench.wait().expect("reap");
    // Its helpers hold the other end until the last of them has ended.
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
