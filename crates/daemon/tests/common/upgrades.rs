//! Upgrades of a [`super::Daemon`]: the builds, the request and its end.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use ballast_api::{UpgradeRequest, UpgradeStage, UpgradeStat};

use super::{Daemon, until};

/// How many a test makes: `BALLAST_UPGRADES`, or 12.
pub fn count() -> u32 {
    std::env::var("BALLAST_UPGRADES").ok().and_then(|count| count.parse().ok()).unwrap_or(12)
}

/// The `ballastd` of this build.
pub fn this_build() -> PathBuf {
    PathBuf::from(env!("CARGO_BIN_EXE_ballastd"))
}

/// That of another build (`BALLAST_NEXT`), if there is one, else of this.
pub fn next_build() -> PathBuf {
    std::env::var_os("BALLAST_NEXT").map_or_else(this_build, PathBuf::from)
}

/// Copy a program. Another process writes the copy: while this one had it open for writing, so might a child of another
/// test, between its fork and its exec, and the kernel executes no such file.
pub fn install(from: &Path, to: &Path) {
    let done = Command::new("cp").arg(from).arg(to).status().expect("run cp");
    assert!(done.success(), "{} is not copied", from.display());
}

/// Make a program of this shell script in the same way.
pub fn install_script(to: &Path, text: &str) {
    let source = to.with_added_extension("source");
    std::fs::write(&source, text).expect("write a script");
    std::fs::set_permissions(&source, PermissionsExt::from_mode(0o755)).expect("a program");
    install(&source, to);
}

/// A request for an upgrade to this program.
pub fn request(program: &Path) -> UpgradeRequest {
    UpgradeRequest { program: Some(program.display().to_string()) }
}

/// Begin an upgrade to this program.
pub fn begin(daemon: &Daemon, program: &Path) -> UpgradeStat {
    daemon.api.begin_upgrade(&request(program)).unwrap_or_else(|error| panic!("{error}\n{}", daemon.log()))
}

/// Wait until the upgrade is over, one way or the other.
pub fn ended(daemon: &Daemon) -> UpgradeStat {
    let mut last = UpgradeStat::default();
    until("the upgrade ends", || {
        last = daemon.api.upgrade().unwrap_or_else(|error| panic!("{error}\n{}", daemon.log()));
        matches!(last.stage, UpgradeStage::Done | UpgradeStage::Failed)
    });
    last
}
