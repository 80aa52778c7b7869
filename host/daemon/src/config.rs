//! Settings. `ballastd` needs no file; `configs/ballastd.toml` explains each key.
//!
//! Promise: an unknown key, a size without a unit or a value out of range is an error that names the key. Typed values
//! are converted here and nowhere else.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use ballast_base::Bytes;
use ballast_base::units::{GIB, MIB};
use ballast_base::wire::check_name;
use ballast_policy::{Kind, Setup};
use ballast_remote::Addr;
use ballast_sys::{group, meminfo};
use serde::{Deserialize, Serialize};

use crate::rules::{Rule, VmRule};
use crate::tiering::Tiering;
use crate::tracking::Tracking;

const RUNTIME_DIR: &str = "/run/ballast";
const STATE_DIR: &str = "/var/lib/ballast";

/// The compression of pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Compression {
    /// LZ4: fast.
    #[default]
    Lz4,
    /// zstd level 1: smaller, several times slower.
    Zstd,
}

/// All settings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Directory of the sockets `attach.sock` and `api.sock`.
    pub runtime_dir: PathBuf,
    /// Directory of the operators' changes of VMs. `None` is `/var/lib/ballast`, or `state` in a `runtime_dir` that is
    /// not `/run/ballast`: two daemons share nothing.
    pub state_dir: Option<PathBuf>,
    /// Most memory the compressed store may use; `None` is half of the host's.
    #[serde(with = "size")]
    pub store_budget: Option<Bytes>,
    /// The compression of pages.
    pub compression: Compression,
    /// How long a page stays zapped and watched before it is evicted, in milliseconds.
    pub quarantine_ms: u64,
    /// Members of this group may read the API.
    pub reader_group: Option<Group>,
    /// Members of this group may attach VMs; without it only root may.
    pub attach_group: Option<Group>,
    /// A file store for pages that have been far for long; without it they stay in the compressed store.
    pub spill: Option<Spill>,
    /// A cluster on other machines for pages that have been far for long, if there is no file or it is full.
    pub remote: Option<Remote>,
    /// Groups of VMs that trust each other and store equal pages once: their members, by name.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub dedup: BTreeMap<String, Vec<String>>,
    /// Whether VMs are tracked.
    pub heat: Tracking,
    /// Nodes of fast and of slow memory for VMs; without it, the kernel places their memory.
    pub tier: Option<Tiering>,
    /// VMs that were started without Ballast.
    pub adopt: Adopt,
    /// Settings of VMs, by their names, UUIDs, control groups or users.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub vm: BTreeMap<String, VmRule>,
    /// The policy that decides how much memory each VM may have.
    pub policy: Policy,
}

/// A group of users: its name, or its number as text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Group(pub String);

impl Group {
    /// The group's number; `None` without a group. Fails if this host has no such group; `key` is the setting that
    /// names it.
    pub fn gid(group: Option<&Self>, key: &str) -> anyhow::Result<Option<u32>> {
        let Some(Self(name)) = group else { return Ok(None) };
        let found = group::id(name).with_context(|| format!("{key}: asking for the group {name:?}"))?;
        found.map(Some).with_context(|| format!("{key}: this host has no group {name:?}"))
    }
}

/// How VMs that were started without Ballast are adopted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Adopt {
    /// Whether each VMM of this host is adopted as it starts; otherwise an operator names VMMs.
    pub all: bool,
}

/// Settings of the governor. `ballast policy set` changes them until the keeper ends.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Policy {
    /// The policy.
    pub name: Kind,
    /// Time between decisions, in milliseconds.
    pub tick_ms: u64,
    /// DRAM for all guests together; `None`: as much as the host can spare.
    #[serde(with = "size")]
    pub budget: Option<Bytes>,
    /// Pressure: the share of time a VM may stall, 0 to 1.
    pub threshold: f64,
}

impl Default for Policy {
    fn default() -> Self {
        let Setup { policy, tick_ms, threshold, .. } = Setup::default();
        Self { name: policy, tick_ms, budget: None, threshold }
    }
}

impl Policy {
    /// The settings as the governor's type.
    pub fn setup(&self) -> Setup {
        Setup {
            policy: self.name,
            tick_ms: self.tick_ms,
            budget_bytes: self.budget.map(|budget| budget.0),
            threshold: self.threshold,
        }
    }
}

/// The store of pages that have been far for long.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spill {
    /// Directory on the disk: on a file system with direct I/O and files without a name (ext4, XFS, btrfs).
    pub dir: PathBuf,
    /// Most disk space that all VMs together may use.
    #[serde(with = "size")]
    pub budget: Option<Bytes>,
    /// Least time a page is in the compressed store before it is spilled, in seconds.
    #[serde(default = "five_minutes")]
    pub after_s: u64,
    /// Bytes that may be written for each VM in a day (UTC); `None` is no limit.
    #[serde(default, with = "size")]
    pub writes_per_day: Option<Bytes>,
}

