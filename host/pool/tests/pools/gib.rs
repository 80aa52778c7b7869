//! A pool of real pages of 1 GiB: they are reserved, handed out, zeroed, lent and kept from others like pages of 2 MiB.
//! Needs a kernel that finds two such pages now; `scripts/newer-kernel-suite.sh` runs it where there is one.

use crate::common;

use std::os::fd::AsFd;
use std::sync::atomic::Ordering;

use ballast_base::pool::Nodes;
use ballast_base::{Bytes, GIB, HUGE_SIZE, MIB, PAGE_SIZE};
use ballast_pool::map::Mode;
use ballast_pool::{Page, Reserve};
use ballast_sys::hugetlb::{self, Presence};
use ballast_sys::{Mapping, memfd};

use common::{Place, SECRET, grant, hold_in_pipe, map, settle, sum, zero_all};

/// A pool of two pages in files of one, of the first node.
fn pool(place: &Place) -> Option<Reserve> {
    place.pool(2 << 10, 1 << 10)
}

/// Writes a secret into each line of 64 bytes, and returns how many were not zero.
fn search_and_mark(map: &Mapping) -> usize {
    let mut found = 0;
    for page in (0..map.len()).step_by(PAGE_SIZE) {
        for word in map.words(page, PAGE_SIZE / 8).iter().step_by(8) {
            found += usize::from(word.swap(SECRET, Ordering::Relaxed) != 0);
        }
    }
    found
}

fn refused(reserve: &mut Reserve, bytes: u64) -> String {
    reserve.grant("refused", Bytes(bytes), Mode::Slices, &Nodes::Any).expect_err("it is refused").to_string()
}

#[test]
fn pages_of_a_gib_are_handed_out_kept_while_anybody_has_them_and_come_back_zeroed_also_to_the_next_owner() {
    let Some(place) = Place::of(Page::Gib) else { return };
    let Some(mut reserve) = pool(&place) else { return };
    assert_eq!((place.pages(), sum(&reserve, |node| node.ready)), (2, 2 * GIB));
    assert_eq!(sum(&reserve, |node| node.ready_aligned), 2 * GIB);
    assert!(refused(&mut reserve, 1536 * MIB).contains("1.5 GiB is no multiple of 1 GiB"));
    assert!(refused(&mut reserve, 4 * GIB).contains("a slice is 1 GiB"));

    // One VM fills its page with secrets; part of it stays in a pipe, and its mapping outlives an owner of the pool.
    let spy = grant(&mut reserve, "spy", 1 << 10);
    assert_eq!((spy.extents.len(), spy.extents[0].len), (1, Bytes(GIB)));
    let ram = map(&spy);
    assert!(ram.addr().is_multiple_of(GIB as usize));
    assert_eq!(search_and_mark(&ram), 0);
    let (reader, writer) = hold_in_pipe(&ram, GIB as usize / 2);
    drop((reserve, spy));
    let mut reserve = place.open();
    reserve.validate().expect("valid");
    assert_eq!((reserve.overview().tenants[0].name.as_str(), reserve.tend().expect("tend")), ("spy", 0));
    assert!(refused(&mut reserve, 2 * GIB).contains("1 are ready"));
    drop(ram);
    assert_eq!(reserve.tend().expect("tend"), 1);
    zero_all(&mut reserve);

    // The pipe keeps its page from everybody. The other page goes to the next VM, without the secret.
    assert_eq!((sum(&reserve, |node| node.ready), reserve.overview().waiting), (GIB, Bytes(GIB)));
    let victim = grant(&mut reserve, "victim", 1 << 10);
    assert_eq!(search_and_mark(&map(&victim)), 0, "somebody else's memory");
    let mut seen = [0; PAGE_SIZE];
    assert_eq!(rustix::io::read(&reader, &mut seen).expect("read"), PAGE_SIZE);
    assert_eq!(u64::from_ne_bytes(seen[..8].try_into().expect("eight")), SECRET, "the spy sees its own page");
    drop((reader, writer, victim));
    assert_eq!(reserve.tend().expect("tend"), 1);
    settle(&mut reserve);
    assert_eq!((sum(&reserve, |node| node.ready), reserve.overview().waiting), (2 * GIB, Bytes(0)));
    reserve.validate().expect("valid");
    let next = grant(&mut reserve, "next", 2 << 10);
    assert_eq!((next.files.len(), search_and_mark(&map(&next))), (2, 0));
    assert_eq!(place.pages(), 2, "no page was lost, and none is too many");
}

#[test]
fn a_page_of_a_gib_and_a_hole_are_told_apart_by_any_byte_of_it() {
    let Some(place) = Place::of(Page::Gib) else { return };
    let Some(mut reserve) = pool(&place) else { return };
    let held = grant(&mut reserve, "vm", 2 << 10);
    let places: Vec<_> =
        held.extents.iter().map(|at| (held.files[usize::from(at.file)].as_fd(), at.offset.0)).collect();
    let presence = |page: usize| {
        let pieces: Vec<_> = places.iter().map(|(file, offset)| (file, *offset, GIB as usize)).collect();
        Presence::new(Mapping::shared_pieces(&pieces).expect("map"), page)
    };
    let presence = match presence(GIB as usize) {
        Ok(presence) => presence,
        Err(why) => return ballast_testkit::skip("uffd", why),
    };
    let at = |offset: u64| presence.place(offset as usize).expect("ask");
    assert_eq!([at(0), at(HUGE_SIZE as u64), at(GIB)], [hugetlb::Place::Page; 3]);
    memfd::punch(places[1].0, places[1].1, GIB).expect("punch");
    assert_eq!([at(GIB - 1), at(GIB), at(2 * GIB - 1)].map(|place| place == hugetlb::Place::Hole), [false, true, true]);
}
