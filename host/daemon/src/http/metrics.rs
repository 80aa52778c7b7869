//! The metrics page: Prometheus text format 0.0.4, written anew for each scrape.
//!
//! Before: the backend's figures. After: Prometheus reads the metrics of `table`.
//! Threads: one for each scrape. Units: base units only (bytes, seconds).
//! Promise: every metric has a help text, even if it has no sample now.

use std::fmt::{self, Write};

use ballast_api::VmHeat;
use ballast_base::text::shown;

use super::backend::{Backend, Histogram};

pub(super) mod metric;
pub(super) mod table;

use metric::{Labels, Metric, Samples};
use table::{EVENTS, FAULT_DURATION, HEAT, HOST, POOL, RESTORE_STAGE, VM};

pub(super) const MEDIA_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

pub(super) fn page(backend: &dyn Backend) -> String {
    let vms = backend.vms();
    let mut page = Page(String::with_capacity(4096 + 4096 * vms.len()));
    page.samples(HOST, &[(Vec::new(), &backend.host())]);
    let pool = backend.pool();
    let huge = pool.nodes.iter().map(|node| ("2M", node));
    let gib = pool.gib.iter().flat_map(|gib| &gib.nodes).map(|node| ("1G", node));
    let nodes = huge.chain(gib);
    let nodes = nodes.map(|(pages, node)| (vec![("node", node.numa.to_string()), ("pages", pages.to_owned())], node));
    page.samples(POOL, &nodes.collect::<Vec<_>>());
    let domain = |name: &String| vec![("domain", name.clone())];
    page.samples(VM, &vms.iter().map(|vm| (domain(&vm.name), vm)).collect::<Vec<_>>());
    let heats = vms.iter().filter_map(|vm| backend.heat(&vm.name, 0)).filter(|heat| heat.cycles > 0);
    let heats: Vec<VmHeat> = heats.filter(|heat| heat.is_tracked).collect();
    page.samples(HEAT, &heats.iter().map(|heat| (domain(&heat.name), heat)).collect::<Vec<_>>());
    page.head(&FAULT_DURATION);
    for vm in &vms {
        if let Some(histogram) = backend.fault_histogram(&vm.name) {
            page.histogram(FAULT_DURATION.name, &[("domain", vm.name.clone())], &histogram);
        }
    }
    page.head(&RESTORE_STAGE);
    for (stage, histogram) in backend.stage_histograms() {
        page.histogram(RESTORE_STAGE.name, &[("stage", stage.to_owned())], &histogram);
    }
    page.head(&EVENTS);
    for (kind, count) in backend.event_counts() {
        page.sample(EVENTS.name, &[("kind", kind)], count as f64);
    }
    page.0
}

struct Page(String);

impl Page {
    fn head<S>(&mut self, metric: &Metric<S>) {
        let Metric { name, kind, help, .. } = metric;
        self.put(format_args!("# HELP {name} {help}\n# TYPE {name} {kind}\n"));
    }

    /// The samples of each metric for each of `all`, which comes with labels for its samples.
    fn samples<T>(&mut self, metrics: &[Metric<Samples<T>>], all: &[(Labels, &T)]) {
        for metric in metrics {
            self.head(metric);
            for (labels, one) in all {
                for (own, value) in (metric.samples)(one) {
                    self.sample(metric.name, &[&labels[..], &own].concat(), value);
                }
            }
        }
    }

    fn sample(&mut self, name: &str, labels: &[(&str, String)], value: f64) {
        self.put(format_args!("{name}"));
        for (at, (label, text)) in labels.iter().enumerate() {
            self.put(format_args!("{}{label}=\"", if at == 0 { '{' } else { ',' }));
            for c in shown(text).chars() {
                match c {
                    '\\' => self.0.push_str("\\\\"),
                    '"' => self.0.push_str("\\\""),
                    c => self.0.push(c),
                }
            }
            self.0.push('"');
        }
        self.put(format_args!("{} {value}\n", if labels.is_empty() { "" } else { "}" }));
    }

    fn histogram(&mut self, name: &str, labels: &[(&'static str, String)], histogram: &Histogram) {
        let finite = histogram.buckets.iter().map(|(bound, count)| (bound.to_string(), *count));
        for (bound, count) in finite.chain([("+Inf".to_owned(), histogram.count)]) {
            self.sample(&format!("{name}_bucket"), &[labels, &[("le", bound)]].concat(), count as f64);
        }
        self.sample(&format!("{name}_sum"), labels, histogram.sum_s);
        self.sample(&format!("{name}_count"), labels, histogram.count as f64);
    }

    fn put(&mut self, text: fmt::Arguments<'_>) {
        let _ = self.0.write_fmt(text);
    }
}
