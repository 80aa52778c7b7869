//! Tests of all texts: plain English, the terms of the field, and bounds on the length of lines, files and pages.
//!
//! Before: sources, scripts, settings and pages of this repository. After: a failed test names each place.
//! Promise: `lab/notebook` is not checked, because a page there is a record of its day.

use std::path::Path;

mod common;

use common::{none_is_left, root};

/// Words for which CONTRIBUTING.md has another word, and that word. A word ends where no letter or digit follows.
const BANNED: [(&str, &str); 73] = [
    ("rung", "notified"),
    ("of late", "recently, or refaulted"),
    ("in its stead", "instead"),
    ("for good", "permanently"),
    ("reckon", "count, estimate"),
    ("reckons", "counts, estimates"),
    ("reckoned", "counted, estimated"),
    ("besides", "also"),
    ("so many", "a number"),
    ("dear", "expensive"),
    ("dearer", "more expensive"),
    ("whereabouts", "memory breakdown"),
    ("rescued", "quarantine hit"),
    ("rescues", "quarantine hits"),
    ("came back", "refaulted, was restored"),
    ("stranger", "foreign mapper"),
    ("strangers", "foreign mappers"),
    ("lane", "worker: fault worker, reclaim worker"),
    ("lanes", "workers"),
    ("doze", "sleep"),
    ("dozing", "sleeping"),
    ("purse", "allowance"),
    ("dice", "rng"),
    ("by lot", "at random"),
    ("insists", "forces reclaim"),
    ("hurry", "shorten the quarantine"),
    ("patience", "adaptive quarantine"),
    ("bury", "reap"),
    ("buried", "reaped"),
    ("look inside", "fine cycle"),
    ("looks inside", "fine cycles"),
    ("whoever", "the process, thread or caller that is meant"),
    ("became of", "the result for, the outcome of"),
    ("becomes of", "the result for, happens to"),
    ("came of", "the result of"),
    ("to be had", "available"),
    ("be it by", "also by"),
    ("has no way to fail", "cannot fail"),
    ("one part in", "1/N of"),
    ("company", "clustered prefetch"),
    ("wish", "request"),
    ("wishes", "requests"),
    ("lately", "recently, or refaulted"),
    ("away_ms", "refault interval"),
    ("away_page_ms", "refault interval"),
    ("rescue", "quarantine hit"),
    ("rescuing", "quarantine hit"),
    ("insist", "force reclaim"),
    ("insisting", "forcing reclaim"),
    ("hurries", "shortens the quarantine"),
    ("hurried", "shortened the quarantine"),
    ("patient", "adaptive quarantine; elsewhere timeout"),
    ("patiently", "adaptive quarantine; elsewhere timeout"),
    ("bell", "notify"),
    ("ringing", "notifying"),
    ("dozes", "sleeps"),
    ("dozed", "slept"),
    ("buries", "reaps"),
    ("burying", "reaping"),
    ("whereabout", "memory breakdown"),
    ("control loop", "governor"),
    ("looks_every", "poll interval"),
    ("look_every", "poll interval"),
    ("in vain", "without need, or what did not happen"),
    ("sees to it", "ensures"),
    ("save for", "except"),
    ("hence", "so"),
    ("thence", "from there"),
    ("whence", "from where"),
    ("lest", "so that not"),
    ("upon", "on"),
    ("thereby", "so"),
    ("be had", "available"),
];

/// Places that may have a banned word, and the reason. A place is the beginning of a file's name.
const EXCEPTED: [(&str, &str, &str); 3] = [
    ("bell", "lab/", "the bell curve by which a workload touches cells"),
    ("whence", "crates/sys/src/presence.rs", "a field of `struct flock`"),
    ("away_page_ms", "crates/policy/src/", "the name in recordings of older versions"),
];

/// Forbidden beginnings of a documentation comment: an "of" without its noun, a relative clause, or a reference that
/// has no content. A comment that is a question may begin with "who".
const OPENINGS: [(&str, &str); 4] = [
    ("Of ", "name the thing: \"Share of\", \"For this\", \"Part of\""),
    ("Who ", "name the thread, process or program"),
    ("See above.", "say what it is"),
    ("See the file's head.", "say what it is"),
];

/// Pages for users, and the most words of each.
const PAGES: [(&str, usize); 15] = [
    ("README.md", 900),
    ("docs/install.md", 1400),
    ("docs/operate.md", 2200),
    ("docs/events.md", 1450),
    ("docs/cli.md", 1500),
    ("docs/api.md", 1500),
    ("docs/embed.md", 1100),
    ("docs/unmodified.md", 900),
    ("docs/pool.md", 1200),
    ("docs/metrics.md", 1550),
    ("docs/performance.md", 1500),
    ("docs/agent.md", 950),
    ("docs/dedup.md", 500),
    ("docs/remote.md", 1100),
    ("docs/upgrade.md", 800),
];
/// Most characters of a line of code, comment or prose, and of a row of a table.
const WIDTH: usize = 120;
const ROW: usize = 200;

