//! A guest in a helper process: memory with known contents that goes out, by whatever means, and is touched again.
//!
//! Before: `role` gives orders. After: times of single touches, as the guest's own thread sees them.
//! Threads: this one touches; a storm has one of its own, and so has a vCPU.
//! Units: pages. Promise: only pages that are out are touched, each once in a round, and every touch checks a word that
//! counts the touches before it: a page that came back wrong is counted. [`Order::Verify`] compares every byte.

use std::collections::HashSet;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use ballast_base::{Bytes, Hva, PAGE_SIZE, PAGES_PER_UNIT, PageCount};
use ballast_client::Client;
use ballast_sys::{Anon, memfd};
use ballast_testvm::GuestRam;

use crate::cpu;
use crate::lanes::touch_together;
use crate::order::{Answer, Backing, GuestConfig, GuestKind, Order, Out, Pace, Pattern, Touched};
use crate::plain::Handler;
use crate::qemu::Vmm;
use crate::stats::{random, shuffle};
use crate::vcpu::Vcpu;

/// Memory that may go out.
#[derive(Debug)]
pub(crate) enum Ram {
    /// A shared memory file, as guest RAM is.
    Shared(GuestRam),
    /// Ordinary memory: what the kernel swaps best.
    Private(Anon),
}

impl Ram {
    pub(crate) fn word(&self, offset: usize) -> &AtomicU64 {
        match self {
            Self::Shared(ram) => ram.word(offset),
            Self::Private(ram) => ram.word(offset),
        }
    }
}

/// Who is asked to put pages out.
pub(crate) enum Pager {
    /// The daemon, by its limit; the client stays attached as long as the process lives.
    Ballast(#[expect(dead_code, reason = "kept, not used")] Client),
    /// The kernel.
    Kernel,
    /// The plain handler.
    Plain(Handler),
    /// Nobody.
    Floor,
}

impl Pager {
    /// Hand over RAM; for the kernel, move this process into its memory cgroup before it has any.
    pub(crate) fn attach(backing: &Backing, ram: &GuestRam) -> Result<Self> {
        Self::attach_with(backing, ram, None)
    }

    /// The same with so many fault lanes.
    fn attach_with(backing: &Backing, ram: &GuestRam, lanes: Option<usize>) -> Result<Self> {
        let hva = Hva(ram.addr() as u64);
        Ok(match backing {
            Backing::Ballast { socket, name } => {
                // Nothing but the guest touches this memory, so the short quarantine is right.
                let builder = Client::builder().name(name).socket(socket).may_pin(false);
                let builder = lanes.into_iter().fold(builder, ballast_client::Builder::fault_lanes);
                let memory = ram.memfd().try_clone_to_owned().context("Duplicating the memory file")?;
                let client = builder.region(memory, hva, Bytes(ram.len() as u64), Bytes(0)).attach();
                Self::Ballast(client.map_err(|error| anyhow!("Attaching {name}: {}", ballast_client::chain(&error)))?)
            }
            Backing::Plain => Self::Plain(Handler::start(ram)?),
            Backing::Kernel { .. } => Self::Kernel,
            Backing::Floor => Self::Floor,
        })
    }

