//! Guests of the demo, and work that all of them do at the same time.
//!
//! Before: `lib` booted the guests. After: the caller has one figure per guest, in the order of the guests.
//! Threads: one per guest, for as long as the work takes. Units: operations per second.
//! Promise: every value that is read is compared.

use anyhow::{Result, anyhow, ensure};
use ballast_testvm::qemu::QemuGuest;
use ballast_testvm::qemu::load::{self, Dataset, Mix};

/// A guest and the data that its Redis must hold.
pub struct Guest {
    pub name: String,
    pub qemu: QemuGuest,
    pub data: Dataset,
}

/// Run `work` on every guest at the same time, one thread each. Returns the results in the order of the guests.
pub fn each<T: Send>(guests: &mut [Guest], work: impl Fn(&mut Guest) -> Result<T> + Sync) -> Result<Vec<T>> {
    std::thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = guests.iter_mut().map(|guest| scope.spawn(move || work(guest))).collect();
        threads.into_iter().map(|thread| thread.join().map_err(|_| anyhow!("a worker panicked"))?).collect()
    })
}

pub fn throughput(guests: &mut [Guest], mix: &Mix) -> Result<Vec<f64>> {
    each(guests, |guest| {
        let done = load::throughput(guest.qemu.redis_addr(), &mut guest.data, mix)?;
        let wrong = done.reads.wrong + done.reads.missing;
        ensure!(wrong == 0, "{wrong} wrong values in {}: {:?}", guest.name, done.reads.first_wrong);
        Ok(done.ops_per_s())
    })
}
