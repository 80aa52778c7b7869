//! The swap of this host: its size, its speed, and the command that makes one if there is none.
//!
//! Before: nothing. After: limits are checked against it, and `ballast doctor` prints it. Threads: any.
//! Units: bytes and microseconds. Promise: a trial pages only memory of our own, and changes no setting.

use std::fs;
use std::io;
use std::sync::atomic::Ordering;
use std::time::Instant;

use ballast_base::{Bytes, Hva, KIB, MIB, PAGE_SIZE};
use ballast_sys::Anon;
use ballast_sys::page_tables::{Entry, PageTables};

/// The command for a host without swap.
pub const HOW_TO: &str = "apt install systemd-zram-generator; printf '[zram0]\\nzram-size = ram / 2\\n' > \
                          /etc/systemd/zram-generator.conf; systemctl daemon-reload; \
                          systemctl start systemd-zram-setup@zram0";

/// Swap with less free space than this, or than 1/64 of its size, is full.
const LEAST_FREE: u64 = 64 * MIB;

/// All swap of this host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Swap {
    /// Its devices and files.
    pub names: Vec<String>,
    /// Its size.
    pub total: u64,
    /// Bytes in use.
    pub used: u64,
}

/// The cost of paging.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Speed {
    /// A page out, on average.
    pub out_us: f64,
    /// A page back, at the median.
    pub in_us: f64,
}

impl Swap {
    /// The swap that the kernel has now.
    pub fn now() -> Self {
        Self::of(&fs::read_to_string("/proc/swaps").unwrap_or_default())
    }

    fn of(text: &str) -> Self {
        let mut swap = Self::default();
        for line in text.lines().skip(1) {
            let words: Vec<&str> = line.split_ascii_whitespace().collect();
            let kib = |at: usize| words.get(at).and_then(|word| word.parse::<u64>().ok()).unwrap_or(0) * KIB;
            swap.names.extend(words.first().map(|name| (*name).to_owned()));
            swap.total += kib(2);
            swap.used += kib(3);
        }
        swap
    }

    /// Free bytes.
    pub fn free(&self) -> u64 {
        self.total.saturating_sub(self.used)
    }

    /// Why nothing can be paged out; `None` if something can.
    pub fn full(&self) -> Option<String> {
        if self.total == 0 {
            return Some("this host has no swap (ballast doctor says what to type)".into());
        }
        let is_full = self.free() < LEAST_FREE.min(self.total / 64);
        is_full.then(|| format!("swap is full: {} of {} are used", Bytes(self.used), Bytes(self.total)))
    }
}

/// Whether a compressed pool is in front of swap; `None` if the kernel has no zswap.
pub fn zswap() -> Option<bool> {
    let text = fs::read_to_string("/sys/module/zswap/parameters/enabled").ok()?;
    Some(matches!(text.trim(), "Y" | "1"))
}

/// Pages some memory of our own out and back, and measures it.
///
/// # Errors
/// The kernel paged nothing out, for example because there is no swap.
pub fn speed() -> io::Result<Speed> {
    const PAGES: usize = 256;
    let memory = Anon::new(PAGES * PAGE_SIZE)?;
    for page in 0..PAGES {
        // Half of each page repeats and half does not, as in a typical page.
        let mut word = 0x9e37_79b9_7f4a_7c15u64.wrapping_mul(page as u64 + 1);
        for at in (0..PAGE_SIZE).step_by(8) {
            word ^= word << 13;
            word ^= word >> 7;
            word ^= word << 17;
            let value = if at < PAGE_SIZE / 2 { word } else { page as u64 };
            memory.word(page * PAGE_SIZE + at).store(value, Ordering::Relaxed);
        }
    }
    let begun = Instant::now();
    memory.page_out()?;
    let out = begun.elapsed();
    let mut swapped = Vec::new();
    let (start, len) = (Hva(memory.addr() as u64), memory.len() as u64);
    PageTables::open(std::process::id())?.runs(start, len, |run| {
        let pages = (run.start.0 - start.0) as usize / PAGE_SIZE..(run.end.0 - start.0) as usize / PAGE_SIZE;
        swapped.extend(pages.filter(|_| run.entry == Entry::Swapped));
    })?;
    if swapped.is_empty() {
        return Err(io::Error::other("the kernel paged nothing out"));
    }
    let mut back = Vec::with_capacity(swapped.len());
    for page in &swapped {
        let begun = Instant::now();
        std::hint::black_box(memory.word(page * PAGE_SIZE).load(Ordering::Relaxed));
        back.push(begun.elapsed());
    }
    back.sort_unstable();
    let us = |time: std::time::Duration| time.as_secs_f64() * 1e6;
    Ok(Speed { out_us: us(out) / swapped.len() as f64, in_us: us(back[back.len() / 2]) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_devices_are_summed_up_and_no_room_is_a_reason() {
        let text = "Filename Type Size Used Priority\n/dev/zram0 partition 1048576 1024 100\n/swap file 1024 0 -2\n";
        let swap = Swap::of(text);
        assert_eq!(swap.names, ["/dev/zram0", "/swap"]);
        assert_eq!((swap.total, swap.used, swap.full()), ((1 << 30) + (1 << 20), 1 << 20, None));
        assert!(Swap::default().full().is_some_and(|why| why.contains("no swap")));
        let full = Swap { used: swap.total - MIB, ..swap };
        assert!(full.full().is_some_and(|why| why.contains("full")), "{full:?}");
    }

    #[test]
    fn the_speed_of_swap_is_measured_or_there_is_none() {
        match speed() {
            Ok(speed) => assert!(speed.out_us > 0.0 && speed.in_us > 0.0, "{speed:?}"),
            Err(error) => assert_eq!(error.to_string(), "the kernel paged nothing out"),
        }
    }
}