    /// Put `pages` pages from the start of RAM out.
    pub(crate) fn page_out(&mut self, ram: &GuestRam, pages: u64) -> Result<f64> {
        let len = PageCount(pages).bytes().0 as usize;
        match self {
            Self::Ballast(_) => bail!("Ballast puts pages out by its limit"),
            Self::Kernel => ram.page_out(0, len).context("MADV_PAGEOUT")?,
            Self::Floor => ram.zap(0, len).context("MADV_DONTNEED")?,
            Self::Plain(handler) => {
                ram.zap(0, len).context("MADV_DONTNEED")?;
                return handler.page_out(pages);
            }
        }
        Ok(0.0)
    }
}

/// Join the cgroup of a kernel guest.
pub(crate) fn enter(backing: &Backing) -> Result<()> {
    let Backing::Kernel { procs } = backing else { return Ok(()) };
    std::fs::write(procs, std::process::id().to_string()).with_context(|| format!("Writing {}", procs.display()))
}

/// Bytes of RAM of a guest.
pub(crate) fn ram_len(config: &GuestConfig) -> u64 {
    PageCount(2 * config.pages).bytes().0
}

/// Native memory and what it must hold.
struct Native {
    ram: Arc<Ram>,
    pager: Pager,
    /// What the first word of each page must be: the fill's, plus one for each touch.
    expected: Vec<u64>,
    storm: Option<Storm>,
}

struct Storm {
    stop: Arc<AtomicBool>,
    since: Instant,
    cpu_us: f64,
    thread: JoinHandle<Vec<u32>>,
}

enum Body {
    Empty,
    Native(Native),
    Vcpu(Vcpu),
    Qemu(Vmm),
}

/// A guest.
pub(crate) struct Guest {
    config: GuestConfig,
    body: Body,
}

impl Guest {
    pub(crate) fn new(config: GuestConfig) -> Result<Self> {
        if config.kind != GuestKind::Qemu {
            enter(&config.backing)?;
        }
        Ok(Self { config, body: Body::Empty })
    }

    pub(crate) fn obey(&mut self, order: Order) -> Result<Answer> {
        match (order, &mut self.body) {
            (Order::Fill, Body::Empty) => self.fill(),
            (Order::PageOut, Body::Native(native)) => native.page_out(self.config.pages).map(Answer::Out),
            (Order::Touch { seed, pace }, Body::Native(native)) => {
                let _stay = pace.pinned.then(cpu::Stay::here);
                native.touch(&self.config, seed, pace).map(Answer::Touched)
            }
            (Order::Walk { pattern, seed }, Body::Native(native)) => {
                let order = walk(pattern, self.config.pages, seed);
                native.touch_these(&order, Pace::ALL).map(Answer::Touched)
            }
            (Order::Storm, Body::Native(native)) => native.start_storm().map(|()| Answer::Done),
            (Order::Pause, Body::Native(native)) => native.pause(),
            (Order::Verify, Body::Native(native)) => native.verify(&self.config).map(|()| Answer::Done),
            (Order::PageOut, Body::Vcpu(vcpu)) => vcpu.page_out(self.config.pages).map(Answer::Out),
            (Order::Touch { .. }, Body::Vcpu(vcpu)) => vcpu.touch().map(Answer::Touched),
            (Order::Verify, Body::Vcpu(_)) => Ok(Answer::Done),
            (Order::Hold, Body::Qemu(vmm)) => vmm.hold().map(|()| Answer::Done),
            (Order::PageOut, Body::Qemu(vmm)) => vmm.page_out().map(Answer::Out),
            (Order::Touch { seed, .. }, Body::Qemu(vmm)) => vmm.touch(seed).map(Answer::Touched),
            (Order::Work { zipf, ms }, Body::Qemu(vmm)) => vmm.work(zipf, ms),
            (Order::Verify, Body::Qemu(vmm)) => vmm.verify().map(|()| Answer::Done),
            (order, _) => bail!("this guest cannot do {order:?} now"),
        }
    }

