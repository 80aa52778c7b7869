//! Tests of requests whose replies are read later, by a thread that must not wait.
//!
//! Before: `conformance` tested pages. After: such a thread gets a page when it is there, and nothing else from any
//! reply. Threads: the test's, and those of an emulated server. One test needs `valkey`.

use crate::common;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::BorrowedFd;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use ballast_base::PAGE_SIZE;
use ballast_remote::RemoteStore;
use ballast_store::{Codec, Ends, GetOutcome, Handle, IoContext, PageBytes, SlowStore, Store, blob};
use ballast_testkit::pages;
use ballast_testvm::valkey::Layout;
use common::{cluster, get_at_last, key, played, shards, start, store, stored, tls_cluster, until};

fn wait_for(connection: &TcpStream) {
    let begun = Instant::now();
    // The store set a read timeout on the connection.
    while connection.peek(&mut [0]).is_err() {
        assert!(begun.elapsed() < Duration::from_secs(60), "no reply comes");
    }
}

/// Begins to get a page. If the request was sent, returns the connection that has input when the page comes.
fn begin(store: &RemoteStore, page: u64, handle: Handle) -> Option<TcpStream> {
    let watched = Mutex::new(None);
    let watch = |fd: BorrowedFd<'_>| *watched.lock().expect("no panic") = fd.try_clone_to_owned().ok();
    let is_sent = store.begin(key(page), handle, &watch);
    watched.into_inner().expect("no panic").filter(|_| is_sent).map(TcpStream::from)
}

/// Gets a begun page when there is input; `None` if only a part of it has come, or it is not the page.
fn come(store: &RemoteStore, connection: &TcpStream, page: u64, handle: Handle) -> Option<PageBytes> {
    wait_for(connection);
    let mut out = [0; PAGE_SIZE];
    (store.get(key(page), handle, &mut out, IoContext::GUEST.ended_by(Ends::AtOnce(&|_| ()))) == GetOutcome::Found)
        .then_some(out)
}

#[test]
fn a_page_that_was_asked_for_is_there_when_its_descriptor_has_input_and_others_are_got_as_usual() {
    let Some(valkey) = start(Layout { tls: true, ..Layout::default() }) else { return };
    for cluster in [cluster(&valkey, 1), tls_cluster(&valkey, 1)] {
        let store = store(&cluster);
        let bytes: Vec<_> = (0..20).map(pages::mixed).collect();
        let handles = stored(&store, key(0), &bytes);
        let handle = |page: u64| handles[page as usize];
        // A late request has closed the connection: the next get opens another.
        let begin_at_last = |page| {
            until(|| {
                let begun = begin(&store, page, handle(page));
                let was_late = || cluster.figures().iter().any(|(_, figures)| figures.errors > 0);
                assert!(begun.is_some() || was_late(), "a connection is idle");
                begun.ok_or_else(|| get_at_last(&store, key(page), handle(page), &mut [0; PAGE_SIZE]))
            })
        };
        for page in 0..20 {
            let fd = begin_at_last(page);
            let begun = Instant::now();
            // The input may be only a part of the page, and under TLS it may be something else.
            let came = std::iter::from_fn(|| {
                assert!(begun.elapsed() < Duration::from_secs(60), "page {page} does not come");
                Some(come(&store, &fd, page, handle(page)))
            });
            assert!(came.flatten().next() == Some(bytes[page as usize]), "page {page} has other bytes");
            let mut out = [0; PAGE_SIZE];
            assert_eq!(
                store.get(key(page), handle(page), &mut out, IoContext::GUEST.ended_by(Ends::AtOnce(&|_| ()))),
                GetOutcome::Busy,
                "it was got"
            );
        }
        // One connection is idle, so one request can be begun.
        let _fd = begin_at_last(1);
        assert!(begin(&store, 2, handle(2)).is_none(), "no other connection is there");
        for page in [2, 1] {
            let mut out = [0; PAGE_SIZE];
            assert_eq!(get_at_last(&store, key(page), handle(page), &mut out), GetOutcome::Found);
            assert!(out == bytes[page as usize]);
        }
    }
}

