//! A lock that a thread holds while it reads: if others want it, the thread lets go of a page that its disk is late
//! with.
//!
//! Before: a thread has taken a lock that others wait for now and then, and is about to read pages. After: its reads
//! are late ([`GetOutcome::Busy`](crate::GetOutcome)) as soon as another thread wants the lock, but not before the
//! first wait for a page is over; else they may take seconds, if the disk was late before.
//! A thread may also say that it has time ([`WithTime`]).
//! Threads: each has a lock of its own, or none. Promise: a thread that holds no such lock waits as long as it may.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// How many threads want a lock.
pub type Wanted = Arc<AtomicU32>;

thread_local! {
    static HELD: RefCell<Option<Wanted>> = const { RefCell::new(None) };
}

/// The calling thread holds a lock for which this counts who wants it, until the value ends.
#[derive(Debug)]
#[must_use]
pub struct Holding {
    before: Option<Wanted>,
}

impl Holding {
    /// Begins now.
    pub fn of(wanted: &Wanted) -> Self {
        Self { before: HELD.replace(Some(wanted.clone())) }
    }
}

impl Drop for Holding {
    fn drop(&mut self) {
        HELD.set(self.before.take());
    }
}

thread_local! {
    static HAS_TIME: Cell<bool> = const { Cell::new(false) };
}

/// No guest's thread waits for what the calling thread reads, until this value is dropped: errors that it meets are not
/// the guest's, and it gives up no page of a disk that is gone for a while.
#[derive(Debug)]
#[must_use]
pub struct WithTime(bool);

impl WithTime {
    /// Begins now.
    pub fn begin() -> Self {
        Self(HAS_TIME.replace(true))
    }
}

impl Drop for WithTime {
    fn drop(&mut self) {
        HAS_TIME.set(self.0);
    }
}

/// Does no guest's thread wait for this one?
pub fn has_time() -> bool {
    HAS_TIME.get()
}

/// Does this thread hold such a lock?
pub fn is_held() -> bool {
    HELD.with_borrow(Option::is_some)
}

/// Does another thread want the lock that this one holds?
pub fn is_wanted() -> bool {
    HELD.with_borrow(|held| held.as_ref().is_some_and(|wanted| wanted.load(Ordering::Acquire) > 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_is_wanted_of_the_thread_that_took_it_last() {
        let (one, other) = (Wanted::default(), Wanted::default());
        let first = Holding::of(&one);
        one.fetch_add(1, Ordering::Release);
        assert!(is_wanted());
        let second = Holding::of(&other);
        assert!(!is_wanted());
        drop(second);
        assert!(is_wanted() && !std::thread::spawn(is_wanted).join().expect("it ends"));
        drop(first);
        assert!(!is_wanted());
    }
}
