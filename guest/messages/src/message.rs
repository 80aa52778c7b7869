//! The messages of both sides.
//!
//! Before: one side has something to say. After: its bytes, and the same message on the other side.
//! Promise: a decoded message is within the bounds stated here. Its meaning is not checked: it is a hint for the host.
//!
//! The host says hello first, with a session number that it chose. A message that comes before the hello is old. The
//! agent replies to each hello with its own, and starts again.

use crate::bytes::{Reader, Refused, Writer};
use crate::frame::{Frame, MAX_BODY, frame};
use crate::node;
pub use crate::node::{MAX_NODES, NODES_END, Node};
use crate::run::{RUN_BYTES, Run};
use crate::tiering;
pub use crate::tiering::{TierUse, Tiering, TieringState};
use crate::version::VERSION;

/// Most runs of one message.
pub const MAX_RUNS: usize = (MAX_BODY - 64) / RUN_BYTES;
/// Most parts of guest-physical memory that are proved.
pub const MAX_PIECES: usize = 64;
/// Bytes at the beginning of a page by which it is recognised.
pub const NONCE: usize = 32;

/// Orders of the host to an agent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// Interval of the messages about the state of the guest, in milliseconds.
    pub tick_ms: u32,
    /// Report which pages are cold.
    pub reports: bool,
    /// Tune kernel services that touch far pages.
    pub services: bool,
}

/// From the host to the agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToGuest {
    /// A session begins: forget everything said before, and say hello.
    Hello(Wanted),
    /// Write this nonce at the beginning of a page of your own in each of these pieces, and name those pages.
    Prove {
        /// The bytes to write.
        nonce: [u8; NONCE],
        /// Parts of guest-physical memory.
        pieces: Vec<Run>,
    },
    /// Hold this number of pages of a node, and name them.
    Balloon {
        /// Number of the node.
        node: u32,
        /// Number of pages.
        pages: u64,
    },
    /// The guest touched these pages while they were far; they were restored.
    Restored(Vec<Run>),
}

/// How reports come about.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Tracking {
    /// There are none; the note says why.
    #[default]
    Off = 0,
    /// By DAMON, in physical addresses.
    Damon = 1,
}

/// State of the guest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tick {
    /// Memory that the kernel manages.
    pub total: u64,
    /// Memory that is free in its allocator.
    pub free: u64,
    /// Memory that programs could get without swapping (`MemAvailable`).
    pub available: u64,
    /// Microseconds in which at least one task waited for memory, since boot.
    pub stall_some_us: u64,
    /// CPU time of the agent and of DAMON's thread, in microseconds.
    pub cpu_us: u64,
    /// How reports come about.
    pub tracking: Tracking,
    /// Why there are no reports, or another problem.
    pub note: String,
    /// Nodes, by number.
    pub nodes: Vec<Node>,
    /// Huge pages that khugepaged made since boot.
    pub collapsed: u64,
    /// Pages that compaction isolated since boot: those to be moved, and the places for them.
    pub compacted: u64,
    /// Restores reported by the host that khugepaged or compaction caused, about.
    pub service_restores: u64,
    /// Restores reported by the host.
    pub restores: u64,
    /// Services are tuned.
    pub tuned: bool,
    /// Tiering in the guest.
    pub tiering: Tiering,
}

/// From the agent to the host.
#[expect(clippy::large_enum_variant, reason = "one exists at a time")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToHost {
    /// Reply to a hello.
    Hello {
        /// Version of the agent.
        agent: String,
        /// Release of the guest's kernel.
        kernel: String,
    },
    /// State of the guest, once a tick.
    Tick(Tick),
    /// Contents and heat of the guest's memory; replaces the last report when its last part has arrived.
    Report {
        /// Number of the report.
        number: u32,
        /// Whether this is its last part.
        last: bool,
        /// The pages; pages in no run must not be taken.
        runs: Vec<Run>,
    },
    /// Reply to a nonce: the pages that begin with it.
    Proof(Vec<Run>),
    /// The agent holds these pages from now on; their contents are worthless.
    Taken {
        /// The node.
        node: u32,
        /// The pages.
        runs: Vec<Run>,
    },
}

fn put_runs(writer: &mut Writer, runs: &[Run]) {
    writer.list(&runs[..runs.len().min(MAX_RUNS)], Run::put);
}

fn get_runs(reader: &mut Reader<'_>) -> Result<Vec<Run>, Refused> {
    reader.list(MAX_RUNS, RUN_BYTES, Run::get)
}

fn open(frame: &Frame) -> (Reader<'_>, bool) {
    (Reader::new(&frame.body, frame.version < VERSION), frame.version > VERSION)
}

