//! Samples of accesses, of a thread or of a CPU, from perf: one event, one ring buffer.
//!
//! Before: the caller wants to know which addresses a thread accesses. After: [`records`] has them, for code that turns
//! them into hot ranges or pages. Threads: a sampler belongs to one thread, which drains it; the kernel writes
//! meanwhile. Units: a ring in pages. Promise: each record of the kernel is taken once and in order; its own records
//! count what it could not write; impossible positions are skipped and counted, never read.
//!
//! The load-latency event needs Intel's PEBS, which in a guest needs a vPMU from the host. Without one, opening returns
//! [`Opened::NoEvent`]. No machine has sampled the event yet: the live test uses the event for page faults, whose
//! samples come through the same ring in the same layout.

use std::io;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::sync::atomic::Ordering;

use ballast_base::PAGE_SIZE;

pub mod records;

use crate::Mapping;
use records::{Damaged, FIELDS, Record, pieces};

/// Most pages of a ring: 1 MiB. An unprivileged user may have 512 KiB per CPU.
const MOST_PAGES: usize = 256;
/// Offset of the kernel's positions in the ring's first page (`struct perf_event_mmap_page`): `data_head`,
/// `data_tail`.
const POSITIONS: usize = 1024;

const TYPE_SOFTWARE: u32 = 1;
const TYPE_RAW: u32 = 4;
const PAGE_FAULTS: u64 = 2;
/// `MEM_TRANS_RETIRED.LOAD_LATENCY`, with event and umask.
const LOAD_LATENCY: u64 = 0x1cd;

/// `PERF_FLAG_FD_CLOEXEC`.
const CLOSE_ON_EXEC: libc::c_ulong = 1 << 3;
const EXCLUDE_KERNEL: u64 = 1 << 5;
const EXCLUDE_HYPERVISOR: u64 = 1 << 6;
/// Requests the exact instruction of a sample: this selects PEBS.
const PRECISE: u64 = 2 << 15;

/// What is sampled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// Page faults. Every kernel has this event, but it does not show accesses to mapped pages.
    PageFaults,
    /// Loads that took at least this number of core cycles, so that cache hits are left out. Demeter uses 64 ns
    /// (§3.2.2).
    LoadLatency {
        /// The threshold. The hardware takes 16 bits.
        cycles: u16,
    },
}

/// The result of opening.
#[derive(Debug)]
pub enum Opened {
    /// The event is open and samples.
    Sampler(Sampler),
    /// This machine, or this guest, does not have the event.
    NoEvent,
    /// This user may not sample (`perf_event_paranoid`).
    NotPermitted,
}

/// The kernel's `struct perf_event_attr`, as of its version 5.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Attributes {
    kind: u32,
    size: u32,
    config: u64,
    period: u64,
    sample_type: u64,
    read_format: u64,
    flags: u64,
    wakeup: u32,
    breakpoint: u32,
    config1: u64,
    config2: u64,
    branches: u64,
    registers: u64,
    stack: u32,
    clock: i32,
    interrupted: u64,
    aux: u32,
    depth: u16,
    reserved: u16,
}

const _: () = assert!(size_of::<Attributes>() == 112);

/// An open event of one thread or one CPU, and its ring.
#[derive(Debug)]
pub struct Sampler {
    ring: Mapping,
    /// Bytes of the ring, without its first page.
    size: usize,
    copy: Vec<u8>,
    _event: OwnedFd,
}

/// The result of a drain beside its records.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Drained {
    /// A record that was damaged, if there was one. The records after it are lost.
    pub damaged: Option<Damaged>,
    /// The kernel's positions were impossible, and everything was skipped.
    pub skipped: bool,
}

impl Sampler {
    /// Sample one of `period` events of a thread in user space. `thread` 0 is the calling thread. The ring has `pages`
    /// pages, a power of two.
    ///
    /// # Errors
    /// The thread is gone, a ring cannot have that size, or the kernel has no memory for it.
    pub fn open(event: Event, thread: u32, period: u64, pages: usize) -> io::Result<Opened> {
        let any_cpu = -1;
        Self::open_on(event, thread as libc::pid_t, any_cpu, period, pages)
    }

