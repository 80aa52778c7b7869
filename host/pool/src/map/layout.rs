//! The layout of the pool's state, which is fixed, so that it can be a file in shared memory.
//!
//! Before: the owner names the nodes. After: `table` finds each item by its word.
//! Units: words of 64 bits. Promise: a layout is the same function of the header in every program of a version; a
//! header is checked before it is used. Changes follow the rule of `base/src/format.rs`.
//!
//! ```text
//! 0         header of 32 words: magic, stamp, nodes and slices of a brick, VM slots and entries, intent and its
//!           operand, marks; from word 16 on one word for each node
//! states    a byte for each slice; each node begins at a frame and ends with one
//! owners    32 bits for each brick: the trust domain that has it, or 0
//! vms       4 words for each VM slot
//! entries   2 words for each extent of a VM; as many as there are slices, so that the map is never full
//! ```
//!
//! The last two are rarely full, and a sparse file has no memory for pages that were not written: the marks say how
//! much of them was ever used, and nothing beyond the marks is read. The words before the marks have memory
//! ([`Words::back`]).

use std::ops::Range;

use ballast_base::Bytes;
use ballast_base::format::{Format, Stamp};

use crate::map::damage::Damage;
use crate::map::unit::{FRAME_SLICES, FrameIdx, NodeIdx, SliceIdx};
use crate::map::words::Words;

/// Versions that this program writes and reads.
pub const FORMAT: Format = Format { version: 1, least_reader: 1, oldest: 1 };
/// The most nodes of a host.
pub const MAX_NODES: usize = 16;
/// The most slices of a pool: 64 TiB.
pub const MAX_SLICES: u32 = 1 << 25;

pub(crate) const MAGIC: u64 = u64::from_le_bytes(*b"BALSPOOL");
pub(crate) const WORD_MAGIC: usize = 0;
pub(crate) const WORD_STAMP: usize = 1;
const WORD_SHAPE: usize = 2;
const WORD_ROOM: usize = 3;
pub(crate) const WORD_INTENT: usize = 4;
pub(crate) const WORD_OPERAND: usize = 5;
pub(crate) const WORD_VM_MARK: usize = 6;
pub(crate) const WORD_ENTRY_MARK: usize = 7;
const NODES_START: usize = 16;
const HEADER_WORDS: usize = NODES_START + MAX_NODES;
pub(crate) const VM_WORDS: usize = 4;
pub(crate) const ENTRY_WORDS: usize = 2;

/// A node as its owner describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeSpec {
    /// Number of the node on the host.
    pub numa: u32,
    /// Most slices that the pool may ever have of it.
    pub slices: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Node {
    pub(crate) spec: NodeSpec,
    pub(crate) first: u32,
    /// Its frames; the last one may end with slices that the node does not have.
    pub(crate) frames: u32,
}

/// The layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    pub(crate) nodes: Vec<Node>,
    pub(crate) brick: u32,
    pub(crate) vms: u32,
    pub(crate) frames: u32,
    pub(crate) states: usize,
    pub(crate) owners: usize,
    pub(crate) vms_start: usize,
    pub(crate) entries_start: usize,
    words: usize,
}

impl Layout {
    /// The layout for these nodes, bricks of so many slices (a power of two, at most a frame), and at most `vms` VMs.
    pub fn new(nodes: &[NodeSpec], brick_slices: u32, vms: u32) -> Result<Self, Damage> {
        let wrong = |what: String| Err(Damage::Header(what));
        if nodes.is_empty() || nodes.len() > MAX_NODES {
            return wrong(format!("{} nodes; 1 to {MAX_NODES} can be", nodes.len()));
        }
        if !brick_slices.is_power_of_two() || brick_slices > FRAME_SLICES {
            return wrong(format!("bricks of {brick_slices} slices; a power of two up to {FRAME_SLICES} can be"));
        }
        if vms == 0 || vms > u32::from(u16::MAX) {
            return wrong(format!("room for {vms} VMs; 1 to {} can be", u16::MAX));
        }
        let mut first = 0;
        let mut placed = Vec::with_capacity(nodes.len());
        for (at, spec) in nodes.iter().enumerate() {
            if spec.slices == 0 || spec.slices > MAX_SLICES {
                return wrong(format!("node {} has {} slices; 1 to {MAX_SLICES} can be", spec.numa, spec.slices));
            }
            if nodes[..at].iter().any(|other| other.numa == spec.numa) {
                return wrong(format!("node {} is there twice", spec.numa));
            }
            let frames = spec.slices.div_ceil(FRAME_SLICES);
            placed.push(Node { spec: *spec, first, frames });
            first += frames;
        }
        if first > MAX_SLICES / FRAME_SLICES {
            return wrong(format!("{first} GiB; at most {} can be", MAX_SLICES / FRAME_SLICES));
        }
        let frames = first as usize;
        let states = HEADER_WORDS;
        let owners = states + frames * FRAME_SLICES as usize / 8;
        let vms_start = owners + (frames * (FRAME_SLICES / brick_slices) as usize).div_ceil(2);
        let entries_start = vms_start + vms as usize * VM_WORDS;
        let words = entries_start + frames * FRAME_SLICES as usize * ENTRY_WORDS;
        Ok(Self {
            nodes: placed,
            brick: brick_slices,
            vms,
            frames: first,
            states,
            owners,
            vms_start,
            entries_start,
            words,
        })
    }

