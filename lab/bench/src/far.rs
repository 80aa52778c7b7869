//! A guest touches pages of each kind of far memory, in turns. Ballast's are in RAM, on a disk, in a cluster, and in a
//! cluster under TLS. The kernel's are in zram and in a swap file.
//!
//! Before: a server is unpacked (`scripts/valkey.sh`), of which six run on loopback, three as replicas. After: a row
//! has percentiles of single touches in random order, and the time per page of touches in order.
//! Units: microseconds.
//! Promise: before the first touch, all pages of a guest are at the place of its row. Each side has a daemon or a swap
//! device of its own while it is measured. The kernel swaps in single pages for random order, and clusters of eight,
//! its default, for touches in order.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use ballast_base::{Bytes, GIB};
use ballast_testhost::until;
use ballast_testkit::swap::Swap;
use ballast_testvm::valkey::{Layout, Valkey, valkey_missing};

use crate::cgroup;
use crate::order::{Data, Pace};
use crate::report::{Figures, Row};
use crate::rig::Bench;
use crate::setting::Setting;
use crate::subject::{Subject, Way, in_turn, out, touch};

/// Longest time until all pages of a guest are at their place.
const TIMEOUT: Duration = Duration::from_secs(120);
const PINNED: Pace = Pace { pinned: true, ..Pace::ALL };

const SWAP: Bytes = Bytes(GIB);
const PAGE_CLUSTER: &str = "/proc/sys/vm/page-cluster";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Ram,
    File,
    Far,
    FarTls,
    Zram,
    SwapFile,
}

impl Place {
    const ALL: [Self; 6] = [Self::Ram, Self::File, Self::Far, Self::FarTls, Self::Zram, Self::SwapFile];

    fn name(self) -> &'static str {
        match self {
            Self::Ram => "ram",
            Self::File => "file",
            Self::Far => "far",
            Self::FarTls => "far_tls",
            Self::Zram => "zram",
            Self::SwapFile => "swapfile",
        }
    }

    fn is_kernel(self) -> bool {
        matches!(self, Self::Zram | Self::SwapFile)
    }

    fn settings(self, valkey: &Valkey, dir: &Path) -> Option<String> {
        let remote = |node: &str| format!("[remote]\nnodes = [{node:?}]\nbudget = \"1G\"\nafter_s = 1\n");
        let file = |name: &str| valkey.dir().join(name);
        match self {
            Self::Ram => Some(String::new()),
            Self::File => Some(format!("[spill]\ndir = {:?}\nbudget = \"1G\"\nafter_s = 1\n", dir.to_string_lossy())),
            Self::Far => Some(remote(&valkey.addr(0))),
            Self::FarTls => Some(format!(
                "{}[remote.tls]\nca_file = {:?}\ncert_file = {:?}\nkey_file = {:?}\n",
                remote(&valkey.tls_addr(0)),
                file("ca.pem"),
                file("client.pem"),
                file("client.key")
            )),
            Self::Zram | Self::SwapFile => None,
        }
    }
}

