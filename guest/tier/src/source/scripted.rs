//! A source with given samples, for tests and to replay a recording.
//!
//! Before: a list of samples for each epoch. After: samples of watched processes were given once, in that order.
//! Threads: none.

use std::collections::VecDeque;
use std::io;

use super::{Each, Missed, SampleSource, Samples};

/// The source.
#[derive(Clone, Debug, Default)]
pub struct Scripted {
    epochs: VecDeque<Vec<(u32, u64, u32)>>,
    watched: Vec<u32>,
}

impl Scripted {
    /// A source with these epochs of `(process, address, samples)`.
    pub fn new(epochs: impl IntoIterator<Item = Vec<(u32, u64, u32)>>) -> Self {
        Self { epochs: epochs.into_iter().collect(), watched: Vec::new() }
    }
}

impl SampleSource for Scripted {
    fn name(&self) -> &'static str {
        "scripted"
    }

    fn watch(&mut self, processes: &[u32]) -> io::Result<()> {
        self.watched = processes.to_vec();
        Ok(())
    }

    fn take(&mut self, each: &mut Each<'_>) -> io::Result<Missed> {
        for (process, address, samples) in self.epochs.pop_front().unwrap_or_default() {
            if self.watched.contains(&process) {
                each(process, address, Samples { count: samples, each: 1 });
            }
        }
        Ok(Missed::default())
    }
}
