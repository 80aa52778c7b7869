//! The interface to the kernel: every raw system call of Ballast, and nearly all of its unsafe code, is in this crate.
//!
//! Before: `base` gives it units. After: `heat`, `store`, `pager`, `client` and `daemon` match on outcomes instead of
//! errno values.
//! Threads: everything here may be called from any thread unless a function says otherwise.
//! Promise: a result that the kernel normally returns is an outcome to match on; an error is a broken expectation.

pub mod advise;
pub mod affinity;
#[cfg(test)]
mod alone;
pub mod anon;
pub mod bpf;
pub mod btf;
pub mod clock;
pub mod detach;
pub mod direct;
pub mod exec;
pub mod file_ranges;
pub mod group;
pub mod huge_files;
pub mod hugetlb;
pub mod kcmp;
pub mod large_pages;
pub mod lock;
pub mod log_line;
pub mod mapping;
pub mod memfd;
pub mod meminfo;
pub mod memory_error;
pub mod numa;
pub mod page_tables;
pub mod peer;
pub mod pins;
pub mod presence;
pub mod priority;
pub mod probe;
pub mod process;
pub mod program;
pub mod remote;
pub mod ring;
pub mod scm;
pub mod slow_fd;
pub mod spawn;
pub mod uffd;
pub mod zap;

pub use anon::Anon;
pub use mapping::Mapping;
pub use pins::PinCheck;
pub use remote::Remote;
pub use uffd::Uffd;
