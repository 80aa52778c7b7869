//! The dashboard for Grafana and the rules for Prometheus: all their series, labels and values are in
//! `docs/metrics.md`; the dashboard follows Grafana's model; promtool parses its expressions.
//!
//! Grafana itself is not started: no registry used here has it under a suitable licence.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn dashboard() -> Value {
    serde_json::from_str(&read("configs/grafana/ballast.json")).expect("JSON")
}

/// The labels of each metric, with their values where these are listed.
type Labels = BTreeMap<String, BTreeSet<String>>;

fn documented() -> BTreeMap<String, Labels> {
    // An entry: "* `name` (`label`, `label` = value, value): meaning", in one line or several.
    let text = read("docs/metrics.md").replace("\n  ", " ");
    let entries = text.lines().filter_map(|line| line.strip_prefix("* `ballast_"));
    entries
        .map(|entry| {
            let (head, meaning) = entry.split_once(": ").unwrap_or((entry, ""));
            let (name, listed) = head.split_once('`').expect("the end of a name");
            let parts: Vec<&str> = listed.trim_matches([' ', '(', ')']).split('`').collect();
            let mut labels: Labels = parts[1..]
                .chunks(2)
                .map(|pair| {
                    let listed = pair.get(1).and_then(|text| text.trim().strip_prefix('='));
                    let values = listed.into_iter().flat_map(|text| text.split(',')).map(str::trim);
                    (pair[0].to_owned(), values.filter(|value| !value.is_empty()).map(str::to_owned).collect())
                })
                .collect();
            labels.extend(name.starts_with("vm_").then(|| ("domain".to_owned(), BTreeSet::new())));
            labels.extend(meaning.contains("histogram").then(|| ("le".to_owned(), BTreeSet::new())));
            (format!("ballast_{name}"), labels)
        })
        .collect()
}

/// Each series of an expression, with its matchers: label and value.
fn series(text: &str) -> Vec<(String, Vec<(String, String)>)> {
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let mut found = Vec::new();
    for (at, _) in text.match_indices("ballast_") {
        // The name of a recording rule has colons before or after.
        let end = text[at..].find(|c| !is_name(c)).map_or(text.len(), |length| at + length);
        if text[..at].ends_with([':', '_']) || text[end..].starts_with(':') {
            continue;
        }
        let inside =
            text[end..].strip_prefix('{').and_then(|rest| rest.split_once('}')).map_or("", |(inside, _)| inside);
        let matcher = |part: &str| {
            let (label, value) = part.split_once('=').expect("a matcher");
            (label.trim_end_matches('!').to_owned(), value.trim_matches(['~', '"']).to_owned())
        };
        let matchers = inside.split(',').filter(|part| !part.is_empty()).map(matcher);
        found.push((text[at..end].to_owned(), matchers.collect()));
    }
    found
}

fn check_series(place: &str, text: &str, documented: &BTreeMap<String, Labels>) -> usize {
    let all = series(text);
    for (name, matchers) in &all {
        let stem = ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end));
        let labels = documented.get(name).or_else(|| documented.get(stem?));
        let labels = labels.unwrap_or_else(|| panic!("{place}: docs/metrics.md has no {name}"));
        for (label, value) in matchers.iter().filter(|(label, _)| label != "instance") {
            let values = labels.get(label).unwrap_or_else(|| panic!("{place}: {name} has no label {label}"));
            for value in value.split('|').filter(|value| !value.starts_with('$') && !values.is_empty()) {
                assert!(values.contains(value), "{place}: {label} of {name} is never {value:?}, but {values:?}");
            }
        }
    }
    all.len()
}

fn strings<'a>(value: &'a Value, found: &mut Vec<&'a str>) {
    match value {
        Value::String(text) => found.push(text),
        Value::Array(items) => items.iter().for_each(|item| strings(item, found)),
        Value::Object(map) => map.values().for_each(|value| strings(value, found)),
        _ => {}
    }
}

fn expressions(dashboard: &Value) -> Vec<String> {
    let targets = dashboard["panels"].as_array().expect("panels").iter().flat_map(|panel| {
        let targets = panel["targets"].as_array().unwrap_or_else(|| panic!("{} has no targets", panel["title"]));
        targets.iter().map(|target| &target["expr"])
    });
    let annotations = dashboard["annotations"]["list"].as_array().expect("annotations");
    let all = targets.chain(annotations.iter().map(|annotation| &annotation["expr"]));
    all.map(|expr| expr.as_str().expect("an expression").to_owned()).collect()
}

