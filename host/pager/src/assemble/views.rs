//! Adds a process that maps a VM's RAM.
//!
//! Before: the keeper passed the process on. After: its faults are served, before any page can be far for it, and its
//! client's messages are read.
//! Threads: any.
//! Promise: no page is zapped in a chunk that is not registered with every view.

use std::io;
use std::sync::Arc;

use ballast_base::wire::Span;

use crate::fault::server::{FaultServer, Shard};
use crate::run::servers::Servers;
use crate::vm::Vm;
use crate::vm::huge::learn;
use crate::vm::view::View;

impl Vm {
    /// Serves one more process that maps this VM's RAM. After an error, it may be called again without `spans`, which
    /// are recorded. Returns the regions of which a chunk could not be registered, with the reason: they are served,
    /// but none of their pages may be far.
    pub fn add_view(self: &Arc<Self>, view: Arc<View>, spans: &[(Span, u32)]) -> io::Result<Vec<(u32, io::Error)>> {
        for (span, number) in spans {
            view.add_span(*span, *number);
            self.region(*number).into_iter().for_each(|region| region.set_unplugged(false));
        }
        // No batch is under way while the layout is held, and no earlier batch is evicted afterwards.
        let layout = self.memory.change_layout();
        let mut bad = Vec::new();
        for region in self.regions() {
            bad.extend(self.register_as_flagged(&region, &view).err().map(|error| (region.number, error)));
            for chunk in region.registered_chunks() {
                learn(&view, &region, chunk);
            }
        }
        self.memory.add_view(view.clone());
        drop(layout);
        self.serve_faults(&view)?;
        self.listen(&view)?;
        self.mail.agent.notifier.notify();
        self.notify_reclaim();
        // The kernel does not deliver faults again that an earlier engine read and did not resolve.
        view.wake_all()?;
        Ok(bad)
    }

    fn serve_faults(self: &Arc<Self>, view: &Arc<View>) -> io::Result<()> {
        if self.life.has_faults(view) || view.is_closed() {
            return Ok(());
        }
        let (servers, group) = (Servers::of_process()?, self.group());
        let added = (0..view.uffds().len()).try_for_each(|number| {
            let (vm, shard) = (self.clone(), Arc::new(Shard(view.clone(), number)));
            let served = servers.add(group, shard.clone(), |notify| Box::new(FaultServer::new(vm, shard, notify)))?;
            self.life.add_faults(view.clone(), served);
            Ok(())
        });
        if added.is_err() {
            // All servers are added or none: a second call must find none.
            self.life.forget_faults(|known| std::ptr::eq(known, &**view));
        }
        added
    }
}
