//! Random histories of a pool beside a simple model of it: what is handed out, and to whom, is what the rules say.
//!
//! The model knows a slice as a value and finds each one by looking at all of them. It decides for itself which slices
//! a request gets, one at a time; the pool must have chosen the same.

use std::collections::{BTreeMap, BTreeSet};
use std::num::{NonZeroU32, NonZeroU64};

use ballast_pool::{
    Class, Content, Dirty, Domain, Extent, FRAME_SLICES, GuestIdx, Hit, Kind, Layout, Mode, NodeIdx, NodeSpec, Part,
    Pool, Request, SLICE_SIZE, SliceIdx, SliceState, VmId,
};
use proptest::prelude::*;

/// Two nodes, one of which ends within a frame.
const NODES: [NodeSpec; 2] = [NodeSpec { numa: 0, slices: 1800 }, NodeSpec { numa: 1, slices: 1024 }];
/// Where the second one begins: after four frames.
const SECOND: u32 = 4 * FRAME_SLICES;
const ALL: u32 = SECOND + 1024;
const VMS: u32 = 5;

fn vm(id: u64) -> VmId {
    VmId(NonZeroU64::new(id + 1).expect("not zero"))
}

fn domain(id: u32) -> Domain {
    Domain(NonZeroU32::new(id + 1).expect("not zero"))
}

fn exists(at: u32) -> bool {
    at < NODES[0].slices || (SECOND..SECOND + NODES[1].slices).contains(&at)
}

#[derive(Clone, Debug)]
enum Op {
    Reserve { frame: u32, frames: u32, class: u8 },
    Allocate { id: u64, domain: u32, kind: bool, mode: u8, parts: Vec<(u32, u32, u8)> },
    Release { id: u64 },
    Zero { most: u32, fate: u8 },
    Poison { at: u32 },
    Lend { node: u8, kind: bool, slices: u32 },
    TakeBack { class: u8, most: u32 },
    Map { id: u64, hva: u64 },
}

fn any_op() -> impl Strategy<Value = Op> {
    let parts = proptest::collection::vec((0u32..3, 1u32..1300, 0u8..2), 1..3);
    let ids = 0u64..7;
    prop_oneof![
        2 => (0u32..6, 1u32..4, 0u8..3).prop_map(|(frame, frames, class)| Op::Reserve { frame, frames, class }),
        6 => (ids.clone(), 0u32..3, any::<bool>(), 0u8..3, parts)
            .prop_map(|(id, domain, kind, mode, parts)| Op::Allocate { id, domain, kind, mode, parts }),
        3 => ids.clone().prop_map(|id| Op::Release { id }),
        4 => (1u32..2000, 0u8..8).prop_map(|(most, fate)| Op::Zero { most, fate }),
        1 => (0..ALL).prop_map(|at| Op::Poison { at }),
        1 => (0u8..2, any::<bool>(), 1u32..700).prop_map(|(node, kind, slices)| Op::Lend { node, kind, slices }),
        1 => (0u8..3, 1u32..1500).prop_map(|(class, most)| Op::TakeBack { class, most }),
        2 => (ids, 1u64..4).prop_map(|(id, hva)| Op::Map { id, hva: hva << 40 }),
    ]
}

fn class_of(number: u8) -> Class {
    [Class::Gib, Class::Huge, Class::Shmem][usize::from(number)]
}

fn kind_of(huge: bool) -> Kind {
    if huge { Kind::Hugetlb } else { Kind::Shmem }
}

#[derive(Clone)]
struct Model {
    states: Vec<SliceState>,
    owners: Vec<Option<u64>>,
    classes: Vec<Option<Class>>,
    vms: BTreeMap<u64, (u32, BTreeSet<u32>)>,
    brick: u32,
}

impl Model {
    fn frame(&self, frame: u32) -> &[SliceState] {
        &self.states[(frame * FRAME_SLICES) as usize..][..FRAME_SLICES as usize]
    }

    /// Which trust domain has the brick of this slice: that of any VM with a slice of it.
    fn domain(&self, at: u32) -> Option<u32> {
        let brick = at / self.brick * self.brick;
        let owner = (brick..brick + self.brick).find_map(|at| self.owners[at as usize]);
        owner.map(|id| self.vms[&id].0)
    }

    fn brick(&self, at: u32) -> std::ops::Range<u32> {
        let start = at / self.brick * self.brick;
        start..start + self.brick
    }

