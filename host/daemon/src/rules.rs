//! The sources of a VM's settings: its VMM's command line, an operator's changes, and rules of the configuration.
//!
//! Before: a VM attaches for the first time. After: each of its settings has a value and a source. `ballast explain`
//! shows both. Units: bytes.
//! Promise: pure. For each setting separately, the first source that names it holds. The order is: the command line
//! (which has only a limit), the operator, the rules from the most to the least exact.
//!
//! A rule is for a UUID, a name, a name with `*` for any text, `cgroup:PATH` (with `*` as well), or `user:NAME`, in
//! this order of exactness. Of two rules of one kind, the one with more characters other than `*` is more exact.

use anyhow::ensure;
use ballast_api::{SourceKind, VmPatch};
use ballast_base::{Bytes, Uuid};
use ballast_policy::settings::{HIGH_SHARES, LOW_SHARES, NORMAL_SHARES};
use ballast_policy::{Class, Settings};
use ballast_sys::group;
use serde::{Deserialize, Serialize};

use crate::engine::served::SMALLEST_LIMIT;

/// A table `[vm.PATTERN]` of the configuration.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct VmRule {
    /// The limit, as a size with a unit, or `none`.
    pub limit: Option<String>,
    pub reservation: Option<String>,
    pub protect: Option<String>,
    pub shares: Option<Shares>,
    pub headroom_percent: Option<u32>,
    pub class: Option<Class>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Shares {
    Number(u32),
    Word(String),
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rule {
    pub pattern: String,
    /// The uid for a pattern `user:NAME`.
    pub uid: Option<u32>,
    pub wanted: Wanted,
}

/// The settings that one source names; `None` for each that it does not name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Wanted {
    pub limit: Option<Option<Bytes>>,
    pub reservation: Option<Bytes>,
    pub protect: Option<Bytes>,
    /// Shares; `None` inside is the number of the VM's class.
    pub shares: Option<Option<u32>>,
    pub headroom_percent: Option<u32>,
    pub class: Option<Class>,
}

impl VmRule {
    /// The settings that the rule names. Fails if a value is impossible.
    pub fn wanted(&self) -> anyhow::Result<Wanted> {
        let size = |key: &str, text: &Option<String>| -> anyhow::Result<Option<Bytes>> {
            let parsed = text.as_ref().map(|text| text.parse::<Bytes>());
            parsed.transpose().map_err(|why| anyhow::anyhow!("{key}: {why}"))
        };
        let limit = match self.limit.as_deref() {
            Some("none") => Some(None),
            _ => size("limit", &self.limit)?.map(Some),
        };
        if let Some(limit) = limit.flatten() {
            ensure!(limit >= SMALLEST_LIMIT, "limit = {limit} is below the smallest one, {SMALLEST_LIMIT}");
        }
        let shares = match &self.shares {
            None => None,
            Some(Shares::Number(number)) => Some(*number),
            Some(Shares::Word(word)) => Some(match word.as_str() {
                "low" => LOW_SHARES,
                "normal" => NORMAL_SHARES,
                "high" => HIGH_SHARES,
                _ => anyhow::bail!("shares = {word:?} is none of low, normal, high, or a number"),
            }),
        };
        let wanted = Wanted {
            limit,
            reservation: size("reservation", &self.reservation)?,
            protect: size("protect", &self.protect)?,
            shares: shares.map(Some),
            headroom_percent: self.headroom_percent,
            class: self.class,
        };
        let alone = settle(None, &[(SourceKind::Rule, wanted)]);
        match alone.settings.contradiction(u64::MAX, alone.limit.map(|limit| limit.0)) {
            Some(why) => anyhow::bail!("{why}"),
            None => Ok(wanted),
        }
    }

    /// The rule with this pattern. Fails as [`Self::wanted`], or if the pattern names a user that this host does not
    /// have.
    pub fn rule(&self, pattern: &str) -> anyhow::Result<Rule> {
        let say = |why: String| anyhow::anyhow!("vm.{pattern:?}: {why}");
        let uid = match pattern.strip_prefix("user:") {
            None => None,
            Some(name) => {
                let found = group::user_id(name).map_err(|error| say(format!("asking for the user: {error}")))?;
                Some(found.ok_or_else(|| say(format!("this host has no user {name:?}")))?)
            }
        };
        let wanted = self.wanted().map_err(|error| say(format!("{error:#}")))?;
        Ok(Rule { pattern: pattern.to_owned(), uid, wanted })
    }
}

