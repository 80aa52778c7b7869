//! `ballast policy`, `plan` and `explain`: the policy, its decisions and their reasons.
//!
//! Before: the daemon's governor decides and remembers. After: tables and sentences for people, the API's documents as
//! JSON for programs.

use std::fmt::Write;

use anyhow::{Context, Result};
use ballast_api::policy::{Action, Decision, HostState, Kind, Plan};
use ballast_api::{Client, DecisionRecord, PolicyPatch, PolicyStat, SettingSource, SourceKind, VmStat};

use crate::args::{ExplainArgs, PolicyCommand};
use crate::{agent, names, show};

pub fn run(client: &Client, command: &PolicyCommand, json: bool) -> Result<()> {
    let stat = match command {
        PolicyCommand::Show => client.policy()?,
        PolicyCommand::Set { policy, tick_ms, budget, threshold } => {
            let patch = PolicyPatch {
                policy: Some(*policy),
                tick_ms: *tick_ms,
                budget_bytes: budget.map(|budget| budget.0.map(|bytes| bytes.0)),
                threshold: *threshold,
            };
            client.patch_policy(&patch).with_context(|| format!("Setting the policy {policy}"))?
        }
    };
    show::answer(json, &stat, describe)
}

fn describe(stat: &PolicyStat) -> String {
    let mut text = String::new();
    let size = show::size;
    let _ = writeln!(text, "policy     {}, every {} ms", stat.policy, stat.tick_ms);
    let given = if stat.budget_bytes.is_some() { "as set" } else { "what the host can spare now" };
    let _ = writeln!(text, "budget     {} for all guests ({given})", size(stat.effective_budget_bytes));
    let _ = writeln!(text, "pressure   a VM may stall {:.1} % of the time", stat.threshold * 100.0);
    let _ = writeln!(text, "host       {}", host_state(stat.state, stat.exhaustion_ms));
    if let Some(lease) = &stat.lease {
        let left = lease.left_ms as f64 / 1e3;
        let _ = writeln!(text, "lease      the program {} decides, for another {left:.1} s", lease.holder);
    }
    let ticks = show::grouped(stat.ticks);
    let _ = writeln!(text, "decisions  {ticks}, which changed {} limits", show::grouped(stat.changed_limits));
    text
}

pub fn host_state(state: Option<HostState>, exhaustion_ms: Option<u64>) -> String {
    let Some(state) = state else { return "not watched without a policy".into() };
    match exhaustion_ms {
        Some(ms) => format!("{state}, no free memory in {:.1} s at this rate", ms as f64 / 1e3),
        None => state.to_string(),
    }
}

/// `ballast plan`: prints the changes that a policy would make now, and makes none.
pub fn plan(client: &Client, policy: Option<Kind>, json: bool) -> Result<()> {
    let plan = client.plan(policy).context("Asking for a plan")?;
    show::answer(json, &plan, intentions)
}

fn intentions(plan: &Plan) -> String {
    let mut text = String::new();
    let divided = show::size(plan.divided_bytes);
    let state = host_state(Some(plan.host_state), plan.exhaustion_ms);
    let _ = writeln!(text, "{} would divide {divided}; the host is {state}. Nothing was done.\n", plan.policy);
    let mut table = show::table(&["VM", ">TARGET NOW", ">THEN", "BECAUSE"]);
    for decision in &plan.decisions {
        let because = decision.reasons.first().map(ToString::to_string).unwrap_or_default();
        let now = show::limit(decision.before_bytes);
        table.add_row([decision.name.clone(), now, outcome(decision), because]);
    }
    text + &show::lines(&table)
}

fn outcome(decision: &Decision) -> String {
    match decision.action {
        Action::Leave => "left alone".into(),
        _ => show::limit(decision.after_bytes()),
    }
}

