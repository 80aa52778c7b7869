//! A client whose process has no descriptor left. The limit is per process, so this is the only test here.

mod double;

use std::os::fd::{AsFd, AsRawFd};

use ballast_base::Bytes;
use ballast_base::store::RAM_STORE;
use ballast_base::wire::{ClientToKeeper, KeeperToClient, StoreFiles};
use ballast_client::Client;
use ballast_sys::{Mapping, memfd};
use double::{Keeper, VM, hva, pages, unread};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

#[test]
fn a_client_short_of_descriptors_keeps_its_own_files_and_attaches() {
    let Some(keeper) = Keeper::start() else { return };
    let fd = memfd::create("guest-ram", Bytes(pages(16))).expect("memfd");
    let map = Mapping::shared(&fd, 0, pages(16) as usize).expect("map");
    let builder =
        Client::builder().name("web-1").socket(&keeper.path).region(fd, hva(map.addr()), Bytes(pages(16)), Bytes(0));
    let (client, escrow) = std::thread::scope(|scope| {
        let script = scope.spawn(|| keeper.client().accept());
        (builder.attach().expect("attach"), script.join().expect("the script"))
    });
    let keeper = Keeper::restart(keeper.die());
    let session = keeper.client();
    assert_eq!(session.attach.resume, Some(VM));
    let stores = vec![StoreFiles { store: RAM_STORE, count: 1 }];
    let files = [0, 1].map(|_| memfd::create("escrow", Bytes(4096)).expect("memfd"));
    let usual = getrlimit(Resource::Nofile);
    let lowest = std::fs::File::open("/dev/null").expect("a descriptor").as_raw_fd();
    setrlimit(Resource::Nofile, Rlimit { current: Some(lowest as u64), ..usual }).expect("a limit");
    session.answer_with(
        &KeeperToClient::Attached { vm: VM, stores, is_first: false },
        &[files[0].as_fd(), files[1].as_fd()],
    );
    while unread(&session.socket) > 0 {
        std::thread::yield_now();
    }
    setrlimit(Resource::Nofile, usual).expect("the usual limit");
    // The client is attached: it asks this keeper, and takes the reply.
    std::thread::scope(|scope| {
        let asks = scope.spawn(|| client.pin("a device"));
        let (asked, _) = session.request();
        assert!(matches!(asked, ClientToKeeper::Pin(_)), "{asked:?}");
        session.answer(&KeeperToClient::Ok);
        asks.join().expect("no panic").expect("it is pinned");
    });
    drop(session);
    let keeper = Keeper::restart(keeper.die());
    let last = keeper.client();
    let ids: Vec<_> = last.escrow.iter().map(|file| memfd::file_id(file).expect("stat")).collect();
    assert_eq!(ids, escrow, "the files of the first keeper come back");
}
