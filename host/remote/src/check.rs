//! Check: finds server settings that would lose pages, or delay access to them.
//!
//! Before: an operator named a cluster. After: each wrong setting is known, by node, before it does harm.
//! Threads: any; the caller waits for each node. Units: findings.
//! Promise: it only reads from the servers. It also reports a server whose settings cannot be read.

use std::io;
use std::time::{Duration, Instant};

use ballast_store::IoContext;

use crate::cluster::Cluster;
use crate::refusal::Addr;
use crate::resp::Commands;

const TIMEOUT: Duration = Duration::from_secs(1);

/// Requests to a node. The last one returns the settings, and the others measure the latency.
const ASKED_TIMES: usize = 5;
/// Limit of a node's latency. Beyond it, a request is as slow as one to a rotating disk.
const FAR: Duration = Duration::from_millis(3);

/// One problem of a cluster.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Finding {
    /// True if pages may be lost or cannot be stored. Otherwise the finding is only information.
    pub serious: bool,
    /// The problem, with its node and the right value of a setting.
    pub text: String,
}

impl Finding {
    fn new(serious: bool, text: String) -> Self {
        Self { serious, text }
    }
}

type Settings = Vec<(String, String)>;

const ASKED: [&str; 6] = [
    "maxmemory",
    "maxmemory-policy",
    "min-replicas-to-write",
    "cluster-require-full-coverage",
    "cluster-node-timeout",
    "appendonly",
];

/// Checks every node. Serious findings come first.
pub fn check(cluster: &Cluster) -> Vec<Finding> {
    cluster.refresh(IoContext::BACKGROUND);
    let map = cluster.map();
    let mut found = Vec::new();
    if map.shards().next().is_none() {
        let nodes = cluster.options().nodes.iter().map(Addr::to_string).collect::<Vec<_>>().join(", ");
        let why = cluster.silence().map(|why| format!("; {why}")).unwrap_or_default();
        found.push(Finding::new(true, format!("no node says who has which slot; asked: {nodes}{why}")));
    } else if map.uncovered() > 0 {
        let text = format!("{} slots have no node: pages there wait", map.uncovered());
        found.push(Finding::new(true, text));
    }
    let wanted = cluster.options().replicas;
    for shard in map.shards() {
        let Some(primary) = &shard.primary else {
            found.push(Finding::new(true, "a shard has no primary now: its pages wait".into()));
            continue;
        };
        if shard.replicas.len() < wanted as usize {
            let has = shard.replicas.len();
            let text =
                format!("{primary} has {has} replicas, and a page counts as stored with {wanted}: none is stored");
            found.push(Finding::new(true, text));
        }
        found.extend(judge_replicas(primary, shard.electable, wanted));
        for addr in [primary].into_iter().chain(&shard.replicas) {
            match settings(cluster, addr) {
                Ok((settings, took)) => {
                    found.extend(judge(addr, &settings, wanted));
                    found.extend(judge_latency(addr, took));
                }
                Err(error) => found.push(Finding::new(false, format!("{addr} cannot be checked: {error}"))),
            }
        }
    }
    found.extend(map.strays().map(|addr| {
        let text = "is a replica, and its cluster does not say of which primary (CLUSTER SHARDS): nothing waits for it";
        Finding::new(true, format!("{addr} {text}, and if it is elected pages are lost"))
    }));
    found.sort_by_key(|finding| !finding.serious);
    found
}

/// Returns the settings of a node, and the shortest time that a request took on one connection.
fn settings(cluster: &Cluster, addr: &Addr) -> io::Result<(Settings, Duration)> {
    let words: Vec<&[u8]> = [&b"CONFIG"[..], b"GET"].into_iter().chain(ASKED.map(str::as_bytes)).collect();
    let context = IoContext::BACKGROUND.until(Instant::now() + TIMEOUT);
    cluster.with(addr, context, |link| {
        let mut took = TIMEOUT;
        for _ in 1..ASKED_TIMES {
            let begun = Instant::now();
            link.ask(&Commands::one(&words), context)?;
            took = took.min(begun.elapsed());
        }
        let replies = link.ask(&Commands::one(&words), context)?;
        let said = replies.get(0);
        if let Some(error) = said.error() {
            return Err(io::Error::other(error));
        }
        let words: Option<Vec<String>> = said.array().and_then(|words| words.map(|w| Some(w.text()?.into())).collect());
        let words = words.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "its settings make no sense"))?;
        Ok((words.as_chunks::<2>().0.iter().map(|[name, value]| (name.clone(), value.clone())).collect(), took))
    })
}

