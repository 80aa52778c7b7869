//! `ballast advise`: how much memory each VM needed over the last day, from its memory in minutes of little stall.
//!
//! Before: `ballastd` has the past of the VMs. After: a table with the least limit that would have kept the stall at or
//! below 1 and 5 %, and how exactly that is known. Units: bytes; stall in percent of time. Promise: nothing is computed
//! from a model: a limit is advised only if the VM did well with it in each hour of its record.

use anyhow::{Context, Result};
use ballast_api::{Client, History, VmStat};
use clap::Args;
use serde::Serialize;

use crate::names::explain;
use crate::show;

/// Minutes of the record that are read: all that there are.
const DAY_MIN: u64 = 24 * 60;
/// A VM with a shorter record is settling.
const LEAST_MIN: usize = 60;
const HOUR_S: u32 = 3600;
/// Stall that an operator may accept, in thousandths of time.
const LITTLE: u16 = 10;
const SOME: u16 = 50;

#[derive(Debug, Args)]
pub struct AdviseArgs {
    /// The VMs' names [default: all VMs]
    #[arg(value_name = "NAME")]
    pub names: Vec<String>,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
struct Advice {
    name: String,
    size_bytes: u64,
    resident_bytes: u64,
    record_minutes: usize,
    working_set_bytes: Option<u64>,
    stall_1_pct: Option<Need>,
    stall_5_pct: Option<Need>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
struct Need {
    /// With this much memory, the VM stalled for too long in some minute.
    too_little_bytes: u64,
    /// In each hour, the VM had a minute with this much memory or less in which it did not stall for too long.
    enough_bytes: u64,
}

pub fn advise(client: &Client, args: &AdviseArgs, json: bool) -> Result<()> {
    let vms = match &args.names[..] {
        [] => client.vms().context("Listing the VMs")?,
        names => {
            let of = |name: &String| client.vm(name).map_err(|error| explain(client, name, error));
            names.iter().map(of).collect::<Result<_>>()?
        }
    };
    let each = |vm: &VmStat| -> Result<Advice> {
        let record =
            client.vm_history(&vm.name, DAY_MIN).with_context(|| format!("Reading the past of {}", vm.name))?;
        Ok(advice(&vm.name, (vm.size_bytes, vm.resident_bytes), &record))
    };
    let all = vms.iter().map(each).collect::<Result<Vec<_>>>()?;
    show::answer(json, &all, |all| describe(all))
}

fn advice(name: &str, (size_bytes, resident_bytes): (u64, u64), record: &History) -> Advice {
    let record_minutes = record.at_unix_s.len();
    let is_settled = record_minutes >= LEAST_MIN;
    Advice {
        name: name.into(),
        size_bytes,
        resident_bytes,
        record_minutes,
        working_set_bytes: record.other_bytes.iter().copied().flatten().max(),
        stall_1_pct: need(record, LITTLE).filter(|_| is_settled),
        stall_5_pct: need(record, SOME).filter(|_| is_settled),
    }
}

/// The VM's need for at most this stall. `None` if an hour has no minute with so little stall.
fn need(record: &History, stall_permille: u16) -> Option<Need> {
    let minutes = || record.at_unix_s.iter().zip(record.resident_bytes.iter().zip(&record.stall_permille));
    let too_little = minutes().filter(|(_, (_, stall))| **stall > stall_permille).map(|(_, (held, _))| *held).max();
    let mut hours: Vec<(u32, Option<u64>)> = Vec::new();
    for (at, (held, stall)) in minutes() {
        let hour = at / HOUR_S;
        if hours.last().is_none_or(|(last, _)| *last != hour) {
            hours.push((hour, None));
        }
        let (_, least) = hours.last_mut()?;
        if *stall <= stall_permille {
            *least = Some(least.map_or(*held, |least| least.min(*held)));
        }
    }
    let enough = hours.into_iter().map(|(_, least)| least).collect::<Option<Vec<_>>>()?.into_iter().max()?;
    let too_little_bytes = too_little.unwrap_or(0);
    Some(Need { too_little_bytes, enough_bytes: enough.max(too_little_bytes) })
}

fn describe(all: &[Advice]) -> String {
    let mut table = show::table(&["NAME", ">SIZE", ">RESIDENT", ">WORKING SET", ">RECORD", "1 % STALL", "5 % STALL"]);
    for vm in all {
        let need = |need: Option<Need>| match need {
            _ if vm.record_minutes < LEAST_MIN => "settling".into(),
            None => "more".into(),
            Some(Need { too_little_bytes: 0, enough_bytes }) => format!("at most {}", show::size(enough_bytes)),
            Some(Need { too_little_bytes, enough_bytes }) => {
                format!("{} (not {})", show::size(enough_bytes), show::size(too_little_bytes))
            }
        };
        table.add_row([
            vm.name.clone(),
            show::size(vm.size_bytes),
            show::size(vm.resident_bytes),
            vm.working_set_bytes.map_or_else(|| "-".into(), show::size),
            show::age(vm.record_minutes as u64 * 60),
            need(vm.stall_1_pct),
            need(vm.stall_5_pct),
        ]);
    }
    let mut text = show::lines(&table);
    if all.iter().any(|vm| vm.stall_5_pct.is_some_and(|need| need.too_little_bytes == 0)) {
        text += "\"at most\": the VM never had so little that it waited. To find less, let a policy look for it \
                 (ballast policy set pressure), and ask again after a day.\n";
    }
    text
}

#[cfg(test)]
mod tests {
    use ballast_base::units::MIB;

