//! `ballastd`: the keeper, the engine, and the API.
//!
//! ```text
//! VMM (client) ──attach socket──► keeper ──stdin socket──► engine ──► workers of every VM
//!      └────────────────control socket (zap, discard)───────┘  └───► HTTP on the API socket
//! ```
//!
//! The keeper (`ballast-keeper`) is small and stays: it listens, checks attaches, holds all descriptors, and restarts
//! an engine that dies. [`engine`] does the work with `ballast-pager`, and serves the API through `backend`. Their
//! common messages and files are in `ballast-handover`. [`config`] is the operator's file; [`settings`] is the engine's
//! part of it, which travels through the keeper.
//!
//! Promise: if either of the two dies, at any time, no descriptor and no byte is lost. See ARCHITECTURE.md.
#![forbid(unsafe_code)]

mod backend;
pub mod config;
pub mod engine;
mod events;
mod history;
pub mod http;
mod kept_settings;
mod rules;
pub mod settings;
mod tiering;
mod tracking;