impl From<&VmPatch> for Wanted {
    fn from(patch: &VmPatch) -> Self {
        Self {
            limit: patch.limit_bytes.map(|limit| limit.map(Bytes)),
            reservation: patch.reservation_bytes.map(|bytes| Bytes(bytes.unwrap_or_default())),
            protect: patch.protect_bytes.map(|bytes| Bytes(bytes.unwrap_or_default())),
            shares: patch.shares,
            headroom_percent: patch.headroom_percent.map(Option::unwrap_or_default),
            class: patch.class.map(Option::unwrap_or_default),
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    pub name: String,
    /// Whether an operator named it; otherwise the name contains its process's pid, which another VM will have one day.
    pub is_named: bool,
    pub uuid: Option<Uuid>,
    /// The uid that attached it.
    pub uid: Option<u32>,
    /// The cgroups of its process: one, or one for each hierarchy of version 1.
    pub cgroups: Vec<String>,
}

impl Rule {
    /// How exactly the rule matches this VM; `None` if it does not.
    fn rank(&self, vm: &Identity) -> Option<(u8, usize)> {
        let pattern = self.pattern.as_str();
        let exact = pattern.chars().filter(|c| *c != '*').count();
        if let Ok(uuid) = pattern.parse::<Uuid>() {
            return (vm.uuid == Some(uuid)).then_some((4, exact));
        }
        if let Some(path) = pattern.strip_prefix("cgroup:") {
            return vm.cgroups.iter().any(|cgroup| fits(path, cgroup)).then_some((1, exact));
        }
        if pattern.starts_with("user:") {
            return (self.uid.is_some() && self.uid == vm.uid).then_some((0, exact));
        }
        let name = pattern.strip_prefix("name:").unwrap_or(pattern);
        let kind = if name.contains('*') { 2 } else { 3 };
        fits(name, &vm.name).then_some((kind, exact))
    }
}

pub fn for_vm<'a>(rules: &'a [Rule], vm: &Identity) -> Vec<&'a Rule> {
    let mut found: Vec<_> = rules.iter().filter_map(|rule| Some((rule.rank(vm)?, rule))).collect();
    found.sort_by(|(one, a), (other, b)| other.cmp(one).then_with(|| a.pattern.cmp(&b.pattern)));
    found.into_iter().map(|(_, rule)| rule).collect()
}

fn fits(pattern: &str, text: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(rest) = text.strip_prefix(parts.next().unwrap_or_default()) else { return false };
    let parts: Vec<&str> = parts.collect();
    let Some((last, middle)) = parts.split_last() else { return rest.is_empty() };
    let mut rest = rest;
    for part in middle {
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
    }
    rest.ends_with(last)
}

/// The settings that have a source, in the order of [`Sources`].
pub const NAMES: [&str; 6] = ["limit", "reservation", "protect", "shares", "headroom", "class"];

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sources(pub [Option<SourceKind>; NAMES.len()]);

/// Set in each written word of [`Sources`]. A state file without sources has the word 0.
const SETTLED: u64 = 1 << 63;

impl Sources {
    pub fn to_word(self) -> u64 {
        let number = |source: &Option<SourceKind>| source.map_or(0, |source| source as u64 + 1);
        self.0.iter().enumerate().fold(SETTLED, |word, (at, source)| word | number(source) << (2 * at))
    }

    /// Decodes a word; `None` if it was never written.
    pub fn of_word(word: u64) -> Option<Self> {
        let source = |at: usize| match word >> (2 * at) & 3 {
            0 => None,
            1 => Some(SourceKind::CommandLine),
            2 => Some(SourceKind::Operator),
            _ => Some(SourceKind::Rule),
        };
        (word & SETTLED != 0).then(|| Self(std::array::from_fn(source)))
    }

    /// The sources after an operator's change.
    #[must_use]
    pub fn after(self, patch: &Wanted) -> Self {
        let mut sources = self;
        sources.set(patch, SourceKind::Operator);
        sources
    }

    fn set(&mut self, wanted: &Wanted, by: SourceKind) {
        for (source, _) in self.0.iter_mut().zip(wanted.says()).filter(|(_, is_said)| *is_said) {
            *source = Some(by);
        }
    }
}

