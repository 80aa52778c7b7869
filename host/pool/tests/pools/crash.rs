//! A writer that dies between two stores leaves a state that opens, from before the operation or from after it.
//!
//! The words record each store. For each number of stores, the test makes the state of a writer that ended there.

use std::cell::RefCell;
use std::io;
use std::num::{NonZeroU32, NonZeroU64};
use std::ops::Range;
use std::rc::Rc;

use ballast_pool::map::{
    Content, Domain, Extent, FRAME_SLICES, GuestIdx, Layout, Mode, NodeIdx, NodeSpec, Part, Pool, Request, Segment,
    SliceIdx, SliceState, VmId, Words,
};
use proptest::prelude::*;

/// Each store: the word's index, and its value.
type Stores = Rc<RefCell<Vec<(usize, u64)>>>;

/// Words that record their stores, and that must not be touched where they have no memory.
#[derive(Clone, Debug)]
struct Recorder {
    words: Vec<u64>,
    has_memory: Vec<bool>,
    stores: Stores,
}

impl Recorder {
    fn new(layout: &Layout) -> Self {
        let words = vec![0; layout.words()];
        let mut new = Self { has_memory: vec![false; words.len()], words, stores: Rc::default() };
        new.back(layout.used_when_new()).expect("there is memory");
        new
    }
}

impl Words for Recorder {
    fn count(&self) -> usize {
        self.words.len()
    }
    fn load(&self, at: usize) -> u64 {
        assert!(self.has_memory[at], "word {at} is read and has no memory");
        self.words[at]
    }
    fn store(&mut self, at: usize, value: u64) {
        assert!(self.has_memory[at], "word {at} is written and has no memory");
        self.words[at] = value;
        self.stores.borrow_mut().push((at, value));
    }
    fn back(&mut self, words: Range<usize>) -> io::Result<()> {
        self.has_memory[words].fill(true);
        Ok(())
    }
}

const NODES: [NodeSpec; 2] = [NodeSpec { numa: 0, slices: 1024 }, NodeSpec { numa: 1, slices: 200 }];
const SLICES: u32 = 3 * FRAME_SLICES;

fn vm(id: u64) -> VmId {
    VmId(NonZeroU64::new(id + 1).expect("not zero"))
}

fn request(id: u64, domain: u32, mode: Mode, slices: u32, second: u32) -> Request {
    let domain = Domain(NonZeroU32::new(domain + 1).expect("not zero"));
    let mut parts = vec![Part { guest: GuestIdx(0), slices, node: NodeIdx(0) }];
    parts.extend((second > 0).then_some(Part { guest: GuestIdx(2048), slices: second, node: NodeIdx(1) }));
    Request { vm: vm(id), domain, mode, parts }
}

/// The visible state of a pool: its slices, and each VM's memory.
#[derive(Clone, Debug, PartialEq)]
struct Seen {
    slices: Vec<(SliceState, Option<Domain>)>,
    vms: Vec<(VmId, Vec<Segment>)>,
}

fn see<W: Words>(pool: &Pool<W>) -> Seen {
    let state = |at: SliceIdx| match pool.state(at) {
        // A slice that a worker was zeroing is dirty when the state is opened again.
        SliceState::Free(Content::Zeroing) => SliceState::Free(Content::Dirty),
        state => state,
    };
    let slices = (0..SLICES).map(SliceIdx).map(|at| (state(at), pool.domain(at))).collect();
    let vms = pool.tenants().map(|tenant| (tenant.vm, pool.segments(tenant.vm).expect("a VM"))).collect();
    Seen { slices, vms }
}

/// Runs an operation, then ends the writer after each of its stores; `step` leaves some of them out.
fn die_everywhere(pool: &mut Pool<Recorder>, step: usize, work: impl FnOnce(&mut Pool<Recorder>)) {
    let before = see(pool);
    let (mut image, stores) = taken(pool);
    work(pool);
    let after = see(pool);
    pool.validate().expect("valid");
    for (at, (word, value)) in stores.take().into_iter().enumerate() {
        if at % step == 0 {
            let (found, _) = Pool::open(image.clone()).unwrap_or_else(|error| panic!("after {at} stores: {error}"));
            found.validate().unwrap_or_else(|error| panic!("after {at} stores: {error}"));
            check(&before, &after, &see(&found), at);
        }
        image[word] = value;
    }
    let (found, redone) = Pool::open(image).expect("open");
    assert!(!redone && see(&found) == after);
}

/// The words of the pool now, and the list of its stores from now on.
fn taken(pool: &mut Pool<Recorder>) -> (Vec<u64>, Stores) {
    let layout = Layout::new(&NODES, 64, 8).expect("a layout");
    let held = std::mem::replace(pool, Pool::create(Recorder::new(&layout), &layout).expect("a pool"));
    let words = held.into_words();
    words.stores.borrow_mut().clear();
    let (image, stores) = (words.words.clone(), words.stores.clone());
    // The pool is opened again, so the slices of a worker stay with the worker.
    *pool = reopened(words);
    stores.borrow_mut().clear();
    (image, stores)
}

