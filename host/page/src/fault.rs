//! Fault: the guest touched a page that is not mapped, and gets the bytes that it last wrote.
//!
//! Before: the fault worker read the fault from a userfaultfd. After: the page is mapped, or its word says why not.
//! Threads: any number: fault workers, slow workers, and threads that restore all pages. Never waits for policy,
//! logging, another VM or another page.
//! Promise: the guest sees exactly the bytes that it last wrote, or the page is Poisoned and reported. A page whose
//! memory failed while it was unmapped gives the guest the memory error that it would have got without Ballast.

use std::io::{self, ErrorKind};

use ballast_base::fill::{FaultKind, FillOutcome};
use ballast_base::store::{GetOutcome, Handle, PageBytes, PageKey, RegionKey};
use ballast_base::{PageIdx, PageRange};

use crate::copies::{StoreOf, free_copies};
use crate::granule::Granule;
use crate::memory::{Backing, Holds, Mapped};
use crate::outcome::{Move, Outcome, Served};
use crate::page_state::{Cell, Locked, State, Word};

/// Serves one fault on one granule, whose first page is `key`'s, in the file `backing`. `touched` returns heat's new
/// age for a page that was just touched.
///
/// The granule may have left Quarantine or Evicting even if the fault must be retried; the outcome says so.
pub fn serve(
    granule: Granule<'_>,
    key: PageKey,
    kind: FaultKind,
    memory: &impl Mapped,
    backing: &impl Backing,
    stores: &impl StoreOf,
    touched: fn(u8) -> u8,
) -> Outcome {
    let cell = granule.cell();
    loop {
        let from = cell.load();
        if from.is_locked() {
            return Served::Later.into();
        }
        // The lock keeps reclaim from picking a resident page again before it is mapped.
        let to = match from.state() {
            State::Resident => Word::new(State::Resident, from.age()),
            State::Quarantine | State::Evicting => Word::new(State::Resident, touched(from.age())),
            State::Zero | State::Poisoned => from,
            State::Far | State::Restoring if stores.store_of(from).is_none() => return Served::Later.into(),
            // The word says Restoring only while the hole is filled: reading the copy may take long, and recovery takes
            // any bytes in the file of a Restoring page for the page.
            State::Far | State::Restoring => from.in_state(State::Far),
        };
        let Some(mut lock) = cell.lock(from, to) else { continue };
        let served = match from.state() {
            State::Resident | State::Quarantine | State::Evicting => {
                bring_in(key.page, kind, memory).and_then(|served| lost(served, &mut lock, key.page, memory))
            }
            State::Zero => fill_zeros(&mut lock, granule, key.page, memory, backing),
            State::Far | State::Restoring => {
                granule.with_buffer(|buffer| restore(&mut lock, granule, (key, kind), memory, backing, stores, buffer))
            }
            State::Poisoned => poison(key.page, memory, false),
        };
        return Outcome { moved: Some(unlock(lock, from, granule, key, stores)), served };
    }
}

/// Unlocks a granule, and frees its copies if its word does not name them any more.
fn unlock(mut lock: Locked<'_>, from: Word, granule: Granule<'_>, key: PageKey, stores: &impl StoreOf) -> Move {
    let moved = Move { from, to: lock.word() };
    if !moved.drops_copies() {
        return moved;
    }
    let mut rest = Vec::new();
    if granule.pages() > 1 {
        lock.publish(lock.word());
        rest = granule.take_rest();
    }
    drop(lock);
    free_copies(stores, key, std::iter::once(from.in_state(State::Far)).chain(rest));
    moved
}

fn fill_zeros(
    lock: &mut Locked<'_>,
    granule: Granule<'_>,
    page: PageIdx,
    memory: &impl Mapped,
    backing: &impl Backing,
) -> io::Result<Served> {
    let outcome = memory.install_zero(page)?;
    match fill_hole(outcome, page, memory)? {
        Filled::Yes => {
            lock.set(Word::new(State::Resident, 0));
            Ok(Served::Zeroed)
        }
        // The memory that failed in the file does not have the page's bytes: the page is all zeros and was not mapped.
        Filled::No(Served::Failed) => backing.punch(PageRange::of(page, granule.pages())).map(|_| Served::Later),
        Filled::No(why) => Ok(why),
    }
}

