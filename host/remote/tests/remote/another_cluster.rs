//! Tests that a page is not lost because another cluster does not have it.
//!
//! Before: a VM has pages in one cluster, and its settings name another one, or that cluster was emptied. After: its
//! pages wait, none goes to the wrong cluster, operators know it, and the right one returns every byte.
//! Threads: the tests'. Units: pages. Needs `valkey`.

use crate::common;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ballast_base::wire::VmId;
use ballast_base::{Bytes, PAGE_SIZE};
use ballast_remote::{Access, Addr, Cluster, ClusterOptions, RemoteStore, identity};
use ballast_store::{DurableStore, GetOutcome, Handle, IoContext, PageKey, PutOutcome, SlowStore, Store};
use ballast_testkit::pages;
use ballast_testvm::valkey::{Layout, Valkey, read};
use common::{VM, key, key_of, known, start, store, store_of, stored, until};

const ONE: Layout =
    Layout { primaries: 1, replicas: 0, node_timeout: Duration::from_secs(1), maxmemory: Bytes(64 << 20), tls: false };
const TRIES: usize = 5;

fn client(clusters: &[&Valkey]) -> Arc<Cluster> {
    let nodes = clusters.iter().map(|valkey| Addr::parse(&valkey.addr(0)).expect("an address")).collect();
    Arc::new(Cluster::new(ClusterOptions { nodes, access: Access::default(), replicas: 0 }))
}

/// What an engine of the VM and its operators know.
#[derive(Default)]
struct Vm {
    kept: Arc<AtomicU64>,
    told: Arc<Mutex<Vec<String>>>,
}

impl Vm {
    /// Starts the next engine of the VM, whose words name these pages.
    fn engine(&self, cluster: &Arc<Cluster>, live: &[(PageKey, Handle)]) -> RemoteStore {
        let told = self.told.clone();
        let tell = move |text| told.lock().expect("told").push(text);
        let store = store(cluster).kept_in(self.kept.clone(), Some(Box::new(tell)));
        store.recover(&mut live.iter().copied()).expect("recover");
        store
    }

    fn told(&self) -> Vec<String> {
        std::mem::take(&mut *self.told.lock().expect("told"))
    }
}

fn put(store: &RemoteStore, pages: std::ops::Range<u64>) -> Vec<(PageKey, Handle)> {
    let one = |page| (key(page), stored(store, key(page), &[pages::incompressible(page)])[0]);
    pages.map(one).collect()
}

fn get(store: &RemoteStore, (key, handle): (PageKey, Handle)) -> GetOutcome {
    let mut out = [0; PAGE_SIZE];
    let outcome = store.get(key, handle, &mut out, IoContext::GUEST);
    assert!(outcome != GetOutcome::Found || out == pages::incompressible(key.page.0), "{key:?} has other bytes");
    outcome
}

fn get_at_last(store: &RemoteStore, page: (PageKey, Handle)) -> GetOutcome {
    known(store, || get(store, page))
}

/// Checks that a read waits for the page, and that a put is refused.
fn waits(store: &RemoteStore, page: (PageKey, Handle)) {
    (0..TRIES).for_each(|_| assert_eq!(get(store, page), GetOutcome::Busy));
    until(|| {
        assert_eq!(get(store, page), GetOutcome::Busy);
        if store.elsewhere().is_some() { Ok(()) } else { Err(store.last_refusal()) }
    });
    assert_eq!(store.put(key(99), &pages::incompressible(99)), PutOutcome::Busy);
}

fn identities(valkey: &Valkey) -> Vec<String> {
    let keys = valkey.say(0, &["KEYS", "bl{cluster:*"]).and_then(read::<Vec<String>>).expect("keys");
    keys.iter().map(|key| valkey.text(0, &["GET", key]).expect("a value")).collect()
}