    fn set(&mut self, at: u32, state: SliceState, owner: Option<u64>) {
        self.states[at as usize] = state;
        self.owners[at as usize] = owner;
    }

    /// A page of 1 GiB of which a part is not as the rest is 512 of 2 MiB; a frame of holes is nothing.
    fn settle(&mut self) {
        for frame in 0..self.classes.len() as u32 {
            let all = |is: fn(SliceState) -> bool| self.frame(frame).iter().all(|state| is(*state));
            let is_one = all(SliceState::is_free) || all(SliceState::is_owned) || all(|s| s == SliceState::Borrow);
            if all(|state| state == SliceState::Hole) {
                self.classes[frame as usize] = None;
            } else if self.classes[frame as usize] == Some(Class::Gib) && !is_one {
                self.classes[frame as usize] = Some(Class::Huge);
            }
        }
    }

    /// The slice that the rules give next, of those of this node and kind.
    fn next_slice(&self, node: u8, kind: Kind, domain: u32) -> Option<u32> {
        let frames = if node == 0 { 0..4 } else { 4..6 };
        let can = |at: &u32| self.states[*at as usize].is_ready() && self.domain(*at).is_none_or(|of| of == domain);
        let best = |frame: u32| (frame * FRAME_SLICES..(frame + 1) * FRAME_SLICES).rev().find(can);
        let is_fragmented = |frame: u32| self.frame(frame).iter().any(|state| !state.is_free());
        let rank = |frame: u32| match (is_fragmented(frame), self.classes[frame as usize]) {
            (true, _) => 0,
            (false, Some(Class::Gib)) => 2,
            _ => 1,
        };
        let of_kind = |frame: &u32| self.classes[*frame as usize].is_some_and(|class| class.kind() == kind);
        let useful = frames.filter(of_kind).filter(|frame| best(*frame).is_some());
        best(useful.min_by_key(|frame| (rank(*frame), u32::MAX - frame))?)
    }

    /// What the rules give; `None`: nothing. Whole frames are told apart, because they must be aligned.
    fn give(&self, id: u64, request: &Request, domain: u32) -> Option<(BTreeSet<u32>, Vec<u32>)> {
        let mut scratch = self.clone();
        scratch.vms.insert(id, (domain, BTreeSet::new()));
        let (mut slices, mut whole) = (BTreeSet::new(), Vec::new());
        for node in 0..2u8 {
            let parts = || request.parts.iter().filter(|part| part.node.0 == node);
            let mut wanted: u32 = parts().map(|part| part.slices).sum();
            let gib = |part: &Part| {
                let aligned = (part.guest.0..part.guest.0 + part.slices).filter(|at| at % FRAME_SLICES == 0);
                aligned.filter(|at| at + FRAME_SLICES <= part.guest.0 + part.slices).count()
            };
            let mut frames: usize = if request.mode == Mode::Slices { 0 } else { parts().map(gib).sum() };
            let classes: &[Class] = match (request.kind, request.mode) {
                (Kind::Shmem, _) => &[Class::Shmem],
                (_, Mode::Gib) => &[Class::Gib],
                _ => &[Class::Gib, Class::Huge],
            };
            for class in classes {
                for frame in if node == 0 { 0..4 } else { 4..6 } {
                    let is_whole = self.frame(frame).iter().all(|state| state.is_ready());
                    if frames > 0 && is_whole && self.classes[frame as usize] == Some(*class) {
                        frames -= 1;
                        wanted -= FRAME_SLICES;
                        whole.push(frame);
                        for at in frame * FRAME_SLICES..(frame + 1) * FRAME_SLICES {
                            slices.insert(at);
                            scratch.set(at, SliceState::Used, Some(id));
                        }
                    }
                }
            }
            if wanted > 0 && request.mode == Mode::Gib {
                return None;
            }
            for _ in 0..wanted {
                let at = scratch.next_slice(node, request.kind, domain)?;
                slices.insert(at);
                scratch.set(at, SliceState::Used, Some(id));
            }
        }
        Some((slices, whole))
    }
}

/// A pool, its model, and what a worker is zeroing.
struct Pair {
    pool: Pool<Vec<u64>>,
    model: Model,
    working: Vec<Dirty>,
    /// Part of those: what a VM that is gone could write.
    exposed: BTreeSet<u32>,
}

