//! Operators' changes of a VM, while the daemon dies during changes.
//!
//! Needs root (userfaultfd) and a C compiler. Promise: a setting has the old value or the new one, on disk and in the
//! running VM.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ballast_api::Client;
use ballast_base::MIB;

use common::vmm::Program;
use common::{Daemon, moment, until};

const VALUES: [u64; 2] = [9 * MIB, 12 * MIB];
const KILLS: u32 = 12;

#[test]
fn a_daemon_that_dies_during_a_change_leaves_the_old_or_the_new_value() {
    let Some(program) = Program::compile() else { return };
    let mut daemon = Daemon::start("");
    let vmm = program.start(&daemon, "db", "memfd", 4096);
    daemon.api.set_limit("db", Some(VALUES[0])).expect("a limit");
    for round in 0..KILLS {
        let client = Client::new(daemon.dir().join("api.sock")).expect("a client").retry_for(Duration::ZERO);
        let is_over = Arc::new(AtomicBool::new(false));
        let seen = is_over.clone();
        let changes = std::thread::spawn(move || {
            let values = VALUES.iter().cycle().map(|value| client.set_limit("db", Some(*value)));
            values.take_while(|set| set.is_ok() && !seen.load(Ordering::Relaxed)).count()
        });
        std::thread::sleep(moment(round));
        daemon.kill_and_restart_keeper(true);
        // If no request was under way when the daemon died, none fails, and this ends the changes.
        is_over.store(true, Ordering::Relaxed);
        common::joined("no more changes", changes);
        let kept = daemon.api.kept().expect("the file is whole");
        let limits: Vec<_> = kept.iter().map(|vm| (vm.name.as_str(), vm.settings.limit_bytes.flatten())).collect();
        assert!(VALUES.iter().any(|value| limits == [("db", Some(*value))]), "{limits:?}");
        let live = daemon.vm("db").limit_bytes;
        assert!(VALUES.iter().any(|value| live == Some(*value)), "{live:?}");
    }
    let kept = daemon.api.kept().expect("the file")[0].settings.limit_bytes.flatten();
    vmm.kill();
    until("it is gone", || daemon.api.vm("db").is_err());
    let _vmm = program.start(&daemon, "db", "memfd", 4096);
    assert_eq!(daemon.vm("db").limit_bytes, kept);
}