/// A Valkey or Redis cluster for far pages.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Remote {
    /// Some of its nodes, `HOST:PORT`; they know the others.
    pub nodes: Vec<String>,
    /// User name on the servers.
    pub user: Option<String>,
    /// A file whose first line is the password.
    pub password_file: Option<PathBuf>,
    /// Replicas that must have a page before it leaves this host.
    #[serde(default = "one")]
    pub replicas: u32,
    /// Most memory of the cluster that all VMs of this host together may use.
    #[serde(with = "size")]
    pub budget: Option<Bytes>,
    /// Least time a page is in the compressed store before it is sent, in seconds.
    #[serde(default = "five_minutes")]
    pub after_s: u64,
    /// Connections use TLS.
    pub tls: Option<RemoteTls>,
    /// Pages are sealed with a key of their VM before they leave this host.
    #[serde(default)]
    pub encrypt: bool,
}

/// Encryption of the connections to the cluster's servers, and the servers' authentication.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RemoteTls {
    /// Certificates (PEM) of the authorities that sign the servers' certificates.
    pub ca_file: PathBuf,
    /// Our certificate (PEM), if servers request one.
    pub cert_file: Option<PathBuf>,
    /// The private key of that certificate.
    pub key_file: Option<PathBuf>,
    /// The name in the servers' certificates; without one, the host in each server's address.
    pub name: Option<String>,
}

const fn one() -> u32 {
    1
}

const fn five_minutes() -> u64 {
    300
}

/// Range of the file store's size: one area of 2 MiB to 8 TiB.
const SPILL_BUDGET: std::ops::RangeInclusive<u64> = 2 * MIB..=8192 * GIB;

impl Default for Config {
    fn default() -> Self {
        Self {
            runtime_dir: RUNTIME_DIR.into(),
            state_dir: None,
            store_budget: None,
            compression: Compression::default(),
            quarantine_ms: 1000,
            reader_group: None,
            attach_group: None,
            spill: None,
            remote: None,
            dedup: BTreeMap::new(),
            heat: Tracking::default(),
            tier: None,
            adopt: Adopt::default(),
            vm: BTreeMap::new(),
            policy: Policy::default(),
        }
    }
}

impl Config {
    /// The settings in a file, or the defaults.
    pub fn load(path: Option<&Path>) -> anyhow::Result<Self> {
        let Some(path) = path else { return Ok(Self::default()) };
        let text = std::fs::read_to_string(path).with_context(|| format!("Reading {}", path.display()))?;
        let config: Self = toml::from_str(&text).with_context(|| format!("Understanding {}", path.display()))?;
        let checked = config.validate().and_then(|()| config.tier.map_or(Ok(()), |tier| tier.find_nodes()));
        checked.with_context(|| format!("Checking {}", path.display()))?;
        Ok(config)
    }

    /// Checks the range of each value.
    pub fn validate(&self) -> anyhow::Result<()> {
        ensure!(self.runtime_dir.is_absolute(), "runtime_dir {:?} must be an absolute path", self.runtime_dir);
        ensure!(
            (1..=60_000).contains(&self.quarantine_ms),
            "quarantine_ms = {} is out of range: 1 to 60000",
            self.quarantine_ms
        );
        for (group, members) in &self.dedup {
            ensure!(!members.is_empty(), "dedup.{group} must name a VM at least");
            for member in members {
                let name = member.strip_suffix('*').filter(|name| !name.is_empty()).unwrap_or(member);
                check_name(name).map_err(|why| anyhow::anyhow!("dedup.{group}: {member:?}: {why}"))?;
            }
        }
        for (pattern, rule) in &self.vm {
            ensure!(!pattern.is_empty(), "vm: an empty pattern is for no VM");
            rule.wanted().map_err(|error| anyhow::anyhow!("vm.{pattern:?}: {error:#}"))?;
        }
        let state = self.state_dir();
        ensure!(state.is_absolute(), "state_dir {state:?} must be an absolute path");
        self.heat.validate()?;
        self.tier.map_or(Ok(()), |tier| tier.validate())?;
        self.policy.setup().check().map_err(|why| anyhow::anyhow!("policy: {why}"))?;
        self.spill.as_ref().map_or(Ok(()), Spill::validate)?;
        self.remote.as_ref().map_or(Ok(()), Remote::validate)
    }

    /// The effective values, as a configuration file.
    pub fn to_toml(&self) -> anyhow::Result<String> {
        Ok(toml::to_string(self)?)
    }