/// Returns the names, from the root, and texts of the files that a person writes.
fn files(endings: &[&str]) -> Vec<(String, String)> {
    fn walk(dir: &Path, endings: &[&str], into: &mut Vec<(String, String)>) {
        for entry in std::fs::read_dir(dir).expect("a directory") {
            let path = entry.expect("an entry").path();
            let name = path.strip_prefix(root()).expect("below the root").display().to_string();
            let skipped = ["target", "lab/notebook", "lab/tidy/tests"].contains(&name.as_str())
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

/// Returns true if `line`, in lower case, has `word` as a whole word. `_` ends a word, so names are checked, too.
fn holds(line: &str, word: &str) -> bool {
    let ends = |c: Option<char>| !c.is_some_and(char::is_alphanumeric);
    line.match_indices(word)
        .any(|(at, _)| ends(line[..at].chars().next_back()) && ends(line[at + word.len()..].chars().next()))
}

/// Returns the line with its names in camel case split into words.
fn words_of(line: &str) -> String {
    let mut out = String::new();
    let mut last = ' ';
    for c in line.chars() {
        if c.is_uppercase() && last.is_lowercase() {
            out.push('_');
        }
        out.push(c);
        last = c;
    }
    out
}

fn words_to_replace() -> Vec<String> {
    let mut said = Vec::new();
    for (name, text) in files(&[".rs", ".md", ".toml", ".sh", ".h", ".c", ".py", ".service"]) {
        // The changelog and the rules may name the words that they replace.
        if ["CHANGELOG.md", "CONTRIBUTING.md"].contains(&name.as_str()) {
            continue;
        }
        for (number, line) in text.lines().enumerate() {
            let parts = words_of(line).to_lowercase();
            let is_excepted = |word| EXCEPTED.iter().any(|(one, place, _)| *one == word && name.starts_with(place));
            let found = BANNED.iter().find(|(word, _)| holds(&parts, word) && !is_excepted(*word));
            said.extend(found.map(|(word, better)| format!("{name}:{}: \"{word}\"; write: {better}", number + 1)));
        }
    }
    said
}

#[test]
fn nothing_says_a_word_that_the_house_has_a_better_one_for() {
    none_is_left(&words_to_replace());
}

/// Names that once meant several things. Each may name one type of the product at most.
const ONCE: [&str; 9] = ["Watch", "Lane", "Run", "Report", "Control", "Wish", "Gate", "Room", "Look"];

fn names_of_several_types() -> Vec<String> {
    let mut said = Vec::new();
    let files = files(&[".rs"]);
    for name in ONCE {
        let is_it = |line: &str| {
            let mut words = line
                .split(|c: char| !c.is_alphanumeric() && c != '_')
                .skip_while(|word| ["", "pub", "crate", "super"].contains(word));
            let kind = words.next().is_some_and(|word| ["struct", "enum", "trait", "type", "union"].contains(&word));
            kind && words.next() == Some(name)
        };
        let product = files.iter().filter(|(file, _)| file.starts_with("crates/"));
        let places: Vec<&str> =
            product.flat_map(|(file, text)| text.lines().filter(|line| is_it(line)).map(|_| file.as_str())).collect();
        if places.len() > 1 {
            said.push(format!("{name} is a type of {}", places.join(", ")));
        }
    }
    said
}

#[test]
fn a_name_that_meant_several_things_means_one() {
    none_is_left(&names_of_several_types());
}

fn openings_without_a_subject() -> Vec<String> {
    let mut said = Vec::new();
    for (name, text) in files(&[".rs"]) {
        let mut continues = false;
        for (number, line) in text.lines().enumerate() {
            let comment = line.trim_start().strip_prefix("/// ");
            let begins = comment.filter(|comment| !continues && !comment.contains('?'));
            let found = begins.and_then(|comment| OPENINGS.iter().find(|(opening, _)| comment.starts_with(opening)));
            said.extend(found.map(|(opening, better)| format!("{name}:{}: \"{opening}\"; {better}", number + 1)));
            continues = comment.is_some();
        }
    }
    said
}

#[test]
fn a_documentation_comment_begins_with_its_subject() {
    none_is_left(&openings_without_a_subject());
}

fn answering_functions() -> Vec<String> {
    let mut said = Vec::new();
    for (name, text) in files(&[".rs"]) {
        for (number, line) in text.lines().enumerate() {
            let comment = line.trim_start().strip_prefix("//").unwrap_or_default();
            if comment.contains("Answers ") || comment.contains("; answers ") {
                said.push(format!("{name}:{}", number + 1));
            }
        }
    }
    said
}

#[test]
fn functions_return_they_do_not_answer() {
    none_is_left(&answering_functions());
}

fn wide_lines() -> Vec<String> {
    let mut said = Vec::new();
    for (name, text) in files(&[".rs", ".toml", ".sh", ".h", ".c"]) {
        let wide = text.lines().enumerate().filter(|(_, line)| line.chars().count() > WIDTH);
        said.extend(wide.map(|(number, line)| format!("{name}:{}: {}", number + 1, line.chars().count())));
    }
    said
}

#[test]
fn no_line_of_a_source_is_wider_than_the_house() {
    none_is_left(&wide_lines());
}

fn wide_rows() -> Vec<String> {
    let mut said = Vec::new();
    for (name, text) in files(&[".md"]) {
        let rows = text
            .lines()
            .enumerate()
            .filter(|(_, line)| line.trim_start().starts_with('|') && line.chars().count() > ROW);
        said.extend(rows.map(|(at, row)| format!("{name}:{}: a row of {} characters", at + 1, row.chars().count())));
    }
    said
}

#[test]
fn no_row_of_a_table_is_wider_than_a_screen() {
    none_is_left(&wide_rows());
}

/// Returns the rows of tables that continue in the next line.
fn broken_rows() -> Vec<String> {
    let mut said = Vec::new();
    for (name, text) in files(&[".md"]) {
        let mut is_example = false;
        for (at, line) in text.lines().enumerate() {
            let line = line.trim();
            is_example ^= line.starts_with("```");
            if !is_example && line.starts_with('|') && !line.ends_with('|') {
                said.push(format!("{name}:{}: a row does not end in this line", at + 1));
            }
        }
    }
    said
}

#[test]
fn a_row_of_a_table_is_one_line() {
    none_is_left(&broken_rows());
}

/// Most lines of a source file of the product, because a longer file has more than one idea.
const LINES: usize = 450;

/// Returns the files of the product that are too long. The limit does not hold for tests in files of their own, which
/// nobody reads from top to bottom, and for the lab, where each bench is one file.
fn long_sources() -> Vec<String> {
    let is_test = |name: &str| {
        let file = name.rsplit('/').next().unwrap_or_default();
        name.contains("/tests/") || file == "tests.rs" || file.starts_with("tests_")
    };
    let product = files(&[".rs"]).into_iter().filter(|(name, _)| name.starts_with("crates/") && !is_test(name));
    let counted = product.map(|(name, text)| (name, text.lines().count()));
    counted.filter(|(_, lines)| *lines > LINES).map(|(name, lines)| format!("{name}: {lines} lines")).collect()
}

#[test]
fn no_source_file_of_the_product_is_longer_than_the_house() {
    none_is_left(&long_sources());
}

/// Returns the lines of prose that are too wide. Tables and examples are not checked.
fn wide_prose() -> Vec<String> {
    let mut said = Vec::new();
    for (name, text) in files(&[".md"]) {
        let mut is_example = false;
        for (at, line) in text.lines().enumerate() {
            let line_begins = line.trim_start();
            if line_begins.starts_with("```") {
                is_example = !is_example;
            }
            let is_prose = !is_example && !line_begins.starts_with('|') && !line.starts_with("    ");
            if is_prose && line.chars().count() > WIDTH {
                said.push(format!("{name}:{}: {} characters", at + 1, line.chars().count()));
            }
        }
    }
    said
}

#[test]
fn no_line_of_a_page_is_wider_than_the_house() {
    none_is_left(&wide_prose());
}

fn long_pages() -> Vec<String> {
    let count = |page: &str| std::fs::read_to_string(root().join(page)).expect("a page").split_whitespace().count();
    let long = PAGES.into_iter().map(|(page, most)| (page, count(page), most)).filter(|(_, words, most)| words > most);
    long.map(|(page, words, most)| format!("{page} has {words} words; at most {most}")).collect()
}

#[test]
fn pages_for_users_are_short() {
    none_is_left(&long_pages());
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
    const GLOSSARY: &str = "crates/base/src/lib.rs";
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

/// Returns true if a file's path ends with this, with or without the folder `src`. `files` leaves out two folders.
fn is_there(cited: &str, paths: &[String]) -> bool {
    let cited = cited.trim_start_matches("../").trim_start_matches(['.', '/']);
    paths.iter().any(|path| {
        let found = |path: &str| path == cited || path.ends_with(&format!("/{cited}"));
        found(path) || found(&path.replace("/src/", "/"))
    }) || ["", "lab", "lab/notebook", "lab/tidy"].iter().any(|folder| root().join(folder).join(cited).is_file())
}

/// Names of files that a reader writes, or that a bench writes.
const NOT_CITED: [&str; 4] = ["NAME.rs", "FILE.png", "tables.md", "FILE.svg"];

fn citations_of_nothing() -> Vec<String> {
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
    said
}

#[test]
fn code_and_pages_cite_only_files_of_this_repository() {
    none_is_left(&citations_of_nothing());
}