/// Restores a far granule, through `buffer`. The lock's word is Far; it becomes Resident, Far (retry) or Poisoned.
fn restore(
    lock: &mut Locked<'_>,
    granule: Granule<'_>,
    (key, kind): (PageKey, FaultKind),
    memory: &impl Mapped,
    backing: &impl Backing,
    stores: &impl StoreOf,
    buffer: &mut [PageBytes],
) -> io::Result<Served> {
    // Each return below leaves this word, unless it sets another one.
    let far = lock.word();
    let holds_now = || backing.holds(PageRange::of(key.page, granule.pages()));
    // A minor fault means that the file has memory there.
    let mut holds = if kind == FaultKind::Minor { holds_now()? } else { Holds::Nothing };
    let copy = if holds == Holds::Bytes { GetOutcome::Found } else { fetch(far, granule, key, stores, buffer) };
    match copy {
        GetOutcome::Found => {}
        GetOutcome::Busy => return Ok(Served::Later),
        // Bytes in the file are the page, even if the copy is lost.
        GetOutcome::Absent | GetOutcome::Corrupt if holds_now()? == Holds::Bytes => holds = Holds::Bytes,
        GetOutcome::Absent | GetOutcome::Corrupt => {
            // The word comes first: if this engine dies here, the next one never maps the page, which is Poisoned.
            lock.publish(Word::new(State::Poisoned, far.age()));
            let served = poison(key.page, memory, true);
            if !matches!(served, Ok(Served::Poisoned { .. })) {
                // The next try finds the loss again and reports it.
                lock.set(far);
            }
            return served;
        }
    }
    let mut served = Served::Restored;
    let mut outcome = FillOutcome::AlreadyThere;
    if holds == Holds::Nothing {
        outcome = install(lock, key.page, memory, buffer)?;
    }
    if outcome == FillOutcome::AlreadyThere {
        if holds == Holds::Nothing {
            holds = holds_now()?;
        }
        let zeros = holds != Holds::Bytes;
        if zeros {
            outcome = replace(lock, key.page, memory, backing, (holds, buffer))?;
        }
        served = if holds == Holds::Failed { Served::Restored } else { Served::Filled { zeros } };
    }
    let filled = fill_hole(outcome, key.page, memory)?;
    if filled == Filled::Yes {
        lock.set(Word::new(State::Resident, 0));
    }
    Ok(match filled.or(served) {
        // The memory failed just now. The page stays Far with a valid copy, and the next try installs it.
        Served::Failed => Served::Later,
        served => served,
    })
}

/// Fills a far granule's hole. Its word says Restoring during the fill, and Far afterwards.
fn install(lock: &mut Locked<'_>, page: PageIdx, memory: &impl Mapped, bytes: &[PageBytes]) -> io::Result<FillOutcome> {
    let far = lock.word();
    // Until it is certain that nothing was filled, recovery must find Restoring.
    lock.publish(far.in_state(State::Restoring));
    let outcome = memory.install(page, bytes);
    lock.set(far);
    if matches!(outcome, Ok(FillOutcome::AlreadyThere)) {
        lock.publish(far);
    }
    outcome
}

/// Replaces zeros, or failed memory, in a far granule's file by its bytes. The zeros are not its bytes (its word would
/// say Zero), and the guest has not mapped it since its eviction: a foreign mapper, or an old kernel, has read or
/// allocated it. The word stays Far, so that recovery would replace the zeros, too.
///
/// If a foreign mapper *writes* to the page between the check of the file and this call, its bytes are lost, as at any
/// time while the page is far.
fn replace(
    lock: &mut Locked<'_>,
    page: PageIdx,
    memory: &impl Mapped,
    backing: &impl Backing,
    (holds, bytes): (Holds, &[PageBytes]),
) -> io::Result<FillOutcome> {
    if let ([bytes], Holds::Zeros | Holds::Nothing) = (bytes, holds) {
        return match backing.write(page, bytes) {
            Ok(()) => Ok(FillOutcome::AlreadyThere),
            // The zeros were freed, and the host has no memory for a page now.
            Err(error) if matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::OutOfMemory) => {
                Ok(FillOutcome::Retry)
            }
            Err(error) => Err(error),
        };
    }
    // The kernel can write neither to a file of huge pages nor to failed memory.
    backing.punch(PageRange::of(page, bytes.len() as u64))?;
    Ok(match install(lock, page, memory, bytes)? {
        // Another process has filled the hole again.
        FillOutcome::AlreadyThere => FillOutcome::Retry,
        outcome => outcome,
    })
}

