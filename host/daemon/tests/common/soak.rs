//! Counters of a soak: `scripts/soak.sh` names a file in `BALLAST_SOAK_LOG`, and each test adds lines of JSON to it.
//!
//! Before: a test kills a process, or a guest ends. After: the script adds the lines up. Threads: any; a line is one
//! write. Without the variable nothing is written.

use std::io::Write;

use serde_json::{Value, json};

pub fn is_on() -> bool {
    std::env::var_os("BALLAST_SOAK_LOG").is_some()
}

pub fn killed() {
    write(&json!({ "kills": 1 }));
}

/// Counts the work and the errors of a guest, from its outcome. If the test made the guest hang, its longest wait does
/// not count.
pub fn ended(name: &str, outcome: &Value, waits_for_itself: bool) {
    let longest = outcome["latency"]["max_ns"].as_f64().filter(|_| !waits_for_itself).unwrap_or_default() / 1e6;
    let guest = format!("{} ({name})", std::thread::current().name().unwrap_or_default());
    write(&json!({
        "ops": outcome["ops"], "wrong_bytes": outcome["wrong_bytes"], "longest_wait_ms": longest, "guest": guest,
    }));
}

fn write(line: &Value) {
    let Some(path) = std::env::var_os("BALLAST_SOAK_LOG") else { return };
    let file = std::fs::File::options().create(true).append(true).open(path);
    file.and_then(|mut file| file.write_all(format!("{line}\n").as_bytes())).expect("write to the soak's log");
}
