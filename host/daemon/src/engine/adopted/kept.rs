//! What is remembered of adopted VMs for the next engine: a file in the runtime directory.
//!
//! Before: an operator adopted, limited or released a VM. After: an engine that begins reads it and goes on.
//! Threads: any; one at a time writes. Promise: the file is replaced as a whole, so it is never half written. A process
//! is known by its start time beside its pid.

use std::io;
use std::path::Path;

use ballast_policy::Settings;
use ballast_sys::process::Process;
use serde::{Deserialize, Serialize};

/// The file's name.
pub const FILE: &str = "adopted.json";

/// All of it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Kept {
    /// The VMs.
    pub vms: Vec<KeptVm>,
    /// Processes that an operator released: they are not adopted unasked.
    pub released: Vec<KeptProcess>,
}

/// A process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptProcess {
    /// Its pid.
    pub pid: u32,
    /// Its start time.
    pub start: u64,
}

/// A VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KeptVm {
    /// Its VMM.
    pub process: KeptProcess,
    /// Its name here.
    pub name: String,
    /// The operator's limit.
    pub limit_bytes: Option<u64>,
    /// The operator's settings.
    pub settings: Settings,
}

impl From<Process> for KeptProcess {
    fn from(Process { pid, start }: Process) -> Self {
        Self { pid, start }
    }
}

impl KeptProcess {
    /// Does it run still?
    pub fn runs(self) -> bool {
        let found = Process::find(self.pid).ok().flatten();
        found.is_some_and(|process| Self::from(process) == self && !process.is_dying())
    }
}

/// Read the file; one that is not there is empty.
///
/// # Errors
/// It cannot be read or understood.
pub fn read(path: &Path) -> io::Result<Kept> {
    match std::fs::read(path) {
        Ok(text) => Ok(serde_json::from_slice(&text)?),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Kept::default()),
        Err(error) => Err(error),
    }
}

/// Replace the file.
///
/// # Errors
/// It cannot be written.
pub fn write(path: &Path, kept: &Kept) -> io::Result<()> {
    let next = path.with_extension("json.new");
    std::fs::write(&next, serde_json::to_vec_pretty(kept)?)?;
    std::fs::rename(next, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_and_damage_is_an_error() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join(FILE);
        assert_eq!(read(&path).expect("nothing"), Kept::default());
        let process = KeptProcess { pid: 7, start: 1 << 40 };
        let settings = Settings { shares: Some(0), ..Settings::default() };
        let vm = KeptVm { process, name: "web".into(), limit_bytes: Some(4096), settings };
        let kept = Kept { vms: vec![vm], released: vec![process] };
        write(&path, &kept).expect("written");
        assert_eq!(read(&path).expect("read"), kept);
        assert_eq!(std::fs::read_dir(dir.path()).expect("a directory").count(), 1);
        std::fs::write(&path, "{\"vms\": [{}]}").expect("damaged");
        read(&path).expect_err("not understood");
        assert!(KeptProcess::from(Process::this().expect("this")).runs() && !process.runs());
    }
}
