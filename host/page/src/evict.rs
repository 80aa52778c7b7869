//! Evict: quarantine, copy out, commit, punch.
//!
//! Before: `reclaim` picked runs of pages that look cold. After: the host has the memory, and the words say Far or
//! Zero; or the guest touched a page first, and it stays.
//! Threads: reclaim workers. Waits for the store, never for a fault.
//! Promise: the copy is complete before the word says Far, the word says Far before the punch, and the punch is under
//! the page's lock (invariants 2 and 3). A fault waits for the punch of its run; in forced reclaim also for the copying
//! ([`LockedFrom::Copy`]).

use ballast_base::store::{IoContext, PageBytes, PageKey, PutOutcome, RegionKey, Store, is_zero};
use ballast_base::{PageIdx, PageRange};

use crate::copies::{Source, StoreOf, free_copies};
use crate::granule::Granule;
use crate::memory::{Backing, ReadOutcome};
use crate::page_state::{Cell, Locked, State, Ticket, Word};
use crate::punch::{Committed, Evicted, punch};

/// When a page is locked during its eviction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockedFrom {
    /// For its punch only: an earlier touch keeps the page in memory and does not wait.
    Punch,
    /// From before the copy on: the page is evicted in any case. A thread that touches it waits, and restores it.
    Copy,
}

/// The target of an eviction.
#[derive(Clone, Copy, Debug)]
pub struct To<'a> {
    /// The store's number in words.
    pub number: u8,
    /// The store.
    pub store: &'a dyn Store,
    /// Time stamp for the age byte of the words.
    pub since: u8,
}

impl StoreOf for To<'_> {
    fn store_of(&self, word: Word) -> Option<Source<'_>> {
        let source = Source { store: self.store, context: IoContext::BACKGROUND, watch: None };
        (word.store() == self.number).then_some(source)
    }
}

/// Changes Resident to Quarantine. Returns false if the page is in another state or locked.
///
/// The caller then zaps the page. From the acknowledgement of that zap on, an unchanged word means an unchanged page.
pub fn quarantine(cell: Cell<'_>, ticket: Ticket) -> bool {
    let word = cell.load();
    let free = word.state() == State::Resident && !word.is_locked();
    free && cell.swap(word, Word::quarantine(ticket, word.age()))
}

/// Makes the granules of `run` that are still in Quarantine under `ticket` Resident. Returns the number of pages. They
/// stay unmapped until a touch.
pub fn release<'a>(run: PageRange, ticket: Ticket, granule_of: impl Fn(PageIdx) -> Granule<'a>) -> u64 {
    let size = granule_of(run.start()).pages();
    let released = run.step_by(size).filter(|page| {
        let cell = granule_of(*page).cell();
        let word = cell.load();
        let resident = Word::new(State::Resident, word.age());
        word == Word::quarantine(ticket, word.age()) && cell.swap(word, resident)
    });
    released.count() as u64 * size
}

/// Evicts the granules of `run` that are still in Quarantine under `ticket`. They are read through `buffer`, as many
/// pages at a time as it holds (at least one). All locks of the run are held during the punch and, if `from` says so,
/// during the copying. Whatever fails, nothing is lost.
#[expect(clippy::too_many_arguments, reason = "each is one thing that an eviction needs")]
pub fn evict<'a>(
    region: RegionKey,
    run: PageRange,
    granule_of: impl Fn(PageIdx) -> Granule<'a>,
    ticket: Ticket,
    backing: &impl Backing,
    to: To<'_>,
    buffer: &mut [PageBytes],
    from: LockedFrom,
) -> Evicted {
    let mut result = Evicted::default();
    let mut claimed = claim(run, &granule_of, ticket, from);
    // Not earlier, because after the claim each new pin is seen. Before the read, because the copy must contain what a
    // device wrote before it unpinned the page.
    let pages: Vec<PageIdx> = claimed.iter().map(|claim| claim.page).collect();
    let mut held = backing.held(&pages).into_iter().peekable();
    claimed.retain_mut(|claim| {
        let stays = held.next_if_eq(&claim.page);
        if stays.is_some() && claim.give_back(granule_of(claim.page)) {
            result.held.push(claim.page);
        }
        stays.is_none()
    });
    let copied = copy_out(region, &claimed, &granule_of, backing, to, buffer, &mut result);
    // Committed together after the copying: a thread that touches a page of the run waits only for the punch.
    let mut committed = commit(region, claimed, &granule_of, copied, to, &mut result);
    punch(&mut committed, backing, &to, &mut result);
    result
}

