//! Tests of the allocator.

use ballast_sys::lock::Lock;

use super::*;

#[test]
fn slabs_are_punched_in_runs_of_neighbours() {
    assert_eq!(runs(&[0, 1, 2, 5, 7, 8]).collect::<Vec<_>>(), [0..3, 5..6, 7..9]);
    assert_eq!(runs(&[]).count(), 0);
}

#[test]
fn slabs_emptied_by_a_sweep_stay_charged_until_they_are_punched() {
    let arena = Arena::create(&crate::arena::RAM, 8).expect("an arena");
    let allocator = Allocator::new(arena, Budget::new(Bytes(64 << 20)), 8);
    let per_slab = allocator.capacity(0);
    let places: Vec<Place> = (0..3 * per_slab).map(|_| allocator.alloc(0).expect("room").place).collect();
    let kept = places[per_slab];
    let swept = allocator.recover([kept].into_iter());
    assert_eq!((swept.kept_blobs, swept.freed_slabs), (1, 2));
    assert_eq!((allocator.arena.held(), allocator.resync()), (3, 3));
    allocator.settle(0);
    assert_eq!((allocator.arena.held(), allocator.validate()), (1, Ok(1)));
    assert!(allocator.occupied(kept).is_some());
    let swept = allocator.recover(std::iter::empty());
    allocator.settle(0);
    assert_eq!((swept.freed_slabs, allocator.arena.held()), (1, 0));
    assert_eq!(allocator.validate(), Ok(0));
}

#[test]
fn a_slab_that_often_becomes_full_is_listed_only_while_the_hint_is_another() {
    let arena = Arena::create(&crate::arena::RAM, 8).expect("an arena");
    let allocator = Allocator::new(arena, Budget::new(Bytes(64 << 20)), 8);
    let alloc = || allocator.alloc(0).expect("room").place;
    let listed = || allocator.with_room[0].locked().len();
    let first: Vec<Place> = (0..allocator.capacity(0)).map(|_| alloc()).collect();
    for _ in 0..1000 {
        assert!(allocator.free(first[0]));
        assert_eq!((listed(), alloc()), (0, first[0]));
    }
    assert_ne!(alloc().slab, first[0].slab);
    assert!(allocator.free(first[1]) && allocator.free(first[2]));
    assert_eq!(listed(), 1);
}
