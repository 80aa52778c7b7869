//! Tests that a fault of one VM waits for no request of another one, however slow the node is that both ask.
//!
//! Before: many requests of a VM, writes of whole chunks and reads of runs, are at a node that answers none of them.
//! After: another VM of the same process has got its page from that node. The order of the replies is tested. Threads:
//! those that flood, the test's, and those of an emulated server. Units: requests.

use crate::common;

use std::collections::HashSet;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use ballast_base::PAGE_SIZE;
use ballast_base::wire::VmId;
use ballast_store::{Codec, GetOutcome, IoContext, PutOutcome, Store, blob};
use ballast_testkit::pages;
use ballast_testvm::Finally;
use common::{DEADLINE, get_at_last, key_of, nobodys, played, shards, store_of};

const FLOODS: VmId = VmId([0xaa; 16]);
const WAITS: VmId = VmId([0xbb; 16]);
/// Threads that write and threads that read, more than a VM has.
const WRITERS: u64 = 4;
const READERS: u64 = 4;

/// Kinds of requests that the server had at the same time and did not answer.
#[derive(Default)]
struct Held {
    writes: HashSet<u16>,
    reads: HashSet<u16>,
}

fn has(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

/// Serves a connection: answers all requests except those for pages of the VM that floods.
fn serve(mut stream: TcpStream, held: &(Mutex<Held>, Condvar)) {
    let (local, peer) = (stream.local_addr().expect("an address"), stream.peer_addr().expect("an address").port());
    let map = shards(local.port());
    let mut asked = Vec::new();
    let mut part = [0; 8192];
    while let Ok(len @ 1..) = stream.read(&mut part) {
        asked.extend_from_slice(&part[..len]);
        let reply = if asked.ends_with(b"SHARDS\r\n") {
            map.clone().into_bytes()
        } else if has(&asked, b"bl{cluster:") {
            // The cluster's identity, under several keys.
            if !asked.ends_with(b"\r\n") {
                continue;
            }
            let keys = asked.windows(11).filter(|window| *window == b"bl{cluster:").count();
            b"$16\r\n0000000000000007\r\n".repeat(keys)
        } else if has(&asked, b"bl{") {
            // A lease: SET and PEXPIRE.
            if !has(&asked, b"PEXPIRE") || !asked.ends_with(b"\r\n") {
                continue;
            }
            b"+OK\r\n:1\r\n".to_vec()
        } else if has(&asked, FLOODS.to_string().as_bytes()) {
            let hold = |change: &dyn Fn(&mut Held)| {
                change(&mut held.0.lock().expect("held"));
                held.1.notify_all();
            };
            let is_write = has(&asked, b"MSET");
            hold(&|held| _ = if is_write { held.writes.insert(peer) } else { held.reads.insert(peer) });
            // The server reads on without a reply, until the client hangs up.
            while let Ok(1..) = stream.read(&mut part) {}
            hold(&|held| _ = (held.writes.remove(&peer), held.reads.remove(&peer)));
            return;
        } else if has(&asked, WAITS.to_string().as_bytes()) && asked.ends_with(b"\r\n") {
            let mut value = Vec::new();
            blob::seal(key_of(WAITS, 0), nobodys(), &pages::half_compressible(1), Codec::Lz4, &mut value);
            [format!("${}\r\n", value.len()).as_bytes(), &value, b"\r\n"].concat()
        } else {
            continue;
        };
        asked.clear();
        if stream.write_all(&reply).is_err() {
            return;
        }
    }
}

#[test]
fn a_page_of_one_vm_comes_while_all_requests_of_another_one_are_unanswered() {
    let held = Arc::new((Mutex::new(Held::default()), Condvar::new()));
    let holds = held.clone();
    let ours = played(move |stream| serve(stream, &holds));
    let (floods, waits, over) = (store_of(FLOODS, &ours), store_of(WAITS, &ours), AtomicBool::new(false));
    let content = vec![pages::incompressible(7); 512];
    std::thread::scope(|scope| {
        let _ends = Finally(|| over.store(true, Ordering::Release));
        for thread in 0..WRITERS {
            let (floods, over, content) = (&floods, &over, &content);
            scope.spawn(move || {
                while !over.load(Ordering::Acquire) {
                    let mut outcomes = Vec::new();
                    floods.put_run(key_of(FLOODS, thread * 512), content, &mut outcomes);
                    assert_eq!(outcomes, [PutOutcome::Busy; 512]);
                }
            });
        }
        for thread in 0..READERS {
            let (floods, over) = (&floods, &over);
            scope.spawn(move || {
                let mut out = vec![[0; PAGE_SIZE]; 64];
                while !over.load(Ordering::Acquire) {
                    let run = key_of(FLOODS, thread * 512).run([nobodys(); 64]);
                    let outcomes = floods.get_run(&run, &mut out, IoContext::GUEST);
                    assert_eq!(outcomes, [GetOutcome::Busy; 64]);
                }
            });
        }
        for _ in 0..20 {
            let all = held.0.lock().expect("held");
            let is_short =
                |held: &mut Held| held.writes.len() < WRITERS as usize || held.reads.len() < READERS as usize;
            let (all, waited) = held.1.wait_timeout_while(all, DEADLINE, is_short).expect("held");
            drop(all);
            assert!(!waited.timed_out(), "the requests of the other VM did not reach the server");
            let mut out = [0; PAGE_SIZE];
            // A busy machine may let a request take longer than its timeout.
            assert_eq!(get_at_last(&waits, key_of(WAITS, 0), nobodys(), &mut out), GetOutcome::Found);
            assert!(out == pages::half_compressible(1));
        }
    });
}