impl Wanted {
    pub fn says(&self) -> [bool; NAMES.len()] {
        [
            self.limit.is_some(),
            self.reservation.is_some(),
            self.protect.is_some(),
            self.shares.is_some(),
            self.headroom_percent.is_some(),
            self.class.is_some(),
        ]
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settled {
    pub limit: Option<Bytes>,
    pub settings: Settings,
    pub sources: Sources,
}

/// The settings of a VM whose VMM's command line has this limit, from sources in the order of precedence.
pub fn settle(command_line: Option<Bytes>, sources: &[(SourceKind, Wanted)]) -> Settled {
    let first = Wanted { limit: command_line.map(Some), ..Wanted::default() };
    let all = std::iter::once((SourceKind::CommandLine, first)).chain(sources.iter().copied());
    let mut settled = Settled { limit: None, settings: Settings::default(), sources: Sources::default() };
    // In reverse, so that earlier sources replace later ones.
    for (source, wanted) in all.rev() {
        let settings = &mut settled.settings;
        wanted.limit.into_iter().for_each(|limit| settled.limit = limit);
        wanted.reservation.into_iter().for_each(|bytes| settings.reservation_bytes = bytes.0);
        wanted.protect.into_iter().for_each(|bytes| settings.protect_bytes = bytes.0);
        wanted.shares.into_iter().for_each(|shares| settings.shares = shares);
        wanted.headroom_percent.into_iter().for_each(|percent| settings.headroom_percent = percent);
        wanted.class.into_iter().for_each(|class| settings.class = class);
        settled.sources.set(&wanted, source);
    }
    settled
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(pattern: &str, limit: u64) -> Rule {
        let wanted = Wanted { limit: Some(Some(Bytes(limit))), ..Wanted::default() };
        Rule { pattern: pattern.into(), uid: pattern.starts_with("user:").then_some(64055), wanted }
    }

    #[test]
    fn a_star_matches_any_text_and_everything_else_itself() {
        for (pattern, text) in [
            ("*", ""),
            ("*", "x"),
            ("ci-*", "ci-"),
            ("ci-*", "ci-1"),
            ("*-db", "a-db"),
            ("a*c*e", "abcde"),
            ("веб*", "веб-1"),
        ] {
            assert!(fits(pattern, text), "{pattern} {text}");
        }
        for (pattern, text) in
            [("ci", "ci-1"), ("ci-*", "ci"), ("a*c*e", "aec"), ("a*a", "a"), ("", "x"), ("CI-*", "ci-1")]
        {
            assert!(!fits(pattern, text), "{pattern} {text}");
        }
    }

    #[test]
    fn the_most_exact_rule_comes_first() {
        let uuid = "123e4567-e89b-12d3-a456-426614174000";
        let rules: Vec<Rule> = [
            "*",
            "ci-*",
            uuid,
            "user:libvirt-qemu",
            "cgroup:/machine.slice/*",
            "ci-db",
            "ci-d*",
            "name:ci-db",
            "other",
        ]
        .into_iter()
        .zip(1..)
        .map(|(pattern, limit)| rule(pattern, limit))
        .collect();
        let vm = Identity {
            name: "ci-db".into(),
            is_named: true,
            uuid: uuid.parse().ok(),
            uid: Some(64055),
            cgroups: vec!["/machine.slice/machine-qemu.scope".into()],
        };
        let found: Vec<&str> = for_vm(&rules, &vm).iter().map(|rule| rule.pattern.as_str()).collect();
        assert_eq!(
            found,
            [uuid, "name:ci-db", "ci-db", "ci-d*", "ci-*", "*", "cgroup:/machine.slice/*", "user:libvirt-qemu"]
        );
        let found = for_vm(&rules, &Identity { name: "x".into(), ..Identity::default() });
        assert_eq!(found.len(), 1, "an unknown user has no rule: {found:?}");
    }

    #[test]
    fn each_setting_has_the_first_source_that_names_it() {
        let operator = Wanted { limit: Some(None), shares: Some(Some(7)), ..Wanted::default() };
        let rule = Wanted {
            limit: Some(Some(Bytes(9))),
            shares: Some(None),
            class: Some(Class::BestEffort),
            ..Wanted::default()
        };
        let both = [(SourceKind::Operator, operator), (SourceKind::Rule, rule)];
        let settled = settle(None, &both);
        assert_eq!(
            (settled.limit, settled.settings.shares, settled.settings.class),
            (None, Some(7), Class::BestEffort)
        );
        let [command_line, operator, rule] =
            [SourceKind::CommandLine, SourceKind::Operator, SourceKind::Rule].map(Some);
        assert_eq!(settled.sources.0, [operator, None, None, operator, None, rule]);
        let settled = settle(Some(Bytes(5)), &both);
        assert_eq!((settled.limit, settled.sources.0[0]), (Some(Bytes(5)), command_line));
        assert_eq!(Sources::of_word(settled.sources.to_word()), Some(settled.sources));
        assert_eq!(
            (Sources::of_word(0), Sources::of_word(Sources::default().to_word())),
            (None, Some(Sources::default()))
        );
        let changed = settled.sources.after(&Wanted { class: Some(Class::Guaranteed), ..Wanted::default() });
        assert_eq!(changed.0, [command_line, None, None, operator, None, operator]);
    }
}
