//! Opens a VM's file store, or recovers it, on its own thread, because its disk may not respond.
//!
//! Before: the VM is being opened, or reopened. After: its file store is open. Or the VM is served without the store,
//! and pages in the file wait until the disk responds, or until the store can be opened: the thread retries until the
//! VM is closed.
//! Threads: one for each VM with a file store, until that is open. The VM's worker waits at most [`OPEN_TIMEOUT`] for
//! the first try to open it, and never for a recovery.
//! Promise: before it is used, the store has waited for writes that a dead engine left in flight, and was swept. It is
//! not swept after the VM was closed, because another engine may then open it.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ballast_handover::state_file::StateFile;
use ballast_pager::vm::far::stores::LateStore;
use ballast_pager::vm::{Reporter, Vm};
use ballast_store::{FileOptions, FileStore, Handle};
use ballast_sys::lock::Lock;
use ballast_sys::memory_error;

/// How long a VM waits for its disk. A healthy disk takes milliseconds.
const OPEN_TIMEOUT: Duration = Duration::from_secs(2);
/// Time between two tries to open it. A missing resource (a descriptor, memory) may be there again at any time.
const PAUSE: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub struct LateFile {
    /// The handles in the store that the words name, sent once they are known.
    live: Sender<Option<Vec<Handle>>>,
    over: Receiver<()>,
}

#[derive(Clone, Debug, Default)]
pub struct File(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    closed: Mutex<bool>,
    is_closed: Condvar,
    opened: Mutex<Option<Arc<FileStore>>>,
}

