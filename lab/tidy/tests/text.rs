//! Tests of all texts: links and cited files exist, lines are not too wide for a screen, and there is one glossary.
//!
//! Before: sources, scripts, settings and pages of this repository. After: a failed test names each place.
//! Promise: no list of words judges the sentences; readers do (CONTRIBUTING.md).

use std::path::Path;

mod common;

use common::{none_is_left, root};

/// Most characters of a line of code, comment or prose; below, of a row of a table.
const WIDTH: usize = 120;
const ROW: usize = 200;

/// Returns the names, from the root, and texts of the files that a person writes.
fn files(endings: &[&str]) -> Vec<(String, String)> {
    fn walk(dir: &Path, endings: &[&str], into: &mut Vec<(String, String)>) {
        for entry in std::fs::read_dir(dir).expect("a directory") {
            let path = entry.expect("an entry").path();
            let name = path.strip_prefix(root()).expect("below the root").display().to_string();
            let skipped = ["target", "lab/tidy/tests"].contains(&name.as_str())
                || path.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.'));
            if skipped || path.is_symlink() {
                continue;
            }
            if path.is_dir() {
                walk(&path, endings, into);
            } else if endings.iter().any(|ending| name.ends_with(ending)) {
                into.push((name, std::fs::read_to_string(&path).expect("text")));
            }
        }
    }
    let mut found = Vec::new();
    walk(&root(), endings, &mut found);
    found.sort();
    found
}

#[test]
fn no_line_of_a_source_is_wider_than_the_house() {
    let mut said = Vec::new();
    for (name, text) in files(&[".rs", ".toml", ".sh", ".h", ".c"]) {
        let wide = text.lines().enumerate().filter(|(_, line)| line.chars().count() > WIDTH);
        said.extend(wide.map(|(number, line)| format!("{name}:{}: {}", number + 1, line.chars().count())));
    }
    none_is_left(&said);
}

/// The width of examples is not checked.
#[test]
fn no_line_of_a_page_is_wider_than_the_house_and_a_row_of_a_table_is_one_line() {
    let mut said = Vec::new();
    for (name, text) in files(&[".md"]) {
        let mut is_example = false;
        for (at, line) in text.lines().enumerate() {
            is_example ^= line.trim_start().starts_with("```");
            let (is_row, width) = (line.trim_start().starts_with('|'), line.chars().count());
            let most = if is_row { ROW } else { WIDTH };
            if width > most && (is_row || !is_example && !line.starts_with("    ")) {
                said.push(format!("{name}:{}: {width} characters", at + 1));
            }
            if is_row && !is_example && !line.trim_end().ends_with('|') {
                said.push(format!("{name}:{}: a row does not end in this line", at + 1));
            }
        }
    }
    none_is_left(&said);
}

/// Returns the anchor that GitHub makes of a heading.
fn anchor(heading: &str) -> String {
    let text = heading.trim_start_matches('#').trim().to_lowercase();
    let kept = text.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}

#[test]
fn every_link_of_a_page_leads_somewhere() {
    let mut said = Vec::new();
    for (name, text) in files(&[".md"]) {
        for part in text.split("](").skip(1) {
            let target = part.split([')', ' ']).next().unwrap_or_default();
            let (file, place) = target.split_once('#').unwrap_or((target, ""));
            if file.contains("://") {
                continue;
            }
            let path =
                if file.is_empty() { root().join(&name) } else { root().join(&name).with_file_name("").join(file) };
            let is_page = path.extension().is_some_and(|end| end == "md");
            let has_place = || {
                let text = std::fs::read_to_string(&path).expect("a page");
                text.lines().any(|line| line.starts_with('#') && anchor(line) == place)
            };
            if !path.exists() || !place.is_empty() && is_page && !has_place() {
                said.push(format!("{name}: {target}"));
            }
        }
    }
    none_is_left(&said);
}

/// The terms that CONTRIBUTING.md calls our own.
const OURS: [&str; 9] = ["zap", "punch", "quarantine", "granule", "region", "ticket", "fence", "poison", "escrow"];

#[test]
fn there_is_one_glossary_and_it_has_every_term_of_ours() {
    const GLOSSARY: &str = "host/base/src/lib.rs";
    let sources = files(&[".rs", ".md"]);
    let with_one = sources.iter().filter(|(_, text)| {
        text.lines().any(|line| ["# Glossary", "| Word | Meaning |"].iter().any(|mark| line.trim_end().ends_with(mark)))
    });
    let others: Vec<String> = with_one.map(|(name, _)| name.clone()).filter(|name| name != GLOSSARY).collect();
    none_is_left(&others);
    let glossary = std::fs::read_to_string(root().join(GLOSSARY)).expect("the glossary");
    let is_defined = |term: &&str| glossary.lines().any(|line| line.starts_with(&format!("//! | {term} |")));
    let missing: Vec<String> = OURS.iter().filter(|term| !is_defined(term)).map(|term| (*term).into()).collect();
    none_is_left(&missing);
}

/// Returns the words of a line that name a source, page or script, such as `vm/ram.rs` or `docs/install.md`.
fn cited(line: &str) -> Vec<&str> {
    let parts = line.split(|c: char| !c.is_ascii_alphanumeric() && !"_./-".contains(c));
    let names = parts.map(|part| part.trim_matches(['.', '-']));
    names.filter(|name| [".rs", ".md", ".py", ".svg"].iter().any(|end| name.ends_with(end) && name != end)).collect()
}

/// Returns true if the path of a file ends with `cited`, with or without the folder `src`. `files` leaves out a folder.
fn is_there(cited: &str, paths: &[String]) -> bool {
    let cited = cited.trim_start_matches("../").trim_start_matches(['.', '/']);
    paths.iter().any(|path| {
        let found = |path: &str| path == cited || path.ends_with(&format!("/{cited}"));
        found(path) || found(&path.replace("/src/", "/"))
    }) || ["", "lab", "lab/tidy"].iter().any(|folder| root().join(folder).join(cited).is_file())
}

/// Names of files that a reader or a bench writes.
const NOT_CITED: [&str; 4] = ["NAME.rs", "FILE.png", "tables.md", "FILE.svg"];

#[test]
fn code_and_pages_cite_only_files_of_this_repository() {
    let all = files(&[".rs", ".md", ".toml", ".sh", ".h", ".c", ".py", ".service", ".svg"]);
    let paths: Vec<String> = all.iter().map(|(name, _)| name.clone()).collect();
    let mut said = Vec::new();
    for (name, text) in &all {
        let is_code = !name.ends_with(".md");
        if name == "CHANGELOG.md" || name.ends_with(".svg") {
            continue;
        }
        for (number, line) in text.lines().enumerate() {
            let marks = if name.ends_with(".rs") || name.ends_with(".h") || name.ends_with(".c") { "//" } else { "#" };
            let prose = if is_code { line.find(marks).map_or("", |at| &line[at..]) } else { line };
            if prose.contains("://") {
                continue;
            }
            let lost = cited(prose)
                .into_iter()
                .find(|cited| !NOT_CITED.iter().any(|other| cited.ends_with(other)) && !is_there(cited, &paths));
            said.extend(lost.map(|lost| format!("{name}:{}: {lost} is not in this repository", number + 1)));
        }
    }
    none_is_left(&said);
}