impl Pair {
    fn new(brick: u32) -> Self {
        let layout = Layout::new(&NODES, brick, VMS).expect("a layout");
        let pool = Pool::create(vec![0; layout.words()], &layout).expect("a pool");
        let slices = 6 * FRAME_SLICES as usize;
        let (states, owners) = (vec![SliceState::Hole; slices], vec![None; slices]);
        let model = Model { states, owners, classes: vec![None; 6], vms: BTreeMap::new(), brick };
        Self { pool, model, working: Vec::new(), exposed: BTreeSet::new() }
    }

    fn apply(&mut self, op: &Op) -> Result<(), TestCaseError> {
        match op {
            Op::Reserve { frame, frames, class } => self.reserve(*frame, *frames, class_of(*class)),
            Op::Allocate { id, domain, kind, mode, parts } => self.allocate(*id, *domain, *kind, *mode, parts)?,
            Op::Release { id } => self.release(*id)?,
            Op::Zero { most, fate } => self.zero(*most, *fate)?,
            Op::Poison { at } => self.poison(*at)?,
            Op::Lend { node, kind, slices } => self.lend(*node, *kind, *slices)?,
            Op::TakeBack { class, most } => self.take_back(class_of(*class), *most)?,
            Op::Map { id, hva } => self.map(*id, *hva)?,
        }
        self.model.settle();
        self.compare()
    }

    fn reserve(&mut self, frame: u32, frames: u32, class: Class) {
        let end = (frame + frames).min(if frame < 4 { 4 } else { 6 }) * FRAME_SLICES;
        let last = (frame * FRAME_SLICES..end).rev().find(|at| exists(*at)).expect("a frame has a slice");
        let extent = Extent { start: SliceIdx(frame * FRAME_SLICES), slices: last + 1 - frame * FRAME_SLICES };
        let can = extent.each().all(|at| self.model.states[at.0 as usize] == SliceState::Hole)
            && (class != Class::Gib || extent.is_whole_frames());
        assert_eq!(self.pool.reserve(extent, class).is_ok(), can, "{extent} {class:?}");
        if can {
            extent.each().for_each(|at| self.model.set(at.0, SliceState::Free(Content::Dirty), None));
            extent.frames().for_each(|frame| self.model.classes[frame.0 as usize] = Some(class));
        }
    }

    fn allocate(
        &mut self,
        id: u64,
        dom: u32,
        huge: bool,
        mode: u8,
        parts: &[(u32, u32, u8)],
    ) -> Result<(), TestCaseError> {
        let mode = [Mode::Gib, Mode::Slices, Mode::Mix][usize::from(mode)];
        let mut at = 0;
        let parts = parts.iter().map(|(gap, slices, node)| {
            // Aligned and whole, aligned, or neither.
            let start = if *gap < 2 { at / FRAME_SLICES * FRAME_SLICES + FRAME_SLICES } else { at + gap };
            let slices = if *gap == 0 { slices.div_ceil(FRAME_SLICES) * FRAME_SLICES } else { *slices };
            at = start + slices;
            Part { guest: GuestIdx(start), slices, node: NodeIdx(*node) }
        });
        let (kind, parts) = (kind_of(huge), parts.collect());
        let request = Request { vm: vm(id), domain: domain(dom), kind, mode, parts };
        let got = self.pool.allocate(&request);
        let is_aligned = |part: &Part| [part.guest.0, part.slices].iter().all(|at| at.is_multiple_of(FRAME_SLICES));
        let is_refused = self.model.vms.contains_key(&id)
            || self.model.vms.len() == VMS as usize
            || mode == Mode::Gib && (kind == Kind::Shmem || !request.parts.iter().all(is_aligned));
        let given = if is_refused { None } else { self.model.give(id, &request, dom) };
        let (Some((slices, whole)), Ok(grant)) = (&given, &got) else {
            prop_assert!(given.is_none() && got.is_err(), "{request:?}: {got:?}, the model has {given:?}");
            return Ok(());
        };
        let of = |extent: Extent| extent.each().map(|at| at.0);
        let chosen: Vec<u32> = grant.segments.iter().flat_map(|segment| of(segment.extent)).collect();
        prop_assert_eq!(chosen.len(), slices.len(), "twice");
        prop_assert_eq!(&chosen.into_iter().collect::<BTreeSet<_>>(), slices);
        for part in &request.parts {
            let has = (part.guest.0..part.guest.0 + part.slices).map(|at| self.pool.slice_of(vm(id), GuestIdx(at)));
            let node = if part.node.0 == 0 { 0..SECOND } else { SECOND..ALL };
            prop_assert!(has.into_iter().all(|at| at.is_some_and(|at| node.contains(&at.0))));
        }
        for frame in whole {
            let guest = self.pool.owner_of(SliceIdx(frame * FRAME_SLICES)).expect("owned").1.0;
            prop_assert_eq!(guest % FRAME_SLICES, 0);
            let is_one = |at: u32| self.pool.slice_of(vm(id), GuestIdx(guest + at));
            prop_assert!((0..FRAME_SLICES).all(|at| is_one(at) == Some(SliceIdx(frame * FRAME_SLICES + at))));
        }
        for at in slices {
            // Also what is mapped as slices is no page of 1 GiB any more.
            let frame = at / FRAME_SLICES;
            if !whole.contains(&frame) && self.model.classes[frame as usize] == Some(Class::Gib) {
                prop_assert!(grant.demoted.iter().any(|extent| extent.start.0 == frame * FRAME_SLICES));
                self.model.classes[frame as usize] = Some(Class::Huge);
            }
            self.model.set(*at, SliceState::Used, Some(id));
        }
        self.model.vms.insert(id, (dom, slices.clone()));
        Ok(())
    }

