//! An adopted VM as policies see it: as any other VM.
//!
//! Before: the governor samples all VMs. After: the snapshot has the VM, except rates.
//! Threads: the governor's, or an API thread. Units: bytes.

use ballast_adopt::swap::Swap;
use ballast_api::StallSource;
use ballast_base::PAGE_SIZE;
use ballast_policy::{Class, Settings, VmSample};

use super::vm::AdoptedVm;
use crate::engine::governor::rates::Sums;

/// A sample without rates, and the sums for the rates; `None` if the VMM has ended.
pub fn of(vm: &AdoptedVm, restore_us: f64, swap: &Swap) -> Option<(VmSample, Sums)> {
    let figures = vm.figures(restore_us).ok()?;
    let (terms, memory) = (vm.terms(), figures.memory);
    let pinned = vm.vm.pinned();
    let class = if pinned.is_some() { Class::Pinned } else { terms.settings.class };
    let us = figures.stall.total_us;
    let sums = match figures.stall_source {
        StallSource::Cgroup => Sums { stall_ns: 0, kernel_us: Some(us) },
        StallSource::Estimated => Sums { stall_ns: us * 1000, kernel_us: None },
    };
    let sample = VmSample {
        name: terms.name,
        id: vm.id.clone(),
        size_bytes: memory.size,
        resident_bytes: memory.resident,
        far_bytes: memory.far,
        zero_bytes: memory.zero,
        untouched_bytes: memory.untouched,
        limit_bytes: terms.limit.map(|limit| limit.0),
        target_bytes: terms.target.map(|target| target.0),
        settings: Settings { class, ..terms.settings },
        held: pinned.or_else(|| vm.blocked()).or_else(|| vm.vm.blocked(swap)),
        page_bytes: PAGE_SIZE as u64,
        restores: figures.restored_pages,
        refault_page_ms: figures.refaults.page_ms,
        refault_milli_hz: figures.refaults.milli_hz,
        ..VmSample::default()
    };
    Some((sample, sums))
}