    fn fill(&mut self) -> Result<Answer> {
        let config = &self.config;
        match config.kind {
            GuestKind::Native => {}
            GuestKind::Kvm => {
                let vcpu = Vcpu::start(config)?;
                let ram = Some(own_file(vcpu.ram()));
                self.body = Body::Vcpu(vcpu);
                return Ok(Answer::Filled { ram, vmm: None });
            }
            GuestKind::Qemu => {
                let vmm = Vmm::start(config)?;
                let filled = Answer::Filled { ram: Some(vmm.ram().to_owned()), vmm: Some(vmm.pid()) };
                self.body = Body::Qemu(vmm);
                return Ok(filled);
            }
        }
        let len = ram_len(config);
        let (ram, pager) = if let Backing::Kernel { .. } = config.backing {
            (Ram::Private(Anon::new(len as usize).context("Allocating memory")?), Pager::Kernel)
        } else {
            let make = if config.huge { GuestRam::huge } else { GuestRam::new };
            let ram = make(Bytes(len)).context("Allocating guest RAM")?;
            let pager = Pager::attach_with(&config.backing, &ram, config.lanes)?;
            (Ram::Shared(ram), pager)
        };
        let mut expected = Vec::with_capacity(config.pages as usize);
        for page in 0..config.pages {
            for (index, word) in words(&config.data.page(page)).enumerate() {
                ram.word(page as usize * PAGE_SIZE + index * 8).store(word, Relaxed);
                if index == 0 {
                    expected.push(word);
                }
            }
        }
        let file = if let Ram::Shared(ram) = &ram { Some(own_file(ram)) } else { None };
        self.body = Body::Native(Native { ram: Arc::new(ram), pager, expected, storm: None });
        Ok(Answer::Filled { ram: file, vmm: None })
    }
}

/// Guest RAM of this process, as others can open it.
pub(crate) fn own_file(ram: &GuestRam) -> PathBuf {
    format!("/proc/{}/fd/{}", std::process::id(), ram.memfd().as_raw_fd()).into()
}

/// The pages of a walk, in order.
fn walk(pattern: Pattern, pages: u64, mut seed: u64) -> Vec<u64> {
    const STRIDE: usize = 64;
    match pattern {
        Pattern::Sequential => (0..pages).collect(),
        Pattern::Strided => (0..STRIDE as u64).flat_map(|first| (first..pages).step_by(STRIDE)).collect(),
        Pattern::Random => {
            (0..pages).map(|_| ((u128::from(random(&mut seed)) * u128::from(pages)) >> 64) as u64).collect()
        }
        Pattern::OnePerHuge => {
            let mut order: Vec<u64> = (0..pages).step_by(PAGES_PER_UNIT as usize).collect();
            shuffle(&mut order, seed);
            order
        }
    }
}

fn words(page: &[u8; PAGE_SIZE]) -> impl Iterator<Item = u64> {
    page.as_chunks::<8>().0.iter().map(|bytes| u64::from_ne_bytes(*bytes))
}

impl Native {
    fn page_out(&mut self, pages: u64) -> Result<Out> {
        let (start, cpu) = (Instant::now(), cpu::of_thread()?);
        let elsewhere_us = match &*self.ram {
            Ram::Private(ram) => ram.page_out().context("MADV_PAGEOUT").map(|()| 0.0)?,
            Ram::Shared(ram) => self.pager.page_out(ram, pages)?,
        };
        let wall_us = start.elapsed().as_secs_f64() * 1e6;
        let cpu_us = cpu::of_thread()? - cpu + elsewhere_us;
        let pages = if matches!(self.pager, Pager::Floor) { pages } else { self.out(pages)?.len() as u64 };
        Ok(Out { pages, wall_us, cpu_us, first_us: 0.0 })
    }

    /// The pages that are not in memory.
    fn out(&self, pages: u64) -> Result<Vec<u64>> {
        if matches!(self.pager, Pager::Floor) {
            return Ok((0..pages).collect());
        }
        match &*self.ram {
            Ram::Shared(ram) => holes(ram.memfd(), pages),
            Ram::Private(ram) => swapped(ram.addr(), pages),
        }
    }

    fn touch(&mut self, config: &GuestConfig, seed: u64, pace: Pace) -> Result<Touched> {
        let mut order = self.out(config.pages)?;
        shuffle(&mut order, seed);
        order.truncate(usize::try_from(pace.most).unwrap_or(usize::MAX));
        if pace.threads < 2 {
            return self.touch_these(&order, pace);
        }
        let touched = touch_together(&self.ram, &self.expected, &order, pace.threads as usize);
        order.iter().for_each(|page| self.expected[*page as usize] = self.expected[*page as usize].wrapping_add(1));
        Ok(touched)
    }

