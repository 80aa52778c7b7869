//! `ballast adopt` and `ballast release`: VMs that run already, without a restart. Also the text about them in `vm
//! stat` and `doctor`.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use ballast_adopt::swap::{self, HOW_TO, Speed, Swap};
use ballast_api::{AdoptRefusal, AdoptRequest, AdoptedBy, AdoptedStat, Client, StallSource, VmKind, VmStat};
use clap::Args;
use serde::Serialize;

use crate::names::explain;
use crate::show;

#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("which").required(true).args(["vm", "all"]))]
pub struct AdoptArgs {
    /// The VMM's process id, or the VM's name on its command line
    #[arg(value_name = "PID|NAME")]
    pub vm: Option<String>,
    /// Every VMM of this host: QEMU, Cloud Hypervisor, Firecracker
    #[arg(long)]
    pub all: bool,
    /// The name that it is to have here [default: its own, or vm-PID]
    #[arg(long, conflicts_with = "all")]
    pub name: Option<String>,
}

#[derive(Debug, Args)]
pub struct ReleaseArgs {
    /// The VM's name
    pub name: String,
    /// Bring all of its memory back from swap first
    #[arg(long)]
    pub bring_back: bool,
}

pub fn adopt(client: &Client, args: &AdoptArgs, json: bool) -> Result<()> {
    let pid = args.vm.as_ref().and_then(|vm| vm.parse().ok());
    let vm = args.vm.clone().filter(|_| pid.is_none());
    let result = client.adopt(&AdoptRequest { pid, vm, name: args.name.clone() }).context("Adopting VMs")?;
    show::answer(json, &result, |result| adopted(&result.adopted))?;
    if !result.refused.is_empty() {
        bail!("{}", not_adopted(&result.refused));
    }
    Ok(())
}

/// The reasons of the first refusals; `--json` has all.
fn not_adopted(refused: &[AdoptRefusal]) -> String {
    const NAMED: usize = 8;
    let mut text = format!("{} VMMs were not adopted:", refused.len());
    refused.iter().take(NAMED).for_each(|refused| text = format!("{text}\n  {}", refused.reason));
    if refused.len() > NAMED {
        text = format!("{text}\n  and {} more (--json lists all)", refused.len() - NAMED);
    }
    text
}

fn adopted(vms: &[VmStat]) -> String {
    let each = |vm: &VmStat| format!("{} (pid {}, {})", vm.name, vm.pid, vm.vmm);
    match vms.iter().map(each).collect::<Vec<_>>().join(", ") {
        none if none.is_empty() => "no VMM runs here that is neither adopted nor paged\n".into(),
        all => format!("adopted {all}\n"),
    }
}

pub fn release(client: &Client, args: &ReleaseArgs, json: bool) -> Result<()> {
    let ReleaseArgs { name, bring_back } = args;
    let vm = client
        .release(name, *bring_back)
        .map_err(|error| explain(client, name, error))
        .with_context(|| format!("Releasing VM {name}"))?;
    if *bring_back {
        wait_until_released(client, name)?;
    }
    let far = show::size(vm.far_bytes);
    let rest = match (bring_back, vm.far_bytes) {
        (true, _) => format!("{far} was restored from swap"),
        (false, 0) => "none of it is in swap".into(),
        (false, _) => format!("{far} of it are in swap and come back as the guest touches them"),
    };
    show::answer(json, &vm, |_| format!("released {name}: {rest}\n"))
}

fn wait_until_released(client: &Client, name: &str) -> Result<()> {
    const PAUSE: Duration = Duration::from_millis(100);
    /// Time without progress after which the command gives up.
    const TIMEOUT: Duration = Duration::from_secs(60);
    let (mut far, mut changed) = (u64::MAX, Instant::now());
    loop {
        match client.vm(name) {
            Err(error) if error.is_no_such_vm() => return Ok(()),
            Err(error) => return Err(error.into()),
            Ok(vm) if vm.far_bytes < far => (far, changed) = (vm.far_bytes, Instant::now()),
            Ok(_) if changed.elapsed() > TIMEOUT => {
                bail!("{} are still in swap and no more comes back; `ballast events` may say why", show::size(far))
            }
            Ok(_) => {}
        }
        std::thread::sleep(PAUSE);
    }
}

