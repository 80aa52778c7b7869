//! The agent of a guest, seen from the host: its reports become hints for reclaim, and nothing more.
//!
//! Before: the client in a VMM has the host's end of an agent's virtio-serial port. After: reclaim takes pages that the
//! guest reports as cold before all others, and the host does not track the VM's accesses.
//! Promise: all that comes from a guest is a hint. It is bounded, clipped to memory of that guest, and charged to its
//! VM; the pages that it names pass quarantine and pin check like all others. No message of a guest causes a panic.
//!
//! `vm/guest` has the state that the VM's workers share.
//!
//! | File | What |
//! |---|---|
//! | `bucket` | rate limit of a guest's messages |
//! | `trust` | whether pages that the agent calls cold stay far |
//! | `services` | whether the guest's kernel services are to be tuned |
//! | `channel` | the socket |
//! | `link` | a connection, which is a session |
//! | `worker` | the exchange of messages: a task of the VM |

pub(crate) mod bucket;
pub(crate) mod channel;
pub(crate) mod link;
pub(crate) mod services;
pub(crate) mod trust;
pub(crate) mod worker;
