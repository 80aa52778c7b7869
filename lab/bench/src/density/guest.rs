//! One of many small guests: it fills its RAM, and reads all of it over and over.
//!
//! Before: `fleet` starts it as a process of its own. After: it returns the time of each touch.
//! Threads: one; the client has one of its own. Units: pages; nanoseconds of the monotonic clock, which guests share.
//! Promise: every word of every page that is read is compared; wrong data ends the reading with an error.

use std::sync::atomic::Ordering::Relaxed;

use anyhow::{Context, Result, bail, ensure};
use ballast_base::{Bytes, PAGE_SIZE};
use ballast_sys::Anon;
use ballast_sys::clock::monotonic_ns;
use ballast_testvm::GuestRam;

use crate::native::Ram;
use crate::order::{Answer, Backing, Data, ReaderConfig, Reads};
use crate::pager::{Pager, enter};
use crate::stats::random;
use crate::waits::Waits;

const WORDS: usize = PAGE_SIZE / 8;

/// The contents of the pages: one page of half compressible data, in which the words of noise differ from page to page.
struct Contents {
    words: [u64; WORDS],
    number: u64,
}

impl Contents {
    fn new(number: u64) -> Self {
        let page = Data::HalfCompressible.page(number);
        let mut words = [0; WORDS];
        for (word, bytes) in words.iter_mut().zip(page.as_chunks::<8>().0) {
            *word = u64::from_ne_bytes(*bytes);
        }
        Self { words, number }
    }

    /// The words of a page.
    fn of(&self, page: usize) -> impl Iterator<Item = u64> {
        let key = random(&mut ((self.number << 32) | page as u64));
        self.words.iter().map(move |word| if *word == 0 { 0 } else { word ^ key })
    }
}

/// A guest.
pub(crate) struct Reader {
    config: ReaderConfig,
    ram: Ram,
    pager: Option<Pager>,
    contents: Contents,
    /// The page that is read next.
    next: usize,
}

impl Reader {
    pub(crate) fn new(config: ReaderConfig) -> Result<Self> {
        enter(&config.backing)?;
        let ram = if let Backing::Kernel { .. } = config.backing {
            Ram::Private(Anon::new(config.ram_bytes as usize).context("Allocating memory")?)
        } else {
            Ram::Shared(GuestRam::new(Bytes(config.ram_bytes)).context("Making guest RAM")?)
        };
        let contents = Contents::new(config.number);
        Ok(Self { config, ram, pager: None, contents, next: 0 })
    }

    fn pages(&self) -> usize {
        self.config.ram_bytes as usize / PAGE_SIZE
    }

    pub(crate) fn attach(&mut self) -> Result<Answer> {
        let Ram::Shared(ram) = &self.ram else { bail!("this guest is the kernel's") };
        self.pager = Some(Pager::attach(&self.config.backing, ram)?);
        Ok(Answer::Done)
    }

    pub(crate) fn fill(&mut self) -> Result<Answer> {
        for page in 0..self.pages() {
            for (index, word) in self.contents.of(page).enumerate() {
                self.ram.word(page * PAGE_SIZE + index * 8).store(word, Relaxed);
            }
        }
        Ok(Answer::Done)
    }

    /// Compare a page.
    fn check(&self, page: usize) -> Result<()> {
        for (index, expected) in self.contents.of(page).enumerate() {
            let found = self.ram.word(page * PAGE_SIZE + index * 8).load(Relaxed);
            ensure!(
                found == expected,
                "WRONG DATA: word {index} of page {page} is {found:#018x} and must be {expected:#018x}"
            );
        }
        Ok(())
    }

    pub(crate) fn read(&mut self, from_ns: u64, until_ns: u64) -> Result<Reads> {
        let mut reads = Reads { touches: 0, waits: Waits::default() };
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
            self.next = (self.next + 1) % self.pages();
        }
    }

    pub(crate) fn verify(&self) -> Result<Answer> {
        (0..self.pages()).try_for_each(|page| self.check(page))?;
        Ok(Answer::Done)
    }
}
