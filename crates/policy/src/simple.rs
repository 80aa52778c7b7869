//! Two policies that measure nothing: baselines.
//!
//! Promise: their plan changes only when VMs come or go, or when settings or the budget change.

use crate::frame::{Frame, pages};
use crate::memory::{Policy, State};
use crate::reason::Reason;
use crate::snapshot::{Plan, Snapshot};

/// Equal parts, by shares. If a VM may have less, the others get the rest.
#[derive(Clone, Copy, Debug)]
pub struct Fixed;

/// The same fraction of each VM's size, by shares.
#[derive(Clone, Copy, Debug)]
pub struct Ratio;

impl Policy for Fixed {
    fn name(&self) -> &'static str {
        "fixed"
    }

    fn decide(&self, snapshot: &Snapshot, state: &mut State) -> Plan {
        static_parts(self.name(), snapshot, state, false)
    }
}

impl Policy for Ratio {
    fn name(&self) -> &'static str {
        "ratio"
    }

    fn decide(&self, snapshot: &Snapshot, state: &mut State) -> Plan {
        static_parts(self.name(), snapshot, state, true)
    }
}

fn static_parts(name: &str, snapshot: &Snapshot, state: &mut State, by_size: bool) -> Plan {
    let mut frame = Frame::new(name, snapshot, state);
    let weigh = |part: &mut crate::frame::Managed<'_>| {
        let shares = part.vm.settings.effective_shares();
        part.reasons.push(Reason::Part { by_size, shares });
        f64::from(shares) * if by_size { pages(part.vm.size_bytes).max(1) as f64 } else { 1.0 }
    };
    let weights: Vec<f64> = frame.managed.iter_mut().map(weigh).collect();
    frame.divide(&weights, true)
}
