//! What others see of pages on the wire under TLS.
//!
//! Before: `conformance`. After: nothing that is known of a page is found where it should not be, and who has not the
//! right certificate or password gets nothing.
//! Threads: the test's, and those of a proxy that keeps what goes over it. Needs `valkey`.

mod common;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use ballast_base::wire::VmId;
use ballast_base::{Bytes, PAGE_SIZE, PageIdx};
use ballast_needs::missing;
use ballast_remote::{Access, Addr, Cluster, ClusterOptions, RemoteBudget, RemoteStore, Tls, check, lease};
use ballast_store::{Codec, GetOutcome, Handle, PageBytes, PageKey, PutOutcome, RegionKey, Store, conformance};
use ballast_testvm::valkey::{Layout, Valkey, valkey_missing};
use common::{LEASE, tls, tls_cluster};

const VM: VmId = VmId([7; 16]);
/// What is on each page, where no compression hides it.
const SECRET: &[u8] = b"the guest knows something that nobody else shall know";

fn start(layout: Layout) -> Option<Valkey> {
    if missing("valkey", valkey_missing()) {
        return None;
    }
    Some(Valkey::start(layout).expect("a cluster"))
}

fn store(cluster: &Arc<Cluster>) -> RemoteStore {
    RemoteStore::new(VM, cluster.clone(), RemoteBudget::new(Bytes(1 << 30)), Codec::Lz4, LEASE)
}

fn key(page: u64) -> PageKey {
    RegionKey { vm: VM, number: 0 }.page(PageIdx(page))
}

fn page(seed: u64) -> PageBytes {
    let mut bytes = ballast_store::pages::incompressible(seed);
    bytes[100..100 + SECRET.len()].copy_from_slice(SECRET);
    bytes
}

fn put(store: &RemoteStore, count: u64) -> Vec<Handle> {
    let (bytes, mut outcomes): (Vec<_>, _) = ((0..count).map(page).collect(), Vec::new());
    store.put_run(key(0), &bytes, &mut outcomes);
    let handle = |outcome| match outcome {
        PutOutcome::Stored(handle) => handle,
        other => panic!("{other:?}: {:?}", store.last_refusal()),
    };
    outcomes.into_iter().map(handle).collect()
}

fn get(store: &RemoteStore, at: u64, handle: Handle) -> GetOutcome {
    let mut out = [0; PAGE_SIZE];
    let outcome = store.get(key(at), handle, &mut out);
    assert!(outcome != GetOutcome::Found || out == page(at));
    outcome
}

fn shows(bytes: &[u8]) -> bool {
    bytes.windows(SECRET.len()).any(|window| window == SECRET)
}

/// Passes everything on to `to`, and keeps it.
fn proxy(to: String) -> (u16, Arc<Mutex<Vec<u8>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("an address").port();
    let seen: Arc<Mutex<Vec<u8>>> = Arc::default();
    let keeps = seen.clone();
    let pass = move |mut from: TcpStream, mut to: TcpStream, keeps: Arc<Mutex<Vec<u8>>>| {
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(len @ 1..) = from.read(&mut bytes) {
                keeps.lock().expect("seen").extend_from_slice(&bytes[..len]);
                if to.write_all(&bytes[..len]).is_err() {
                    break;
                }
            }
            let _ = to.shutdown(Shutdown::Both);
        })
    };
    std::thread::spawn(move || {
        for client in listener.incoming().flatten() {
            let Ok(server) = TcpStream::connect(&to) else { continue };
            pass(client.try_clone().expect("dup"), server.try_clone().expect("dup"), keeps.clone());
            pass(server, client, keeps.clone());
        }
    });
    (port, seen)
}

#[test]
fn nothing_of_a_page_is_seen_on_the_wire_under_tls_and_all_of_it_without() {
    let Some(valkey) = start(Layout { primaries: 1, replicas: 0, tls: true, ..Layout::default() }) else { return };
    for under_tls in [true, false] {
        let (port, seen) = proxy(if under_tls { valkey.tls_addr(0) } else { valkey.addr(0) });
        // The map names the proxy, too.
        let announced = if under_tls { "cluster-announce-tls-port" } else { "cluster-announce-port" };
        valkey.say(0, &["CONFIG", "SET", announced, &port.to_string()]).expect("CONFIG");
        let access = Access { tls: under_tls.then(|| tls(&valkey)), ..Access::default() };
        let nodes = vec![Addr::parse(&format!("127.0.0.1:{port}")).expect("an address")];
        let store = store(&Arc::new(Cluster::new(ClusterOptions { nodes, access, replicas: 0 })));
        let handles = put(&store, 100);
        (0..).zip(&handles).for_each(|(at, handle)| assert_eq!(get(&store, at, *handle), GetOutcome::Found));
        let seen = seen.lock().expect("seen");
        assert!(seen.len() > 200 * PAGE_SIZE, "{} bytes", seen.len());
        assert_eq!(shows(&seen), !under_tls);
    }
}

