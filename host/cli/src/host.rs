//! `ballast host`: prints what the API returns about the host.

use std::fmt::Write;

use anyhow::Result;
use ballast_api::{Client, HostStat, RemoteNode};

use crate::show;

pub fn host(client: &Client, json: bool) -> Result<()> {
    show::answer(json, &client.host()?, describe)
}

fn describe(host: &HostStat) -> String {
    let mut text = String::new();
    let size = show::size;
    let _ = writeln!(
        text,
        "ballast {}, up {}; engine {} (pid {}), {} replaced after dying; keeper pid {}",
        host.version,
        show::age(host.uptime_s),
        host.engine_epoch,
        host.engine_pid,
        host.engine_restarts,
        host.keeper_pid
    );
    let _ = writeln!(text, "memory  {} of {} available", size(host.mem_available_bytes), size(host.mem_total_bytes));
    let used = show::percent(host.store_bytes, host.store_budget_bytes);
    let _ = writeln!(text, "store   {} of {} used ({used})", size(host.store_bytes), size(host.store_budget_bytes));
    if host.file_budget_bytes > 0 || host.file_bytes > 0 {
        let used = show::percent(host.file_bytes, host.file_budget_bytes);
        let (bytes, budget, far) = (size(host.file_bytes), size(host.file_budget_bytes), size(host.far_file_bytes));
        let _ = writeln!(text, "disk    {bytes} of {budget} used ({used}); {far} of the far pages are there");
    }
    if let Some(remote) = &host.remote {
        let used = show::percent(remote.used_bytes, remote.budget_bytes);
        let (bytes, budget, far) = (size(remote.used_bytes), size(remote.budget_bytes), size(remote.far_bytes));
        let _ = writeln!(text, "remote  {bytes} of {budget} used ({used}); {far} of the far pages are there");
        for node in &remote.nodes {
            let RemoteNode { addr, requests, errors, p50_us, p99_us } = node;
            let _ = writeln!(
                text,
                "        {addr}: {requests} requests, p50 {p50_us} us, p99 {p99_us} us; {errors} failed"
            );
        }
        let serious = remote.findings.iter().filter(|finding| finding.serious).count();
        if serious > 0 {
            let _ = writeln!(text, "        {serious} settings would lose pages: see `ballast doctor --store`");
        }
    }
    let state = host.state.map_or(String::new(), |_| {
        format!("; the host is {}", crate::policy::host_state(host.state, host.exhaustion_ms))
    });
    let _ = writeln!(text, "policy  {}{state}", host.policy);
    if let Some(why) = &host.pin_check_missing {
        let _ = writeln!(text, "pins    cannot be seen, so pages wait longer: {why}");
    }
    for warning in &host.warnings {
        let _ = writeln!(text, "warning {warning}");
    }
    let (budget, left) = (size(host.guest_budget_bytes), size(host.schedulable_bytes));
    let _ = writeln!(text, "budget  {budget} for guests, of which {left} may still be reserved");
    let _ = writeln!(
        text,
        "VMs     {}: size {}, resident {}, far {}, zero {}; {} saved",
        host.vms,
        size(host.size_bytes),
        size(host.resident_bytes),
        size(host.far_bytes),
        size(host.zero_bytes),
        size(host.saved_bytes)
    );
    text
}
