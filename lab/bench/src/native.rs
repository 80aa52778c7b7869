//! A guest that is a thread: its memory has known contents, is paged out by one of the ways, and is touched again.
//!
//! Before: `guest` was asked for a native guest. After: the bench has times of single touches, as the guest's thread
//! sees them.
//! Threads: the caller's touches; a storm has a thread of its own. Times of reads are of the monotonic clock, which all
//! guests share.
//! Units: pages. Promise: a page is touched once in a round, and every touch checks a word that counts the touches
//! before it, so a page that was restored with wrong bytes is counted. [`Native::verify`] compares every byte.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use ballast_base::{Bytes, PAGE_SIZE};
use ballast_sys::Anon;
use ballast_sys::clock::monotonic_ns;
use ballast_testvm::GuestRam;

use crate::cpu;
use crate::order::{Answer, Backing, Data, GuestConfig, Out, Pace, Reads, Touched};
use crate::pager::{Pager, holes, own_file};
use crate::stats::{random, shuffle};

#[derive(Debug)]
pub(crate) enum Ram {
    Shared(GuestRam),
    /// Private anonymous memory, which the kernel swaps best.
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

/// The contents of pages: all equal those of one page, except that the words of noise differ from page to page.
pub(crate) struct Contents {
    words: Vec<u64>,
    number: u64,
}

impl Contents {
    /// `number` makes the data of each guest different.
    pub(crate) fn new(data: Data, number: u64) -> Self {
        let page = data.page(number);
        Self { words: page.as_chunks::<8>().0.iter().map(|bytes| u64::from_ne_bytes(*bytes)).collect(), number }
    }

    fn of(&self, page: usize) -> impl Iterator<Item = u64> {
        let key = random(&mut ((self.number << 32) | page as u64));
        self.words.iter().map(move |word| if *word == 0 { 0 } else { word ^ key })
    }

    /// Fills a page; returns its first word.
    pub(crate) fn fill(&self, ram: &Ram, page: usize) -> u64 {
        let offsets = (page * PAGE_SIZE..).step_by(8);
        self.of(page).zip(offsets).for_each(|(word, at)| ram.word(at).store(word, Relaxed));
        ram.word(page * PAGE_SIZE).load(Relaxed)
    }

    /// Compares a page. If `first` is given, it is the expected first word.
    pub(crate) fn check(&self, ram: &Ram, page: usize, first: Option<u64>) -> Result<()> {
        for (index, word) in self.of(page).enumerate() {
            let expected = first.filter(|_| index == 0).unwrap_or(word);
            let found = ram.word(page * PAGE_SIZE + index * 8).load(Relaxed);
            ensure!(
                found == expected,
                "WRONG DATA: word {index} of page {page} is {found:#018x} and must be {expected:#018x}"
            );
        }
        Ok(())
    }
}

pub(crate) struct Native {
    ram: Arc<Ram>,
    pager: Pager,
    contents: Contents,
    /// The expected first word of each page: the word of the fill, plus one for each touch.
    expected: Vec<u64>,
    storm: Option<Storm>,
    next: usize,
}

struct Storm {
    stop: Arc<AtomicBool>,
    since: Instant,
    cpu_us: f64,
    thread: JoinHandle<Vec<u32>>,
}

impl Native {
    pub(crate) fn filled(config: &GuestConfig) -> Result<Self> {
        let len = config.ram_bytes;
        let (ram, pager) = if let Backing::Kernel { .. } = config.backing {
            (Ram::Private(Anon::new(len as usize).context("Allocating memory")?), Pager::Kernel)
        } else {
            let ram = GuestRam::new(Bytes(len)).context("Allocating guest RAM")?;
            let pager = Pager::attach(&config.backing, &ram)?;
            (Ram::Shared(ram), pager)
        };
        let contents = Contents::new(config.data, config.number);
        let expected = (0..config.pages as usize).map(|page| contents.fill(&ram, page)).collect();
        Ok(Self { ram: Arc::new(ram), pager, contents, expected, storm: None, next: 0 })
    }

    /// As other processes can open it.
    pub(crate) fn file(&self) -> Option<PathBuf> {
        if let Ram::Shared(ram) = &*self.ram { Some(own_file(ram)) } else { None }
    }

    pub(crate) fn page_out(&mut self, pages: u64) -> Result<Out> {
        let (start, cpu) = (Instant::now(), cpu::of_thread()?);
        let elsewhere_us = match &*self.ram {
            Ram::Private(ram) => ram.page_out().context("MADV_PAGEOUT").map(|()| 0.0)?,
            Ram::Shared(ram) => self.pager.page_out(ram, pages)?,
        };
        let wall_us = start.elapsed().as_secs_f64() * 1e6;
        let cpu_us = cpu::of_thread()? - cpu + elsewhere_us;
        let pages = if matches!(self.pager, Pager::Floor) { pages } else { self.out(pages)?.len() as u64 };
        Ok(Out { pages, wall_us, cpu_us, ..Out::default() })
    }

    fn out(&self, pages: u64) -> Result<Vec<u64>> {
        if matches!(self.pager, Pager::Floor) {
            return Ok((0..pages).collect());
        }
        match &*self.ram {
            Ram::Shared(ram) => holes(ram.memfd(), pages),
            Ram::Private(ram) => swapped(ram.addr(), pages),
        }
    }

    /// Touches pages that are out, in an order that the seed determines.
    pub(crate) fn touch(&mut self, config: &GuestConfig, seed: u64, pace: Pace) -> Result<Touched> {
        let mut order = self.out(config.pages)?;
        if !pace.in_order {
            shuffle(&mut order, seed);
        }
        order.truncate(usize::try_from(pace.most).unwrap_or(usize::MAX));
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
            // A write: a page must be dirty to go out again. (A read of a shared file would map its neighbours, too.)
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

    pub(crate) fn start_storm(&mut self) -> Result<()> {
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

    pub(crate) fn pause(&mut self) -> Result<Answer> {
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

    /// Reads all pages over and over until `until_ns`, and compares each; counts the touches from `from_ns` on.
    pub(crate) fn read(&mut self, from_ns: u64, until_ns: u64) -> Result<Reads> {
        let mut reads = Reads::default();
        loop {
            let begin = monotonic_ns();
            if begin >= until_ns {
                return Ok(reads);
            }
            self.ram.word(self.next * PAGE_SIZE).load(Relaxed);
            let end = monotonic_ns();
            if begin >= from_ns {
                reads.waits.add(end - begin);
                reads.touches += u64::from(end <= until_ns);
            }
            self.check(self.next)?;
            self.next = (self.next + 1) % self.expected.len();
        }
    }

    fn check(&self, page: usize) -> Result<()> {
        self.contents.check(&self.ram, page, Some(self.expected[page]))
    }

    pub(crate) fn verify(&self) -> Result<()> {
        (0..self.expected.len()).try_for_each(|page| self.check(page))
    }
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