impl Shared {
    fn pause(&self) -> bool {
        let waited = self.is_closed.wait_timeout_while(self.closed.locked(), PAUSE, |closed| !*closed);
        !*waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

impl File {
    pub fn opened(&self) -> Option<Arc<FileStore>> {
        self.0.opened.locked().clone()
    }

    /// The recovery of a VM that is reopened, while no thread uses its store. `None` if the store is not open yet: the
    /// thread that opens the store also recovers it, and since then its pages can only have become fewer.
    pub fn recovers(&self) -> Option<Recovery> {
        let opened = self.0.opened.locked().take()?;
        Some(Recovery { opened, shared: self.0.clone(), store: Arc::new(LateStore::new()) })
    }

    /// The VM is closed: its store is not swept, and the opening is abandoned.
    pub fn cancel(&self) {
        *self.0.closed.locked() = true;
        self.0.is_closed.notify_all();
    }
}

impl LateFile {
    /// Begins to open the store from these descriptors, for the VM of this state file; the open store arrives in
    /// `store`. The thread holds nothing else of the VM, because the VM's memory must not wait for the disk.
    pub fn begin(
        state: StateFile,
        report: Reporter,
        store: Arc<LateStore>,
        files: [OwnedFd; 2],
        options: FileOptions,
        shared: &File,
    ) -> io::Result<Self> {
        let (live, its_live) = mpsc::channel();
        let (end, over) = mpsc::channel::<()>();
        let shared = shared.0.clone();
        let body = move || {
            let _listed = state.list_thread();
            let say = teller(&report, &state);
            // The end of the channel tells a waiter that the try is over.
            let mut end = Some(end);
            let failed = |error| {
                if end.take().is_some() {
                    say("spill-unavailable", format!("it is there and cannot be opened, its pages wait: {error}"));
                }
            };
            state.beside(|| open(&store, &files, &options, &its_live, &shared, &say, failed));
        };
        std::thread::Builder::new().name("file".into()).spawn(body)?;
        Ok(Self { live, over })
    }

    /// Passes the handles that the words name; `None` if no engine had the VM before. Waits until the store is open, or
    /// cannot be opened, or the disk does not respond in time.
    pub fn finish(self, vm: &Vm, live: Option<Vec<Handle>>) {
        let Self { live: tell, over } = self;
        let _ = tell.send(live);
        if over.recv_timeout(OPEN_TIMEOUT) == Err(RecvTimeoutError::Timeout) {
            let name = vm.state.name();
            let text = format!("the file store of VM {name}: its disk does not answer, its pages wait");
            vm.report("spill-unavailable", text);
        }
    }
}

fn teller<'a>(report: &'a Reporter, state: &'a StateFile) -> impl Fn(&str, String) + 'a {
    move |kind, what| report(kind, format!("the file store of VM {}: {what}", state.name()))
}

#[derive(Debug)]
pub struct Recovery {
    opened: Arc<FileStore>,
    shared: Arc<Shared>,
    pub store: Arc<LateStore>,
}

impl Recovery {
    pub fn begin(self, state: StateFile, report: Reporter) -> io::Result<()> {
        let Self { opened, shared, store } = self;
        let live = store.take_live();
        let body = move || {
            let _listed = state.list_thread();
            let say = teller(&report, &state);
            state.beside(|| arrive(&store, opened, live, &shared, &say));
        };
        std::thread::Builder::new().name("file".into()).spawn(body).map(drop)
    }
}

/// Opens the store, as soon as that is possible. `failed` gets the error of each failed try.
fn open(
    store: &LateStore,
    [file, index]: &[OwnedFd; 2],
    options: &FileOptions,
    live: &Receiver<Option<Vec<Handle>>>,
    shared: &Shared,
    say: &dyn Fn(&str, String),
    mut failed: impl FnMut(io::Error),
) {
    let begun = Instant::now();
    let mut tries = 1u64;
    let opened = loop {
        match index.try_clone().and_then(|index| FileStore::open(file, index, options.clone())) {
            Ok(opened) => break opened,
            Err(error) => failed(error),
        }
        tries += 1;
        if !shared.pause() {
            return;
        }
    };
    if opened.is_read_only() {
        say("spill-rests", "its file system is read-only: its pages come back, and no more go there".into());
    }
    if !arrive(store, Arc::new(opened), live.recv().unwrap_or_default(), shared, say) {
        return;
    }
    let took = begun.elapsed();
    if tries > 1 {
        say("spill-back", format!("it was opened at try {tries}, after {} s", took.as_secs()));
    } else if took > OPEN_TIMEOUT {
        say("spill-back", format!("its disk answers again, after {} s", took.as_secs()));
    }
}

/// Recovers the store, with these live pages, before it arrives. Returns false if the VM was closed before that.
fn arrive(
    store: &LateStore,
    opened: Arc<FileStore>,
    live: Option<Vec<Handle>>,
    shared: &Shared,
    say: &dyn Fn(&str, String),
) -> bool {
    // Objects that the last engine left in a read-only store cannot be freed, and stay until the next engine tries.
    let live = live.filter(|_| !opened.is_read_only());
    let waited = if live.is_some() { opened.wait_for_writes() } else { Ok(()) };
    let closed = shared.closed.locked();
    if *closed {
        return false;
    }
    match (waited, live) {
        (Ok(()), Some(live)) => drop(opened.sweep(live.into_iter())),
        (Ok(()), None) => {}
        // The store works. Objects that the dead engine left in it occupy space until the next engine tries again.
        (Err(error), _) => {
            say("spill-unswept", format!("freeing what the last engine left in it: {error}"));
        }
    }
    store.arrive(opened.clone());
    *shared.opened.locked() = Some(opened);
    // If memory of the store's index failed during the recovery, the VM is recovered again.
    memory_error::notify();
    true
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use ballast_base::store::RegionKey;
    use ballast_base::wire::VmId;
    use ballast_base::{Bytes, PageIdx};
    use ballast_store::{Budget, DurableStore, GetOutcome, IoContext, PageKey, PutOutcome, Store};
    use ballast_testkit::skip;

    use super::*;

    #[test]
    fn a_store_that_cannot_be_opened_is_opened_later_but_not_after_the_vm_is_closed() {
        let dir = tempfile::tempdir().expect("a directory");
        let options = FileOptions::new(Budget::new(Bytes(4 << 20)));
        let (made, place, index) = match FileStore::create(dir.path(), options.clone()) {
            Ok(made) => made,
            Err(error) => return skip("disk", error),
        };
        let region = RegionKey { vm: VmId([3; 16]), number: 0 };
        let key = PageKey { region, page: PageIdx(3) };
        let PutOutcome::Stored(handle) = made.put(key, &[7; 4096]) else { panic!("it is empty") };
        drop(made);
        let path = format!("/proc/self/fd/{}", place.as_raw_fd());
        let file = std::fs::File::options().write(true).open(path).expect("open");
        let size = file.metadata().expect("stat").len();
        for closes in [false, true] {
            // A file of another size counts as incompletely written, and is not opened.
            file.set_len(size + 4096).expect("a disk");
            let (said, says) = mpsc::channel();
            let report: Reporter = Arc::new(move |kind: &str, _| {
                let _ = said.send(kind.to_owned());
            });
            let (store, shared) = (Arc::new(LateStore::new()), File::default());
            let state = StateFile::create(VmId([3; 16]), "test").expect("state");
            let files = [&place, &index].map(|fd| fd.try_clone().expect("dup"));
            let late = LateFile::begin(state, report, store.clone(), files, options.clone(), &shared);
            let LateFile { live, over } = late.expect("a thread");
            live.send(Some(vec![handle])).expect("it goes on");
            assert_eq!(over.recv(), Err(mpsc::RecvError), "the VM does not wait for the second try");
            assert_eq!(says.recv().as_deref(), Ok("spill-unavailable"));
            let mut bytes = [0; 4096];
            assert_eq!(store.get(key, handle, &mut bytes, IoContext::GUEST), GetOutcome::Busy);
            if closes {
                shared.cancel();
            }
            file.set_len(size).expect("a disk");
            assert_eq!(says.recv().as_deref().ok(), (!closes).then_some("spill-back"));
            assert!(says.recv().is_err(), "the thread ends, and said all once");
            let got = store.get(key, handle, &mut bytes, IoContext::GUEST);
            assert_eq!(got, if closes { GetOutcome::Busy } else { GetOutcome::Found });
            assert_eq!(shared.opened().is_some(), !closes);
        }
    }

    #[test]
    fn a_reopened_vm_does_not_wait_for_its_file_store_which_is_recovered_before_use() {
        let dir = tempfile::tempdir().expect("a directory");
        let made = FileStore::create(dir.path(), FileOptions::new(Budget::new(Bytes(4 << 20))));
        let (file, ..) = match made {
            Ok(made) => made,
            Err(error) => return skip("disk", error),
        };
        let vm = VmId([3; 16]);
        let key = |page| PageKey { region: RegionKey { vm, number: 0 }, page: PageIdx(page) };
        let put = |page: u64| match file.put(key(page), &ballast_testkit::pages::incompressible(page)) {
            PutOutcome::Stored(handle) => handle,
            refused => panic!("{refused:?}"),
        };
        let [kept, freed, _] = [1, 2, 3].map(put);
        let shared = File::default();
        *shared.0.opened.locked() = Some(Arc::new(file));
        let begins = |live: &[(u64, Handle)]| {
            let recovery = shared.recovers().expect("it is there");
            let store = recovery.store.clone();
            store.recover(&mut live.iter().map(|(page, handle)| (key(*page), *handle))).expect("noted");
            let state = StateFile::create(vm, "test").expect("state");
            recovery.begin(state, Arc::new(|_: &str, _| ())).expect("a thread");
            store
        };
        let mut bytes = [0; 4096];
        // As if the disk did not respond.
        let hangs = shared.0.closed.locked();
        let store = begins(&[(1, kept), (2, freed)]);
        assert_eq!(store.get(key(1), kept, &mut bytes, IoContext::GUEST), GetOutcome::Busy);
        store.free(key(2), freed);
        assert!(shared.opened().is_none() && shared.recovers().is_none(), "one thread recovers it");
        drop(hangs);
        let arrived = || loop {
            match shared.opened() {
                Some(file) => return file,
                None => std::thread::yield_now(),
            }
        };
        let file = arrived();
        assert_eq!(store.get(key(1), kept, &mut bytes, IoContext::GUEST), GetOutcome::Found);
        assert_eq!(file.usage_detail().block_pages, 1, "the others were freed, by name or because no word names them");
        // The VM is closed before another recovery: another engine may have it now.
        let mut hangs = shared.0.closed.locked();
        let again = begins(&[]);
        *hangs = true;
        drop(hangs);
        // The thread has ended: the store is held here, and where it had arrived.
        while Arc::strong_count(&file) > 2 {
            std::thread::yield_now();
        }
        assert_eq!(again.get(key(1), kept, &mut bytes, IoContext::GUEST), GetOutcome::Busy);
        assert_eq!(file.usage_detail().block_pages, 1);
    }
}
