//! `tier-guest`: tests tiering inside a guest with two tiers of memory, and has the programs that run there.
//!
//! ```text
//! tier-guest gups KIND MIB                     the program with known heat
//!                                              KIND: contiguous, scattered, moving
//! tier-guest settle KIND MIB                   waits until the agent has moved what is hot to the fast tier
//! tier-guest sparse MIB                        a program that khugepaged makes huge pages of, one page in each hot
//! tier-guest kmeans|memcached|compiler MIB      a program that touches most of its memory rarely
//! tier-guest check MIB                         the promises of `ballast-tier`; exit code 1 if one fails
//! ```
//!
//! Before: root starts it in a guest with two tiers (`scripts/tier-suite.sh`). After: stdout has lines, each behind
//! `tier-guest: `. Threads: one; the judged program is a process.

mod check;
mod clusters;
mod compiler;
mod gups;
mod heat;
mod judge;
mod load;
mod sparse;

use std::process::ExitCode;

use anyhow::{Context, Result};

use heat::Kind;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let result = match words.as_slice() {
        ["gups", kind, mib] => parse(kind, mib).and_then(|(kind, mib)| gups::run(kind, mib)),
        ["settle", kind, mib] => parse(kind, mib).and_then(|(kind, mib)| check::settle(kind, mib)),
        [name @ ("kmeans" | "memcached" | "compiler"), mib] => {
            mib.parse().context("MiB").and_then(|mib| load::run(name, mib))
        }
        ["sparse", mib] => mib.parse().context("MiB").and_then(sparse::run),
        ["check", mib] => mib.parse().context("MiB").and_then(check::run),
        _ => Err(anyhow::anyhow!(
            "usage: tier-guest gups KIND MIB | settle KIND MIB | sparse MIB | kmeans|memcached|compiler MIB | check MIB"
        )),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("tier-guest failed: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn parse(kind: &str, mib: &str) -> Result<(Kind, usize)> {
    Ok((Kind::parse(kind).with_context(|| format!("no kind {kind}"))?, mib.parse().context("MiB")?))
}