/// Changes Quarantine to Evicting: the granules of `run` still in Quarantine under `ticket`. The other granules were
/// touched in quarantine, and their faults have booked the hits. From here on each touch is seen: it finds the lock, or
/// it changes the word and the commit fails.
fn claim<'a>(
    run: PageRange,
    granule_of: &impl Fn(PageIdx) -> Granule<'a>,
    ticket: Ticket,
    from: LockedFrom,
) -> Vec<Claim<'a>> {
    let size = granule_of(run.start()).pages();
    let mut claimed = Vec::with_capacity((run.count() / size) as usize);
    for page in run.step_by(size) {
        let cell = granule_of(page).cell();
        let word = cell.load();
        let evicting = word.in_state(State::Evicting);
        if word != Word::quarantine(ticket, word.age()) {
            continue;
        }
        match from {
            LockedFrom::Punch if cell.swap(word, evicting) => claimed.push(Claim { page, evicting, lock: None }),
            LockedFrom::Punch => {}
            LockedFrom::Copy => {
                let lock = cell.lock(word, evicting);
                claimed.extend(lock.map(|lock| Claim { page, evicting, lock: Some(lock) }));
            }
        }
    }
    claimed
}

/// Changes Evicting to Far or Zero, under the lock: the granules that were copied completely and were not touched. The
/// others keep their memory, and their copies are freed.
fn commit<'a>(
    region: RegionKey,
    claimed: Vec<Claim<'a>>,
    granule_of: &impl Fn(PageIdx) -> Granule<'a>,
    Copied { words: copies, all_zero, unreadable }: Copied,
    to: To<'_>,
    result: &mut Evicted,
) -> Vec<Committed<'a>> {
    let size = claimed.first().map_or(1, |claim| granule_of(claim.page).pages());
    let mut committed = Vec::with_capacity(claimed.len());
    for (index, mut claim) in claimed.into_iter().enumerate() {
        let page = claim.page;
        let (granule, key) = (granule_of(page), PageKey { region, page });
        let words = copies.chunks(size as usize).nth(index).unwrap_or_default();
        if words.len() < size as usize || unreadable[index] {
            free_copies(&to, key, words.iter().copied());
            result.refused += size * u64::from(claim.give_back(granule));
            continue;
        }
        let Claim { evicting, lock, .. } = claim;
        let gone = if all_zero[index] { Word::new(State::Zero, to.since) } else { words[0] };
        let lock = match lock {
            Some(mut lock) => {
                lock.publish(gone);
                Some(lock)
            }
            None => granule.cell().lock(evicting, gone),
        };
        if lock.is_none() || all_zero[index] {
            free_copies(&to, key, words.iter().copied());
        } else {
            granule.set_rest(&words[1..]);
        }
        match lock {
            Some(lock) => committed.push(Committed { key, granule, lock }),
            None => result.aborted += size,
        }
    }
    committed
}

struct Copied {
    /// New words of the granules' pages, in order; the last granule's may be incomplete.
    words: Vec<Word>,
    /// By granule: all zero.
    all_zero: Vec<bool>,
    /// By granule: its memory failed, and its words mean nothing.
    unreadable: Vec<bool>,
}

/// Copies the granules in `claimed` to the store, until it refuses one or a read fails, except for failed memory.
fn copy_out<'a>(
    region: RegionKey,
    claimed: &[Claim<'_>],
    granule_of: &impl Fn(PageIdx) -> Granule<'a>,
    backing: &impl Backing,
    to: To<'_>,
    buffer: &mut [PageBytes],
    result: &mut Evicted,
) -> Copied {
    let size = claimed.first().map_or(1, |claim| granule_of(claim.page).pages()) as usize;
    let mut copies: Vec<Word> = Vec::with_capacity(claimed.len() * size);
    let (mut all_zero, mut unreadable) = (vec![true; claimed.len()], vec![false; claimed.len()]);
    // Up to here pages are read one by one, because one of them cannot be read.
    let mut singly_until = 0;
    'granules: while let Some(Claim { page: first, evicting, lock }) = claimed.get(copies.len() / size) {
        let done = copies.len() % size;
        if done > 0 && lock.is_none() && granule_of(*first).cell().load() != *evicting {
            // It was touched and will not be committed, so the rest of the huge page need not be copied.
            copies.resize(copies.len() - done + size, Word::INITIAL);
            continue;
        }
        let granules = claimed[copies.len() / size..].iter().zip((first.0..).step_by(size));
        let adjacent = granules.take_while(|(claim, expected)| claim.page.0 == *expected).count() * size;
        let most = if copies.len() < singly_until { 1 } else { buffer.len() };
        let stretch = (adjacent - done).min(most);
        match backing.read(PageIdx(first.0 + done as u64), &mut buffer[..stretch]) {
            Ok(ReadOutcome::Done) => {}
            Ok(ReadOutcome::Failed) => {
                if stretch > 1 {
                    singly_until = copies.len() + stretch;
                    continue;
                }
                let kept = copies.len() - done;
                free_copies(&to, PageKey { region, page: *first }, copies.drain(kept..));
                copies.resize(kept + size, Word::INITIAL);
                unreadable[kept / size] = true;
                result.unreadable.push(*first);
                continue;
            }
            Err(error) => {
                result.failed = Some(error);
                break;
            }
        }
        for bytes in &buffer[..stretch] {
            let index = copies.len() / size;
            let page = claimed[index].page;
            let key = PageKey { region, page: PageIdx(page.0 + (copies.len() % size) as u64) };
            let zero = is_zero(bytes);
            all_zero[index] &= zero;
            copies.push(if zero && size == 1 {
                Word::new(State::Zero, to.since)
            } else {
                // A zero page within a huge page gets a copy, too, which takes no space.
                match to.store.put(key, bytes) {
                    PutOutcome::Stored(handle) => Word::far(to.number, handle, to.since),
                    refused => {
                        result.store_full |= refused == PutOutcome::Full;
                        result.store_busy |= refused == PutOutcome::Busy;
                        break 'granules;
                    }
                }
            });
        }
    }
    Copied { words: copies, all_zero, unreadable }
}

