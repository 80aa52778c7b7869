//! Something a test does in the end, also if it panics.
//!
//! Before: threads of a test run until they are told to stop. After: they are told, and their scope can end. Without
//! it, an assertion that fails would wait for them for ever, and nobody would read what it said.
//! Threads: the one that drops it.

/// Does something when it goes out of scope, also by a panic.
#[derive(Debug)]
pub struct Finally<F: FnMut()>(pub F);

impl<F: FnMut()> Drop for Finally<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}
