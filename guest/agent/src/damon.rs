//! DAMON, the kernel's access monitor, which looks at each page of a range for the agent.
//!
//! Before: the host wants reports. After: the idle flags of /proc/kpageflags say which pages were accessed.
//! Units: bytes in DAMON's files, pages here. Promise: a kdamond is taken only if no other program has one.
//! `damon_stat` (on by default in newer kernels, where it occupies DAMON) is stopped. Dropping [`Damon`] restores both;
//! if the agent was killed, its next start, or `--undo`, restores them by a note below /run.
//!
//! DAMON's own estimate of accesses is not used: it looks at one page of each range at a time, for some milliseconds,
//! and the age of a range counts from a change of its access rate, not from an access. But DAMON applies a *scheme* to
//! every page of a range. The filter `young` of a scheme (Linux 6.10) checks for each page, by all page tables that map
//! it, whether the page was accessed since the last check, and makes the page idle. A page that passes the filters gets
//! the action `lru_prio`, which is what the kernel does itself with a page that is read: it clears the idle flag. With
//! filters that let no page pass, all pages are idle afterwards. A kernel that lacks any of these features refuses the
//! setting.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ballast_tier::source::damon::{ADMIN, lock};

use crate::files;

const STAT: &str = "/sys/module/damon_stat/parameters/enabled";
/// File that says that the kdamond is ours, and how `damon_stat` was set.
const NOTE: &str = "/run/ballast-agent.damon";

/// A filter of a scheme: its type, and `Y` if matching pages are left out, or `N` if the others are.
type Filter = (&'static str, &'static str);
/// Filters that leave out all but accessed pages; filters that check all pages and leave them out.
const ACCESSED: [Filter; 1] = [("young", "N")];
const NONE: [Filter; 3] = [("young", "Y"), ("anon", "Y"), ("anon", "N")];
/// DAMON samples a page of each of its ranges before the schemes are applied, and this page counts as idle, so a range
/// has at least this many pages. The kernel need not switch threads within a range, so it has no more, either.
const RANGE: u64 = 4096;
/// Time until DAMON applies a scheme. If DAMON is told to end earlier, it applies the scheme at once, and ends.
const SAMPLE_US: u64 = 1_000_000;
/// Longest wait for the kdamond to begin, and the pause between two checks.
const BEGINS: Duration = Duration::from_secs(2);
const BEGINS_POLL: Duration = Duration::from_millis(5);

#[derive(Debug)]
pub struct Damon {
    pages: (u64, u64),
    spent: Duration,
}

/// Kdamonds were taken for reports and for tiering together; the first one is for reports.
static SHARED: AtomicBool = AtomicBool::new(false);

/// Takes a kdamond for reports, and more for tiering, until [`undo`]. Fails if another program uses DAMON.
pub fn share(more: usize) -> io::Result<()> {
    let _held = lock();
    take(1 + more as u64)?;
    SHARED.store(true, Ordering::Release);
    Ok(())
}

fn take(threads: u64) -> io::Result<()> {
    let count: u32 = files::read(path("nr_kdamonds"))?.parse().unwrap_or(u32::MAX);
    if count != 0 {
        return Err(io::Error::new(io::ErrorKind::ResourceBusy, "DAMON is in use by another program"));
    }
    let stat = files::read(STAT).is_ok_and(|enabled| enabled == "Y");
    fs::write(NOTE, if stat { "stat=Y\n" } else { "stat=N\n" })?;
    if stat {
        files::write(STAT, "N")?;
    }
    files::write(path("nr_kdamonds"), threads)
}

fn path(file: &str) -> PathBuf {
    PathBuf::from(ADMIN).join(file)
}

/// Restores the kernel's settings, also those that a killed agent did not restore.
pub fn undo() {
    SHARED.store(false, Ordering::Release);
    let _held = lock();
    let Ok(note) = fs::read_to_string(NOTE) else { return };
    stop(&note);
}

/// Stops our kdamonds, and restores the setting of `damon_stat`.
fn stop(note: &str) {
    let put = |file: PathBuf, value: &str| {
        if file.exists()
            && let Err(error) = files::write(file, value)
        {
            eprintln!("ballast-agent: {error}");
        }
    };
    let threads: u32 = files::read(path("nr_kdamonds")).ok().and_then(|count| count.parse().ok()).unwrap_or(0);
    for state in (0..threads).map(|index| path(&format!("{index}/state"))) {
        if files::read(&state).is_ok_and(|state| state == "on") {
            put(state, "off");
        }
    }
    put(path("nr_kdamonds"), "0");
    if note.contains("stat=Y") {
        put(STAT.into(), "Y");
    }
    let _ = fs::remove_file(NOTE);
}

