//! `ballast vm`: a list, one VM on one screen, its heat, its limit, and its weight.

use std::fmt::Write;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use ballast_api::{
    Client, GuestRange, KeptVm, Latency, LimitsPatch, Psi, RegionStat, VmKind, VmPatch, VmStat, VmStatus,
};
use ballast_base::{Bytes, PAGE_SIZE};

use crate::adopt;
use crate::agent;
use crate::args::VmCommand;
use crate::heat;
use crate::names::explain;
use crate::show;

pub fn run(client: &Client, command: &VmCommand, json: bool) -> Result<()> {
    match command {
        VmCommand::List => show::answer(json, &client.vms()?, |vms| list(vms)),
        VmCommand::Stat { name } => {
            let vm = client.vm(name).map_err(|error| explain(client, name, error))?;
            show::answer(json, &vm, screen)
        }
        VmCommand::Heat(args) => heat::run(client, args, json),
        VmCommand::Limit { names, all: _, limit } => {
            let limit_bytes = limit.0.map(|Bytes(bytes)| bytes);
            let [name] = &names[..] else { return limit_several(client, names, limit_bytes, json) };
            let vm = client
                .set_limit(name, limit_bytes)
                .map_err(|error| explain(client, name, error))
                .with_context(|| format!("Setting the limit of VM {name}"))?;
            let warnings = vm.warnings.clone();
            let vm = VmStat { warnings, ..after_scan(client, vm)? };
            show::answer(json, &vm, limit_set)
        }
        VmCommand::Restore { name, end: true } => {
            let vm = client.end_restore(name).map_err(|error| explain(client, name, error))?;
            show::answer(json, &vm, |_| format!("VM {name}: its limit counts again\n"))
        }
        VmCommand::Restore { name, end: false } => {
            let vm = restore(client, name).with_context(|| format!("Restoring all of VM {name}"))?;
            let resident = show::size(vm.resident_bytes);
            show::answer(json, &vm, |_| {
                format!(
                    "VM {name}: all of it is in memory ({resident}) and stays there \
                     until `ballast vm restore {name} --end`\n"
                )
            })
        }
        VmCommand::Balloon { name, nodes } => {
            let mut changed = Vec::new();
            for node in nodes {
                let patch = VmPatch { balloon: Some(*node), ..VmPatch::default() };
                let vm = client
                    .patch_vm(name, &patch)
                    .map_err(|error| explain(client, name, error))
                    .with_context(|| format!("Asking the agent of VM {name} for memory of node {}", node.node))?;
                changed.push(vm);
            }
            let sizes: Vec<String> =
                nodes.iter().map(|of| format!("{} of node {}", show::size(of.bytes), of.node)).collect();
            show::answer(json, &changed.last(), |_| format!("VM {name}: its agent is to hold {}\n", sizes.join(", ")))
        }
        VmCommand::Set(args) => {
            let name = &args.name;
            let patch = VmPatch {
                limit_bytes: None,
                reservation_bytes: args.reservation.map(|size| size.0.map(|bytes| bytes.0)),
                protect_bytes: args.protect.map(|size| size.0.map(|bytes| bytes.0)),
                shares: args.shares.map(|shares| shares.0),
                headroom_percent: args.headroom.map(|headroom| headroom.0),
                class: args.class.map(|class| class.0),
                balloon: None,
            };
            let vm = client
                .patch_vm(name, &patch)
                .map_err(|error| explain(client, name, error))
                .with_context(|| format!("Changing the settings of VM {name}"))?;
            show::answer(json, &vm, |vm| format!("VM {name}: {}\n{}", worth(vm), not_kept(vm)))
        }
        VmCommand::Kept => show::answer(json, &client.kept()?, |kept| kept_list(kept)),
        VmCommand::Forget { vm } => {
            let forgotten = client.forget(vm).with_context(|| format!("Forgetting what is kept of VM {vm}"))?;
            let line = |kept: &KeptVm| format!("VM {}: forgotten: {}\n", kept.name, in_words(&kept.settings));
            show::answer(json, &forgotten, |forgotten| forgotten.iter().map(line).collect())
        }
    }
}

/// Whether the change that was just made ends with the VM. The VM's screen shows the other warnings.
fn not_kept(vm: &VmStat) -> String {
    let of_change = vm.warnings.iter().filter(|warning| warning.starts_with(VmStat::NOT_KEPT));
    of_change.map(|warning| format!("warning: {warning}\n")).collect()
}