    /// The store budget in bytes.
    pub fn store_budget(&self) -> Bytes {
        self.store_budget.unwrap_or_else(|| Bytes(meminfo::bytes("MemTotal").unwrap_or(2 * GIB) / 2))
    }

    /// The directory of the operators' changes of VMs.
    pub fn state_dir(&self) -> PathBuf {
        let is_default = self.runtime_dir == Path::new(RUNTIME_DIR);
        let default = || if is_default { STATE_DIR.into() } else { self.runtime_dir.join("state") };
        self.state_dir.clone().unwrap_or_else(default)
    }

    /// The rules for VMs. Fails if a rule names a user that this host does not have.
    pub fn rules(&self) -> anyhow::Result<Vec<Rule>> {
        self.vm.iter().map(|(pattern, rule)| rule.rule(pattern)).collect()
    }

    /// Socket on which VMMs attach.
    pub fn attach_socket(&self) -> PathBuf {
        self.runtime_dir.join("attach.sock")
    }

    /// Socket on which VMMs request memory of the pool.
    pub fn pool_socket(&self) -> PathBuf {
        self.runtime_dir.join("pool.sock")
    }

    /// Socket of the API.
    pub fn api_socket(&self) -> PathBuf {
        self.runtime_dir.join("api.sock")
    }
}

impl Spill {
    fn validate(&self) -> anyhow::Result<()> {
        ensure!(self.dir.is_absolute(), "spill.dir {:?} must be an absolute path", self.dir);
        let budget = self.budget();
        ensure!(SPILL_BUDGET.contains(&budget.0), "spill.budget = {budget} is out of range: 2 MiB to 8 TiB");
        ensure!(
            (1..=7 * 24 * 3600).contains(&self.after_s),
            "spill.after_s = {} is out of range: 1 to 604800",
            self.after_s
        );
        Ok(())
    }

    /// The disk budget.
    pub fn budget(&self) -> Bytes {
        self.budget.unwrap_or(Bytes(0))
    }
}

impl Remote {
    fn validate(&self) -> anyhow::Result<()> {
        ensure!(!self.nodes.is_empty(), "remote.nodes must name a node at least, as \"HOST:PORT\"");
        for node in &self.nodes {
            ensure!(Addr::parse(node).is_some(), "remote.nodes: {node:?} is not \"HOST:PORT\"");
        }
        ensure!((1..=5).contains(&self.replicas), "remote.replicas = {} is out of range: 1 to 5", self.replicas);
        let file = self.password_file.as_ref();
        ensure!(file.is_none_or(|file| file.is_absolute()), "remote.password_file {file:?} must be an absolute path");
        ensure!(self.user.is_none() || file.is_some(), "remote.user needs remote.password_file");
        ensure!(self.budget() >= Bytes(MIB), "remote.budget = {} is out of range: 1 MiB at least", self.budget());
        ensure!(
            (1..=7 * 24 * 3600).contains(&self.after_s),
            "remote.after_s = {} is out of range: 1 to 604800",
            self.after_s
        );
        self.tls.as_ref().map_or(Ok(()), RemoteTls::validate)
    }

    /// The part of the cluster that may be used.
    pub fn budget(&self) -> Bytes {
        self.budget.unwrap_or(Bytes(0))
    }
}

impl RemoteTls {
    fn validate(&self) -> anyhow::Result<()> {
        let files = [&self.cert_file, &self.key_file].into_iter().flatten().chain([&self.ca_file]);
        for file in files {
            ensure!(file.is_absolute(), "remote.tls: {file:?} must be an absolute path");
        }
        let both = self.cert_file.is_some() == self.key_file.is_some();
        ensure!(both, "remote.tls.cert_file and remote.tls.key_file go together");
        Ok(())
    }
}

/// Sizes as text with a unit.
mod size {
    use ballast_base::Bytes;
    use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