fn reopened(words: Recorder) -> Pool<Recorder> {
    Pool::open(words).expect("open").0
}

/// VMs come and go as a whole. Slices may be lent, taken back or zeroed one by one. Nothing else may change.
fn check(before: &Seen, after: &Seen, found: &Seen, at: usize) {
    let is_old = found.vms == before.vms;
    assert!(is_old || found.vms == after.vms, "after {at} stores a VM is neither old nor new");
    for (slice, found) in found.slices.iter().enumerate() {
        let (old, new) = (before.slices[slice], after.slices[slice]);
        assert!(*found == old || *found == new, "after {at} stores slice {slice} is {found:?}: {old:?}, {new:?}");
        if before.vms != after.vms {
            assert_eq!(*found, if is_old { old } else { new }, "after {at} stores slice {slice} is not its VM's");
        }
        if old.0.is_owned() {
            assert!(!found.0.is_ready(), "after {at} stores slice {slice} could be handed out dirty");
        }
    }
}

fn empty() -> Pool<Recorder> {
    let layout = Layout::new(&NODES, 64, 8).expect("a layout");
    Pool::create(Recorder::new(&layout), &layout).expect("a pool")
}

fn zero_all(pool: &mut Pool<Recorder>) {
    while let Some(dirty) = pool.next_dirty(u32::MAX) {
        pool.clean(dirty.zero(|_| Ok::<_, ()>(())).expect("zeroed"));
    }
}

const FIRST: Extent = Extent { start: SliceIdx(0), slices: 1024 };
const SECOND: Extent = Extent { start: SliceIdx(1024), slices: 200 };

#[test]
fn a_writer_may_die_after_any_single_store_of_a_life() {
    let mut pool = empty();
    die_everywhere(&mut pool, 1, |pool| pool.reserve(FIRST).expect("reserve"));
    die_everywhere(&mut pool, 1, |pool| pool.reserve(SECOND).expect("reserve"));
    die_everywhere(&mut pool, 1, zero_all);
    let allocate = |request: Request| move |pool: &mut Pool<Recorder>| drop(pool.allocate(&request).expect("room"));
    // The third VM is of another trust domain.
    die_everywhere(&mut pool, 1, allocate(request(0, 0, Mode::Mix, 512 + 40, 10)));
    die_everywhere(&mut pool, 1, allocate(request(1, 0, Mode::Slices, 3, 0)));
    die_everywhere(&mut pool, 1, allocate(request(2, 1, Mode::Slices, 70, 100)));
    die_everywhere(&mut pool, 1, |pool| assert!(pool.poison(SliceIdx(5)).is_ok()));
    die_everywhere(&mut pool, 1, |pool| assert!(pool.poison(SliceIdx(1024)).is_ok()));
    die_everywhere(&mut pool, 1, |pool| assert_eq!(pool.lend(NodeIdx(0), 50).len(), 1));
    die_everywhere(&mut pool, 1, |pool| drop(pool.release(vm(1)).expect("release")));
    die_everywhere(&mut pool, 1, |pool| drop(pool.release(vm(0)).expect("release")));
    die_everywhere(&mut pool, 1, zero_all);
    die_everywhere(&mut pool, 1, allocate(request(0, 0, Mode::Slices, 300, 0)));
    let lent = (0..SLICES).map(SliceIdx).find(|at| pool.state(*at) == SliceState::Borrow).expect("lent");
    die_everywhere(&mut pool, 1, |pool| {
        pool.take_back(Extent { start: lent, slices: 25 }).expect("take back");
    });
    die_everywhere(&mut pool, 1, |pool| drop(pool.release(vm(2)).expect("release")));
}

#[test]
fn a_new_pool_is_one_or_is_none_after_any_store() {
    let stores = empty().into_words().stores.take();
    let layout = Layout::new(&NODES, 64, 8).expect("a layout");
    let mut image = vec![0; layout.words()];
    for (word, value) in stores {
        assert!(Pool::open(image.clone()).is_err(), "it is not whole yet");
        image[word] = value;
    }
    Pool::open(image).expect("open").0.validate().expect("valid");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn a_writer_may_die_anywhere_in_any_history(
        ops in proptest::collection::vec((0u8..6, 0u64..5, 0u32..2, any::<bool>(), 1u32..700, 0u32..80), 1..16),
        step in 7usize..40,
    ) {
        let mut pool = empty();
        pool.reserve(FIRST).expect("reserve");
        pool.reserve(SECOND).expect("reserve");
        zero_all(&mut pool);
        for (op, id, domain, mix, slices, second) in ops {
            die_everywhere(&mut pool, step, |pool| match op {
                0 | 1 => {
                    let mode = if mix { Mode::Mix } else { Mode::Slices };
                    drop(pool.allocate(&request(id, domain, mode, slices, second)));
                }
                2 => drop(pool.release(vm(id))),
                3 => zero_all(pool),
                4 => drop(pool.lend(NodeIdx(0), second)),
                _ => drop(pool.poison(SliceIdx(slices))),
            });
        }
    }
}