/// A granule that is being evicted. `lock` is held during the copying if reclaim is forced.
struct Claim<'a> {
    page: PageIdx,
    evicting: Word,
    lock: Option<Locked<'a>>,
}

impl Claim<'_> {
    /// Makes it Resident; returns false if a touch has done that.
    fn give_back(&mut self, granule: Granule<'_>) -> bool {
        let resident = Word::new(State::Resident, self.evicting.age());
        match self.lock.take() {
            Some(mut lock) => {
                lock.set(resident);
                true
            }
            None => granule.cell().swap(self.evicting, resident),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::cell::RefCell;
    use std::io;
    use std::sync::atomic::AtomicU64;

    use ballast_base::Bytes;
    use ballast_base::store::GetOutcome;
    use ballast_base::wire::VmId;
    use ballast_testkit::NullStore;

    use super::*;
    use crate::memory::{Holds, Punched};

    const REGION: RegionKey = RegionKey { vm: VmId([0; 16]), number: 0 };

    /// RAM whose third page cannot be read, with this error, or because its memory failed.
    struct Broken(Option<&'static str>);

    impl Backing for Broken {
        fn read(&self, first: PageIdx, out: &mut [PageBytes]) -> io::Result<ReadOutcome> {
            out.fill([7; _]);
            if !(first.0..first.0 + out.len() as u64).contains(&2) {
                return Ok(ReadOutcome::Done);
            }
            self.0.map_or(Ok(ReadOutcome::Failed), |why| Err(io::Error::other(why)))
        }

        fn holds(&self, _: PageRange) -> io::Result<Holds> {
            unreachable!("nothing is stuck")
        }

        fn punch(&self, _: PageRange) -> io::Result<Punched> {
            Ok(Punched::Gone)
        }

        fn write(&self, _: PageIdx, _: &PageBytes) -> io::Result<()> {
            unreachable!("nothing is stuck")
        }
    }

    /// RAM in which a punch of several pages frees the first, writes zeros to the second and then fails; a punch of one
    /// page leaves zeros, and the second time fails.
    struct Failing {
        file: RefCell<[Option<u8>; 4]>,
        writes: bool,
    }

    impl Backing for Failing {
        fn read(&self, first: PageIdx, out: &mut [PageBytes]) -> io::Result<ReadOutcome> {
            for (page, bytes) in self.file.borrow().iter().skip(first.0 as usize).zip(out) {
                bytes.fill(page.unwrap_or(0));
            }
            Ok(ReadOutcome::Done)
        }

        fn holds(&self, pages: PageRange) -> io::Result<Holds> {
            Ok(self.file.borrow()[pages.start().0 as usize].map_or(Holds::Nothing, |byte| match byte {
                0 => Holds::Zeros,
                _ => Holds::Bytes,
            }))
        }

        fn punch(&self, pages: PageRange) -> io::Result<Punched> {
            let mut file = self.file.borrow_mut();
            if pages.count() == 1 {
                file[pages.start().0 as usize] = Some(0);
                return if self.writes { Ok(Punched::Stuck) } else { Err(io::Error::other("a sealed file")) };
            }
            (file[0], file[1]) = (None, Some(0));
            Err(io::Error::other("a sealed file"))
        }

        fn write(&self, page: PageIdx, bytes: &PageBytes) -> io::Result<()> {
            self.file.borrow_mut()[page.0 as usize] = Some(bytes[0]);
            Ok(())
        }
    }

    /// The results for an eviction of four pages, and the guest's view of each: the file's byte, or the copy's.
    fn evicted(run: PageRange, backing: &Failing) -> (Evicted, [State; 4], [Option<u8>; 4]) {
        let ticket = Ticket::new(1, 1);
        let words: [AtomicU64; 4] = Default::default();
        let granule_of = |page: PageIdx| Granule::new(std::slice::from_ref(&words[page.0 as usize]));
        let pages = [0, 1, 2, 3].map(PageIdx);
        assert!(pages.into_iter().all(|page| quarantine(granule_of(page).cell(), ticket)));
        let (store, mut buffer) = (NullStore::new(Bytes(1 << 20)), [[0; _]; 4]);
        let to = To { number: 1, store: &store, since: 7 };
        let done = evict(REGION, run, granule_of, ticket, backing, to, &mut buffer, LockedFrom::Punch);
        let gets = pages.map(|page| {
            let (word, mut bytes) = (granule_of(page).cell().load(), [0; _]);
            if word.state() != State::Far || backing.holds(PageRange::one(page)).expect("known") == Holds::Bytes {
                return backing.file.borrow()[page.0 as usize];
            }
            let copy = store.get(REGION.page(page), word.handle(), &mut bytes, IoContext::GUEST);
            (copy == GetOutcome::Found).then_some(bytes[0])
        });
        (done, pages.map(|page| granule_of(page).cell().load().state()), gets)
    }

    #[test]
    fn a_punch_that_fails_after_it_has_freed_or_zeroed_pages_costs_no_byte() {
        let backing = Failing { file: RefCell::new([Some(7); 4]), writes: true };
        let (done, states, gets) = evicted(PageRange::of(PageIdx(0), 4), &backing);
        assert_eq!(gets, [Some(7); 4], "what the guest gets, in {states:?}");
        assert_eq!(states, [State::Far, State::Far, State::Resident, State::Resident]);
        assert_eq!((done.far, done.refused), (2, 2));
        assert!(done.failed.is_some_and(|error| error.to_string() == "a sealed file"));
    }

    #[test]
    fn a_page_that_can_be_neither_punched_nor_written_back_stays_far() {
        for (writes, state) in [(true, State::Resident), (false, State::Far)] {
            let backing = Failing { file: RefCell::new([Some(7); 4]), writes };
            let (done, states, gets) = evicted(PageRange::one(PageIdx(2)), &backing);
            assert_eq!((gets[2], states[2]), (Some(7), state));
            assert_eq!((done.stuck, done.far), (u64::from(writes), u64::from(!writes)));
        }
    }

    fn evicted_around(why: Option<&'static str>, from: LockedFrom, at_a_time: usize) -> (Evicted, [State; 4], u64) {
        let ticket = Ticket::new(1, 1);
        let words: [AtomicU64; 4] = Default::default();
        let granule_of = |page: PageIdx| Granule::new(std::slice::from_ref(&words[page.0 as usize]));
        let cell_of = |page: PageIdx| granule_of(page).cell();
        assert!((0..4).all(|page| quarantine(cell_of(PageIdx(page)), ticket)));
        let (store, mut buffer) = (NullStore::new(Bytes(1 << 20)), vec![[0; _]; at_a_time]);
        let to = To { number: 1, store: &store, since: 7 };
        let done = evict(REGION, PageRange::of(PageIdx(0), 4), granule_of, ticket, &Broken(why), to, &mut buffer, from);
        let held = store.usage().pages;
        (done, [0, 1, 2, 3].map(|page| cell_of(PageIdx(page)).load().state()), held)
    }

    #[test]
    fn pages_before_a_bad_one_are_evicted_and_counted_and_the_others_stay() {
        for from in [LockedFrom::Punch, LockedFrom::Copy] {
            let (done, states, held) = evicted_around(Some("a bad disk"), from, 2);
            assert_eq!((done.far, done.zero, done.aborted, done.refused, held), (2, 0, 0, 2, 2));
            assert!(done.failed.is_some_and(|error| error.to_string() == "a bad disk"));
            assert_eq!(states, [State::Far, State::Far, State::Resident, State::Resident]);
        }
    }

    #[test]
    fn a_page_whose_memory_failed_stays_and_the_pages_around_it_are_evicted() {
        for (from, at_a_time) in [(LockedFrom::Punch, 4), (LockedFrom::Copy, 4), (LockedFrom::Copy, 1)] {
            let (done, states, held) = evicted_around(None, from, at_a_time);
            assert!(done.failed.is_none(), "{:?}", done.failed);
            assert_eq!((done.far, done.zero, done.aborted, done.refused, held), (3, 0, 0, 1, 3));
            assert_eq!(done.unreadable, [PageIdx(2)]);
            assert_eq!(states, [State::Far, State::Far, State::Resident, State::Far]);
        }
    }
}
