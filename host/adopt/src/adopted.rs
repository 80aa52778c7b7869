//! One adopted VM: where its memory is, and steps that page some of it out.
//!
//! Before: [`look`](crate::look) found its VMM. After: the caller asks for steps until the VM is at its limit.
//! Threads: any; calls that examine or move memory wait for each other. Units: bytes; pages where a name says so.
//! Promise: every call ends soon, even if the VMM ends during the call; then [`Adopted::has_ended`] returns true.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use ballast_base::{Bytes, PAGE_SIZE};
use ballast_sys::advise;
use ballast_sys::lock::Lock;
use ballast_sys::page_tables::{Entry, PageTables};
use ballast_sys::process::Process;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::cgroup::{self, Cgroup, NotOwn, Reclaimed};
use crate::found::{self, Found, Refusal};
use crate::maps::Ram;
use crate::memory::{Counter, Memory, data, pieces, present};
use crate::order::Order;
use crate::swap::Swap;
use crate::vmm::Vmm;

/// Most picks of a step in which no page goes: pages that KSM merged, or that a device pins, stay, and are adjacent.
const MOST_PICKS: u32 = 32;

/// How memory is paged out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum How {
    /// The kernel reclaims from this cgroup, in its own order.
    Reclaim(PathBuf),
    /// Pages are named by address, because the VM has no cgroup of its own, for this reason.
    PageOut(NotOwn),
}

/// The outcome of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// Pages that were requested to go.
    pub asked_pages: u64,
    /// Requested pages that went.
    pub out_pages: u64,
    /// Pages that had gone in an earlier step and were back.
    pub restored_pages: u64,
}

/// An adopted VM.
#[derive(Debug)]
pub struct Adopted {
    /// Its process.
    pub process: Process,
    /// The VM that the process runs.
    pub vmm: Vmm,
    pidfd: std::os::fd::OwnedFd,
    /// `/proc/PID/stat` and `cgroup`. They stay open, because a host reads those of hundreds of VMs.
    stat: File,
    cgroups: File,
    tables: PageTables,
    cgroup: Result<Cgroup, NotOwn>,
    device: Option<String>,
    inner: Mutex<Inner>,
    faults_before: u64,
    out_pages: AtomicU64,
}

#[derive(Debug)]
struct Inner {
    ram: Vec<Ram>,
    counter: Counter,
    order: Option<Order>,
}

impl Adopted {
    /// Adopts a VMM that was found.
    pub fn new(found: Found) -> Result<Self, Refusal> {
        let Found { process, vmm, pidfd, ram } = found;
        let pid = process.pid;
        let inner = Inner { counter: Counter::new(pid)?, ram, order: None };
        let [stat, cgroups] = [File::open(format!("/proc/{pid}/stat"))?, File::open(format!("/proc/{pid}/cgroup"))?];
        let adopted = Self {
            tables: PageTables::open(pid)?,
            cgroup: Cgroup::own(pid),
            device: found::vfio(pid),
            inner: Mutex::new(inner),
            faults_before: major_faults(&stat).unwrap_or(0),
            out_pages: AtomicU64::new(0),
            process,
            vmm,
            pidfd,
            stat,
            cgroups,
        };
        if adopted.has_ended() { Err(Refusal::NoProcess) } else { Ok(adopted) }
    }

    /// A descriptor that is readable when the process has ended.
    pub fn pidfd(&self) -> &std::os::fd::OwnedFd {
        &self.pidfd
    }

