//! The rate at which cold pages leave DRAM.
//!
//! Before: guests hold all their data. After: rows have pages per second from the order to the last punch.
//! Units: pages per second; microseconds of CPU per page, of all threads that take part.
//! Promise: Ballast's rate includes everything except the fixed wait in quarantine; the rate with the wait is reported,
//! too.

use anyhow::Result;

use crate::order::{Data, GuestKind, Out, Pace};
use crate::report::Row;
use crate::rig::Bench;
use crate::subject::{Way, out, touch};

const WAYS: [Way; 3] = [Way::Ballast, Way::Kernel, Way::Plain];

/// Pages of a guest of 2 GiB: the scan cost of each reclaimed page must not grow with the guest.
const LARGE: u64 = 524_288;

/// Pages per second without the time in which all pages were in quarantine and none was due. (Only Ballast waits.)
pub(crate) fn rate(out: &Out) -> f64 {
    out.pages as f64 * 1e6 / (out.wall_us - out.waited_us).max(1.0)
}

pub(crate) fn run(bench: &mut Bench, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    let (pages, repetitions) = match (bench.options.quick, bench.options.guest) {
        (true, _) => (8192, 2),
        (false, GuestKind::Native) => (32_768, 6),
        (false, _) => (16_384, 4),
    };
    let mut rows: Vec<_> = Data::BOTH.into_iter().map(|data| (data, pages, repetitions)).collect();
    if !bench.options.quick && bench.options.is(GuestKind::Native) {
        rows.push((Data::HalfCompressible, LARGE, 3));
    }
    for (data, pages, repetitions) in rows {
        let title = if pages == LARGE { "half_compressible, a large guest" } else { data.name() };
        let mut row = bench.row(title);
        row.fact("data", data.name());
        row.fact("pages", pages);
        row.fact("repetitions", repetitions);
        let mut sides = bench.sides(&WAYS, &[pages], data, &mut row)?;
        bench.by_turns(&mut sides, repetitions, |bench, side, round| {
            let out = out(bench, &mut side.guests)?;
            side.figures.add("rate", rate(&out));
            side.figures.add("with_wait", out.pages as f64 * 1e6 / out.wall_us);
            side.figures.add("first_us", out.first_us);
            side.figures.add("waited_us", out.waited_us);
            side.figures.add("cpu_us", out.cpu_us / out.pages as f64);
            touch(&mut side.guests, round, Pace::ALL).map(drop)
        })?;
        let [ours, theirs, plain] = [0, 1, 2].map(|side| &sides[side].figures);
        row.figure("reclaim_pages_per_s", ours.of("rate"));
        row.figure("reclaim_with_wait_pages_per_s", ours.of("with_wait"));
        row.figure("kernel_pageout_pages_per_s", theirs.of("rate"));
        row.figure("plain_pageout_pages_per_s", plain.of("rate"));
        row.figure("reclaim_first_page_us", ours.of("first_us"));
        row.figure("reclaim_quarantine_us", ours.of("waited_us"));
        row.ratio("ratio_reclaim", ours.of("rate"), theirs.of("rate"));
        row.ratio("ratio_reclaim_with_wait", ours.of("with_wait"), theirs.of("rate"));
        row.ratio("ratio_reclaim_plain", ours.of("rate"), plain.of("rate"));
        row.figure("reclaim_cpu_us_per_page", ours.of("cpu_us"));
        row.figure("kernel_pageout_cpu_us_per_page", theirs.of("cpu_us"));
        row.figure("plain_pageout_cpu_us_per_page", plain.of("cpu_us"));
        row.ratio("ratio_reclaim_cpu", ours.of("cpu_us"), theirs.of("cpu_us"));
        each(row)?;
    }
    Ok(())
}