#[test]
fn pages_in_another_cluster_wait_until_that_one_is_back_and_an_emptied_one_loses_them_when_operators_say_so() {
    let (Some(right), Some(wrong)) = (start(ONE), start(ONE)) else { return };
    let (vm, at_right, at_wrong) = (Vm::default(), client(&[&right]), client(&[&wrong]));
    let live = put(&vm.engine(&at_right, &[]), 0..3);
    let kept = vm.kept.load(Ordering::Relaxed);
    assert_eq!(identities(&right), vec![format!("{kept:016x}"); 16]);
    // An empty cluster, and then one that has the pages of others.
    for other in [VmId([8; 16]), VmId([9; 16])] {
        let engine = vm.engine(&at_wrong, &live);
        waits(&engine, live[0]);
        assert_eq!(engine.keep_lease(), None, "it is not overdue yet");
        let told = vm.told();
        assert!(matches!(&told[..], [only] if only.contains("another") && only.contains("emptied")), "{told:?}");
        assert_eq!(engine.elsewhere(), Some(told[0].clone()));
        stored(&store_of(other, &at_wrong), key_of(other, 0), &[pages::mixed(1)]);
    }
    assert_eq!(wrong.keys().expect("keys"), 4, "of the others, pages and leases");
    // The cluster that has the pages.
    let engine = vm.engine(&at_right, &live);
    live.iter().for_each(|page| assert_eq!(get_at_last(&engine, *page), GetOutcome::Found));
    assert_eq!((engine.elsewhere(), vm.told()), (None, Vec::new()));
    right.say(0, &["FLUSHALL"]).expect("FLUSHALL");
    waits(&engine, live[0]);
    assert_eq!(vm.told().len(), 1);
    assert_eq!(identities(&right), [""; 0]);
    right.say(0, &["SET", "bl{cluster:0}", &format!("{kept:016x}")]).expect("SET");
    assert_eq!(get_at_last(&engine, live[0]), GetOutcome::Absent);
    assert_eq!(engine.elsewhere(), None);
    identity::mend(&at_right);
    assert_eq!(identities(&right), vec![format!("{kept:016x}"); 16]);
    // A VM that has no page in any cluster may use any.
    let engine = vm.engine(&at_wrong, &[]);
    put(&engine, 5..6);
    assert_ne!(vm.kept.load(Ordering::Relaxed), kept);
}

#[test]
fn a_page_is_lost_in_its_own_cluster_only_even_if_the_settings_name_nodes_of_two() {
    let (Some(right), Some(wrong)) = (start(ONE), start(ONE)) else { return };
    let vm = Vm::default();
    let live = put(&vm.engine(&client(&[&right]), &[]), 0..3);
    drop(put(&Vm::default().engine(&client(&[&wrong]), &[]), 50..51));
    let both = client(&[&right, &wrong]);
    let engine = vm.engine(&both, &live);
    let (begun, mut found) = (Instant::now(), 0);
    let mut refused = 0;
    while found < 10 || refused < 3 {
        match get(&engine, live[1]) {
            GetOutcome::Found => found += 1,
            outcome => assert_eq!(outcome, GetOutcome::Busy, "after {found}"),
        }
        refused += usize::from(engine.put(key(99), &pages::incompressible(99)) == PutOutcome::Busy);
        // Each refresh may take the map of the other cluster.
        both.refresh(IoContext::BACKGROUND);
        assert!(begun.elapsed() < Duration::from_secs(60), "found {found} times, refused {refused} times");
    }
    right.say(0, &["DEL", &format!("b{{{VM}:0:0}}1:{:x}", live[1].1.bits())]).expect("DEL");
    assert_eq!(get_at_last(&engine, live[1]), GetOutcome::Absent, "it is lost where it was");
    let its = wrong.say(0, &["KEYS", "b{*"]).and_then(read::<Vec<String>>).expect("keys");
    assert_eq!(its.len(), 1, "what the other VM put: {its:?}");
}

#[test]
fn engines_that_give_an_identity_at_the_same_time_agree_and_a_key_that_is_lost_comes_back() {
    let Some(valkey) = start(Layout { replicas: 0, ..Layout::default() }) else { return };
    let vms: Vec<Vm> = (0..8).map(|_| Vm::default()).collect();
    std::thread::scope(|scope| {
        for (number, vm) in (0..).zip(&vms) {
            let valkey = &valkey;
            scope.spawn(move || put(&vm.engine(&client(&[valkey]), &[]), number..number + 1));
        }
    });
    let kept = vms[0].kept.load(Ordering::Relaxed);
    assert!(kept != 0 && vms.iter().all(|vm| vm.kept.load(Ordering::Relaxed) == kept));
    let owned = |node: usize| valkey.say(node, &["KEYS", "bl{cluster:*"]).and_then(read::<Vec<String>>).expect("keys");
    let before = [0, 1, 2].map(|node| owned(node).len());
    assert!(before.iter().sum::<usize>() == 16 && before.iter().all(|keys| *keys > 2), "{before:?}");
    valkey.say(1, &["FLUSHALL"]).expect("FLUSHALL");
    let ours = client(&[&valkey]);
    let engine = vms[0].engine(&ours, &[]);
    put(&engine, 30..31);
    identity::mend(&ours);
    assert_eq!([0, 1, 2].map(|node| owned(node).len()), before);
    let said: Vec<String> = owned(1).iter().map(|key| valkey.text(1, &["GET", key]).expect("a value")).collect();
    assert!(said.iter().all(|said| *said == format!("{kept:016x}")), "{said:?}");
}