    fn release(&mut self, id: u64) -> Result<(), TestCaseError> {
        let Some((_, slices)) = self.model.vms.remove(&id) else {
            prop_assert!(self.pool.release(vm(id)).is_err());
            return Ok(());
        };
        let segments = self.pool.release(vm(id)).expect("it is there");
        prop_assert_eq!(segments.iter().map(|segment| segment.extent.slices).sum::<u32>(), slices.len() as u32);
        for at in &slices {
            let is_bad = self.model.states[*at as usize] == SliceState::MceUsed;
            self.model.set(*at, if is_bad { SliceState::Mce } else { SliceState::Free(Content::Dirty) }, None);
        }
        // It could write to all of these files.
        for at in slices.into_iter().filter(|at| self.model.domain(*at).is_none()).collect::<Vec<_>>() {
            for at in self.model.brick(at) {
                match self.model.states[at as usize] {
                    SliceState::Free(Content::Zeroed) => self.model.set(at, SliceState::Free(Content::Dirty), None),
                    SliceState::Free(Content::Zeroing) => drop(self.exposed.insert(at)),
                    _ => {}
                }
            }
        }
        Ok(())
    }

    /// Zero up to `most` slices; sometimes leave it half done, give it back, or fail.
    fn zero(&mut self, most: u32, fate: u8) -> Result<(), TestCaseError> {
        if fate == 7 {
            for dirty in self.working.drain(..) {
                for at in dirty.extent().each().map(|at| at.0) {
                    let content = if self.exposed.remove(&at) { Content::Dirty } else { Content::Zeroed };
                    if self.model.states[at as usize] == SliceState::Free(Content::Zeroing) {
                        self.model.set(at, SliceState::Free(content), None);
                    }
                }
                self.pool.clean(dirty.zero(|_| Ok::<_, ()>(())).expect("zeroed"));
            }
            return Ok(());
        }
        let mut left = most;
        while left > 0 {
            let Some(dirty) = self.pool.next_dirty(left) else { break };
            let extent = dirty.extent();
            prop_assert!(extent.slices <= left && self.pool.bricks(extent).len() == 1);
            left -= extent.slices;
            let slices = || extent.each().map(|at| at.0);
            prop_assert!(slices().all(|at| self.model.states[at as usize] == SliceState::Free(Content::Dirty)));
            let to = match fate {
                5 => SliceState::Free(Content::Zeroing),
                6 => SliceState::Error,
                _ => SliceState::Free(Content::Zeroed),
            };
            slices().for_each(|at| self.model.set(at, to, None));
            match fate {
                5 => self.working.push(dirty),
                6 => {
                    let (dirty, ()) = dirty.zero(|_| Err(())).expect_err("it failed");
                    self.pool.fail(dirty);
                    break;
                }
                _ => self.pool.clean(dirty.zero(|_| Ok::<_, ()>(())).expect("zeroed")),
            }
        }
        Ok(())
    }

