//! Shows progress on standard error while a bench measures, which may take an hour.
//!
//! Before: a bench starts. After: it has ended, and nothing is left on the terminal.
//! Threads: the bench's; on a terminal one more, which draws once a second. Units: rows, and steps within a row.
//! Promise: standard output has rows alone. Without a terminal there is a line per row, and one per minute within it.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

/// Time between two draws: often enough to show that time passes, and too rare to disturb the measurement.
const TICK: Duration = Duration::from_secs(1);
/// Time between two lines about one row, where there is no terminal.
const QUIET: Duration = Duration::from_secs(60);

/// The state that is shown. Clones show the same.
#[derive(Clone, Debug)]
pub(crate) struct Progress {
    bar: ProgressBar,
    said: Arc<Mutex<Instant>>,
}

impl Progress {
    /// Begin. It must be called before the thread is pinned to a CPU, which the thread that draws would inherit.
    pub(crate) fn start() -> Self {
        let bar = ProgressBar::new_spinner();
        if let Ok(style) = ProgressStyle::with_template("{spinner} {elapsed_precise} {prefix}{wide_msg}") {
            bar.set_style(style);
        }
        if !bar.is_hidden() {
            bar.enable_steady_tick(TICK);
        }
        Self { bar, said: Arc::new(Mutex::new(Instant::now())) }
    }

    /// Show the row that is measured from now on.
    pub(crate) fn row(&self, title: &str) {
        self.bar.set_message("");
        self.bar.set_prefix(title.to_owned());
        self.say(Duration::ZERO, || title.to_owned());
    }

    /// Show the position within the row: step `at` of `of`.
    pub(crate) fn step(&self, what: &str, at: usize, of: usize) {
        let text = format!(": {what} {at} of {of}");
        self.say(QUIET, || format!("{}{text}", self.bar.prefix()));
        self.bar.set_message(text);
    }

    /// The items, each announced as a step when it is taken.
    pub(crate) fn over<T: IntoIterator>(&self, what: &'static str, items: T) -> Over<T::IntoIter> {
        let items = items.into_iter();
        let (least, most) = items.size_hint();
        Over { progress: self.clone(), what, at: 0, of: most.unwrap_or(least), items }
    }

    /// Print something else meanwhile.
    pub(crate) fn aside<T>(&self, print: impl FnOnce() -> T) -> T {
        self.bar.suspend(print)
    }

    /// Show nothing more.
    pub(crate) fn end(&self) {
        self.bar.finish_and_clear();
    }

    /// Print a line if no bar is drawn and the last line is old enough.
    fn say(&self, quiet: Duration, text: impl FnOnce() -> String) {
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        if self.bar.is_hidden() && said.elapsed() >= quiet {
            eprintln!("ballast bench: {}", text());
            *said = Instant::now();
        }
    }
}

/// The iterator that [`Progress::over`] returns.
pub(crate) struct Over<T> {
    progress: Progress,
    what: &'static str,
    at: usize,
    of: usize,
    items: T,
}

impl<T: Iterator> Iterator for Over<T> {
    type Item = T::Item;

    fn next(&mut self) -> Option<T::Item> {
        let item = self.items.next()?;
        self.at += 1;
        self.progress.step(self.what, self.at, self.of);
        Some(item)
    }
}
