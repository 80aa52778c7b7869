//! The files of a VM's stores, by the number of the store: keepers hold them, send them for escrow, and get them back.
//!
//! Before: a store was made, or a client brought its files back. After: the engine that opens the store has them, in
//! their order.
//! Threads: the keeper's one. Promise: a client's file counts as a store's file only if we made it. A store that this
//! program does not know is refused by name.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use anyhow::{Context, bail, ensure};
use ballast_base::Bytes;
use ballast_base::store::{FILE_STORE, GROUP_STORE, RAM_STORE};
use ballast_base::wire::{StoreFiles, VmId};
use ballast_handover::arena;
use ballast_sys::direct;
use ballast_sys::memfd::{self, FileId};
use rustix::fs::{AtFlags, StatxFlags, fcntl_get_seals, fstat, makedev, statx};

use ballast_sys::slow_fd::SlowFd;

/// The files of one store. RAM store: its arena. File store: the place of its file, and its index. Group store: the
/// arena of the VM's group, which other VMs have as well, in an opening that announces this VM.
#[derive(Debug)]
pub struct Files {
    store: u8,
    files: Vec<Arc<SlowFd>>,
}

impl Files {
    pub fn ram(arena: SlowFd) -> Self {
        Self { store: RAM_STORE, files: vec![Arc::new(arena)] }
    }

    pub fn file(files: [SlowFd; 2]) -> Self {
        Self { store: FILE_STORE, files: files.into_iter().map(Arc::new).collect() }
    }

    pub fn of(store: u8, files: Vec<Arc<SlowFd>>) -> Self {
        Self { store, files }
    }

    /// The file of the group store, for this VM: a new opening of the group's arena.
    pub fn group(arena: SlowFd, vm: VmId) -> anyhow::Result<Self> {
        arena::announce(&arena, vm).context("Announcing a member of a group")?;
        Ok(Self { store: GROUP_STORE, files: vec![Arc::new(arena)] })
    }

    pub fn group_arena(&self) -> Option<&Arc<SlowFd>> {
        self.files.first().filter(|_| self.store == GROUP_STORE)
    }

    /// The files of this VM's stores that a client brings back, reopened for writing.
    ///
    /// # Errors
    /// They are not the files that this client was given; the error says why.
    pub fn take_back(
        vm: VmId,
        stores: &[StoreFiles],
        fds: &mut impl Iterator<Item = SlowFd>,
    ) -> anyhow::Result<Vec<Self>> {
        let take_back = |StoreFiles { store, count }: &StoreFiles| {
            let mut files = fds.by_ref().take(usize::from(*count)).collect::<Vec<_>>().into_iter();
            match (*store, files.next(), files.next(), files.next()) {
                (RAM_STORE, Some(arena), None, None) => Ok(Self::ram(reopen_ours(arena, "arena")?)),
                (FILE_STORE, Some(file), Some(index), None) => {
                    let index = reopen_ours(index, "index")?;
                    Ok(Self::file([place_named(file, &index)?, index]))
                }
                (GROUP_STORE, Some(arena), None, None) => Self::group(reopen_ours(arena, "group's arena")?, vm),
                (RAM_STORE | FILE_STORE | GROUP_STORE, ..) => bail!("store {store} has not {count} files"),
                _ => {
                    bail!("this program has no store with the number {store}, of which files were brought back")
                }
            }
        };
        let files = stores.iter().map(take_back).collect::<anyhow::Result<Vec<_>>>()?;
        // The engine opens the stores in the order of their numbers, and none of them without the RAM store.
        if files.iter().any(|files| files.store == RAM_STORE) { Ok(files) } else { bail!("no arena was brought back") }
    }

    pub fn store(&self) -> u8 {
        self.store
    }

    pub fn counts(stores: &[Self]) -> Vec<StoreFiles> {
        stores.iter().map(|files| StoreFiles { store: files.store, count: files.files.len() as u8 }).collect()
    }

    pub fn iter(&self) -> impl Iterator<Item = &Arc<SlowFd>> {
        self.files.iter()
    }

    /// Descriptors of these files for a client of this VM to keep: read-only, and a place as a place.
    pub fn escrow(&self, vm: VmId) -> io::Result<Vec<OwnedFd>> {
        match (self.store, self.files.as_slice()) {
            // To open the file, or to close it then, might have to wait for its disk.
            (FILE_STORE, [file, index]) => {
                Ok(vec![file.as_fd().try_clone_to_owned()?, memfd::reopen(index.as_fd(), false)?])
            }
            (GROUP_STORE, [arena]) => {
                let opening = memfd::reopen(arena.as_fd(), false)?;
                arena::announce(&opening, vm)?;
                Ok(vec![opening])
            }
            (_, files) => files.iter().map(|file| memfd::reopen(file.as_fd(), false)).collect(),
        }
    }
}

const STRANGE: &str = "it is not the file this client was given";

/// Whether this is a file of the shared-memory file system. Only such files and huge-page files have seals, and the
/// kernel returns these without asking the file's own file system. After that check, other calls are safe, too.
fn is_shmem(fd: impl AsFd) -> std::io::Result<bool> {
    Ok(fcntl_get_seals(&fd).is_ok() && memfd::is_shmem(&fd)?)
}

