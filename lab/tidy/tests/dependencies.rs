//! Which crate may reach which: the arrows of ARCHITECTURE.md, read from what cargo resolves.
//!
//! Before: the manifests. After: a failed test that names the forbidden path, crate by crate.
//! Promise: what is checked is what a build links: normal dependencies, with all that they bring, on Linux.

mod common;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::process::Command;

use serde_json::Value;

/// Crates of the product, and what none of them may reach in any number of steps.
const FORBIDDEN: [(&[&str], &[&str]); 14] = [
    (&["ballast-cli"], &["kvm-ioctls", "kvm-bindings", "redis", "ballast-daemon", "ballast-pager", "ballast-client"]),
    // The moves of one page, and their model: no kernel, no store, no thread.
    (&["ballast-page"], &["ballast-sys", "ballast-store", "ballast-heat", "ballast-pager", "libc", "rustix"]),
    (&["ballast-pager"], &["ballast-daemon", "ballast-policy", "ballast-api", "ballast-client"]),
    // The keeper never touches a page: it holds descriptors, and knows of their files what `handover` says.
    (
        &["ballast-keeper", "ballast-handover"],
        &["ballast-page", "ballast-store", "ballast-heat", "ballast-pager", "ballast-policy", "ballast-api", "tokio"],
    ),
    (&["ballast-policy"], &["ballast-sys", "ballast-store", "ballast-heat", "ballast-pager"]),
    // Pure: for any guest agent, and for replays.
    (&["ballast-ranges"], &["ballast-sys", "ballast-store", "ballast-heat", "ballast-pager", "libc", "rustix"]),
    // What guest and host say to each other is the same code in both, and nothing else.
    (&["ballast-guest"], &["ballast-sys", "ballast-base", "serde", "libc", "rustix"]),
    // Where memory comes from, without any: no kernel, no clock.
    (
        &["ballast-pool"],
        &["ballast-sys", "ballast-store", "ballast-heat", "ballast-page", "ballast-pager", "ballast-policy", "libc"],
    ),
    // Its memory: files, and no VM.
    (&["ballast-reserve"], &["ballast-store", "ballast-heat", "ballast-page", "ballast-pager", "ballast-policy"]),
    (&["ballast-store"], &["ballast-heat", "ballast-page", "ballast-pager", "ballast-policy"]),
    // Servers are spoken to by its own code, with deadlines and bounds of its own.
    (&["ballast-remote"], &["ballast-heat", "ballast-page", "ballast-pager", "ballast-policy", "redis", "tokio"]),
    (&["ballast-heat"], &["ballast-store", "ballast-page", "ballast-pager", "ballast-policy"]),
    // They run in somebody else's process.
    (
        &["ballast-client", "ballast-preload"],
        &[
            "ballast-handover",
            "ballast-store",
            "ballast-heat",
            "ballast-pager",
            "ballast-policy",
            "ballast-api",
            "ballast-daemon",
            "tokio",
        ],
    ),
    (&["ballast-base"], &["ballast-sys", "libc", "rustix"]),
];

/// What cargo resolved: each package's name, where its manifest lies, and the packages it links.
struct Graph {
    packages: BTreeMap<String, Package>,
}

struct Package {
    name: String,
    manifest: String,
    links: Vec<String>,
}

impl Graph {
    fn read() -> Self {
        let cargo = std::env::var_os("CARGO").expect("cargo runs this test");
        let output = Command::new(cargo)
            .args(["metadata", "--format-version", "1", "--offline", "--locked"])
            // Packages of other platforms need not have been downloaded.
            .args(["--filter-platform", &format!("{}-unknown-linux-gnu", std::env::consts::ARCH)])
            .arg("--manifest-path")
            .arg(common::root().join("Cargo.toml"))
            .output()
            .expect("start cargo");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let metadata: Value = serde_json::from_slice(&output.stdout).expect("cargo's JSON");
        let text = |value: &Value| value.as_str().expect("a text").to_owned();
        let list = |value: &Value| value.as_array().expect("a list").clone();
        // Development and build dependencies have a kind; normal ones have none.
        let linked = |dep: &Value| list(&dep["dep_kinds"]).iter().any(|kind| kind["kind"].is_null());
        let mut links: BTreeMap<String, Vec<String>> = list(&metadata["resolve"]["nodes"])
            .iter()
            .map(|node| {
                let deps = list(&node["deps"]);
                (text(&node["id"]), deps.iter().filter(|dep| linked(dep)).map(|dep| text(&dep["pkg"])).collect())
            })
            .collect();
        let packages = list(&metadata["packages"])
            .iter()
            .map(|package| {
                let id = text(&package["id"]);
                let links = links.remove(&id).expect("a node for each package");
                let package =
                    Package { name: text(&package["name"]), manifest: text(&package["manifest_path"]), links };
                (id, package)
            })
            .collect();
        Self { packages }
    }

    fn id(&self, name: &str) -> &str {
        let found = self.packages.iter().find(|(_, package)| package.name == name);
        found.unwrap_or_else(|| panic!("no package is named {name}: is a rule out of date?")).0
    }

    /// The members of the workspace in this folder of it.
    fn members(&self, folder: &str) -> Vec<&str> {
        let start = format!("{}/{folder}/", common::root().display());
        self.packages.values().filter(|p| p.manifest.starts_with(&start)).map(|p| p.name.as_str()).collect()
    }

    /// The shortest way from one package to one of the others, as the names on it.
    fn path(&self, from: &str, to: &[&str]) -> Option<String> {
        let mut seen = BTreeSet::from([self.id(from)]);
        let mut queue = VecDeque::from([(self.id(from), from.to_owned())]);
        while let Some((at, path)) = queue.pop_front() {
            for next in &self.packages[at].links {
                let name = self.packages[next].name.as_str();
                let path = format!("{path} -> {name}");
                if to.contains(&name) {
                    return Some(path);
                }
                if seen.insert(next) {
                    queue.push_back((next, path));
                }
            }
        }
        None
    }
}

#[test]
fn no_crate_reaches_what_it_must_not_know() {
    let graph = Graph::read();
    for (crates, forbidden) in FORBIDDEN {
        for name in forbidden {
            // A rule about a package that is no more would check nothing.
            assert!(!graph.id(name).is_empty());
        }
        for name in crates {
            assert_eq!(graph.path(name, forbidden), None, "{name} must not know any of {forbidden:?}");
        }
    }
}

#[test]
fn no_crate_of_the_product_links_one_of_the_lab() {
    let graph = Graph::read();
    let (product, lab) = (graph.members("crates"), graph.members("lab"));
    assert!(product.contains(&"ballast-cli") && lab.contains(&"ballast-bench"), "{product:?}, {lab:?}");
    for name in product {
        assert_eq!(graph.path(name, &lab), None, "{name} is part of the product");
    }
}

#[test]
fn the_rules_find_a_path_where_there_is_one() {
    let graph = Graph::read();
    let path = graph.path("ballast-bench", &["kvm-ioctls"]).expect("the bench runs KVM guests");
    assert_eq!(path, "ballast-bench -> ballast-testvm -> kvm-ioctls");
}
