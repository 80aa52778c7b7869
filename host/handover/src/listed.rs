//! The list of threads of a VM's state file, as engines and keepers use it (see `threads`).
//!
//! Before: a thread of an engine is about to work for the VM, or a keeper has killed the engine. After: the list says
//! so. Threads: any.

use crate::state_file::StateFile;
use crate::threads::{Fenced, Listed};

impl StateFile {
    /// This thread works for the VM from now on. If a keeper has killed the engine, this does not return.
    pub fn list_thread(&self) -> Listed<'_> {
        self.thread_list().add_this(self.own_tag())
    }

    /// This thread no longer works for the VM; its guard is lost.
    pub fn unlist_thread(&self) {
        self.thread_list().remove_this();
    }

    /// The same as [`Self::list_thread`] for another thread; returns an error if a keeper has killed the engine.
    #[doc(hidden)]
    pub fn list(&self, thread: u32) -> Result<Listed<'_>, Fenced> {
        self.thread_list().add(thread, self.own_tag())
    }

    /// The threads of this engine that may work for the VM, some of them ended; `None` if that is not known. The engine
    /// must have been killed, so that it begins nothing for this VM any more.
    pub fn fence_threads(&self, pid: u32, start_time: u64) -> Option<Vec<u32>> {
        self.thread_list().fence(pid, start_time)
    }

    /// Runs a function that waits for the disk of the VM's file store and for nothing else of the VM. A killed engine's
    /// thread that sleeps in it delays no other engine: the next engine's store waits for the disk itself.
    pub fn beside<T>(&self, work: impl FnOnce() -> T) -> T {
        self.thread_list().beside(self.own_tag(), work)
    }

    /// Does this thread wait in such a function?
    pub fn is_beside(&self, thread: u32) -> bool {
        self.thread_list().is_beside(thread)
    }

    /// The threads that work for the VM now.
    pub fn threads(&self) -> Vec<u32> {
        self.thread_list().threads()
    }
}
