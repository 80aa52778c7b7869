//! Fast and slow memory of the host: the table `[tier]` of the settings.
//!
//! Before: `config` reads it, `settings` passes it on. After: the engine opens each VM with it, and the VM's tracking
//! worker moves its memory between the two nodes. Units: numbers of nodes, percent, MiB a second.
//! Promise: a node that the host does not have is an error when the keeper starts, which names it and the existing
//! nodes.

use anyhow::{Context, ensure};
use ballast_pager::vm::tuning::HostTiers;
use ballast_pool::Host;
use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tiering {
    #[serde(default)]
    pub fast_node: u32,
    pub slow_node: u32,
    /// Most of a VM's memory on the fast node, in percent of the VM's size.
    pub fast_percent: u32,
    /// Most memory of a VM that is moved in each direction, in MiB per second.
    #[serde(default = "quarter_gib")]
    pub mib_per_s: u64,
}

const fn quarter_gib() -> u64 {
    256
}

impl Tiering {
    pub fn validate(&self) -> anyhow::Result<()> {
        let Self { fast_node, slow_node, fast_percent, mib_per_s } = self;
        ensure!(fast_node != slow_node, "tier.slow_node = {slow_node} is the fast node as well");
        ensure!((1..=99).contains(fast_percent), "tier.fast_percent = {fast_percent} is out of range: 1 to 99");
        ensure!((1..=65_536).contains(mib_per_s), "tier.mib_per_s = {mib_per_s} is out of range: 1 to 65536");
        Ok(())
    }

    /// Checks that this host has the nodes.
    pub fn find_nodes(&self) -> anyhow::Result<()> {
        self.are_in(&Host::default().nodes().context("tier: asking for the host's nodes")?)
    }

    fn are_in(&self, nodes: &[u32]) -> anyhow::Result<()> {
        for (key, node) in [("fast_node", self.fast_node), ("slow_node", self.slow_node)] {
            let is_there = nodes.contains(&node);
            ensure!(is_there, "tier.{key} = {node}: the host has no such node with memory; it has {nodes:?}");
        }
        Ok(())
    }

    pub fn to_pager(self) -> HostTiers {
        let Self { fast_node, slow_node, fast_percent, mib_per_s } = self;
        HostTiers { fast_node, slow_node, fast_percent, mib_per_s }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIERING: Tiering = Tiering { fast_node: 0, slow_node: 2, fast_percent: 50, mib_per_s: 1 };

    #[test]
    fn a_missing_node_is_named_with_the_existing_ones() {
        assert!(TIERING.are_in(&[0, 2]).is_ok());
        let error = TIERING.are_in(&[0, 1, 3]).expect_err("no node 2").to_string();
        assert_eq!(error, "tier.slow_node = 2: the host has no such node with memory; it has [0, 1, 3]");
        let error = Tiering { fast_node: 7, ..TIERING }.are_in(&[2]).expect_err("no node 7").to_string();
        assert!(error.starts_with("tier.fast_node = 7"), "{error}");
    }
}
