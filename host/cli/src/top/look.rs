//! What `ballast top` shows: one look at the host and its VMs, their past, and a tape of looks.
//!
//! Before: a daemon answers, or a file has lines that `top --json` or `/v1/history` printed. After: `screen` has them.
//! Units: in the names. Promise: a line of a file that is not understood is refused by its number.

use std::collections::{BTreeMap, HashMap};
use std::io::Read;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};
use ballast_api::{Client, DecisionRecord, History, HostStat, Psi, Stall, VmHistory, VmStat};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// One sample of everything.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Look {
    /// When it was taken.
    pub at_unix_ms: u64,
    /// The host.
    pub host: HostStat,
    /// Its VMs.
    pub vms: Vec<VmStat>,
}

impl Look {
    /// Take one now.
    pub fn take(client: &Client) -> Result<Self> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64);
        Ok(Self { at_unix_ms: now, host: client.host()?, vms: client.vms()? })
    }
}

/// What there was before, for sparklines.
#[derive(Debug, Default)]
pub struct Past {
    /// The host, an hour.
    pub host: History,
    /// Each VM, ten minutes.
    pub vms: HashMap<String, History>,
}

impl Past {
    /// Ask for it.
    pub fn take(client: &Client) -> Result<Self> {
        let vms = client.vm_histories(10)?.into_iter().map(|vm| (vm.name, vm.history)).collect();
        Ok(Self { host: client.host_history(60)?, vms })
    }
}

/// More about one VM.
#[derive(Debug, Default)]
pub struct More {
    /// Its last hour.
    pub history: History,
    /// Decisions about it, oldest first; a tape has none.
    pub decisions: Vec<DecisionRecord>,
}

/// Recorded looks, and the one that is shown.
#[derive(Debug)]
pub struct Tape {
    looks: Vec<Look>,
    at: usize,
    /// Whether it goes on by itself.
    pub plays: bool,
}

/// Longest recording. Looks of many VMs are large; a longer `--interval-s` makes fewer.
const MOST_BYTES: u64 = 256 << 20;

impl Tape {
    /// Read a recording.
    pub fn open(path: &Path) -> Result<Self> {
        let mut text = String::new();
        let file = std::fs::File::open(path).with_context(|| format!("Opening {}", path.display()))?;
        let read = file.take(MOST_BYTES + 1).read_to_string(&mut text);
        let read = read.with_context(|| format!("Reading {}", path.display()))?;
        ensure!(
            read as u64 <= MOST_BYTES,
            "{} has more than 256 MiB: record with a longer --interval-s, or cut it with `split -l`",
            path.display()
        );
        Self::of(&text).with_context(|| format!("Reading {}", path.display()))
    }

    /// The looks in these lines, in the order of their times.
    pub fn of(text: &str) -> Result<Self> {
        let mut looks = BTreeMap::new();
        for (nr, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            add(&mut looks, line).with_context(|| format!("Line {}", nr + 1))?;
        }
        ensure!(!looks.is_empty(), "no look is in it: `ballast top --json` records some");
        Ok(Self { looks: looks.into_values().collect(), at: 0, plays: true })
    }

    /// The look that is shown.
    pub fn look(&self) -> &Look {
        &self.looks[self.at]
    }

    /// Its number from 1, and how many there are.
    pub fn position(&self) -> (usize, usize) {
        (self.at + 1, self.looks.len())
    }

    /// Go on by so many looks, or back, as far as there are some.
    pub fn step(&mut self, by: isize) {
        self.at = self.at.saturating_add_signed(by).min(self.looks.len() - 1);
    }

    fn past_of(&self, add: impl FnMut(&Look)) {
        self.looks[..=self.at].iter().for_each(add);
    }

    /// What there was before the look that is shown.
    pub fn past(&self) -> Past {
        let mut past = Past::default();
        self.past_of(|look| {
            let host = &look.host;
            let worst = look.vms.iter().max_by(|a, b| a.stall.some.avg10.total_cmp(&b.stall.some.avg10));
            let stall = worst.map_or(Stall::default(), |vm| vm.stall);
            let (resident_bytes, far_bytes) = (host.resident_bytes, host.far_bytes);
            push(&mut past.host, look.at_unix_ms, &VmStat { resident_bytes, far_bytes, stall, ..VmStat::default() });
            look.vms.iter().for_each(|vm| push(past.vms.entry(vm.name.clone()).or_default(), look.at_unix_ms, vm));
        });
        past
    }

