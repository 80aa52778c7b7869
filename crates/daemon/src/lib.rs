//! `ballastd`: the keeper, the engine, and the API.
//!
//! ```text
//! VMM (client) ──attach socket──► keeper ──stdin socket──► engine ──► workers of every VM
//!      └────────────────control socket (zap, discard)───────┘  └───► HTTP on the API socket
//! ```
//!
//! [`keeper`] is small and stays: it listens, checks an attach ([`admit`]), holds every descriptor, and starts an
//! engine again whenever one dies. [`engine`] does the work with `ballast-pager` and answers the API through
//! [`backend`]. [`orders`] are the messages between the two. What both use of files and of
//! processes is `ballast-handover`.
//!
//! Promise: whichever of the two dies, and whenever, no descriptor and no byte is lost. See ARCHITECTURE.md.
#![forbid(unsafe_code)]

pub mod admit;
pub mod backend;
pub mod config;
pub mod engine;
pub mod events;
pub mod http;
pub mod keeper;
pub mod settings;
pub mod tracking;
