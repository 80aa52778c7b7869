//! The pool of an engine, without huge pages: parts that cannot be opened or fail.

use super::*;

#[test]
fn a_part_that_cannot_be_opened_and_a_socket_that_cannot_be_made_are_tried_again_and_the_other_part_works() {
    let dir = tempfile::tempdir().expect("a directory");
    let at = |name: &str| dir.path().join(name);
    let place = Pooling { dir: at("pool"), socket: at("later/pool.sock"), gid: None };
    std::fs::create_dir_all(at("pool/gib")).expect("make");
    std::fs::write(at("pool/gib/state"), "no state").expect("write");
    let service = PoolService::new(Some(place.clone()));
    *service.lock() = State::Ours(Box::new(Parts::open(&place.dir).expect("one part is enough")));
    let mut listens = false;
    for _ in 0..2 {
        let missing = service.complete(&place, &mut listens);
        assert!(missing[0].contains("pages of 1 GiB cannot be used: the state of the pool"), "{missing:?}");
        assert!(missing[1].contains("Listening on") && !listens, "{missing:?}");
    }
    let stat = service.stat();
    assert!(stat.notes.iter().any(|note| note.contains("Listening on")), "{stat:?}");
    assert!(stat.gib.is_some_and(|gib| gib.notes[0].contains("cannot be used")));
    let mut lend = LendRequest { when_short: true, ..LendRequest::default() };
    let said = |lend: &LendRequest| service.lend(lend).expect_err("there is nothing to lend");
    assert!(said(&lend).contains("nothing is reserved"), "the other part does not work");
    lend.pages = PoolPages::Gib;
    assert!(said(&lend).contains("cannot be used"));
    std::fs::remove_file(at("pool/gib/state")).expect("remove");
    std::fs::create_dir(at("later")).expect("make");
    assert_eq!(service.complete(&place, &mut listens), Vec::<String>::new());
    assert!(at("later/pool.sock").exists());
    assert!(listens && service.stat().notes.is_empty() && said(&lend).contains("nothing is reserved"));
}

#[test]
fn a_part_that_fails_keeps_neither_the_other_part_nor_what_is_to_be_zeroed() {
    let dir = tempfile::tempdir().expect("a directory");
    let place = Pooling { dir: dir.path().join("pool"), socket: dir.path().join("pool.sock"), gid: None };
    let service = PoolService::new(Some(place.clone()));
    *service.lock() = State::Ours(Box::new(Parts::open(&place.dir).expect("open")));
    for file in ["pool/lending.json", "pool/gib/lending.json", "pool/base/lending.json"] {
        std::fs::write(dir.path().join(file), "no limits").expect("write");
    }
    let long_ago = Instant::now().checked_sub(AGAIN_EVERY).expect("the host is up");
    let (mut looked, mut again, mut lenders) = (None, long_ago, Page::ALL.map(|_| Lender::default()));
    let mut round = |lenders: &mut [Lender; 3]| {
        let said = service.round(&mut looked, &mut again, None, lenders, &Events::default());
        assert!(looked.is_some() && again > long_ago, "it did not come to what is to be zeroed");
        said
    };
    let said = round(&mut lenders).expect_err("it is damaged").to_string();
    assert!(said.contains("what may be lent"), "{said}");
    let State::Ours(parts) = &mut *service.lock() else { panic!("it is ours") };
    for (page, reserve) in parts.each() {
        let done = lenders[page as usize].adjust(reserve, 0);
        assert!(matches!(done, Ok(None)), "the part of {page} was not tried: it would be now");
    }
}
