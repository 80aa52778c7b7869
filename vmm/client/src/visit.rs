//! Whether this thread is inside the client. The preload library checks this, so that the client's own calls (for
//! example by an allocator that maps memory) do not count as the VMM's.

use std::cell::Cell;

thread_local! {
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

/// The thread is inside the client while this value lives.
#[derive(Debug)]
pub struct Visit(());

impl Drop for Visit {
    fn drop(&mut self) {
        DEPTH.with(|depth| depth.set(depth.get() - 1));
    }
}

/// Enters the client.
pub fn enter() -> Visit {
    DEPTH.with(|depth| depth.set(depth.get() + 1));
    Visit(())
}

/// Enters the client permanently, on the client's own thread.
pub fn enter_permanently() {
    std::mem::forget(enter());
}

/// Whether this thread is inside the client.
pub fn inside() -> bool {
    DEPTH.with(|depth| depth.get() > 0)
}
