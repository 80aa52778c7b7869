//! For tests that change a limit of their process: each runs as the only test of a process of its own. And for tests
//! that find out whether a descriptor is closed.

use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

const ALONE: &str = "BALLAST_TEST_ALONE";

/// Returns whether the test of this name, which calls this first, is alone in its process. If not, it has passed in
/// another.
pub fn is_alone(name: &str) -> bool {
    if std::env::var_os(ALONE).is_some() {
        return true;
    }
    let this = std::env::current_exe().expect("this program");
    let output = std::process::Command::new(this).args(["--exact", name]).env(ALONE, "1").output();
    let output = output.expect("run it");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    false
}

/// Calls `body` while the process can open `more` descriptors, or fewer if higher numbers are taken.
pub fn with_descriptors<T>(more: u64, body: impl FnOnce() -> T) -> T {
    use std::os::fd::AsRawFd;
    let usual = getrlimit(Resource::Nofile);
    let open = std::fs::File::open("/dev/null").expect("the lowest free number");
    let current = Some(open.as_raw_fd() as u64 + more);
    drop(open);
    setrlimit(Resource::Nofile, Rlimit { current, ..usual }).expect("a limit");
    let result = body();
    setrlimit(Resource::Nofile, usual).expect("the usual limit");
    result
}

/// Does `is_so` become true within a minute? A program that another test of this process starts has copies of all
/// descriptors for a moment, so a file that was closed here may still be open.
pub fn in_time(is_so: impl Fn() -> bool) -> bool {
    let begun = Instant::now();
    while !is_so() {
        if begun.elapsed() > Duration::from_mins(1) {
            return false;
        }
        std::thread::yield_now();
    }
    true
}
