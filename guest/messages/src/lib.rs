//! Messages between a guest's agent and its host.
//!
//! Before: the agent in the guest, or the engine on the host, has something to say. After: the other side has it as a
//! message, or knows that the bytes were none.
//! Threads: none of its own. Units: pages of 4 KiB by guest-physical address; sizes are pages unless a name says not.
//! Promise: no I/O, no dependency, no `unsafe`: the same code runs in the guest and on the host. Any bytes decode or
//! are refused, in time linear in their number, and no length is used before it is checked.
//!
//! The rule of versions is the one of `ballast_base::format`: each frame states the version of its writer and the
//! oldest version that may read it; new fields go to the end of a message, and a field that an older writer did not
//! know reads as zero.
//!
//! | File | What |
//! |---|---|
//! | `bytes` | numbers, texts and lists to bytes and back |
//! | `run` | pages in a row, and what they hold |
//! | `message` | all that either side can say |
//! | `node`, `tiering` | the parts of a tick about nodes and about tiers |
//! | `version` | what this program writes and reads |
//! | `frame` | where a message begins and ends in a stream that may be torn |
#![forbid(unsafe_code)]

mod bytes;
pub mod frame;
pub mod message;
mod node;
pub mod run;
mod tiering;
mod version;

pub use bytes::Refused;
pub use frame::{Frame, Frames, MAX_BODY, frame};
pub use message::{ToGuest, ToHost};
pub use run::{Kind, Run};
pub use version::{LEAST_READER, OLDEST, VERSION};

/// Name of the virtio-serial port, in the guest below `/dev/virtio-ports`.
pub const PORT: &str = "org.ballast.agent.0";
