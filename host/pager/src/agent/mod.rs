//! The agent in a guest, seen from the host: its reports become hints to reclaim, and nothing more.
//!
//! Before: the client in a VMM has the host's end of the virtio-serial port of an agent. After: reclaim takes pages
//! that the guest reports as cold before all others, and the host does not track the VM meanwhile.
//! Promise: all that comes from a guest is a hint. It is bounded, clipped to memory of that guest and charged to its
//! VM; the pages it names pass quarantine and pin check like any others. No message of a guest makes us panic.
//!
//! What the workers share of it is in `vm/guest`.
//!
//! | File | What |
//! |---|---|
//! | `bucket` | rate limit of a guest's messages |
//! | `trust` | whether pages that are called cold stay far |
//! | `services` | whether the guest's kernel services are to be tuned |
//! | `channel` | the socket |
//! | `link` | a connection, which is a session |
//! | `worker` | the conversation: a task of the VM |

pub(crate) mod bucket;
pub(crate) mod channel;
pub(crate) mod link;
pub(crate) mod services;
pub(crate) mod trust;
pub(crate) mod worker;
