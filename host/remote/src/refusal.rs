//! Meaning of a server's errors.
//!
//! Before: a reply begins with `-`. After: the request goes to another node, is repeated, or fails.
//! Threads: any; pure. Promise: an unknown error counts as `Busy`, with its text, and loses no page.

use crate::slot::SLOTS;

/// Longest name of a host, by the DNS.
pub const HOST_MAX: usize = 255;

/// Address of a node.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Addr {
    /// Host name or IP address.
    pub host: String,
    /// TCP port.
    pub port: u16,
}

impl Addr {
    /// Parses `host:port`. The host may contain colons, or be in brackets.
    pub fn parse(text: &str) -> Option<Self> {
        let (host, port) = text.rsplit_once(':')?;
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        Some(Self { host: host.into(), port: port.parse().ok()? })
    }

    /// Parses `host:port`. An empty host, from a server without a name, is the host of `asked`.
    fn near(text: &str, asked: &Self) -> Option<Self> {
        let found = Self::parse(text).filter(|found| found.host.len() <= HOST_MAX)?;
        Some(if found.host.is_empty() || found.host == "?" {
            Self { host: asked.host.clone(), ..found }
        } else {
            found
        })
    }
}

impl std::fmt::Display for Addr {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { host, port } = self;
        if host.contains(':') { write!(f, "[{host}]:{port}") } else { write!(f, "{host}:{port}") }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    Moved(Addr),
    /// The key is already at another node, which will own the slot.
    Ask(Addr),
    /// Some of the keys are already at another node: the keys must be requested one at a time.
    OneByOne,
    Full(String),
    Busy(String),
    /// The node's replicas need longer than the `WAIT` allowed.
    Late(String),
}

impl Refusal {
    /// Parses the error in a reply of this node.
    pub fn of(error: &str, asked: &Addr) -> Self {
        let busy = || Self::Busy(format!("{asked} says: {}", error.chars().take(120).collect::<String>()));
        match error.split(' ').next() {
            Some("MOVED") => place(error, asked).map_or_else(busy, Self::Moved),
            Some("ASK") => place(error, asked).map_or_else(busy, Self::Ask),
            Some("TRYAGAIN") => Self::OneByOne,
            Some("OOM") => Self::Full(format!("{asked} is full (maxmemory)")),
            _ => busy(),
        }
    }
}

/// Returns the node in `MOVED 3999 host:port`.
fn place(error: &str, asked: &Addr) -> Option<Addr> {
    let mut words = error.split(' ').skip(1);
    words.next()?.parse::<u16>().ok().filter(|slot| *slot < SLOTS)?;
    Addr::near(words.next()?, asked)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn addr(text: &str) -> Addr {
        Addr::parse(text).expect("an address")
    }

    #[test]
    fn errors_mean_what_they_say() {
        let asked = addr("10.0.0.1:6379");
        for (error, meaning) in [
            ("MOVED 3999 127.0.0.1:6381", Some(Refusal::Moved(addr("127.0.0.1:6381")))),
            ("MOVED 3999 :6381", Some(Refusal::Moved(addr("10.0.0.1:6381")))),
            ("ASK 5 ::1:7000", Some(Refusal::Ask(addr("[::1]:7000")))),
            ("TRYAGAIN Multiple keys request during rehashing of slot", Some(Refusal::OneByOne)),
            ("MOVED 16384 127.0.0.1:6381", None),
            ("MOVED 3999 127.0.0.1:70000", None),
            (&format!("MOVED 5 {}:1", "a".repeat(HOST_MAX + 1)), None),
            ("MOVED", None),
            ("ASK 1", None),
            ("CLUSTERDOWN The cluster is down", None),
            ("NOREPLICAS Not enough good replicas to write.", None),
            ("LOADING Redis is loading the dataset in memory", None),
            ("", None),
        ] {
            let found = Refusal::of(error, &asked);
            match meaning {
                Some(meaning) => assert_eq!(found, meaning, "{error}"),
                None => assert!(matches!(found, Refusal::Busy(_)), "{error}: {found:?}"),
            }
        }
        let full = Refusal::of("OOM command not allowed when used memory > 'maxmemory'.", &asked);
        assert_eq!(full, Refusal::Full("10.0.0.1:6379 is full (maxmemory)".into()));
    }

    proptest! {
        #[test]
        fn no_error_panics_and_an_address_reads_back(
            error: String,
            near in "(MOVED|ASK) ?[0-9]{0,6} ?[a-z:0-9]{0,12}",
        ) {
            let asked = addr("[::2]:1");
            Refusal::of(&error, &asked);
            if let Refusal::Moved(at) | Refusal::Ask(at) = Refusal::of(&near, &asked) {
                prop_assert_eq!(Addr::parse(&at.to_string()), Some(at));
            }
        }
    }
}
