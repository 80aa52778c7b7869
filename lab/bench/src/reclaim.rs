//! The rate at which cold pages leave DRAM.
//!
//! Before: guests hold all their data. After: rows have pages per second from the order to the last punch.
//! Units: pages per second; microseconds of CPU per page, of all threads that take part.
//! Promise: Ballast's rate counts everything but the fixed wait in quarantine; the rate with the wait is reported, too.

use anyhow::Result;

use crate::order::{Data, GuestKind, Out, Pace};
use crate::qemu;
use crate::report::Row;
use crate::rig::Bench;
use crate::subject::{Subject, Way, in_turn, out, touch};

const WAYS: [Way; 3] = [Way::Ballast, Way::Kernel, Way::Plain];

/// Pages of a guest of 2 GiB: the scan cost of each reclaimed page must not grow with the guest.
const LARGE: u64 = 524_288;

/// Pages per second with the wait.
fn rate_with_wait(out: &Out) -> f64 {
    out.pages as f64 * 1e6 / out.wall_us
}

/// Pages per second without the time in which all pages were in quarantine and none was due. (Only Ballast waits.)
pub(crate) fn rate(out: &Out) -> f64 {
    out.pages as f64 * 1e6 / (out.wall_us - out.waited_us).max(1.0)
}

#[derive(Default)]
struct Series {
    outs: Vec<Out>,
}

impl Series {
    fn of(&self, figure: impl Fn(&Out) -> f64) -> Vec<f64> {
        self.outs.iter().map(figure).collect()
    }

    fn cpu(&self) -> Vec<f64> {
        self.of(|out| out.cpu_us / out.pages as f64)
    }
}

pub(crate) fn run(bench: &mut Bench, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    let (pages, repetitions) = match (bench.options.quick, bench.options.guest) {
        (true, GuestKind::Qemu) => (2048, 2),
        (true, _) => (8192, 2),
        (false, GuestKind::Native) => (32_768, 6),
        (false, GuestKind::Kvm) => (16_384, 4),
        (false, GuestKind::Qemu) => (8192, 4),
    };
    let mut rows: Vec<_> = bench.options.data().into_iter().map(|data| (data, pages, repetitions)).collect();
    if !bench.options.quick && bench.options.is(GuestKind::Native) {
        rows.push((Data::HalfCompressible, LARGE, 3));
    }
    for (data, pages, repetitions) in rows {
        let title = if pages == LARGE { "half_compressible, a large guest" } else { data.name() };
        let mut row = bench.row(title);
        row.fact("data", data.name());
        row.fact("pages", pages);
        row.fact("repetitions", repetitions);
        let qemu = bench.options.is(GuestKind::Qemu);
        if qemu {
            qemu::facts(&mut row);
        }
        let ways = if qemu { &WAYS[..2] } else { &WAYS };
        let mut subjects = bench.subjects(ways, pages, data, &mut row)?;
        let mut series: [Series; 3] = Default::default();
        for round in bench.progress.over("round", 0..=repetitions) {
            for subject in in_turn(&mut subjects, round) {
                let out = out(bench, &mut [&mut *subject])?;
                if round > 0 {
                    series[subject.way as usize].outs.push(out);
                }
                touch(&mut [subject], round, Pace::ALL)?;
            }
        }
        subjects.iter_mut().try_for_each(Subject::verify)?;
        let [ballast, kernel, plain] = &series;
        let (ours, theirs) = (ballast.of(rate), kernel.of(rate));
        row.figure("reclaim_pages_per_s", &ours);
        row.figure("reclaim_with_wait_pages_per_s", &ballast.of(rate_with_wait));
        row.figure("kernel_pageout_pages_per_s", &theirs);
        row.figure("plain_pageout_pages_per_s", &plain.of(rate));
        row.figure("reclaim_first_page_us", &ballast.of(|out| out.first_us));
        row.figure("reclaim_quarantine_us", &ballast.of(|out| out.waited_us));
        row.ratio("ratio_reclaim", &ours, &theirs);
        row.ratio("ratio_reclaim_with_wait", &ballast.of(rate_with_wait), &theirs);
        row.ratio("ratio_reclaim_plain", &ours, &plain.of(rate));
        row.figure("reclaim_cpu_us_per_page", &ballast.cpu());
        row.figure("kernel_pageout_cpu_us_per_page", &kernel.cpu());
        row.figure("plain_pageout_cpu_us_per_page", &plain.cpu());
        row.ratio("ratio_reclaim_cpu", &ballast.cpu(), &kernel.cpu());
        each(row)?;
    }
    Ok(())
}
