//! Tracking: how accurately Ballast knows which memory is hot, and the cost of that. `ballast bench track`.
//!
//! Before: there is a daemon; guests attach with their memory mapped huge and run workloads of `testvm`, whose truth is
//! known. After: there is a row for each question.
//! Threads: the bench's one; guests are processes. Units: in every key. Promise: the path is the users' path: client,
//! keeper, engine, API. Other ways of tracking replay the same recording.
//!
//! | Row | File |
//! |---|---|
//! | the hot set page by page against the truth; huge pages alone; a sample of 5 % | `accuracy` |
//! | the cost of tracking for the guest | `overhead` |
//! | splitting and coalescing one unit's mapping, against the kernel's | `units` |
//! | the touch of a watched base page | `touches` |
//! | the memory that can be taken from a guest with hot bloat | `bloat` |
//! | working set, and the time until a change is seen | `phase` |
//! | Redis in a QEMU guest: the cost of tracking, and its working set | `redis` |

mod accuracy;
mod bloat;
pub(crate) mod guest;
mod overhead;
mod phase;
mod redis;
mod touches;
mod units;

use anyhow::Result;

use crate::order::GuestKind;
use crate::report::Row;
use crate::rig::Bench;

pub(crate) fn run(bench: &mut Bench, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    if bench.options.is(GuestKind::Qemu) {
        return redis::run(bench, each);
    }
    accuracy::run(bench, each)?;
    units::run(bench, each)?;
    touches::run(bench, each)?;
    phase::run(bench, each)?;
    overhead::run(bench, each)?;
    bloat::run(bench, each)
}
