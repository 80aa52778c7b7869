//! Errors of creating and running a VM.
//!
//! Before: `workload` refuses a spec, the kernel refuses a step, or a vCPU stops. After: `Vm` returns the error.

use std::io;

use ballast_base::Bytes;

use crate::workload::SpecError;

/// An error of creating or running a VM.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The spec is not valid. The operator caused it.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// This machine cannot run KVM guests.
    #[error("A KVM guest needs a usable /dev/kvm; a native guest runs without it")]
    NoKvm(#[source] io::Error),
    /// The kernel refused a step of creating or running the KVM guest.
    #[error("KVM: {step}")]
    Kvm {
        /// The refused step.
        step: &'static str,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// A vCPU left the guest for a reason that the guest program cannot cause.
    #[error("vCPU {vcpu} stopped: {exit}, at instruction {rip:#x}, stack {rsp:#x}, fault address {cr2:#x}")]
    Stopped {
        /// The number of the vCPU.
        vcpu: usize,
        /// The exit reason.
        exit: String,
        /// Its instruction pointer.
        rip: u64,
        /// Its stack pointer.
        rsp: u64,
        /// Its last page-fault address.
        cr2: u64,
    },
    /// Host memory was not available.
    #[error("Allocating {size} for {what}")]
    Memory {
        /// The purpose.
        what: &'static str,
        /// The size.
        size: Bytes,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The VM has run already. Its memory is no longer zero.
    #[error("This VM has run already")]
    RanAlready,
    /// Another worker failed first.
    #[error("Stopped because another worker failed")]
    Abandoned,
}
