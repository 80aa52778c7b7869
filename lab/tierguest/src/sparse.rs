//! A program whose memory is cold except for one page of each 2 MiB, and of which khugepaged then makes huge pages.
//!
//! Before: it is started with a size. It writes `filled` when all its memory is present. After: a line of input lets
//! khugepaged work; at the next line all memory is compared. Threads: one touches the hot pages once a second, one
//! reads commands. Units: the size is MiB, a unit is 2 MiB.

use std::io::{self, BufRead, Write};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use ballast_base::{HUGE_SIZE, PAGE_SIZE};
use ballast_sys::Anon;

use crate::heat::random;

/// Runs until the final comparison is done.
pub fn run(mib: usize) -> Result<()> {
    let memory = Arc::new(Anon::new(mib << 20).context("Mapping memory")?);
    let pages = memory.len() / PAGE_SIZE;
    let words = |page: usize| (0..PAGE_SIZE / 8).map(move |word| page * PAGE_SIZE + word * 8);
    let mut state = 5;
    for word in (0..pages).flat_map(words) {
        memory.word(word).store(random(&mut state), Ordering::Relaxed);
    }
    let hot = Arc::clone(&memory);
    std::thread::spawn(move || {
        loop {
            for at in (0..hot.len()).step_by(HUGE_SIZE) {
                hot.word(at).load(Ordering::Relaxed);
            }
            std::thread::sleep(Duration::from_secs(1));
        }
    });
    let mut out = io::stdout();
    let mut say = |what: &str| writeln!(out, "BALLAST-SAYS {what}").and_then(|()| out.flush());
    let mut lines = io::stdin().lock().lines();
    say("filled")?;
    lines.next().context("a line")??;
    memory.huge().context("Allowing huge pages")?;
    say("huge")?;
    lines.next().context("a line")??;
    let mut state = 5;
    let wrong =
        (0..pages).flat_map(words).filter(|word| memory.word(*word).load(Ordering::Relaxed) != random(&mut state));
    match wrong.count() {
        0 => Ok(()),
        wrong => bail!("{wrong} words are wrong"),
    }
}
