//! The client: a VMM links (or preloads) it, so that Ballast can evict its cold guest memory and restore it on touch.
//!
//! Before: the VMM maps guest RAM as shared memory. After: keeper and engine have its userfaultfds and RAM files.
//! Threads: one, `ballast-client`, started by [`Builder::attach`]; the public interface may be called from any thread.
//! Units: addresses are host virtual addresses of this process, lengths are bytes.
//! Promise: no panic leaves the C functions, only announced RAM is ever zapped, and the death of a keeper or an engine
//! is only a pause.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let (ram, address): (std::os::fd::OwnedFd, u64) = unimplemented!();
//! use ballast_client::{Bytes, Client, Hva};
//! let client = Client::builder()
//!     .name("web-1")
//!     .limit(512 << 20)
//!     .region(ram, Hva(address), Bytes(1 << 30), Bytes(0))
//!     .attach()?;
//! // A balloon inflates: say so first, free the memory only after `Ok`.
//! client.discard(&[(Hva(address), 4096)])?;
//! # Ok(()) }
//! ```
//!
//! There is no detach: pages may be far, and only the engine can restore them. A client stays attached until its
//! process exits. To drop a [`Client`] changes nothing: the userfaultfds must stay open, because the kernel resolves
//! faults with zeros after a userfaultfd is closed.

mod agent_port;
mod builder;
mod client;
mod control;
mod device;
mod error;
mod fault_workers;
pub mod ffi;
mod link;
pub mod pool;
mod ram;
mod regions;
mod service;
mod shared;
#[doc(hidden)]
pub mod thread;
mod unmanaged;
#[doc(hidden)]
pub mod visit;
mod zapped;

pub use agent_port::{AGENT_VARIABLE, AgentPort};
pub use ballast_base::guest::GuestRange;
pub use ballast_base::wire::{Range, VmId};
pub use ballast_base::{Bytes, Hva};
pub use ballast_sys::memfd::FileId;
pub use builder::{Builder, DEFAULT_SOCKET, SOCKET_VARIABLE};
pub use client::Client;
pub use control::DiscardError;
pub use error::{AttachError, RequestError, chain};
pub use fault_workers::VARIABLE as FAULT_WORKERS_VARIABLE;
pub use ram::{Ram, RamExtent};
#[doc(hidden)]
pub use shared::{Timing, announce};
#[doc(hidden)]
pub use unmanaged::report_unmanaged;
pub use zapped::Freeing;
