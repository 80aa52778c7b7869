//! Shows progress on standard error while a bench measures, which may take an hour.
//!
//! Before: a bench starts. After: a line was printed for each row, and one a minute within a row.
//! Threads: the bench's. Units: rows, and steps within a row. Promise: standard output has rows alone.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ballast_sys::lock::Lock;

/// Time between two lines about one row.
const QUIET: Duration = Duration::from_secs(60);

/// The row that is measured, and the time of the last line. Clones share them.
#[derive(Clone, Debug)]
pub(crate) struct Progress(Arc<Mutex<(String, Instant)>>);

impl Progress {
    pub(crate) fn start() -> Self {
        Self(Arc::new(Mutex::new((String::new(), Instant::now()))))
    }

    pub(crate) fn row(&self, title: &str) {
        eprintln!("ballast bench: {title}");
        *self.0.locked() = (title.to_owned(), Instant::now());
    }

    /// The items. When an item is taken, it is shown as a step, if the last line is old enough.
    pub(crate) fn over<T: IntoIterator>(&self, what: &'static str, items: T) -> impl Iterator<Item = T::Item> + use<T> {
        let items = items.into_iter();
        let (least, most) = items.size_hint();
        let (progress, of) = (self.clone(), most.unwrap_or(least));
        items.zip(1..).map(move |(item, at)| {
            let mut said = progress.0.locked();
            if said.1.elapsed() >= QUIET {
                eprintln!("ballast bench: {}: {what} {at} of {of}", said.0);
                said.1 = Instant::now();
            }
            item
        })
    }
}
