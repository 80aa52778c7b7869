//! The origin of a state: the boot of the host, and the files. A state whose files are gone is forgotten.
//!
//! The state may lie on a disk and survive a boot, and the file system of huge pages may be unmounted. The files are
//! known by a file with a random name among them, the *mark*.
//!
//! Before: `reserve` opens the files of the pool's directory. After: the state describes these files, or there is no
//! state. Threads: the owner's. Promise: each page is returned to the kernel once, even if this is repeated, and other
//! users keep their pages.

use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::{During, Error};
use crate::journal;
use crate::promises;
use crate::reserve::Reserve;

const FILE: &str = "origin.json";
/// Files that describe a pool, without the journal and the origin.
const DESCRIPTION: [&str; 6] =
    ["owed.json", "lending.json", "names.json", promises::FILE, promises::TERMS_FILE, "state"];

#[derive(Debug, Serialize, Deserialize)]
struct Origin {
    boot: String,
    mark: String,
}

impl Reserve {
    /// Creates a mark among these files, for the state that is created next.
    pub(crate) fn mark_files(&self, files: &Path) -> Result<(), Error> {
        const WHAT: &str = "Marking the pool's files";
        let mut mark = [0; 8];
        rustix::rand::getrandom(&mut mark, rustix::rand::GetRandomFlags::empty())
            .map_err(io::Error::from)
            .during(WHAT)?;
        let mark = format!("origin-{:016x}", u64::from_le_bytes(mark));
        std::fs::File::create(files.join(&mark)).during(WHAT)?;
        journal::store(&self.dir.join(FILE), &Origin { boot: boot()?, mark }).during(WHAT)
    }

    fn origin(&self) -> Result<Option<Origin>, Error> {
        journal::load(&self.dir.join(FILE)).during("Reading the pool's origin")
    }

    /// Forgets a state of another boot of the host. All pages are free since that boot.
    pub(crate) fn forget_other_boot(&mut self) -> Result<(), Error> {
        let Some(origin) = self.origin()? else { return Ok(()) };
        if origin.boot != boot()? {
            // The journal is about another boot as well.
            self.remove(&["journal.json"])?;
            self.remove(&DESCRIPTION)?;
            self.forgotten()?;
        }
        Ok(())
    }

    /// Forgets a state whose files are gone. Their pages are free, or belong to a VM that still has them open.
    pub(crate) fn forget_lost_files(&mut self) -> Result<(), Error> {
        let origin = self.origin()?;
        let files = self.dir.join(self.host.page().files());
        match &origin {
            Some(origin) if files.join(&origin.mark).exists() => return Ok(()),
            // The origin is written first and removed last, so there is no state.
            None if self.live.is_none() => return Ok(()),
            // It is unknown of which boot the state is.
            None => self.remove(&["journal.json"])?,
            Some(_) => self.begin()?,
        }
        self.remove(&DESCRIPTION)?;
        self.live = None;
        // Without a state the pool has no page, so this sets the kernel's number to that of the others' pages.
        self.recover()?;
        self.forgotten()
    }

    fn forgotten(&mut self) -> Result<(), Error> {
        self.remove(&[FILE])?;
        self.notes = vec!["the files of the pool were gone, and it was forgotten: reserve it again".into()];
        Ok(())
    }

    fn remove(&self, files: &[&str]) -> Result<(), Error> {
        files.iter().try_for_each(|file| journal::remove(&self.dir.join(file)).during("Forgetting a pool"))
    }
}

fn boot() -> Result<String, Error> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").during("Asking for the host's boot id")?;
    Ok(text.trim().to_owned())
}
