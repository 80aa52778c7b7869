//! Tests the promises of every store on the remote store, with a healthy cluster, on loopback and over a network.
//!
//! Before: `scripts/valkey.sh` unpacked the server. Threads: those of the conformance kit. Skipped without `valkey`.

mod common;

use std::time::Duration;

use ballast_base::Bytes;
use ballast_base::wire::VmId;
use ballast_remote::RemoteBudget;
use ballast_store::{Codec, SlowStore};
use ballast_testkit::conformance;
use ballast_testvm::valkey::Layout;
use common::{LEASE, cluster, start};

fn keeps_promises(layout: Layout, codecs: &[Codec]) {
    let Some(valkey) = start(layout) else { return };
    let cluster = cluster(&valkey, 1);
    for codec in codecs {
        conformance::run_slow(&|| {
            let budget = RemoteBudget::new(Bytes(2 << 20));
            let store = ballast_remote::RemoteStore::new(VmId([7; 16]), cluster.clone(), budget, *codec, LEASE);
            Box::new(store) as Box<dyn SlowStore>
        });
    }
    assert_eq!(valkey.keys().expect("a size"), 1, "nothing is left but the VM's lease");
}

#[test]
fn the_remote_store_keeps_what_every_store_promises() {
    keeps_promises(Layout::default(), &[Codec::Lz4, Codec::Zstd { level: 1 }]);
}

#[test]
fn it_does_so_over_a_network_with_latency() {
    keeps_promises(Layout { latency: Duration::from_micros(500), ..Layout::default() }, &[Codec::Lz4]);
}