pub(crate) fn run(bench: &mut Bench, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    if let Some(why) = valkey_missing() {
        bail!("{why}");
    }
    let valkey = Valkey::start(Layout { maxmemory: Bytes(GIB), tls: true, ..Layout::default() });
    let valkey = valkey.context("Starting a cluster")?;
    let (pages, rounds) = if bench.options.quick { (4096, 2) } else { (16_384, 5) };
    for data in Data::BOTH.into_iter().take(if bench.options.quick { 1 } else { usize::MAX }) {
        let mut row = bench.row(data.name());
        row.fact("data", data.name());
        row.fact("pages", pages);
        row.fact("repetitions", rounds);
        let mut figures = Figures::default();
        for round in bench.progress.over("round", 0..=rounds) {
            for place in in_turn(Place::ALL, round) {
                let result = match place.settings(&valkey, &bench.options.dir) {
                    Some(settings) => bench.with_settings(&settings, |bench| {
                        measure(bench, place, Way::Ballast, (data, pages), round, &mut figures)
                    }),
                    None => kernel(bench, place, (data, pages), round, &mut figures),
                };
                match result {
                    Err(error) if place.is_kernel() && !format!("{error:#}").contains("WRONG DATA") => {
                        row.because(&format!("{}: {error:#}", place.name()));
                    }
                    result => result?,
                }
            }
            if round == 0 {
                figures = Figures::default();
            }
        }
        // A wrong byte would have ended the bench.
        row.figure("far_wrong_bytes", &[0.0]);
        for place in Place::ALL {
            for end in ["restore_us_p50", "restore_us_p99", "in_order_us_per_page"] {
                let key = format!("{}_{end}", place.name());
                row.figure(&key, figures.of(&key));
            }
        }
        let p50 = |name: &str| figures.of(&format!("{name}_restore_us_p50"));
        row.ratio("ratio_far_tls_restore", p50("far_tls"), p50("far"));
        row.ratio("ratio_far_swapfile", p50("far"), p50("swapfile"));
        each(row)?;
    }
    Ok(())
}

/// Measures a place of the kernel, with a swap device for this side alone.
fn kernel(bench: &mut Bench, place: Place, of: (Data, u64), round: u64, figures: &mut Figures) -> Result<()> {
    let swap = match place {
        Place::Zram => Swap::only(&SWAP.0.to_string()),
        _ => Swap::only_file(&bench.options.dir, SWAP.0),
    };
    let _swap = swap.map_err(|why| anyhow!("{why}"))?;
    measure(bench, place, Way::Kernel, of, round, figures)
}

fn measure(
    bench: &mut Bench,
    place: Place,
    way: Way,
    (data, count): (Data, u64),
    round: u64,
    figures: &mut Figures,
) -> Result<()> {
    let mut subject = Subject::new(bench, way, count, data)?;
    let guests = std::slice::from_mut(&mut subject);
    go(bench, guests, place)?;
    let in_random = touch(guests, round, PINNED)?[0].summary;
    go(bench, guests, place)?;
    let _eight = if way == Way::Kernel { Setting::change(PAGE_CLUSTER, "3")? } else { None };
    let in_order = touch(guests, round, Pace { in_order: true, ..PINNED })?[0];
    for (end, value) in [
        ("restore_us_p50", in_random.p50_us),
        ("restore_us_p99", in_random.p99_us),
        ("in_order_us_per_page", in_order.wall_us / in_order.summary.count as f64),
    ] {
        figures.add(&format!("{}_{end}", place.name()), value);
    }
    subject.verify()
}

/// Reclaims all pages, and waits until they are at their place.
fn go(bench: &mut Bench, guests: &mut [Subject], place: Place) -> Result<()> {
    let writing = vmstat("nr_writeback")?;
    out(bench, guests)?;
    let subject = &guests[0];
    until(&format!("not all pages are in {}", place.name()), TIMEOUT, || {
        let is_there = match place {
            Place::Ram | Place::Zram => true,
            Place::SwapFile => vmstat("nr_writeback")? <= writing,
            Place::File | Place::Far | Place::FarTls => {
                let stat = bench.daemon.api().vm(subject.name())?;
                let there = if place == Place::File { stat.far_file_bytes } else { stat.far_remote_bytes };
                stat.far_bytes > 0 && there >= stat.far_bytes
            }
        };
        Ok(is_there.then_some(()))
    })?;
    // Pages that were written to a swap file stay in the swap cache until the cgroup is emptied.
    if let Some(cgroup) = subject.cgroup() {
        cgroup::empty(cgroup);
    }
    Ok(())
}

fn vmstat(name: &str) -> Result<u64> {
    // Without the refresh, the counts of single CPUs are missing.
    std::fs::write("/proc/sys/vm/stat_refresh", "1").context("Writing /proc/sys/vm/stat_refresh")?;
    let text = std::fs::read_to_string("/proc/vmstat").context("Reading /proc/vmstat")?;
    let pages = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok());
    pages.with_context(|| format!("/proc/vmstat has no {name}"))
}