    /// Returns the words of the state. Most of them are never touched.
    pub fn words(&self) -> usize {
        self.words
    }

    /// Returns the memory of the state when this number of VM slots and entries is used.
    pub fn used_bytes(&self, vms: u32, entries: u32) -> Bytes {
        let words = self.vms_start + vms as usize * VM_WORDS + entries as usize * ENTRY_WORDS;
        Bytes(words as u64 * 8)
    }

    /// Returns the words of a new pool.
    pub fn used_when_new(&self) -> Range<usize> {
        0..self.vms_start
    }

    /// Returns the words that the pool in these words uses.
    ///
    /// # Errors
    /// The header is not that of a pool.
    pub fn used(words: &impl Words) -> Result<[Range<usize>; 3], Damage> {
        let layout = Self::read(words)?;
        let mark = |at: usize| words.load(at) as u32 as usize;
        let vms = layout.vm_words(mark(WORD_VM_MARK));
        let entries = layout.entry_words(mark(WORD_ENTRY_MARK));
        Ok([layout.used_when_new(), vms, entries])
    }

    /// Returns the words of the first `slots` VM slots, or of all if there are fewer.
    pub(crate) fn vm_words(&self, slots: usize) -> Range<usize> {
        self.vms_start..(self.vms_start + slots * VM_WORDS).min(self.entries_start)
    }

    /// Returns the words of the first `entries` entries, or of all if there are fewer.
    pub(crate) fn entry_words(&self, entries: usize) -> Range<usize> {
        self.entries_start..(self.entries_start + entries * ENTRY_WORDS).min(self.words)
    }

    /// Returns the nodes.
    pub fn nodes(&self) -> impl Iterator<Item = (NodeIdx, NodeSpec)> {
        (0..).map(NodeIdx).zip(self.nodes.iter().map(|node| node.spec))
    }

    /// Slices of a brick.
    pub fn brick_slices(&self) -> u32 {
        self.brick
    }

    /// Returns the number of slices with a state byte; there are as many entries.
    pub(crate) fn slices(&self) -> u32 {
        self.frames * FRAME_SLICES
    }

    pub(crate) fn node_of(&self, frame: FrameIdx) -> Option<&Node> {
        self.nodes.iter().find(|node| (node.first..node.first + node.frames).contains(&frame.0))
    }

    /// Does the node of this slice's frame have the slice?
    pub(crate) fn has(&self, at: SliceIdx) -> bool {
        let node = self.node_of(at.frame());
        node.is_some_and(|node| at.0 - node.first * FRAME_SLICES < node.spec.slices)
    }

    /// Write the header of a new pool; the words are all zero. The magic comes last.
    pub(crate) fn write(&self, words: &mut impl Words) {
        words.store(WORD_STAMP, FORMAT.stamp().to_word());
        words.store(WORD_SHAPE, self.nodes.len() as u64 | u64::from(self.brick) << 32);
        words.store(WORD_ROOM, u64::from(self.vms) | u64::from(self.slices()) << 32);
        for (at, node) in self.nodes.iter().enumerate() {
            words.store(NODES_START + at, u64::from(node.spec.numa) | u64::from(node.spec.slices) << 32);
        }
        words.store(WORD_MAGIC, MAGIC);
    }

