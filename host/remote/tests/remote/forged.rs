//! Tests what an attacker with access to the servers can do to a VM's pages: values that are changed, cut, longer than
//! any page, or of another page, VM or time.
//!
//! Before: `privacy` passed. After: a read of a forged value came to `Corrupt` or `Busy`, never to other bytes; other
//! pages of the same chunk were read meanwhile; all pages were there again when their values were.
//! Threads: the test's. Units: pages. Needs `valkey`.

use crate::common;

use std::sync::Arc;

use ballast_base::PAGE_SIZE;
use ballast_base::wire::VmId;
use ballast_remote::{Cluster, RemoteStore, Seal, seal};
use ballast_store::{GetOutcome, Handle, IoContext, PageBytes, SlowStore, Store};
use ballast_testkit::pages;
use ballast_testvm::valkey::{Layout, Valkey, read};
use common::{VM, cluster, get_at_last, key, key_of, start, store_of, stored, until};

/// Pages of the run that is attacked, all in one chunk. The first one is left alone.
const PAGES: u64 = 8;
const OTHER_VM: VmId = VmId([8; 16]);

fn page(page: u64) -> PageBytes {
    if page.is_multiple_of(2) { pages::incompressible(page) } else { pages::half_compressible(page) }
}

fn store(cluster: &Arc<Cluster>, vm: VmId, secret: Option<&[u8; 32]>) -> RemoteStore {
    let store = store_of(vm, cluster);
    match secret {
        Some(secret) => store.sealed(Seal::with(0, secret)),
        None => store,
    }
}

fn put(store: &RemoteStore, vm: VmId, bytes: &[PageBytes]) -> Vec<Handle> {
    stored(store, key_of(vm, 0), bytes)
}

fn get(store: &RemoteStore, handles: &[Handle]) -> Vec<GetOutcome> {
    until(|| {
        let mut out = vec![[0; PAGE_SIZE]; handles.len()];
        let outcomes = store.get_run(&key(0).run(handles.iter().copied()), &mut out, IoContext::GUEST);
        for (at, outcome) in (0..).zip(&outcomes) {
            assert!(*outcome != GetOutcome::Found || out[at as usize] == page(at), "page {at} has other bytes");
        }
        if outcomes.contains(&GetOutcome::Busy) { Err(store.last_refusal()) } else { Ok(outcomes) }
    })
}

fn get_one(store: &RemoteStore, at: u64, handle: Handle) -> GetOutcome {
    let mut out = [0; PAGE_SIZE];
    let outcome = get_at_last(store, key(at), handle, &mut out);
    assert!(outcome != GetOutcome::Found || out == page(at), "page {at} has other bytes");
    outcome
}

fn name(vm: VmId, page: u64, handle: Handle) -> Vec<u8> {
    format!("b{{{vm}:0:0}}{page:x}:{:x}", handle.bits()).into_bytes()
}

struct Attacker<'a>(&'a Valkey);

impl Attacker<'_> {
    fn say(&self, words: &[&[u8]]) {
        self.0.say_bytes(0, words).expect("the server does it");
    }

    fn set(&self, key: &[u8], value: &[u8]) {
        self.say(&[b"SET", key, value]);
    }

    fn get(&self, key: &[u8]) -> Vec<u8> {
        self.0.say_bytes(0, &[b"GET", key]).and_then(read).expect("a value")
    }
}

#[test]
fn no_forged_value_comes_back_as_a_page_or_costs_another_page() {
    let Some(valkey) = start(Layout { primaries: 1, replicas: 0, ..Layout::default() }) else { return };
    let (ours, attacker) = (cluster(&valkey, 0), Attacker(&valkey));
    let secret = seal::new_key().expect("random");
    for secret in [None, Some(&secret)] {
        let (victim, other) = (store(&ours, VM, secret), store(&ours, OTHER_VM, secret));
        let bytes: Vec<PageBytes> = (0..PAGES).map(page).collect();
        // The pages at an earlier time, and those of another VM with, at worst, the same key.
        let older = put(&victim, VM, &bytes);
        let foreign = put(&other, OTHER_VM, &bytes);
        let handles = put(&victim, VM, &bytes);
        let names: Vec<Vec<u8>> = (0..).zip(&handles).map(|(at, handle)| name(VM, at, *handle)).collect();
        let values: Vec<Vec<u8>> = names.iter().map(|name| attacker.get(name)).collect();

        let mut forged: Vec<Vec<u8>> = vec![
            Vec::new(),
            vec![0; 1],
            vec![0; PAGE_SIZE],
            vec![0xff; 1 << 16],
            vec![0; 1 << 20],
            // The value of another page, of another time, and of another VM.
            values[3].clone(),
            attacker.get(&name(VM, 1, older[1])),
            attacker.get(&name(OTHER_VM, 1, foreign[1])),
            [&values[1][..], b"x"].concat(),
            [&values[1][..], &values[1][..]].concat(),
        ];
        // Flips a bit of each byte of header, some payload and tag, and cuts the value after each of these bytes.
        let len = values[1].len();
        for at in (0..32).chain((32..len).step_by(97)).chain(len - 20..len) {
            let mut flipped = values[1].clone();
            flipped[at] ^= 1 << (at % 8);
            forged.extend([flipped, values[1][..at].to_vec()]);
        }
        for value in &forged {
            attacker.set(&names[1], value);
            let outcome = get_one(&victim, 1, handles[1]);
            // LZ4 has several forms of the same bytes, so a flip may give the very page.
            let is_same = secret.is_none() && value.len() == len && outcome == GetOutcome::Found;
            assert!(outcome == GetOutcome::Corrupt || is_same, "{outcome:?} for {} bytes", value.len());
        }
        // All pages at once, each with another forged value.
        for (name, value) in names[1..].iter().zip(&forged) {
            attacker.set(name, value);
        }
        let mut expected = vec![GetOutcome::Corrupt; PAGES as usize];
        expected[0] = GetOutcome::Found;
        assert_eq!(get(&victim, &handles), expected);
        // The right values again.
        names.iter().zip(&values).for_each(|(name, value)| attacker.set(name, value));
        assert_eq!(get(&victim, &handles), vec![GetOutcome::Found; PAGES as usize]);
        (0..).zip(&older).for_each(|(at, handle)| victim.free(key(at), *handle));
        drop((victim, other));
    }
}