    fn touch_these(&mut self, order: &[u64], pace: Pace) -> Result<Touched> {
        let think = Duration::from_micros(pace.think_us.into());
        let floor = matches!(self.pager, Pager::Floor);
        // Written before the first measurement: its pages must not be fresh.
        let mut times = vec![u32::MAX; order.len()];
        let mut copy = [1; PAGE_SIZE];
        let mut wrong = 0;
        let start = Instant::now();
        for (page, time) in order.iter().zip(&mut times) {
            let offset = *page as usize * PAGE_SIZE;
            let word = self.ram.word(offset);
            let begin = Instant::now();
            // A write: what comes back must go out again, on every side. (And a read of a shared file would map its
            // neighbours, too.)
            let found = word.fetch_add(1, Relaxed);
            if floor && let Ram::Shared(ram) = &*self.ram {
                ram.copy_out(offset, &mut copy);
                std::hint::black_box(&copy);
            }
            *time = u32::try_from(begin.elapsed().as_nanos()).unwrap_or(u32::MAX);
            let expected = &mut self.expected[*page as usize];
            wrong += u64::from(found != *expected);
            *expected = found.wrapping_add(1);
            while pace.think_us != 0 && begin.elapsed() < think {
                std::hint::spin_loop();
            }
        }
        Ok(Touched::of(&mut times, start.elapsed(), wrong))
    }

    fn start_storm(&mut self) -> Result<()> {
        let stop = Arc::new(AtomicBool::new(false));
        let (ram, ended, pages) = (self.ram.clone(), stop.clone(), self.expected.len() as u64);
        let cpu_us = cpu::of_process()?;
        let thread = std::thread::Builder::new().name("storm".into()).spawn(move || {
            let mut state = 1;
            let mut touches = vec![0u32; pages as usize];
            while !ended.load(Relaxed) {
                let page = ((u128::from(random(&mut state)) * u128::from(pages)) >> 64) as usize;
                ram.word(page * PAGE_SIZE).fetch_add(1, Relaxed);
                touches[page] += 1;
            }
            touches
        })?;
        self.storm = Some(Storm { stop, since: Instant::now(), cpu_us, thread });
        Ok(())
    }

    fn pause(&mut self) -> Result<Answer> {
        let storm = self.storm.take().context("there is no storm to end")?;
        storm.stop.store(true, Relaxed);
        let touches = storm.thread.join().map_err(|_| anyhow!("the storm panicked"))?;
        let wall_us = storm.since.elapsed().as_secs_f64() * 1e6;
        let cpu_us = cpu::of_process()? - storm.cpu_us;
        for (expected, touches) in self.expected.iter_mut().zip(&touches) {
            *expected = expected.wrapping_add(u64::from(*touches));
        }
        Ok(Answer::Sliced { ops: touches.iter().map(|touches| u64::from(*touches)).sum(), wall_us, cpu_us })
    }

    fn verify(&self, config: &GuestConfig) -> Result<()> {
        for page in 0..config.pages {
            let first = self.expected[page as usize];
            for (index, word) in words(&config.data.page(page)).enumerate() {
                let expected = if index == 0 { first } else { word };
                let found = self.ram.word(page as usize * PAGE_SIZE + index * 8).load(Relaxed);
                if found != expected {
                    bail!("WRONG DATA: word {index} of page {page} is {found:#018x} and must be {expected:#018x}");
                }
            }
        }
        Ok(())
    }
}

/// Pages of a file that are not in it.
pub(crate) fn holes(file: impl AsFd, pages: u64) -> Result<Vec<u64>> {
    let mut present = HashSet::new();
    let mut offset = 0;
    while let Some((start, end)) = memfd::next_data(&file, offset).context("Looking for data in guest RAM")? {
        present.extend(start / PAGE_SIZE as u64..end.div_ceil(PAGE_SIZE as u64));
        offset = end;
    }
    Ok((0..pages).filter(|page| !present.contains(page)).collect())
}

/// Pages of this process's own memory that are in swap.
fn swapped(addr: usize, pages: u64) -> Result<Vec<u64>> {
    const ENTRY: usize = 8;
    const SWAPPED: u64 = 1 << 62;
    let mut entries = vec![0; pages as usize * ENTRY];
    let map = File::open("/proc/self/pagemap").context("Opening /proc/self/pagemap")?;
    map.read_exact_at(&mut entries, (addr / PAGE_SIZE * ENTRY) as u64).context("Reading /proc/self/pagemap")?;
    let (entries, _) = entries.as_chunks::<ENTRY>();
    let out = entries.iter().map(|entry| u64::from_ne_bytes(*entry)).zip(0..);
    Ok(out.filter(|(entry, _)| entry & SWAPPED != 0).map(|(_, page)| page).collect())
}