    pub fn serialize<S: Serializer>(size: &Option<Bytes>, out: S) -> Result<S::Ok, S::Error> {
        size.map(|size| format!("{}B", size.0)).serialize(out)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(input: D) -> Result<Option<Bytes>, D::Error> {
        let text = Option::<String>::deserialize(input)?;
        text.map(|text| text.parse()).transpose().map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Config, String> {
        let config: Config = toml::from_str(text).map_err(|error| error.to_string())?;
        config.validate().map_err(|error| error.to_string())?;
        Ok(config)
    }

    #[test]
    fn an_empty_file_means_the_defaults_and_the_sample_says_the_same() {
        assert_eq!(parse(""), Ok(Config::default()));
        let sample = include_str!("../../../configs/ballastd.toml");
        assert_eq!(parse(sample), Ok(Config::default()));
        let uncommented: String = sample
            .lines()
            .map(|line| line.strip_prefix("# key: ").unwrap_or(line))
            .fold(String::new(), |text, line| text + line + "\n");
        assert!(parse(&uncommented).is_ok(), "an optional key of the sample is wrong: {:?}", parse(&uncommented));
    }

    #[test]
    fn the_output_of_check_has_the_same_meaning() {
        let config =
            Config { store_budget: Some(Bytes(5 * GIB)), reader_group: Some(Group("7".into())), ..Config::default() };
        let spill =
            |writes_per_day| Some(Spill { dir: "/x".into(), budget: Some(Bytes(GIB)), after_s: 7, writes_per_day });
        let policy = Policy { name: Kind::Maestro, budget: Some(Bytes(GIB)), ..Policy::default() };
        let config = Config { policy, ..config };
        for spill in [None, spill(None), spill(Some(Bytes(5)))] {
            let config = Config { spill, ..config.clone() };
            assert_eq!(parse(&config.to_toml().expect("serialise")), Ok(config));
        }
    }

    #[test]
    fn unknown_keys_and_values_without_unit_or_out_of_range_are_errors_with_the_key() {
        for (text, names) in [
            ("quarantine = 5", "quarantine"),
            ("store_budget = \"512\"", "512"),
            ("quarantine_ms = 0", "quarantine_ms"),
            ("compression = \"lzo\"", "lzo"),
            ("runtime_dir = \"x\"", "runtime_dir"),
            ("[heat]\ntrack = \"sometimes\"", "boolean"),
            ("[heat]\ncost_percent = nan", "heat.cost_percent"),
            ("[tier]\nfast_percent = 50", "slow_node"),
            ("[tier]\nslow_node = 0\nfast_percent = 50", "tier.slow_node"),
            ("[tier]\nslow_node = 1\nfast_percent = 100", "tier.fast_percent"),
            ("[tier]\nslow_node = 1\nfast_percent = 5\nmib_per_s = 0", "tier.mib_per_s"),
            ("[heat]\ncost_percent = 0.0", "heat.cost_percent"),
            ("[spill]\ndir = \"x\"\nbudget = \"1G\"", "spill.dir"),
            ("[spill]\ndir = \"/x\"", "budget"),
            ("[spill]\ndir = \"/x\"\nbudget = \"1M\"", "spill.budget"),
            ("[spill]\ndir = \"/x\"\nbudget = \"1G\"\nafter_s = 0", "spill.after_s"),
            ("[remote]\nnodes = []\nbudget = \"1G\"", "remote.nodes"),
            ("[remote]\nnodes = [\"a\"]\nbudget = \"1G\"", "HOST:PORT"),
            ("[remote]\nnodes = [\"a:1\"]", "budget"),
            ("[remote]\nnodes = [\"a:1\"]\nbudget = \"1G\"\nreplicas = 0", "remote.replicas"),
            ("[remote]\nnodes = [\"a:1\"]\nbudget = \"1G\"\nuser = \"x\"", "password_file"),
            ("[remote]\nnodes = [\"a:1\"]\nbudget = \"1G\"\npassword_file = \"x\"", "password_file"),
            ("[remote]\nnodes = [\"a:1\"]\nbudget = \"1G\"\n[remote.tls]\nca_file = \"x\"", "absolute path"),
            (
                "[remote]\nnodes = [\"a:1\"]\nbudget = \"1G\"\n[remote.tls]\nca_file = \"/x\"\nkey_file = \"/y\"",
                "go together",
            ),
            ("[vm.x]\nlimit = \"5\"", "vm.\"x\": limit"),
            ("[vm.x]\nlimit = \"4K\"", "smallest"),
            ("[vm.\"\"]\nlimit = \"1G\"", "empty pattern"),
            ("[vm.x]\nshares = \"most\"", "shares"),
            ("[vm.x]\nclass = \"pinned\"", "found by Ballast"),
            ("[vm.x]\nlimit = \"1G\"\nreservation = \"2G\"", "more than the limit"),
            ("state_dir = \"x\"", "state_dir"),
            ("[policy]\nname = \"best\"", "best"),
            ("[policy]\ntick_ms = 1", "tick"),
            ("[policy]\nthreshold = 0.0", "threshold"),
            ("[policy]\nthreshold = nan", "threshold"),
            ("[policy]\nbudget = \"7\"", "7"),
            ("[policy]\nbudget = \"7K\"", "budget"),
            ("[spill]\ndir = \"/x\"\nbudget = \"1G\"\nwrites_per_day = \"7\"", "7"),
        ] {
            let error = parse(text).expect_err(text);
            assert!(error.contains(names), "{text}: {error}");
        }
    }
}
