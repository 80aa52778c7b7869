//! Tests privacy: the bytes on the wire under TLS, and the values of sealed pages in the servers.
//!
//! Before: `conformance` passed. After: known bytes of a page were found nowhere outside the host, and a client without
//! the right certificate, password or key got nothing.
//! Threads: the test's, and those of a proxy that records the traffic. Needs `valkey`.

use crate::common;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use ballast_base::{Bytes, PAGE_SIZE};
use ballast_remote::{
    Access, Addr, Cluster, ClusterOptions, RemoteBudget, RemoteStore, Seal, Tls, check, seal, tick_now,
};
use ballast_store::{
    Attach, Codec, DurableStore, GetOutcome, Handle, IoContext, PageBytes, PutOutcome, SlowStore, Store,
};
use ballast_testkit::conformance;
use ballast_testvm::valkey::{Layout, Valkey};
use common::{LEASE, VM, cluster, key, known, nobodys, start, store, stored, tls, tls_cluster, until};

/// The known bytes on each page. Compression does not change them.
const SECRET: &[u8] = b"the guest knows something that nobody else shall know";

fn page(seed: u64) -> PageBytes {
    let mut bytes = ballast_testkit::pages::incompressible(seed);
    bytes[100..100 + SECRET.len()].copy_from_slice(SECRET);
    bytes
}

fn put(store: &RemoteStore, count: u64) -> Vec<Handle> {
    stored(store, key(0), &(0..count).map(page).collect::<Vec<_>>())
}

fn get_once(store: &RemoteStore, at: u64, handle: Handle) -> GetOutcome {
    let mut out = [0; PAGE_SIZE];
    let outcome = store.get(key(at), handle, &mut out, IoContext::GUEST);
    assert!(outcome != GetOutcome::Found || out == page(at));
    outcome
}

fn get(store: &RemoteStore, at: u64, handle: Handle) -> GetOutcome {
    known(store, || get_once(store, at, handle))
}

fn shows(bytes: &[u8]) -> bool {
    bytes.windows(SECRET.len()).any(|window| window == SECRET)
}

/// Returns all values of all servers.
fn kept(valkey: &Valkey) -> Vec<u8> {
    let mut all = Vec::new();
    for node in 0..valkey.len() {
        let keys = valkey.say(node, &["KEYS", "b{*"]).expect("KEYS");
        let keys: Vec<String> = ballast_testvm::valkey::read(keys).expect("keys");
        for key in keys.iter().filter(|_| valkey.is_primary(node)) {
            let value: Vec<u8> =
                ballast_testvm::valkey::read(valkey.say(node, &["GET", key]).expect("GET")).expect("a value");
            all.extend(value);
        }
    }
    all
}

/// Starts a proxy to `to` that records the traffic. Returns its port and the record.
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
fn a_client_with_the_wrong_certificate_gets_nothing_and_is_told_which_file() {
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
        let context = IoContext::BACKGROUND.until(Instant::now() + LEASE);
        let error = ours.map_of(&nodes[0], context).expect_err("it is not let in").to_string();
        assert!(error.contains(says), "{says}: {error}");
        assert_eq!(get_once(&store(&ours), 0, nobodys()), GetOutcome::Busy, "that is no loss");
    }
    let handles = put(&store(&tls_cluster(&valkey, 0)), 3);
    assert_eq!(get(&store(&tls_cluster(&valkey, 0)), 2, handles[2]), GetOutcome::Found);
}

const PASSWORD: &str = "an open secret";

/// Returns the words of the user in docs/remote.md.
fn documented_user() -> Vec<&'static str> {
    let docs = include_str!("../../../../docs/remote.md");
    let words = docs.split("ACL SETUSER").nth(1).and_then(|rest| rest.split("```").next()).expect("a user");
    let password = |word| if word == ">PASSWORD" { ">an open secret" } else { word };
    ["ACL", "SETUSER"].into_iter().chain(words.split_whitespace().map(password)).collect()
}

/// Waits until this many keys are left.
fn until_gone(stores: &[&RemoteStore], valkey: &Valkey, keys: u64) {
    until(|| {
        stores.iter().for_each(|store| store.tidy());
        let left = valkey.keys().expect("keys");
        if left == keys { Ok(()) } else { Err(left) }
    });
}

