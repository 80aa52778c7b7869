//! What a guest's agent has said, as the workers of its VM share it.
//!
//! Before: the agent's worker has read a message. After: `told` has the state, and `hints` the pages to take, which
//! `places` has proved to be the guest's. Threads: any. Promise: all of it is a hint.

pub(crate) mod hints;
pub(crate) mod places;
pub mod told;
