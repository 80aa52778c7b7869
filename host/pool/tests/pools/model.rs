//! Random histories of a pool beside a simple model: each request gets the slices that the rules demand.
//!
//! The model keeps each slice as a value and finds slices by looking at all of them. It chooses the slices of a request
//! one at a time; the pool must choose the same slices.

use std::collections::{BTreeMap, BTreeSet};
use std::num::{NonZeroU32, NonZeroU64};

use ballast_pool::map::{
    Content, Dirty, Domain, Extent, FRAME_SLICES, GuestIdx, Hit, Layout, Mode, NodeIdx, NodeSpec, Part, Pool, Request,
    Segment, SliceIdx, SliceState, VmId,
};
use proptest::prelude::*;

/// Two nodes, one of which ends within a frame.
const NODES: [NodeSpec; 2] = [NodeSpec { numa: 0, slices: 1800 }, NodeSpec { numa: 1, slices: 1024 }];
/// The first slice of the second node: after four frames.
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
    Reserve { frame: u32, frames: u32 },
    Allocate { id: u64, domain: u32, mode: bool, parts: Vec<(u32, u32, u8)> },
    Release { id: u64 },
    Zero { most: u32, fate: u8 },
    Poison { at: u32 },
    Lend { node: u8, slices: u32 },
    TakeBack { most: u32 },
}

fn any_op() -> impl Strategy<Value = Op> {
    let parts = proptest::collection::vec((0u32..3, 1u32..1300, 0u8..2), 1..3);
    let ids = 0u64..7;
    prop_oneof![
        2 => (0u32..6, 1u32..4).prop_map(|(frame, frames)| Op::Reserve { frame, frames }),
        6 => (ids.clone(), 0u32..3, any::<bool>(), parts)
            .prop_map(|(id, domain, mode, parts)| Op::Allocate { id, domain, mode, parts }),
        3 => ids.prop_map(|id| Op::Release { id }),
        4 => (1u32..2000, 0u8..8).prop_map(|(most, fate)| Op::Zero { most, fate }),
        1 => (0..ALL).prop_map(|at| Op::Poison { at }),
        1 => (0u8..2, 1u32..700).prop_map(|(node, slices)| Op::Lend { node, slices }),
        1 => (1u32..1500).prop_map(|most| Op::TakeBack { most }),
    ]
}

#[derive(Clone)]
struct Model {
    states: Vec<SliceState>,
    owners: Vec<Option<u64>>,
    vms: BTreeMap<u64, (u32, BTreeSet<u32>)>,
    brick: u32,
}

impl Model {
    fn frame(&self, frame: u32) -> &[SliceState] {
        &self.states[(frame * FRAME_SLICES) as usize..][..FRAME_SLICES as usize]
    }

    /// The trust domain of this slice's brick: that of any VM with a slice of it.
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

    fn next_slice(&self, node: u8, domain: u32) -> Option<u32> {
        let frames = if node == 0 { 0..4 } else { 4..6 };
        let can = |at: &u32| self.states[*at as usize].is_ready() && self.domain(*at).is_none_or(|of| of == domain);
        let best = |frame: u32| (frame * FRAME_SLICES..(frame + 1) * FRAME_SLICES).rev().find(can);
        let is_fragmented = |frame: u32| self.frame(frame).iter().any(|state| !state.is_free());
        let useful = frames.filter(|frame| best(*frame).is_some());
        best(useful.min_by_key(|frame| (!is_fragmented(*frame), u32::MAX - frame))?)
    }

    /// The slices by the rules, with the whole frames, which must be aligned; `None`: the request is refused.
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
            for frame in if node == 0 { 0..4 } else { 4..6 } {
                if frames > 0 && self.frame(frame).iter().all(|state| state.is_ready()) {
                    frames -= 1;
                    wanted -= FRAME_SLICES;
                    whole.push(frame);
                    for at in frame * FRAME_SLICES..(frame + 1) * FRAME_SLICES {
                        slices.insert(at);
                        scratch.set(at, SliceState::Used, Some(id));
                    }
                }
            }
            for _ in 0..wanted {
                let at = scratch.next_slice(node, domain)?;
                slices.insert(at);
                scratch.set(at, SliceState::Used, Some(id));
            }
        }
        Some((slices, whole))
    }
}

/// A pool, its model, and the slices that a worker is zeroing.
struct Pair {
    pool: Pool<Vec<u64>>,
    model: Model,
    working: Vec<Dirty>,
    /// The part of the worker's slices that a VM that is gone could write to.
    exposed: BTreeSet<u32>,
}

