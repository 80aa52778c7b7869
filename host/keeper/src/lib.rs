//! The keeper: holds every descriptor, and keeps an engine running.
//!
//! Before: systemd or a person starts `ballastd`. After: VMMs attach, engines come and go.
//! Threads: one, which waits in `poll` for clients, the engine's replies and the engine's death; no call of it takes
//! long. Work that may take long (a close, [`lost`]) has threads of its own, which do not have the keeper's state.
//! Promise: it never touches a page. An engine that dies, or no longer replies, is replaced at once and announced. When
//! the keeper itself dies, its engine serves on without reclaiming, and clients bring everything to the next keeper.
//!
//! [`run`](mod@run) is the loop over the state in [`keeper`]. Each part of that state has a file that alone changes it:
//! [`client`] the connections; [`vms`] the VMs, each with its files ([`regions`]) and its [`place`] between two
//! engines; [`engines`] the engines; [`upgrading`] an upgrade. [`clients`] carries out requests. [`attach`] makes VMs
//! of them, with [`admit`], [`resume`], [`store_files`] and [`lost`]; [`closing`] ends VMs. [`engine_child`] gives VMs
//! to an engine, [`again`] if the engine lacked a resource. [`fence`] tells when a dead engine can do nothing to a VM
//! any more. [`upgrade`] replaces the engine while it serves, in the stages of [`stage`], to its [`upgrade_end`]. Then
//! [`replace`] has this process become the new program as well, which makes its keeper from the record in [`kept`].
#![forbid(unsafe_code)]

mod admit;
mod again;
mod attach;
mod client;
mod clients;
mod closing;
mod engine;
mod engine_child;
mod engines;
mod fence;
mod keeper;
mod kept;
mod lost;
mod making;
mod moving;
mod options;
mod place;
mod program;
mod regions;
mod replace;
mod replacing;
mod resume;
mod run;
mod stage;
mod store_files;
mod taken;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_upgrade;
mod upgrade;
mod upgrade_end;
mod upgrading;
mod vms;
mod waiting;

pub use options::Options;
pub use replace::Follow;
pub use run::{follow, listen, run};
