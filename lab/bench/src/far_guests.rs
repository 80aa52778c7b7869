//! A guest touches pages of each kind of far memory, in turns. Ballast's are in RAM, on a disk, in a cluster, and in a
//! cluster under TLS. The kernel's are in zram and in a swap file.
//!
//! Before: `far` has a cluster. After: the row has percentiles of single touches in random order, and the time per page
//! of touches in order. Units: microseconds.
//! Promise: before the first touch, all pages of a guest are at the place of its row. Each side has a daemon or a swap
//! device of its own while it is measured. The kernel swaps in single pages for random order, and clusters of eight,
//! its default, for touches in order.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use ballast_testvm::valkey::Valkey;

use crate::cgroup;
use crate::disk::{self, vmstat};
use crate::guard::Guard;
use crate::order::{Data, Pace};
use crate::report::Row;
use crate::rig::Bench;
use crate::setting::Setting;
use crate::stats::Summary;
use crate::subject::{Subject, Way, in_turn, out, touch};
use crate::swaps::PAGE_CLUSTER;

/// Limit for the time until all pages of a guest are at their place.
const TIMEOUT: Duration = Duration::from_secs(120);
const PINNED: Pace = Pace { pinned: true, ..Pace::ALL };

/// The place of a guest's far pages.
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

    /// Returns the settings of its daemon, or `None` if the place is the kernel's.
    fn settings(self, valkey: &Valkey, dir: &Path) -> Option<String> {
        let remote = |node: &str| format!("[remote]\nnodes = [{node:?}]\nbudget = \"1G\"\nafter_s = 1\n");
        let file = |name: &str| valkey.dir().join(name);
        match self {
            Self::Ram => Some(String::new()),
            Self::File => Some(disk::settings(dir)),
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

#[derive(Default)]
struct Series {
    touched: Vec<Summary>,
    in_order: Vec<f64>,
}

/// The results of the guests' touches.
#[derive(Default)]
pub(crate) struct Guests {
    series: [Series; 6],
}

impl Guests {
    /// Run one round of all sides. Round 0 is a warm-up and does not count.
    pub(crate) fn round(
        &mut self,
        bench: &mut Bench,
        valkey: &Valkey,
        (data, count): (Data, u64),
        round: u64,
        row: &mut Row,
    ) -> Result<()> {
        for place in in_turn(Place::ALL, round) {
            let mut of = Series::default();
            match place.settings(valkey, &bench.options.dir) {
                Some(settings) => bench.with_settings(&settings, |bench| {
                    measure(bench, place, Way::Ballast, (data, count), round, &mut of)
                })?,
                None => match kernel(bench, place, (data, count), round, &mut of) {
                    Err(error) if format!("{error:#}").contains("WRONG DATA") => return Err(error),
                    Err(error) => row.because(&format!("{}: {error:#}", place.name())),
                    Ok(()) => {}
                },
            }
            if round > 0 {
                let sum = &mut self.series[place as usize];
                sum.touched.append(&mut of.touched);
                sum.in_order.append(&mut of.in_order);
            }
        }
        Ok(())
    }

    /// Add the figures to the row. `bare_us` is the time of a bare connection per page, by round.
    pub(crate) fn figures(&self, row: &mut Row, bare_us: &[f64]) {
        for (place, series) in Place::ALL.iter().zip(&self.series) {
            let of = |figure: fn(&Summary) -> f64| series.touched.iter().map(figure).collect::<Vec<_>>();
            row.figure(&format!("{}_restore_us_p50", place.name()), &of(|s| s.p50_us));
            row.figure(&format!("{}_restore_us_p99", place.name()), &of(|s| s.p99_us));
            row.figure(&format!("{}_in_order_us_per_page", place.name()), &series.in_order);
        }
        let p50 = |place: Place| self.series[place as usize].touched.iter().map(|s| s.p50_us).collect::<Vec<_>>();
        row.ratio("ratio_far_restore", &p50(Place::Far), bare_us);
        row.ratio("ratio_far_tls_restore", &p50(Place::FarTls), &p50(Place::Far));
        row.ratio("ratio_far_swapfile", &p50(Place::Far), &p50(Place::SwapFile));
    }
}

/// Measure a place of the kernel, with a swap device that only this side uses.
fn kernel(bench: &mut Bench, place: Place, of: (Data, u64), round: u64, series: &mut Series) -> Result<()> {
    let mut guard = Guard::start()?;
    match place {
        Place::Zram => guard.swap()?,
        _ => guard.swap_file(bench.options.dir.clone(), disk::SWAP)?,
    };
    measure(bench, place, Way::Kernel, of, round, series)
}

fn measure(
    bench: &mut Bench,
    place: Place,
    way: Way,
    (data, count): (Data, u64),
    round: u64,
    series: &mut Series,
) -> Result<()> {
    let mut subject = Subject::new(bench, way, count, data)?;
    go(bench, &mut subject, place)?;
    series.touched.push(touch(&mut [&mut subject], round, PINNED)?[0].summary);
    go(bench, &mut subject, place)?;
    let _eight = if way == Way::Kernel { Setting::change(PAGE_CLUSTER, "3")? } else { None };
    let touched = touch(&mut [&mut subject], round, Pace { in_order: true, ..PINNED })?[0];
    series.in_order.push(touched.wall_us / touched.summary.count as f64);
    subject.verify()
}

/// Reclaim all pages, and wait until they are at their place.
fn go(bench: &mut Bench, subject: &mut Subject, place: Place) -> Result<()> {
    let writing = vmstat("nr_writeback")?;
    out(bench, &mut [&mut *subject])?;
    let begun = Instant::now();
    loop {
        let is_there = match place {
            Place::Ram | Place::Zram => true,
            Place::SwapFile => vmstat("nr_writeback")? <= writing,
            Place::File | Place::Far | Place::FarTls => {
                let stat = bench.daemon.api().vm(subject.name())?;
                let there = if place == Place::File { stat.far_file_bytes } else { stat.far_remote_bytes };
                stat.far_bytes > 0 && there >= stat.far_bytes
            }
        };
        if is_there {
            break;
        }
        ensure!(begun.elapsed() < TIMEOUT, "after {TIMEOUT:?} not all pages are in {}", place.name());
        std::thread::sleep(Duration::from_millis(20));
    }
    // Pages that were written to a swap file stay in the swap cache until the cgroup is emptied.
    if let Some(cgroup) = subject.cgroup() {
        cgroup::empty(cgroup);
    }
    Ok(())
}
