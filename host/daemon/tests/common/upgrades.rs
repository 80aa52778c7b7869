//! Upgrades of a [`super::Daemon`]: the builds, the request and its end.

use std::path::{Path, PathBuf};

use ballast_api::{UpgradeRequest, UpgradeStage, UpgradeStat};

use super::{Daemon, until};

pub fn count() -> u32 {
    std::env::var("BALLAST_UPGRADES").ok().and_then(|count| count.parse().ok()).unwrap_or(6)
}

pub fn this_build() -> PathBuf {
    PathBuf::from(env!("CARGO_BIN_EXE_ballastd"))
}

/// The `ballastd` of another build (`BALLAST_NEXT`); without one, of this build.
pub fn next_build() -> PathBuf {
    std::env::var_os("BALLAST_NEXT").map_or_else(this_build, PathBuf::from)
}

pub fn request(program: &Path) -> UpgradeRequest {
    UpgradeRequest { program: Some(program.display().to_string()) }
}

pub fn begin(daemon: &Daemon, program: &Path) -> UpgradeStat {
    daemon.api.begin_upgrade(&request(program)).unwrap_or_else(|error| panic!("{error}\n{}", daemon.log()))
}

pub fn ended(daemon: &Daemon) -> UpgradeStat {
    let mut last = UpgradeStat::default();
    until("the upgrade ends", || {
        last = daemon.api.upgrade().unwrap_or_else(|error| panic!("{error}\n{}", daemon.log()));
        matches!(last.stage, UpgradeStage::Done | UpgradeStage::Failed)
    });
    last
}
