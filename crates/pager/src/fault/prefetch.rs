//! Prefetch: restores pages together that were evicted together, where that pays.
//!
//! Before: a fault worker restored a page and requested its neighbours (`cluster`). After: they are in memory before
//! the guest touches them. Threads: one task per VM, so a fault waits for it only on a page that it is restoring.
//! Units: pages of a region. Promise: a wrong guess costs time and space, never bytes: prefetched pages are restored
//! under their locks as others are, and invariant 1 decides. They stay within the limit, and only the newest requests
//! are kept.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ballast_base::{PAGE_SIZE, PageRange};
use ballast_store::PageBytes;

use super::far_run::restore_next_run;
use super::prefetch_queue::Request;
use crate::run::queue::Next;
use crate::vm::Vm;
use crate::vm::region::Region;
use crate::vm::view::View;

/// Pages that are restored as one: a fault on one of them waits for all, some 8 us.
const RUN: usize = 8;

/// How long one run of the task goes on with requests.
const SLICE: Duration = Duration::from_millis(1);

/// The prefetch worker of a VM.
pub(crate) struct PrefetchWorker {
    vm: Arc<Vm>,
    served: Option<Instant>,
    buffer: Box<[PageBytes; RUN]>,
}

impl PrefetchWorker {
    /// The prefetch worker of this VM.
    pub fn new(vm: Arc<Vm>) -> Self {
        Self { vm, served: None, buffer: Box::new([[0; PAGE_SIZE]; _]) }
    }

    /// Serves requests; returns when to look for more.
    pub fn run(&mut self, now: Instant) -> Next {
        let vm = &self.vm;
        while !vm.is_stopping() {
            let Some(Request { view, region: number, pages }) = vm.mail.prefetch.pop() else {
                return vm.mail.prefetch.pause(self.served, Instant::now());
            };
            self.served = Some(Instant::now());
            let Some(region) = vm.region(number).filter(|region| !region.is_removed()) else { continue };
            if let Err(error) = bring_back(vm, &view, &region, pages, &mut self.buffer[..]) {
                // The fault worker meets the same error and reports it.
                tracing::warn!(vm = vm.state.name(), region = number, %pages, "Prefetching: {error}");
            }
            if now.elapsed() >= SLICE {
                return Next::Again;
            }
        }
        Next::Done
    }
}

fn bring_back(
    vm: &Vm,
    view: &View,
    region: &Region,
    pages: PageRange,
    buffer: &mut [PageBytes],
) -> std::io::Result<()> {
    // Held so that the region is not unplugged meanwhile: its addresses may belong to other RAM right afterwards.
    let _layout = vm.layout();
    let Some(memory) = view.of_region(region).filter(|_| !region.is_removed()) else { return Ok(()) };
    if vm.mail.throttle.spare().is_none() && !vm.may_prefetch(pages.count())? {
        return Ok(());
    }
    let mut rest = pages;
    while vm.mail.throttle.spare().is_none_or(|spare| spare >= RUN as i64) {
        let Some(came) = restore_next_run(vm, region, &memory, rest, buffer)? else { break };
        rest = rest.from(came.end());
    }
    Ok(())
}
