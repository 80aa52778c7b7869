//! Far memory on other machines: a store of pages in a Valkey or Redis cluster.
//!
//! Before: pages have been far for a long time, and the spill worker moves them out of the host's RAM. After: they are
//! on a primary and its replicas, and come back when they are touched. A failover of the cluster delays them but does
//! not lose them.
//! Threads: none of its own; the caller waits for the network. Units: one value is one page.
//! Promise: the promise of every store (`ballast_store::conformance`), even while any node is killed, stopped or full,
//! and while slots move.
//!
//! [`RemoteStore`] is the store of one VM in a [`Cluster`], which all VMs of a process share. A VM has a lease there
//! ([`lease`]), and may have a key that seals its pages ([`seal`]). [`check`] finds server settings that lose pages;
//! [`identity`] tells a cluster from another one.
#![forbid(unsafe_code)]

mod begun;
mod budget;
pub mod check;
mod chunk;
mod cluster;
mod garbage;
mod generation;
pub mod identity;
pub mod lease;
mod link;
mod loss;
mod map;
mod name;
mod nodes;
mod refusal;
mod request;
mod resolve;
mod resp;
pub mod seal;
mod sealing;
mod slot;
mod store;
mod stream;
mod sweep;

pub use budget::RemoteBudget;
pub use cluster::{Cluster, ClusterOptions};
pub use generation::tick_now;
pub use link::Access;
pub use nodes::NodeFigures;
pub use refusal::Addr;
pub use seal::Seal;
pub use slot::slot_of;
pub use store::RemoteStore;
pub use stream::Tls;