    fn poison(&mut self, at: u32) -> Result<(), TestCaseError> {
        let hit = self.pool.poison(SliceIdx(at));
        if !exists(at) {
            prop_assert!(hit.is_err());
            return Ok(());
        }
        let owner = self.model.owners[at as usize];
        let (want, to) = match self.model.states[at as usize] {
            SliceState::Free(_) => (Hit::Free, SliceState::Mce),
            SliceState::Used => {
                let (vm, guest, hva) = self.pool.owner_of(SliceIdx(at)).expect("an owner");
                prop_assert_eq!(Some(vm.0.get() - 1), owner);
                (Hit::Owned { vm, guest, hva }, SliceState::MceUsed)
            }
            state @ (SliceState::Mce | SliceState::MceUsed) => (Hit::Known, state),
            state => (Hit::NotOurs, state),
        };
        prop_assert_eq!(hit, Ok(want));
        self.model.set(at, to, owner);
        Ok(())
    }

    fn lend(&mut self, node: u8, huge: bool, slices: u32) -> Result<(), TestCaseError> {
        let lent = self.pool.lend(NodeIdx(node), kind_of(huge), slices);
        let lent: Vec<u32> = lent.into_iter().flat_map(|extent| extent.each().map(|at| at.0)).collect();
        prop_assert!(lent.len() <= slices as usize);
        let of = |model: &Model, at: u32| {
            let class = model.classes[(at / FRAME_SLICES) as usize];
            let state = model.states[at as usize];
            let is_idle = state == SliceState::Free(Content::Dirty) || state.is_ready();
            is_idle && model.domain(at).is_none() && class.is_some_and(|class| class.kind() == kind_of(huge))
        };
        let could = (0..ALL).filter(|at| (*at >= SECOND) == (node == 1) && of(&self.model, *at)).count();
        prop_assert_eq!(lent.len(), could.min(slices as usize));
        for at in lent {
            prop_assert!(of(&self.model, at));
            self.model.set(at, SliceState::Borrow, None);
        }
        Ok(())
    }

    fn take_back(&mut self, class: Class, most: u32) -> Result<(), TestCaseError> {
        let is_lent = |at: &u32| self.model.states[*at as usize] == SliceState::Borrow;
        let Some(start) = (0..ALL).find(is_lent) else { return Ok(()) };
        let run = (start..if start < SECOND { SECOND } else { ALL }).take(most as usize).take_while(is_lent);
        let extent = Extent { start: SliceIdx(start), slices: run.count() as u32 };
        if self.pool.take_back(extent, class).is_ok() {
            extent.each().for_each(|at| self.model.set(at.0, SliceState::Free(Content::Dirty), None));
            extent.frames().for_each(|frame| self.model.classes[frame.0 as usize] = Some(class));
        } else {
            // What becomes another class is whole frames.
            prop_assert!(!extent.is_whole_frames(), "{extent} {class:?}");
        }
        Ok(())
    }

    fn map(&mut self, id: u64, hva: u64) -> Result<(), TestCaseError> {
        let Some(segments) = self.pool.segments(vm(id)) else {
            prop_assert!(self.pool.map(vm(id), GuestIdx(0), 1, Some(hva)).is_err());
            return Ok(());
        };
        let (first, last) = (segments[0], segments[segments.len() - 1]);
        let slices = last.guest.0 + last.extent.slices - first.guest.0;
        self.pool.map(vm(id), first.guest, slices, Some(hva)).expect("map all of it");
        for segment in self.pool.segments(vm(id)).expect("still there") {
            for within in [0, segment.extent.slices / 2, segment.extent.slices - 1] {
                let guest = GuestIdx(segment.guest.0 + within);
                let at = hva + u64::from(guest.0 - first.guest.0) * SLICE_SIZE;
                prop_assert_eq!(self.pool.hva_of(vm(id), guest), Some(at));
                prop_assert_eq!(self.pool.guest_at(vm(id), at + SLICE_SIZE - 1), Some(guest));
                let slice = SliceIdx(segment.extent.start.0 + within);
                prop_assert_eq!(self.pool.owner_of(slice), Some((vm(id), guest, Some(at))));
            }
        }
        Ok(())
    }

