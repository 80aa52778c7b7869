//! A client that makes reads of its own socket take forever, beside another VM.
//!
//! Before: a client has both ends of its control socket. After: the other VM was reclaimed from, and the client's VM is
//! closed, while a thread of the engine hangs in the kernel.
//! Threads: those of the engine; one that receives as the client. Promise: no sleeps.

#[path = "pager/common/mod.rs"]
mod common;

use std::cell::RefCell;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ballast_base::units::MIB;
use ballast_base::wire::{self, ClientToEngine};
use ballast_base::{Bytes, Hva, PAGE_SIZE};
use ballast_pager::run::servers::Servers;
use ballast_pager::vm::client_peer::ClientPeer;
use ballast_pager::vm::view::View;
use ballast_sys::lock::Lock;
use ballast_sys::{Mapping, Uffd, memfd, scm, uffd};
use ballast_testvm::Finally;
use common::{Rig, mapped_at, until};
use rustix::net::RecvFlags;

const RAM: Bytes = Bytes(4 * MIB);
const AMPLE: Bytes = Bytes(64 * MIB);
const QUICK: Duration = Duration::from_millis(5);

/// Held by each test: a test finds a hang by the number of threads that serve all VMs of this process.
static ONE: Mutex<()> = Mutex::new(());

fn a_rig() -> Rig {
    let rig = Rig::new(RAM, AMPLE, QUICK);
    rig.fill_all();
    rig
}

/// Adds a client to this VM, with `theirs` as the engine's end. The client keeps a worker from returning.
fn join(rig: &Rig, theirs: OwnedFd) {
    let threads = || Servers::of_process().expect("servers").threads();
    let before = threads();
    add(rig, theirs);
    until("a worker hangs, and another one has its place", || threads() > before);
}

fn add(rig: &Rig, theirs: OwnedFd) {
    let (uffd, granted) = Uffd::create(uffd::REQUIRED_FEATURES).expect("userfaultfd");
    let peer = Arc::new(ClientPeer::new(theirs, 1));
    let view = Arc::new(View::new(std::process::id(), vec![uffd], granted, peer));
    rig.vm.add_view(view, &mapped_at(Hva(rig.second_mapping() as u64), RAM)).expect("view");
}

fn the_other_goes_on_and_it_is_closed(other: &Rig, hostile: &Rig) {
    other.squeeze(Bytes(RAM.0 / 2));
    other.check_bytes();
    hostile.vm.stop();
}

#[test]
fn a_client_that_holds_the_lock_of_its_socket_stops_no_other_vm() {
    let _one = ONE.locked();
    let (hostile, other) = (a_rig(), a_rig());
    let (ours, theirs) = scm::pair().expect("socketpair");
    let kept = theirs.try_clone().expect("dup");
    // Memory that stays missing while the client receives into it.
    let file = memfd::create("ballast-test", Bytes(PAGE_SIZE as u64)).expect("memfd");
    let buffer = Mapping::shared(&file, 0, PAGE_SIZE).expect("map");
    let (uffd, _) = Uffd::create(uffd::REQUIRED_FEATURES).expect("userfaultfd");
    let at = Hva(buffer.addr() as u64);
    uffd.register(at, PAGE_SIZE as u64).expect("register");
    let said = wire::encode(&ClientToEngine::Pong { seq: 0 });
    scm::send(&ours, &said, &[]).expect("send");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // SAFETY: the memory is this test's, and no reference to it exists.
            let bytes = unsafe { std::slice::from_raw_parts_mut(buffer.addr() as *mut u8, 64) };
            rustix::net::recv(&kept, bytes, RecvFlags::empty()).map(drop)
        });
        let _end = Finally(|| drop(uffd.copy(at, &[0; PAGE_SIZE])));
        let faults = RefCell::new(Vec::with_capacity(1));
        until("the client waits with the lock", || {
            uffd.read_faults(&mut faults.borrow_mut()).expect("read");
            !faults.borrow().is_empty()
        });
        join(&hostile, theirs);
        the_other_goes_on_and_it_is_closed(&other, &hostile);
    });
}

#[test]
fn a_client_that_sends_a_descriptor_whose_close_waits_stops_no_other_vm() {
    let _one = ONE.locked();
    let (hostile, other) = (a_rig(), a_rig());
    let (ours, theirs) = scm::pair().expect("socketpair");
    let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
    let stuck = TcpStream::connect(listener.local_addr().expect("address")).expect("connect");
    let mut reader = Some(listener.accept().expect("accept"));
    // Its bytes are never read, and the process that closes it last must wait for them.
    rustix::net::sockopt::set_socket_linger(&stuck, Some(Duration::from_secs(30_000))).expect("linger");
    stuck.set_nonblocking(true).expect("non-blocking");
    while (&stuck).write(&[0; 1 << 16]).is_ok() {}
    scm::send(&ours, &wire::encode(&ClientToEngine::Pong { seq: 0 }), &[stuck.as_fd()]).expect("send");
    drop(stuck);
    add(&hostile, theirs);
    other.squeeze(Bytes(RAM.0 / 2));
    other.check_bytes();
    // The engine has not received the descriptor: it is closed with the socket's last one, in the client or the keeper.
    drop(reader.take());
    hostile.vm.stop();
}