    /// More about one VM before it.
    pub fn more(&self, name: &str) -> More {
        let mut more = More::default();
        self.past_of(|look| {
            let vm = look.vms.iter().find(|vm| vm.name == name);
            vm.into_iter().for_each(|vm| push(&mut more.history, look.at_unix_ms, vm));
        });
        more
    }
}

/// Adds the columns of a history that are drawn and that a look has.
fn push(history: &mut History, at_unix_ms: u64, vm: &VmStat) {
    history.at_unix_s.push((at_unix_ms / 1000) as u32);
    history.resident_bytes.push(vm.resident_bytes);
    history.far_bytes.push(vm.far_bytes);
    history.stall_permille.push((vm.stall.some.avg10 * 10.0) as u16);
}

/// Adds what a line has.
fn add(looks: &mut BTreeMap<u64, Look>, line: &str) -> Result<()> {
    let value: Value = serde_json::from_str(line)?;
    if value.get("host").is_some() {
        let look: Look = serde_json::from_value(value)?;
        looks.insert(look.at_unix_ms, look);
    } else if value.get("at_unix_s").is_some() {
        add_host(looks, &serde_json::from_value(value)?)?;
    } else if value.is_array() {
        for VmHistory { name, history } in serde_json::from_value::<Vec<VmHistory>>(value)? {
            add_vm(looks, &name, &history).with_context(|| format!("VM {name}"))?;
        }
    } else {
        bail!("neither a look of `ballast top --json` nor an answer of /v1/history or /v1/history/vms");
    }
    Ok(())
}

/// The look of each sample's time. Columns of other lengths are refused.
fn looks_of<'a>(
    looks: &'a mut BTreeMap<u64, Look>,
    of: &'a History,
    mut put: impl FnMut(&mut Look, usize),
) -> Result<()> {
    let count = of.at_unix_s.len();
    let columns = [
        ("size_bytes", of.size_bytes.len()),
        ("resident_bytes", of.resident_bytes.len()),
        ("far_bytes", of.far_bytes.len()),
        ("zero_bytes", of.zero_bytes.len()),
        ("limit_bytes", of.limit_bytes.len()),
        ("other_bytes", of.other_bytes.len()),
        ("store_bytes", of.store_bytes.len()),
        ("stall_permille", of.stall_permille.len()),
        ("restores_per_s", of.restores_per_s.len()),
    ];
    if let Some((name, length)) = columns.into_iter().find(|(_, length)| *length != count) {
        bail!("the column {name} has {length} samples, and there are {count} times");
    }
    for (nr, at_unix_s) in of.at_unix_s.iter().enumerate() {
        let at_unix_ms = u64::from(*at_unix_s) * 1000;
        put(looks.entry(at_unix_ms).or_insert_with(|| Look { at_unix_ms, ..Look::default() }), nr);
    }
    Ok(())
}

fn add_host(looks: &mut BTreeMap<u64, Look>, of: &History) -> Result<()> {
    looks_of(looks, of, |look, nr| {
        let host = &mut look.host;
        host.size_bytes = of.size_bytes[nr];
        host.resident_bytes = of.resident_bytes[nr];
        host.far_bytes = of.far_bytes[nr];
        host.zero_bytes = of.zero_bytes[nr];
        host.mem_available_bytes = of.other_bytes[nr].unwrap_or(0);
        host.store_bytes = of.store_bytes[nr];
    })
}

fn add_vm(looks: &mut BTreeMap<u64, Look>, name: &str, of: &History) -> Result<()> {
    looks_of(looks, of, |look, nr| {
        let avg10 = f64::from(of.stall_permille[nr]) / 10.0;
        look.host.vms += 1;
        look.vms.push(VmStat {
            name: name.to_owned(),
            size_bytes: of.size_bytes[nr],
            resident_bytes: of.resident_bytes[nr],
            far_bytes: of.far_bytes[nr],
            zero_bytes: of.zero_bytes[nr],
            untouched_bytes: of.size_bytes[nr]
                .saturating_sub(of.resident_bytes[nr] + of.far_bytes[nr] + of.zero_bytes[nr]),
            limit_bytes: of.limit_bytes[nr],
            store_bytes: of.store_bytes[nr],
            stall: Stall { some: Psi { avg10, ..Psi::default() }, ..Stall::default() },
            ..VmStat::default()
        });
    })
}
