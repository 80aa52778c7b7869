//! The list of threads in a VM's state file, as engines and keepers use it (see `threads`).
//!
//! Before: a thread of an engine is about to work for the VM, or a keeper has killed the engine. After: the list says
//! so.
//! Threads: any.

use crate::state_file::StateFile;
use crate::threads::{Fenced, Listed};

impl StateFile {
    /// Lists this thread until the guard is dropped. Does not return if a keeper has killed the engine.
    pub fn list_thread(&self) -> Listed<'_> {
        self.thread_list().add_this(self.own_tag())
    }

    /// Removes this thread from the list, without its guard.
    pub fn unlist_thread(&self) {
        self.thread_list().remove_this();
    }

    /// Like [`Self::list_thread`], for another thread; an error if a keeper has killed the engine.
    #[doc(hidden)]
    pub fn list(&self, thread: u32) -> Result<Listed<'_>, Fenced> {
        self.thread_list().add(thread, self.own_tag())
    }

    /// The threads of this engine that may work for the VM, including ended threads; `None` if unknown. The engine must
    /// already be killed, so that no thread of it is added later.
    pub fn fence_threads(&self, pid: u32, start_time: u64) -> Option<Vec<u32>> {
        self.thread_list().fence(pid, start_time)
    }

    /// Runs a function that waits for the disk of the VM's file store, and for nothing else of the VM. If the engine is
    /// killed while its thread sleeps there, no other engine waits for that thread: the next engine's store waits for
    /// the disk itself.
    pub fn beside<T>(&self, work: impl FnOnce() -> T) -> T {
        self.thread_list().beside(self.own_tag(), work)
    }

    /// Whether this thread waits in a function that [`Self::beside`] runs.
    pub fn is_beside(&self, thread: u32) -> bool {
        self.thread_list().is_beside(thread)
    }

    /// The threads in the list now.
    pub fn threads(&self) -> Vec<u32> {
        self.thread_list().threads()
    }
}
