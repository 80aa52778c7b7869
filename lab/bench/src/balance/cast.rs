//! The VMs of this bench: how they are started, held to an amount of memory and measured, all at once.
//!
//! Before: a list of workloads and a side. After: operations per second of each VM, and the memory that all of them
//! held.
//! Threads: the caller's; each VM is a process. Units: bytes; operations per second.
//! Promise: all sides run the same programs with the same seeds. A side that is not measured stands still, and takes
//! no CPU time from the other.
//!
//! | VM | what it does | what it needs |
//! |---|---|---|
//! | store | 4.5 us of computing and one value: keys by a bell curve, then any, then in order | two thirds, then all |
//! | graph | searches over the whole graph, an edge in some 20 ns | all, the states of vertices most |
//! | matrix | products in tiles: one matrix is swept again and again | a third |
//! | scan | a page in some 4.5 us, of the last quarter three times out of four; a hash table beside it | a third |

use std::fs::File;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use ballast_api::PolicyPatch;
use ballast_base::Bytes;
use ballast_policy::Kind;
use ballast_sys::memfd;
use ballast_testhost::until;
use ballast_testvm::{Spec, Workload};
use rustix::process::Signal;

use super::setup::Side;
use crate::order::{Answer, Backing, Order, Role, WorkloadConfig};
use crate::rig::Bench;
use crate::worker::Worker;
use crate::{adopt, cgroup, cpu, zram};

const SAMPLE: Duration = Duration::from_millis(200);
/// Longest time until reclaim has taken memory away.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The name of a workload in keys.
pub(super) fn word(workload: Workload) -> &'static str {
    match workload {
        Workload::Store => "store",
        Workload::Graph => "graph",
        Workload::Matrix => "matrix",
        Workload::Scan => "scan",
        Workload::Uniform => "uniform",
        Workload::Zipf => "zipf",
        _ => "hotset",
    }
}

/// The workload of a VM of the cast. `store_ops`: operations with each pattern of the store.
pub(super) fn spec(workload: Workload, ram_bytes: u64, seed: u64, store_ops: u64) -> Spec {
    let mut spec = Spec::new(workload, Bytes(ram_bytes));
    spec.seed = seed;
    match workload {
        // A request, and a page of rows, cost more than reading their bytes.
        Workload::Store => (spec.think, spec.write_fraction, spec.move_at) = (1500, 0.1, Some(store_ops)),
        Workload::Scan => spec.think = 1000,
        _ => {}
    }
    spec
}

pub(super) struct Vm {
    pub spec: Spec,
    pub name: String,
    pub worker: Worker,
    ram: File,
}

