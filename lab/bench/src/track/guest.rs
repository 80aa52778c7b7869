//! A workload guest that is tracked, and the recording of its access cycles.
//!
//! Before: there is a daemon. After: a VM runs its workload, attached, with its memory mapped huge; the bench has its
//! cycles from the API, and its number of operations at any time of the tracker's clock.
//! Threads: the bench's one. Units: operations, time since tracking of the VM began. Promise: the guest reports only
//! the number of its operations.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use ballast_api::Track;
use ballast_heat::record::{Frame, Recording};
use ballast_heat::{Phase, RECENT};
use ballast_testvm::Spec;

use crate::order::{Answer, Backing, GuestKind, Order, Role, WorkloadConfig};
use crate::rig::Bench;
use crate::worker::Worker;

/// Computing after each operation, in ticks of the TSC: some 10 us. So a guest does some 100,000 operations a second,
/// as a key-value store does on one CPU. A loop that only touches memory does millions.
pub(crate) const THINK_TICKS: u64 = 25_000;
/// Time between two requests to the tracker.
const SAMPLE: Duration = Duration::from_millis(20);
/// Time after which cycles have failed.
const TIMEOUT: Duration = Duration::from_secs(300);

/// A VM that runs and is attached.
pub(super) struct Tracked {
    worker: Worker,
    pub name: String,
}

/// The recording, and the guest's progress.
pub(super) struct Watched {
    pub recording: Recording,
    /// Times on the tracker's clock, and operations so far.
    progress: Vec<(Duration, u64)>,
}

impl Tracked {
    pub(super) fn start(bench: &mut Bench, spec: Spec) -> Result<Self> {
        Self::start_mixed(bench, spec, 100)
    }

    /// The same with this percentage of its memory mapped huge, spread evenly.
    pub(super) fn start_mixed(bench: &mut Bench, spec: Spec, percent: u32) -> Result<Self> {
        let name = bench.vm_name();
        let backing = Backing::Ballast { socket: bench.daemon.attach_socket(), name: name.clone() };
        let config = WorkloadConfig { spec, kvm: bench.options.is(GuestKind::Kvm), backing };
        let mut worker = Worker::start(&Role::Workload(config))?;
        worker.ask(&Order::Fill)?;
        worker.ask(&Order::MapHuge { percent })?;
        worker.ask(&Order::Attach)?;
        bench.daemon.wait_for_vm(&name)?;
        Ok(Self { worker, name })
    }

    pub(super) fn progress(&mut self) -> Result<u64> {
        let Answer::Progress { ops } = self.worker.ask(&Order::Progress)? else { bail!("a guest has no progress") };
        Ok(ops)
    }

    /// Operations per second, over `ms` milliseconds.
    pub(super) fn speed(&mut self, ms: u64) -> Result<f64> {
        let Answer::Sliced { ops, wall_us, .. } = self.worker.ask(&Order::Slice { ms })? else { bail!("a VM stands") };
        Ok(ops as f64 * 1e6 / wall_us)
    }

    /// Track it until `cycles` cycles and one more coarse cycle were recorded.
    pub(super) fn watch(&mut self, bench: &Bench, cycles: usize) -> Result<Watched> {
        let api = bench.daemon.api();
        // The engine keeps cycles from the first call on.
        api.heat_cycles(&self.name, 0)?;
        api.set_track(&self.name, Track::On)?;
        let (start, mut after, mut seen) = (Instant::now(), 0, 0);
        let mut recording: Option<Recording> = None;
        let mut samples = Vec::new();
        // The most that the bench's clock is ahead of the tracker's.
        let mut ahead = Duration::MAX;
        while seen <= cycles {
            ensure!(start.elapsed() < TIMEOUT, "{} s are not enough for {cycles} cycles", TIMEOUT.as_secs());
            std::thread::sleep(SAMPLE);
            samples.push((start.elapsed(), self.progress()?));
            let news = Recording::decode(&api.heat_cycles(&self.name, after)?)?;
            let now = start.elapsed();
            for cycle in news.cycles() {
                after = cycle.number;
                seen += usize::from(cycle.phase == Phase::Coarse);
                ahead = ahead.min(now.saturating_sub(cycle.ended));
            }
            match &mut recording {
                Some(recording) => recording.frames.extend(news.frames),
                None => recording = Some(news),
            }
        }
        api.set_track(&self.name, Track::Off)?;
        let progress = samples.into_iter().map(|(at, ops)| (at.saturating_sub(ahead), ops)).collect();
        Ok(Watched { recording: recording.context("no cycle was recorded")?, progress })
    }
}

impl Watched {
    /// The recording without the last coarse cycle, the beginning of the [`RECENT`] cycles before it, and its own
    /// beginning. A tracker calls pages hot that were touched in the [`RECENT`] cycles.
    pub(super) fn whole_cycles(&self) -> Result<(Recording, Duration, Duration)> {
        let coarse = |frame: &&Frame| matches!(frame, Frame::Cycle(cycle) if cycle.phase == Phase::Coarse);
        let mut frames = self.recording.frames.clone();
        let last = self.recording.frames.iter().rposition(|frame| coarse(&frame)).context("no cycle was recorded")?;
        let Some(Frame::Cycle(end)) = self.recording.frames.get(last) else { bail!("no cycle was recorded") };
        frames.truncate(last);
        let coarse = |frame: &Frame| match frame {
            Frame::Cycle(cycle) if cycle.phase == Phase::Coarse => Some(cycle.begun),
            _ => None,
        };
        let recent = frames.iter().rev().filter_map(coarse).take(RECENT as usize);
        let begin = recent.last().context("no cycle was recorded")?;
        Ok((Recording { source: self.recording.source.clone(), frames }, begin, end.begun))
    }

    /// The time at which the guest had done `ops` operations; `None` if it never had.
    pub(super) fn time_of(&self, ops: u64) -> Option<Duration> {
        self.progress.get(self.progress.partition_point(|(_, done)| *done < ops)).map(|(at, _)| *at)
    }

    /// Operations that the guest had done at that time.
    pub(super) fn ops_at(&self, time: Duration) -> u64 {
        let after = self.progress.partition_point(|(at, _)| *at < time);
        self.progress.get(after).or(self.progress.last()).map_or(0, |(_, ops)| *ops)
    }
}
