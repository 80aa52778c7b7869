//! Text for operators: why a VM waits, why its memory is not reclaimed, and which resource the host lacks.
//!
//! Before: the figures of VMs and of the host are read. After: sentences beside them.
//! Threads: those of the API.
//! Promise: a VM that runs and does not wait has no sentence, unless an operator should know a fact about its memory.

use std::collections::HashMap;

use ballast_api::{Event, HostStat, VmClass, VmStat, VmStatus};
use ballast_base::{Bytes, PAGE_SIZE};
use ballast_policy::{HostState, Kind};

const WAITS_PERCENT: f64 = 1.0;
/// Events that explain why a VM waits. Each holds for [`TROUBLE_LASTS_MS`], or until an event of [`OVER`] ends it.
const TROUBLES: [&str; 5] = ["fault-waits", "store-late", "spill-unavailable", "store-busy", "vm-stuck"];
const OVER: [&str; 2] = ["store-back", "spill-back"];
const TROUBLE_LASTS_MS: u64 = 600_000;
const NAMED: usize = 3;

#[derive(Debug, Default)]
pub(super) struct Facts {
    pub policy: Kind,
    pub state: Option<HostState>,
    /// DRAM for all guests, while a policy decides.
    pub budget_bytes: u64,
    pub store_bytes: u64,
    pub store_budget_bytes: u64,
    /// The last event of [`TROUBLES`] of each VM, as text.
    pub troubles: HashMap<String, String>,
}

/// The last trouble of each VM that has one. `events` are oldest first.
pub(super) fn troubles<'a>(events: impl IntoIterator<Item = &'a Event>, now_unix_ms: u64) -> HashMap<String, String> {
    let mut last = HashMap::new();
    for event in events {
        let Some(vm) = &event.vm else { continue };
        if OVER.contains(&event.kind.as_str()) {
            last.remove(vm);
        } else if TROUBLES.contains(&event.kind.as_str()) && event.at_unix_ms + TROUBLE_LASTS_MS > now_unix_ms {
            last.insert(vm.clone(), event.message.clone());
        }
    }
    last
}

/// Whether a store has little or no space. 1/4 of it is reserved for VMs that have used less of it than others, and the
/// last part stays empty, because pages differ in length.
fn is_full(used: u64, budget: u64) -> bool {
    budget > 0 && used >= budget - budget / 4 - budget / 16
}

fn is_refused(vm: &VmStat, store_bytes: u64, store_budget_bytes: u64) -> bool {
    let is_above = vm.lower_limit().is_some_and(|limit| vm.resident_bytes > limit + limit / 50);
    is_above && vm.reclaim.store_full_events > 0 && is_full(store_bytes, store_budget_bytes)
}

fn is_short(state: Option<HostState>) -> bool {
    state.is_some_and(|state| state >= HostState::Soft)
}

pub(super) fn of_vm(vm: &VmStat, facts: &Facts) -> Option<String> {
    let mut said = Vec::new();
    match (vm.status, &vm.status_reason) {
        (VmStatus::Halted, why) => {
            said.push(format!("It was stopped: {}.", why.as_deref().unwrap_or("its bytes could not be guaranteed")));
        }
        (VmStatus::Recovering, _) => {
            said.push("Its VMM is not connected: a touch of far memory waits until it is.".into());
        }
        (VmStatus::Blocked, Some(why)) => said.push(format!("Nothing is taken from it: {why}.")),
        (_, Some(why)) if vm.class == VmClass::Pinned => said.push(format!("Nothing is taken from it: {why}.")),
        _ => {}
    }
    let limit = vm.lower_limit();
    if vm.stall.some.avg10 > WAITS_PERCENT {
        said.push(waits(vm, limit, facts));
        said.extend(facts.troubles.get(&vm.name).map(|text| format!("{text}.")));
    }
    if let Some(limit) = limit.filter(|limit| vm.resident_bytes > limit + limit / 50) {
        said.extend(above(vm, limit, facts));
    }
    if vm.poisoned_bytes > 0 {
        said.push(format!("{} of its memory is lost: a touch is a memory error.", Bytes(vm.poisoned_bytes)));
    }
    if vm.unmanaged_bytes > 0 {
        said.push(format!("{} of its RAM is not managed.", Bytes(vm.unmanaged_bytes)));
    }
    (!said.is_empty()).then(|| said.join(" "))
}

