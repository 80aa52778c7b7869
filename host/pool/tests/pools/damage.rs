//! Any words: opening them gives a valid pool, or an error that names the problem and its place.

use std::num::{NonZeroU32, NonZeroU64};

use ballast_pool::map::{
    Damage, Domain, Extent, FRAME_SLICES, GuestIdx, Layout, Mode, NodeIdx, NodeSpec, Part, Pool, Request, SliceIdx,
    VmId,
};
use proptest::prelude::*;

const NODES: [NodeSpec; 2] = [NodeSpec { numa: 0, slices: 1024 }, NodeSpec { numa: 1, slices: 200 }];
/// Where the states begin and end, in bytes: a test of `layout` checks the first.
const STATES: std::ops::Range<usize> = 32 * 8..32 * 8 + 3 * FRAME_SLICES as usize;

fn vm(id: u64) -> VmId {
    VmId(NonZeroU64::new(id).expect("not zero"))
}

fn request(id: u64, mode: Mode, slices: u32) -> Request {
    let parts = vec![Part { guest: GuestIdx(0), slices, node: NodeIdx(0) }];
    Request { vm: vm(id), domain: Domain(NonZeroU32::MIN), mode, parts }
}

/// The words of a pool that has slices in all states.
fn lived_in() -> Vec<u64> {
    let layout = Layout::new(&NODES, 64, 8).expect("a layout");
    let mut pool = Pool::create(vec![0; layout.words()], &layout).expect("a pool");
    pool.reserve(Extent { start: SliceIdx(0), slices: 1024 }).expect("reserve");
    pool.reserve(Extent { start: SliceIdx(1024), slices: 150 }).expect("reserve");
    while let Some(dirty) = pool.next_dirty(u32::MAX) {
        pool.clean(dirty.zero(|_| Ok::<_, ()>(())).expect("zeroed"));
    }
    pool.allocate(&request(1, Mode::Mix, 600)).expect("room");
    pool.allocate(&request(2, Mode::Slices, 30)).expect("room");
    pool.allocate(&request(3, Mode::Slices, 100)).expect("room");
    pool.release(vm(2)).expect("release");
    pool.poison(SliceIdx(3)).expect("a slice");
    pool.lend(NodeIdx(1), 20);
    pool.into_words()
}

fn open_and_use(words: Vec<u64>) -> Result<(), Damage> {
    let (mut pool, _) = Pool::open(words)?;
    pool.validate().expect("what opens is valid");
    for id in 1..6 {
        let _ = pool.release(vm(id));
        let _ = pool.allocate(&request(id, Mode::Mix, 100));
    }
    while let Some(dirty) = pool.next_dirty(u32::MAX) {
        pool.clean(dirty.zero(|_| Ok::<_, ()>(())).expect("zeroed"));
    }
    for node in 0..3 {
        pool.lend(NodeIdx(node), 10);
        let _ = pool.stats(NodeIdx(node));
    }
    let _ = pool.poison(SliceIdx(17));
    pool.validate().expect("what was used is valid");
    Ok(())
}

#[test]
fn a_pool_that_was_not_damaged_opens() {
    assert_eq!(open_and_use(lived_in()), Ok(()));
}

#[test]
fn every_wrong_state_byte_of_up_to_three_bits_is_found_and_named() {
    let words = lived_in();
    for at in STATES {
        for bits in [0x01u8, 0x80, 0x18, 0x42, 0x07, 0x91] {
            let mut words = words.clone();
            words[at / 8] ^= u64::from(bits) << (at % 8 * 8);
            match Pool::open(words).map(drop) {
                Err(Damage::State { at: named, .. }) => assert_eq!(named.0 as usize, at - STATES.start),
                other => panic!("byte {at}: {other:?}"),
            }
        }
    }
}

#[test]
fn a_page_of_the_state_that_became_zeros_is_refused() {
    let words = lived_in();
    let mut refused = 0;
    for start in (0..words.len()).step_by(64) {
        let mut words = words.clone();
        let is_empty = words[start..].iter().take(64).all(|word| *word == 0);
        words[start..].iter_mut().take(64).for_each(|word| *word = 0);
        let opened = Pool::open(words).map(drop);
        assert!(opened.is_err() || is_empty, "zeros from word {start} on were taken for a pool");
        refused += u32::from(opened.is_err());
    }
    assert!(refused > 3, "only {refused} places");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn no_damage_makes_it_panic(
        damage in proptest::collection::vec((any::<prop::sample::Index>(), any::<u64>(), 0u8..4), 1..6),
        header in any::<bool>(), cut in proptest::option::of(any::<prop::sample::Index>()),
    ) {
        let mut words = lived_in();
        // Most of the words are entries that were never used.
        let used = words.iter().rposition(|word| *word != 0).expect("a header") + 8;
        for (at, value, how) in damage {
            let at = at.index(if header { 24 } else { used });
            words[at] = match how {
                0 => value,
                1 => words[at] ^ 1 << (value % 64),
                2 => words[at] ^ ((value & 0xFF) << ((value >> 8) % 57)),
                _ => value % 2048,
            };
        }
        if let Some(cut) = cut {
            words.truncate(cut.index(words.len()));
        }
        if let Err(error) = open_and_use(words) {
            let said = error.to_string();
            prop_assert!(said.contains("pool: ") && said.len() > 30, "{}", said);
        }
    }
}