/// Waits until no value shows a page.
fn until_hidden(store: &RemoteStore, valkey: &Valkey) {
    until(|| {
        store.tidy();
        if shows(&kept(valkey)) { Err(store.last_refusal()) } else { Ok(()) }
    });
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
    let why = until(|| {
        assert_eq!(wrong.put(key(0), &page(0)), PutOutcome::Busy);
        let why = wrong.last_refusal().expect("a reason");
        if why.contains("WRONGPASS") { Ok(why) } else { Err(why) }
    });
    assert!(!why.contains("another"), "{why}");
    let ours = opened(PASSWORD);
    let first = store(&ours);
    let handles = put(&first, 3);
    // The user may do all that a store needs: freed pages and pages that an ended engine left are removed.
    first.free(key(2), handles[2]);
    let next = store(&ours);
    next.recover(&mut std::iter::once((key(1), handles[1]))).expect("recovered");
    until_gone(&[&first, &next], &valkey, 2);
    // No node has this page. All nodes are asked, also replicas.
    assert_eq!(get(&store(&ours), 1, nobodys()), GetOutcome::Absent);
    assert_eq!(get(&store(&ours), 1, handles[1]), GetOutcome::Found);
    let unseen: Vec<_> = check::check(&ours).into_iter().filter(|found| found.text.contains("NOPERM")).collect();
    assert!(unseen.is_empty(), "{unseen:?}");
    common::end(&ours, &[VM]);
    assert_eq!(get(&store(&ours), 1, handles[1]), GetOutcome::Absent);
}

#[test]
fn nothing_of_a_sealed_page_is_in_a_server_and_only_its_key_opens_it() {
    let Some(valkey) = start(Layout::default()) else { return };
    let ours = cluster(&valkey, 1);
    // The first page is put before there is a key.
    let plain = put(&store(&ours), 1);
    assert!(shows(&kept(&valkey)));
    let (since, secret) = (tick_now(), seal::new_key().expect("random"));
    let first = store(&ours).sealed(Seal::with(since, &secret));
    assert_eq!(get(&first, 0, plain[0]), GetOutcome::Found);
    let handles = put(&first, 700);
    first.free(key(0), plain[0]);
    until_hidden(&first, &valkey);
    let next = store(&ours).sealed(Seal::with(since, &secret));
    (0..).zip(&handles).for_each(|(at, handle)| assert_eq!(get(&next, at, *handle), GetOutcome::Found));
    let wrong = store(&ours).sealed(Seal::with(since, &seal::new_key().expect("random")));
    let none = store(&ours);
    let lost = store(&ours).sealed(Seal::lost());
    for store in [&wrong, &none, &lost] {
        assert_eq!(get(store, 5, handles[5]), GetOutcome::Corrupt, "{store:?}");
    }
    assert_eq!(lost.put(key(0), &page(0)), PutOutcome::Busy);
    assert!(lost.last_refusal().is_some_and(|why| why.contains("key")));
    // A value that a server returns for another page or generation is refused.
    let values = valkey.len();
    let owner = (0..values).find(|node| valkey.is_primary(*node) && swap_two(&valkey, *node)).expect("two values");
    let refused = (0..).zip(&handles).filter(|(at, handle)| get(&next, *at, **handle) == GetOutcome::Corrupt).count();
    assert_eq!(refused, 2, "of node {owner}");
}

#[test]
fn an_engine_that_follows_beside_another_seals_when_that_one_is_gone_and_not_before() {
    let Some(valkey) = start(Layout::default()) else { return };
    let ours = cluster(&valkey, 1);
    // The other engine is gone: the store is told so, or it recovers because the VM is opened again.
    for is_told in [true, false] {
        let plain = put(&store(&ours), 1);
        let live = || std::iter::once((key(0), plain[0]));
        let next = store(&ours).sealed_when_alone(|| Seal::with(tick_now(), &[5; 32]));
        next.attach_shared(&mut live());
        assert_eq!(get(&next, 0, plain[0]), GetOutcome::Found);
        match is_told {
            true => next.attach_exclusive(&mut live()),
            false => drop(next.recover(&mut live()).expect("recover")),
        }
        let sealed = put(&next, 2);
        assert_eq!(get(&next, 0, plain[0]), GetOutcome::Found, "what was there before is as it was");
        assert_eq!(get(&next, 1, sealed[1]), GetOutcome::Found);
        next.free(key(0), plain[0]);
        until_hidden(&next, &valkey);
    }
}

/// Exchange two values of one slot.
fn swap_two(valkey: &Valkey, node: usize) -> bool {
    let keys = valkey.say(node, &["KEYS", "b{*"]).expect("KEYS");
    let mut keys: Vec<String> = ballast_testvm::valkey::read(keys).expect("keys");
    keys.sort();
    let chunk = |key: &str| key.split('}').next().unwrap_or_default().to_owned();
    let Some(pair) = keys.windows(2).find(|pair| chunk(&pair[0]) == chunk(&pair[1])) else { return false };
    let spare = format!("{}}}spare", chunk(&pair[0]));
    for [from, to] in [[&pair[0], &spare], [&pair[1], &pair[0]], [&spare, &pair[1]]] {
        valkey.say(node, &["RENAME", from, to]).expect("RENAME");
    }
    true
}

#[test]
fn a_sealed_store_keeps_what_every_store_promises() {
    let Some(valkey) = start(Layout::default()) else { return };
    let ours = cluster(&valkey, 1);
    conformance::run_slow(&|| {
        let store = RemoteStore::new(VM, ours.clone(), RemoteBudget::new(Bytes(2 << 20)), Codec::Lz4, LEASE);
        Box::new(store.sealed(Seal::with(tick_now(), &[5; 32]))) as Box<dyn SlowStore>
    });
}
