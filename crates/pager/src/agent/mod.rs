//! The agent in a guest, seen from the host: what it tells becomes hints to reclaim, and nothing more.
//!
//! Before: a VMM shows the virtio-serial port of an agent as a socket. After: reclaim takes what the guest calls cold
//! before anything else, and the VM is not tracked by the host meanwhile.
//! Promise: all that comes from a guest is a hint. It is bounded, clipped to memory of that guest and charged to its
//! VM; what it names passes quarantine and pin check like any other page. Nothing that a guest says makes us panic.
//!
//! | File | What |
//! |---|---|
//! | `bucket` | how much a guest may say |
//! | `places` | guest-physical pages to pages of regions, proved |
//! | `hints` | a report as runs to take, the cheapest first |
//! | `trust` | whether what is called cold stays away |
//! | `told` | what the worker of the agent, reclaim and the API share |
//! | `channel` | the socket |
//! | `worker` | the conversation: a task of the VM |

pub(crate) mod bucket;
pub(crate) mod channel;
pub(crate) mod hints;
pub(crate) mod places;
pub mod told;
pub(crate) mod trust;
pub(crate) mod worker;
