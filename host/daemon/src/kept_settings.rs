//! Operators' changes of VMs, on disk: they outlive a VM's process, engines, and a reboot of the host.
//!
//! Before: an operator changed a VM. After: the VM has these settings when it attaches again; it is found by its UUID,
//! or by its name if it has none. Threads: any; one at a time writes. The file is read each time, because during an
//! upgrade the other engine may write it.
//! Promise: the file is replaced atomically, and the new one is on the disk before it gets the name. A file that cannot
//! be parsed is moved aside, not overwritten.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{SystemTime, UNIX_EPOCH};

use ballast_api::{KeptVm, VmPatch};
use ballast_base::Uuid;
use ballast_sys::lock::Lock;
use serde::{Deserialize, Serialize};

use crate::rules::Identity;

const FILE: &str = "vms.json";

#[derive(Debug, Default, Serialize, Deserialize)]
struct Contents {
    vms: Vec<KeptVm>,
}

#[derive(Debug)]
pub struct KeptSettings {
    dir: PathBuf,
    one: Mutex<()>,
}

impl KeptSettings {
    pub fn new(dir: &Path) -> Self {
        Self { dir: dir.to_owned(), one: Mutex::new(()) }
    }

    fn path(&self) -> PathBuf {
        self.dir.join(FILE)
    }

    fn read(&self) -> io::Result<Contents> {
        let text = match std::fs::read(self.path()) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Contents::default()),
            Err(error) => return Err(error),
        };
        serde_json::from_slice(&text).map_err(|error| {
            let aside = self.path().with_extension("json.damaged");
            let moved = std::fs::rename(self.path(), &aside);
            let moved =
                moved.map_or_else(|why| format!("; moving it aside: {why}"), |()| format!(", now {}", aside.display()));
            io::Error::new(io::ErrorKind::InvalidData, format!("{error}{moved}"))
        })
    }

    fn write(&self, contents: &Contents) -> io::Result<()> {
        std::fs::DirBuilder::new().recursive(true).mode(0o755).create(&self.dir)?;
        let next = self.path().with_extension("json.new");
        let mut file = File::options().write(true).create(true).truncate(true).mode(0o600).open(&next)?;
        file.write_all(&serde_json::to_vec_pretty(contents)?)?;
        file.sync_all()?;
        std::fs::rename(&next, self.path())?;
        File::open(&self.dir)?.sync_all()
    }

    /// The stored changes of all VMs. Fails if the file cannot be read or parsed; in the second case it was moved
    /// aside.
    pub fn all(&self) -> io::Result<Vec<KeptVm>> {
        let _one = self.one.locked();
        Ok(self.read()?.vms)
    }

    /// The operators' changes of this VM; `None` if there are none. Fails as [`Self::all`].
    pub fn of(&self, vm: &Identity) -> io::Result<Option<VmPatch>> {
        let vms = self.all()?;
        Ok(position(&vms, vm).map(|at| vms[at].settings))
    }

    /// Stores this change of these VMs, in one write. A VM without a UUID whose name is a pid is left out, because the
    /// next process with that pid is another VM. Returns whether all were stored.
    pub fn keep(&self, vms: &[Identity], patch: &VmPatch) -> io::Result<bool> {
        let _one = self.one.locked();
        let mut contents = self.read()?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64);
        let (can, cannot): (Vec<_>, Vec<_>) = vms.iter().partition(|vm| vm.is_named || vm.uuid.is_some());
        for vm in &can {
            let at = position(&contents.vms, vm).unwrap_or_else(|| {
                contents.vms.push(KeptVm::default());
                contents.vms.len() - 1
            });
            let kept = &mut contents.vms[at];
            kept.name.clone_from(&vm.name);
            kept.uuid = vm.uuid.map(|uuid| uuid.to_string());
            kept.changed_unix_ms = now;
            kept.settings.merge(patch);
        }
        if !can.is_empty() {
            self.write(&contents)?;
        }
        Ok(cannot.is_empty())
    }

    /// Removes the changes of VMs with this name or UUID, and of the VM with the other UUID. Returns what was stored.
    pub fn forget(&self, vm: &str, uuid: Option<Uuid>) -> io::Result<Vec<KeptVm>> {
        let _one = self.one.locked();
        let mut contents = self.read()?;
        let uuids = [vm.parse().ok(), uuid].map(|uuid: Option<Uuid>| uuid.map(|uuid| uuid.to_string()));
        let is_it = |kept: &KeptVm| kept.name == vm || kept.uuid.is_some() && uuids.contains(&kept.uuid);
        let (forgotten, rest) = contents.vms.into_iter().partition(is_it);
        contents.vms = rest;
        let forgotten: Vec<KeptVm> = forgotten;
        if !forgotten.is_empty() {
            self.write(&contents)?;
        }
        Ok(forgotten)
    }
}