    /// The same for all threads that run on a CPU: each sample names its process.
    ///
    /// # Errors
    /// There is no such CPU, a ring cannot have that size, or the kernel has no memory for it.
    pub fn open_cpu(event: Event, cpu: u32, period: u64, pages: usize) -> io::Result<Opened> {
        let any_thread = -1;
        let cpu = libc::c_int::try_from(cpu).map_err(|_| io::ErrorKind::InvalidInput)?;
        Self::open_on(event, any_thread, cpu, period, pages)
    }

    fn open_on(event: Event, thread: libc::pid_t, cpu: libc::c_int, period: u64, pages: usize) -> io::Result<Opened> {
        if !pages.is_power_of_two() || pages > MOST_PAGES || period == 0 {
            let text =
                format!("a ring of {pages} pages, one in {period}: needs a power of two up to {MOST_PAGES}, and not 0");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let (kind, config, config1, precise) = match event {
            Event::PageFaults => (TYPE_SOFTWARE, PAGE_FAULTS, 0, 0),
            Event::LoadLatency { cycles } => (TYPE_RAW, LOAD_LATENCY, u64::from(cycles), PRECISE),
        };
        let attributes = Attributes {
            kind,
            size: size_of::<Attributes>() as u32,
            config,
            config1,
            period,
            sample_type: FIELDS,
            flags: EXCLUDE_KERNEL | EXCLUDE_HYPERVISOR | precise,
            ..Attributes::default()
        };
        let (flags, no_group) = (CLOSE_ON_EXEC, -1);
        // SAFETY: the kernel reads `attributes`, whose size it is told in it, and writes nothing of ours.
        let fd =
            unsafe { libc::syscall(libc::SYS_perf_event_open, &raw const attributes, thread, cpu, no_group, flags) };
        if fd < 0 {
            let error = io::Error::last_os_error();
            return match error.raw_os_error() {
                Some(libc::ENOENT | libc::EOPNOTSUPP | libc::ENODEV | libc::EINVAL | libc::ENOSYS) => {
                    Ok(Opened::NoEvent)
                }
                Some(libc::EACCES | libc::EPERM) => Ok(Opened::NotPermitted),
                _ => Err(error),
            };
        }
        // SAFETY: the kernel has just made this descriptor for us, and no other code knows its number.
        let event = unsafe { OwnedFd::from_raw_fd(fd as libc::c_int) };
        let ring = Mapping::shared(event.as_fd(), 0, (1 + pages) * PAGE_SIZE)?;
        Ok(Opened::Sampler(Self { ring, size: pages * PAGE_SIZE, copy: Vec::new(), _event: event }))
    }

    /// Take the records that the kernel has written since the last time.
    pub fn drain(&mut self, mut each: impl FnMut(Record)) -> Drained {
        let [head, tail] = self.ring.words(POSITIONS, 2) else { return Drained::default() };
        // Acquire: the records before `head` are written when it is read. Release: they are copied when the space is
        // returned.
        let (end, start) = (head.load(Ordering::Acquire), tail.load(Ordering::Relaxed));
        let Some(pieces) = pieces(start, end, self.size) else {
            tail.store(end, Ordering::Release);
            return Drained { damaged: None, skipped: true };
        };
        self.copy.clear();
        for piece in pieces {
            let from = self.copy.len();
            self.copy.resize(from + piece.len(), 0);
            self.ring.copy_out(PAGE_SIZE + piece.start, &mut self.copy[from..]);
        }
        tail.store(end, Ordering::Release);
        let mut drained = Drained::default();
        for record in records::records(&self.copy) {
            match record {
                Ok(record) => each(record),
                Err(damaged) => drained.damaged = Some(damaged),
            }
        }
        drained
    }
}

#[cfg(test)]
mod tests {
    use ballast_base::Bytes;

    use super::*;
    use crate::memfd;
    use records::Sample;

