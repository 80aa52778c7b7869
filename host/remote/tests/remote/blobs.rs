//! Tests that pages which are compressed in RAM reach the cluster as they are there.
//!
//! Before: `conformance` passed. After: the payload of each value is the one in RAM, under a checksum of its own, and
//! each page was read again.
//! Threads: the test's. Units: pages. Needs `valkey`.

use crate::common;

use ballast_base::{Bytes, PAGE_SIZE};
use ballast_remote::{RemoteBudget, RemoteStore, Seal};
use ballast_store::{Budget, Codec, GetOutcome, Handle, NearStore, PageBytes, PutOutcome, RamOptions, RamStore};
use ballast_testkit::pages;
use ballast_testvm::valkey::{Layout, Valkey, read};
use common::{LEASE, VM, cluster, get_run_at_last, handles, key, owner, put_at_last, start};

const PAGES: u64 = 40;
/// Bytes of the header of a blob, in RAM stores and in values.
const HEADER: usize = 16;

/// A page that takes room in RAM: it does not repeat one word.
fn page(page: u64) -> PageBytes {
    match page % 4 {
        0 => pages::incompressible(page),
        1 => pages::filled(0x0102_0304_0506_0708 + page),
        _ => pages::half_compressible(page),
    }
}

/// Moves all pages from a store in RAM to a remote one. Returns their forms, and their handles there.
fn moved(near: &dyn NearStore, far: &RemoteStore) -> (Vec<Vec<u8>>, Vec<Handle>) {
    let (mut copies, mut blobs) = (Vec::new(), Vec::new());
    for number in 0..PAGES {
        let PutOutcome::Stored(handle) = near.put(key(number), &page(number)) else { panic!("page {number}") };
        let (mut copy, mut blob) = ([0; PAGE_SIZE], Vec::new());
        assert_eq!(near.get_blob(key(number), handle, &mut copy, &mut blob), GetOutcome::Found);
        copies.push(copy);
        blobs.push(blob);
    }
    let outcomes = put_at_last(far, key(0), &copies, &blobs);
    (blobs, handles(far, outcomes))
}

fn all_come_back(far: &RemoteStore, handles: &[Handle]) {
    let (outcomes, out) = get_run_at_last(far, key(0), handles);
    assert!(outcomes.iter().all(|outcome| *outcome == GetOutcome::Found), "{outcomes:?}");
    (0..).zip(&out).for_each(|(number, out)| assert!(*out == page(number), "page {number} has other bytes"));
}

fn value(valkey: &Valkey, number: usize, handle: Handle) -> Vec<u8> {
    let name = format!("b{{{VM}:0:0}}{number:x}:{:x}", handle.bits());
    read(valkey.say(owner(valkey, VM), &["GET", &name]).expect("GET")).expect("a value")
}

#[test]
fn pages_go_to_the_cluster_compressed_as_they_are_in_ram_whatever_compresses_there() {
    let Some(valkey) = start(Layout::default()) else { return };
    let cluster = cluster(&valkey, 1);
    // The remote store's own codec is another one, so a page that it compressed itself would differ.
    for (near, own) in [(Codec::Lz4, Codec::Zstd { level: 1 }), (Codec::Zstd { level: 1 }, Codec::Lz4)] {
        let options = RamOptions { codec: near, ..RamOptions::new(Budget::new(Bytes(16 << 20))) };
        let (ram, _arena) = RamStore::create(options).expect("a store");
        let far = RemoteStore::new(VM, cluster.clone(), RemoteBudget::new(Bytes(1 << 30)), own, LEASE);
        let (blobs, handles) = moved(&ram, &far);
        for (number, (blob, handle)) in blobs.iter().zip(&handles).enumerate() {
            let value = value(&valkey, number, *handle);
            assert_eq!(value[HEADER..], blob[HEADER..], "page {number}");
            assert_ne!(value[..8], blob[..8], "the checksum of page {number} is of this place");
        }
        all_come_back(&far, &handles);
    }
}

#[test]
fn compressed_pages_are_sealed_like_others() {
    let Some(valkey) = start(Layout::default()) else { return };
    let (ram, _arena) = RamStore::create(RamOptions::new(Budget::new(Bytes(16 << 20)))).expect("a store");
    let budget = RemoteBudget::new(Bytes(1 << 30));
    let far = RemoteStore::new(VM, cluster(&valkey, 1), budget, Codec::Lz4, LEASE).sealed(Seal::with(0, &[3; 32]));
    let (blobs, handles) = moved(&ram, &far);
    for (number, (blob, handle)) in blobs.iter().zip(&handles).enumerate() {
        let (value, payload) = (value(&valkey, number, *handle), &blob[HEADER..]);
        let shown = payload.len().min(32);
        assert!(!value.windows(shown).any(|window| window == &payload[..shown]), "page {number} can be read there");
    }
    all_come_back(&far, &handles);
}
