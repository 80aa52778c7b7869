//! Holds a VM while khugepaged may fill its far pages with zeros.
//!
//! Before: the scan for foreign mappers checks a VM. After: there is a reason to hold the VM, or none. Threads: that
//! scan's, and the API's.
//! Promise: the kernel is tested once. The settings are read at each check, so a change takes effect within seconds;
//! pages that the kernel filled before that are repaired when they are touched (`fault`).

use std::sync::LazyLock;

use ballast_pager::vm::ram::RamFile;
use ballast_sys::probe::khugepaged::{self, Khugepaged, Kind};
use rustix::fs::{major, minor};

use super::served::Served;

/// Whether a collapse fills the holes of a registered range.
static FILLS: LazyLock<Option<bool>> = LazyLock::new(khugepaged::fills_holes);

/// The danger of khugepaged; `None` if it cannot harm far pages.
#[derive(Debug)]
pub struct HugePages(Option<Khugepaged>);

impl HugePages {
    pub fn now() -> Self {
        Self((*FILLS != Some(false)).then(|| Khugepaged::now(*FILLS)))
    }

    /// Why no page may leave this VM because of khugepaged.
    pub fn danger(&self, served: &Served) -> Option<String> {
        let now = self.0.as_ref()?;
        let regions = served.vm.regions();
        regions
            .iter()
            .filter(|region| !region.is_removed() && region.granule_pages() == 1)
            .find_map(|region| region.files().iter().find_map(|file| of(now, file)))
    }
}

fn of(now: &Khugepaged, file: &RamFile) -> Option<String> {
    if file.is_memfd() {
        return now.danger(Kind::Memfd);
    }
    let device = file.id.dev;
    match khugepaged::mount_of(major(device), minor(device)) {
        Some(huge) => now.danger(Kind::Tmpfs(huge.as_deref())),
        None => now.danger(Kind::Unknown),
    }
}
