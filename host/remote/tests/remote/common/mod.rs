//! Helpers of the tests against real clusters.
#![allow(dead_code)]

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ballast_base::wire::VmId;
use ballast_base::{Bytes, PAGE_SIZE, PageIdx};
use ballast_remote::{Access, Addr, Cluster, ClusterOptions, RemoteBudget, RemoteStore, Tls, lease, slot_of};
use ballast_store::{
    Codec, GetOutcome, Handle, IoContext, PageBytes, PageKey, PutOutcome, RegionKey, SlowStore, Store,
};
use ballast_testkit::missing;
use ballast_testvm::valkey::{Layout, Valkey, valkey_missing};

/// Duration of a lease, longer than any test.
pub const LEASE: Duration = Duration::from_secs(3600);
/// Limit for every wait, on a busy machine.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// Repeats `ask` until it succeeds: on a busy machine a thread may stall for longer than the first timeouts of
/// requests. Panics with the last refusal.
pub fn until<T, E: std::fmt::Debug>(mut ask: impl FnMut() -> Result<T, E>) -> T {
    let begun = Instant::now();
    loop {
        match ask() {
            Ok(answer) => return answer,
            Err(why) => assert!(begun.elapsed() < DEADLINE, "{why:?}"),
        }
    }
}

pub const VM: VmId = VmId([7; 16]);

pub fn key_of(vm: VmId, page: u64) -> PageKey {
    RegionKey { vm, number: 0 }.page(PageIdx(page))
}

pub fn key(page: u64) -> PageKey {
    key_of(VM, page)
}

pub fn store_of(vm: VmId, cluster: &Arc<Cluster>) -> RemoteStore {
    RemoteStore::new(vm, cluster.clone(), RemoteBudget::new(Bytes(1 << 30)), Codec::Lz4, LEASE)
}

pub fn store(cluster: &Arc<Cluster>) -> RemoteStore {
    store_of(VM, cluster)
}

/// A handle that no store returned.
pub fn nobodys() -> Handle {
    Handle::new(5).expect("40 bits")
}

pub fn known(store: &RemoteStore, mut get: impl FnMut() -> GetOutcome) -> GetOutcome {
    until(|| match get() {
        GetOutcome::Busy => Err(store.last_refusal()),
        known => Ok(known),
    })
}

pub fn get_at_last(store: &RemoteStore, key: PageKey, handle: Handle, out: &mut PageBytes) -> GetOutcome {
    known(store, || store.get(key, handle, out, IoContext::GUEST))
}

pub fn get_run_at_last(store: &RemoteStore, first: PageKey, handles: &[Handle]) -> (Vec<GetOutcome>, Vec<PageBytes>) {
    let mut out = vec![[0; PAGE_SIZE]; handles.len()];
    let outcomes = until(|| {
        let outcomes = store.get_run(&first.run(handles.iter().copied()), &mut out, IoContext::GUEST);
        if outcomes.contains(&GetOutcome::Busy) { Err(store.last_refusal()) } else { Ok(outcomes) }
    });
    (outcomes, out)
}

/// Puts pages, with their forms in another store if there are any. Retries until no outcome is `Busy`.
pub fn put_at_last(store: &RemoteStore, first: PageKey, pages: &[PageBytes], blobs: &[Vec<u8>]) -> Vec<PutOutcome> {
    let mut outcomes = vec![PutOutcome::Busy; pages.len()];
    until(|| {
        let is_busy = |outcome: &PutOutcome| *outcome == PutOutcome::Busy;
        let Some(from) = outcomes.iter().position(is_busy) else { return Ok(()) };
        // Pages that are stored already are not put again.
        let to = outcomes[from..].iter().position(|outcome| !is_busy(outcome)).map_or(pages.len(), |len| from + len);
        let (key, mut said) = (first.region.page(PageIdx(first.page.0 + from as u64)), Vec::new());
        store.put_blobs(key, &pages[from..to], blobs.get(from..to).unwrap_or_default(), &mut said);
        outcomes.splice(from..to, said);
        Err(store.last_refusal())
    });
    outcomes
}

pub fn stored(store: &RemoteStore, first: PageKey, pages: &[PageBytes]) -> Vec<Handle> {
    handles(store, put_at_last(store, first, pages, &[]))
}

pub fn handles(store: &RemoteStore, outcomes: Vec<PutOutcome>) -> Vec<Handle> {
    let handle = |outcome| match outcome {
        PutOutcome::Stored(handle) => handle,
        other => panic!("a put came to {other:?}: {:?}", store.last_refusal()),
    };
    outcomes.into_iter().map(handle).collect()
}

/// Unlinks all that was freed, and what failed writes left.
pub fn tidy_up(store: &RemoteStore) {
    until(|| {
        store.tidy();
        if store.is_tidy() { Ok(()) } else { Err(store.last_refusal()) }
    });
}

/// Starts a cluster; `None`, with a printed skip, where there is no server.
pub fn start(layout: Layout) -> Option<Valkey> {
    if missing("valkey", valkey_missing()) {
        return None;
    }
    Some(Valkey::start(layout).expect("a cluster"))
}