/// Whether the file is in the kernel's own tmpfs, which has the memfds, and where no file has a path.
fn is_memfd(fd: impl AsFd) -> io::Result<bool> {
    let one = memfd::create("ballast-compare", Bytes(0))?;
    Ok(memfd::file_id(one)?.dev == memfd::file_id(fd)?.dev)
}

/// Reopens, for writing, a file that we made and sent read-only. It is ours if it is a memfd of this user with mode
/// 0600: no other user can make one. The pool's files of base pages have that owner and mode, too, but VMs write to
/// them.
pub fn reopen_ours(fd: SlowFd, what: &str) -> anyhow::Result<SlowFd> {
    let reopen = || -> anyhow::Result<OwnedFd> {
        ensure!(is_shmem(&fd)? && is_memfd(&fd)?, STRANGE);
        let stat = fstat(&fd)?;
        let ours = stat.st_uid == rustix::process::geteuid().as_raw() && stat.st_mode & 0o777 == 0o600;
        ensure!(ours, STRANGE);
        Ok(memfd::reopen(fd.as_fd(), true)?)
    };
    let opened = reopen().with_context(|| format!("Taking back the {what} file"))?;
    Ok(opened.into())
}

/// Takes back the file on a disk that an index of ours names, as a place: only the engine opens it. Its identity is
/// read without waiting for its file system: until it is known, it may be any file.
fn place_named(fd: SlowFd, index: &SlowFd) -> anyhow::Result<SlowFd> {
    let place = || -> anyhow::Result<OwnedFd> {
        let named = arena::file_of(index.as_fd())?;
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        let stat = statx(&fd, "", flags, StatxFlags::BASIC_STATS)?;
        let found = FileId { dev: makedev(stat.stx_dev_major, stat.stx_dev_minor), ino: stat.stx_ino };
        ensure!(found == named, STRANGE);
        Ok(direct::place_of(fd.as_fd())?)
    };
    let place = place().context("Taking back the file of the file store")?;
    Ok(place.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_testkit::skip;

    #[test]
    fn memory_files_are_told_from_others_without_asking_their_file_system() {
        let memfd = memfd::create("ballast-test", Bytes(4096)).expect("memfd");
        assert!(is_shmem(&memfd).expect("fcntl"));
        let (reader, _writer) = std::io::pipe().expect("pipe");
        assert!(!is_shmem(&reader).expect("fcntl"));
        assert!(!is_shmem(std::fs::File::open("/proc/self/stat").expect("open")).expect("fcntl"));
        if memfd::is_shmem(std::fs::File::open("/dev/shm").expect("open")).expect("statfs") {
            let file = tempfile::tempfile_in("/dev/shm").expect("a file in a tmpfs");
            assert!(is_shmem(&file).expect("fcntl"), "RAM need not be a memfd");
        }
    }

    #[test]
    fn the_file_of_a_file_store_is_taken_back_only_if_its_index_names_it() {
        use ballast_store::{Budget, FileOptions, FileStore};
        let dir = tempfile::tempdir().expect("a directory");
        let made = FileStore::create(dir.path(), FileOptions::new(Budget::new(Bytes(2 << 20))));
        let Ok((_, file, index)) = made.inspect_err(|error| skip("disk", error)) else { return };
        let sent = SlowFd::from;
        let index = sent(index);
        let reader = direct::reopen(file.as_fd(), false).expect("reopen");
        let back = place_named(sent(reader), &index).expect("it is the one");
        let other = tempfile::tempfile_in(dir.path()).expect("a file");
        let refused = place_named(sent(other.into()), &index).expect_err("another file");
        let refused = format!("{refused:#}");
        assert!(refused.contains("not the file"), "{refused}");
        place_named(back, &sent(memfd::create("ballast-test", Bytes(4096)).expect("memfd"))).expect_err("no index");
    }

    #[test]
    fn a_state_file_is_taken_back_only_if_it_is_ours() {
        let sent = SlowFd::from;
        let theirs = memfd::create("ballast-test", Bytes(4096)).expect("memfd");
        reopen_ours(sent(theirs), "state").expect_err("mode 0777");
        let (reader, _writer) = std::io::pipe().expect("pipe");
        reopen_ours(sent(reader.into()), "state").expect_err("a pipe");
        let with_our_mode = |file: OwnedFd| {
            rustix::fs::fchmod(&file, rustix::fs::Mode::from_raw_mode(0o600)).expect("chmod");
            file
        };
        let ours = with_our_mode(memfd::create("ballast-test", Bytes(4096)).expect("memfd"));
        reopen_ours(sent(memfd::reopen(ours.as_fd(), false).expect("reopen")), "state").expect("ours");
        if !memfd::is_shmem(std::fs::File::open("/dev/shm").expect("open")).expect("statfs") {
            return skip("tmpfs", "/dev/shm is none");
        }
        let pools = with_our_mode(tempfile::tempfile_in("/dev/shm").expect("a file in a tmpfs").into());
        reopen_ours(sent(pools), "state").expect_err("a file in a tmpfs, as the pool gives VMs");
    }
}