pub(super) struct Cast {
    pub vms: Vec<Vm>,
    pub side: Side,
    cgroup: PathBuf,
    /// On the kernel's side: memory that the processes need beyond guest RAM.
    pub own_bytes: u64,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Window {
    pub ops_per_s: Vec<f64>,
    /// Guest RAM of all VMs: the mean, and the maximum.
    pub resident_bytes: f64,
    pub most_bytes: f64,
    /// Refaults of each VM per thousand of its operations.
    pub misses_per_kop: Vec<f64>,
    /// CPU time of programs other than VMs and Ballast, in percent of one CPU.
    pub others_cpu_pct: f64,
    pub far_bytes: f64,
    /// On both of Ballast's sides: limits changed, decisions, CPU time of the governor and of the whole engine.
    pub changed: u64,
    pub ticks: u64,
    pub control_us: f64,
    pub engine_us: f64,
    pub seconds: f64,
}

impl Cast {
    pub fn start(bench: &mut Bench, side: Side, specs: &[Spec]) -> Result<Self> {
        let cgroup = if side == Side::Kernel { bench.guard.cgroup()? } else { PathBuf::new() };
        let kind = bench.options.guest;
        let vmm = if side == Side::Adopted { Some(adopt::vmm(bench)?) } else { None };
        let mut workers = Vec::new();
        for spec in specs {
            let mut name = String::new();
            let backing = match side {
                Side::Kernel => Backing::Kernel { procs: cgroup.join("cgroup.procs") },
                Side::Adopted => Backing::Floor,
                Side::Ballast => {
                    name = bench.numbered(word(spec.workload));
                    Backing::Ballast { socket: bench.daemon.attach_socket(), name: name.clone() }
                }
            };
            let role = Role::Workload(WorkloadConfig { spec: spec.clone(), kind, backing });
            let mut worker = vmm.as_ref().map_or_else(|| Worker::start(&role), |vmm| Worker::start_as(vmm, &role))?;
            if side == Side::Ballast {
                worker.ask(&Order::Attach)?;
                bench.daemon.wait_for_vm(&name)?;
            }
            worker.tell(&Order::Fill)?;
            workers.push((spec.clone(), name, worker));
        }
        let mut vms = Vec::new();
        for (spec, mut name, mut worker) in workers {
            let Answer::Filled { ram: Some(ram), .. } = worker.answer()? else {
                bail!("a VM does not fill its memory")
            };
            let ram = File::open(&ram).with_context(|| format!("Opening {}", ram.display()))?;
            if side == Side::Adopted {
                name = adopt::adopt(bench, worker.pid())?;
                let size = bench.daemon.api().vm(&name)?.size_bytes;
                ensure!(size == spec.ram.0, "{size} bytes of a VM are adopted, which has {}", spec.ram);
            }
            vms.push(Vm { spec, name, worker, ram });
        }
        let mut cast = Self { vms, side, cgroup, own_bytes: 0 };
        if side == Side::Kernel {
            cast.own_bytes = cgroup::usage(&cast.cgroup)?.saturating_sub(cast.resident(bench)?);
        }
        Ok(cast)
    }

    pub fn size_bytes(&self) -> u64 {
        self.vms.iter().map(|vm| vm.spec.ram.0).sum()
    }

    /// Guest RAM that all VMs hold. A memory file's size includes swapped pages, so for it the cgroup's usage is read.
    pub fn resident(&self, bench: &Bench) -> Result<u64> {
        if self.side == Side::Kernel && self.own_bytes > 0 {
            return Ok(cgroup::usage(&self.cgroup)?.saturating_sub(self.own_bytes));
        }
        let of = |vm: &Vm| match self.side {
            Side::Adopted => Ok(bench.daemon.api().vm(&vm.name)?.resident_bytes),
            _ => Ok(memfd::resident(&vm.ram)?.bytes().0),
        };
        self.vms.iter().map(of).sum()
    }

    /// Refaults of each VM so far: restores, or the kernel's major faults.
    fn misses(&self, bench: &Bench) -> Result<Vec<u64>> {
        let of = |vm: &Vm| match self.side {
            Side::Ballast => Ok(bench.daemon.api().vm(&vm.name)?.faults.restore),
            Side::Kernel | Side::Adopted => cpu::major_faults(vm.worker.pid()),
        };
        self.vms.iter().map(of).collect()
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        self.vms.iter().try_for_each(|vm| vm.worker.signal(signal))
    }

    pub fn rest(&self, bench: &Bench) -> Result<()> {
        self.hold_to(bench, Kind::None, None)?;
        // A process that stands still cannot reply to reclaim.
        until("reclaim does not come to rest", TIMEOUT, || {
            let busy = |vm: &ballast_api::VmStat| vm.target_bytes.is_some() || vm.quarantine_bytes > 0;
            let is_at_rest = self.side == Side::Kernel || !bench.daemon.api().vms()?.iter().any(busy);
            Ok(is_at_rest.then_some(()))
        })?;
        self.signal(Signal::STOP)
    }

    pub fn wake(&self) -> Result<()> {
        self.signal(Signal::CONT)
    }

    /// From now on all VMs together may have this much, while they are stopped, too. Then lets them run.
    pub fn begin_to_hold(&self, bench: &Bench, policy: Kind, bytes: u64) -> Result<()> {
        if self.side == Side::Kernel {
            // While VMs run, all their pages are young, and the kernel refuses a limit that it cannot keep at once.
            self.signal(Signal::STOP)?;
            self.hold_to(bench, policy, Some(bytes))?;
            return self.wake();
        }
        self.wake()?;
        self.hold_to(bench, policy, Some(bytes))
    }