impl ToGuest {
    /// The bytes to send. Of lists that are too long, the beginning.
    pub fn frame(&self, session: u64) -> Vec<u8> {
        let mut body = Writer::default();
        let kind = match self {
            Self::Hello(wanted) => {
                body.u32(wanted.tick_ms);
                body.u8(u8::from(wanted.reports) | u8::from(wanted.services) << 1);
                1
            }
            Self::Prove { nonce, pieces } => {
                body.0.extend(nonce);
                body.list(&pieces[..pieces.len().min(MAX_PIECES)], Run::put);
                2
            }
            Self::Balloon { node, pages } => {
                body.u32(*node);
                body.u64(*pages);
                3
            }
            Self::Restored(runs) => {
                put_runs(&mut body, runs);
                4
            }
        };
        frame(session, kind, &body.0)
    }

    /// The message in a frame; `None` if its kind is newer than this program.
    ///
    /// # Errors
    /// It is no message of its kind.
    pub fn decode(frame: &Frame) -> Result<Option<Self>, Refused> {
        let (mut body, newer) = open(frame);
        let message = match frame.kind {
            1 => {
                let (tick_ms, flags) = (body.u32()?, body.u8()?);
                Self::Hello(Wanted { tick_ms, reports: flags & 1 != 0, services: flags & 2 != 0 })
            }
            2 => Self::Prove { nonce: body.array()?, pieces: body.list(MAX_PIECES, RUN_BYTES, Run::get)? },
            3 => Self::Balloon { node: body.u32()?, pages: body.u64()? },
            4 => Self::Restored(get_runs(&mut body)?),
            _ => return Ok(None),
        };
        body.end(newer).map(|()| Some(message))
    }
}

impl ToHost {
    /// The bytes to send. Of lists that are too long, the beginning.
    pub fn frame(&self, session: u64) -> Vec<u8> {
        let mut body = Writer::default();
        let kind = match self {
            Self::Hello { agent, kernel } => {
                body.text(agent);
                body.text(kernel);
                1
            }
            Self::Tick(tick) => {
                put_tick(&mut body, tick);
                2
            }
            Self::Report { number, last, runs } => {
                body.u32(*number);
                body.u8((*last).into());
                put_runs(&mut body, runs);
                3
            }
            Self::Proof(runs) => {
                put_runs(&mut body, runs);
                4
            }
            Self::Taken { node, runs } => {
                body.u32(*node);
                put_runs(&mut body, runs);
                5
            }
        };
        frame(session, kind, &body.0)
    }

    /// The message in a frame; `None` if its kind is newer than this program.
    ///
    /// # Errors
    /// It is no message of its kind.
    pub fn decode(frame: &Frame) -> Result<Option<Self>, Refused> {
        let (mut body, newer) = open(frame);
        let message = match frame.kind {
            1 => Self::Hello { agent: body.text()?, kernel: body.text()? },
            2 => Self::Tick(get_tick(&mut body)?),
            3 => Self::Report { number: body.u32()?, last: body.u8()? != 0, runs: get_runs(&mut body)? },
            4 => Self::Proof(get_runs(&mut body)?),
            5 => Self::Taken { node: body.u32()?, runs: get_runs(&mut body)? },
            _ => return Ok(None),
        };
        body.end(newer).map(|()| Some(message))
    }
}

fn put_tick(body: &mut Writer, tick: &Tick) {
    for number in [tick.total, tick.free, tick.available, tick.stall_some_us, tick.cpu_us] {
        body.u64(number);
    }
    body.u8(tick.tracking as u8);
    body.text(&tick.note);
    node::put(body, &tick.nodes);
    for number in [tick.collapsed, tick.compacted, tick.service_restores, tick.restores] {
        body.u64(number);
    }
    body.u8(tick.tuned.into());
    tiering::put(body, &tick.tiering);
}