/// Returns the node that has the first chunk of a VM's first region.
pub fn owner(valkey: &Valkey, vm: VmId) -> usize {
    valkey.owner(slot_of(format!("b{{{vm}:0:0}}").as_bytes())).expect("an owner")
}

/// Returns a client of this cluster that is configured with two of its nodes.
pub fn cluster(valkey: &Valkey, replicas: u32) -> Arc<Cluster> {
    let nodes = [0, valkey.len() - 1].map(|node| Addr::parse(&valkey.addr(node)).expect("an address")).to_vec();
    Arc::new(Cluster::new(ClusterOptions { nodes, access: Access::default(), replicas }))
}

/// Returns a client of this cluster that is configured with one node under TLS.
pub fn tls_cluster(valkey: &Valkey, replicas: u32) -> Arc<Cluster> {
    let nodes = vec![Addr::parse(&valkey.tls_addr(0)).expect("an address")];
    let access = Access { tls: Some(tls(valkey)), ..Access::default() };
    Arc::new(Cluster::new(ClusterOptions { nodes, access, replicas }))
}

/// Starts an emulated server that calls `say` for each connection. Returns a client of it.
pub fn played(say: impl Fn(TcpStream) + Send + Sync + 'static) -> Arc<Cluster> {
    played_to(Access::default(), say)
}

/// As [`played`], with a way to log in.
pub fn played_to(access: Access, say: impl Fn(TcpStream) + Send + Sync + 'static) -> Arc<Cluster> {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let addr = Addr::parse(&listener.local_addr().expect("an address").to_string()).expect("an address");
    let say = Arc::new(say);
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let say = say.clone();
            std::thread::spawn(move || say(stream));
        }
    });
    Arc::new(Cluster::new(ClusterOptions { nodes: vec![addr], access, replicas: 1 }))
}

/// Returns the reply to `CLUSTER SHARDS` of a server on this port that has all slots.
pub fn shards(port: u16) -> String {
    format!(
        "*1\r\n*4\r\n$5\r\nslots\r\n*2\r\n:0\r\n:16383\r\n$5\r\nnodes\r\n*1\r\n*6\r\n$4\r\nport\r\n:{port}\r\n\
         $2\r\nip\r\n$9\r\n127.0.0.1\r\n$4\r\nrole\r\n$6\r\nmaster\r\n"
    )
}

/// The pieces of a reply, and the pause after each.
pub type Slowly = (Vec<Vec<u8>>, Duration);

/// Serves one connection as a server of a VM's pages: it has all slots, an identity and the VM's lease. To other
/// commands it writes what `answer` returns, or nothing for `None`.
pub fn serve(stream: &TcpStream, answer: &dyn Fn(&[Vec<u8>]) -> Option<Slowly>) {
    let port = stream.local_addr().expect("an address").port();
    let (mut asked, mut says) = (BufReader::new(stream), stream);
    while let Some(words) = command(&mut asked) {
        let names = |at: usize, what: &[u8]| words.get(at).is_some_and(|word| word.starts_with(what));
        let (pieces, pause) = if names(0, b"CLUSTER") {
            (vec![shards(port).into_bytes()], Duration::ZERO)
        } else if names(1, b"bl{cluster:") {
            (vec![b"$16\r\n0000000000000007\r\n".to_vec()], Duration::ZERO)
        } else if names(1, b"bl{") {
            let reply = if names(0, b"PEXPIRE") { &b":1\r\n"[..] } else { b"+OK\r\n" };
            (vec![reply.to_vec()], Duration::ZERO)
        } else if let Some(said) = answer(&words) {
            said
        } else {
            continue;
        };
        for piece in pieces {
            if says.write_all(&piece).is_err() {
                return;
            }
            std::thread::sleep(pause);
        }
    }
}

fn command(asked: &mut impl BufRead) -> Option<Vec<Vec<u8>>> {
    let number = |asked: &mut dyn BufRead| {
        let mut line = String::new();
        asked.read_line(&mut line).ok()?;
        line.trim_end().get(1..)?.parse::<usize>().ok()
    };
    let words = number(asked)?;
    let word = |_| {
        let mut word = vec![0; number(asked)? + 2];
        asked.read_exact(&mut word).ok()?;
        word.truncate(word.len() - 2);
        Some(word)
    };
    (0..words).map(word).collect()
}

/// Removes all leases and pages of these VMs from the cluster. Returns the number of the pages.
pub fn end(cluster: &Cluster, vms: &[VmId]) -> u64 {
    let (mut ended, mut pages) = (lease::Ended::default(), 0);
    vms.iter().for_each(|vm| ended.add(*vm));
    while !ended.is_empty() {
        pages += until(|| ended.step(cluster)).iter().map(|(_, pages)| pages).sum::<u64>();
    }
    pages
}

pub fn tls(valkey: &Valkey) -> Tls {
    let own = Some((valkey.dir().join("client.pem"), valkey.dir().join("client.key")));
    Tls { ca_file: valkey.dir().join("ca.pem"), own, name: None }
}

pub fn env(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}
