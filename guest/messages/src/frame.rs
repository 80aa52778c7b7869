//! Where a message begins and ends in a stream that may be torn anywhere.
//!
//! Before: bytes came from the port. After: whole frames, in order; bytes between them are counted as garbage.
//! Promise: the work is linear in the number of bytes, and a bounded number of bytes is kept.
//!
//! A stream is torn when one side dies in the middle of a frame and its successor starts again. So each frame has a
//! magic, a checksum over all of it, and the *session*, which the host chose. A frame of another session is old.
//!
//! ```text
//!  0 magic  4 version  6 least reader  8 kind  10 zero  12 length of the body  16 session  24 sum  32 body
//! ```

use crate::version::{LEAST_READER, OLDEST, VERSION};

/// First bytes of a frame.
pub const MAGIC: [u8; 4] = *b"BLGA";
/// Bytes before the body.
pub const HEADER: usize = 32;
/// Longest body.
pub const MAX_BODY: usize = 64 << 10;

/// A message that is not decoded yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// The version of its writer.
    pub version: u16,
    /// Its kind.
    pub kind: u16,
    /// The session.
    pub session: u64,
    /// The message.
    pub body: Vec<u8>,
}

/// The next item of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// A frame.
    Frame(Frame),
    /// A frame whose writer is too new or too old; its version and least reader.
    Unreadable(u16, u16),
}

/// The bytes of a frame.
///
/// # Panics
/// If the body is longer than [`MAX_BODY`].
pub fn frame(session: u64, kind: u16, body: &[u8]) -> Vec<u8> {
    assert!(body.len() <= MAX_BODY, "a body of {} bytes", body.len());
    let mut bytes = Vec::with_capacity(HEADER + body.len());
    bytes.extend(MAGIC);
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend(LEAST_READER.to_le_bytes());
    bytes.extend(kind.to_le_bytes());
    bytes.extend([0; 2]);
    bytes.extend((body.len() as u32).to_le_bytes());
    bytes.extend(session.to_le_bytes());
    bytes.extend(sum(&bytes, body).to_le_bytes());
    bytes.extend(body);
    bytes
}