fn waits(vm: &VmStat, limit: Option<u64>, facts: &Facts) -> String {
    let share = format!("It waits {:.1} % of the time for memory that is far", vm.stall.some.avg10);
    let Some(limit) = limit.filter(|limit| vm.resident_bytes >= limit - limit / 10) else {
        return format!("{share}; memory comes back as it is touched.");
    };
    let by = match (vm.limit_bytes == Some(limit), facts.policy) {
        (true, _) => "its operator's limit".to_owned(),
        (false, Kind::None) => "the plan of a program".to_owned(),
        (false, policy) => format!("the policy {policy}, for which all VMs may have {},", Bytes(facts.budget_bytes)),
    };
    let short = if is_short(facts.state) { " The host is short of memory." } else { "" };
    format!("{share}: {by} holds it at {}, and it uses more.{short}", Bytes(limit))
}

fn above(vm: &VmStat, limit: u64, facts: &Facts) -> Option<String> {
    let (over, pinned) = (vm.resident_bytes - limit, vm.pinned_pages * PAGE_SIZE as u64);
    let (used, budget) = (facts.store_bytes, facts.store_budget_bytes);
    let why = if is_refused(vm, used, budget) {
        format!("the store has no room for it ({} of {} used)", Bytes(used), Bytes(budget))
    } else if pinned > over / 2 {
        format!("{} is pinned by a device or by I/O under way", Bytes(pinned))
    } else {
        return None;
    };
    Some(format!("It has {} more than the {} that it may have: {why}.", Bytes(over), Bytes(limit)))
}