    /// Whether the process has ended.
    pub fn has_ended(&self) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::new(&self.pidfd, PollFlags::IN)], Some(&now)).is_ok_and(|ready| ready > 0)
    }

    /// Whether its process has executed a program since it was adopted: QEMU does so for an update (`cpr-exec`).
    pub fn has_executed(&self) -> bool {
        !self.tables.exist() && !self.has_ended()
    }

    /// How its memory is paged out. A cgroup that other processes have joined is not reclaimed from.
    pub fn how(&self) -> How {
        match &self.cgroup {
            Ok(cgroup) if cgroup.is_own(self.process.pid) && cgroup.takes_no_swap().is_none() => {
                How::Reclaim(cgroup.directory().to_owned())
            }
            Ok(cgroup) => How::PageOut(cgroup.takes_no_swap().unwrap_or_else(|| cgroup.not_own(self.process.pid))),
            Err(why) => How::PageOut(why.clone()),
        }
    }

    /// Bytes of all guest RAM.
    pub fn size(&self) -> u64 {
        self.inner.locked().ram.iter().map(|part| part.len).sum()
    }

    /// Why none of its memory can ever go: it is locked, consists of huge pages, or belongs to a device.
    pub fn pinned(&self) -> Option<String> {
        if let Some(device) = &self.device {
            return Some(format!("a device is passed through ({device}), which pins all of its memory"));
        }
        let pinned = self.inner.locked().ram.iter().find_map(|part| part.pinned);
        pinned.map(|why| format!("its memory does not go to swap: {why}"))
    }

    /// Why its memory cannot go now: swap is full, on the host or for its cgroups.
    pub fn blocked(&self, swap: &Swap) -> Option<String> {
        if let Some(why) = swap.full() {
            return Some(why);
        }
        let (room, directory) = cgroup::swap_room(&text(&self.cgroups))?;
        let directory = directory.display();
        (room < PAGE_SIZE as u64)
            .then(|| format!("its cgroup lets no more into swap: echo max > {directory}/memory.swap.max"))
    }

    /// Bytes that its cgroups still let into swap; `None` is no bound.
    pub fn cgroup_room(&self) -> Option<u64> {
        cgroup::swap_room(&text(&self.cgroups)).map(|(room, _)| room)
    }

    /// Where its memory is.
    pub fn memory(&self) -> io::Result<Memory> {
        if self.vmm.most.is_some() && self.inner.locked().counter.is_mapped_anew()? {
            // If some of its RAM has just gone, the count reports it.
            let _ = self.look_again();
        }
        let inner = &mut *self.inner.locked();
        inner.counter.memory(&self.tables, self.process.pid, &inner.ram)
    }

    /// Where its memory is, after the first count from the kernel's counters alone.
    pub fn quick(&self) -> io::Result<Memory> {
        let inner = &mut *self.inner.locked();
        inner.counter.quick(&self.tables, self.process.pid, &inner.ram)
    }

    /// Where its memory is, by a count of all pages now.
    pub fn scan(&self) -> io::Result<Memory> {
        let inner = &mut *self.inner.locked();
        inner.counter.scan(&self.tables, self.process.pid, &inner.ram)
    }

    /// Pages out this number of bytes; if pages stay, others in their place.
    ///
    /// # Errors
    /// The VMM ended, its mappings changed ([`Adopted::look_again`] helps), or the kernel does not let us.
    pub fn step(&self, bytes: u64) -> io::Result<Step> {
        let step = match (&self.cgroup, self.how()) {
            (Ok(cgroup), How::Reclaim(_)) => self.reclaim(cgroup, bytes)?,
            _ => {
                let mut step = self.page_out(bytes)?;
                let mut picks = 1;
                while step.out_pages == 0 && step.asked_pages > 0 && picks < MOST_PICKS {
                    step = self.page_out(bytes)?;
                    picks += 1;
                }
                step
            }
        };
        self.out_pages.fetch_add(step.out_pages, Ordering::Relaxed);
        Ok(step)
    }

    fn reclaim(&self, cgroup: &Cgroup, bytes: u64) -> io::Result<Step> {
        let asked_pages = Bytes(bytes).pages_floor().0;
        let before = self.quick()?.resident;
        let outcome = cgroup.reclaim(bytes)?;
        let went = Bytes(before.saturating_sub(self.quick()?.resident)).pages_floor().0;
        let out_pages = if outcome == Reclaimed::All { went.max(1) } else { went };
        Ok(Step { asked_pages, out_pages, restored_pages: 0 })
    }

    fn page_out(&self, bytes: u64) -> io::Result<Step> {
        let Inner { ram, order, .. } = &mut *self.inner.locked();
        let pages = ram.iter().map(|part| part.len / PAGE_SIZE as u64).sum();
        let order = order.get_or_insert_with(|| Order::new(pages));
        let seen = |range| present(&self.tables, ram, range);
        let mut picked = order.pick(Bytes(bytes).pages_floor().0, seen)?;
        picked.ranges.sort_unstable_by_key(|range| range.start);
        let ranges: Vec<_> = picked.ranges.iter().flat_map(|range| pieces(ram, range.clone())).collect();
        let advised: Vec<_> = ranges.iter().map(|(_, start, len)| (*start, *len)).collect();
        let done = advise::page_out(&self.pidfd, &advised);
        let mut there = Vec::new();
        for range in together(&picked.ranges) {
            there.append(&mut seen(range)?);
        }
        let mut stayed = 0;
        for both in in_both(&picked.ranges, &there) {
            stayed += both.end - both.start;
            order.stayed(both);
        }
        done?;
        let out_pages = picked.pages - stayed;
        Ok(Step { asked_pages: picked.pages, out_pages, restored_pages: picked.restored })
    }

    /// Finds its RAM again: its VMM may have mapped it anew, or locked it.
    pub fn look_again(&self) -> Result<(), Refusal> {
        let size = self.size();
        let ram = found::ram(self.process.pid, &self.vmm, Bytes(size))?;
        let inner = &mut *self.inner.locked();
        if ram.iter().map(|part| (part.start, part.len)).ne(inner.ram.iter().map(|part| (part.start, part.len))) {
            inner.order = None;
            inner.counter.forget();
        }
        inner.ram = ram;
        Ok(())
    }

    /// Brings all of its memory back from swap, on this thread.
    pub fn bring_back(&self) -> io::Result<()> {
        let ram = self.inner.locked().ram.clone();
        for part in &ram {
            let runs = if part.shared {
                // Page tables do not tell which pages of shared memory are in swap, so all data of its file comes back.
                data(self.process.pid, part)?
            } else {
                let mut swapped = Vec::new();
                self.tables.runs(part.start, part.len, |run| {
                    if run.entry == Entry::Swapped {
                        swapped.push((run.start, run.end.0 - run.start.0));
                    }
                })?;
                swapped
            };
            for (start, len) in runs {
                advise::bring_back(self.process.pid, start, len)?;
            }
        }
        Ok(())
    }

    /// Number of pages that steps have paged out.
    pub fn out_pages(&self) -> u64 {
        self.out_pages.load(Ordering::Relaxed)
    }

    /// Pages that the kernel read back for its threads since it was adopted: its major page faults.
    pub fn restored_pages(&self) -> u64 {
        major_faults(&self.stat).map_or(0, |faults| faults.saturating_sub(self.faults_before))
    }

    /// Microseconds in which at least one of its threads waited for memory; `None` without a cgroup of its own.
    pub fn stall_us(&self) -> Option<u64> {
        cgroup::stall_us(&text(&self.cgroups), &[self.process.pid])
    }
}

