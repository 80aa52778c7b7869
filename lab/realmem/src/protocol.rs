//! The requests and replies of Redis (RESP2) and memcached (its text protocol).
//!
//! Before: a load wants to read or write a key. After: bytes for the socket, and a value that was checked in place.
//! Threads: the load's. Units: bytes. Promise: a reply that is not complete yet is no error; text that is neither a
//! value nor the confirmation of a write is an error with this text.

use std::io::Write as _;

use anyhow::{Result, bail};
use ballast_testkit::random::Random;

/// Bytes of a value.
pub const VALUE: usize = 1024;

/// The protocol of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// RESP2.
    Redis,
    /// memcached's text protocol.
    Memcached,
}

/// A reply at the beginning of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply<'a> {
    /// The value of a read.
    Value(&'a [u8]),
    /// A write was done.
    Stored,
    /// There is no value.
    Missing,
}

/// Fills in the value of a key after this many writes: half random, half text, so that it compresses to about half.
pub fn fill(value: &mut [u8; VALUE], key: u32, version: u32) {
    let seed = u64::from(key) << 32 | u64::from(version);
    let mut random = Random(seed);
    let (first, second) = value.split_at_mut(VALUE / 2);
    for word in first.chunks_exact_mut(8) {
        word.copy_from_slice(&random.word().to_le_bytes());
    }
    second.fill(b'a' + (seed % 23) as u8);
}

impl Protocol {
    /// Appends the request for the value of a key.
    pub fn get(self, to: &mut Vec<u8>, key: u32) {
        let _ = match self {
            Self::Redis => write!(to, "*2\r\n$3\r\nGET\r\n$12\r\nkey:{key:08}\r\n"),
            Self::Memcached => write!(to, "get key:{key:08}\r\n"),
        };
    }

    /// Appends the request to write a key.
    pub fn set(self, to: &mut Vec<u8>, key: u32, value: &[u8; VALUE]) {
        let _ = match self {
            Self::Redis => write!(to, "*3\r\n$3\r\nSET\r\n$12\r\nkey:{key:08}\r\n${VALUE}\r\n"),
            Self::Memcached => write!(to, "set key:{key:08} 0 0 {VALUE}\r\n"),
        };
        to.extend_from_slice(value);
        to.extend_from_slice(b"\r\n");
    }

    /// Parses the reply at the beginning of `bytes`; returns it and its length, or `None` if it is not complete.
    pub fn reply(self, bytes: &[u8]) -> Result<Option<(Reply<'_>, usize)>> {
        let Some(end) = bytes.windows(2).position(|pair| pair == b"\r\n") else { return Ok(None) };
        let (line, from) = (&bytes[..end], end + 2);
        let value = |len: usize, after: usize| {
            let whole = bytes.len() >= from + len + after;
            whole.then(|| (Reply::Value(&bytes[from..from + len]), from + len + after))
        };
        let number = |digits: &[u8]| std::str::from_utf8(digits).ok()?.parse::<usize>().ok();
        match (self, line) {
            (Self::Redis, b"+OK") | (Self::Memcached, b"STORED") => Ok(Some((Reply::Stored, from))),
            (Self::Redis, b"$-1") | (Self::Memcached, b"END") => Ok(Some((Reply::Missing, from))),
            (Self::Redis, [b'$', digits @ ..]) => {
                number(digits).map(|len| value(len, 2)).ok_or_else(|| anyhow::anyhow!("no length in a bulk string"))
            }
            (Self::Memcached, _) if line.starts_with(b"VALUE ") => {
                let len = line.rsplit(|byte| *byte == b' ').next().and_then(number);
                // The line after the value, and END.
                len.map(|len| value(len, b"\r\nEND\r\n".len())).ok_or_else(|| anyhow::anyhow!("no length in a VALUE"))
            }
            _ => bail!("the server returned {:?}", String::from_utf8_lossy(&line[..line.len().min(80)])),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_are_found_whole_and_errors_are_told() {
        let redis = |bytes| Protocol::Redis.reply(bytes);
        assert_eq!(redis(b"+OK\r\nmore").expect("ok"), Some((Reply::Stored, 5)));
        assert_eq!(redis(b"$3\r\nabc\r\n").expect("ok"), Some((Reply::Value(b"abc"), 9)));
        assert_eq!(redis(b"$3\r\nabc\r").expect("ok"), None);
        assert_eq!(redis(b"$-1\r\n").expect("ok"), Some((Reply::Missing, 5)));
        assert!(redis(b"-OOM command not allowed\r\n").is_err());
        let memcached = |bytes| Protocol::Memcached.reply(bytes);
        assert_eq!(memcached(b"VALUE k 0 3\r\nabc\r\nEND\r\n").expect("ok"), Some((Reply::Value(b"abc"), 23)));
        assert_eq!(memcached(b"VALUE k 0 3\r\nabc\r\n").expect("ok"), None);
        assert_eq!(memcached(b"END\r\n").expect("ok"), Some((Reply::Missing, 5)));
        assert!(memcached(b"SERVER_ERROR out of memory\r\n").is_err());
    }
}