fn kept_list(kept: &[KeptVm]) -> String {
    if kept.is_empty() {
        return "Nothing is kept: no limit or setting of a VM was changed.\n".into();
    }
    let mut table = show::table(&["NAME", "UUID", "CHANGED", "SETTINGS"]);
    for vm in kept {
        let uuid = vm.uuid.clone().unwrap_or_else(|| "-".into());
        table.add_row([vm.name.clone(), uuid, show::time(vm.changed_unix_ms), in_words(&vm.settings)]);
    }
    show::lines(&table)
}

fn in_words(patch: &VmPatch) -> String {
    fn word<T>(name: &str, value: Option<Option<T>>, shown: impl Fn(T) -> String) -> Option<String> {
        value.map(|value| format!("{name} {}", value.map_or("none".into(), shown)))
    }
    let words = [
        word("limit", patch.limit_bytes, show::size),
        word("reservation", patch.reservation_bytes, show::size),
        word("protect", patch.protect_bytes, show::size),
        word("shares", patch.shares, |shares| shares.to_string()),
        word("headroom", patch.headroom_percent, |percent| format!("{percent} %")),
        word("class", patch.class, |class| class.to_string()),
    ];
    words.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

/// Waits for the scan for foreign mappers, after which a VM's first limit takes effect, so that the result is printed.
fn after_scan(client: &Client, mut vm: VmStat) -> Result<VmStat> {
    /// Time between two samples, and number of samples.
    const PAUSE: Duration = Duration::from_millis(20);
    const MOST: usize = 100;
    for _ in 0..MOST {
        if !vm.waits_for_scan() {
            break;
        }
        std::thread::sleep(PAUSE);
        vm = client.vm(&vm.name)?;
    }
    Ok(vm)
}

/// Limits the VMs of these names, or all if there are none. A failure for one VM does not affect the others.
fn limit_several(client: &Client, names: &[String], limit_bytes: Option<u64>, json: bool) -> Result<()> {
    let vms = (!names.is_empty()).then(|| names.to_vec());
    let changes = client.set_limits(&LimitsPatch { vms, limit_bytes }).context("Setting the limit of several VMs")?;
    show::answer(json, &changes, |all| all.iter().filter_map(|change| change.vm.as_ref()).map(limit_set).collect())?;
    let failed = changes.iter().filter_map(|change| Some((&change.name, change.problem.as_ref()?)));
    let failed: Vec<String> = failed.map(|(name, problem)| format!("VM {name}: {problem}")).collect();
    if !failed.is_empty() {
        bail!("{} of {} limits could not be set: {}", failed.len(), changes.len(), failed.join("; "));
    }
    Ok(())
}

fn restore(client: &Client, name: &str) -> Result<VmStat> {
    const PAUSE: Duration = Duration::from_millis(100);
    /// Time without progress after which the command gives up.
    const TIMEOUT: Duration = Duration::from_secs(60);
    let mut vm = client.restore(name).map_err(|error| explain(client, name, error))?;
    let mut changed = Instant::now();
    loop {
        // A registered page may not be mapped everywhere. A lost page keeps its surroundings registered.
        let left = |vm: &VmStat| {
            let registered = if vm.poisoned_bytes > 0 { 0 } else { vm.registered_bytes };
            [vm.far_bytes, vm.zero_bytes, vm.quarantine_bytes, registered]
        };
        if left(&vm) == [0; 4] {
            return Ok(vm);
        }
        if changed.elapsed() > TIMEOUT {
            bail!("{} are still far and no more is restored; `ballast events` may say why", show::size(vm.far_bytes));
        }
        std::thread::sleep(PAUSE);
        let now = client.vm(name).map_err(|error| explain(client, name, error))?;
        if left(&now) != left(&vm) {
            changed = Instant::now();
        }
        vm = now;
    }
}

fn list(vms: &[VmStat]) -> String {
    if vms.is_empty() {
        return "No VM is attached or adopted. `ballast run -- qemu-system-x86_64 ...` starts one, and \
                `ballast adopt --all` adopts those that run.\n"
            .into();
    }
    let decided = vms.iter().any(|vm| vm.target_bytes.is_some());
    let adopted = vms.iter().any(|vm| vm.kind == VmKind::Adopted);
    let mut head = vec!["NAME", ">PID"];
    head.extend(adopted.then_some("KIND"));
    head.extend(["CLASS", "STATUS", ">SIZE", ">LIMIT"]);
    head.extend(decided.then_some(">TARGET"));
    head.extend([">RESIDENT", ">FAR", ">ZERO", ">UNTOUCHED"]);
    let mut table = show::table(&head);
    for vm in vms {
        let mut row = vec![vm.name.clone(), vm.pid.to_string()];
        row.extend(adopted.then(|| vm.kind.to_string()));
        row.extend([vm.class.to_string(), vm.status.to_string()]);
        row.extend([show::size(vm.size_bytes), show::limit(vm.limit_bytes)]);
        row.extend(decided.then(|| vm.target_bytes.map_or("-".into(), show::size)));
        row.extend([vm.resident_bytes, vm.far_bytes, vm.zero_bytes, vm.untouched_bytes].map(show::size));
        table.add_row(row);
    }
    show::lines(&table)
}

fn worth(vm: &VmStat) -> String {
    let settings = &vm.settings;
    let most = vm.limit_bytes.map_or(vm.size_bytes, |limit| limit.min(vm.size_bytes));
    let mut words = vec![format!("class {}", vm.class), format!("shares {}", settings.effective_shares())];
    words.push(format!("reservation {}", show::size(settings.effective_reservation(most))));
    if settings.protect_bytes > 0 {
        words.push(format!("protected {}", show::size(settings.protect_bytes)));
    }
    if settings.headroom_percent > 0 {
        words.push(format!("headroom {} %", settings.headroom_percent));
    }
    words.join(", ")
}

fn limit_set(vm: &VmStat) -> String {
    limit_in_words(vm) + &not_kept(vm)
}

fn limit_in_words(vm: &VmStat) -> String {
    let resident = show::size(vm.resident_bytes);
    let blocked = vm.status_reason.as_ref().filter(|_| vm.status == VmStatus::Blocked && !vm.waits_for_scan());
    if let (Some(limit), Some(reason)) = (vm.limit_bytes, blocked) {
        return format!("VM {}: limit {}, but nothing goes far now: {reason}\n", vm.name, show::size(limit));
    }
    match vm.limit_bytes {
        None => format!("VM {}: no limit (resident {resident})\n", vm.name),
        Some(limit) if vm.resident_bytes > limit => {
            let limit = show::size(limit);
            format!("VM {}: limit {limit}; resident {resident}, and the rest goes far from now on\n", vm.name)
        }
        Some(limit) => format!("VM {}: limit {} (resident {resident})\n", vm.name, show::size(limit)),
    }
}

fn screen(vm: &VmStat) -> String {
    let mut text = String::new();
    let _ = writeln!(text, "{}: {}, {}, limit {}", vm.name, vm.class, vm.status, show::limit(vm.limit_bytes));
    if let Some(reason) = &vm.status_reason {
        let _ = writeln!(text, "because {reason}");
    }
    if let Some(target) = vm.target_bytes {
        let _ = writeln!(text, "the policy allows it {} (ballast explain {} says why)", show::size(target), vm.name);
    }
    let _ = writeln!(text, "{}", worth(vm));
    for warning in &vm.warnings {
        let _ = writeln!(text, "warning: {warning}");
    }
    if let Some(why) = vm.why.as_ref().filter(|_| vm.status_reason.is_none()) {
        let _ = writeln!(text, "{why}");
    }
    let uuid = vm.uuid.as_ref().map_or(String::new(), |uuid| format!(", uuid {uuid}"));
    let _ = writeln!(text, "{}, pid {}{uuid}, id {}\n", vm.vmm, vm.pid, vm.id);
    text += &memory(vm);
    if let Some(adopted) = &vm.adopted {
        return text + &adopt::screen(vm, adopted);
    }
    text += &faults_and_reclaim(vm);
    let _ = writeln!(text, "\nSTALL (PSI form; percent, and microseconds in all)");
    let _ = writeln!(text, "{}\n{}", psi("some", &vm.stall.some), psi("full", &vm.stall.full));
    text.push('\n');
    if vm.regions.len() > 1 {
        text += &regions(vm);
        text.push('\n');
    }
    text += &guest_addresses(vm);
    text + &host_tiers(vm) + &agent::screen(vm)
}

/// The VM's memory on the host's nodes, if it is placed there by heat.
fn host_tiers(vm: &VmStat) -> String {
    let Some(tiers) = vm.host_tiers else { return String::new() };
    let fast = vm.resident_bytes.saturating_sub(tiers.slow_bytes);
    let [fast, limit, slow] = [fast, tiers.fast_limit_bytes, tiers.slow_bytes].map(show::size);
    let [up, down, stayed] = [tiers.to_fast_bytes, tiers.to_slow_bytes, tiers.stayed_bytes].map(show::size);
    let [split, refused, joined] = [tiers.split_units, tiers.split_refused, tiers.joined_units].map(show::grouped);
    format!(
        "HOST TIERS\n  fast, node {}: {fast} of at most {limit}; slow, node {}: {slow}\n  moved: {up} to the fast \
         node, {down} to the slow one; {stayed} could not be moved\n  huge pages: {split} split, {refused} not, \
         {joined} joined again\n\n",
        tiers.fast_node, tiers.slow_node
    )
}

fn guest_addresses(vm: &VmStat) -> String {
    let seen = |region: &RegionStat| {
        let index = region.index;
        let row = move |range: &GuestRange| (range.guest_address, range.size_bytes, index, range.offset_bytes);
        region.guest_ranges.iter().map(row).collect::<Vec<_>>()
    };
    let mut rows: Vec<_> = vm.regions.iter().flat_map(seen).collect();
    if rows.is_empty() {
        return "the guest-physical addresses of its memory are not known\n".into();
    }
    rows.sort_unstable();
    let mut table = show::table(&["GUEST-PHYSICAL", ">SIZE", ">REGION", ">OFFSET"]);
    for (address, size, index, offset) in rows {
        let last = address.saturating_add(size).saturating_sub(1);
        let place = format!("{address:#x}-{last:#x}");
        table.add_row([place, show::size(size), index.to_string(), format!("{offset:#x}")]);
    }
    show::lines(&table)
}

fn memory(vm: &VmStat) -> String {
    let mut table = show::table(&["MEMORY", ">KiB", ">PAGES", ">SHARE", ">"]);
    let mut row = |name: &str, bytes: u64, note: &str| {
        let pages = show::grouped(bytes / PAGE_SIZE as u64);
        let note = if note.is_empty() { show::size(bytes) } else { note.to_owned() };
        table.add_row([name.to_owned(), show::kib(bytes), pages, show::percent(bytes, vm.size_bytes), note]);
    };
    let mut parts = vec![
        ("resident", vm.resident_bytes),
        ("far", vm.far_bytes),
        ("zero", vm.zero_bytes),
        ("untouched", vm.untouched_bytes),
    ];
    if vm.poisoned_bytes > 0 {
        parts.push(("poisoned", vm.poisoned_bytes));
    }
    for (name, bytes) in &parts {
        row(name, *bytes, "");
        if *name == "resident" {
            if vm.kind == VmKind::Paged {
                row("  in quarantine", vm.quarantine_bytes, "part of resident");
            }
            if vm.pinned_pages > 0 {
                row("  pinned", vm.pinned_pages * PAGE_SIZE as u64, "part of resident, held by something");
            }
        }
        if *name == "far" && vm.far_file_bytes > 0 {
            row("  on disk", vm.far_file_bytes, "part of far");
        }
        if *name == "far" && vm.far_remote_bytes > 0 {
            row("  remote", vm.far_remote_bytes, "part of far");
        }
    }
    row("size", vm.size_bytes, "");
    if vm.unmanaged_bytes > 0 {
        row("unmanaged", vm.unmanaged_bytes, "not part of size: RAM that Ballast cannot take");
    }
    let mut text = show::lines(&table);
    let names: Vec<&str> = parts.iter().map(|(name, _)| *name).collect();
    let sums: Vec<String> = parts.iter().map(|(_, bytes)| show::kib(*bytes)).collect();
    let sum: u64 = parts.iter().map(|(_, bytes)| bytes).sum();
    let _ = writeln!(text, "size = {}: {} = {} KiB", names.join(" + "), show::kib(vm.size_bytes), sums.join(" + "));
    if sum != vm.size_bytes {
        let _ = writeln!(text, "THIS DOES NOT ADD UP: the parts make {} KiB. Please report it.", show::kib(sum));
    }
    if vm.kind == VmKind::Adopted {
        return text;
    }
    let ratio = if vm.store_bytes == 0 {
        0.0
    } else {
        vm.far_bytes.saturating_sub(vm.far_file_bytes + vm.far_remote_bytes) as f64 / vm.store_bytes as f64
    };
    let _ = writeln!(
        text,
        "far pages occupy {} of store ({ratio:.1} to 1){}; {} of the size is under userfaultfd",
        show::size(vm.store_bytes),
        if vm.file_bytes > 0 { format!(" and {} of disk", show::size(vm.file_bytes)) } else { String::new() },
        show::percent(vm.registered_bytes, vm.size_bytes),
    );
    if vm.pinned_long_pages > 0 {
        let _ = writeln!(
            text,
            "{} have been pinned for a minute or longer, by a device, I/O that does not end or registered buffers: \
             they stay",
            show::size(vm.pinned_long_pages * PAGE_SIZE as u64)
        );
    }
    text
}

fn faults_and_reclaim(vm: &VmStat) -> String {
    let (faults, reclaim) = (&vm.faults, &vm.reclaim);
    let mut text = String::new();
    let pairs = |pairs: &[(&str, u64)]| {
        pairs.iter().map(|(name, count)| format!("{name} {}", show::grouped(*count))).collect::<Vec<_>>().join("  ")
    };
    let kinds = [("minor", faults.minor), ("restore", faults.restore), ("zero", faults.zero), ("fresh", faults.fresh)];
    let from_disk = match faults.file {
        0 => String::new(),
        count => format!("from disk: {}; ", show::grouped(count)),
    };
    let _ = writeln!(
        text,
        "\nFAULTS {}: {}  ({from_disk}put back and served later: {})",
        show::grouped(faults.total()),
        pairs(&kinds),
        show::grouped(faults.deferred)
    );
    if faults.throttled > 0 {
        let seconds = faults.throttled_us as f64 / 1e6;
        let _ = writeln!(text, "  throttled: {} waited {seconds:.1} s for reclaim", show::grouped(faults.throttled));
    }
    let mut taken = vec![
        ("zapped", reclaim.zapped_pages),
        ("evicted", reclaim.evicted_pages),
        ("as zero", reclaim.evicted_zero_pages),
        ("same-filled", reclaim.same_filled_pages),
        ("discarded by the guest", reclaim.discarded_pages),
        ("prefetched", reclaim.prefetched_pages),
    ];
    if reclaim.spilled_pages > 0 {
        taken.push(("to disk", reclaim.spilled_pages));
    }
    let kept = [
        ("touched in quarantine", reclaim.quarantine_hit_pages),
        ("touched while evicting", reclaim.aborted_pages),
        ("failed", reclaim.failed_pages),
    ];
    let _ = writeln!(text, "RECLAIM, pages: {}", pairs(&taken));
    if reclaim.evicted_pages > 0 {
        let percent = show::percent(reclaim.restored_soon_pages, reclaim.evicted_pages);
        let soon = show::grouped(reclaim.restored_soon_pages);
        let _ = writeln!(text, "  restored within 10 s of their eviction: {soon}  ({percent} of the evicted)");
    }
    let _ = writeln!(text, "  kept: {}  (store full {} times)", pairs(&kept), show::grouped(reclaim.store_full_events));
    text.push('\n');
    let mut table = show::table(&["LATENCY, us", ">COUNT", ">P50", ">P90", ">P99", ">MAX"]);
    let mut row = |name: &str, latency: &Latency| {
        let figures = [latency.p50_us, latency.p90_us, latency.p99_us, latency.max_us].map(show::micros);
        table.add_row([vec![name.to_owned(), show::grouped(latency.count)], figures.into()].concat());
    };
    row("restore", &vm.restore_latency);
    row("all faults", &vm.fault_latency);
    let [faults, tasks] = [vm.engine_time.faults_us, vm.engine_time.tasks_us].map(|micros| micros as f64 / 1e6);
    let spent = format!("ENGINE TIME: {faults:.1} s on faults, {tasks:.1} s of CPU on reclaim and the like\n");
    text + &show::lines(&table) + &spent
}

fn psi(name: &str, psi: &Psi) -> String {
    let Psi { avg10, avg60, avg300, total_us } = psi;
    format!("{name} avg10={avg10:.2} avg60={avg60:.2} avg300={avg300:.2} total={total_us}")
}

fn regions(vm: &VmStat) -> String {
    let mut table = show::table(&[">REGION", ">SIZE", ">RESIDENT", ">FAR", ">ZERO", ">UNTOUCHED", ">POISONED"]);
    for region in &vm.regions {
        let sizes = [
            region.size_bytes,
            region.resident_bytes,
            region.far_bytes,
            region.zero_bytes,
            region.untouched_bytes,
            region.poisoned_bytes,
        ];
        table.add_row([vec![region.index.to_string()], sizes.map(show::size).into()].concat());
    }
    show::lines(&table)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_base::MIB;

    #[test]
    fn a_wrong_sum_is_reported_on_the_screen() {
        let mut vm = VmStat { size_bytes: 3 * MIB, resident_bytes: MIB, far_bytes: 2 * MIB, ..VmStat::default() };
        assert!(!screen(&vm).contains("ADD UP"), "{}", screen(&vm));
        vm.poisoned_bytes = 4096;
        assert!(screen(&vm).contains("THIS DOES NOT ADD UP: the parts make 3,076 KiB"), "{}", screen(&vm));
    }
}
