//! The engine's part of the configuration, in a message of its own.
//!
//! Before: the program that becomes the keeper read the configuration. After: each engine gets these settings through
//! the keeper, to which they are bytes. An operator's change goes back the same way, for the next engine.
//! Promise: an engine that cannot read them says so and ends; a restart of the keeper helps.

use std::path::PathBuf;

use ballast_base::Bytes;
use ballast_base::format::{Format, Message, encode};
use ballast_keeper::Options;
use ballast_policy::Setup;
use serde::{Deserialize, Serialize};

use crate::config::{self, Compression, Config, Group};
use crate::rules::Rule;
use crate::tiering::Tiering;
use crate::tracking::Tracking;

/// The settings of an engine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// Most memory the store may use.
    pub store_budget: Bytes,
    /// How far pages are compressed.
    pub compression: Compression,
    /// Quarantine time.
    pub quarantine_ms: u64,
    /// Group that may read the API.
    pub reader_gid: Option<u32>,
    /// File stores.
    pub spill: Option<Spilling>,
    /// When VMs are tracked.
    pub heat: Tracking,
    /// The governor.
    pub policy: Setup,
    /// A cluster that pages go to.
    pub remote: Option<Remoting>,
    /// The pool.
    pub pool: Pooling,
    /// Protection of pages that go to a cluster.
    pub privacy: Privacy,
    /// Nodes of fast and of slow memory.
    pub tier: Option<Tiering>,
    /// How VMs are adopted.
    pub adopt: Option<Adopting>,
    /// The directory of the samples of the last day.
    pub history: PathBuf,
    /// The settings of VMs.
    pub vms: Keeping,
}

/// Where the settings of VMs come from.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Keeping {
    /// The directory of the file with what operators changed.
    pub dir: PathBuf,
    /// What the configuration says.
    pub rules: Vec<Rule>,
}

/// Protection of pages that go to a cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Privacy {
    /// Connections are under TLS.
    pub tls: Option<TlsFiles>,
    /// Pages are sealed.
    pub encrypt: bool,
}

/// The files of TLS.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TlsFiles {
    /// Authorities.
    pub ca: PathBuf,
    /// Our own certificate, and its key.
    pub own: Option<(PathBuf, PathBuf)>,
    /// The name of servers.
    pub name: Option<String>,
}

/// How VMs are adopted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Adopting {
    /// The directory of the file that remembers them.
    pub dir: PathBuf,
    /// They are adopted as they start.
    pub all: bool,
}

/// How pages go to a cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Remoting {
    /// Some of its nodes.
    pub nodes: Vec<String>,
    /// Our user name there.
    pub user: Option<String>,
    /// A file with the password.
    pub password_file: Option<String>,
    /// Replicas that must have a page.
    pub replicas: u32,
    /// Most memory of the cluster.
    pub budget: Bytes,
    /// Least time a page is far before it is sent.
    pub after_s: u64,
}

/// Where the pool is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pooling {
    /// Its directory.
    pub dir: PathBuf,
    /// Where VMMs ask for memory.
    pub socket: PathBuf,
    /// Members of this group may, beside root.
    pub gid: Option<u32>,
}

/// How pages go to file stores.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spilling {
    /// Directory on the disk.
    pub dir: PathBuf,
    /// Most disk space.
    pub budget: Bytes,
    /// Least time a page is far before it is spilled.
    pub after_s: u64,
    /// Bytes that may be written for each VM in a day; 0 is no limit.
    pub writes_per_day: Bytes,
}

impl Settings {
    /// The settings in a configuration.
    ///
    /// # Errors
    /// This host has no group of a name in it.
    pub fn of(config: &Config) -> anyhow::Result<Self> {
        Ok(Self {
            store_budget: config.store_budget(),
            compression: config.compression,
            quarantine_ms: config.quarantine_ms,
            reader_gid: Group::gid(config.reader_group.as_ref(), "reader_group")?,
            heat: config.heat,
            spill: config.spill.as_ref().map(|spill| Spilling {
                dir: spill.dir.clone(),
                budget: spill.budget(),
                after_s: spill.after_s,
                writes_per_day: spill.writes_per_day.unwrap_or_default(),
            }),
            policy: config.policy.setup(),
            remote: config.remote.as_ref().map(|remote| Remoting {
                nodes: remote.nodes.clone(),
                user: remote.user.clone(),
                password_file: remote.password_file.as_ref().map(|file| file.to_string_lossy().into_owned()),
                replicas: remote.replicas,
                budget: remote.budget(),
                after_s: remote.after_s,
            }),
            pool: Pooling {
                dir: config.runtime_dir.join("pool"),
                socket: config.pool_socket(),
                gid: Group::gid(config.attach_group.as_ref(), "attach_group")?,
            },
            privacy: config.remote.as_ref().map_or_else(Privacy::default, Privacy::of),
            tier: config.tier,
            adopt: Some(Adopting { dir: config.runtime_dir.clone(), all: config.adopt.all }),
            history: config.runtime_dir.join("history"),
            vms: Keeping { dir: config.state_dir(), rules: config.rules()? },
        })
    }
}