    use super::*;

    fn record(minutes: impl IntoIterator<Item = (u64, u16)>) -> History {
        let mut record = History { step_s: 60, ..History::default() };
        for (minute, (mib, stall)) in minutes.into_iter().enumerate() {
            record.at_unix_s.push(minute as u32 * 60);
            record.resident_bytes.push(mib * MIB);
            record.stall_permille.push(stall);
            record.other_bytes.push(None);
        }
        record
    }

    fn of(record: &History) -> Advice {
        advice("web", (2048 * MIB, 512 * MIB), record)
    }

    fn mib(too_little: u64, enough: u64) -> Option<Need> {
        Some(Need { too_little_bytes: too_little * MIB, enough_bytes: enough * MIB })
    }

    #[test]
    fn the_busiest_hour_decides_and_a_minute_with_stall_is_a_bound_from_below() {
        let quiet = (0..60).map(|minute| if minute == 30 { (300, 0) } else { (400, 0) });
        let busy = (0..60).map(|minute| if minute == 30 { (600, 40) } else { (700, 3) });
        let advice = of(&record(quiet.chain(busy)));
        assert_eq!((advice.stall_1_pct, advice.stall_5_pct), (mib(600, 700), mib(0, 600)));
    }

    #[test]
    fn a_vm_with_a_record_of_less_than_an_hour_is_settling() {
        let advice = of(&record((0..59).map(|_| (400, 0))));
        assert_eq!((advice.stall_1_pct, advice.record_minutes), (None, 59));
        assert!(describe(&[advice]).contains("settling"));
        assert!(describe(&[of(&History::default())]).contains("settling"));
    }

    #[test]
    fn an_hour_that_was_all_stall_needs_more_than_it_had() {
        let advice = of(&record((0..120).map(|minute| if minute < 60 { (400, 0) } else { (800, 200) })));
        assert_eq!((advice.stall_1_pct, advice.stall_5_pct), (None, None));
        assert!(describe(&[advice]).contains("more"));
    }

    #[test]
    fn what_stalled_once_is_not_advised_although_other_hours_did_well_with_it() {
        let first = (0..60).map(|minute| if minute == 0 { (500, 100) } else { (600, 0) });
        let second = (0..60).map(|_| (300, 0));
        assert_eq!(of(&record(first.chain(second))).stall_5_pct, mib(500, 600));
        let held = (0..60).map(|minute| if minute == 0 { (900, 100) } else { (600, 0) });
        assert_eq!(of(&record(held)).stall_5_pct, mib(900, 900));
    }
}