impl Pair {
    fn new(brick: u32) -> Self {
        let layout = Layout::new(&NODES, brick, VMS).expect("a layout");
        let pool = Pool::create(vec![0; layout.words()], &layout).expect("a pool");
        let slices = 6 * FRAME_SLICES as usize;
        let (states, owners) = (vec![SliceState::Hole; slices], vec![None; slices]);
        let model = Model { states, owners, vms: BTreeMap::new(), brick };
        Self { pool, model, working: Vec::new(), exposed: BTreeSet::new() }
    }

    fn apply(&mut self, op: &Op) -> Result<(), TestCaseError> {
        match op {
            Op::Reserve { frame, frames } => self.reserve(*frame, *frames),
            Op::Allocate { id, domain, mode, parts } => self.allocate(*id, *domain, *mode, parts)?,
            Op::Release { id } => self.release(*id)?,
            Op::Zero { most, fate } => self.zero(*most, *fate)?,
            Op::Poison { at } => self.poison(*at)?,
            Op::Lend { node, slices } => self.lend(*node, *slices)?,
            Op::TakeBack { most } => self.take_back(*most)?,
        }
        self.compare()
    }

    fn reserve(&mut self, frame: u32, frames: u32) {
        let end = (frame + frames).min(if frame < 4 { 4 } else { 6 }) * FRAME_SLICES;
        let last = (frame * FRAME_SLICES..end).rev().find(|at| exists(*at)).expect("a frame has a slice");
        let extent = Extent { start: SliceIdx(frame * FRAME_SLICES), slices: last + 1 - frame * FRAME_SLICES };
        let can = extent.each().all(|at| self.model.states[at.0 as usize] == SliceState::Hole);
        assert_eq!(self.pool.reserve(extent).is_ok(), can, "{extent}");
        if can {
            extent.each().for_each(|at| self.model.set(at.0, SliceState::Free(Content::Dirty), None));
        }
    }