/// A server that has all slots, and the channel for the pieces of its reply to each `GET`, up to an empty one.
fn server() -> (RemoteStore, Sender<Vec<u8>>) {
    let (say, pieces): (_, Receiver<Vec<u8>>) = mpsc::channel();
    let pieces = Mutex::new(pieces);
    let cluster = played(move |mut stream: TcpStream| {
        let mut asked = [0; 4096];
        // A command is short, and arrives whole.
        while let Ok(len @ 1..) = stream.read(&mut asked) {
            if String::from_utf8_lossy(&asked[..len]).contains("CLUSTER") {
                let port = stream.local_addr().expect("an address").port();
                stream.write_all(shards(port).as_bytes()).expect("write");
                continue;
            }
            let pieces = pieces.lock().expect("no panic");
            while let Ok(piece) = pieces.recv()
                && !piece.is_empty()
            {
                if stream.write_all(&piece).is_err() {
                    return;
                }
            }
        }
    });
    (store(&cluster), say)
}

#[test]
fn a_thread_that_must_not_wait_gets_a_whole_page_or_nothing_from_any_reply() {
    let (bytes, handle) = (pages::incompressible(3), Handle::new(5).expect("40 bits"));
    let mut value = Vec::new();
    blob::seal(key(0), handle, &bytes, Codec::Lz4, &mut value);
    let reply = |value: &[u8]| [format!("${}\r\n", value.len()).as_bytes(), value, b"\r\n"].concat();
    let good = reply(&value);
    let send = |say: &Sender<Vec<u8>>, pieces: &[&[u8]]| {
        pieces.iter().for_each(|piece| say.send(piece.to_vec()).expect("send"));
    };
    let mut out = [0; PAGE_SIZE];
    let get = |(store, say): &(RemoteStore, Sender<Vec<u8>>), out: &mut PageBytes| {
        send(say, &[&good, b""]);
        match store.get(key(0), handle, out, IoContext::GUEST) {
            GetOutcome::Busy => Err(store.last_refusal()),
            known => Ok(known),
        }
    };
    // A begun request needs an idle connection: the first get opens it. If that get is late, its reply would be taken
    // for that of another request, so the test starts again with another server.
    let opened = || {
        until(|| {
            let server = server();
            let known = get(&server, &mut [0; PAGE_SIZE])?;
            assert_eq!(known, GetOutcome::Found);
            Ok::<_, Option<String>>(server)
        })
    };
    let (store, say) = opened();
    let connection = begin(&store, 0, handle).expect("a connection is idle");
    send(&say, &[&good[..100]]);
    wait_for(&connection);
    let watched = AtomicU32::new(0);
    let watch = |_: BorrowedFd<'_>| {
        watched.fetch_add(1, Relaxed);
    };
    assert_eq!(
        store.get(key(0), handle, &mut out, IoContext::GUEST.ended_by(Ends::AtOnce(&watch))),
        GetOutcome::Busy,
        "a part of it has come"
    );
    assert_eq!(watched.load(Relaxed), 1, "the caller is to know when the rest comes");
    send(&say, &[&good[100..], b""]);
    let came = std::iter::from_fn(|| Some(come(&store, &connection, 0, handle))).flatten().next();
    assert!(came == Some(bytes), "it has other bytes");
    value[50] ^= 1;
    for refused in [&b"$-1\r\n"[..], b"-MOVED 1 127.0.0.1:1\r\n", b"+OK\r\n", b":5\r\n", &reply(&value)] {
        let connection = begin(&store, 0, handle).expect("a connection is idle");
        send(&say, &[refused, b""]);
        assert!(come(&store, &connection, 0, handle).is_none(), "{}", String::from_utf8_lossy(refused));
    }
    // An array may have any number of parts, and each is parsed after all before it.
    for broken in [&b"HTTP/1.1 400 Bad Request\r\n"[..], &[&good[..], b"more"].concat(), b"*100000\r\n:1\r\n"] {
        let server = opened();
        let (store, say) = &server;
        let connection = begin(store, 0, handle).expect("a connection is idle");
        send(say, &[broken, b""]);
        assert!(come(store, &connection, 0, handle).is_none());
        assert!(begin(store, 0, handle).is_none(), "that connection is closed");
        assert_eq!(until(|| get(&server, &mut out)), GetOutcome::Found);
    }
}
