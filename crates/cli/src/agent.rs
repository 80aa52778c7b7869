//! Describes the agent in a guest: for the screen of a VM, and for `ballast explain`.
//!
//! Before: the API's state of the agent. After: text. Promise: nothing is shown for a VM without the port of an agent.

use std::fmt::Write;

use ballast_api::{AgentState, VmStat};

use crate::show;

/// The agent in the guest; nothing if the VM has no port for one.
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
    let rejected = [agent.rejected_messages, agent.rejected_pages, agent.garbage_bytes, agent.times_ignored];
    if rejected != [0; 4] {
        let [messages, pages, bytes, times] = rejected.map(count);
        let _ = writeln!(text, "  rejected: messages {messages}  pages {pages}  bytes {bytes}; ignored {times} times");
    }
    for (who, picked) in [("the agent's report", agent.by_agent), ("the host's own", agent.by_host)] {
        if picked.judged_pages > 0 {
            let percent = picked.wrong_pages as f64 * 100.0 / picked.judged_pages as f64;
            let _ = writeln!(
                text,
                "  evicted by {who}, and touched again within 10 s: {percent:.1} % of {} pages sampled",
                count(picked.judged_pages)
            );
        }
    }
    text
}

/// The sentence that `ballast explain` prints.
pub fn in_brief(vm: &VmStat) -> Option<String> {
    let agent = vm.agent.as_ref()?;
    Some(match agent.state {
        AgentState::Reporting => {
            let (cold, free) = (show::size(agent.cold_bytes), show::size(agent.free_bytes));
            format!("Its guest's agent calls {cold} cold ({free} of it free): that memory goes first.")
        }
        AgentState::Ignored => "Its guest's agent is ignored: the guest touched at once what it called cold.".into(),
        AgentState::Idle => "Its guest's agent reports nothing, so the host tracks the VM itself.".into(),
        AgentState::Silent => "Its guest's agent is silent, so the host tracks the VM itself.".into(),
    })
}
