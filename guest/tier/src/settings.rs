//! Settings of the guest's owner, and the reasons why there is no tiering.
//!
//! Before: options of the agent. After: [`crate::Tierer`] starts, or says what this machine lacks.
//! Threads: none; plain values. Units: in each name. Promise: an error names what is missing.

use std::io;
use std::time::Duration;

use crate::programs::Choice;

/// How long an epoch is (Demeter §3.2.1).
pub const EPOCH: Duration = Duration::from_millis(500);

/// Epochs after which pages that the kernel refused to move are tried again: 30 s.
pub(crate) const AGAIN_AFTER: u64 = 60;

/// Settings of the guest's owner.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Programs to manage.
    pub choice: Choice,
    /// Most bytes promoted in a second; as many are demoted.
    pub most_bytes_per_s: u64,
    /// Switch NUMA balancing off while this runs. Otherwise this moves nothing where balancing promotes.
    pub take_over: bool,
    /// The caller has DAMON: its threads from this index on are for tiering, one for each program.
    pub damon_threads_from: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self { choice: Choice::default(), most_bytes_per_s: 256 << 20, take_over: false, damon_threads_from: 0 }
    }
}

/// Reasons why there is no tiering here.
#[derive(Debug, thiserror::Error)]
pub enum Unavailable {
    /// All memory is of one speed, as far as this kernel knows.
    #[error("Tiering: all memory is one tier: {0} nodes that nothing tells apart")]
    OneTier(usize),
    /// The kernel does not tell where pages are, or not to this user.
    #[error("Tiering: where pages are is not known: {0}")]
    Frames(&'static str),
    /// Something else.
    #[error("Tiering: {0}")]
    Io(#[from] io::Error),
}
