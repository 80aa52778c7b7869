//! The balloon: how much the agents of guests should hold under the current policy, before anything is paged.
//!
//! Before: a plan was applied. After: each agent was told how much of which node to hold ([`balloon`]).
//! Threads: the governor's.
//! Promise: nodes that an operator named are left to the operator; without a policy, agents are asked to hold nothing;
//! so is an agent that is silent, or that lies about its pages.

use ballast_base::PAGE_SIZE;
use ballast_pager::vm::Vm;
use ballast_pager::vm::guest::told;
use ballast_policy::balloon::{GuestNode, balloon};

/// Tells the agent how much to hold; nothing if no policy decides.
pub fn ask(vm: &Vm, is_active: bool) {
    let agent = vm.agent();
    if !is_active {
        return agent.end_policy_balloon();
    }
    let shown = agent.shown();
    if !matches!(shown.state, told::State::Reporting | told::State::Idle) || vm.held().is_some() {
        return;
    }
    let bytes = |pages: u64| pages.saturating_mul(PAGE_SIZE as u64);
    let node = |node: &told::Node| GuestNode {
        node: node.node,
        size_bytes: bytes(node.pages),
        free_bytes: bytes(node.free),
        held_bytes: bytes(node.ballooned),
    };
    let nodes: Vec<GuestNode> = shown.tick.nodes.iter().map(node).collect();
    let memory = vm.memory_breakdown();
    let may_have = vm.effective_limit().map(|limit| limit.0);
    for (node, wanted) in balloon(memory.resident.0 + memory.far.0, may_have, &nodes) {
        agent.set_policy_balloon(node, wanted / PAGE_SIZE as u64);
    }
}
