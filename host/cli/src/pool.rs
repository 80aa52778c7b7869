//! `ballast pool`: memory that is reserved for VMs.
//!
//! Before: an operator has a host. After: memory is reserved, lent or shown.
//! Promise: each change states the resulting amount, so it may be repeated. Failures are printed on standard error, and
//! the exit code is 1 if nothing was done.

use std::fmt::Write;
use std::str::FromStr;

use anyhow::Result;
use ballast_api::{Client, LendRequest, PoolPages, PoolRequest, PoolStat};
use ballast_base::{Bytes, Invalid};
use clap::Subcommand;

use crate::show;

#[derive(Debug, Subcommand)]
pub enum PoolCommand {
    /// Show it: what each node has, a map of its files, and which VMs have memory of it
    Show,
    /// Reserve memory of the host for VMs, up to this much in all
    Reserve {
        /// A size with its unit, such as 64G, or a part of the host's memory, such as 80%
        #[arg(value_name = "SIZE|PERCENT%")]
        size: Part,
        /// For this node alone, instead of as much of each
        #[arg(long)]
        node: Option<u32>,
        /// Size of the pool's files, of which a VM has up to 32 for itself; fixed once there is a pool
        #[arg(long, value_name = "BYTES")]
        file_size: Option<Bytes>,
        /// Promise VMs on demand up to this part of what the pool has for them, as far as they can have the rest far
        #[arg(long, value_name = "PERCENT%")]
        overcommit: Option<Percent>,
        /// Pages of 2 MiB, or beside them, of 1 GiB, in which a VM is not paged
        #[arg(long, value_name = "2M|1G", default_value = "2M")]
        pages: PoolPages,
    },
    /// Lend unused memory of the pool to the host, this much in all, or only while the host is short
    Lend {
        /// The size with its unit
        size: Bytes,
        /// For this node alone, instead of as much of each
        #[arg(long, conflicts_with = "when_short")]
        node: Option<u32>,
        /// Not now, but up to this much while the host is short of memory
        #[arg(long)]
        when_short: bool,
        /// The pages to lend
        #[arg(long, value_name = "2M|1G", default_value = "2M")]
        pages: PoolPages,
    },
    /// Take back all that is lent
    TakeBack {
        /// For this node alone
        #[arg(long)]
        node: Option<u32>,
        /// The pages to take back
        #[arg(long, value_name = "2M|1G", default_value = "2M")]
        pages: PoolPages,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    Bytes(Bytes),
    Percent(u8),
}

impl FromStr for Part {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        match text.strip_suffix('%').map(|number| number.parse()) {
            Some(Ok(percent @ 1..=100)) => Ok(Self::Percent(percent)),
            Some(_) => Err("write 1% to 100%".into()),
            None => text
                .parse()
                .map(Self::Bytes)
                .map_err(|error: ballast_base::units::ParseBytesError| error.to_string().into()),
        }
    }
}

/// A percentage of 100 or more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Percent(u32);

impl FromStr for Percent {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        let number = text.strip_suffix('%').and_then(|number| number.parse().ok());
        number.filter(|percent| (100..=1000).contains(percent)).map(Self).ok_or_else(|| "write 100% to 1000%".into())
    }
}

pub fn run(client: &Client, command: &PoolCommand, json: bool) -> Result<()> {
    let (pool, changed) = match command {
        PoolCommand::Show => (client.pool()?, None),
        PoolCommand::Reserve { size, node, file_size, overcommit, pages } => {
            let (bytes, percent) = match size {
                Part::Bytes(bytes) => (Some(bytes.0), None),
                Part::Percent(percent) => (None, Some(*percent)),
            };
            let file_bytes = file_size.map(|size| size.0);
            let overcommit_percent = overcommit.map(|Percent(percent)| percent);
            let request = PoolRequest { bytes, percent, node: *node, file_bytes, overcommit_percent, pages: *pages };
            (client.reserve_pool(&request)?, Some(*pages))
        }
        PoolCommand::Lend { size, node, when_short, pages } => {
            let request = LendRequest { bytes: size.0, node: *node, when_short: *when_short, pages: *pages };
            (client.lend_pool(&request)?, Some(*pages))
        }
        PoolCommand::TakeBack { node, pages } => {
            let request = LendRequest { node: *node, pages: *pages, ..LendRequest::default() };
            (client.lend_pool(&request)?, Some(*pages))
        }
    };
    let parts = [(PoolPages::Huge, Some(&pool)), (PoolPages::Gib, pool.gib.as_deref())];
    let said = parts.into_iter().filter(|(pages, _)| changed.is_none_or(|changed| changed == *pages));
    for note in said.filter_map(|(_, part)| part).flat_map(|part| &part.notes) {
        show::say(note);
    }
    show::answer(json, &pool, describe)
}