impl Damon {
    /// Takes a kdamond. Fails if the kernel's DAMON lacks a needed feature, or another program uses it.
    pub fn start() -> io::Result<Self> {
        if !SHARED.load(Ordering::Acquire) {
            undo();
        }
        let held = lock();
        if !SHARED.load(Ordering::Acquire) {
            take(1)?;
        }
        let damon = Self { pages: (0, 0), spent: Duration::ZERO };
        let configured = damon.configure();
        drop(held);
        // After an error, the drop restores all settings.
        configured.map(|()| damon)
    }

    fn configure(&self) -> io::Result<()> {
        let put = |file: &str, value: u64| files::write(path(file), value);
        put("0/contexts/nr_contexts", 1)?;
        files::write(path("0/contexts/0/operations"), "paddr")?;
        for interval in ["sample_us", "aggr_us", "update_us"] {
            put(&format!("0/contexts/0/monitoring_attrs/intervals/{interval}"), SAMPLE_US)?;
        }
        put("0/contexts/0/targets/nr_targets", 1)?;
        put("0/contexts/0/schemes/nr_schemes", 1)?;
        files::write(path("0/contexts/0/schemes/0/action"), "lru_prio")?;
        for what in ["sz", "nr_accesses", "age"] {
            put(&format!("0/contexts/0/schemes/0/access_pattern/{what}/min"), 0)?;
            let most = if what == "sz" { u64::MAX } else { u32::MAX.into() };
            put(&format!("0/contexts/0/schemes/0/access_pattern/{what}/max"), most)?;
        }
        Ok(())
    }

    /// Clears the idle flag of all pages accessed since it was set. Fails if another program has stopped DAMON.
    pub fn clear_idle_of_accessed(&mut self, pages: (u64, u64)) -> io::Result<()> {
        self.look(pages, &ACCESSED)
    }

    /// Sets the idle flag of all of these pages. Fails like [`Self::clear_idle_of_accessed`].
    pub fn set_idle(&mut self, pages: (u64, u64)) -> io::Result<()> {
        self.look(pages, &NONE)
    }

    fn look(&mut self, pages: (u64, u64), filters: &[Filter]) -> io::Result<()> {
        let _held = lock();
        if self.pages != pages {
            self.set_pages(pages)?;
        }
        let all = "0/contexts/0/schemes/0/filters";
        files::write(path(&format!("{all}/nr_filters")), filters.len())?;
        for (number, (kind, matching)) in filters.iter().enumerate() {
            files::write(path(&format!("{all}/{number}/type")), kind)?;
            files::write(path(&format!("{all}/{number}/matching")), matching)?;
        }
        files::write(path("0/state"), "on")?;
        let begun = wait_for_sleep();
        let began = Instant::now();
        // The write ends the interval, applies the scheme to all ranges, and returns when the thread has ended.
        let ended = files::write(path("0/state"), "off");
        self.spent += began.elapsed();
        begun.and(ended)
    }

    fn set_pages(&mut self, (page, end): (u64, u64)) -> io::Result<()> {
        self.pages = (0, 0);
        let starts: Vec<u64> = (page..end).step_by(RANGE as usize).collect();
        // With at least this minimum, DAMON joins no ranges; with at most twice the number as maximum, it splits none.
        let count = starts.len().max(3);
        for bound in ["max", "min"] {
            // The kernel checks the bounds when DAMON is switched on.
            files::write(path(&format!("0/contexts/0/monitoring_attrs/nr_regions/{bound}")), count)?;
        }
        let regions = "0/contexts/0/targets/0/regions";
        files::write(path(&format!("{regions}/nr_regions")), starts.len())?;
        for (number, start) in starts.into_iter().enumerate() {
            files::write(path(&format!("{regions}/{number}/start")), start << 12)?;
            files::write(path(&format!("{regions}/{number}/end")), end.min(start + RANGE) << 12)?;
        }
        self.pages = (page, end);
        Ok(())
    }

    /// Returns the CPU time of DAMON's threads so far, in microseconds: the time of all looks, from begin to end.
    pub fn cpu_us(&self) -> u64 {
        self.spent.as_micros() as u64
    }
}

/// Waits until the kdamond sleeps in its first interval: a kdamond that is told to end earlier applies no scheme.
fn wait_for_sleep() -> io::Result<()> {
    let pid = files::read(path("0/pid"))?;
    let began = Instant::now();
    while began.elapsed() < BEGINS {
        let stat = files::read(format!("/proc/{pid}/stat"))?;
        if stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('I')) {
            return Ok(());
        }
        std::thread::sleep(BEGINS_POLL);
    }
    Err(io::Error::new(io::ErrorKind::TimedOut, "DAMON's thread does not begin"))
}

impl Drop for Damon {
    fn drop(&mut self) {
        // Kdamonds that are shared with tiering end with tiering.
        if !SHARED.load(Ordering::Acquire) {
            undo();
        }
    }
}
