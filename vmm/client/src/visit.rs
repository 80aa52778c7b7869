//! Tells whether this thread is inside the client. The preload library asks, so that the client's own calls (for
//! example an allocator that maps memory) do not count as the VMM's.

use std::cell::Cell;

thread_local! {
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

/// While this value lives, the thread is inside.
#[derive(Debug)]
pub struct Visit(());

impl Drop for Visit {
    fn drop(&mut self) {
        DEPTH.with(|depth| depth.set(depth.get() - 1));
    }
}

/// Enter the client.
pub fn enter() -> Visit {
    DEPTH.with(|depth| depth.set(depth.get() + 1));
    Visit(())
}

/// Enter the client and never leave: for the client's own thread.
pub fn enter_permanently() {
    std::mem::forget(enter());
}

/// Is this thread inside?
pub fn inside() -> bool {
    DEPTH.with(|depth| depth.get() > 0)
}
