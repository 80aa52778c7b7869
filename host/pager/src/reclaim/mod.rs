//! Reclaim decides which pages are evicted, and when.
//!
//! Before: a limit was written. After: resident memory is at or below it. `worker` runs the loop. `candidates` picks
//! pages, `quarantine` has them zapped and holds them for T, `adaptive` shortens T above the limit, and `effort` keeps
//! fewer pages there below it. `refault` tells the agent what refaulted, `interval` how soon, `kept` and `pinned`
//! which pages must stay, `growth` that a VM at rest holds more, `pace` whether a client's reply begins a round, and
//! `failures` which failures are reported.
//! Threads: one reclaim worker for each VM. Promise: a page is evicted only after its quarantine.

mod adaptive;
mod candidates;
mod descent;
mod effort;
mod failures;
pub(crate) mod growth;
pub mod interval;
pub(crate) mod kept;
mod pace;
pub mod pinned;
mod quarantine;
pub mod refault;
pub mod worker;

use ballast_base::Bytes;
use ballast_base::units::{GIB, MIB};

/// Distance between the limit and the low watermark: 1/256 of the limit, between 1 MiB and 256 MiB. Memory below the
/// limit that the guest may not use is lost to it: with 1/32, Redis at 80 % of its memory restored 400 to 1,600 pages a
/// second that it did not restore with 1/256.
fn margin(limit: Bytes) -> Bytes {
    Bytes((limit.0 / 256).clamp(MIB, GIB / 4))
}
