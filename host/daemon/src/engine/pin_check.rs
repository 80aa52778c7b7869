//! Loads the pin check, and tries again from time to time.
//!
//! Before: the engine began; without the check, a page is evicted after a time that is long enough for any device.
//! After: the reclaim workers of all VMs use the check.
//! Threads: one of its own, because a load takes some 10 ms, in which faults must be served. Units: seconds.
//! Promise: each change is logged once.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use ballast_pager::vm::pinned::Pins;

/// A missing condition (memory for a huge page) may appear, and a check may be lost. A try costs 10 ms of CPU time.
const EVERY: Duration = Duration::from_secs(60);

pub fn start(pins: Arc<Pins>) -> anyhow::Result<()> {
    let look = move || {
        let mut said = None;
        loop {
            if pins.check().is_none() {
                let found = pins.find_out().err();
                match &found {
                    None => tracing::info!("the references of each page are checked before its eviction"),
                    Some(why) if said.as_ref() != Some(&found) => {
                        tracing::warn!(
                            "page references cannot be checked, so pages are evicted only after the full T: {why}"
                        );
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
