//! The messages of a guest's agent, as the workers of its VM share them.
//!
//! Before: the agent's worker has read a message. After: `told` has the state, and `hints` the pages to take, which
//! `places` has proved to be the guest's.
//! Threads: any.
//! Promise: each is only a hint.

pub(crate) mod hints;
pub(crate) mod places;
pub mod told;
