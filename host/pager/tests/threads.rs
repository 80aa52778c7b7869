//! A pool that cannot get all of its threads. The limit is per process, so this is the only test here.

use std::sync::mpsc;
use std::time::Instant;

use ballast_base::units::MIB;
use ballast_base::{Bytes, PAGE_SIZE};
use ballast_pager::run::pool::Pool;
use ballast_pager::run::queue::Next;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

#[test]
fn a_pool_that_gets_some_of_its_threads_takes_tasks_and_runs_them() {
    let pool = Pool::new(1 << 20);
    let group = pool.add_group();
    let (said, says) = mpsc::channel();
    // Each thread has a stack of 2 MiB, so few fit.
    let pages = std::fs::read_to_string("/proc/self/statm").expect("procfs");
    let pages: u64 = pages.split(' ').next().expect("a size").parse().expect("a number");
    let more = Bytes(64 * MIB);
    let current = Some(pages * PAGE_SIZE as u64 + more.0);
    setrlimit(Resource::As, Rlimit { current, ..getrlimit(Resource::As) }).expect("a limit");
    for number in 0..100 {
        let said = said.clone();
        let task = move |_: Instant| {
            said.send(number).expect("heard");
            Next::Done
        };
        pool.add(group, "test", task).expect("there is a thread");
    }
    let mut ran: Vec<i32> = says.iter().take(100).collect();
    ran.sort_unstable();
    assert_eq!(ran, (0..100).collect::<Vec<_>>());
    assert!(pool.threads() < 1 << 10, "it has all of its threads");
}