    fn allocate(&mut self, id: u64, dom: u32, mix: bool, parts: &[(u32, u32, u8)]) -> Result<(), TestCaseError> {
        let mode = if mix { Mode::Mix } else { Mode::Slices };
        let mut at = 0;
        let parts = parts.iter().map(|(gap, slices, node)| {
            // The part is aligned and whole, aligned, or neither.
            let start = if *gap < 2 { at / FRAME_SLICES * FRAME_SLICES + FRAME_SLICES } else { at + gap };
            let slices = if *gap == 0 { slices.div_ceil(FRAME_SLICES) * FRAME_SLICES } else { *slices };
            at = start + slices;
            Part { guest: GuestIdx(start), slices, node: NodeIdx(*node) }
        });
        let request = Request { vm: vm(id), domain: domain(dom), mode, parts: parts.collect() };
        let got = self.pool.allocate(&request);
        let is_refused = self.model.vms.contains_key(&id) || self.model.vms.len() == VMS as usize;
        let given = if is_refused { None } else { self.model.give(id, &request, dom) };
        let (Some((slices, whole)), Ok(grant)) = (&given, &got) else {
            prop_assert!(given.is_none() && got.is_err(), "{request:?}: {got:?}, the model has {given:?}");
            return Ok(());
        };
        let of = |extent: Extent| extent.each().map(|at| at.0);
        let chosen: Vec<u32> = grant.segments.iter().flat_map(|segment| of(segment.extent)).collect();
        prop_assert_eq!(chosen.len(), slices.len(), "twice");
        prop_assert_eq!(&chosen.into_iter().collect::<BTreeSet<_>>(), slices);
        let slice_of = |guest: u32| {
            let of = |segment: &&Segment| (segment.guest.0..segment.guest.0 + segment.extent.slices).contains(&guest);
            grant.segments.iter().find(of).map(|segment| segment.extent.start.0 + guest - segment.guest.0)
        };
        for part in &request.parts {
            let mut has = (part.guest.0..part.guest.0 + part.slices).map(slice_of);
            let node = if part.node.0 == 0 { 0..SECOND } else { SECOND..ALL };
            prop_assert!(has.all(|at| at.is_some_and(|at| node.contains(&at))));
        }
        for frame in whole {
            let guest = self.pool.owner_of(SliceIdx(frame * FRAME_SLICES)).expect("owned").1.0;
            prop_assert_eq!(guest % FRAME_SLICES, 0);
            prop_assert!((0..FRAME_SLICES).all(|at| slice_of(guest + at) == Some(frame * FRAME_SLICES + at)));
        }
        for at in slices {
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
        // The VM could write to all of these files.
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

    /// Zeroes up to `most` slices; sometimes stops halfway, returns the slices, or fails.
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
                _ => SliceState::Free(Content::Zeroed),
            };
            slices().for_each(|at| self.model.set(at, to, None));
            match fate {
                5 => self.working.push(dirty),
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
                let (vm, guest) = self.pool.owner_of(SliceIdx(at)).expect("an owner");
                prop_assert_eq!(Some(vm.0.get() - 1), owner);
                (Hit::Owned { vm, guest }, SliceState::MceUsed)
            }
            state @ (SliceState::Mce | SliceState::MceUsed) => (Hit::Known, state),
            state => (Hit::NotOurs, state),
        };
        prop_assert_eq!(hit, Ok(want));
        self.model.set(at, to, owner);
        Ok(())
    }

    fn lend(&mut self, node: u8, slices: u32) -> Result<(), TestCaseError> {
        let lent = self.pool.lend(NodeIdx(node), slices);
        let lent: Vec<u32> = lent.into_iter().flat_map(|extent| extent.each().map(|at| at.0)).collect();
        prop_assert!(lent.len() <= slices as usize);
        let of = |model: &Model, at: u32| {
            let state = model.states[at as usize];
            let is_idle = state == SliceState::Free(Content::Dirty) || state.is_ready();
            is_idle && model.domain(at).is_none()
        };
        let could = (0..ALL).filter(|at| (*at >= SECOND) == (node == 1) && of(&self.model, *at)).count();
        prop_assert_eq!(lent.len(), could.min(slices as usize));
        for at in lent {
            prop_assert!(of(&self.model, at));
            self.model.set(at, SliceState::Borrow, None);
        }
        Ok(())
    }

    fn take_back(&mut self, most: u32) -> Result<(), TestCaseError> {
        let is_lent = |at: &u32| self.model.states[*at as usize] == SliceState::Borrow;
        let Some(start) = (0..ALL).find(is_lent) else { return Ok(()) };
        let run = (start..if start < SECOND { SECOND } else { ALL }).take(most as usize).take_while(is_lent);
        let extent = Extent { start: SliceIdx(start), slices: run.count() as u32 };
        prop_assert_eq!(self.pool.take_back(extent), Ok(()));
        extent.each().for_each(|at| self.model.set(at.0, SliceState::Free(Content::Dirty), None));
        Ok(())
    }

    fn compare(&self) -> Result<(), TestCaseError> {
        prop_assert_eq!(self.pool.validate(), Ok(()));
        for at in 0..6 * FRAME_SLICES {
            prop_assert_eq!(self.pool.state(SliceIdx(at)), self.model.states[at as usize], "slice {}", at);
            let owner = self.pool.owner_of(SliceIdx(at)).map(|(vm, ..)| vm.0.get() - 1);
            prop_assert_eq!(owner, self.model.owners[at as usize], "slice {}", at);
        }
        for node in 0..2u8 {
            let stats = self.pool.stats(NodeIdx(node)).expect("a node");
            let sum = stats.used + stats.ready + stats.dirty + stats.zeroing + stats.lent + stats.holes;
            prop_assert_eq!(sum + stats.mce + stats.mce_used, NODES[usize::from(node)].slices);
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
            pair.apply(&Op::Reserve { frame, frames: if frame == 0 { 3 } else { 2 } })?;
            pair.apply(&Op::Zero { most: u32::MAX, fate: 0 })?;
        }
        for op in &ops {
            pair.apply(op)?;
        }
        // A state that is opened again is equal, except for the slices that a worker was zeroing.
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

fn ready(frames: u32) -> Pool<Vec<u64>> {
    let slices = frames * FRAME_SLICES;
    let layout = Layout::new(&[NodeSpec { numa: 0, slices }], FRAME_SLICES, 64).expect("a layout");
    let mut pool = Pool::create(vec![0; layout.words()], &layout).expect("a pool");
    pool.reserve(Extent { start: SliceIdx(0), slices }).expect("reserve");
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
    Request { vm: vm(id), domain: domain(0), mode, parts }
}

fn extents(pool: &mut Pool<Vec<u64>>, request: &Request) -> Vec<(u32, u32)> {
    let grant = pool.allocate(request).expect("there is room");
    grant.segments.iter().map(|segment| (segment.extent.start.0, segment.extent.slices)).collect()
}

#[test]
fn a_request_of_3_5_gib_takes_3_from_the_front_and_a_half_from_the_back() {
    let mut pool = ready(8);
    assert_eq!(extents(&mut pool, &request(0, Mode::Mix, 7 * 256)), [(0, 1536), (4096 - 256, 256)]);
    // The second VM's half is in the rest of the frame that the first VM has begun.
    assert_eq!(extents(&mut pool, &request(1, Mode::Mix, 7 * 256)), [(1536, 1536), (4096 - 512, 256)]);
    assert_eq!(pool.stats(NodeIdx(0)).expect("node").ready_frames, 1);
}

#[test]
fn where_only_2_whole_gib_are_left_the_rest_of_3_5_is_slices() {
    let mut pool = ready(6);
    let half = |id| request(id, Mode::Slices, 256);
    // Six VMs of half a GiB come, and every second one goes: three frames stay in parts.
    (0..6).for_each(|id| drop(extents(&mut pool, &half(id))));
    [0, 2, 4].into_iter().for_each(|id| drop(pool.release(vm(id)).expect("release")));
    pool.allocate(&request(9, Mode::Mix, 512)).expect("one whole GiB");
    zero_all(&mut pool);
    // Left: frames 1 and 2 whole, and 3 halves.
    let got = extents(&mut pool, &request(7, Mode::Mix, 7 * 256));
    let (whole, slices): (Vec<_>, Vec<_>) = got.into_iter().partition(|(_, slices)| *slices == 1024);
    assert_eq!(whole, [(512, 1024)]);
    assert_eq!(slices.iter().map(|(_, slices)| slices).sum::<u32>(), 768);
}

#[test]
fn what_a_vm_could_write_beside_its_slices_is_zeroed_before_another_one_gets_it() {
    let mut pool = ready(1);
    // A brick of the second VM's domain, in which the VM has one slice.
    pool.allocate(&request(0, Mode::Slices, 1)).expect("one");
    pool.release(vm(0)).expect("release");
    let stats = pool.stats(NodeIdx(0)).expect("a node");
    let brick = pool.layout().brick_slices();
    assert_eq!((stats.dirty, stats.ready), (brick, 512 - brick), "it had the whole file");
    // A worker has zeroed a slice, and then a VM with another slice of the file writes to it.
    let most = pool_dirty(&mut pool, brick - 2);
    pool.clean(most);
    let first = pool_dirty(&mut pool, 1);
    pool.allocate(&request(1, Mode::Slices, 1)).expect("one");
    pool.release(vm(1)).expect("release");
    pool.clean(first);
    let stats = pool.stats(NodeIdx(0)).expect("a node");
    assert_eq!((stats.dirty, stats.ready, stats.zeroing), (brick, 512 - brick, 0), "what the worker did is void");
}

fn pool_dirty(pool: &mut Pool<Vec<u64>>, most: u32) -> ballast_pool::map::Zeroed {
    pool.next_dirty(most).expect("dirty").zero(|_| Ok::<_, ()>(())).expect("zeroed")
}

#[test]
fn a_worker_of_a_pool_that_was_opened_again_has_no_slices() {
    let mut pool = ready(1);
    pool.allocate(&request(0, Mode::Slices, 512)).expect("all of it");
    pool.release(vm(0)).expect("release");
    let old = pool.next_dirty(512).expect("dirty").zero(|_| Ok::<_, ()>(())).expect("zeroed");
    let mut pool = Pool::open(pool.into_words()).expect("open").0;
    // Zeroed by another worker, written by a VM, and being zeroed again: the first worker's result does not count.
    zero_all(&mut pool);
    pool.allocate(&request(1, Mode::Slices, 512)).expect("all of it");
    pool.release(vm(1)).expect("release");
    let _working = pool.next_dirty(512).expect("dirty");
    pool.clean(old);
    assert!(pool.allocate(&request(2, Mode::Slices, 1)).is_err(), "a slice was handed out that a VM has written");
}

#[test]
fn a_file_has_slices_of_one_trust_domain_alone() {
    let mut pool = ready(2);
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
    let mut pool = ready(1);
    pool.allocate(&request(0, Mode::Mix, 512)).expect("all of it");
    let hit = Hit::Owned { vm: vm(0), guest: GuestIdx(7) };
    assert_eq!(pool.poison(SliceIdx(7)), Ok(hit));
    assert_eq!(pool.poison(SliceIdx(7)), Ok(Hit::Known));
    pool.release(vm(0)).expect("release");
    zero_all(&mut pool);
    assert_eq!(pool.state(SliceIdx(7)), SliceState::Mce);
    let grant = pool.allocate(&request(1, Mode::Slices, 511)).expect("the rest");
    assert!(grant.segments.iter().all(|segment| !segment.extent.each().any(|at| at == SliceIdx(7))));
    assert!(pool.allocate(&request(2, Mode::Slices, 1)).is_err());
}