/// Returns a finding if the latency of the node would noticeably slow down refaults.
fn judge_latency(addr: &Addr, took: Duration) -> Option<Finding> {
    let text =
        || format!("{addr} takes {took:.1?} for a request, the quickest of some: so does each touch of a page there");
    (took > FAR).then(|| Finding::new(false, text()))
}

/// Returns a finding if a primary has more replicas than demanded: a page must be on all that may be elected.
fn judge_replicas(primary: &Addr, has: u32, wanted: u32) -> Option<Finding> {
    let text = || {
        format!(
            "{primary} has {has} replicas, and remote.replicas is {wanted}: a page counts as stored only with all of \
             them, because each may be elected; while one is slow, or loads, pages stay in RAM"
        )
    };
    (has > wanted).then(|| Finding::new(false, text()))
}

fn judge(addr: &Addr, settings: &Settings, replicas: u32) -> Vec<Finding> {
    let value = |name: &str| settings.iter().find(|(known, _)| known == name).map_or("", |(_, value)| value.as_str());
    let number = |name: &str| value(name).parse::<u64>().ok();
    let mut found = Vec::new();
    let mut say = |serious, text: String| found.push(Finding::new(serious, format!("{addr}: {text}")));
    let policy = value("maxmemory-policy");
    if !policy.is_empty() && policy != "noeviction" {
        say(true, format!("maxmemory-policy is {policy}: it throws pages away when it is full; set noeviction"));
    }
    if number("maxmemory") == Some(0) {
        say(false, "maxmemory is 0: it grows until the kernel kills it; set a limit".into());
    }
    if value("cluster-require-full-coverage") == "yes" {
        let text = "cluster-require-full-coverage is yes: one dead shard stops all pages; set no";
        say(false, text.into());
    }
    if number("min-replicas-to-write").is_some_and(|least| least < u64::from(replicas)) {
        let text =
            format!("min-replicas-to-write is below {replicas}: alone, it takes pages that do not count and go again");
        say(false, text);
    }
    if value("appendonly") == "no" {
        let after = number("cluster-node-timeout").unwrap_or(15_000) * 3 / 1000;
        let text = format!(
            "it keeps nothing on disk (appendonly no): restarted at once it empties its replica as well; restart it \
             after {after} s (RestartSec), when another node has its slots"
        );
        say(false, text);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_that_is_far_away_is_named_and_one_that_is_near_is_not() {
        let addr = Addr { host: "a".into(), port: 1 };
        assert_eq!(judge_latency(&addr, FAR), None);
        let found = judge_latency(&addr, Duration::from_micros(12_340)).expect("a finding");
        assert!(!found.serious && found.text.starts_with("a:1 takes 12.3ms"), "{found:?}");
    }

    #[test]
    fn more_replicas_than_the_settings_say_are_named_and_as_many_are_not() {
        let addr = Addr { host: "a".into(), port: 1 };
        assert_eq!([0, 1, 2].map(|has| judge_replicas(&addr, has, 2)), [None, None, None]);
        let found = judge_replicas(&addr, 3, 2).expect("a finding");
        assert!(!found.serious && found.text.contains("a:1 has 3 replicas"), "{found:?}");
    }

    #[test]
    fn each_trap_is_named_and_right_settings_say_nothing() {
        let addr = Addr { host: "a".into(), port: 1 };
        let right = [
            ("maxmemory", "1000"),
            ("maxmemory-policy", "noeviction"),
            ("min-replicas-to-write", "1"),
            ("cluster-require-full-coverage", "no"),
            ("cluster-node-timeout", "5000"),
            ("appendonly", "yes"),
        ];
        let with = |name: &str, value: &str| -> Settings {
            let set =
                |(known, right): (&str, &str)| (known.to_owned(), if known == name { value } else { right }.to_owned());
            right.map(set).to_vec()
        };
        assert_eq!(judge(&addr, &with("", ""), 1), []);
        for (name, value, serious, says) in [
            ("maxmemory-policy", "allkeys-lru", true, "set noeviction"),
            ("maxmemory", "0", false, "maxmemory is 0"),
            ("cluster-require-full-coverage", "yes", false, "set no"),
            ("min-replicas-to-write", "0", false, "below 1"),
            ("appendonly", "no", false, "after 15 s"),
        ] {
            let found = judge(&addr, &with(name, value), 1);
            let [finding] = &found[..] else { panic!("{name}: {found:?}") };
            assert_eq!(finding.serious, serious, "{finding:?}");
            assert!(finding.text.contains(says), "{finding:?}");
        }
        assert_eq!(judge(&addr, &Settings::new(), 1), [], "what is not said is not known");
    }
}