    fn compare(&self) -> Result<(), TestCaseError> {
        prop_assert_eq!(self.pool.validate(), Ok(()));
        for at in 0..6 * FRAME_SLICES {
            prop_assert_eq!(self.pool.state(SliceIdx(at)), self.model.states[at as usize], "slice {}", at);
            let owner = self.pool.owner_of(SliceIdx(at)).map(|(vm, ..)| vm.0.get() - 1);
            prop_assert_eq!(owner, self.model.owners[at as usize], "slice {}", at);
        }
        for frame in 0..6 {
            let class = self.pool.class(SliceIdx(frame * FRAME_SLICES));
            prop_assert_eq!(class, self.model.classes[frame as usize], "frame {}", frame);
        }
        for node in 0..2u8 {
            let stats = self.pool.stats(NodeIdx(node)).expect("a node");
            let sum = stats.used + stats.ready + stats.dirty + stats.zeroing + stats.lent + stats.holes;
            prop_assert_eq!(sum + stats.error + stats.mce + stats.mce_used, NODES[usize::from(node)].slices);
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn every_history_comes_to_what_the_rules_say(
        ops in proptest::collection::vec(any_op(), 1..40), brick in 0u32..3, before in 0u8..3,
    ) {
        let mut pair = Pair::new([8, 64, FRAME_SLICES][brick as usize]);
        // Most histories begin with memory that is ready.
        for frame in [0, 4].into_iter().take(before.into()) {
            pair.apply(&Op::Reserve { frame, frames: if frame == 0 { 3 } else { 2 }, class: before - 1 })?;
            pair.apply(&Op::Zero { most: u32::MAX, fate: 0 })?;
        }
        for op in &ops {
            pair.apply(op)?;
        }
        // A state that is opened again is the same, except the slices that a worker was zeroing.
        for dirty in pair.working.drain(..) {
            for at in dirty.extent().each() {
                if pair.model.states[at.0 as usize] == SliceState::Free(Content::Zeroing) {
                    pair.model.set(at.0, SliceState::Free(Content::Dirty), None);
                }
            }
        }
        let (pool, redone) = Pool::open(pair.pool.into_words()).expect("open again");
        prop_assert!(!redone);
        pair.pool = pool;
        pair.compare()?;
    }
}

/// A pool of whole frames that are ready, on one node.
fn ready(frames: u32, class: Class) -> Pool<Vec<u64>> {
    let slices = frames * FRAME_SLICES;
    let layout = Layout::new(&[NodeSpec { numa: 0, slices }], FRAME_SLICES, 64).expect("a layout");
    let mut pool = Pool::create(vec![0; layout.words()], &layout).expect("a pool");
    pool.reserve(Extent { start: SliceIdx(0), slices }, class).expect("reserve");
    zero_all(&mut pool);
    pool
}

fn zero_all(pool: &mut Pool<Vec<u64>>) {
    while let Some(dirty) = pool.next_dirty(u32::MAX) {
        pool.clean(dirty.zero(|_| Ok::<_, ()>(())).expect("zeroed"));
    }
}

fn request(id: u64, mode: Mode, slices: u32) -> Request {
    let parts = vec![Part { guest: GuestIdx(0), slices, node: NodeIdx(0) }];
    Request { vm: vm(id), domain: domain(0), kind: Kind::Hugetlb, mode, parts }
}

fn extents(pool: &mut Pool<Vec<u64>>, request: &Request) -> Vec<(u32, u32)> {
    let grant = pool.allocate(request).expect("there is room");
    grant.segments.iter().map(|segment| (segment.extent.start.0, segment.extent.slices)).collect()
}

#[test]
fn a_request_of_3_5_gib_takes_3_from_the_front_and_a_half_from_the_back() {
    let mut pool = ready(8, Class::Gib);
    assert_eq!(extents(&mut pool, &request(0, Mode::Mix, 7 * 256)), [(0, 1536), (4096 - 256, 256)]);
    // The second one's half is the rest of the frame that the first one has begun.
    assert_eq!(extents(&mut pool, &request(1, Mode::Mix, 7 * 256)), [(1536, 1536), (4096 - 512, 256)]);
    assert_eq!(pool.stats(NodeIdx(0)).expect("node").ready_gib, 1);
}

#[test]
fn where_only_2_whole_gib_are_left_the_rest_of_3_5_is_slices() {
    let mut pool = ready(6, Class::Gib);
    let half = |id| request(id, Mode::Slices, 256);
    // Four VMs of half a GiB; of two of them the frames stay in parts.
    (0..6).for_each(|id| drop(extents(&mut pool, &half(id))));
    [0, 2, 4].into_iter().for_each(|id| drop(pool.release(vm(id)).expect("release")));
    pool.allocate(&request(9, Mode::Gib, 512)).expect("one whole GiB");
    zero_all(&mut pool);
    // Left: frames 1 and 2 whole, and 3 halves.
    let got = extents(&mut pool, &request(7, Mode::Mix, 7 * 256));
    let (whole, slices): (Vec<_>, Vec<_>) = got.into_iter().partition(|(_, slices)| *slices == 1024);
    assert_eq!(whole, [(512, 1024)]);
    assert_eq!(slices.iter().map(|(_, slices)| slices).sum::<u32>(), 768);
}

#[test]
fn a_released_slice_is_nobodys_before_it_was_zeroed() {
    let mut pool = ready(1, Class::Huge);
    pool.allocate(&request(0, Mode::Slices, 512)).expect("all of it");
    pool.release(vm(0)).expect("release");
    let said = pool.allocate(&request(1, Mode::Slices, 1)).expect_err("all of it is dirty").to_string();
    assert!(said.contains("it wants 1 slices, and 0 are ready for it (512 are to be zeroed"), "{said}");
    let dirty = pool.next_dirty(10).expect("dirty");
    assert!(pool.allocate(&request(1, Mode::Slices, 1)).is_err(), "a worker has it");
    let (dirty, ()) = dirty.zero(|_| Err(())).expect_err("it could not");
    pool.put_back(dirty);
    assert!(pool.allocate(&request(1, Mode::Slices, 1)).is_err(), "the worker has not zeroed it");
    zero_all(&mut pool);
    pool.allocate(&request(1, Mode::Slices, 512)).expect("all of it");
}

#[test]
fn dirty_slices_of_a_node_that_is_passed_over_stay_as_they_are() {
    let layout = Layout::new(&NODES, 32, 64).expect("a layout");
    let mut pool = Pool::create(vec![0; layout.words()], &layout).expect("a pool");
    for (start, slices) in [(0, NODES[0].slices), (SECOND, NODES[1].slices)] {
        pool.reserve(Extent { start: SliceIdx(start), slices }, Class::Shmem).expect("reserve");
    }
    let before = pool.into_words();
    let mut pool = Pool::open(before.clone()).expect("open").0;
    assert_eq!(pool.next_dirty_of(1, |_| false), None);
    assert_eq!(pool.into_words(), before, "nothing was written");
    let mut pool = Pool::open(before).expect("open").0;
    for at in 0..NODES[1].slices {
        let dirty = pool.next_dirty_of(1, |node| node == NodeIdx(1)).expect("dirty");
        assert_eq!(dirty.extent(), Extent { start: SliceIdx(SECOND + at), slices: 1 });
        pool.clean(dirty.zero(|_| Ok::<_, ()>(())).expect("zeroed"));
    }
    assert_eq!(pool.next_dirty_of(1, |node| node == NodeIdx(1)), None);
    assert_eq!(pool.stats(NodeIdx(0)).expect("a node").dirty, NODES[0].slices);
}

#[test]
fn what_a_vm_could_write_beside_its_slices_is_zeroed_before_another_one_gets_it() {
    let mut pool = ready(1, Class::Huge);
    // A brick of the second VM's domain, of which it has one slice.
    pool.allocate(&request(0, Mode::Slices, 1)).expect("one");
    pool.release(vm(0)).expect("release");
    let stats = pool.stats(NodeIdx(0)).expect("a node");
    let brick = pool.layout().brick_slices();
    assert_eq!((stats.dirty, stats.ready), (brick, 512 - brick), "it had the whole file");
    // A worker has cleaned a slice, and a VM with another slice of the file writes behind it.
    let most = pool_dirty(&mut pool, brick - 2);
    pool.clean(most);
    let first = pool_dirty(&mut pool, 1);
    pool.allocate(&request(1, Mode::Slices, 1)).expect("one");
    pool.release(vm(1)).expect("release");
    pool.clean(first);
    let stats = pool.stats(NodeIdx(0)).expect("a node");
    assert_eq!((stats.dirty, stats.ready, stats.zeroing), (brick, 512 - brick, 0), "what the worker did is void");
}

fn pool_dirty(pool: &mut Pool<Vec<u64>>, most: u32) -> ballast_pool::Zeroed {
    pool.next_dirty(most).expect("dirty").zero(|_| Ok::<_, ()>(())).expect("zeroed")
}

#[test]
fn a_worker_of_a_pool_that_was_opened_again_has_no_slices() {
    let mut pool = ready(1, Class::Huge);
    pool.allocate(&request(0, Mode::Slices, 512)).expect("all of it");
    pool.release(vm(0)).expect("release");
    let old = pool.next_dirty(512).expect("dirty").zero(|_| Ok::<_, ()>(())).expect("zeroed");
    let mut pool = Pool::open(pool.into_words()).expect("open").0;
    // Zeroed by another worker, written by a VM, and being zeroed once more: the first worker's word says nothing.
    zero_all(&mut pool);
    pool.allocate(&request(1, Mode::Slices, 512)).expect("all of it");
    pool.release(vm(1)).expect("release");
    let _working = pool.next_dirty(512).expect("dirty");
    pool.clean(old);
    assert!(pool.allocate(&request(2, Mode::Slices, 1)).is_err(), "a slice was handed out that a VM has written");
}

#[test]
fn a_file_has_slices_of_one_trust_domain_alone() {
    let mut pool = ready(2, Class::Huge);
    let mut of = |id: u64, dom: u32, slices: u32| {
        let request = Request { domain: domain(dom), ..request(id, Mode::Slices, slices) };
        pool.allocate(&request).map(|grant| grant.segments[0].extent.start.frame().0)
    };
    assert_eq!(of(0, 0, 100), Ok(1));
    assert_eq!(of(1, 1, 100), Ok(0));
    assert_eq!(of(2, 0, 100), Ok(1));
    let said = of(3, 2, 1).expect_err("both files are somebody's").to_string();
    assert!(said.contains("0 are ready for it") && said.contains("724 are in files of other trust domains"), "{said}");
    pool.release(vm(1)).expect("release");
    zero_all(&mut pool);
    assert_eq!(pool.domain(SliceIdx(0)), None);
    let request = Request { domain: domain(2), ..request(3, Mode::Slices, 512) };
    assert!(pool.allocate(&request).is_ok());
}

#[test]
fn memory_that_failed_is_told_to_its_vm_and_never_handed_out_again() {
    let mut pool = ready(1, Class::Gib);
    pool.allocate(&request(0, Mode::Gib, 512)).expect("all of it");
    pool.map(vm(0), GuestIdx(0), 512, Some(1 << 40)).expect("map");
    let hit = Hit::Owned { vm: vm(0), guest: GuestIdx(7), hva: Some((1 << 40) + 7 * SLICE_SIZE) };
    assert_eq!(pool.poison(SliceIdx(7)), Ok(hit));
    assert_eq!(pool.poison(SliceIdx(7)), Ok(Hit::Known));
    pool.release(vm(0)).expect("release");
    zero_all(&mut pool);
    assert_eq!((pool.state(SliceIdx(7)), pool.class(SliceIdx(7))), (SliceState::Mce, Some(Class::Huge)));
    let grant = pool.allocate(&request(1, Mode::Slices, 511)).expect("the rest");
    assert!(grant.segments.iter().all(|segment| !segment.extent.each().any(|at| at == SliceIdx(7))));
    assert!(pool.allocate(&request(2, Mode::Slices, 1)).is_err());
}

#[test]
fn a_page_of_1_gib_that_was_lent_whole_comes_back_as_one() {
    let mut pool = ready(2, Class::Gib);
    pool.allocate(&request(0, Mode::Slices, 1)).expect("one slice");
    pool.release(vm(0)).expect("release");
    zero_all(&mut pool);
    assert_eq!(pool.class(SliceIdx(512)), Some(Class::Huge));
    assert!(pool.allocate(&request(1, Mode::Gib, 1024)).is_err(), "one of the two was demoted");
    let lent = pool.lend(NodeIdx(0), Kind::Hugetlb, 512);
    assert_eq!(lent, [Extent { start: SliceIdx(512), slices: 512 }]);
    pool.take_back(lent[0], Class::Gib).expect("take it back");
    assert!(pool.allocate(&request(1, Mode::Gib, 1024)).is_err(), "it is dirty");
    zero_all(&mut pool);
    pool.allocate(&request(1, Mode::Gib, 1024)).expect("both");
    pool.validate().expect("valid");
}
