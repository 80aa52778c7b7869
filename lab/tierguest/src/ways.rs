//! The compared ways of placing pages, each with its own settings.
//!
//! Before: a program runs in a guest with two tiers. After: the way moves the program's pages. Units: seconds.
//! Promise: dropping a way restores the kernel's settings.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use ballast_base::PAGE_SIZE;
use ballast_tier::kernel_files::Files;
use ballast_tier::{EPOCH, Settings, Tierer, Tiers};

const BALANCING: &str = "/proc/sys/kernel/numa_balancing";
const DEMOTION: &str = "/sys/kernel/mm/numa/demotion_enabled";
const DAMON: &str = "/sys/kernel/mm/damon/admin/kdamonds";
const STAT: &str = "/sys/module/damon_stat/parameters/enabled";

/// A way of placing pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// No page moves.
    FirstTouch,
    /// The kernel's NUMA balancing in tiering mode, with demotion. It is the part of TPP that the kernel has.
    Numab,
    /// DAMON's schemes `migrate_hot` and `migrate_cold`, on physical addresses.
    Damon,
    /// `ballast-tier`.
    Ours,
}

impl Way {
    /// Returns the way of this name.
    pub fn parse(name: &str) -> Option<Self> {
        [Self::FirstTouch, Self::Numab, Self::Damon, Self::Ours].into_iter().find(|way| way.name() == name)
    }

    /// Returns its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::FirstTouch => "first_touch",
            Self::Numab => "numab",
            Self::Damon => "damon",
            Self::Ours => "ours",
        }
    }
}

/// A file of the kernel, and the value to write back.
pub(crate) struct Was {
    files: Files,
    path: String,
    before: String,
}

impl Was {
    fn set(files: &Files, path: &str, value: &str) -> Result<Self> {
        let before = files.text(path)?;
        files.write(path, value)?;
        Ok(Self { files: files.clone(), path: path.into(), before })
    }
}

impl Drop for Was {
    fn drop(&mut self) {
        let _ = self.files.write(&self.path, &self.before);
    }
}

/// Takes DAMON for a tierer until these are dropped.
pub(crate) fn kdamonds(files: &Files) -> Result<Vec<Was>> {
    let stat = files.optional(STAT)?.is_some_and(|stat| stat == "Y").then(|| Was::set(files, STAT, "N")).transpose()?;
    let most = Settings::default().choice.most.to_string();
    // The threads go before the kernel's own one comes back.
    let threads = Was::set(files, &format!("{DAMON}/nr_kdamonds"), &most)?;
    Ok([threads].into_iter().chain(stat).collect())
}

/// A running way.
pub struct Running {
    /// The tierer of `Ours`.
    pub tierer: Option<Tierer>,
    damon: Option<Files>,
    _was: Vec<Was>,
}

impl Running {
    /// Start a way.
    pub fn start(way: Way, files: &Files, tiers: &Tiers) -> Result<Self> {
        // Only `Numab` has balancing, which is on by default on hosts with several nodes.
        let mut was = vec![Was::set(files, BALANCING, if way == Way::Numab { "2" } else { "0" })?];
        was.push(Was::set(files, DEMOTION, if way == Way::Numab { "1" } else { "0" })?);
        let mut running = Self { tierer: None, damon: None, _was: was };
        match way {
            Way::FirstTouch | Way::Numab => (),
            Way::Damon => {
                if files.optional(STAT)?.as_deref() == Some("Y") {
                    running._was.push(Was::set(files, STAT, "N")?);
                }
                running.damon = Some(files.clone());
                migrate(files, tiers)?;
            }
            Way::Ours => {
                running._was.splice(0..0, kdamonds(files)?);
                running.tierer = Some(Tierer::open(Settings::default())?);
            }
        }
        Ok(running)
    }

    /// Run the way for an epoch.
    pub fn epoch(&mut self) -> Result<()> {
        let began = Instant::now();
        if let Some(tierer) = &mut self.tierer {
            tierer.step().context("An epoch of tiering")?;
        }
        std::thread::sleep(EPOCH.saturating_sub(began.elapsed()).max(Duration::from_millis(1)));
        Ok(())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(files) = self.damon.take() {
            let _ = files.write(&format!("{DAMON}/0/state"), "off");
            let _ = files.write(&format!("{DAMON}/nr_kdamonds"), 0);
        }
    }
}

/// Set up DAMON's tiering. It moves touched memory to the fast node, and memory that was not touched for 2 s to the
/// slow node.
fn migrate(files: &Files, tiers: &Tiers) -> Result<()> {
    let put = |path: &str, value: &str| files.write(&format!("{DAMON}/{path}"), value);
    let blocks = |node: u32| -> Result<(u64, u64)> {
        let block = u64::from_str_radix(&files.text("/sys/devices/system/memory/block_size_bytes")?, 16)?;
        let numbers = files.numbered(&format!("/sys/devices/system/node/node{node}"), "memory")?;
        let (Some(first), Some(last)) = (numbers.first(), numbers.last()) else { bail!("node {node} has no memory") };
        Ok((u64::from(*first) * block, (u64::from(*last) + 1) * block))
    };
    let (fast, slow) = (tiers.list[0].nodes[0], tiers.list[1].nodes[0]);
    let mut ranges = [blocks(fast)?, blocks(slow)?];
    ranges.sort_unstable();
    put("nr_kdamonds", "1")?;
    put("0/contexts/nr_contexts", "1")?;
    put("0/contexts/0/operations", "paddr")?;
    let attributes = "0/contexts/0/monitoring_attrs";
    put(&format!("{attributes}/intervals/sample_us"), "5000")?;
    put(&format!("{attributes}/intervals/aggr_us"), "200000")?;
    put("0/contexts/0/targets/nr_targets", "1")?;
    put("0/contexts/0/targets/0/regions/nr_regions", "2")?;
    for (index, (start, end)) in ranges.iter().enumerate() {
        put(&format!("0/contexts/0/targets/0/regions/{index}/start"), &start.to_string())?;
        put(&format!("0/contexts/0/targets/0/regions/{index}/end"), &end.to_string())?;
    }
    let schemes = "0/contexts/0/schemes";
    put(&format!("{schemes}/nr_schemes"), "2")?;
    let most = u32::MAX.to_string();
    for (index, action, node, least, highest, age) in
        [(0, "migrate_cold", slow, "0", "0", "10"), (1, "migrate_hot", fast, "1", most.as_str(), "0")]
    {
        put(&format!("{schemes}/{index}/action"), action)?;
        put(&format!("{schemes}/{index}/target_nid"), &node.to_string())?;
        put(&format!("{schemes}/{index}/access_pattern/sz/min"), &PAGE_SIZE.to_string())?;
        put(&format!("{schemes}/{index}/access_pattern/sz/max"), &u64::MAX.to_string())?;
        put(&format!("{schemes}/{index}/access_pattern/nr_accesses/min"), least)?;
        put(&format!("{schemes}/{index}/access_pattern/nr_accesses/max"), highest)?;
        put(&format!("{schemes}/{index}/access_pattern/age/min"), age)?;
        put(&format!("{schemes}/{index}/access_pattern/age/max"), &most)?;
        // The quota is what `ballast-tier` may move in a second.
        put(&format!("{schemes}/{index}/quotas/bytes"), &(256u64 << 20).to_string())?;
        put(&format!("{schemes}/{index}/quotas/reset_interval_ms"), "1000")?;
    }
    put("0/state", "on")?;
    Ok(())
}