/// The index of this VM: by its UUID, or by its name among the VMs without a UUID.
fn position(vms: &[KeptVm], vm: &Identity) -> Option<usize> {
    let uuid = vm.uuid.map(|uuid| uuid.to_string());
    let by_uuid = uuid.and_then(|uuid| vms.iter().position(|kept| kept.uuid.as_ref() == Some(&uuid)));
    by_uuid.or_else(|| vms.iter().position(|kept| vm.is_named && kept.uuid.is_none() && kept.name == vm.name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(name: &str) -> Identity {
        Identity { name: name.into(), is_named: true, ..Identity::default() }
    }

    fn limit(bytes: Option<u64>) -> VmPatch {
        VmPatch { limit_bytes: Some(bytes), ..VmPatch::default() }
    }

    #[test]
    fn a_vm_is_known_by_its_uuid_else_by_its_whole_name() {
        let dir = tempfile::tempdir().expect("a directory");
        let kept = KeptSettings::new(&dir.path().join("state"));
        assert_eq!(kept.of(&named("db")).expect("nothing there"), None);
        let long = "n".repeat(300);
        let names = ["db", "db ", "café", "cafe\u{301}", &format!("{long}1"), &format!("{long}2")];
        for (name, bytes) in names.iter().zip(1..) {
            assert!(kept.keep(&[named(name)], &limit(Some(bytes))).expect("kept"));
        }
        for (name, bytes) in names.iter().zip(1..) {
            assert_eq!(kept.of(&named(name)).expect("read"), Some(limit(Some(bytes))), "{name}");
        }
        // The VM gets a UUID and another name, and differs from the next VM with its old name.
        let uuid = "123e4567-e89b-12d3-a456-426614174000".parse().ok();
        let with = Identity { uuid, ..named("db") };
        assert_eq!(kept.of(&with).expect("read"), Some(limit(Some(1))));
        let shares = VmPatch { shares: Some(Some(7)), ..VmPatch::default() };
        kept.keep(&[Identity { uuid, ..named("database") }], &shares).expect("kept");
        assert_eq!(kept.of(&with).expect("read"), Some(shares));
        let mut both = limit(Some(1));
        kept.keep(std::slice::from_ref(&with), &limit(None)).expect("kept");
        both.limit_bytes = Some(None);
        both.merge(&shares);
        assert_eq!(kept.of(&with).expect("read"), Some(both));
        assert_eq!(kept.of(&named("db")).expect("read"), Some(limit(Some(1))), "that one has no UUID");
        assert_eq!(kept.forget("db", None).expect("forgotten").len(), 2);
        assert_eq!((kept.of(&with).expect("read"), kept.forget("db", None).expect("none").len()), (None, 0));
        assert_eq!(kept.all().expect("read").len(), names.len() - 1);
    }

    #[test]
    fn a_name_that_is_a_pid_is_not_stored() {
        let dir = tempfile::tempdir().expect("a directory");
        let kept = KeptSettings::new(dir.path());
        let vm = Identity { is_named: false, ..named("vm-77") };
        assert!(!kept.keep(std::slice::from_ref(&vm), &limit(None)).expect("left out"));
        assert!(!dir.path().join(FILE).exists() && kept.of(&vm).expect("read").is_none());
    }

    #[test]
    fn a_damaged_file_is_moved_aside_and_a_write_leaves_one_file() {
        let dir = tempfile::tempdir().expect("a directory");
        let kept = KeptSettings::new(dir.path());
        kept.keep(&[named("db")], &limit(Some(1))).expect("kept");
        assert_eq!(std::fs::read_dir(dir.path()).expect("a directory").count(), 1);
        std::fs::write(dir.path().join(FILE), "{\"vms\": [").expect("damage it");
        let error = kept.of(&named("db")).expect_err("damaged").to_string();
        assert!(error.contains("vms.json.damaged"), "{error}");
        assert!(dir.path().join("vms.json.damaged").exists());
        assert_eq!(kept.of(&named("db")).expect("a new beginning"), None);
    }
}
