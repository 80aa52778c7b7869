//! VMs whose RAM is in several files, or in pieces of them, under a real keeper and engine that are killed. Needs root
//! (userfaultfd). The VMs are this process, or a second one, with the client library.

mod common;

use std::io::{BufRead, BufReader};
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};

use ballast_api::VmStat;
use ballast_base::{Bytes, Hva};
use ballast_client::{Client, Ram as Described, RamExtent};
use ballast_sys::{Mapping, memfd};
use common::raw::Ram;
use common::{Daemon, until};

const PAGE: u64 = 4096;
const LIMIT: u64 = 2 << 20;

/// Pages of a file: file, first page, count.
type Piece<'a> = (&'a OwnedFd, u64, u64);

fn vm(daemon: &Daemon, name: &str, pieces: &[Piece<'_>]) -> (Client, Ram) {
    let mapped: Vec<_> = pieces.iter().map(|(fd, first, count)| (fd, first * PAGE, (count * PAGE) as usize)).collect();
    let map = Mapping::shared_pieces(&mapped).expect("map");
    let ram = Ram::mapped(pieces[0].0.try_clone().expect("dup"), map);
    ram.announce();
    ram.mark();
    let extent = |(fd, first, count): &Piece<'_>| {
        let fd = fd.try_clone().expect("dup");
        RamExtent { fd, offset: Bytes(first * PAGE), len: Bytes(count * PAGE) }
    };
    let hva = Hva(ram.map.addr() as u64);
    let described = Described { hva, extents: pieces.iter().map(extent).collect(), guest_address: Some(1 << 32) };
    let builder = Client::builder().name(name).socket(daemon.attach_socket()).limit(LIMIT).may_pin(false);
    (builder.ram(described).attach().expect("attach"), ram)
}

#[test]
fn vms_in_pieces_of_one_file_keep_limits_and_bytes_when_any_process_is_killed() {
    let Some(mut daemon) = Daemon::with_uffd("quarantine_ms = 5\n") else { return };
    let pool = memfd::create("pool", Bytes(8192 * PAGE)).expect("memfd");
    let own = memfd::create("own", Bytes(700 * PAGE)).expect("memfd");
    let rest = Mapping::shared(&pool, 7000 * PAGE, PAGE as usize).expect("map");
    rest.copy_in(0, &[7; 4096]);
    let first = vm(&daemon, "first", &[(&pool, 4000, 1000), (&own, 100, 500), (&pool, 100, 900), (&pool, 2000, 1)]);
    let second = vm(&daemon, "second", &[(&pool, 5000, 1000), (&pool, 1000, 1000)]);
    let resident = |daemon: &Daemon, name: &str| daemon.api.vm(name).map_or(u64::MAX, |vm| vm.resident_bytes);
    let squeezed = |daemon: &Daemon| {
        for name in ["first", "second"] {
            until("both are at their limits", || resident(daemon, name) <= LIMIT);
        }
    };
    squeezed(&daemon);
    assert_eq!(daemon.vm("first").size_bytes, 2401 * PAGE);
    for round in 0..9 {
        daemon.kill_any(round);
        for (_, ram) in [&first, &second] {
            let pages = ram.map.len() as u64 / PAGE;
            assert!((0..pages).all(|page| ram.is_marked(page)), "a byte was lost in round {round}");
        }
        until("both are attached again", || ["first", "second"].iter().all(|name| daemon.api.vm(name).is_ok()));
        squeezed(&daemon);
    }
    let mut bytes = [0; 4096];
    rest.copy_out(0, &mut bytes);
    assert_eq!(bytes, [7; 4096], "what is nobody's RAM was touched");
}

#[test]
fn all_ram_of_a_loaded_vm_is_registered_though_its_limit_exceeds_the_first_file() {
    let Some(daemon) = Daemon::with_uffd("") else { return };
    let mut program = Command::new(std::env::current_exe().expect("this program"));
    // After `--` all words are names of tests.
    program.args(["--ignored", "--nocapture", "--", "a_vm_that_is_to_be_loaded", "-incoming"]);
    program.env("BALLAST_TEST_SOCKET", daemon.attach_socket()).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = program.spawn().expect("run this program again");
    let mut says = BufReader::new(child.stdout.take().expect("piped")).lines();
    assert!(says.any(|line| line.is_ok_and(|line| line.contains("all of its RAM is there"))), "it ended");
    let is_whole = |vm: VmStat| (vm.size_bytes, vm.registered_bytes) == (5 * LIMIT, 5 * LIMIT);
    until("all of it is registered", || daemon.api.vm("loaded").is_ok_and(is_whole));
    drop(child.stdin.take());
    child.wait().expect("reap it");
}

#[test]
#[ignore = "run by the test of a VM that is to be loaded"]
fn a_vm_that_is_to_be_loaded() {
    let Ok(socket) = std::env::var("BALLAST_TEST_SOCKET") else { return };
    let [first, second] = [LIMIT, 4 * LIMIT].map(|bytes| Ram::new(bytes / PAGE));
    let described = |ram: &Ram| {
        ram.announce();
        let extent =
            RamExtent { fd: ram.fd.try_clone().expect("dup"), offset: Bytes(0), len: Bytes(ram.map.len() as u64) };
        Described { hva: Hva(ram.map.addr() as u64), extents: vec![extent], guest_address: None }
    };
    let builder = Client::builder().name("loaded").socket(socket).limit(2 * LIMIT).may_pin(false);
    let client = builder.ram(described(&first)).attach().expect("attach");
    client.add_ram(described(&second)).expect("more RAM");
    println!("all of its RAM is there");
    let _ = std::io::stdin().read_line(&mut String::new());
}
