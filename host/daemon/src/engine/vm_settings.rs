//! The settings of a VM that attaches for the first time; given before its workers start and its first page can be
//! evicted.
//!
//! Before: the keeper has made the VM's state file, with the limit of the command line. After: the file has the
//! operators' earlier changes of this VM, and the settings of the rules that match it.
//! Threads: the VM's worker; those of the API read.
//! Promise: the VM is served even if settings cannot be read; an event names the missing ones.

use ballast_adopt::cgroup;
use ballast_api::{SettingSource, SourceKind};
use ballast_handover::state_file::StateFile;

use super::governor::operator;
use super::host::Host;
use crate::rules::{self, Identity, NAMES, Settled, Sources, Wanted};

pub fn identity(state: &StateFile) -> Identity {
    let (uid, pid) = state.owner().map_or((None, None), |(uid, pid)| (Some(uid), Some(pid)));
    let cgroups = pid.map(cgroup::paths).unwrap_or_default();
    let name = state.name();
    // `vm-PID`, or `vm-PID-NAMESPACE` with the process's own pid in another namespace.
    let own = |pid: u32| name == format!("vm-{pid}");
    let numbers = name.strip_prefix("vm-").map(|rest| rest.split('-').map(str::parse::<u32>).collect::<Vec<_>>());
    let is_of_namespace = matches!(numbers.as_deref(), Some([Ok(_), Ok(namespace)]) if *namespace >= 0xF000_0000);
    let is_named = !pid.is_some_and(own) && !is_of_namespace;
    Identity { name, is_named, uuid: state.uuid(), uid, cgroups }
}

pub fn settle(host: &Host, state: &StateFile) {
    if Sources::of_word(state.sources()).is_some() {
        return;
    }
    let vm = identity(state);
    let note = |kind: &str, message: String| host.events.add(Some(vm.name.clone()), kind, message);
    let kept = host.kept.of(&vm).unwrap_or_else(|error| {
        let name = &vm.name;
        note("settings-unread", format!("{name} starts without what operators changed of it earlier: {error}"));
        None
    });
    let kept = kept.map(|patch| (SourceKind::Operator, Wanted::from(&patch)));
    let rules = rules::for_vm(&host.settings.rules, &vm);
    let rules = rules.into_iter().map(|rule| (SourceKind::Rule, rule.wanted));
    let all: Vec<_> = kept.into_iter().chain(rules).collect();
    let mut settled = rules::settle(state.limit(), &all);
    // Sources that are each consistent may contradict each other.
    let limit = settled.limit.map(|limit| limit.0);
    if let Some(why) = settled.settings.contradiction(u64::MAX, limit) {
        note("settings-unread", format!("{} has its limit alone, because its settings do not agree: {why}", vm.name));
        let Settled { limit, sources, .. } = settled;
        let mut only = Sources::default();
        only.0[0] = sources.0[0];
        settled = Settled { limit, sources: only, settings: ballast_policy::Settings::default() };
    }
    state.set_limit(settled.limit);
    state.set_settings(operator::write(&settled.settings));
    state.set_sources(settled.sources.to_word());
    let named: Vec<String> = (sources(host, state).iter()).map(in_words).collect();
    if !all.is_empty() {
        note("settings", format!("{} attaches with its settings: {}", vm.name, named.join(", ")));
    }
}

fn in_words(SettingSource { setting, source, rule }: &SettingSource) -> String {
    match (source, rule) {
        (SourceKind::CommandLine, _) => format!("{setting} of its command line"),
        (SourceKind::Operator, _) => format!("{setting} as an operator left it"),
        (SourceKind::Rule, rule) => format!("{setting} of [vm.{:?}]", rule.as_deref().unwrap_or_default()),
    }
}

pub fn sources(host: &Host, state: &StateFile) -> Vec<SettingSource> {
    let sources = Sources::of_word(state.sources()).unwrap_or_default().0;
    let rules = match sources.contains(&Some(SourceKind::Rule)) {
        true => rules::for_vm(&host.settings.rules, &identity(state)),
        false => Vec::new(),
    };
    let named = (0..NAMES.len()).filter_map(|at| {
        let source = sources[at]?;
        let rule = rules.iter().find(|rule| source == SourceKind::Rule && rule.wanted.says()[at]);
        Some(SettingSource { setting: NAMES[at].into(), source, rule: rule.map(|rule| rule.pattern.clone()) })
    });
    named.collect()
}
