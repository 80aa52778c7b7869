//! Loads the pin check, and tries again now and then.
//!
//! Before: the engine began; until there is a check, time alone says when a page may be evicted. After: the reclaim
//! workers of all VMs ask the check.
//! Threads: one of its own, because it takes some 10 ms in which faults are to be served. Units: seconds.
//! Promise: each change is logged once.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use ballast_pager::vm::pinned::Pins;

/// A missing condition may appear (memory for a huge page), and a check may be lost. A try costs 10 ms of CPU time.
const EVERY: Duration = Duration::from_secs(60);

/// Load it, and check it now and then.
pub fn start(pins: Arc<Pins>) -> anyhow::Result<()> {
    let look = move || {
        let mut said = None;
        loop {
            if pins.check().is_none() {
                let found = pins.find_out().err();
                match &found {
                    None => tracing::info!("it is asked of each page who holds it before it goes"),
                    Some(why) if said.as_ref() != Some(&found) => {
                        tracing::warn!("who holds a page cannot be known, so T says when it may go: {why}");
                    }
                    Some(_) => {}
                }
                said = Some(found);
            }
            std::thread::sleep(EVERY);
        }
    };
    std::thread::Builder::new().name("pin-check".into()).spawn(look).context("Starting the thread of the pin check")?;
    Ok(())
}