/// Ranges that cover these, joined over small gaps, so that few calls examine them.
fn together(ranges: &[Range<u64>]) -> Vec<Range<u64>> {
    const GAP: u64 = 512;
    let mut found: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match found.last_mut() {
            Some(last) if range.start >= last.end && range.start - last.end < GAP => last.end = range.end,
            _ => found.push(range.clone()),
        }
    }
    found
}

/// The pages that two ascending lists of ranges have in common. Either list may have thousands of single pages, so each
/// is read only once.
fn in_both(one: &[Range<u64>], other: &[Range<u64>]) -> Vec<Range<u64>> {
    let (mut one, mut other) = (one.iter().peekable(), other.iter().peekable());
    let mut found = Vec::new();
    while let (Some(a), Some(b)) = (one.peek(), other.peek()) {
        let both = a.start.max(b.start)..a.end.min(b.end);
        if a.end <= b.end {
            one.next();
        } else {
            other.next();
        }
        if both.start < both.end {
            found.push(both);
        }
    }
    found
}

/// The current text of an open file in `/proc/PID`, at most a page; empty if the process has ended.
fn text(file: &File) -> String {
    let mut bytes = [0; PAGE_SIZE];
    let len = file.read_at(&mut bytes, 0).unwrap_or(0);
    String::from_utf8_lossy(&bytes[..len]).into_owned()
}

/// The major page faults of a process, by its `stat`.
fn major_faults(stat: &File) -> Option<u64> {
    text(stat).rsplit_once(')')?.1.split_ascii_whitespace().nth(9)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_in_two_lists_of_ranges_are_found_as_by_asking_for_each_page() {
        let ranges = |bits: u32| (0..16).filter(|at| bits >> at & 1 == 1).map(|at| at..at + 1).collect::<Vec<_>>();
        let pages = |found: Vec<Range<u64>>| found.into_iter().flatten().collect::<Vec<_>>();
        for (one, other) in [(0xffff, 0x0f0f), (0b1010, 0b0101), (0, 0xffff), (0xbeef, 0xcafe)] {
            let expected: Vec<u64> = (0..16).filter(|at| (one & other) >> at & 1 == 1).collect();
            assert_eq!(pages(in_both(&ranges(one), &ranges(other))), expected);
        }
        assert_eq!(in_both(&[0..10, 20..30], &[5..25, 28..40]), [5..10, 20..25, 28..30]);
    }
}
