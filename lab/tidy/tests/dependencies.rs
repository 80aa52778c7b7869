//! Tests which crate may depend on which: the arrows of ARCHITECTURE.md, checked against cargo's resolution.
//!
//! Before: the manifests. After: a failed test names the forbidden path, crate by crate.
//! Promise: the checked graph is what a build links: normal dependencies, also indirect ones, on Linux.

mod common;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::process::Command;

use serde_json::Value;

/// Crates of the product, and the crates that none of them may reach in any number of steps.
const FORBIDDEN: [(&[&str], &[&str]); 14] = [
    (&["ballast-cli"], &["kvm-ioctls", "kvm-bindings", "redis", "ballast-daemon", "ballast-pager", "ballast-client"]),
    // `ballast-page` has the moves of one page and their model, without a kernel, a store or threads.
    (&["ballast-page"], &["ballast-sys", "ballast-store", "ballast-heat", "ballast-pager", "libc", "rustix"]),
    (&["ballast-pager"], &["ballast-daemon", "ballast-policy", "ballast-api", "ballast-client"]),
    // The keeper never touches a page. It holds descriptors, and knows only what `handover` tells about their files.
    (
        &["ballast-keeper", "ballast-handover"],
        &["ballast-page", "ballast-store", "ballast-heat", "ballast-pager", "ballast-policy", "ballast-api", "tokio"],
    ),
    // `ballast-adopt` knows processes and the kernel's swap, and neither a page's state nor a policy.
    (&["ballast-adopt"], &["ballast-page", "ballast-store", "ballast-heat", "ballast-pager", "ballast-policy"]),
    (&["ballast-policy"], &["ballast-sys", "ballast-store", "ballast-heat", "ballast-pager"]),
    // `ballast-ranges` is pure, so any guest agent and any replay can use it.
    (&["ballast-ranges"], &["ballast-sys", "ballast-store", "ballast-heat", "ballast-pager", "libc", "rustix"]),
    // Guest and host share `ballast-messages` for their protocol, and nothing else.
    (&["ballast-messages"], &["ballast-sys", "ballast-base", "serde", "libc", "rustix"]),
    // `ballast-pool` owns the pool's memory, which is files, and knows no VM.
    (&["ballast-pool"], &["ballast-store", "ballast-heat", "ballast-page", "ballast-pager", "ballast-policy"]),
    (&["ballast-store"], &["ballast-heat", "ballast-page", "ballast-pager", "ballast-policy"]),
    // `ballast-remote` talks to servers with its own code, its own deadlines and bounds.
    (&["ballast-remote"], &["ballast-heat", "ballast-page", "ballast-pager", "ballast-policy", "redis", "tokio"]),
    (&["ballast-heat"], &["ballast-store", "ballast-page", "ballast-pager", "ballast-policy"]),
    // These run in the process of a VMM.
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

/// Programs in a guest, or in a VMM, must not link what runs on the host, except for these crates of `host/`.
const FOR_ALL: [&str; 2] = ["ballast-base", "ballast-sys"];

/// Cargo's resolution: the name of each package, the place of its manifest, and the packages that it links.
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
            // Packages of other platforms may not have been downloaded.
            .args(["--filter-platform", &format!("{}-unknown-linux-gnu", std::env::consts::ARCH)])
            .arg("--manifest-path")
            .arg(common::root().join("Cargo.toml"))
            .output()
            .expect("start cargo");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let metadata: Value = serde_json::from_slice(&output.stdout).expect("cargo's JSON");
        let text = |value: &Value| value.as_str().expect("a text").to_owned();
        let list = |value: &Value| value.as_array().expect("a list").clone();
        // Development and build dependencies have a kind. Normal ones have none.
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

    fn members(&self, folder: &str) -> Vec<&str> {
        let start = format!("{}/{folder}/", common::root().display());
        self.packages.values().filter(|p| p.manifest.starts_with(&start)).map(|p| p.name.as_str()).collect()
    }

    /// Returns the shortest path from one package to one of the others, as the names on it.
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
            // A rule about a package that no longer exists would check nothing.
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
    let product: Vec<&str> = ["host", "vmm", "guest"].iter().flat_map(|room| graph.members(room)).collect();
    let lab = graph.members("lab");
    assert!(product.contains(&"ballast-cli") && lab.contains(&"ballast-bench"), "{product:?}, {lab:?}");
    for name in product {
        assert_eq!(graph.path(name, &lab), None, "{name} is part of the product");
    }
}

#[test]
fn no_room_links_another_ones_code() {
    let graph = Graph::read();
    let host: Vec<&str> = graph.members("host").into_iter().filter(|name| !FOR_ALL.contains(name)).collect();
    for (room, others) in [("vmm", &graph.members("guest")), ("guest", &graph.members("vmm"))] {
        for name in graph.members(room) {
            assert_eq!(graph.path(name, &host), None, "{name} is in {room}/");
            assert_eq!(graph.path(name, others), None, "{name} is in {room}/");
        }
    }
}

#[test]
fn the_rules_find_a_path_where_there_is_one() {
    let graph = Graph::read();
    let path = graph.path("ballast-bench", &["kvm-ioctls"]).expect("the bench runs KVM guests");
    assert_eq!(path, "ballast-bench -> ballast-testvm -> kvm-ioctls");
}