/// Reads the bytes of all pages of a granule whose word is `word`; returns the worst outcome.
fn fetch(word: Word, granule: Granule<'_>, first: PageKey, stores: &impl StoreOf, out: &mut [PageBytes]) -> GetOutcome {
    if granule.pages() == 1 {
        return stores.store_of(word).map_or(GetOutcome::Busy, |store| store.get(first, word.handle(), &mut out[0]));
    }
    let words: Vec<Word> = std::iter::once(word.in_state(State::Far)).chain(granule.rest()).collect();
    if words.iter().any(|word| word.state() != State::Far) {
        return GetOutcome::Absent;
    }
    let severity = |outcome: &GetOutcome| match outcome {
        GetOutcome::Found => 0,
        GetOutcome::Busy => 1,
        GetOutcome::Absent => 2,
        GetOutcome::Corrupt => 3,
    };
    let (mut done, mut worst) = (0, GetOutcome::Found);
    for words in words.chunk_by(|a, b| a.store() == b.store()) {
        let Some(store) = stores.store_of(words[0]) else { return GetOutcome::Busy };
        let first = first.region.page(PageIdx(first.page.0 + done as u64));
        let pages = first.run(words.iter().map(|word| word.handle()));
        let outcomes = store.get_run(&pages, &mut out[done..done + pages.len()]);
        if outcomes.len() != pages.len() {
            return GetOutcome::Busy;
        }
        done += pages.len();
        worst = outcomes.into_iter().chain([worst]).max_by_key(severity).unwrap_or(worst);
    }
    worst
}

/// Restores untouched far pages, from `first` on, as many as there are cells and the buffer holds. Stops at the first
/// page that is not far, is locked, is in another store, or is not returned by the store. Returns the moves of the
/// restored pages. All stay locked until the last one is installed, so a run must be short.
///
/// # Errors
/// The kernel failed in a way that it should not; the pages are still far.
pub fn restore_run<'a>(
    first: PageKey,
    cells: impl Iterator<Item = Cell<'a>>,
    memory: &impl Mapped,
    stores: &impl StoreOf,
    buffer: &mut [PageBytes],
) -> io::Result<Vec<Move>> {
    let cells = (first.page.0..).map(PageIdx).zip(cells);
    let moves = bring(first.region, cells, memory, stores, buffer, Ends::AtAGap)?;
    Ok(moves.into_iter().map(|(_, moved)| moved).collect())
}

/// Like [`restore_run`], for pages in ascending order with gaps: a page that is not far, is locked, is in another store
/// or is not returned is skipped. The store is asked once ([`ballast_base::store::Store::get_run`]). Returns each
/// restored page and its move.
///
/// # Errors
/// As [`restore_run`].
pub fn restore_some<'a>(
    region: RegionKey,
    cells: impl Iterator<Item = (PageIdx, Cell<'a>)>,
    memory: &impl Mapped,
    stores: &impl StoreOf,
    buffer: &mut [PageBytes],
) -> io::Result<Vec<(PageIdx, Move)>> {
    bring(region, cells, memory, stores, buffer, Ends::Later)
}

/// Whether the first page that cannot be restored ends the run.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ends {
    AtAGap,
    Later,
}