fn get_tick(body: &mut Reader<'_>) -> Result<Tick, Refused> {
    Ok(Tick {
        total: body.u64()?,
        free: body.u64()?,
        available: body.u64()?,
        stall_some_us: body.u64()?,
        cpu_us: body.u64()?,
        tracking: if body.u8()? == Tracking::Damon as u8 { Tracking::Damon } else { Tracking::Off },
        note: body.text()?,
        nodes: node::get(body)?,
        collapsed: body.u64()?,
        compacted: body.u64()?,
        service_restores: body.u64()?,
        restores: body.u64()?,
        tuned: body.u8()? != 0,
        tiering: tiering::get(body)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::{Frames, Next};
    use crate::run::Kind;
    use proptest::collection::vec;
    use proptest::prelude::*;

    fn through(bytes: &[u8]) -> Frame {
        let mut frames = Frames::default();
        frames.push(bytes);
        match frames.next_frame() {
            Some(Next::Frame(frame)) => frame,
            other => panic!("{other:?}"),
        }
    }

    fn runs() -> Vec<Run> {
        vec![
            Run { page: 0x100, count: 512, kind: Kind::Free, level: 0 },
            Run { page: (1 << 40) - 1, count: 1, kind: Kind::Anon, level: 15 },
        ]
    }

    fn tick() -> Tick {
        let nodes = vec![Node { node: 1, pages: 4, free: 3, ballooned: 2 }];
        let tracking = Tracking::Damon;
        let note = "DAMON is in use".into();
        let tiering = tiering::sample();
        let of_guest = Tick { total: 1, free: 2, stall_some_us: 3, restores: 9, tuned: true, ..Tick::default() };
        Tick { tracking, note, nodes, tiering, ..of_guest }
    }

    fn to_host() -> Vec<ToHost> {
        vec![
            ToHost::Hello { agent: "0.1.0".into(), kernel: "6.12".into() },
            ToHost::Tick(tick()),
            ToHost::Report { number: 7, last: true, runs: runs() },
            ToHost::Proof(runs()),
            ToHost::Taken { node: 1, runs: runs() },
        ]
    }

    fn to_guest() -> Vec<ToGuest> {
        vec![
            ToGuest::Hello(Wanted { tick_ms: 1000, reports: true, services: true }),
            ToGuest::Prove { nonce: [3; NONCE], pieces: runs() },
            ToGuest::Balloon { node: 1, pages: 1 << 20 },
            ToGuest::Restored(runs()),
        ]
    }

    #[test]
    fn every_message_comes_out_as_it_went_in() {
        for message in to_host() {
            let frame = through(&message.frame(9));
            assert_eq!((ToHost::decode(&frame), frame.session), (Ok(Some(message)), 9));
        }
        for message in to_guest() {
            let frame = through(&message.frame(9));
            assert_eq!((ToGuest::decode(&frame), frame.session), (Ok(Some(message)), 9));
        }
    }

    #[test]
    fn the_bytes_of_version_1_are_these() {
        let all: Vec<u8> = to_host().iter().flat_map(|message| message.frame(1)).collect();
        let more: Vec<u8> = to_guest().iter().flat_map(|message| message.frame(1)).collect();
        // A change here needs a new version.
        assert_eq!((VERSION, all.len(), more.len()), (1, 510, 245));
    }

    #[test]
    fn what_a_newer_writer_appends_is_ignored_and_what_an_older_one_lacks_is_zero() {
        let mut frame = through(&ToHost::Tick(tick()).frame(9));
        frame.body.extend([1, 2, 3]);
        assert_eq!(ToHost::decode(&frame), Err(Refused));
        frame.version = VERSION + 1;
        assert_eq!(ToHost::decode(&frame), Ok(Some(ToHost::Tick(tick()))));
        // As from a writer that does not know the last field.
        frame.body.truncate(frame.body.len() - 3 - 8);
        frame.version = VERSION - 1;
        let tiering = Tiering { cpu_us: 0, ..tick().tiering };
        assert_eq!(ToHost::decode(&frame), Ok(Some(ToHost::Tick(Tick { tiering, ..tick() }))));
        frame.version = VERSION;
        assert_eq!(ToHost::decode(&frame), Err(Refused));
        frame.kind = 99;
        assert_eq!(ToHost::decode(&frame), Ok(None));
    }

    #[test]
    fn lists_that_are_too_long_are_cut_when_they_are_written() {
        let many = vec![Run::of(1, 1); MAX_RUNS + 9];
        let frame = through(&ToHost::Proof(many).frame(1));
        assert!(matches!(ToHost::decode(&frame), Ok(Some(ToHost::Proof(runs))) if runs.len() == MAX_RUNS));
    }

    proptest! {
        #[test]
        fn any_body_decodes_or_is_refused(
            kind in 0u16..9, version in 0u16..4, body in vec(any::<u8>(), 0..400),
        ) {
            let frame = Frame { version, kind, session: 0, body };
            if let Ok(Some(ToHost::Report { runs, .. } | ToHost::Proof(runs))) = ToHost::decode(&frame) {
                prop_assert!(runs.iter().all(|run| run.count > 0 && run.end() <= 1 << 40));
            }
            let _ = ToGuest::decode(&frame);
        }

        #[test]
        fn a_message_with_a_changed_byte_decodes_or_is_refused(which in 0..to_host().len(), at: usize, byte: u8) {
            let mut frame = through(&to_host()[which].frame(9));
            let at = at % frame.body.len();
            frame.body[at] = byte;
            let _ = ToHost::decode(&frame);
        }
    }
}
