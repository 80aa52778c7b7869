//! A metric: its name, its kind, its help text, and where its samples come from.
//!
//! Threads: any; plain values. Units: in the names.
//! Promise: a sample is computed from one JSON type alone, so a page of many metrics asks the engine once.

use std::fmt;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Gauge,
    Counter,
    Histogram,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Gauge => "gauge",
            Self::Counter => "counter",
            Self::Histogram => "histogram",
        })
    }
}

pub(crate) type Labels = Vec<(&'static str, String)>;
/// One sample: labels beyond those of [`Samples`], and the value.
pub(crate) type Sample = (Labels, f64);

/// The samples of a metric of the host, of a node of the pool, of a VM, or of a VM's heat while it is tracked. Samples
/// of a node also get the labels `node` and `pages`; samples of a VM and of its heat get `domain`.
pub(crate) type Samples<T> = fn(&T) -> Vec<Sample>;

pub(crate) struct Metric<S> {
    pub(crate) name: &'static str,
    pub(crate) kind: Kind,
    pub(crate) help: &'static str,
    pub(crate) samples: S,
}

pub(super) const fn metric<S>(name: &'static str, kind: Kind, help: &'static str, samples: S) -> Metric<S> {
    Metric { name, kind, help, samples }
}