impl Privacy {
    fn of(remote: &config::Remote) -> Self {
        let tls = remote.tls.clone().map(|tls| TlsFiles {
            ca: tls.ca_file,
            own: tls.cert_file.zip(tls.key_file),
            name: tls.name,
        });
        Self { tls, encrypt: remote.encrypt }
    }
}

/// The keeper's options in a configuration, with the engine's part as bytes.
///
/// # Errors
/// This host has no group of a name in it.
pub fn for_keeper(config: &Config) -> anyhow::Result<Options> {
    let engine = Settings::of(config)?;
    Ok(Options {
        runtime_dir: config.runtime_dir.clone(),
        attach_socket: config.attach_socket(),
        api_socket: config.api_socket(),
        attach_gid: engine.pool.gid,
        reader_gid: engine.reader_gid,
        file_stores: config.spill.is_some(),
        groups: config.dedup.clone().into_iter().collect(),
        engine: encode(&engine),
    })
}

impl Message for Settings {
    const FORMAT: Format = Format { version: 1, least_reader: 1, oldest: 1 };
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_api::Track;
    use ballast_base::format::HEADER;
    use ballast_policy::{Kind, Params};

    use crate::rules::Wanted;

    #[test]
    fn what_an_engine_is_told_is_what_this_version_says() {
        let params = Params { window_ms: 3, threshold: 0.5, watermark_bytes: 4 };
        let settings = Settings {
            store_budget: Bytes(4),
            compression: Compression::Lz4,
            quarantine_ms: 5,
            reader_gid: Some(6),
            spill: Some(Spilling { dir: "/d".into(), budget: Bytes(7), after_s: 8, writes_per_day: Bytes(9) }),
            heat: Tracking { track: Track::Auto, cost_percent: 0.5 },
            policy: Setup { policy: Kind::Gain, tick_ms: 1, budget_bytes: Some(2), params },
            remote: Some(Remoting {
                nodes: vec!["n".into()],
                user: None,
                password_file: Some("/p".into()),
                replicas: 1,
                budget: Bytes(2),
                after_s: 3,
            }),
            pool: Pooling { dir: "/p".into(), socket: "/s".into(), gid: Some(3) },
            privacy: Privacy {
                tls: Some(TlsFiles { ca: "/c".into(), own: Some(("/o".into(), "/k".into())), name: Some("n".into()) }),
                encrypt: true,
            },
            tier: Some(Tiering { fast_node: 1, slow_node: 2, fast_percent: 3, mib_per_s: 4 }),
            adopt: Some(Adopting { dir: "/r".into(), all: true }),
            history: "/h".into(),
            vms: Keeping {
                dir: "/l".into(),
                rules: vec![Rule {
                    pattern: "n".into(),
                    uid: None,
                    wanted: Wanted { limit: Some(Some(Bytes(1))), shares: Some(Some(2)), ..Wanted::default() },
                }],
            },
        };
        let said: String = encode(&settings)[HEADER..].iter().map(|byte| format!("{byte:02x}")).collect();
        let expected = (
            1,
            "040005010601022f6407080900000000000000e03f0301010203000000000000e03f04".to_owned()
                + "0101016e0001022f70010203"
                + "022f70022f730103"
                + "01022f6301022f6f022f6b01016e01"
                + "0101020304"
                + "01022f7201"
                + "022f68"
                + "022f6c01016e0001010100000101020000",
        );
        assert_eq!((Settings::FORMAT.version, said), expected, "raise FORMAT, and put what is said now here");
    }
}
