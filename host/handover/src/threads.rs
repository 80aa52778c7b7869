//! The threads of an engine that work for a VM, listed in the VM's state file, where a keeper can read them.
//!
//! Before: a thread of an engine is about to work for a VM. After: it is in the list while it does. A killed engine
//! runs no more code, but a system call continues until it is done, which may be never: for example a call that waits
//! for the `mmap_lock` of a VMM, or for the disk of a file store. So another engine may have the VM when no thread of
//! the list is left, and need not wait for threads that work for other VMs.
//! Threads: any.
//! Promise: the list that a keeper reads after it killed the engine has each thread that may still change the VM's
//! memory, its words or its stores.

use std::sync::atomic::{AtomicU64, Ordering, fence};

/// Words of the list: the tag of its engine, the tag of the engine that a keeper has killed, whether a thread found no
/// room; then thread ids, 0 for none.
const OF: usize = 0;
const FENCED: usize = 1;
const OVERFLOWN: usize = 2;
const FIRST: usize = 3;
/// Bit beside a thread id: see [`ThreadList::beside`].
const BESIDE: u64 = 1 << 32;

/// A thread in the list, until this is dropped.
#[derive(Debug)]
#[must_use = "the thread is in the list only as long as this lives"]
pub struct Listed<'a> {
    slot: Option<&'a AtomicU64>,
    thread: u32,
}

impl Drop for Listed<'_> {
    fn drop(&mut self) {
        // Another thread may have the slot, if the entry was removed before.
        let own = |entry| (entry as u32 == self.thread).then_some(0);
        let _ = self.slot.map(|slot| slot.fetch_update(Ordering::AcqRel, Ordering::Relaxed, own));
    }
}

/// The error when a keeper has killed this engine.
#[derive(Debug, PartialEq, Eq)]
pub struct Fenced;

fn park() -> ! {
    loop {
        std::thread::park();
    }
}

/// Cached, because each fault needs it.
fn this_thread() -> u32 {
    thread_local! {
        static NUMBER: u32 = rustix::thread::gettid().as_raw_nonzero().get() as u32;
    }
    NUMBER.with(|number| *number)
}

/// An engine as one word: pids have 22 bits, and start times in ticks fit into 40 for centuries.
pub(crate) fn tag(pid: u32, start_time: u64) -> u64 {
    u64::from(pid) << 40 | start_time & ((1 << 40) - 1)
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct ThreadList<'a>(pub &'a [AtomicU64]);

