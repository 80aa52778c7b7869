//! Where samples of accesses come from.
//!
//! Before: programs are chosen. After: [`crate::engine`] records samples in classifiers. Tests have other sources.
//! Threads: the caller's; the kernel samples in its own threads. Units: virtual addresses of the sampled process.
//! Promise: a source leaves nothing behind when it is dropped.

pub mod damon;

use std::io;

/// Samples of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Samples {
    /// How many.
    pub count: u32,
    /// Number of samples, here and at other addresses, for which an observation counts.
    pub each: u32,
}

/// A function that gets samples: process, address, number.
pub type Each<'a> = dyn FnMut(u32, u64, Samples) + 'a;

/// A source of samples.
pub trait SampleSource: Send {
    /// Samples these processes from now on, and no others.
    ///
    /// # Errors
    /// The kernel refuses. A process that is gone is no error.
    fn watch(&mut self, processes: &[u32]) -> io::Result<()>;

    /// Takes the samples since the last call.
    ///
    /// # Errors
    /// The kernel refuses.
    fn take(&mut self, each: &mut Each<'_>) -> io::Result<()>;

    /// CPU time that the kernel's threads have spent for this source, in microseconds.
    fn cpu_us(&self) -> u64 {
        0
    }
}
