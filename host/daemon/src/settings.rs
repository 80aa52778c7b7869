//! The engine's part of the configuration, in a message of its own.
//!
//! Before: the program that becomes the keeper read the configuration. After: each engine gets these settings through
//! the keeper, which treats them as bytes. An operator's change returns that way, for the next engine.
//! Promise: an engine that cannot read them says so and ends; a restart of the keeper helps.
#![expect(missing_docs, reason = "`config` describes the settings")]

use std::path::PathBuf;

use ballast_base::Bytes;
use ballast_base::format::{Format, Message, encode};
use ballast_keeper::Options;
use ballast_policy::Setup;
use serde::{Deserialize, Serialize};

use crate::config::{Compression, Config, Group, Remote, Spill};
use crate::rules::Rule;
use crate::tiering::Tiering;
use crate::tracking::Tracking;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    pub store_budget: Bytes,
    pub compression: Compression,
    pub quarantine_ms: u64,
    pub reader_gid: Option<u32>,
    pub spill: Option<Spill>,
    pub heat: Tracking,
    pub policy: Setup,
    pub remote: Option<Remote>,
    pub pool: Pooling,
    pub tier: Option<Tiering>,
    pub adopt_all: bool,
    pub runtime_dir: PathBuf,
    pub state_dir: PathBuf,
    pub rules: Vec<Rule>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pooling {
    pub dir: PathBuf,
    pub socket: PathBuf,
    /// Members of this group may request memory, besides root.
    pub gid: Option<u32>,
}

impl Settings {
    /// The engine's settings. Fails if the configuration names a group that this host does not have.
    pub fn of(config: &Config) -> anyhow::Result<Self> {
        Ok(Self {
            store_budget: config.store_budget(),
            compression: config.compression,
            quarantine_ms: config.quarantine_ms,
            reader_gid: Group::gid(config.reader_group.as_ref(), "reader_group")?,
            spill: config.spill.clone(),
            heat: config.heat,
            policy: config.policy.setup(),
            remote: config.remote.clone(),
            pool: Pooling {
                dir: config.runtime_dir.join("pool"),
                socket: config.pool_socket(),
                gid: Group::gid(config.attach_group.as_ref(), "attach_group")?,
            },
            tier: config.tier,
            adopt_all: config.adopt.all,
            runtime_dir: config.runtime_dir.clone(),
            state_dir: config.state_dir(),
            rules: config.rules()?,
        })
    }
}

/// The keeper's options, with the engine's settings as bytes. Fails as [`Settings::of`].
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
    use ballast_base::format::{HEADER, decode};
    use ballast_policy::Kind;

    use crate::config::RemoteTls;
    use crate::rules::Wanted;

    #[test]
    fn the_bytes_are_those_of_this_version() {
        let settings = Settings {
            store_budget: Bytes(4),
            compression: Compression::Lz4,
            quarantine_ms: 5,
            reader_gid: Some(6),
            spill: Some(Spill { dir: "/d".into(), budget: Some(Bytes(7)), after_s: 8, writes_per_day: Some(Bytes(9)) }),
            heat: Tracking { track: true, cost_percent: 0.5 },
            policy: Setup { policy: Kind::Gain, tick_ms: 1, budget_bytes: Some(2), threshold: 0.5 },
            remote: Some(Remote {
                nodes: vec!["n".into()],
                user: None,
                password_file: Some("/p".into()),
                replicas: 1,
                budget: None,
                after_s: 3,
                tls: Some(RemoteTls {
                    ca_file: "/c".into(),
                    cert_file: Some("/o".into()),
                    key_file: Some("/k".into()),
                    name: Some("n".into()),
                }),
                encrypt: true,
            }),
            pool: Pooling { dir: "/p".into(), socket: "/s".into(), gid: Some(3) },
            tier: Some(Tiering { fast_node: 1, slow_node: 2, fast_percent: 3, mib_per_s: 4 }),
            adopt_all: true,
            runtime_dir: "/r".into(),
            state_dir: "/l".into(),
            rules: vec![Rule {
                pattern: "n".into(),
                uid: None,
                wanted: Wanted { limit: Some(Some(Bytes(1))), shares: Some(Some(2)), ..Wanted::default() },
            }],
        };
        assert_eq!(decode::<Settings>(&encode(&settings)).ok().as_ref(), Some(&settings));
        let said: String = encode(&settings)[HEADER..].iter().map(|byte| format!("{byte:02x}")).collect();
        let expected = (
            1,
            "040005010601022f6401023742080102394201000000000000e03f03010102000000000000e03f".to_owned()
                + "0101016e0001022f7001000301022f6301022f6f01022f6b01016e01"
                + "022f70022f730103"
                + "0101020304"
                + "01022f72022f6c01016e0001010100000101020000",
        );
        assert_eq!((Settings::FORMAT.version, said), expected, "raise FORMAT, and put what is said now here");
    }
}
