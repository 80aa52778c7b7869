//! `ballastd`: the keeper, the engine, and the API.
//!
//! ```text
//! VMM (client) ──attach socket──► keeper ──stdin socket──► engine ──► workers of every VM
//!      └────────────────control socket (zap, discard)───────┘  └───► HTTP on the API socket
//! ```
//!
//! The keeper (`ballast-keeper`) is small and stays: it listens, checks an attach, holds every descriptor, and starts
//! an engine again whenever one dies. [`engine`] does the work with `ballast-pager` and serves the API through
//! [`backend`]. Their common messages and files are `ballast-handover`. [`config`] is the operator's file, [`settings`]
//! the engine's part of it, which travels through the keeper.
//!
//! Promise: if either of the two dies, at any time, no descriptor and no byte is lost. See ARCHITECTURE.md.
#![forbid(unsafe_code)]

pub mod backend;
pub mod config;
pub mod engine;
pub mod events;
pub mod history;
pub mod http;
pub mod kept_settings;
pub mod rules;
pub mod settings;
pub mod tiering;
pub mod tracking;
