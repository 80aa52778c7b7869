//! The plain handler to compare with: another process, one thread, one page at a time, a vector of compressed pages.
//!
//! Before: a guest in a helper process makes the userfaultfd. After: its pages are paged out and restored in the
//! simplest way.
//! Threads: one. Units: pages. Promise: the handler is like any first version of such a program. It compresses LZ4
//! blocks like Ballast's store, with a common library. It has no quarantine, no checksums, no budget, and no state that
//! outlives it.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::process::Stdio;

use anyhow::{Context, Result, bail, ensure};
use ballast_base::{Hva, PAGE_SIZE};
use ballast_sys::uffd::{Fault, REQUIRED_FEATURES};
use ballast_sys::{Uffd, memfd, priority, scm};
use ballast_testkit::program::Ends;
use ballast_testvm::GuestRam;
use lz4_flex::block::{CompressTable, compress_into_with_table, get_maximum_output_size};
use rustix::event::{PollFd, PollFlags, poll};
use serde::{Deserialize, Serialize};

use crate::cpu;
use crate::order::Role;
use crate::worker;

#[derive(Serialize, Deserialize)]
enum Message {
    /// The first message. It carries the userfaultfd and the memory file.
    Start { base: u64, len: u64, near: bool },
    /// This many pages from the start are zapped: compress and punch them.
    Out { pages: u64 },
    /// The order is done, with this CPU time.
    Done { cpu_us: f64 },
}

/// The guest's side.
pub(crate) struct Handler {
    socket: OwnedFd,
    _child: Ends,
}

impl Handler {
    pub(crate) fn start(ram: &GuestRam) -> Result<Self> {
        Self::start_with(ram, false)
    }

    /// As [`Self::start`], on this thread's CPU, where the thread stays, with the priority of Ballast's fault workers.
    pub(crate) fn start_near(ram: &GuestRam) -> Result<Self> {
        std::mem::forget(cpu::Stay::here());
        Self::start_with(ram, true)
    }

    fn start_with(ram: &GuestRam, near: bool) -> Result<Self> {
        let (uffd, _) = Uffd::create(REQUIRED_FEATURES).context("Creating a userfaultfd")?;
        let (socket, theirs) = scm::pair().context("Making a socket pair")?;
        let child = worker::command(&Role::Handler)?.stdin(Stdio::from(theirs)).spawn();
        let handler = Self { socket, _child: Ends(child.context("Starting the plain handler")?) };
        let start = Message::Start { base: ram.addr() as u64, len: ram.len() as u64, near };
        scm::send(&handler.socket, &serde_json::to_vec(&start)?, &[uffd.as_fd(), ram.memfd()])?;
        handler.done()?;
        Ok(handler)
    }

    /// Page out zapped pages. Returns the handler's CPU time.
    pub(crate) fn page_out(&mut self, pages: u64) -> Result<f64> {
        scm::send(&self.socket, &serde_json::to_vec(&Message::Out { pages })?, &[])?;
        self.done()
    }

    fn done(&self) -> Result<f64> {
        let received = scm::receive(&self.socket)?.context("the plain handler ended")?;
        match serde_json::from_slice(&received.bytes)? {
            Message::Done { cpu_us } => Ok(cpu_us),
            _ => bail!("the plain handler does not answer"),
        }
    }
}

struct Served {
    uffd: Uffd,
    ram: File,
    base: u64,
    len: u64,
    far: Vec<Option<Vec<u8>>>,
}

/// The handler's side: standard input is the socket.
pub(crate) fn serve() -> Result<()> {
    let stdin = std::io::stdin();
    let socket = stdin.as_fd();
    let received = scm::receive(socket)?.context("nobody starts the handler")?;
    let Message::Start { base, len, near } = serde_json::from_slice(&received.bytes)? else { bail!("no start") };
    if near {
        priority::run_first();
    }
    let [uffd, ram]: [OwnedFd; 2] = received.fds.try_into().ok().context("the start has two descriptors")?;
    let far = vec![None; (len / PAGE_SIZE as u64) as usize];
    let mut served = Served { uffd: uffd.into(), ram: ram.into(), base, len, far };
    let done = |cpu_us| -> Result<()> { Ok(scm::send(socket, &serde_json::to_vec(&Message::Done { cpu_us })?, &[])?) };
    done(0.0)?;
    let mut faults = Vec::with_capacity(1);
    loop {
        let readable = {
            let of = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
            let mut fds = [of(served.uffd.as_fd()), of(socket)];
            poll(&mut fds, None).context("Waiting for faults")?;
            !fds[1].revents().is_empty()
        };
        served.uffd.read_faults(&mut faults).context("Reading faults")?;
        faults.iter().try_for_each(|fault| served.restore(*fault))?;
        if readable {
            let Some(received) = scm::receive(socket)? else { return Ok(()) };
            let Message::Out { pages } = serde_json::from_slice(&received.bytes)? else { bail!("not an order") };
            let before = cpu::of_thread()?;
            served.page_out(pages)?;
            done(cpu::of_thread()? - before)?;
        }
    }
}

impl Served {
    fn page_out(&mut self, pages: u64) -> Result<()> {
        self.uffd.register(Hva(self.base), self.len).context("Registering guest RAM")?;
        let (mut page, mut table) = ([0; PAGE_SIZE], CompressTable::small());
        let mut scratch = [0; get_maximum_output_size(PAGE_SIZE)];
        for (number, far) in self.far.iter_mut().take(pages as usize).enumerate() {
            let offset = (number * PAGE_SIZE) as u64;
            // A hole is a page that is far already.
            if !memfd::is_present(&self.ram, offset)? {
                continue;
            }
            memfd::read_exact_at(&self.ram, offset, &mut page)?;
            let len = compress_into_with_table(&page, &mut scratch, &mut table)?;
            *far = Some(scratch[..len].to_vec());
            memfd::punch(&self.ram, offset, PAGE_SIZE as u64)?;
        }
        Ok(())
    }

    fn restore(&mut self, fault: Fault) -> Result<()> {
        let number = (fault.addr.0 - self.base) as usize / PAGE_SIZE;
        let far = self.far.get_mut(number).context("a fault outside guest RAM")?;
        let Some(compressed) = far.take() else {
            self.uffd.zero_page(fault.addr)?;
            return Ok(());
        };
        let mut page = [0; PAGE_SIZE];
        let len = lz4_flex::block::decompress_into(&compressed, &mut page)?;
        ensure!(len == PAGE_SIZE, "page {number} decompresses to {len} bytes");
        self.uffd.copy(fault.addr, &page)?;
        Ok(())
    }
}
