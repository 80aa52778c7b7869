//! Hot bloat of a real program (HugeScope, section 2.3, figures 1 and 2): how much of a Redis looks hot by the accessed
//! bits of 2 MiB pages and of 4 KiB pages, when a tenth of its values is.
//!
//! Before: as for `bench real`; the kernel gives 2 MiB pages to who asks. After: one row. Units: percent of the memory
//! that the server has. Promise: the accessed bits are cleared before the requests and read after them
//! (`/proc/PID/clear_refs`, `smaps_rollup`), on the host, where the server runs natively; every value is checked.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ballast_realmem::keys::Sequence;
use ballast_realmem::load::Load;
use ballast_realmem::protocol::Protocol;
use ballast_realmem::server::{Memory, Server};

use super::running::{KEYS, KEYS_QUICK, needs};
use super::turn::SEED;
use crate::options::RealProgram as Program;
use crate::overhead::rollup_kib;
use crate::report::Row;
use crate::rig::Bench;

/// Time of the requests: each value of the tenth is named some ten times.
const TIME: Duration = Duration::from_secs(10);
const TIME_QUICK: Duration = Duration::from_secs(3);

pub(super) fn run(bench: &mut Bench, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    needs(&[Program::Redis])?;
    let mut row = bench.row("hot bloat: a tenth of the values is hot");
    let (keys, time) = if bench.options.quick { (KEYS_QUICK, TIME_QUICK) } else { (KEYS, TIME) };
    for (memory, end) in [(Memory::Private, "4_kib"), (Memory::Huge, "2_mib")] {
        let server = Server::start(Protocol::Redis, &memory, |_| Ok(()))?;
        let pid = server.pid();
        bench.guard.end_process(pid)?;
        let mut load = Load::begin(&server, Protocol::Redis, Sequence::Tenth, keys, SEED)?;
        let file = format!("/proc/{pid}/clear_refs");
        fs::write(&file, "1").with_context(|| format!("Writing to {file}"))?;
        let window = load.run(time)?;
        let [all, touched, huge] = rollup_kib(pid, ["Rss", "Referenced", "AnonHugePages"])?;
        row.figure(&format!("bloat_touched_pct_{end}"), &[touched / all * 100.0]);
        row.figure(&format!("bloat_huge_pct_{end}"), &[huge / all * 100.0]);
        row.figure(&format!("bloat_requests_per_s_{end}"), &[window.per_s]);
        ensure!(window.wrong + load.check_all()? == 0, "values are wrong");
    }
    each(row)
}