    /// Lets all VMs together have this much, which a policy divides.
    fn hold_to(&self, bench: &Bench, policy: Kind, bytes: Option<u64>) -> Result<()> {
        if self.side != Side::Kernel {
            let patch = PolicyPatch { policy: Some(policy), budget_bytes: Some(bytes), ..PolicyPatch::default() };
            bench.daemon.api().patch_policy(&patch)?;
            return Ok(());
        }
        let bytes = bytes.map_or(cgroup::UNLIMITED, |bytes| bytes + self.own_bytes);
        // The kernel reclaims down to the limit before it accepts the limit, and gives up sooner than we do.
        until("the kernel does not come to the limit", TIMEOUT, || Ok(cgroup::limit(&self.cgroup, bytes).ok()))
    }

    pub fn window(&mut self, bench: &Bench, length: Duration) -> Result<Window> {
        let engine = bench.engine_pid()?;
        let cpu_us =
            || anyhow::Ok((cpu::of_threads(engine, |name| name == "governor")?, cpu::of_threads(engine, |_| true)?));
        let (policy, (control_us, engine_us)) = (bench.daemon.api().policy()?, cpu_us()?);
        let (misses, all_us) = (self.misses(bench)?, cpu::of_machine()?);
        let start = Instant::now();
        let order = Order::Slice { ms: length.as_millis() as u64 };
        self.vms.iter_mut().try_for_each(|vm| vm.worker.tell(&order))?;
        let mut held = Vec::new();
        while start.elapsed() + SAMPLE < length {
            std::thread::sleep(SAMPLE);
            held.push(self.resident(bench)? as f64);
        }
        let mut window = Window::default();
        let (mut all_ops, mut vms_us) = (Vec::new(), 0.0);
        for vm in &mut self.vms {
            let Answer::Sliced { ops, wall_us, cpu_us } = vm.worker.answer()? else { bail!("a VM stands") };
            vms_us += cpu_us;
            all_ops.push(ops.max(1) as f64);
            // A VM that did no operation counts as one that did one.
            window.ops_per_s.push(ops.max(1) as f64 * 1e6 / wall_us);
        }
        let (after, (control_after, engine_after)) = (bench.daemon.api().policy()?, cpu_us()?);
        window.seconds = start.elapsed().as_secs_f64();
        window.changed = after.changed_limits - policy.changed_limits;
        window.ticks = after.ticks - policy.ticks;
        (window.control_us, window.engine_us) = (control_after - control_us, engine_after - engine_us);
        let others_us = cpu::of_machine()? - all_us - vms_us - window.engine_us;
        window.others_cpu_pct = (others_us / window.seconds / 1e4).max(0.0);
        let missed = self.misses(bench)?.into_iter().zip(misses).map(|(after, before)| (after - before) as f64 * 1e3);
        window.misses_per_kop = missed.zip(all_ops).map(|(missed, ops)| missed / ops).collect();
        window.resident_bytes = held.iter().sum::<f64>() / held.len().max(1) as f64;
        window.most_bytes = held.iter().copied().fold(0.0, f64::max);
        window.far_bytes = match (self.side, &bench.kernel) {
            (Side::Ballast, _) => bench.daemon.api().host()?.store_bytes as f64,
            (_, Ok(device)) => zram::used(device)?.0 as f64,
            _ => 0.0,
        };
        Ok(window)
    }

    /// Removes the limit, compares every word, and ends the VMs.
    pub fn verify(mut self, bench: &Bench) -> Result<()> {
        self.hold_to(bench, Kind::None, None)?;
        self.vms.iter_mut().try_for_each(|vm| vm.worker.tell(&Order::Verify))?;
        self.vms.iter_mut().try_for_each(|vm| vm.worker.answer().map(drop))?;
        let names: Vec<String> = self.vms.iter().map(|vm| vm.name.clone()).collect();
        drop(self);
        names.iter().filter(|name| !name.is_empty()).try_for_each(|name| bench.daemon.wait_until_gone(name))
    }
}