/// FNV-1a over a header without its sum, and a body. It detects torn frames and does not protect against forged ones.
fn sum(header: &[u8], body: &[u8]) -> u64 {
    let all = header.iter().chain(body);
    all.fold(0xcbf2_9ce4_8422_2325, |sum, byte| (sum ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

/// Frames out of a stream.
#[derive(Debug, Default)]
pub struct Frames {
    /// Bytes of no whole frame yet: never more than the longest frame and the bytes pushed last.
    rest: Vec<u8>,
    /// Index of the first byte that was not handled yet.
    at: usize,
    /// Bytes that belonged to no frame.
    garbage: u64,
}

impl Frames {
    /// Adds bytes of the stream.
    pub fn push(&mut self, bytes: &[u8]) {
        self.rest.drain(..self.at);
        self.at = 0;
        self.rest.extend_from_slice(bytes);
    }

    /// Returns the number of bytes since the last call that belonged to no frame.
    pub fn take_garbage(&mut self) -> u64 {
        std::mem::take(&mut self.garbage)
    }

    /// Returns the next whole frame.
    pub fn next_frame(&mut self) -> Option<Next> {
        loop {
            let rest = &self.rest[self.at..];
            let begin = rest.iter().position(|byte| *byte == MAGIC[0]).unwrap_or(rest.len());
            self.drop_garbage(begin);
            let rest = &self.rest[self.at..];
            let known = rest.len().min(MAGIC.len());
            if rest[..known] != MAGIC[..known] {
                self.drop_garbage(1);
                continue;
            }
            let (header, after) = rest.split_at_checked(HEADER)?;
            let half = |at: usize| u16::from_le_bytes([header[at], header[at + 1]]);
            let word = |at: usize| u64::from_le_bytes(header[at..at + 8].try_into().expect("eight bytes"));
            let len = (word(8) >> 32) as usize;
            if len > MAX_BODY {
                self.drop_garbage(MAGIC.len());
                continue;
            }
            let body = after.get(..len)?;
            if sum(&header[..24], body) != word(24) {
                // Skip all of it, so that no byte is summed twice. A torn frame may cost the next one, too.
                self.drop_garbage(HEADER + len);
                continue;
            }
            let (version, least) = (half(4), half(6));
            let readable = least <= VERSION && version >= OLDEST;
            let next = match readable {
                true => Next::Frame(Frame { version, kind: half(8), session: word(16), body: body.to_vec() }),
                false => Next::Unreadable(version, least),
            };
            self.at += HEADER + len;
            return Some(next);
        }
    }

    fn drop_garbage(&mut self, count: usize) {
        self.at += count;
        self.garbage += count as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    fn all(frames: &mut Frames) -> Vec<Frame> {
        let frame = |next| match next {
            Next::Frame(frame) => frame,
            Next::Unreadable(..) => panic!("of this version"),
        };
        std::iter::from_fn(|| frames.next_frame()).map(frame).collect()
    }

    #[test]
    fn a_frame_that_was_torn_costs_itself_and_at_most_what_it_claimed() {
        let whole = frame(1, 2, b"something");
        let mut frames = Frames::default();
        // The header of a frame that was to have 9 bytes, then its successor's frames.
        frames.push(&whole[..HEADER]);
        for _ in 0..3 {
            frames.push(&whole);
        }
        assert_eq!(all(&mut frames).len(), 2);
        assert!(frames.take_garbage() > 0 && frames.take_garbage() == 0);
    }

    #[test]
    fn a_frame_of_another_version_is_told_from_garbage() {
        let mut bytes = frame(1, 2, b"x");
        bytes[4..8].copy_from_slice(&[9, 0, 9, 0]);
        let sum = sum(&bytes[..24], b"x").to_le_bytes();
        bytes[24..32].copy_from_slice(&sum);
        let mut frames = Frames::default();
        frames.push(&bytes);
        assert_eq!((frames.next_frame(), frames.take_garbage()), (Some(Next::Unreadable(9, 9)), 0));
    }

    proptest! {
        #[test]
        fn whatever_comes_in_whatever_pieces_what_is_kept_is_bounded(
            pieces in vec(prop_oneof![
                vec(any::<u8>(), 0..200),
                vec(any::<u8>(), 0..100).prop_map(|body| frame(7, 1, &body)),
                Just(frame(7, 1, &[0; 300])[..40].to_vec()),
                (0u32..200_000).prop_map(|len| {
                    let mut bytes = frame(7, 1, b"")[..HEADER].to_vec();
                    bytes[12..16].copy_from_slice(&len.to_le_bytes());
                    bytes
                }),
            ], 0..50),
        ) {
            let mut frames = Frames::default();
            let (mut pushed, mut seen) = (0, 0);
            for piece in &pieces {
                frames.push(piece);
                pushed += piece.len();
                seen += all(&mut frames).iter().map(|frame| HEADER + frame.body.len()).sum::<usize>();
                prop_assert!(frames.rest.len() - frames.at <= HEADER + MAX_BODY);
            }
            let kept = frames.rest.len() - frames.at;
            prop_assert_eq!(seen + frames.take_garbage() as usize + kept, pushed);
        }

        #[test]
        fn frames_come_out_as_they_went_in_however_the_stream_is_cut(
            bodies in vec(vec(any::<u8>(), 0..300), 0..8), cut in 1usize..50,
        ) {
            let stream: Vec<u8> = bodies.iter().flat_map(|body| frame(3, 4, body)).collect();
            let mut frames = Frames::default();
            let mut seen = Vec::new();
            for piece in stream.chunks(cut) {
                frames.push(piece);
                seen.extend(all(&mut frames).into_iter().map(|frame| frame.body));
            }
            prop_assert_eq!(seen, bodies);
            prop_assert_eq!(frames.take_garbage(), 0);
        }
    }
}
