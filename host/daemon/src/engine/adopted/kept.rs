//! Remembers adopted VMs for the next engine, in a file in the runtime directory.
//!
//! Before: an operator adopted, limited or released a VM. After: the next engine reads the file and continues.
//! Threads: any; one at a time writes.
//! Promise: the file is replaced atomically. A process is identified by its pid and start time.

use std::io;
use std::path::Path;

use ballast_policy::Settings;
use ballast_sys::process::Process;
use serde::{Deserialize, Serialize};

pub const FILE: &str = "adopted.json";

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Kept {
    pub vms: Vec<KeptVm>,
    pub released: Vec<KeptProcess>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptProcess {
    pub pid: u32,
    pub start: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KeptVm {
    pub process: KeptProcess,
    pub name: String,
    pub limit_bytes: Option<u64>,
    pub settings: Settings,
}

impl From<Process> for KeptProcess {
    fn from(Process { pid, start }: Process) -> Self {
        Self { pid, start }
    }
}

impl KeptProcess {
    pub fn runs(self) -> bool {
        let found = Process::find(self.pid).ok().flatten();
        found.is_some_and(|process| Self::from(process) == self && !process.is_dying())
    }
}

/// Reads the file; a missing file is empty.
pub fn read(path: &Path) -> io::Result<Kept> {
    match std::fs::read(path) {
        Ok(text) => Ok(serde_json::from_slice(&text)?),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Kept::default()),
        Err(error) => Err(error),
    }
}

pub fn write(path: &Path, kept: &Kept) -> io::Result<()> {
    let next = path.with_extension("json.new");
    std::fs::write(&next, serde_json::to_vec_pretty(kept)?)?;
    std::fs::rename(next, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_as_written_and_a_damaged_one_is_an_error() {
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
