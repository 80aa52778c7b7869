//! Tests the promises of every store on the remote store, with a healthy cluster, on loopback.
//!
//! Before: `scripts/valkey.sh` unpacked the server. Threads: those of the conformance kit. Skipped without `valkey`.

use crate::common;

use ballast_base::Bytes;
use ballast_base::wire::VmId;
use ballast_remote::RemoteBudget;
use ballast_store::{Codec, SlowStore};
use ballast_testkit::conformance;
use ballast_testvm::valkey::Layout;
use common::{LEASE, cluster, start};

#[test]
fn the_remote_store_keeps_what_every_store_promises() {
    let Some(valkey) = start(Layout::default()) else { return };
    let cluster = cluster(&valkey, 1);
    for codec in [Codec::Lz4, Codec::Zstd { level: 1 }] {
        conformance::run_slow(&|| {
            let budget = RemoteBudget::new(Bytes(2 << 20));
            let store = ballast_remote::RemoteStore::new(VmId([7; 16]), cluster.clone(), budget, codec, LEASE);
            Box::new(store) as Box<dyn SlowStore>
        });
    }
    assert_eq!(valkey.keys().expect("a size"), 1, "nothing is left but the VM's lease");
}
