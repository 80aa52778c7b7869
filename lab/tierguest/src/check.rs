//! Checks the promises of `ballast-tier` in a guest with two tiers. Each promise is a step with a name.
//!
//! Before: `scripts/tier-suite.sh` booted the guest. After: the output has a line for each step. The first step that
//! fails ends the check. A wait ends when its condition is true, and fails after a limit.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use ballast_tier::kernel_files::Files;
use ballast_tier::{EPOCH, Settings, Tierer, Tiers};

use crate::heat::Kind;
use crate::judge::Program;

const BALANCING: &str = "/proc/sys/kernel/numa_balancing";
const KDAMONDS: &str = "/sys/kernel/mm/damon/admin/kdamonds/nr_kdamonds";
/// The kernel's own thread of DAMON: while it runs, there can be no other.
const STAT: &str = "/sys/module/damon_stat/parameters/enabled";
/// Limit for a wait, long enough for an emulated guest on a busy machine.
const LIMIT: Duration = Duration::from_secs(150);

pub fn run(mib: usize) -> Result<()> {
    let files = Files::default();
    let tiers = two_tiers(&files)?;
    if files.optional(STAT)?.is_some_and(|stat| stat == "Y") {
        files.write(STAT, "N")?;
    }
    files.write(KDAMONDS, Settings::default().choice.most)?;
    files.write(BALANCING, 2)?;
    stands_aside(&tiers, mib)?;
    takes_over(&files)?;
    ensure!(files.text(BALANCING)? == "2", "NUMA balancing is not as before");
    files.write(BALANCING, 0)?;
    heat_moves_to_the_fast_tier(&files, &tiers, mib)?;
    says_no(mib)?;
    // The number cannot be changed while a thread is on.
    files.write(KDAMONDS, 0)?;
    println!("tier-guest: all steps passed");
    Ok(())
}

/// Runs a program until another process, the agent, has given it as much fast memory as an oracle would, less two
/// points. Then waits for a line of input.
pub fn settle(kind: Kind, mib: usize) -> Result<()> {
    let files = Files::default();
    let tiers = Tiers::detect(&files)?;
    ensure!(tiers.list.len() == 2, "{tiers:?}");
    let program = Program::start(kind, mib, &[])?;
    let (began, first) = (Instant::now(), program.hit(&tiers)?);
    loop {
        let (hit, oracle) = (program.hit(&tiers)?, program.oracle(&files, &tiers)?);
        if hit >= oracle - 0.02 {
            let [first, hit, oracle] = [first, hit, oracle].map(|share| share * 100.0);
            let seconds = began.elapsed().as_secs_f64();
            println!("tier-guest: {first:.1} % at first, {hit:.1} % after {seconds:.1} s; oracle {oracle:.1} %");
            println!("BALLAST-SAYS settled");
            std::io::stdin().read_line(&mut String::new())?;
            return Ok(());
        }
        ensure!(began.elapsed() < LIMIT, "nobody moved it: {hit} of {oracle}, at first {first}");
        std::thread::sleep(EPOCH);
    }
}

fn step(name: &str) {
    println!("tier-guest: {name}");
}

fn two_tiers(files: &Files) -> Result<Tiers> {
    step("the kernel made two tiers from HMAT");
    let tiers = Tiers::detect(files)?;
    let nodes: Vec<&[u32]> = tiers.list.iter().map(|tier| tier.nodes.as_slice()).collect();
    ensure!(nodes == [&[0], &[1]], "{tiers:?}");
    ensure!(tiers.list[0].read_latency_ns < tiers.list[1].read_latency_ns, "{tiers:?}");
    Ok(tiers)
}

/// Runs epochs until `so` is true. Fails after `LIMIT`.
fn until(tierer: &mut Tierer, what: &str, mut so: impl FnMut(&Tierer) -> Result<bool>) -> Result<()> {
    let began = Instant::now();
    loop {
        tierer.step().with_context(|| format!("An epoch, until {what}"))?;
        if so(tierer)? {
            return Ok(());
        }
        if began.elapsed() > LIMIT {
            bail!("waited too long until {what}: {:?}", tierer.status());
        }
        std::thread::sleep(EPOCH / 2);
    }
}

fn stands_aside(tiers: &Tiers, mib: usize) -> Result<()> {
    step("while NUMA balancing promotes, ballast-tier moves nothing, and the status has the reason");
    let program = Program::start(Kind::Contiguous, mib, &[])?;
    let mut tierer = Tierer::open(Settings::default())?;
    until(&mut tierer, "four epochs are over", |tierer| Ok(tierer.status().epochs >= 4))?;
    let status = tierer.status();
    ensure!(status.aside.as_deref().is_some_and(|why| why.contains("numa_balancing is 2")), "{status:?}");
    ensure!(status.programs == 1 && status.moves == Default::default(), "{status:?}");
    program.hit(tiers)?;
    Ok(())
}

fn takes_over(files: &Files) -> Result<()> {
    step("with take_over, it disables balancing, and enables it again at its end");
    let tierer = Tierer::open(Settings { take_over: true, ..Settings::default() })?;
    ensure!(files.text(BALANCING)? == "0", "NUMA balancing is not off");
    drop(tierer);
    Ok(())
}

fn heat_moves_to_the_fast_tier(files: &Files, tiers: &Tiers, mib: usize) -> Result<()> {
    step("the hot part moves to the fast tier, also after it has changed");
    let mut program = Program::start(Kind::Moving, mib, &[])?;
    let first = program.hit(tiers)?;
    let mut tierer = Tierer::open(Settings::default())?;
    for phase in 0..2 {
        program.set_phase(phase)?;
        until(&mut tierer, "the hot set is fast", |_| Ok(program.hit(tiers)? > 0.9 * program.oracle(files, tiers)?))?;
        println!(
            "tier-guest: phase {phase}: {:.1} % of accesses, of {:.1} %",
            program.hit(tiers)? * 100.0,
            program.oracle(files, tiers)? * 100.0
        );
    }
    let status = tierer.status();
    ensure!(first < 0.5, "the hot part was on the fast tier from the start: {first}");
    ensure!(status.samples > 0 && status.programs == 1, "{status:?}");
    ensure!(status.moves.promoted > 0 && status.moves.demoted > 0, "{status:?}");
    ensure!(status.tiers.len() == 2 && status.tiers[1].size_bytes > status.tiers[0].free_bytes, "{status:?}");
    println!("tier-guest: {status:?}");
    Ok(())
}

fn says_no(mib: usize) -> Result<()> {
    step("a program that opts out, and a small one, are not managed");
    let _program = Program::start(Kind::Contiguous, mib, &[("BALLAST_TIERING", "off")])?;
    let _small = Program::start(Kind::Contiguous, 16, &[])?;
    let mut tierer = Tierer::open(Settings::default())?;
    tierer.step()?;
    ensure!(tierer.status().programs == 0, "{:?}", tierer.status());
    Ok(())
}