#[test]
fn dashboard_and_rules_name_only_series_labels_and_values_of_the_documentation() {
    let documented = documented();
    assert!(documented.len() > 40, "only {} metrics are documented", documented.len());
    let values = &documented["ballast_host_state"]["state"];
    assert_eq!(values.iter().map(String::as_str).collect::<Vec<_>>(), ["clear", "hard", "high", "low", "soft"]);
    let dashboard = dashboard();
    let mut texts = Vec::new();
    strings(&dashboard, &mut texts);
    let named: usize = texts.iter().map(|text| check_series("the dashboard", text, &documented)).sum();
    let rules = read("configs/prometheus/ballast.rules.yml");
    let of_rules: usize = rules.lines().map(|line| check_series("the rules", line, &documented)).sum();
    assert!(named > 10 && of_rules > 10, "{named} and {of_rules} series are named");
}

#[test]
fn the_dashboard_keeps_the_rules_of_its_model() {
    let dashboard = dashboard();
    for key in ["title", "uid", "schemaVersion", "time", "templating", "panels"] {
        assert!(!dashboard[key].is_null(), "no {key}");
    }
    let variables = dashboard["templating"]["list"].as_array().expect("variables");
    let names: BTreeSet<&str> = variables.iter().filter_map(|variable| variable["name"].as_str()).collect();
    assert_eq!(names, BTreeSet::from(["datasource", "instance", "domain"]));
    let mut texts = Vec::new();
    strings(&dashboard, &mut texts);
    for text in texts {
        for used in text.split('$').skip(1).filter(|used| used.starts_with(|c: char| c == '{' || c.is_alphabetic())) {
            let used = used.trim_start_matches('{');
            let name = used.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').next().unwrap_or("");
            assert!(names.contains(name) || name.starts_with("__"), "{text:?} uses ${name}, which is no variable");
        }
    }
    let (mut ids, mut cells) = (BTreeSet::new(), BTreeSet::new());
    for panel in dashboard["panels"].as_array().expect("panels") {
        let title = &panel["title"];
        assert!(ids.insert(panel["id"].as_u64().expect("an id")), "{title} has the id of another one");
        for key in ["title", "description", "type"] {
            assert!(panel[key].as_str().is_some_and(|text| !text.is_empty()), "{title} has no {key}");
        }
        let [x, y, w, h] = ["x", "y", "w", "h"].map(|key| panel["gridPos"][key].as_u64().expect("a place"));
        assert!(w > 0 && h > 0 && x + w <= 24, "{title} is beyond the grid of 24 columns");
        for cell in (x..x + w).flat_map(|x| (y..y + h).map(move |y| (x, y))) {
            assert!(cells.insert(cell), "{title} lies over another panel");
        }
        let targets = panel["targets"].as_array().expect("targets");
        let letters: BTreeSet<&str> = targets.iter().filter_map(|target| target["refId"].as_str()).collect();
        assert!(!targets.is_empty() && letters.len() == targets.len(), "{title}: each target has a refId of its own");
        for source in targets.iter().map(|target| &target["datasource"]).chain([&panel["datasource"]]) {
            assert_eq!((source["type"].as_str(), source["uid"].as_str()), (Some("prometheus"), Some("${datasource}")));
        }
    }
}

#[test]
fn promtool_parses_each_expression_of_the_dashboard() {
    let promtool = root().join("target/web/promtool");
    let missing = (!promtool.is_file()).then(|| "scripts/web-tools.sh was not run".to_owned());
    if ballast_testkit::missing("promtool", missing) {
        return;
    }
    let mut rules = String::from("groups:\n  - name: dashboard\n    rules:\n");
    for (nr, expr) in expressions(&dashboard()).iter().enumerate() {
        let expr = expr.replace("$instance", ".*").replace("$domain", ".*").replace("$__rate_interval", "1m");
        // JSON strings are YAML strings.
        let _ = writeln!(rules, "      - record: panel:{nr}:value\n        expr: {}", Value::from(expr));
    }
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("dashboard.rules.yml");
    std::fs::write(&file, rules).expect("written");
    let checked = Command::new(promtool).args(["check", "rules"]).arg(file).output().expect("it runs");
    assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stderr));
}
