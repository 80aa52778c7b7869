//! `ballastd`: the keeper, the engine, and the API.
//!
//! ```text
//! VMM (client) ──attach socket──► keeper ──stdin socket──► engine ──► workers of every VM
//!      └────────────────control socket (zap, discard)───────┘  └───► HTTP on the API socket
//! ```
//!
//! The keeper (`ballast-keeper`) is small and stays: it listens, checks an attach, holds every descriptor, and starts
//! an engine again whenever one dies. [`engine`] does the work with `ballast-pager` and answers the API through
//! [`backend`]. What the two have in common, messages and files, is `ballast-handover`. [`config`] is what an operator
//! writes, [`settings`] the engine's part of it, which travels through the keeper.
//!
//! Promise: whichever of the two dies, and whenever, no descriptor and no byte is lost. See ARCHITECTURE.md.
#![forbid(unsafe_code)]

pub mod backend;
pub mod config;
pub mod engine;
pub mod events;
pub mod http;
pub mod settings;
pub mod tracking;
