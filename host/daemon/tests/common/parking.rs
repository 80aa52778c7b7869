//! Guests that hold their own `mmap_lock` in the kernel, because a file server does not respond.

use ballast_testvm::fuse::{Fuse, Held};
use ballast_testvm::park::HOLDER;

use super::guest::Guest;
use super::{Daemon, missing, until};

/// A file server; `None`, with a message, if there can be none.
pub fn fuse() -> Option<Fuse> {
    let served = Fuse::serve();
    let refused = served.as_ref().err().map(|error| format!("no FUSE server: {error}"));
    if missing("fuse", refused) { None } else { served.ok() }
}

/// A guest that can be parked on `fuse`, with these arguments.
pub fn parkable(daemon: &Daemon, fuse: &Fuse, name: &str, args: &str) -> Guest {
    let file = fuse.dir().join(name);
    std::fs::write(&file, [7; 4096]).expect("a file to park on");
    Guest::start(daemon, name, &format!("{args} --park-on {}", file.display()))
}

/// Parks a guest, as the `nth` on this server.
pub fn park<'a>(fuse: &'a Fuse, guest: &mut Guest, nth: usize) -> Held<'a> {
    let held = fuse.hold_on();
    guest.tell("read\n");
    fuse.wait_for_held(nth);
    guest.tell("map\n");
    let pid = guest.pid();
    until("a thread waits for the page in mmap", || sleeps_in(pid, HOLDER, "folio"));
    held
}

pub fn sleeps_in(pid: u32, name: &str, function: &str) -> bool {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return false };
    let read = |task: &std::fs::DirEntry, what| std::fs::read_to_string(task.path().join(what)).unwrap_or_default();
    tasks.flatten().any(|task| read(&task, "comm").trim_end() == name && read(&task, "wchan").contains(function))
}
