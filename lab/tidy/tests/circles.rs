//! Tests that the files of a crate do not depend on each other in a circle, and its rooms only in their order. So a
//! reader can begin at the bottom, and never needs a file that comes later.
//!
//! Before: the sources. After: a failed test names the files of each circle, or each arrow that goes upward, and the
//! names that connect them.
//! Promise: an arrow is a name that one file takes from the file that defines it, by `crate::`, `super::` or `self::`,
//! or by the name of a child module. Re-exports are followed. Tests and `mod` lines make no arrows. Sources are read
//! as text, so a name that a macro makes is not found.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

mod common;

use common::{none_is_left, root};

/// A crate whose files are in rooms: each room, the lowest first, and the rooms that its files may name beside their
/// own. The files at the top of `src` are in no room.
type Rooms = (&'static str, &'static [(&'static str, &'static [&'static str])]);

const ROOMS: [Rooms; 1] = [(
    "host/pager/src",
    &[
        ("run", &[]),
        ("vm", &["run"]),
        ("scan", &["run", "vm"]),
        ("agent", &["run", "vm"]),
        ("tier", &["run", "vm"]),
        ("reclaim", &["run", "vm", "agent"]),
        ("fault", &["run", "vm", "scan", "tier"]),
        ("assemble", &["run", "vm", "scan", "agent", "tier", "reclaim", "fault"]),
    ],
)];

/// A file of a crate: the path of its module, and its text without comments, strings and tests.
struct Source {
    module: Vec<String>,
    text: String,
}

fn crates() -> Vec<PathBuf> {
    let members =
        ["host", "vmm", "guest", "lab"].map(|place| std::fs::read_dir(root().join(place)).expect("a directory"));
    let sources = members.into_iter().flatten().map(|entry| entry.expect("an entry").path().join("src"));
    let mut found: Vec<PathBuf> = sources.filter(|src| src.is_dir()).collect();
    found.sort();
    found
}

/// Returns the text of a source without comments and strings, up to the first module of tests in the file.
fn strip(text: &str) -> String {
    let text = &text.replace("#[cfg(test)]\nmod tests;\n", "");
    let end =
        ["#[cfg(test)]\nmod ", "#[cfg(all(test", "#[cfg(test)]\npub"].iter().filter_map(|mark| text.find(mark)).min();
    let mut out = String::new();
    for line in text[..end.unwrap_or(text.len())].lines() {
        let mut quoted = false;
        let mut last = ' ';
        for (at, c) in line.char_indices() {
            if !quoted && line[at..].starts_with("//") {
                break;
            }
            quoted ^= c == '"' && last != '\\' && last != '\'';
            if !quoted {
                out.push(c);
            }
            last = c;
        }
        out.push('\n');
    }
    out
}

fn read(src: &Path, dir: &Path, module: &[String], into: &mut BTreeMap<PathBuf, Source>) {
    for entry in std::fs::read_dir(dir).expect("a directory") {
        let path = entry.expect("an entry").path();
        let stem = path.file_stem().expect("a name").to_string_lossy().into_owned();
        let deeper: Vec<String> = module.iter().cloned().chain([stem.clone()]).collect();
        if path.is_dir() {
            read(src, &path, &deeper, into);
        } else if path.extension().is_some_and(|extension| extension == "rs") && stem != "tests" {
            let module = if matches!(stem.as_str(), "lib" | "main" | "mod") { module.to_vec() } else { deeper };
            let text = strip(&std::fs::read_to_string(&path).expect("a source"));
            into.insert(path.strip_prefix(src).expect("below src").to_owned(), Source { module, text });
        }
    }
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Returns the paths of a use tree that begins at `text`, such as `a::b` or `a::{b, c::d}`, and its length.
fn tree(text: &str) -> (Vec<Vec<String>>, usize) {
    let (mut path, mut at) = (Vec::new(), 0);
    loop {
        let rest = &text[at..];
        at += rest.len() - rest.trim_start().len();
        let rest = &text[at..];
        if rest.starts_with('{') {
            let mut paths = Vec::new();
            at += 1;
            loop {
                let rest = text[at..].trim_start();
                at = text.len() - rest.len();
                match rest.chars().next() {
                    Some('}') | None => return (paths, (at + 1).min(text.len())),
                    Some(',') => at += 1,
                    _ => {
                        let (inner, used) = tree(rest);
                        paths.extend(inner.into_iter().map(|tail| path.iter().cloned().chain(tail).collect()));
                        at += used.max(1);
                    }
                }
            }
        }
        let word: String = rest.chars().take_while(|c| is_word(*c)).collect();
        if word.is_empty() {
            return (vec![path], at);
        }
        at += word.len();
        path.push(word);
        if text[at..].starts_with(" as ") {
            at += 4 + text[at + 4..].chars().take_while(|c| is_word(*c)).count();
        }
        if !text[at..].starts_with("::") {
            return (vec![path], at);
        }
        at += 2;
    }
}

/// Returns all paths into its own crate that a file names, from the root of the crate.
fn named(source: &Source, modules: &BTreeSet<Vec<String>>) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    let mut at = 0;
    while at < source.text.len() {
        let rest = &source.text[at..];
        let word: String = rest.chars().take_while(|c| is_word(*c)).collect();
        if word.is_empty() {
            at += rest.chars().next().map_or(1, char::len_utf8);
            continue;
        }
        let before = source.text[..at].trim_end();
        let goes_on = before.ends_with("::") || before.ends_with('.') || before.ends_with('$');
        let child: Vec<String> = source.module.iter().cloned().chain([word.clone()]).collect();
        let base = match word.as_str() {
            "crate" => Some(Vec::new()),
            "self" => Some(source.module.clone()),
            "super" => Some(source.module[..source.module.len().saturating_sub(1)].to_vec()),
            _ if modules.contains(&child) => Some(child),
            _ => None,
        };
        let tail = &rest[word.len()..];
        let (Some(base), true) = (base, tail.starts_with("::") && !goes_on) else {
            at += word.len();
            continue;
        };
        let (paths, used) = tree(&tail[2..]);
        for mut path in paths {
            let mut base = base.clone();
            while path.first().is_some_and(|word| word == "super") {
                base.pop();
                path.remove(0);
            }
            path.retain(|word| word != "self");
            found.push(base.into_iter().chain(path).collect());
        }
        at += word.len() + 2 + used;
    }
    found
}

/// Returns the file that defines the item of this path. Re-exports are followed.
fn resolve(
    path: &[String],
    sources: &BTreeMap<PathBuf, Source>,
    modules: &BTreeSet<Vec<String>>,
    depth: u32,
) -> Option<PathBuf> {
    let most = (0..=path.len()).rev().find(|most| modules.contains(&path[..*most]))?;
    let (file, source) = sources.iter().find(|(_, source)| source.module == path[..most])?;
    let Some(item) = path.get(most).filter(|_| depth < 4) else { return Some(file.clone()) };
    let mut rest = source.text.as_str();
    while let Some(start) = rest.find("pub use ").or_else(|| rest.find("pub(crate) use ")) {
        let begin = start + rest[start..].find("use ").expect("found above") + 4;
        let (paths, used) = tree(&rest[begin..]);
        for exported in paths.into_iter().filter(|exported| exported.last() == Some(item)) {
            let from_root = exported.first().is_some_and(|word| word == "crate");
            let full: Vec<String> = match from_root {
                true => exported[1..].to_vec(),
                false => source.module.iter().cloned().chain(exported).collect(),
            };
            if full != path {
                return resolve(&full, sources, modules, depth + 1);
            }
        }
        rest = &rest[begin + used..];
    }
    Some(file.clone())
}

type Arrows = BTreeMap<PathBuf, BTreeMap<PathBuf, BTreeSet<String>>>;

fn arrows(src: &Path) -> Arrows {
    let mut sources = BTreeMap::new();
    read(src, src, &[], &mut sources);
    let modules: BTreeSet<Vec<String>> = sources.values().map(|source| source.module.clone()).collect();
    let mut arrows = Arrows::new();
    for (file, source) in &sources {
        for path in named(source, &modules) {
            let Some(to) = resolve(&path, &sources, &modules, 0).filter(|to| to != file) else { continue };
            // A module that only declares its children, or re-exports their items, takes nothing from them.
            let is_export = source.text.contains("pub use ") && sources[&to].module.starts_with(&source.module) && {
                let last = path.last().expect("a word");
                let text = source.text.replace("pub use ", "pub_use ");
                !text.split("pub_use ").enumerate().any(|(n, part)| {
                    let part = if n == 0 { part } else { part.split_once(';').map_or("", |(_, rest)| rest) };
                    part.split(|c| !is_word(c)).any(|word| word == last)
                })
            };
            if !is_export {
                arrows.entry(file.clone()).or_default().entry(to).or_default().insert(path.join("::"));
            }
        }
    }
    arrows
}

fn reached(from: &Path, arrows: &Arrows) -> BTreeSet<PathBuf> {
    let mut seen = BTreeSet::new();
    let mut open = vec![from.to_owned()];
    while let Some(file) = open.pop() {
        for next in arrows.get(&file).into_iter().flat_map(BTreeMap::keys) {
            if seen.insert(next.clone()) {
                open.push(next.clone());
            }
        }
    }
    seen
}

/// Returns a text for each circle of files: its first file, and the names that connect its files.
fn circles() -> Vec<String> {
    let mut said = Vec::new();
    for src in crates() {
        let place = src.strip_prefix(root()).expect("below the root").display().to_string();
        let arrows = arrows(&src);
        let mut told = BTreeSet::new();
        for file in arrows.keys().filter(|file| reached(file, &arrows).contains(*file)) {
            let circle: BTreeSet<PathBuf> =
                reached(file, &arrows).into_iter().filter(|other| reached(other, &arrows).contains(file)).collect();
            if !told.insert(circle.clone()) {
                continue;
            }
            let mut text = format!("{place}/{}: a circle of {} files\n", file.display(), circle.len());
            for from in &circle {
                for (to, names) in arrows[from].iter().filter(|(to, _)| circle.contains(*to)) {
                    text += &format!("  {} -> {}: {names:?}\n", from.display(), to.display());
                }
            }
            said.push(text);
        }
    }
    said
}

fn room(file: &Path) -> Option<String> {
    let parts: Vec<_> = file.iter().map(|part| part.to_string_lossy().into_owned()).collect();
    (parts.len() > 1).then(|| parts[0].clone())
}

/// Returns a text for each arrow between rooms that is not allowed, and for each room that has no rule.
fn upward(src: &str, rooms: &[(&str, &[&str])], arrows: &Arrows) -> Vec<String> {
    let mut said = Vec::new();
    for (from, to, names) in arrows.iter().flat_map(|(from, all)| all.iter().map(move |(to, names)| (from, to, names)))
    {
        let (Some(own), Some(other)) = (room(from), room(to)) else { continue };
        let rule = rooms.iter().find(|(name, _)| *name == own);
        if own != other && !rule.is_some_and(|(_, may)| may.contains(&other.as_str())) {
            said.push(format!("{src}: {} -> {}: {names:?}", from.display(), to.display()));
        }
    }
    said
}

#[test]
fn no_room_of_a_crate_names_one_above_it() {
    let said = ROOMS.iter().flat_map(|(src, rooms)| upward(src, rooms, &arrows(&root().join(src))));
    none_is_left(&said.collect::<Vec<_>>());
    for (src, rooms) in ROOMS {
        for (at, (name, may)) in rooms.iter().enumerate() {
            assert!(root().join(src).join(name).is_dir(), "{src} has no room {name}: is a rule out of date?");
            assert!(may.iter().all(|other| rooms[..at].iter().any(|(below, _)| below == other)), "{name} is not above");
        }
    }
}

#[test]
fn an_arrow_upward_is_found_where_there_is_one() {
    let file = |path: &str| PathBuf::from(path);
    let to = |path: &str| BTreeMap::from([(file(path), BTreeSet::from(["x".to_owned()]))]);
    let arrows = Arrows::from([(file("low/a.rs"), to("high/b.rs")), (file("high/b.rs"), to("low/c.rs"))]);
    let said = upward("src", &[("low", &[]), ("high", &["low"])], &arrows);
    assert_eq!(said, ["src: low/a.rs -> high/b.rs: {\"x\"}"]);
}

#[test]
fn no_crate_has_a_circle_of_files() {
    none_is_left(&circles());
}

#[test]
fn a_circle_is_found_where_there_is_one() {
    let dir = std::env::temp_dir().join(format!("ballast-tidy-{}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("a directory");
    let files = [("lib.rs", "mod a;\nmod b;\n"), ("a.rs", "use crate::b::B;\n"), ("b.rs", "use super::a::A;\n")];
    files.iter().for_each(|(name, text)| std::fs::write(dir.join(name), text).expect("a source"));
    let arrows = arrows(&dir);
    std::fs::remove_dir_all(&dir).expect("our directory");
    assert!(reached(Path::new("a.rs"), &arrows).contains(Path::new("a.rs")), "{arrows:?}");
    assert!(!arrows.contains_key(Path::new("lib.rs")), "{arrows:?}");
}
