//! The wire protocol of a connection: commands to a server, and its replies (RESP, version 2).
//!
//! Before: `request` has a command. After: `link` sends the bytes, and returns the server's replies.
//! Threads: any; pure. Units: bytes.
//! Promise: no reply of any server makes this panic, or buffer more than [`REPLY_MAX`] bytes.
//!
//! We do not use a client library, for three reasons. A library's connection bounds one read from a socket and not a
//! whole reply, so a server that sends a byte now and then delays a fault for hours. Its parser accepts any length that
//! a server states. And it allocates once for each page of a run.

use std::io::Write;
use std::ops::Range;

/// Limit of buffered reply bytes, more than 4,096 pages need.
pub const REPLY_MAX: usize = 32 << 20;
/// Limit of one value in bytes. A page needs 4 KiB, `INFO` about 8 KiB.
const BULK_MAX: usize = 1 << 20;
/// Limit of elements in all arrays of a reply together.
const ELEMENTS_MAX: usize = 1 << 17;
/// Limit of a line: a status, a number, an error.
const LINE_MAX: usize = 4096;
/// Limit of nested arrays. `CLUSTER SHARDS` needs four.
const DEPTH_MAX: u32 = 8;

#[derive(Clone, Debug, Default)]
pub struct Commands {
    bytes: Vec<u8>,
    count: usize,
}

impl Commands {
    pub fn one(words: &[&[u8]]) -> Self {
        let mut commands = Self::default();
        commands.add(words);
        commands
    }

    pub fn add(&mut self, words: &[&[u8]]) {
        self.begin(words.len());
        words.iter().for_each(|word| self.word(word));
    }

    /// Begins a command of this many words, which follow.
    pub fn begin(&mut self, words: usize) {
        self.count += 1;
        self.number('*', words);
    }

    pub fn word(&mut self, word: &[u8]) {
        self.number('$', word.len());
        self.bytes.extend_from_slice(word);
        self.bytes.extend_from_slice(b"\r\n");
    }

    fn number(&mut self, mark: char, number: usize) {
        let _ = write!(self.bytes, "{mark}{number}\r\n");
    }

