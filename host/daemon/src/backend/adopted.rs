//! Adopted VMs as the API shows and changes them.
//!
//! Before: [`super`] was asked for a VM that did not attach, or to adopt one. After: figures from the kernel and from
//! page counts; or a change in the file of adopted VMs.
//! Threads: those of the API. Units: bytes and microseconds, in the field names.
//! Promise: `size = resident + far + zero + untouched`. Fields that only the pager can fill are 0 or null.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use anyhow::bail;
use ballast_adopt::How;
use ballast_adopt::swap::Swap;
use ballast_api::{
    AdoptRequest, AdoptResult, AdoptedBy, AdoptedStat, EngineTime, FaultCounts, Psi, ReclaimCounts, RegionStat, Stall,
    VmClass, VmKind, VmPatch, VmStat, VmStatus,
};
use ballast_base::Bytes;
use ballast_sys::meminfo;

use super::said;
use crate::engine::adopted::vm::AdoptedVm;
use crate::engine::adopted::{AdoptedVms, worker};
use crate::engine::governor::Governor;
use crate::engine::host::Host;
use crate::engine::served::SMALLEST_LIMIT;
use crate::http::ChangeError;

/// The figures of a VM; `None` if its VMM has ended. `swap`: the host's swap at this moment.
pub(super) fn stat(vm: &AdoptedVm, adopted: &AdoptedVms, swap: &Swap) -> Option<VmStat> {
    let figures = vm.figures(adopted.restore_us()).ok()?;
    let (terms, memory) = (vm.terms(), figures.memory);
    let pinned = vm.vm.pinned();
    let blocked = vm.blocked().filter(|_| terms.effective_limit().is_some() || pinned.is_none());
    let limit_bytes = terms.limit.map(|limit| limit.0);
    let (by, cgroup, cgroup_reason) = match vm.vm.how() {
        How::Reclaim(directory) => (AdoptedBy::Reclaim, Some(shown(&directory)), None),
        How::PageOut(why) => (AdoptedBy::Pageout, None, Some(why.to_string())),
    };
    let region = RegionStat {
        size_bytes: memory.size,
        resident_bytes: memory.resident,
        far_bytes: memory.far,
        zero_bytes: memory.zero,
        untouched_bytes: memory.untouched,
        ..RegionStat::default()
    };
    Some(VmStat {
        name: terms.name,
        id: vm.id.clone(),
        pid: vm.vm.process.pid,
        vmm: vm.vm.vmm.program.to_string(),
        kind: VmKind::Adopted,
        class: if pinned.is_some() { VmClass::Pinned } else { terms.settings.class },
        status: if blocked.is_some() && pinned.is_none() { VmStatus::Blocked } else { VmStatus::Running },
        status_reason: pinned.or(blocked),
        size_bytes: memory.size,
        limit_bytes,
        target_bytes: terms.target.map(|target| target.0),
        settings: terms.settings,
        warnings: terms.settings.warnings(memory.size, limit_bytes),
        resident_bytes: memory.resident,
        far_bytes: memory.far,
        zero_bytes: memory.zero,
        untouched_bytes: memory.untouched,
        faults: FaultCounts {
            restore: figures.restored_pages,
            restored_pages: figures.restored_pages,
            ..FaultCounts::default()
        },
        reclaim: ReclaimCounts { evicted_pages: vm.vm.out_pages(), ..ReclaimCounts::default() },
        stall: Stall { some: figures.stall, full: Psi::default() },
        engine_time: EngineTime { faults_us: 0, tasks_us: vm.work_us() },
        regions: vec![region],
        adopted: Some(AdoptedStat {
            by,
            cgroup,
            cgroup_reason,
            scanned_unix_ms: memory.scanned.duration_since(UNIX_EPOCH).map_or(0, |at: Duration| at.as_millis() as u64),
            stall_source: figures.stall_source,
            swap_room_bytes: vm.vm.cgroup_room().map_or(swap.free(), |room| room.min(swap.free())),
        }),
        ..VmStat::default()
    })
}

fn shown(path: &Path) -> String {
    path.display().to_string()
}

pub(super) fn patch(host: &Host, governor: &Governor, vm: &AdoptedVm, patch: &VmPatch) -> Result<VmStat, ChangeError> {
    let invalid = |why: &str| Err(ChangeError::Invalid(why.to_owned()));
    if patch.balloon.is_some() {
        return invalid("the VM is adopted: Ballast has no connection to an agent in its guest");
    }
    if let Some(limit) = patch.limit_bytes.flatten().map(Bytes).filter(|limit| *limit < SMALLEST_LIMIT) {
        return invalid(&format!("a limit of {limit} is below the smallest one, {SMALLEST_LIMIT}"));
    }
    let before = vm.terms();
    let limit = patch.limit_bytes.map_or(before.limit, |limit| limit.map(Bytes));
    let after = patch.settings_after(before.settings);
    governor.admit_adopted(host, vm, after, limit)?;
    said::change(host, &before.name, patch.limit_bytes.map(|_| limit), (before.settings, after));
    stat(vm, &host.adopted, &Swap::now()).ok_or(ChangeError::NotFound)
}

pub(super) fn adopt(host: &Host, request: &AdoptRequest) -> anyhow::Result<AdoptResult> {
    let (adopted, taken) = (&host.adopted, worker::taken(host));
    let AdoptRequest { pid, vm, name } = request;
    let mut result = AdoptResult::default();
    let pid = match (pid, vm) {
        (Some(_), Some(_)) => bail!("a pid and a name are given; one is enough"),
        (Some(pid), None) => *pid,
        (None, Some(vm)) => match AdoptedVms::named(vm)[..] {
            [pid] => pid,
            [] => bail!("no VMM of this host has the name {vm:?} on its command line"),
            ref pids => bail!("several VMMs have the name {vm:?}, with the pids {pids:?}; name a pid"),
        },
        (None, None) if name.is_some() => bail!("a new name is for one VM; name its pid"),
        (None, None) => {
            let (vms, refused) = adopted.adopt_all(&taken, false);
            let swap = adopted.swap();
            result.adopted = vms.iter().filter_map(|vm| stat(vm, adopted, &swap)).collect();
            result.refused = refused;
            return Ok(result);
        }
    };
    let vm = adopted.adopt(pid, name.as_deref(), &taken)?;
    result.adopted.extend(stat(&vm, adopted, &Swap::now()));
    Ok(result)
}

pub(super) fn release(host: &Arc<Host>, name: &str, bring_back: bool) -> Result<VmStat, ChangeError> {
    let Some(vm) = host.adopted.by_name(name) else {
        let is_paged = host.by_name(name).is_some();
        return Err(if is_paged {
            ChangeError::Invalid(format!("{name} is paged, not adopted: it is managed until its VMM ends"))
        } else {
            ChangeError::NotFound
        });
    };
    let last = stat(&vm, &host.adopted, &Swap::now()).ok_or(ChangeError::NotFound)?;
    if !bring_back {
        host.adopted.forget(&vm, true);
        return Ok(last);
    }
    let available = meminfo::bytes("MemAvailable").unwrap_or(0);
    if last.far_bytes > available {
        let [far, available] = [last.far_bytes, available].map(Bytes);
        return Err(ChangeError::Invalid(format!("{far} of it are in swap, and the host has {available} for them")));
    }
    worker::bring_back(host.clone(), vm.clone()).map_err(|error| ChangeError::Invalid(error.to_string()))?;
    stat(&vm, &host.adopted, &Swap::now()).ok_or(ChangeError::NotFound)
}
