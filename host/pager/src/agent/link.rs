//! One connection to an agent: a session, and the worker's state for it.
//!
//! Before: there is a port. After: the worker (`worker`) exchanges messages.
//! Threads: the task of the VM's agent.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use ballast_messages::message::{NONCE, Wanted};
use ballast_messages::{Frames, Run, ToGuest};

use super::channel::Channel;
use super::services::Services;

/// Interval of the agent's regular messages, and of the worker's checks.
pub(super) const TICK: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
pub(super) struct Parts {
    pub number: u32,
    pub runs: Vec<Run>,
}

#[derive(Debug)]
pub(super) struct Link {
    pub channel: Channel,
    pub session: u64,
    pub nonce: [u8; NONCE],
    pub frames: Frames,
    pub since: Instant,
    /// Times of the last regular message, and of the last complete report.
    pub ticked: Option<Instant>,
    pub reported: Option<Instant>,
    pub parts: Parts,
    pub prove_at: Instant,
    pub hello_at: Instant,
    /// By node, pages that the agent was told to hold.
    pub balloon: BTreeMap<u32, u64>,
    pub services: Services,
}

impl Link {
    /// Sends a hello with the agent's orders. A later one in the session replaces it.
    pub fn hello(&mut self) -> bool {
        let tick_ms = TICK.as_millis() as u32;
        let wanted = Wanted { tick_ms, reports: true, services: self.services.is_wanted() };
        self.channel.send(&ToGuest::Hello(wanted).frame(self.session))
    }
}