    fn page_faults(pages: usize) -> Option<Sampler> {
        let why = match Sampler::open(Event::PageFaults, 0, 1, pages).expect("opened or not") {
            Opened::Sampler(sampler) => return Some(sampler),
            Opened::NoEvent => "this kernel has no perf events",
            Opened::NotPermitted => "perf_event_paranoid does not let this user sample",
        };
        ballast_testkit::skip("perf", why);
        None
    }

    /// What a sampler saw of pages that were written in order, and how many of its samples were lost.
    #[derive(Default)]
    struct Seen {
        pages: Vec<usize>,
        lost: u64,
        throttled: bool,
    }

    impl Seen {
        fn take(&mut self, sampler: &mut Sampler, memory: &Mapping) {
            let inside = memory.addr()..memory.addr() + memory.len();
            let drained = sampler.drain(|record| match record {
                Record::Sample(Sample { pid, address, time_ns, .. }) => {
                    assert!(pid == std::process::id() && time_ns > 0);
                    if inside.contains(&(address as usize)) {
                        self.pages.push((address as usize - inside.start) / PAGE_SIZE);
                    }
                }
                Record::Lost(count) => self.lost += count,
                Record::Throttled => self.throttled = true,
                Record::Unthrottled | Record::Other(_) => (),
            });
            assert_eq!(drained, Drained::default());
        }
    }

    fn memory(pages: usize) -> Mapping {
        let bytes = pages * PAGE_SIZE;
        let file = memfd::create("perf", Bytes(bytes as u64)).expect("a file");
        Mapping::shared(file, 0, bytes).expect("mapped")
    }

    fn write(memory: &Mapping, page: usize) {
        memory.bytes(page * PAGE_SIZE + 8, 1)[0].store(1, Ordering::Relaxed);
    }

    #[test]
    fn every_first_touch_of_a_page_is_a_sample_with_its_address_also_where_the_ring_wraps_around() {
        // One page holds 73 samples.
        let Some(mut sampler) = page_faults(1) else { return };
        let (memory, mut seen) = (memory(400), Seen::default());
        for page in 0..400 {
            write(&memory, page);
            if page % 50 == 49 {
                seen.take(&mut sampler, &memory);
            }
        }
        seen.take(&mut sampler, &memory);
        // If the kernel maps shared memory in larger pieces, or stops an event that comes too often, some are missing.
        let is_huge = !seen.throttled && seen.pages.len() < 400 && seen.lost == 0;
        assert!(seen.pages.is_sorted_by(|a, b| a < b), "in order, and once: {:?}", seen.pages);
        assert!(
            seen.throttled || is_huge || seen.pages.len() == 400,
            "{} of 400, {} lost",
            seen.pages.len(),
            seen.lost
        );
        assert!(!seen.pages.is_empty());
    }

    #[test]
    fn a_full_ring_counts_the_samples_it_had_no_space_for() {
        let Some(mut sampler) = page_faults(1) else { return };
        let (memory, mut seen) = (memory(200), Seen::default());
        (0..199).for_each(|page| write(&memory, page));
        seen.take(&mut sampler, &memory);
        let held = seen.pages.len();
        write(&memory, 199);
        seen.take(&mut sampler, &memory);
        let all = seen.pages.len() as u64 + seen.lost;
        assert!(held <= PAGE_SIZE / 56, "{held}");
        assert!(seen.throttled || seen.pages.len() < held + 1 || all >= 200, "{held} held, {all} in all");
    }

    #[test]
    fn an_event_that_the_machine_lacks_is_an_outcome_and_an_impossible_ring_is_an_error() {
        // With PEBS it opens, and has nothing yet.
        match Sampler::open(Event::LoadLatency { cycles: 192 }, 0, 4093, 8).expect("opened or not") {
            Opened::Sampler(mut sampler) => assert_eq!(sampler.drain(|_| ()).damaged, None),
            Opened::NoEvent | Opened::NotPermitted => (),
        }
        for (period, pages) in [(1, 0), (1, 3), (1, 512), (0, 8)] {
            let error = Sampler::open(Event::PageFaults, 0, period, pages).expect_err("refused").to_string();
            assert!(error.contains(&format!("a ring of {pages} pages, one in {period}")), "{error}");
        }
    }
}
