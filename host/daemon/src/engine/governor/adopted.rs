//! Changes of the settings of adopted VMs.
//!
//! Before: an operator changes something. After: the worker of adopted VMs holds the VM to it.
//! Threads: an API thread, under the governor's lock. Units: bytes.
//! Promise: a change is checked as a whole before it is made.

use ballast_base::Bytes;
use ballast_policy::admission::Admission;
use ballast_policy::{Class, Settings};

use super::Governor;
use super::sample::now_ms;
use crate::engine::adopted::vm::AdoptedVm;
use crate::engine::host::Host;

impl Governor {
    /// Change the settings and the limit of an adopted VM, unless they contradict themselves or other VMs'
    /// reservations, or could need more swap than there is.
    pub fn admit_adopted(
        &self,
        host: &Host,
        vm: &AdoptedVm,
        settings: Settings,
        limit: Option<Bytes>,
    ) -> Result<(), String> {
        let size = vm.vm.size();
        let before = vm.terms();
        if let Some(why) = settings.contradiction(size, limit.map(|limit| limit.0)) {
            return Err(why);
        }
        let mut inner = self.lock();
        let is_lower = limit.map_or(size, |limit| limit.0) < before.limit.map_or(size, |limit| limit.0);
        if let Some(why) = is_lower.then(|| host.adopted.refusal(vm, limit)).flatten() {
            return Err(why);
        }
        let reserved = |settings: Settings, limit: Option<Bytes>| {
            settings.effective_reservation(limit.map_or(size, |limit| limit.0.min(size)))
        };
        if reserved(settings, limit) > reserved(before.settings, before.limit) {
            let mut snapshot = inner.sampler.peek(host, &inner.setup, now_ms());
            for sample in snapshot.vms.iter_mut().filter(|sample| sample.id == vm.id) {
                let class = if sample.settings.class == Class::Pinned { Class::Pinned } else { settings.class };
                sample.settings = Settings { class, ..settings };
                sample.limit_bytes = limit.map(|limit| limit.0);
            }
            if let Some(why) = Admission::of(&snapshot).refusal() {
                return Err(why);
            }
        }
        vm.change(|terms| (terms.settings, terms.limit) = (settings, limit));
        if inner.is_active() {
            self.notify(&mut inner);
        }
        drop(inner);
        host.adopted.keep();
        host.adopted.notify();
        Ok(())
    }
}