pub fn screen(vm: &VmStat, adopted: &AdoptedStat) -> String {
    let [out, back] = [vm.reclaim.evicted_pages, vm.faults.restored_pages].map(show::grouped);
    let how = match (adopted.by, &adopted.cgroup, &adopted.cgroup_reason) {
        (AdoptedBy::Reclaim, Some(cgroup), _) => format!("by memory.reclaim of {cgroup}"),
        (_, _, Some(why)) => format!("by MADV_PAGEOUT, because {why}"),
        _ => "by MADV_PAGEOUT".into(),
    };
    let stall = match adopted.stall_source {
        StallSource::Cgroup => "memory.pressure of its cgroup",
        StallSource::Estimated => "estimated: restores, times what one takes on this host's swap",
    };
    let some = &vm.stall.some;
    format!(
        "its pages were counted at {}; since then by the kernel's counters\n\
         far memory is in the kernel's swap, {how}; {} more may go there\n\n\
         PAGES: {out} went out, {back} were restored\n\
         RESTORE LATENCY: -  (the kernel restores, and does not say how long it takes)\n\
         STALL some avg10={:.2} avg60={:.2} avg300={:.2} total={}  ({stall})\n",
        show::time(adopted.scanned_unix_ms),
        show::size(adopted.swap_room_bytes),
        some.avg10,
        some.avg60,
        some.avg300,
        some.total_us,
    )
}

#[derive(Debug, Serialize)]
pub struct SwapFindings {
    names: Vec<String>,
    total_bytes: u64,
    used_bytes: u64,
    zswap: Option<bool>,
    out_us: Option<f64>,
    restore_us: Option<f64>,
    limits_could_need_bytes: u64,
}

impl SwapFindings {
    /// Tries swap. `vms` are those of the daemon, if one runs.
    pub fn now(vms: &[VmStat]) -> Self {
        let Swap { names, total, used } = Swap::now();
        let speed = swap::speed().ok();
        let adopted = vms.iter().filter(|vm| vm.kind == VmKind::Adopted);
        let could_need = |vm: &VmStat| vm.size_bytes.saturating_sub(vm.limit_bytes.unwrap_or(vm.size_bytes));
        Self {
            names,
            total_bytes: total,
            used_bytes: used,
            zswap: swap::zswap(),
            out_us: speed.map(|Speed { out_us, .. }| out_us),
            restore_us: speed.map(|Speed { in_us, .. }| in_us),
            limits_could_need_bytes: adopted.map(could_need).sum(),
        }
    }

    pub fn describe(&self) -> String {
        if self.total_bytes == 0 {
            return format!("Swap: none, so no VM that runs already can be given a limit. To have some:\n  {HOW_TO}\n");
        }
        let [total, used, need] = [self.total_bytes, self.used_bytes, self.limits_could_need_bytes].map(show::size);
        let speed = match (self.out_us, self.restore_us) {
            (Some(out), Some(back)) => {
                format!("a page takes {} us out and {} us back", show::micros(out), show::micros(back))
            }
            _ => "the kernel pages nothing out to it now".into(),
        };
        let zswap = match self.zswap {
            Some(true) => "zswap is on: pages are compressed in RAM first",
            Some(false) => "zswap is off",
            None => "the kernel has no zswap",
        };
        let names = self.names.join(", ");
        format!(
            "Swap: {total} on {names}, {used} used; {speed}; {zswap}. Limits of adopted VMs could need {need} of it.\n"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_base::GIB;

    #[test]
    fn many_refusals_are_a_short_list() {
        let refused = |pid| AdoptRefusal { pid, reason: format!("process {pid}: why") };
        let text = not_adopted(&(1..=500).map(refused).collect::<Vec<_>>());
        assert!(text.starts_with("500 VMMs were not adopted:\n  process 1: why\n"), "{text}");
        assert!(text.ends_with("  process 8: why\n  and 492 more (--json lists all)"), "{text}");
        assert_eq!(not_adopted(&[refused(7)]), "1 VMMs were not adopted:\n  process 7: why");
    }

    #[test]
    fn a_host_without_swap_is_told_what_to_type() {
        let none = SwapFindings {
            names: Vec::new(),
            total_bytes: 0,
            used_bytes: 0,
            zswap: None,
            out_us: None,
            restore_us: None,
            limits_could_need_bytes: 0,
        };
        assert!(none.describe().contains("apt install systemd-zram-generator"), "{}", none.describe());
        let some = SwapFindings {
            names: vec!["/dev/zram0".into()],
            total_bytes: 8 * GIB,
            zswap: Some(false),
            out_us: Some(8.6),
            restore_us: Some(6.25),
            limits_could_need_bytes: GIB,
            ..none
        };
        let text = "Swap: 8 GiB on /dev/zram0, 0 B used; a page takes 8.6 us out and 6.2 us back; zswap is off. \
                    Limits of adopted VMs could need 1 GiB of it.\n";
        assert_eq!(some.describe().replace("0 bytes", "0 B"), text);
    }

    #[test]
    fn nothing_to_adopt_is_said_in_words() {
        assert!(adopted(&[]).starts_with("no VMM runs here"));
        let vm = VmStat { name: "web".into(), pid: 7, vmm: "qemu".into(), ..VmStat::default() };
        assert_eq!(adopted(&[vm.clone(), vm]), "adopted web (pid 7, qemu), web (pid 7, qemu)\n");
    }
}
