//! The keeper: holds every descriptor, and keeps an engine running.
//!
//! Before: systemd or a person starts `ballastd`. After: VMMs attach, engines come and go.
//! Threads: one, which waits in `poll` for clients, the engine's replies and the engine's death; nothing it does takes
//! long. Work that may take long ([`closer`], [`lost`]) has threads of its own, which do not have the keeper's state.
//! Promise: it never touches a page. An engine that dies, or no longer replies, is replaced at once and announced; when
//! the keeper itself dies, its engine serves on without reclaiming, and clients bring everything to the next keeper.
//!
//! [`run`](mod@run) is the loop over the state in [`keeper`]. [`clients`] listens to VMMs, and says what they do wrong
//! within the bounds of [`complaints`]; [`attach`] makes VMs of them, with [`admit`], [`resume`], [`store_files`],
//! [`regions`], [`mappings`] and [`lost`]; [`closing`] ends them; [`engine_child`] has the engine, which is given VMs
//! [`again`] for which it had no room; [`fence`] tells when a dead engine can do nothing to a VM any more; [`upgrade`]
//! replaces the engine while it serves, in the stages of [`stage`], to its [`upgrade_end`]; then [`replace`] has this
//! process become the new program as well, which makes its keeper from the record in [`kept`].
#![forbid(unsafe_code)]

mod admit;
mod again;
mod attach;
mod bounds;
mod checker;
mod client;
mod clients;
mod closer;
mod closing;
mod complaints;
mod engine;
mod engine_child;
mod fence;
mod keeper;
mod kept;
mod losses;
mod lost;
mod making;
mod mappings;
mod moving;
mod options;
mod program;
mod regions;
mod replace;
mod replacing;
mod resume;
mod run;
mod stage;
mod store_files;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_upgrade;
mod upgrade;
mod upgrade_end;
mod upgrading;
mod waiting;

pub use checker::check;
pub use closer::{Closer, HANGS_AFTER, MOST_STUCK, SentFd};
pub use options::Options;
pub use replace::Follow;
pub use run::{follow, listen, run};