pub fn explain(client: &Client, args: &ExplainArgs, json: bool) -> Result<()> {
    let found = client.decisions(&args.name).map_err(|error| names::explain(client, &args.name, error))?;
    let last = &found[found.len().saturating_sub(args.last)..];
    if json {
        return show::json(&last);
    }
    let vm = client.vm(&args.name).ok();
    let about = vm.iter().flat_map(|vm| [agent::in_brief(vm), show::keeps_free_memory(vm)]).flatten();
    let said: String = about.map(|sentence| sentence + "\n").collect();
    let said = vm.as_ref().map(settings_from).unwrap_or_default() + &said;
    if last.is_empty() {
        let policy = client.policy()?.policy;
        let none = "no policy has decided about it since this engine started";
        return Ok(show::print(&format!("{}: {none} (the policy is {policy})\n{said}", args.name))?);
    }
    Ok(show::print(&(story(&args.name, last) + &said))?)
}

fn settings_from(vm: &VmStat) -> String {
    let mut text = String::new();
    for SettingSource { setting, source, rule } in &vm.sources {
        let settings = &vm.settings;
        let value = match setting.as_str() {
            "limit" => show::limit(vm.limit_bytes),
            "reservation" => show::size(settings.reservation_bytes),
            "protect" => show::size(settings.protect_bytes),
            "shares" => settings.effective_shares().to_string(),
            "headroom" => format!("{} %", settings.headroom_percent),
            _ => settings.class.to_string(),
        };
        let from = match (source, rule) {
            (SourceKind::CommandLine, _) => "its VMM's command line".to_owned(),
            (SourceKind::Operator, _) => format!("an operator (`ballast vm forget {}` ends that)", vm.name),
            (SourceKind::Rule, Some(rule)) => format!("[vm.{rule:?}] in the settings of ballastd"),
            (SourceKind::Rule, None) => "a pattern that the settings of ballastd had when it attached".to_owned(),
        };
        let _ = writeln!(text, "{setting} {value}: by {from}");
    }
    text
}

fn story(name: &str, records: &[DecisionRecord]) -> String {
    let mut text = String::new();
    for record in records {
        let (vm, decision) = (&record.vm, &record.decision);
        let what = decision.words();
        let before = match decision.before_bytes {
            _ if !decision.changes() => String::new(),
            None => " (before: no target)".into(),
            Some(before) => format!(" (before: {})", show::size(before)),
        };
        let since = match record.times {
            1 => show::time(record.first_unix_ms),
            times => {
                format!("{}, {times} times since {}", show::time(record.last_unix_ms), show::time(record.first_unix_ms))
            }
        };
        let _ = writeln!(
            text,
            "{since}\n{name} {what}{before}, by {}, with the host {}:",
            record.policy, record.host_state
        );
        for sentence in &record.sentences {
            let _ = writeln!(text, "  - {sentence}");
        }
        let (resident, size, stall) =
            (show::size(vm.resident_bytes), show::size(vm.size_bytes), vm.worst_stall() * 100.0);
        let _ = writeln!(text, "  It had {resident} of {size} resident and stalled {stall:.2} % of the time.\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_api::policy::{Reason, VmSample};
    use ballast_base::MIB;

    #[test]
    fn an_explanation_is_sentences_with_the_figures() {
        let reasons = vec![Reason::Scarce { most_bytes: 512 * MIB, budget_bytes: 256 * MIB }];
        let sentences = reasons.iter().map(ToString::to_string).collect();
        let decision = Decision { action: Action::Limit, limit_bytes: Some(64 * MIB), reasons, ..Decision::default() };
        let vm = VmSample { size_bytes: 256 * MIB, resident_bytes: 60 * MIB, stall: 0.0125, ..VmSample::default() };
        let record =
            DecisionRecord { times: 1, policy: "maestro".into(), vm, decision, sentences, ..DecisionRecord::default() };
        let text = story("web", &[record]);
        for part in [
            "web may use 64 MiB (before: no target), by maestro, with the host high:",
            "  - all VMs may have 512 MiB and there are 256 MiB",
            "60 MiB of 256 MiB resident and stalled 1.25 % of the time",
        ] {
            assert!(text.contains(part), "{part:?} is not in\n{text}");
        }
    }
}
