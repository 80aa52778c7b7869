//! Finds the files that a guest in QEMU boots, and whether such a guest can run here.
//!
//! Before: `scripts/guest-image.sh` made them. After: `builder` puts both files on the command line.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};

/// The program of a guest, found on `PATH`.
pub const QEMU: &str = "qemu-system-x86_64";
/// Kernel and initrd of a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// The kernel, a bzImage.
    pub kernel: PathBuf,
    /// The initrd. Its /init prints `BALLAST-READY`.
    pub initrd: PathBuf,
}

impl Image {
    /// Returns the image in `$BALLAST_GUEST_DIR`, or in `target/guest` of this directory or a parent of it.
    pub fn find() -> Result<Self> {
        let dirs = match std::env::var_os("BALLAST_GUEST_DIR") {
            Some(dir) => vec![PathBuf::from(dir)],
            None => {
                let here = std::env::current_dir().unwrap_or_default();
                here.ancestors().map(|dir| dir.join("target/guest")).collect()
            }
        };
        dirs.iter()
            .map(|dir| Self { kernel: dir.join("vmlinuz"), initrd: dir.join("initrd.img") })
            .find(|image| image.kernel.is_file() && image.initrd.is_file())
            .context("no guest image in target/guest; run scripts/guest-image.sh")
    }

    /// Returns the image with the agent, which `scripts/agent-image.sh` made.
    pub fn find_with_agent() -> Result<Self> {
        let folder = Self::find()?.kernel.with_file_name("agent");
        let image = Self { kernel: folder.join("vmlinuz"), initrd: folder.join("initrd.img") };
        let is_there = image.kernel.is_file() && image.initrd.is_file();
        ensure!(is_there, "no guest with an agent in target/guest/agent; run scripts/agent-image.sh");
        Ok(image)
    }
}

/// Returns the reason if no QEMU guest can run here.
pub fn qemu_missing() -> Option<String> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    if !std::env::split_paths(&path).any(|dir| dir.join(QEMU).is_file()) {
        return Some(format!("{QEMU} is not installed; run scripts/setup.sh"));
    }
    Image::find().err().map(|error| error.to_string())
}
