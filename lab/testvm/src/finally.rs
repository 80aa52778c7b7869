//! Runs the end of a test, also if the test panics.
//!
//! Before: threads of a test run until they are told to stop. After: they are told, and their scope can end. Without
//! it, a failed assertion would wait for them for ever, and its message would not appear.
//! Threads: the one that drops it.

/// Runs the closure when it goes out of scope, also by a panic.
#[derive(Debug)]
pub struct Finally<F: FnMut()>(pub F);

impl<F: FnMut()> Drop for Finally<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}
