//! A small test VM: it runs workloads with a known outcome on guest RAM that a pager may take away in the meantime.
//!
//! Before: `sys` gives memory files and mappings. After: integration tests, kill tests and benchmarks run workloads
//! on a [`Vm`] while something takes its memory away, and read the [`Outcome`].
//! Threads: one per worker, native or in a KVM vCPU; `progress` and `stop` may be called from any thread meanwhile.
//! Promise: a wrong word of guest RAM is reported when it is read, with page, offset, expected and found value, and its
//! wrong bytes are counted in `wrong_bytes`. Old contents are wrong contents.
//!
//! ```
//! use ballast_testvm::{GuestKind, Spec, Vm, Workload};
//! # fn main() -> anyhow::Result<()> {
//! let mut spec = Spec::new(Workload::Hotset, "8M".parse().expect("a size"));
//! spec.ops = 10_000;
//! let vm = Vm::new(&spec, GuestKind::Native)?;
//! // The hook runs before each phase, while all workers wait: attach `ram` before `Moment::Fill`.
//! let outcome = vm.run(&|_moment, _ram| ())?;
//! assert!(outcome.is_right());
//! # Ok(())
//! # }
//! ```

mod finally;
pub mod fuse;
#[allow(unreachable_pub)]
mod guest;
mod kvm;
mod outcome;
pub mod park;
mod private;
pub mod qemu;
mod ram;
pub mod valkey;
mod vm;
mod workload;

pub use finally::Finally;
pub use kvm::kvm_missing;
pub use outcome::{GuestKind, Latency, Outcome, Wrong};
pub use ram::GuestRam;
pub use vm::{Moment, Progress, Vm};
pub use workload::{Spec, Workload};
