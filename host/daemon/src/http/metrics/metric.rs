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

/// Names and values.
pub(crate) type Labels = Vec<(&'static str, String)>;
/// One sample: labels beyond `domain`, and the value.
pub(crate) type Sample = (Labels, f64);

/// The samples of a metric of the host, of a node of the pool, of a VM, or of a VM's heat while it is tracked. Those of
/// a node also get the labels `node` and `pages`; those of a VM and its heat, `domain`.
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
