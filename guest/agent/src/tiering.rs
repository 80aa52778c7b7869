//! Tiering: which memory of the guest's programs is on which of its nodes. `ballast-tier` does the work.
//!
//! Before: `--tiering`, with the owner's choice of programs. After: a thread of its own works until [`Tiering::end`],
//! and the host gets its statistics ([`Tiering::told`]).
//! Threads: one, named `tiering`. No other part of the agent waits for it, and it needs no host.
//! Promise: without `--tiering` no part of it runs. Without a second tier, it reports why, and looks again later.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ballast_base::Bytes;
use ballast_messages::message::{self, TierUse, TieringState};
use ballast_sys::lock::Lock;
use ballast_tier::{EPOCH, Settings, Status, Tierer, Unavailable};

use crate::damon;
use crate::pace::AGAIN;

#[derive(Debug)]
pub struct Tiering {
    stop: Arc<AtomicBool>,
    told: Arc<Mutex<message::Tiering>>,
    /// Pages of each node that the balloon lacks.
    lacks: Arc<Mutex<BTreeMap<u32, u64>>>,
    thread: JoinHandle<()>,
}

pub fn start(mut settings: Settings) -> io::Result<Tiering> {
    // Reports of cold memory need a kdamond, too, and only one user can have kdamonds.
    let shared = damon::share(settings.choice.most);
    settings.damon_threads_from = 1;
    let stop = Arc::new(AtomicBool::new(false));
    let told = Arc::new(Mutex::new(message::Tiering { state: TieringState::Unable, ..Default::default() }));
    let lacks = Arc::new(Mutex::default());
    let (stops, tells, lacking) = (stop.clone(), told.clone(), Arc::clone(&lacks));
    let thread = std::thread::Builder::new();
    let thread = thread.name("tiering".into()).spawn(move || work(&settings, shared, &stops, &tells, &lacking))?;
    Ok(Tiering { stop, told, lacks, thread })
}

fn tell(told: &Mutex<message::Tiering>, now: message::Tiering) {
    *told.locked() = now;
}

fn work(
    settings: &Settings,
    mut shared: io::Result<()>,
    stop: &AtomicBool,
    told: &Mutex<message::Tiering>,
    lacks: &Mutex<BTreeMap<u32, u64>>,
) {
    let mut said = String::new();
    let mut unable = |why: String| {
        if said != why {
            eprintln!("ballast-agent: {why}");
            said.clone_from(&why);
        }
        tell(told, message::Tiering { state: TieringState::Unable, note: why, ..Default::default() });
    };
    while !stop.load(Ordering::Acquire) {
        if let Err(error) = shared {
            unable(format!("DAMON for tiering: {error}"));
            std::thread::park_timeout(AGAIN);
            shared = damon::share(settings.choice.most);
            continue;
        }
        let mut tierer = match Tierer::open(settings.clone()) {
            Ok(tierer) => tierer,
            Err(error) => {
                unable(error.to_string());
                // Memory may have been plugged in by then.
                std::thread::park_timeout(AGAIN);
                continue;
            }
        };
        while !stop.load(Ordering::Acquire) {
            let began = Instant::now();
            tierer.make_room(&lacks.locked());
            match tierer.step() {
                Ok(()) => tell(told, shown(tierer.status())),
                // For example, a program ended; the next step may succeed.
                Err(error @ Unavailable::Io(_)) => unable(error.to_string()),
                // A tier is gone. It may be plugged in again.
                Err(error) => {
                    unable(error.to_string());
                    drop(tierer);
                    std::thread::park_timeout(AGAIN);
                    break;
                }
            }
            std::thread::park_timeout(EPOCH.saturating_sub(began.elapsed()).max(Duration::from_millis(1)));
        }
    }
}

fn shown(status: &Status) -> message::Tiering {
    let moves = &status.moves;
    let notes = status.aside.iter().chain(&status.notes).map(String::as_str).collect::<Vec<_>>();
    message::Tiering {
        state: if status.aside.is_some() { TieringState::Aside } else { TieringState::Working },
        note: notes.join("; "),
        tiers: status
            .tiers
            .iter()
            .map(|tier| TierUse {
                node: tier.nodes.first().copied().unwrap_or(0),
                pages: Bytes(tier.size_bytes).pages_floor().0,
                free: Bytes(tier.free_bytes).pages_floor().0,
                latency_ns: tier.read_latency_ns.and_then(|ns| u32::try_from(ns).ok()).unwrap_or(0),
            })
            .collect(),
        programs: status.programs,
        managed: Bytes(status.managed_bytes).pages_floor().0,
        managed_fast: Bytes(status.managed_fast_bytes).pages_floor().0,
        hits: status.fast_hit_pct.map(|percent| (percent * 100.0).round() as u32),
        samples: status.samples,
        ranges: status.ranges,
        promoted: moves.promoted,
        demoted: moves.demoted,
        stayed: moves.shared + moves.busy + moves.full + moves.never + moves.refused,
        cpu_us: status.cpu_us + status.monitor_cpu_us,
    }
}

impl Tiering {
    pub fn told(&self) -> message::Tiering {
        self.told.locked().clone()
    }

    /// Sets how many pages of each node must be free for the balloon, which takes no memory of programs.
    pub fn make_room(&self, pages: BTreeMap<u32, u64>) {
        *self.lacks.locked() = pages;
    }

    /// Ends the thread, and waits until it has restored the settings that it changed.
    pub fn end(self) {
        self.stop.store(true, Ordering::Release);
        self.thread.thread().unpark();
        if self.thread.join().is_err() {
            eprintln!("ballast-agent: tiering panicked");
        }
        damon::undo();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_tier::mover::Moves;

    #[test]
    fn pages_that_stayed_are_told_whatever_kept_them() {
        let moves =
            Moves { promoted: 1, demoted: 2, absent: 4, shared: 8, busy: 16, full: 32, never: 64, refused: 128 };
        let told = shown(&Status { moves, ..Status::default() });
        assert_eq!((told.promoted, told.demoted, told.stayed), (1, 2, 8 + 16 + 32 + 64 + 128));
    }
}
