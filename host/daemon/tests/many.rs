//! Many VMs at once: the engine's threads and descriptors do not grow with their number. A real keeper and engine; the
//! VMMs are clients in this process. Needs root.

mod common;

use common::raw::Ram;
use common::{Daemon, until};

const VMS: u64 = 40;
const PAGES: u64 = 512;
const LIMIT: u64 = 1 << 20;

fn threads(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count)
}

#[test]
fn forty_vms_that_fault_and_then_idle_have_no_more_threads_than_the_cpus_allow() {
    let Some(daemon) = Daemon::with_uffd("quarantine_ms = 5\n") else { return };
    let engine = daemon.engine_pid().expect("an engine");
    let rams: Vec<Ram> = (0..VMS).map(|_| Ram::new(PAGES)).collect();
    rams.iter().for_each(Ram::mark);
    let name = |number: usize| format!("vm-{number}");
    let attach = |(number, ram): (usize, &Ram)| ram.vm(&daemon, &name(number)).attach().expect("attach");
    let _clients: Vec<_> = rams.iter().enumerate().map(attach).collect();
    // The keeper has replied; the engine may still be opening the last ones, and waits for them.
    (0..rams.len()).for_each(|number| drop(daemon.api.set_limit(&name(number), Some(LIMIT)).expect("a limit")));
    for _ in 0..2 {
        (0..rams.len()).for_each(|number| {
            until("pages are far", || daemon.vm(&name(number)).far_bytes > 0);
        });
        assert!(rams.iter().all(|ram| (0..PAGES).all(|page| ram.is_marked(page))), "a byte was lost");
    }
    let cpus = std::thread::available_parallelism().map_or(1, |cpus| cpus.get());
    // A thread that waits briefly in the kernel has a spare, which ends when it is not needed.
    until("there are few threads", || threads(engine) <= 4 * cpus + 16);
    assert_eq!(daemon.engine_pid(), Some(engine), "it is still the same engine");
}
