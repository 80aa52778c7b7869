//! Takes a sample of the host and of each VM every 10 s, for the history in the API.
//!
//! Threads: one of its own. Promise: while VMs move between engines no sample is taken, because no engine has all VMs.

use std::io;
use std::sync::Arc;

use crate::backend::Shown;
use crate::history::STEP;
use crate::http::Backend;

pub fn start(shown: Arc<Shown>) -> io::Result<()> {
    std::thread::Builder::new().name("history".into()).spawn(move || {
        let mut is_first = true;
        loop {
            std::thread::sleep(STEP);
            if shown.governor.is_resting() {
                continue;
            }
            let vms = shown.vms();
            let host = shown.host_of(&vms);
            if std::mem::take(&mut is_first) {
                shown.host.past.keep_only(&vms.iter().map(|vm| vm.id.clone()).collect::<Vec<_>>());
            }
            let wss = |name: &str| shown.heat(name, 0).filter(|heat| heat.cycles > 0).map(|heat| heat.wss_bytes);
            shown.host.past.add(&host, &vms, wss);
        }
    })?;
    Ok(())
}