fn bring<'a>(
    region: RegionKey,
    cells: impl Iterator<Item = (PageIdx, Cell<'a>)>,
    memory: &impl Mapped,
    stores: &impl StoreOf,
    buffer: &mut [PageBytes],
    ends: Ends,
) -> io::Result<Vec<(PageIdx, Move)>> {
    let (mut held, mut names): (Vec<Option<Locked<'a>>>, Vec<(PageKey, Handle)>) = Default::default();
    let mut number = None;
    for (page, cell) in cells {
        if names.len() == buffer.len() {
            break;
        }
        let word = cell.load();
        let far = word.state() == State::Far && !word.is_locked() && stores.store_of(word).is_some();
        let of_one = far && number.is_none_or(|number| number == word.store());
        match of_one.then(|| cell.lock(word, word)).flatten() {
            // Each return below leaves this word, unless it sets another one.
            Some(lock) => {
                number = Some(word.store());
                names.push((region.page(page), word.handle()));
                held.push(Some(lock));
            }
            None if ends == Ends::Later => {}
            None => break,
        }
    }
    let store = held.first().and_then(Option::as_ref).and_then(|lock| stores.store_of(lock.word()));
    let Some(store) = store else { return Ok(Vec::new()) };
    let buffer = &mut buffer[..held.len()];
    let outcomes = store.get_ahead(&names, buffer);
    // The next fault on a page that is not returned tells the reason.
    let found = |at: &usize| outcomes.get(*at) == Some(&GetOutcome::Found);
    let all = 0..held.len();
    let came: Vec<usize> =
        if ends == Ends::Later { all.filter(found).collect() } else { all.take_while(found).collect() };
    let mut moves = Vec::with_capacity(came.len());
    let next_to = |a: &usize, b: &usize| a + 1 == *b && names[*a].0.page.0 + 1 == names[*b].0.page.0;
    for run in came.chunk_by(next_to) {
        for at in run {
            if let Some(lock) = held[*at].as_mut() {
                let far = lock.word();
                lock.publish(far.in_state(State::Restoring));
                lock.set(far);
            }
        }
        // A page whose hole is filled already stays Far: a fault on it examines the file ([`restore`]).
        let filled = match memory.install_run(names[run[0]].0.page, &buffer[run[0]..run[0] + run.len()]) {
            Ok(filled) => filled,
            Err(error) if moves.is_empty() => return Err(error),
            // The caller must book the moves so far. The next fault fails with this error and reports it.
            Err(_) => break,
        };
        let first = moves.len();
        // All words are set first: if a store panics, no word may say Far of a mapped page.
        for at in &run[..filled.min(run.len())] {
            let Some(mut lock) = held[*at].take() else { continue };
            let from = lock.word();
            lock.set(Word::new(State::Resident, 0));
            moves.push((names[*at].0.page, Move { from, to: lock.word() }));
        }
        for (page, moved) in &moves[first..] {
            store.free(region.page(*page), moved.from.handle());
        }
    }
    Ok(moves)
}

fn poison(page: PageIdx, memory: &impl Mapped, newly: bool) -> io::Result<Served> {
    Ok(match memory.poison(page)? {
        FillOutcome::Done | FillOutcome::AlreadyThere | FillOutcome::NotInFile => Served::Poisoned { newly },
        FillOutcome::Retry => Served::Later,
        FillOutcome::Gone => Served::Gone,
        FillOutcome::Failed => return Err(io::Error::other("the kernel would not poison a page whose memory failed")),
    })
}

/// If `served` says that the memory of a page in its file failed, poisons the page: each touch is a memory error from
/// now on. The failed memory stays in the file, unreadable, until the guest discards the page.
fn lost(served: Served, lock: &mut Locked<'_>, page: PageIdx, memory: &impl Mapped) -> io::Result<Served> {
    if served != Served::Failed {
        return Ok(served);
    }
    let before = lock.word();
    // The word comes first: if this engine dies here, the next engine finds a Poisoned page, which it never maps.
    lock.publish(Word::new(State::Poisoned, before.age()));
    let poisoned = poison(page, memory, true);
    if !matches!(poisoned, Ok(Served::Poisoned { .. })) {
        // The next try finds the loss again and reports it.
        lock.set(before);
        return poisoned;
    }
    Ok(Served::Failed)
}

/// Whether the hole was filled, so that the page in the file is authoritative.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Filled {
    Yes,
    No(Served),
}

impl Filled {
    fn or(self, done: Served) -> Served {
        match self {
            Self::Yes => done,
            Self::No(why) => why,
        }
    }
}

/// Evaluates the fill of a hole. A page that is in the file already is authoritative (invariant 1; [`restore`] has
/// ensured that it is not a foreign mapper's zeros), and is mapped.
fn fill_hole(outcome: FillOutcome, page: PageIdx, memory: &impl Mapped) -> io::Result<Filled> {
    let outcome = if outcome == FillOutcome::AlreadyThere { memory.map(page)? } else { outcome };
    Ok(match outcome {
        FillOutcome::Done => Filled::Yes,
        FillOutcome::AlreadyThere => {
            memory.wake(page)?;
            Filled::Yes
        }
        FillOutcome::NotInFile | FillOutcome::Retry => Filled::No(Served::Later),
        FillOutcome::Gone => Filled::No(Served::Gone),
        FillOutcome::Failed => Filled::No(Served::Failed),
    })
}

/// Maps a page whose word is Resident: it is in the file, or it is a zero hole. The kind of the fault is only a hint,
/// because the page may have changed since. So if one call fails, the other one follows.
fn bring_in(page: PageIdx, kind: FaultKind, memory: &impl Mapped) -> io::Result<Served> {
    if kind == FaultKind::Minor {
        match memory.map(page)? {
            FillOutcome::Done => return Ok(Served::Mapped),
            FillOutcome::AlreadyThere => {
                memory.wake(page)?;
                return Ok(Served::Mapped);
            }
            FillOutcome::NotInFile => {}
            FillOutcome::Retry => return Ok(Served::Later),
            FillOutcome::Gone => return Ok(Served::Gone),
            FillOutcome::Failed => return Ok(Served::Failed),
        }
    }
    match memory.install_zero(page)? {
        FillOutcome::AlreadyThere => Ok(fill_hole(FillOutcome::AlreadyThere, page, memory)?.or(Served::Mapped)),
        outcome => Ok(fill_hole(outcome, page, memory)?.or(Served::Fresh)),
    }
}