    pub fn count(&self) -> usize {
        self.count
    }

    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

/// One reply. Texts and values are ranges of the received bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    Status(Range<usize>),
    Error(Range<usize>),
    Int(i64),
    Bulk(Range<usize>),
    Nil,
    Array(Vec<Reply>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the server's reply is malformed: {0}")]
pub struct Malformed(pub &'static str);

/// Parses the reply that begins at `at`. Returns it and the position of the next one; `None` if more bytes are needed.
pub fn parse(bytes: &[u8], at: usize) -> Result<Option<(Reply, usize)>, Malformed> {
    let mut elements = ELEMENTS_MAX;
    parse_at(bytes, at, 0, &mut elements)
}

/// `elements` is the number of array elements that may still follow.
fn parse_at(bytes: &[u8], at: usize, depth: u32, elements: &mut usize) -> Result<Option<(Reply, usize)>, Malformed> {
    let Some(kind) = bytes.get(at) else { return Ok(None) };
    if !b"+-:$*_".contains(kind) {
        return Err(Malformed("it begins with no sign that there is"));
    }
    let rest = &bytes[at + 1..];
    let Some(len) = rest.iter().take(LINE_MAX).position(|byte| *byte == b'\n') else {
        return if rest.len() < LINE_MAX { Ok(None) } else { Err(Malformed("a line is too long")) };
    };
    if len == 0 || rest[len - 1] != b'\r' {
        return Err(Malformed("a line ends without a carriage return"));
    }
    let (line, next) = (at + 1..at + len, at + len + 2);
    let number = || {
        let text = std::str::from_utf8(&bytes[line.clone()]).map_err(|_| Malformed("a number is no text"))?;
        text.parse::<i64>().map_err(|_| Malformed("not a number"))
    };
    let length = |most: usize| match number()? {
        -1 => Ok(None),
        some => usize::try_from(some).ok().filter(|len| *len <= most).map(Some).ok_or(Malformed("a length is absurd")),
    };
    let reply = match kind {
        b'+' => Reply::Status(line),
        b'-' => Reply::Error(line),
        b':' => Reply::Int(number()?),
        b'$' => {
            let Some(len) = length(BULK_MAX)? else { return Ok(Some((Reply::Nil, next))) };
            let Some(end) = bytes.get(next + len..next + len + 2) else { return Ok(None) };
            if end != b"\r\n" {
                return Err(Malformed("a value is longer than it says"));
            }
            return Ok(Some((Reply::Bulk(next..next + len), next + len + 2)));
        }
        b'*' => {
            if depth == DEPTH_MAX {
                return Err(Malformed("arrays are too deep"));
            }
            let Some(len) = length(*elements)? else { return Ok(Some((Reply::Nil, next))) };
            *elements -= len;
            let (mut inside, mut at) = (Vec::new(), next);
            for _ in 0..len {
                let Some((reply, next)) = parse_at(bytes, at, depth + 1, elements)? else { return Ok(None) };
                inside.push(reply);
                at = next;
            }
            return Ok(Some((Reply::Array(inside), at)));
        }
        _ => Reply::Nil,
    };
    Ok(Some((reply, next)))
}

#[derive(Debug)]
pub struct Replies<'a> {
    bytes: &'a [u8],
    replies: Vec<Reply>,
}

impl<'a> Replies<'a> {
    pub fn new(bytes: &'a [u8], replies: Vec<Reply>) -> Self {
        Self { bytes, replies }
    }

    pub fn iter(&self) -> impl ExactSizeIterator<Item = Said<'a, '_>> {
        self.replies.iter().map(|reply| Said { bytes: self.bytes, reply })
    }

    /// Returns the reply at this index; the null reply if there are fewer.
    pub fn get(&self, at: usize) -> Said<'a, '_> {
        Said { bytes: self.bytes, reply: self.replies.get(at).unwrap_or(&Reply::Nil) }
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Said<'a, 'r> {
    bytes: &'a [u8],
    reply: &'r Reply,
}

impl<'a, 'r> Said<'a, 'r> {
    pub fn bytes(self) -> Option<&'a [u8]> {
        match self.reply {
            Reply::Bulk(at) | Reply::Status(at) => Some(&self.bytes[at.clone()]),
            _ => None,
        }
    }

    pub fn text(self) -> Option<&'a str> {
        std::str::from_utf8(self.bytes()?).ok()
    }

    pub fn int(self) -> Option<i64> {
        match self.reply {
            Reply::Int(int) => Some(*int),
            _ => None,
        }
    }

    pub fn error(self) -> Option<String> {
        match self.reply {
            Reply::Error(at) => Some(String::from_utf8_lossy(&self.bytes[at.clone()]).into_owned()),
            _ => None,
        }
    }

    pub fn is_nil(self) -> bool {
        *self.reply == Reply::Nil
    }

    pub fn array(self) -> Option<impl ExactSizeIterator<Item = Said<'a, 'r>>> {
        match self.reply {
            Reply::Array(inside) => Some(inside.iter().map(move |reply| Said { bytes: self.bytes, reply })),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn each_kind_of_reply_is_understood() {
        let bytes = b"*7\r\n+OK\r\n-MOVED 1 a:2\r\n:-5\r\n$3\r\na\r\n\r\n$-1\r\n*-1\r\n*0\r\n";
        let (reply, end) = parse(bytes, 0).expect("a reply").expect("all of it");
        assert_eq!(end, bytes.len());
        let replies = Replies::new(bytes, vec![reply]);
        let inside: Vec<_> = replies.get(0).array().expect("an array").collect();
        assert_eq!(inside[0].text(), Some("OK"));
        assert_eq!(inside[1].error().as_deref(), Some("MOVED 1 a:2"));
        assert_eq!(inside[2].int(), Some(-5));
        assert_eq!(inside[3].bytes(), Some(&b"a\r\n"[..]));
        assert!(inside[4].is_nil() && inside[5].is_nil());
        assert_eq!(inside[6].array().expect("an array").len(), 0);
        assert!(replies.get(1).is_nil());
    }

    #[test]
    fn what_is_no_reply_is_refused_at_once() {
        for bytes in [
            &b"HTTP/1.1 400 Bad Request\r\n"[..],
            b":five\r\n",
            b":\r\n",
            b"+OK\n",
            b"$-2\r\n",
            b"$99999999999\r\n",
            b"*99999999\r\n",
            b"$1\r\nabc",
            b"*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n",
            &[b'+'; LINE_MAX + 2],
        ] {
            parse(bytes, 0).expect_err(&String::from_utf8_lossy(bytes));
        }
    }

    #[test]
    fn arrays_in_arrays_have_no_more_elements_together_than_one_may_have() {
        let most = |inner: usize| {
            let inside = [format!("*{inner}\r\n").as_bytes(), &b":1\r\n".repeat(inner)].concat();
            [&b"*2\r\n"[..], &inside, &inside].concat()
        };
        assert!(matches!(parse(&most(ELEMENTS_MAX / 2 - 1), 0), Ok(Some(_))));
        parse(&most(ELEMENTS_MAX / 2), 0).expect_err("two more than that");
    }

    proptest! {
        #[test]
        fn a_command_says_how_many_words_it_has_and_how_long_they_are(
            lens in proptest::collection::vec(0usize..12000, 1..4)
        ) {
            let words: Vec<Vec<u8>> = lens.iter().map(|len| vec![b'x'; *len]).collect();
            let commands = Commands::one(&words.iter().map(Vec::as_slice).collect::<Vec<_>>());
            let mut expected = format!("*{}\r\n", words.len());
            words.iter().for_each(|word| expected += &format!("${}\r\n{}\r\n", word.len(), "x".repeat(word.len())));
            prop_assert!(commands.bytes() == expected.as_bytes());
        }

        #[test]
        fn a_hostile_server_makes_nothing_panic(bytes: Vec<u8>, at in 0usize..40) {
            let _ = parse(&bytes, at);
        }

        #[test]
        fn nor_one_that_nearly_speaks_the_protocol(bytes in "([-+:$*_][0-9-]{0,3}(\r\n|\n)?){0,12}") {
            if let Ok(Some((_, end))) = parse(bytes.as_bytes(), 0) {
                prop_assert!(end <= bytes.len());
            }
        }

        #[test]
        fn a_reply_is_whole_only_with_its_last_byte(words in proptest::collection::vec(any::<Vec<u8>>(), 0..5)) {
            // A command is an array of values, so it can be read as a reply.
            let words: Vec<&[u8]> = words.iter().map(Vec::as_slice).collect();
            let commands = Commands::one(&words);
            let bytes = commands.bytes();
            for cut in 0..bytes.len() {
                prop_assert_eq!(parse(&bytes[..cut], 0), Ok(None));
            }
            let (reply, end) = parse(bytes, 0).expect("a reply").expect("all of it");
            prop_assert_eq!(end, bytes.len());
            let replies = Replies::new(bytes, vec![reply]);
            let back = replies.get(0).array().expect("an array").map(|word| word.bytes().expect("a word"));
            let back: Vec<_> = back.collect();
            prop_assert_eq!(back, words);
        }
    }
}
