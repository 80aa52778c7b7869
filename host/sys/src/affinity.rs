//! Affinity: the CPUs on which a thread may run, on a host with any number of them.
//!
//! Before: a process starts threads for its CPUs. After: it knows its CPUs, and each thread runs on those that it was
//! given.
//! Threads: any. Units: CPUs by the kernel's number.
//! Promise: the kernel refuses to write a mask of fewer bits than it has possible CPUs. A `cpu_set_t` has 1,024; this
//! one has as many as the kernel wants.

use std::io;

/// A set of CPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cpus(Vec<u64>);

/// Bits of the smallest mask that is tried, and of the largest.
const FIRST_BITS: usize = 1 << 10;
const MOST_BITS: usize = 1 << 20;

impl Cpus {
    /// Returns the CPUs on which this thread may run; 0 is the calling one.
    pub fn of(thread: u32) -> io::Result<Self> {
        let mut words = FIRST_BITS / 64;
        loop {
            let mut mask = vec![0u64; words];
            let (size, place) = (size_of_val(&mask[..]), mask.as_mut_ptr());
            // SAFETY: the kernel writes up to `size` bytes, which `mask` has, for the length of the call.
            let done = unsafe { libc::syscall(libc::SYS_sched_getaffinity, thread, size, place) };
            if done >= 0 {
                return Ok(Self(mask));
            }
            let error = io::Error::last_os_error();
            if error.raw_os_error() != Some(libc::EINVAL) || words * 64 >= MOST_BITS {
                return Err(error);
            }
            words *= 2;
        }
    }

    /// This CPU alone.
    pub fn only(cpu: usize) -> Self {
        let mut mask = vec![0; cpu / 64 + 1];
        mask[cpu / 64] = 1 << (cpu % 64);
        Self(mask)
    }

    /// The CPUs, ascending.
    pub fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.0.len() * 64).filter(|cpu| self.0[cpu / 64] >> (cpu % 64) & 1 == 1)
    }

    /// From now on this thread runs on these CPUs; 0 is the calling one.
    pub fn hold(&self, thread: u32) -> io::Result<()> {
        let (size, place) = (size_of_val(&self.0[..]), self.0.as_ptr());
        // SAFETY: the kernel reads `size` bytes, which the mask has, for the length of the call.
        let done = unsafe { libc::syscall(libc::SYS_sched_setaffinity, thread, size, place) };
        if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_held_to_a_cpu_and_let_go_again() {
        let body = || {
            let all = Cpus::of(0).expect("this thread");
            let last = all.iter().last().expect("it runs somewhere");
            Cpus::only(last).hold(0).expect("hold");
            assert_eq!(Cpus::of(0).expect("this thread").iter().collect::<Vec<_>>(), [last]);
            all.hold(0).expect("let go");
            assert_eq!(Cpus::of(0).expect("this thread"), all);
            assert!(Cpus::default().hold(0).is_err() && Cpus::of(u32::MAX >> 1).is_err());
        };
        std::thread::spawn(body).join().expect("joined");
    }

    #[test]
    fn a_cpu_beyond_the_first_1024_has_its_bit() {
        let far = Cpus::only(5000);
        assert_eq!((far.iter().collect::<Vec<_>>(), far.0.len()), (vec![5000], 79));
    }
}