    /// Read the header of a pool, which may have any content.
    pub(crate) fn read(words: &impl Words) -> Result<Self, Damage> {
        if words.count() < HEADER_WORDS {
            return Err(Damage::Header(format!("it has {} words; a header has {HEADER_WORDS}", words.count())));
        }
        let magic = words.load(WORD_MAGIC);
        if magic != MAGIC {
            return Err(Damage::Magic(magic));
        }
        FORMAT.check(Stamp::from_word(words.load(WORD_STAMP))).map_err(Damage::Version)?;
        let halves = |at: usize| (words.load(at) as u32, (words.load(at) >> 32) as u32);
        let (nodes, brick) = halves(WORD_SHAPE);
        let (vms, entries) = halves(WORD_ROOM);
        let specs: Vec<NodeSpec> = (0..(nodes as usize).min(MAX_NODES + 1))
            .map(|at| halves(NODES_START + at.min(MAX_NODES - 1)))
            .map(|(numa, slices)| NodeSpec { numa, slices })
            .collect();
        let layout = Self::new(&specs, brick, vms)?;
        if entries != layout.slices() || words.count() < layout.words {
            let (have, need) = (words.count(), layout.words);
            return Err(Damage::Header(format!("{entries} entries in {have} words; {need} words are needed")));
        }
        Ok(layout)
    }
}

/// Records in the stamp that this program also writes this state.
pub(crate) fn raise(words: &mut impl Words) {
    let stamp = Stamp::from_word(words.load(WORD_STAMP));
    if FORMAT.raise(stamp) != stamp {
        words.store(WORD_STAMP, FORMAT.raise(stamp).to_word());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NODES: [NodeSpec; 2] = [NodeSpec { numa: 0, slices: 1000 }, NodeSpec { numa: 3, slices: 512 }];

    /// A change of one of these places is a new version.
    #[test]
    fn the_places_of_version_1_are_these() {
        let layout = Layout::new(&NODES, 32, 100).expect("a layout");
        let places = [layout.states, layout.owners, layout.vms_start, layout.entries_start];
        assert_eq!(FORMAT, Format { version: 1, least_reader: 1, oldest: 1 });
        assert_eq!(places, [32, 224, 248, 648]);
        assert_eq!(layout.words(), 648 + 2 * 1536);
        assert_eq!([WORD_INTENT, WORD_OPERAND, WORD_VM_MARK, WORD_ENTRY_MARK], [4, 5, 6, 7]);
        let mut words = vec![0; layout.words()];
        layout.write(&mut words);
        assert_eq!(Layout::read(&words), Ok(layout));
    }

    #[test]
    fn a_header_that_contradicts_itself_is_refused_by_name() {
        let spec = |slices| NodeSpec { numa: 0, slices };
        for (nodes, brick, vms, word) in [
            (vec![], 1, 1, "0 nodes"),
            (vec![spec(1); 17], 1, 1, "17 nodes"),
            (vec![spec(0)], 1, 1, "0 slices"),
            (vec![spec(u32::MAX)], 1, 1, "4294967295 slices"),
            (vec![spec(1); 2], 1, 1, "twice"),
            (vec![spec(1)], 3, 1, "bricks of 3"),
            (vec![spec(1)], 1024, 1, "bricks of 1024"),
            (vec![spec(1)], 1, 0, "0 VMs"),
        ] {
            let said = Layout::new(&nodes, brick, vms).expect_err(word).to_string();
            assert!(said.contains(word), "{said}");
        }
        let layout = Layout::new(&NODES, 32, 100).expect("a layout");
        let mut words = vec![0; layout.words()];
        assert_eq!(Layout::read(&words), Err(Damage::Magic(0)));
        layout.write(&mut words);
        words.pop();
        assert!(matches!(Layout::read(&words), Err(Damage::Header(_))));
        words.truncate(3);
        assert!(matches!(Layout::read(&words), Err(Damage::Header(_))));
    }

    #[test]
    fn a_file_of_a_newer_program_is_refused_by_its_least_reader() {
        let layout = Layout::new(&NODES, 32, 100).expect("a layout");
        let mut words = vec![0; layout.words()];
        layout.write(&mut words);
        words[WORD_STAMP] = Stamp { version: 3, least_reader: 1 }.to_word();
        assert!(Layout::read(&words).is_ok());
        words[WORD_STAMP] = Stamp { version: 3, least_reader: 3 }.to_word();
        let said = Layout::read(&words).expect_err("too new").to_string();
        assert!(said.contains("has version 3 and needs a reader of at least 3"), "{said}");
    }
}
