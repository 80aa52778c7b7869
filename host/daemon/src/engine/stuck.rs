//! Reports that a VM waits for a thread of this engine that sleeps in the kernel.
//!
//! Before: a thread that works for a VM sleeps in a system call, for example for the `mmap_lock` of a VMM. After: an
//! operator was told which thread sleeps, and is told again when it continues. Other VMs do not wait for it, because
//! each has its own threads.
//! Threads: one, which reads only the states of threads, because nothing else may delay it.
//! Promise: there is one event for a sleep and one for its end, however long it takes. A thread that works for many VMs
//! is checked once for all of them.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ballast_base::wire::VmId;
use ballast_handover::sleep::{STUCK, Sleeper, reason};

use super::host::Host;
use super::served::Served;

/// Time between checks, and time that a thread must have slept without a break before it is reported.
const EVERY: Duration = Duration::from_secs(2);
const LONG: Duration = Duration::from_secs(4);

pub fn start(host: Arc<Host>) -> std::io::Result<()> {
    let mut seen = HashMap::new();
    let body = move || {
        loop {
            std::thread::sleep(EVERY);
            check(&host, &mut seen);
        }
    };
    std::thread::Builder::new().name("stuck".into()).spawn(body).map(drop)
}

#[derive(Default)]
struct Seen {
    /// Threads that slept at the last check: CPU time, and since when the CPU time has not changed.
    sleeping: HashMap<u32, (u64, Instant)>,
    told: Option<Instant>,
}

fn check(host: &Host, seen: &mut HashMap<VmId, Seen>) {
    let now = Instant::now();
    let me = std::process::id();
    let mut before = std::mem::take(seen);
    let mut sleepers: HashMap<u32, Option<Sleeper>> = HashMap::new();
    for served in host.all() {
        served.vm.state.remember();
        let threads = served.vm.state.threads();
        let sleepers = threads
            .into_iter()
            .filter_map(|thread| sleepers.entry(thread).or_insert_with(|| Sleeper::find(me, thread)).clone());
        let sleepers: Vec<Sleeper> = sleepers.collect();
        let id = served.vm.state.id();
        let of_vm = seen.entry(id).or_insert_with(|| before.remove(&id).unwrap_or_default());
        let text = of_vm.update(&served, &sleepers, now);
        if let Some(text) = text {
            tracing::warn!(vm = served.vm.state.name(), "{text}");
            host.events.add(Some(served.vm.state.name()), STUCK, text);
        }
    }
}

impl Seen {
    fn update(&mut self, served: &Served, sleepers: &[Sleeper], now: Instant) -> Option<String> {
        let me = std::process::id();
        let before = std::mem::take(&mut self.sleeping);
        for sleeper in sleepers {
            let same = before.get(&sleeper.thread).filter(|(ran_ns, _)| *ran_ns == sleeper.ran_ns);
            self.sleeping.insert(sleeper.thread, (sleeper.ran_ns, same.map_or(now, |(_, since)| *since)));
        }
        let longest = self.sleeping.values().map(|(_, since)| *since).min();
        let stuck = longest.filter(|since| now.duration_since(*since) >= LONG);
        let name = served.vm.state.name();
        match (stuck, self.told) {
            (Some(since), None) => {
                self.told = Some(since);
                let slept_s = now.duration_since(since).as_secs();
                let views: Vec<u32> = served.pids();
                Some(format!("VM {name} has waited for {slept_s} s: {}", reason(sleepers, me, &views)))
            }
            (None, Some(since)) => {
                self.told = None;
                Some(format!("VM {name} is served again after {} s", now.duration_since(since).as_secs()))
            }
            _ => None,
        }
    }
}
