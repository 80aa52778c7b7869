//! The guests of one side, which all do the same work at the same time.
//!
//! Before: there is a daemon, or the kernel's swap. After: the caller has the figures of all guests together.
//! Threads: the caller's; guests are processes. Units: in the names.
//! Promise: guests get their orders one after the other, long before the time that counts.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use ballast_base::{Bytes, MIB};
use ballast_sys::clock::monotonic_ns;

use crate::cgroup;
use crate::order::{Answer, Backing, Data, GuestConfig, GuestKind, Order, Role};
use crate::rig::Bench;
use crate::stats::median;
use crate::waits::Waits;
use crate::worker::Worker;

/// Time after which VMs that are still above their limits are measured as they are.
const SQUEEZE: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(20);

/// The software that takes the guests' memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Ballast,
    Kernel,
}

struct Member {
    worker: Worker,
    name: String,
    /// On the kernel's side: the guest's cgroup, and its usage before the guest had RAM.
    cgroup: Option<(PathBuf, u64)>,
}

pub(crate) struct Fleet {
    ram_bytes: u64,
    members: Vec<Member>,
}

#[derive(Debug, Default)]
pub(crate) struct Turn {
    pub(crate) touches_per_s: f64,
    pub(crate) p99_us: f64,
    pub(crate) worst_ms: f64,
    /// Touches of the slowest guest, divided by the median of all.
    pub(crate) fairness: f64,
}

impl Fleet {
    pub(crate) fn start(bench: &mut Bench, side: Side, vms: usize, ram_bytes: u64) -> Result<Self> {
        let mut members = Vec::new();
        for number in 0..vms as u64 {
            let name = bench.vm_name();
            let cgroup = if side == Side::Kernel { Some(bench.guard.cgroup()?) } else { None };
            let backing = match &cgroup {
                Some(cgroup) => Backing::Kernel { procs: cgroup.join("cgroup.procs") },
                None => Backing::Ballast { socket: bench.daemon.attach_socket(), name: name.clone() },
            };
            let (kind, pages, data) = (GuestKind::Native, Bytes(ram_bytes).pages_floor().0, Data::HalfCompressible);
            let worker = Worker::start(&Role::Guest(GuestConfig { backing, kind, ram_bytes, pages, data, number }))?;
            members.push(Member { worker, name, cgroup: cgroup.map(|path| (path, 0)) });
        }
        Ok(Self { ram_bytes, members })
    }

    pub(crate) fn len(&self) -> usize {
        self.members.len()
    }

    pub(crate) fn fill(&mut self, bench: &Bench) -> Result<()> {
        for member in &mut self.members {
            if let Some((cgroup, own)) = &mut member.cgroup {
                *own = cgroup::usage(cgroup)?;
            }
            member.worker.ask(&Order::Fill)?;
            if member.cgroup.is_none() {
                bench.daemon.wait_for_vm(&member.name)?;
            }
        }
        Ok(())
    }

    /// Limits each guest to half of its RAM (on the kernel's side, to half of its RAM and the memory of its process).
    pub(crate) fn limit(&mut self, bench: &Bench) -> Result<()> {
        let half = self.ram_bytes / 2;
        self.members.iter().try_for_each(|member| match &member.cgroup {
            Some((cgroup, own)) => cgroup::limit(cgroup, half + own),
            None => Ok(bench.daemon.api().set_limit(&member.name, Some(half)).map(drop)?),
        })
    }

    /// Waits until Ballast's guests are within their limits. Returns how many are not.
    pub(crate) fn squeezed(&self, bench: &Bench) -> Result<usize> {
        let start = Instant::now();
        loop {
            let most = self.ram_bytes / 2 + MIB;
            let above = bench.daemon.api().vms()?.iter().filter(|vm| vm.resident_bytes > most).count();
            if above == 0 || start.elapsed() > SQUEEZE {
                return Ok(above);
            }
            std::thread::sleep(POLL);
        }
    }

    /// Lets all guests read at once: first for `lead`, which does not count, then for `time`, while `meanwhile` runs.
    pub(crate) fn read<T>(
        &mut self,
        lead: Duration,
        time: Duration,
        meanwhile: impl FnOnce() -> Result<T>,
    ) -> Result<(Turn, T)> {
        let from_ns = monotonic_ns() + lead.as_nanos() as u64;
        let until_ns = from_ns + time.as_nanos() as u64;
        let order = Order::Read { from_ns, until_ns };
        self.members.iter_mut().try_for_each(|member| member.worker.tell(&order))?;
        ensure!(monotonic_ns() < from_ns, "the guests did not all begin within {lead:?}");
        std::thread::sleep(Duration::from_nanos(from_ns.saturating_sub(monotonic_ns())));
        let meanwhile = meanwhile()?;
        std::thread::sleep(Duration::from_nanos(until_ns.saturating_sub(monotonic_ns())));
        let (mut waits, mut touches) = (Waits::default(), Vec::new());
        for answer in self.answers()? {
            let Answer::Read(reads) = answer else { bail!("a guest does not read") };
            waits.merge(&reads.waits);
            touches.push(reads.touches as f64);
        }
        let slowest = touches.iter().copied().fold(f64::INFINITY, f64::min);
        let turn = Turn {
            touches_per_s: touches.iter().sum::<f64>() / time.as_secs_f64(),
            p99_us: waits.percentile_ns(0.99) as f64 / 1e3,
            worst_ms: waits.worst_ns() as f64 / 1e6,
            fairness: slowest / median(&touches).unwrap_or(0.0).max(1.0),
        };
        Ok((turn, meanwhile))
    }

    pub(crate) fn verify(&mut self) -> Result<()> {
        self.ask_all(&Order::Verify).map(drop)
    }

    fn ask_all(&mut self, order: &Order) -> Result<Vec<Answer>> {
        self.members.iter_mut().try_for_each(|member| member.worker.tell(order))?;
        self.answers()
    }

    fn answers(&mut self) -> Result<Vec<Answer>> {
        self.members.iter_mut().map(|member| member.worker.answer()).collect()
    }
}
