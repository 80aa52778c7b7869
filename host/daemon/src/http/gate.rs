//! The gate of the API: closed while VMs move between engines, because a client would see only some of them.
//!
//! Before: another engine will serve, or has failed to. After: requests inside were answered. Later requests wait in
//! the listening socket, which every engine has, until an engine opens its gate. Threads: any may close and open the
//! gate; connections are tasks that watch it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::watch;

/// A clone is the same gate.
#[derive(Clone, Debug)]
pub struct Gate {
    open: Arc<watch::Sender<bool>>,
    inside: Arc<AtomicUsize>,
}

/// A connection that has this is inside the gate.
#[derive(Debug)]
pub(super) struct Inside {
    open: watch::Receiver<bool>,
    counted: Arc<AtomicUsize>,
}

impl Drop for Inside {
    fn drop(&mut self) {
        self.counted.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Default for Gate {
    fn default() -> Self {
        Self { open: Arc::new(watch::Sender::new(true)), inside: Arc::default() }
    }
}

impl Gate {
    /// Lets no connection in.
    pub fn close(&self) {
        self.open.send_replace(false);
    }

    /// Waits until the connections inside were answered, for at most this long.
    pub fn wait_until_empty(&self, at_most: Duration) {
        const POLL_EVERY: Duration = Duration::from_millis(1);
        let begun = Instant::now();
        while self.inside.load(Ordering::Acquire) > 0 && begun.elapsed() < at_most {
            std::thread::sleep(POLL_EVERY);
        }
    }

    /// Lets connections in.
    pub fn open(&self) {
        self.open.send_replace(true);
    }

    pub(super) async fn opened(&self) {
        let _ = self.open.subscribe().wait_for(|open| *open).await;
    }

    pub(super) async fn closed(&self) {
        let _ = self.open.subscribe().wait_for(|open| !*open).await;
    }

    pub(super) fn enter(&self) -> Inside {
        self.inside.fetch_add(1, Ordering::AcqRel);
        Inside { open: self.open.subscribe(), counted: self.inside.clone() }
    }
}

impl Inside {
    pub(super) async fn closed(&mut self) {
        if self.open.wait_for(|open| !*open).await.is_err() {
            // No thread can close it any more.
            std::future::pending::<()>().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closing_the_gate_waits_for_connections_inside_and_for_no_others() {
        let gate = Gate::default();
        let (same, inside) = (gate.clone(), gate.enter());
        same.close();
        gate.wait_until_empty(Duration::ZERO);
        assert_eq!(gate.inside.load(Ordering::Acquire), 1, "one is inside");
        drop(inside);
        gate.wait_until_empty(Duration::MAX);
    }
}
