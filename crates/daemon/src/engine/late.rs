//! Late: opens a VM's file store on a thread of its own, because its disk may not respond.
//!
//! Before: the VM is being opened. After: its file store is there; or the VM is served without it, and pages in the
//! file wait until the disk responds.
//! Threads: one for each VM with a file store, until that is open. The VM's worker waits for it, [`OPEN_TIMEOUT`] at
//! most.
//! Promise: the store is not used before it has waited for writes that a dead engine left under way, and was swept. It
//! is not swept any more once the VM is closed, because another engine may then open it.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use ballast_handover::state_file::StateFile;
use ballast_pager::tier::stores::LateStore;
use ballast_pager::vm::{Reporter, Vm};
use ballast_store::{FileOptions, FileStore, Handle};

/// How long a VM waits for its disk. A healthy one takes milliseconds.
const OPEN_TIMEOUT: Duration = Duration::from_secs(2);

/// A file store that is being opened.
#[derive(Debug)]
pub struct LateFile {
    /// The handles that the words name in it, sent once they are known.
    live: Sender<Option<Vec<Handle>>>,
    over: Receiver<()>,
}

/// The file store of a VM, once it is open.
#[derive(Clone, Debug, Default)]
pub struct File(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    closed: Mutex<bool>,
    opened: OnceLock<Arc<FileStore>>,
}

impl File {
    /// The store itself, once it is there.
    pub fn opened(&self) -> Option<&Arc<FileStore>> {
        self.0.opened.get()
    }

    /// The VM is closed: its store is not swept, and the opening is abandoned.
    pub fn cancel(&self) {
        *self.0.closed.lock().unwrap_or_else(PoisonError::into_inner) = true;
    }
}

impl LateFile {
    /// Begin to open it for the VM of this state file, from these descriptors; it arrives in `store`. The thread holds
    /// nothing else of the VM, whose memory must not wait for the disk when it ends.
    pub fn begin(
        state: StateFile,
        report: Reporter,
        store: Arc<LateStore>,
        [file, index]: [OwnedFd; 2],
        options: FileOptions,
        shared: &File,
    ) -> io::Result<Self> {
        let (live, its_live) = mpsc::channel();
        let (end, over) = mpsc::channel::<()>();
        let shared = shared.0.clone();
        let body = move || {
            let _listed = state.list_thread();
            let say = |kind: &str, what: String| report(kind, format!("the file store of VM {}: {what}", state.name()));
            let opened = state.beside(|| open(&store, [file, index], options, &its_live, &shared, &say));
            if let Err(error) = opened {
                say("spill-unavailable", format!("it is there and cannot be opened, its pages wait: {error}"));
            }
            // A waiter sees the end of the channel.
            drop(end);
        };
        std::thread::Builder::new().name("file".into()).spawn(body)?;
        Ok(Self { live, over })
    }

    /// These are the objects that the words name; `None` if no engine has had the VM before. Waits until the store is
    /// there, or cannot be opened, or the disk does not respond.
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

fn open(
    store: &LateStore,
    [file, index]: [OwnedFd; 2],
    options: FileOptions,
    live: &Receiver<Option<Vec<Handle>>>,
    shared: &Shared,
    say: &dyn Fn(&str, String),
) -> io::Result<()> {
    let begun = Instant::now();
    let opened = FileStore::open(file, index, options)?;
    let live = live.recv().unwrap_or_default();
    let waited = if live.is_some() { opened.wait_for_writes() } else { Ok(()) };
    let closed = shared.closed.lock().unwrap_or_else(PoisonError::into_inner);
    if *closed {
        return Ok(());
    }
    match (waited, live) {
        (Ok(()), Some(live)) => drop(opened.sweep(live.into_iter())),
        (Ok(()), None) => {}
        // It works; objects that the dead engine left in it occupy space until the next engine tries again.
        (Err(error), _) => {
            say("spill-unswept", format!("freeing what the last engine left in it: {error}"));
        }
    }
    let opened = Arc::new(opened);
    let _ = shared.opened.set(opened.clone());
    store.arrive(opened);
    if begun.elapsed() > OPEN_TIMEOUT {
        say("spill-back", format!("its disk answers again, after {} s", begun.elapsed().as_secs()));
    }
    Ok(())
}