impl<'a> ThreadList<'a> {
    /// Adds the calling thread. Does not return if a keeper has killed the engine.
    pub fn add_this(self, own_tag: u64) -> Listed<'a> {
        self.add(this_thread(), own_tag).unwrap_or_else(|Fenced| park())
    }

    pub fn remove_this(self) {
        let me = u64::from(this_thread());
        for slot in &self.0[FIRST..] {
            let _ = slot.compare_exchange(me, 0, Ordering::AcqRel, Ordering::Relaxed);
        }
    }

    pub fn add(self, thread: u32, own_tag: u64) -> Result<Listed<'a>, Fenced> {
        let words = self.0;
        let claim = |slot: &&AtomicU64| {
            slot.compare_exchange(0, u64::from(thread), Ordering::SeqCst, Ordering::Relaxed).is_ok()
        };
        let slot = words[FIRST..].iter().find(claim);
        if slot.is_none() {
            words[OVERFLOWN].store(1, Ordering::SeqCst);
        }
        // The keeper writes FENCED and then reads the list. This thread writes the list and then reads FENCED. So at
        // least one of them sees the other's write.
        fence(Ordering::SeqCst);
        if self.is_fenced(own_tag) { Err(Fenced) } else { Ok(Listed { slot, thread }) }
    }

    fn is_fenced(self, own_tag: u64) -> bool {
        let fenced = self.0[FENCED].load(Ordering::SeqCst);
        fenced != 0 && fenced == own_tag
    }

    /// See [`ThreadList::beside`](crate::state_file::StateFile::beside).
    pub fn beside<T>(self, own_tag: u64, work: impl FnOnce() -> T) -> T {
        let me = u64::from(this_thread());
        let swap = |from, to| {
            for slot in &self.0[FIRST..] {
                let _ = slot.compare_exchange(from, to, Ordering::SeqCst, Ordering::Relaxed);
            }
        };
        swap(me, me | BESIDE);
        let done = work();
        swap(me | BESIDE, me);
        fence(Ordering::SeqCst);
        if self.is_fenced(own_tag) {
            park();
        }
        done
    }

    /// Whether each entry of this thread has the mark [`BESIDE`].
    pub fn is_beside(self, thread: u32) -> bool {
        let slots = self.0[FIRST..].iter().map(|slot| slot.load(Ordering::SeqCst));
        let mut its = slots.filter(|slot| *slot as u32 == thread).peekable();
        its.peek().is_some() && its.all(|slot| slot & BESIDE != 0)
    }

    /// See [`StateFile::fence_threads`](crate::state_file::StateFile::fence_threads).
    pub fn fence(self, pid: u32, start_time: u64) -> Option<Vec<u32>> {
        let words = self.0;
        words[FENCED].store(tag(pid, start_time), Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let is_known = words[OF].load(Ordering::SeqCst) == tag(pid, start_time);
        if !is_known || words[OVERFLOWN].load(Ordering::SeqCst) != 0 {
            return None;
        }
        let slots = words[FIRST..].iter().map(|slot| slot.load(Ordering::SeqCst) as u32);
        Some(slots.filter(|thread| *thread != 0).collect())
    }

    pub fn threads(self) -> Vec<u32> {
        let slots = self.0[FIRST..].iter().map(|slot| slot.load(Ordering::Acquire) as u32);
        slots.filter(|thread| *thread != 0).collect()
    }

    /// Two engines use the list from now on: while neither owns it, the threads of both are unknown.
    pub fn share(self) {
        self.0[OF].store(0, Ordering::SeqCst);
    }

    /// One of the two engines is gone with its threads: the list belongs to the other one.
    pub fn own(self, pid: u32, start_time: u64) {
        self.0[OF].store(tag(pid, start_time), Ordering::SeqCst);
    }

    /// From now on the list belongs to this engine. Its predecessor's last thread is gone, so the list is empty.
    pub fn begin(self, pid: u32, start_time: u64) {
        let words = self.0;
        if words[OF].load(Ordering::Acquire) == tag(pid, start_time) {
            return;
        }
        // While it has no owner, the threads are unknown.
        words[OF].store(0, Ordering::SeqCst);
        words[OVERFLOWN..].iter().for_each(|word| word.store(0, Ordering::SeqCst));
        words[OF].store(tag(pid, start_time), Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state_file::StateFile;
    use crate::table::Lost;
    use ballast_base::wire::VmId;

    const LOST: Lost = Lost { flags: 0, word: 0 };

    fn state() -> StateFile {
        let state = StateFile::create(VmId([5; 16]), "test").expect("state");
        state.take_over(10, 99, LOST).expect("no journal");
        state
    }

    #[test]
    fn a_thread_is_in_the_list_while_it_works_for_the_vm() {
        let state = state();
        let me = this_thread();
        let listed = state.list_thread();
        let other = state.list(7).expect("not fenced");
        state.name_engine(10, 99);
        assert_eq!(state.threads(), [me, 7], "the same engine once more: it may be closing the VM still");
        drop(listed);
        assert_eq!(state.fence_threads(10, 99), Some(vec![7]));
        drop(other);
        assert_eq!(state.fence_threads(10, 99), Some(vec![]));
        assert_eq!(state.threads(), []);
    }

    #[test]
    fn a_thread_is_marked_while_it_waits_for_the_disk_of_the_file_store() {
        let state = state();
        let me = this_thread();
        assert!(!state.is_beside(me));
        let listed = state.list_thread();
        assert!(!state.is_beside(me));
        state.beside(|| assert!(state.is_beside(me) && state.threads() == [me]));
        assert!(!state.is_beside(me));
        drop(listed);
        state.beside(|| assert!(!state.is_beside(me), "it does not work for the VM at all"));
    }

    #[test]
    fn the_guard_of_a_removed_thread_removes_no_other_thread() {
        let state = state();
        let me = this_thread();
        let listed = state.list_thread();
        state.unlist_thread();
        let other = state.list(7).expect("not fenced");
        drop(listed);
        assert_eq!(state.threads(), [7]);
        drop(other);
        let listed = state.list_thread();
        state.take_over(11, 99, LOST).expect("no journal");
        let next = state.list(8).expect("the next engine's");
        drop(listed);
        assert_eq!(state.threads(), [8], "the next engine's stays");
        drop(next);
        let listed = state.list_thread();
        state.beside(|| drop(listed));
        assert!(state.threads().is_empty() && !state.is_beside(me), "one that waits for the disk, too");
    }

    #[test]
    fn an_unknown_list_is_not_taken_for_an_empty_one() {
        let state = state();
        assert_eq!(state.fence_threads(10, 98), None, "another engine with this number");
        assert_eq!(state.fence_threads(11, 99), None, "another engine with this start time");
        let many: Vec<_> = (1..1000).map(|thread| state.list(thread).expect("not fenced")).collect();
        assert_eq!(state.fence_threads(10, 99), None, "some found no room");
        drop(many);
        assert_eq!(state.fence_threads(10, 99), None, "nobody knows which");
        state.name_engine(11, 99);
        assert_eq!(state.fence_threads(11, 99), Some(vec![]));
    }

    #[test]
    fn a_thread_listed_after_its_engine_was_killed_does_nothing_for_the_vm() {
        let state = state();
        assert_eq!(state.fence_threads(10, 99), Some(vec![]));
        state.list(7).expect_err("fenced");
        // Such a late call finds another engine in the file.
        state.name_engine(12, 100);
        state.list(7).expect_err("still that engine's thread");
        state.take_over(12, 100, LOST).expect("no journal");
        state.list(8).map(drop).expect("the other engine's");
    }
}