#[test]
fn who_has_the_wrong_certificate_gets_nothing_and_is_told_which_file() {
    let Some(valkey) = start(Layout { primaries: 1, replicas: 0, tls: true, ..Layout::default() }) else { return };
    let right = tls(&valkey);
    let dir = valkey.dir().to_owned();
    for (files, says) in [
        (Tls { ca_file: dir.join("other.pem"), ..right.clone() }, "certificate"),
        (Tls { ca_file: dir.join("no such file"), ..right.clone() }, "no such file"),
        (Tls { ca_file: dir.join("client.key"), ..right.clone() }, "client.key"),
        (Tls { own: Some((dir.join("client.pem"), dir.join("server.key"))), ..right.clone() }, "client.pem"),
        (Tls { own: None, ..right.clone() }, ""),
        (Tls { name: Some("elsewhere.test".into()), ..right.clone() }, "certificate"),
    ] {
        let nodes = vec![Addr::parse(&valkey.tls_addr(0)).expect("an address")];
        let access = Access { tls: Some(files), ..Access::default() };
        let ours = Arc::new(Cluster::new(ClusterOptions { nodes: nodes.clone(), access, replicas: 0 }));
        let error =
            ours.map_of(&nodes[0], std::time::Instant::now() + LEASE).expect_err("it is not let in").to_string();
        assert!(error.contains(says), "{says}: {error}");
        assert_eq!(get(&store(&ours), 0, Handle::new(5).expect("40 bits")), GetOutcome::Busy, "that is no loss");
    }
    let handles = put(&store(&tls_cluster(&valkey, 0)), 3);
    assert_eq!(get(&store(&tls_cluster(&valkey, 0)), 2, handles[2]), GetOutcome::Found);
}

const PASSWORD: &str = "an open secret";

/// The user of docs/remote.md, word for word.
fn documented_user() -> Vec<&'static str> {
    let docs = include_str!("../../../docs/remote.md");
    let words = docs.split("ACL SETUSER").nth(1).and_then(|rest| rest.split("```").next()).expect("a user");
    let password = |word| if word == ">PASSWORD" { ">an open secret" } else { word };
    ["ACL", "SETUSER"].into_iter().chain(words.split_whitespace().map(password)).collect()
}

#[test]
fn the_user_of_the_documentation_under_tls_may_do_all_that_a_store_does_and_nothing_else() {
    let Some(valkey) = start(Layout { tls: true, ..Layout::default() }) else { return };
    let user = documented_user();
    for node in 0..valkey.len() {
        valkey.say(node, &user).expect("ACL SETUSER");
    }
    let file = valkey.dir().join("password");
    let opened = |password: &str| {
        std::fs::write(&file, format!("{password}\n")).expect("write the password");
        let access = Access { user: Some(user[2].into()), password_file: Some(file.clone()), tls: Some(tls(&valkey)) };
        let nodes = vec![Addr::parse(&valkey.tls_addr(0)).expect("an address")];
        Arc::new(Cluster::new(ClusterOptions { nodes, access, replicas: 1 }))
    };
    let wrong = store(&opened("another"));
    assert_eq!(wrong.put(key(0), &page(0)), PutOutcome::Busy);
    let why = wrong.last_refusal().expect("a reason");
    assert!(why.contains("WRONGPASS") && !why.contains("another"), "{why}");
    let ours = opened(PASSWORD);
    conformance::run(&|| {
        Box::new(RemoteStore::new(VM, ours.clone(), RemoteBudget::new(Bytes(2 << 20)), Codec::Lz4, LEASE))
    });
    let handles = put(&store(&ours), 3);
    // Nobody has it, and all are asked, replicas as well.
    let nobody = Handle::new(5).expect("40 bits");
    assert_eq!(until_it_is_known(|| get(&store(&ours), 1, nobody)), GetOutcome::Absent);
    assert_eq!(get(&store(&ours), 1, handles[1]), GetOutcome::Found);
    let unseen: Vec<_> = check::check(&ours).into_iter().filter(|found| found.text.contains("checked")).collect();
    assert!(unseen.is_empty(), "{unseen:?}");
    lease::end(&ours, VM).expect("ended");
    assert_eq!(until_it_is_known(|| get(&store(&ours), 1, handles[1])), GetOutcome::Absent);
}

fn until_it_is_known(mut get: impl FnMut() -> GetOutcome) -> GetOutcome {
    loop {
        match get() {
            GetOutcome::Busy => {}
            known => return known,
        }
    }
}