/// The resources that the host of these VMs lacks, the worst first.
pub(super) fn of_host(host: &HostStat, vms: &[VmStat]) -> Vec<String> {
    let mut said = Vec::new();
    let (available, total) = (Bytes(host.mem_available_bytes), Bytes(host.mem_total_bytes));
    if is_short(host.state) {
        let state = host.state.unwrap_or_default();
        said.push(format!("The host is short of memory ({state}): {available} of {total} are available."));
    } else if host.state.is_none() && available.0 < total.0 / 16 {
        let text = "No policy decides, so only limits of operators take memory from VMs.";
        said.push(format!("The host is short of memory: {available} of {total} are available. {text}"));
    }
    let refused = vms.iter().filter(|vm| is_refused(vm, host.store_bytes, host.store_budget_bytes));
    let refused: Vec<&str> = refused.map(|vm| vm.name.as_str()).collect();
    if !refused.is_empty() {
        let (used, budget) = (Bytes(host.store_bytes), Bytes(host.store_budget_bytes));
        let more = match refused.len().saturating_sub(NAMED) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let names = refused[..refused.len().min(NAMED)].join(", ");
        said.push(format!(
            "The store is full ({used} of {budget}), so VMs have more than they may have: {names}{more}. In \
             ballastd.toml raise store_budget or add [spill], a disk; or raise the limits of these VMs."
        ));
    }
    if host.file_budget_bytes > 0 && host.file_bytes >= host.file_budget_bytes - host.file_budget_bytes / 64 {
        let (used, budget) = (Bytes(host.file_bytes), Bytes(host.file_budget_bytes));
        said.push(format!("The file store is full ({used} of {budget}): far pages stay in RAM."));
    }
    let serious = host.remote.iter().flat_map(|remote| &remote.findings).filter(|finding| finding.serious);
    said.extend(serious.map(|finding| format!("The cluster: {}.", finding.text)));
    said
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_api::{Psi, Stall};
    use ballast_base::MIB;

    fn vm(limit: Option<u64>, target: Option<u64>, resident: u64, avg10: f64) -> VmStat {
        let stall = Stall { some: Psi { avg10, ..Psi::default() }, ..Stall::default() };
        let [limit_bytes, target_bytes] = [limit, target].map(|mib| mib.map(|mib| mib * MIB));
        VmStat {
            name: "web".into(),
            limit_bytes,
            target_bytes,
            resident_bytes: resident * MIB,
            stall,
            ..VmStat::default()
        }
    }

    fn facts() -> Facts {
        Facts {
            policy: Kind::Maestro,
            budget_bytes: 300 * MIB,
            store_bytes: MIB,
            store_budget_bytes: 64 * MIB,
            ..Facts::default()
        }
    }

    #[test]
    fn a_waiting_vm_has_a_sentence_with_the_limit_and_its_owner() {
        let say = |vm: &VmStat| of_vm(vm, &facts()).unwrap_or_default();
        assert_eq!(say(&vm(Some(100), None, 100, 0.2)), "");
        let held = say(&vm(Some(100), Some(200), 99, 12.34));
        let wanted = "It waits 12.3 % of the time for memory that is far: its operator's limit holds it at 100 MiB, \
                      and it uses more.";
        assert_eq!(held, wanted);
        assert!(
            say(&vm(Some(300), Some(200), 199, 5.0))
                .contains("the policy maestro, for which all VMs may have 300 MiB, holds it at 200 MiB")
        );
        assert!(say(&vm(None, None, 50, 5.0)).ends_with("memory comes back as it is touched."));
        let short = Facts { state: Some(HostState::Hard), ..facts() };
        let text = of_vm(&vm(None, Some(100), 100, 5.0), &short).expect("it waits");
        assert!(text.ends_with("The host is short of memory."), "{text}");
    }

    #[test]
    fn a_vm_above_its_limit_has_a_sentence_with_the_reason() {
        let full = Facts { store_bytes: 60 * MIB, ..facts() };
        let mut above = vm(Some(100), None, 130, 0.0);
        assert_eq!(of_vm(&above, &full), None, "its memory is on its way");
        above.reclaim.store_full_events = 1;
        let wanted = "It has 30 MiB more than the 100 MiB that it may have: the store has no room for it (60 MiB of \
                      64 MiB used).";
        assert_eq!(of_vm(&above, &full).as_deref(), Some(wanted));
        let pinned = VmStat { pinned_pages: 7680, ..vm(Some(100), None, 130, 0.0) };
        assert!(of_vm(&pinned, &facts()).is_some_and(|text| text.contains("30 MiB is pinned by a device")));
        let blocked = VmStat {
            status: VmStatus::Blocked,
            status_reason: Some("process 7 maps its RAM".into()),
            ..vm(Some(100), None, 130, 0.0)
        };
        assert_eq!(of_vm(&blocked, &facts()).as_deref(), Some("Nothing is taken from it: process 7 maps its RAM."));
    }

    #[test]
    fn a_trouble_is_mentioned_until_it_ends() {
        let event = |at_unix_ms, vm: &str, kind: &str| Event {
            at_unix_ms,
            vm: Some(vm.into()),
            kind: kind.into(),
            message: format!("{kind} of {vm}"),
            ..Event::default()
        };
        let events = vec![
            event(1, "old", "store-late"),
            event(700_000, "web", "store-late"),
            event(700_000, "db", "store-late"),
            event(700_001, "db", "store-back"),
            event(700_002, "web", "limit"),
        ];
        let troubles = troubles(&events, 700_100);
        assert_eq!(troubles, HashMap::from([("web".to_owned(), "store-late of web".to_owned())]));
        let text = of_vm(&vm(None, None, 5, 90.0), &Facts { troubles, ..facts() }).expect("it waits");
        assert!(text.ends_with(" store-late of web."), "{text}");
    }

    #[test]
    fn a_host_that_lacks_nothing_has_no_warning() {
        let fine = HostStat {
            mem_total_bytes: 1024 * MIB,
            mem_available_bytes: 512 * MIB,
            store_budget_bytes: 64 * MIB,
            ..HostStat::default()
        };
        let mut above = vm(Some(100), None, 130, 0.0);
        above.reclaim.store_full_events = 1;
        assert!(of_host(&fine, std::slice::from_ref(&above)).is_empty());
        let short = HostStat { mem_available_bytes: MIB, store_bytes: 64 * MIB, file_bytes: 1, ..fine };
        let said = of_host(&short, &[above]);
        assert!(
            said[0].contains("1 MiB of 1 GiB")
                && said[1].contains(
                    "full (64 MiB of 64 MiB), so VMs have more than they may have: web. In ballastd.toml raise"
                )
        );
        assert_eq!(said.len(), 2);
    }
}
