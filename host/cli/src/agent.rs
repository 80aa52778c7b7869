//! Describes the agent in a guest: for the screen of a VM, and for `ballast explain`.
//!
//! Before: the API's state of the agent. After: text. Promise: nothing is shown for a VM without the port of an agent.

use std::fmt::Write;

use ballast_api::{AgentState, NodeStat, TieringStat, TieringState, VmStat};

use crate::show;

/// The agent in the guest; empty if the VM has no port for an agent.
pub fn screen(vm: &VmStat) -> String {
    let Some(agent) = &vm.agent else { return String::new() };
    let mut text = format!("\nAGENT: {}", agent.state);
    if let Some(seconds) = agent.ignored_s {
        let _ = write!(text, " for {seconds} s more: the guest touched at once what it called cold");
    }
    if agent.version.is_empty() {
        return text + " (no reply yet)\n";
    }
    let _ = writeln!(text, " ({}, Linux {})", agent.version, agent.kernel);
    if !agent.note.is_empty() {
        let _ = writeln!(text, "  it says: {}", agent.note);
    }
    let [cold, free, total, available] =
        [agent.cold_bytes, agent.free_bytes, agent.guest_total_bytes, agent.guest_available_bytes].map(show::size);
    let count = show::grouped;
    let _ = writeln!(text, "  reports: {}; the last calls {cold} cold, {free} of it free", count(agent.reports));
    let _ = writeln!(text, "  guest: {available} available of {total}");
    let _ = writeln!(
        text,
        "  proved: {} of {} parts of its memory; told of {} restored pages",
        agent.pieces_proved,
        agent.pieces,
        count(agent.restored_pages)
    );
    if agent.service_restored_pages > 0 || agent.services_tuned {
        let tuned = if agent.services_tuned { "tuned, to copy less" } else { "not tuned" };
        let _ = writeln!(
            text,
            "  khugepaged and compaction: {tuned}; about {} of these pages were restored for them",
            count(agent.service_restored_pages)
        );
    }
    let rejected = [agent.rejected_messages, agent.rejected_pages, agent.garbage_bytes, agent.times_ignored];
    if rejected != [0; 4] {
        let [messages, pages, bytes, times] = rejected.map(count);
        let _ = writeln!(text, "  rejected: messages {messages}  pages {pages}  bytes {bytes}; ignored {times} times");
    }
    for node in agent.nodes.iter().filter(|node| agent.nodes.len() > 1 || node.balloon_wanted_bytes > 0) {
        let [size, free, held, wanted] =
            [node.size_bytes, node.free_bytes, node.balloon_bytes, node.balloon_wanted_bytes].map(show::size);
        let _ = writeln!(text, "  node {}: {free} free of {size}; holds {held} of {wanted} for the host", node.node);
    }
    if let Some(tiering) = &agent.tiering {
        text += &of_tiering(tiering);
    }
    for (who, picked) in [("the agent's report", agent.by_agent), ("the host's own", agent.by_host)] {
        if picked.judged_pages > 0 {
            let percent = picked.wrong_pages as f64 * 100.0 / picked.judged_pages as f64;
            let _ = writeln!(
                text,
                "  picked by {who}, and touched again within 10 s: about {percent:.1} % of {} pages",
                count(picked.judged_pages)
            );
        }
    }
    text
}

fn of_tiering(tiering: &TieringStat) -> String {
    let mut text = format!("  tiering: {}", tiering.state);
    if !tiering.note.is_empty() {
        let _ = write!(text, " ({})", tiering.note);
    }
    text.push('\n');
    for (at, tier) in tiering.tiers.iter().enumerate() {
        let which = if at == 0 { "fast" } else { "slow" };
        let [used, size] = [tier.size_bytes.saturating_sub(tier.free_bytes), tier.size_bytes].map(show::size);
        let _ = write!(text, "    {which} tier, node {}: {used} of {size} used", tier.node);
        let _ = writeln!(text, "{}", tier.latency_ns.map(|ns| format!(", {ns} ns")).unwrap_or_default());
    }
    if tiering.state == TieringState::Unable {
        return text;
    }
    let [managed, fast, up, down] =
        [tiering.managed_bytes, tiering.managed_fast_bytes, tiering.promoted_bytes, tiering.demoted_bytes]
            .map(show::size);
    let count = show::grouped;
    let _ = writeln!(text, "    programs: {}, with {managed}, of which {fast} are fast", tiering.programs);
    let hits = tiering.fast_hits_bp.map(|share| format!("{:.1} % of them fast just now; ", f64::from(share) / 100.0));
    let _ = writeln!(
        text,
        "    accesses sampled: {}; {}ranges: {}",
        count(tiering.samples),
        hits.unwrap_or_default(),
        count(tiering.ranges)
    );
    let stayed = count(tiering.stayed_pages);
    let _ = writeln!(text, "    moved: {up} to the fast tier, {down} from it; {stayed} pages could not be moved");
    text
}

/// The sentence that `ballast explain` prints.
pub fn in_brief(vm: &VmStat) -> Option<String> {
    let agent = vm.agent.as_ref()?;
    // The guest reports these numbers, and may report any.
    let sum = |of: fn(&NodeStat) -> u64| agent.nodes.iter().map(of).fold(0, u64::saturating_add);
    let (held, wanted) = (sum(|node| node.balloon_bytes), sum(|node| node.balloon_wanted_bytes));
    let balloon = (held | wanted > 0).then(|| {
        let [held, wanted] = [held, wanted].map(show::size);
        format!(" It holds {held} of {wanted} of free memory for the host: zeros, which cost less than paging.")
    });
    let state: String = match agent.state {
        AgentState::Reporting => {
            let (cold, free) = (show::size(agent.cold_bytes), show::size(agent.free_bytes));
            format!("Its guest's agent calls {cold} cold ({free} of it free): that memory goes first.")
        }
        AgentState::Ignored => "Its guest's agent is ignored: the guest touched at once what it called cold.".into(),
        AgentState::Idle => "Its guest's agent reports nothing, so the host tracks the VM itself.".into(),
        AgentState::Silent => "Its guest's agent is silent, so the host tracks the VM itself.".into(),
    };
    Some(state + &balloon.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_api::AgentStat;

    #[test]
    fn a_guest_that_claims_more_memory_than_there_is_does_not_stop_the_explanation() {
        let node =
            |node| NodeStat { node, balloon_bytes: u64::MAX, balloon_wanted_bytes: u64::MAX, ..NodeStat::default() };
        let agent = AgentStat { nodes: vec![node(0), node(1)], ..AgentStat::default() };
        let text = in_brief(&VmStat { agent: Some(agent), ..VmStat::default() }).expect("it has an agent");
        let most = show::size(u64::MAX);
        assert!(text.contains(&format!("It holds {most} of {most}")), "{text}");
    }
}