fn describe(pool: &PoolStat) -> String {
    let parts = [("2 MiB", Some(pool)), ("1 GiB", pool.gib.as_deref())];
    let is_there = |(pages, part): (&'static str, Option<_>)| {
        part.filter(|part: &&PoolStat| !part.nodes.is_empty()).map(|part| (pages, part))
    };
    let parts: Vec<_> = parts.into_iter().filter_map(is_there).collect();
    let shown = parts.iter().map(|(pages, part)| {
        // A pool that has only pages of 2 MiB needs no heading.
        let is_alone = parts.len() == 1 && *pages == "2 MiB";
        let heading = if is_alone { String::new() } else { format!("pages of {pages}:\n") };
        heading + &describe_part(part)
    });
    let text = shown.collect::<Vec<_>>().join("\n");
    if text.is_empty() { "nothing is reserved for VMs\n".into() } else { text }
}

fn describe_part(pool: &PoolStat) -> String {
    let headers = ["NODE", ">RESERVED", ">READY", ">IN WHOLE GIB", ">USED", ">FENCED", ">TO ZERO", ">LENT", ">FAILED"];
    let mut table = show::table(&headers);
    for node in &pool.nodes {
        let sizes = [
            node.reserved_bytes,
            node.ready_bytes,
            node.ready_gib_bytes,
            node.used_bytes,
            node.fenced_bytes,
            node.dirty_bytes,
            node.lent_bytes,
            node.failed_bytes,
        ];
        table.add_row(std::iter::once(node.numa.to_string()).chain(sizes.map(show::size)));
    }
    let mut text = show::lines(&table);
    for node in &pool.nodes {
        let file = show::size(pool.file_bytes);
        let _ = writeln!(
            text,
            "\nnode {}, {file} a letter (U u a VM's, - free, z to be zeroed, l lent, . not reserved, F failed):",
            node.numa
        );
        for line in node.map.as_bytes().chunks(64) {
            let _ = writeln!(text, "  {}", String::from_utf8_lossy(line));
        }
    }
    if !pool.vms.is_empty() {
        text.push('\n');
    }
    for vm in &pool.vms {
        let pieces = if vm.extents == 1 { "piece" } else { "pieces" };
        let size = show::size(vm.bytes);
        let _ = match vm.touched_bytes {
            Some(touched) => writeln!(text, "VM {}: {size} on demand, {} touched", vm.name, show::size(touched)),
            None => writeln!(text, "VM {}: {size} in {} {pieces}", vm.name, vm.extents),
        };
    }
    if pool.promised_bytes > 0 {
        let [promised, touched, aside] = [pool.promised_bytes, pool.touched_bytes, pool.aside_bytes].map(show::size);
        let _ = writeln!(text, "on demand: {promised} promised, {touched} touched, {aside} set aside");
        if pool.overcommit_percent > 100 {
            let (percent, has) = (pool.overcommit_percent, show::size(pool.for_demand_bytes));
            let _ = writeln!(text, "up to {percent} % of the {has} for it may be promised");
        }
    }
    if pool.waiting_bytes > 0 {
        let _ = writeln!(text, "{} cannot be zeroed yet: its pages are held", show::size(pool.waiting_bytes));
    }
    let _ = write!(text, "\nthe pool's own state: {}", show::size(pool.metadata_bytes));
    if pool.vmemmap_freed_bytes > 0 {
        let _ = write!(text, "; the kernel has freed {} of struct pages", show::size(pool.vmemmap_freed_bytes));
    }
    text.push('\n');
    if pool.lent_when_short_bytes > 0 {
        let most = show::size(pool.lent_when_short_bytes);
        let _ = writeln!(text, "up to {most} are lent while the host is short of memory");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_the_host_is_a_size_or_percents() {
        assert_eq!("80%".parse(), Ok(Part::Percent(80)));
        assert_eq!("4G".parse(), Ok(Part::Bytes(Bytes(4 << 30))));
        assert_eq!("150%".parse(), Ok(Percent(150)));
        for wrong in ["99%", "1001%", "150", "1.5", "%", "-100%"] {
            assert!(wrong.parse::<Percent>().is_err(), "{wrong}");
        }
        for wrong in ["0%", "101%", "-1%", "%", "80", "x%"] {
            assert!(wrong.parse::<Part>().is_err(), "{wrong}");
        }
    }
}
