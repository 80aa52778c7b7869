//! Fault: the guest touched a page that is not mapped. Give it the bytes it last wrote.
//!
//! Before: the fault lane read the fault from a userfaultfd. After: the page is Resident and mapped, or its word says
//! why not.
//! Threads: any number: fault lanes, lanes that wait for a disk, prefetch, and whoever brings all back. Never waits for policy,
//! logging, another VM or another page.
//! Promise: either the guest sees the exact bytes it last wrote, or the page is Poisoned and we say so. A page whose memory
//! failed while it was unmapped gives the guest the memory error that it would have had without us, and nothing worse.

use std::io::{self, ErrorKind};

use ballast_base::PageIdx;
use ballast_store::{GetOutcome, PageBytes, PageKey, Store};
use ballast_sys::uffd::{FaultKind, FillOutcome};

use super::copies::{StoreOf, free_copies};
use crate::granule::Granule;
use crate::memory::{Backing, Holds, Mapped};
use crate::page_state::{Cell, Locked, State, Word};

/// What became of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Served {
    /// The page was in DRAM: zapped and now mapped again.
    Mapped,
    /// The page had never been touched, or was discarded: zeros.
    Fresh,
    /// The page was known to be all zero.
    Zeroed,
    /// The page came back from the store.
    Restored,
    /// The page was far, and in its place in the file was memory that somebody else had put there.
    Filled {
        /// Of zeros, which the copy has replaced, as opposed to bytes, which now are the page.
        zeros: bool,
    },
    /// The store lost the page. True the first time this page is found lost.
    Poisoned {
        /// Found just now, as opposed to touched again.
        newly: bool,
    },
    /// The memory that the page was in failed, found just now. It is Poisoned from now on.
    Failed,
    /// Another lane works on this page, the store is busy or not among those given, or the address space is changing:
    /// serve it again soon.
    Later,
    /// The range is not ours any more, or the process is gone. Whoever waits there still is not woken by this.
    Gone,
}

/// Serve one fault on one granule, whose first page is `key`'s, in the file `backing`. Answers also whether the granule left Quarantine or Evicting,
/// which it may have done even if the fault must be served again.
///
/// `touched` is what heat makes of the age of a page that was just touched.
///
/// # Errors
/// The kernel refused in a way it never should; the page's word is as it was before and nothing was lost.
pub fn serve(
    granule: Granule<'_>,
    key: PageKey,
    kind: FaultKind,
    memory: &impl Mapped,
    backing: &impl Backing,
    stores: &impl StoreOf,
    touched: fn(u8) -> u8,
) -> (bool, io::Result<Served>) {
    let cell = granule.cell();
    loop {
        let word = cell.load();
        if word.is_locked() {
            return (false, Ok(Served::Later));
        }
        let resident = Word::new(State::Resident, word.age());
        match word.state() {
            state @ (State::Resident | State::Quarantine | State::Evicting) => {
                // The lock keeps reclaim from picking the page again before it is mapped.
                let rescued = state != State::Resident;
                let to = if rescued { resident.with_age(touched(word.age())) } else { resident };
                let Some(lock) = cell.lock(word, to) else { continue };
                return (
                    rescued,
                    bring_in(key.page, kind, memory).and_then(|served| lost(served, lock, key.page, memory)),
                );
            }
            State::Zero => {
                let Some(mut lock) = cell.lock(word, word) else { continue };
                let filled = memory.install_zero(key.page).and_then(|outcome| fill_hole(outcome, key.page, memory));
                if matches!(filled, Ok(Filled::Yes)) {
                    lock.set(Word::new(State::Resident, 0));
                }
                if matches!(filled, Ok(Filled::No(Served::Failed))) {
                    // It is not the page's: it has not been mapped since it was all zeros.
                    return (false, backing.punch(key.page, granule.pages()).map(|_| Served::Later));
                }
                return (false, filled.map(|filled| filled.or(Served::Zeroed)));
            }
            State::Far | State::Restoring => {
                if stores.store_of(word).is_none() {
                    return (false, Ok(Served::Later));
                }
                // A minor fault says that there is something in the file, and then the word must not say Restoring: see
                // `recover`.
                let to = if kind == FaultKind::Minor { State::Far } else { State::Restoring };
                let Some(lock) = cell.lock(word, word.in_state(to)) else { continue };
                return (false, granule.with_room(|room| restore(lock, granule, key, memory, backing, stores, room)));
            }
            State::Poisoned => {
                let Some(_lock) = cell.lock(word, word) else { continue };
                return (false, poison(key.page, memory, false));
            }
        }
    }
}

/// Bring a far granule back, through `room`. The lock's word is Restoring, or Far if the hole may be filled already; it is left
/// Resident, Far (try again) or Poisoned.
fn restore(
    mut lock: Locked<'_>,
    granule: Granule<'_>,
    key: PageKey,
    memory: &impl Mapped,
    backing: &impl Backing,
    stores: &impl StoreOf,
    room: &mut [PageBytes],
) -> io::Result<Served> {
    let word = lock.word();
    let far = word.in_state(State::Far);
    // For whichever way out of here that says nothing else.
    lock.set(far);
    let look = || backing.holds(key.page, granule.pages());
    let mut holds = if word.state() == State::Far { look()? } else { Holds::Nothing };
    let copy = if holds == Holds::Bytes { GetOutcome::Found } else { fetch(far, granule, key, stores, room) };
    match copy {
        GetOutcome::Found => {}
        GetOutcome::Busy => return Ok(Served::Later),
        // What is in the file is the page, whatever became of the copy.
        GetOutcome::Absent | GetOutcome::Corrupt if look()? == Holds::Bytes => holds = Holds::Bytes,
        GetOutcome::Absent | GetOutcome::Corrupt => {
            // The word first: should we die here, the successor finds a page that is never handed out.
            lock.publish(Word::new(State::Poisoned, word.age()));
            let served = poison(key.page, memory, true);
            if matches!(served, Ok(Served::Poisoned { .. })) {
                forget_copies(lock, far, granule, key, stores);
            } else {
                // Found lost again, and said so, when it is tried again.
                lock.set(far);
            }
            return served;
        }
    }
    let mut served = Served::Restored;
    let mut outcome = FillOutcome::AlreadyThere;
    if holds == Holds::Nothing {
        outcome = install(&mut lock, key.page, memory, room)?;
    }
    if outcome == FillOutcome::AlreadyThere {
        if holds == Holds::Nothing {
            holds = look()?;
        }
        let zeros = holds != Holds::Bytes;
        if zeros {
            outcome = replace(&mut lock, key.page, memory, backing, (holds, room))?;
        }
        served = if holds == Holds::Failed { Served::Restored } else { Served::Filled { zeros } };
    }
    let filled = fill_hole(outcome, key.page, memory)?;
    if filled == Filled::Yes {
        lock.set(Word::new(State::Resident, 0));
        forget_copies(lock, far, granule, key, stores);
    }
    Ok(match filled.or(served) {
        // Just now. It stays Far until it is looked at again, and the copy is what counts.
        Served::Failed => Served::Later,
        served => served,
    })
}

/// Fill a far granule's hole. Its word says Restoring meanwhile, and after that Far again.
fn install(lock: &mut Locked<'_>, page: PageIdx, memory: &impl Mapped, bytes: &[PageBytes]) -> io::Result<FillOutcome> {
    let far = lock.word();
    // Whoever takes over from here on must find Restoring, until it is known that nothing was filled.
    lock.publish(far.in_state(State::Restoring));
    let outcome = memory.install(page, bytes);
    lock.set(far);
    if matches!(outcome, Ok(FillOutcome::AlreadyThere)) {
        lock.publish(far);
    }
    outcome
}

/// Put a far granule's bytes in the place of zeros that are in its file. They are not its bytes (it would be Zero), and it has
/// not been mapped since it went: somebody who is not of the VM maps the file and has read there, or allocated it, or an
/// old kernel did so by itself. The word says Far meanwhile, so a successor finds the zeros out, too. Nor is memory there that
/// failed its bytes.
///
/// What such a process *writes* between our look and this is lost, as it would be at any other time that the page is far.
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
            // The zeros are gone again, and there is no memory for a page just now.
            Err(error) if matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::OutOfMemory) => {
                Ok(FillOutcome::Retry)
            }
            Err(error) => Err(error),
        };
    }
    // A huge page's file cannot be written to, and memory that failed not either.
    backing.punch(page, bytes.len() as u64)?;
    Ok(match install(lock, page, memory, bytes)? {
        // Filled again already.
        FillOutcome::AlreadyThere => FillOutcome::Retry,
        outcome => outcome,
    })
}

/// The bytes of all pages of a granule whose word is `word`; the worst outcome of any.
fn fetch(word: Word, granule: Granule<'_>, first: PageKey, stores: &impl StoreOf, out: &mut [PageBytes]) -> GetOutcome {
    if granule.pages() == 1 {
        return stores.store_of(word).map_or(GetOutcome::Busy, |store| store.get(first, word.handle(), &mut out[0]));
    }
    let words: Vec<Word> = std::iter::once(word.in_state(State::Far)).chain(granule.rest()).collect();
    if words.iter().any(|word| word.state() != State::Far) {
        return GetOutcome::Absent;
    }
    let mut outcomes = Vec::with_capacity(words.len());
    for words in words.chunk_by(|a, b| a.store() == b.store()) {
        let Some(store) = stores.store_of(words[0]) else { return GetOutcome::Busy };
        let done = outcomes.len();
        let first = PageKey { page: PageIdx(first.page.0 + done as u64), ..first };
        let handles: Vec<_> = words.iter().map(|word| word.handle()).collect();
        store.get_run(first, &handles, &mut out[done..done + words.len()], &mut outcomes);
    }
    let worst = |outcome: &GetOutcome| match outcome {
        GetOutcome::Found => 0,
        GetOutcome::Busy => 1,
        GetOutcome::Absent => 2,
        GetOutcome::Corrupt => 3,
    };
    outcomes.into_iter().max_by_key(worst).unwrap_or(GetOutcome::Absent)
}

/// The granule's word need not name its copies any more: forget them, unlock, and free them.
fn forget_copies(mut lock: Locked<'_>, word: Word, granule: Granule<'_>, first: PageKey, stores: &impl StoreOf) {
    let mut rest = Vec::new();
    if granule.pages() > 1 {
        lock.publish(lock.word());
        rest = granule.take_rest();
    }
    drop(lock);
    free_copies(stores, first, std::iter::once(word).chain(rest));
}

/// Bring far pages back that nobody has asked for, from `first` on, as many as there are cells and room; stops at the
/// first that is not far, is locked or cannot be had at once. Answers how many came back. All are locked until the last
/// is there, so a run should be short.
///
/// # Errors
/// As [`serve`]; the pages are far as before.
pub fn restore_run<'a>(
    first: PageKey,
    cells: impl Iterator<Item = Cell<'a>>,
    memory: &impl Mapped,
    stores: &impl StoreOf,
    room: &mut [PageBytes],
) -> io::Result<u64> {
    let mut held: Vec<(PageKey, &dyn Store, Locked<'a>)> = Vec::with_capacity(room.len());
    for (cell, out) in cells.zip(room.iter_mut()) {
        let word = cell.load();
        let key = PageKey { page: PageIdx(first.page.0 + held.len() as u64), ..first };
        let far = word.state() == State::Far && !word.is_locked();
        let Some(store) = stores.store_of(word).filter(|_| far) else { break };
        let Some(mut lock) = cell.lock(word, word.in_state(State::Restoring)) else { break };
        // For whichever way out of here that says nothing else.
        lock.set(word);
        if store.get(key, word.handle(), out) != GetOutcome::Found {
            // Whoever wants it will fault, and find out what is wrong with it.
            break;
        }
        held.push((key, store, lock));
    }
    if held.is_empty() {
        return Ok(0);
    }
    // A page that is in its file already stays Far: whoever touches it has it looked into ([`restore`]).
    let filled = memory.install_run(first.page, &room[..held.len()])?;
    for (key, store, mut lock) in held.into_iter().take(filled) {
        let word = lock.word();
        lock.set(Word::new(State::Resident, 0));
        drop(lock);
        store.free(key, word.handle());
    }
    Ok(filled as u64)
}

fn poison(page: PageIdx, memory: &impl Mapped, newly: bool) -> io::Result<Served> {
    Ok(match memory.poison(page)? {
        FillOutcome::Done | FillOutcome::AlreadyThere | FillOutcome::NotInFile => Served::Poisoned { newly },
        FillOutcome::Retry => Served::Later,
        FillOutcome::Gone => Served::Gone,
        FillOutcome::Failed => return Err(io::Error::other("the kernel would not poison a page whose memory failed")),
    })
}

/// If this says that the memory of a page in its file failed, the page is Poisoned: every touch is a memory error from now on.
/// What is in the file stays there, unreadable, until it is discarded.
fn lost(served: Served, mut lock: Locked<'_>, page: PageIdx, memory: &impl Mapped) -> io::Result<Served> {
    if served != Served::Failed {
        return Ok(served);
    }
    let before = lock.word();
    // The word first: should we die here, the successor finds a page that is never handed out.
    lock.publish(Word::new(State::Poisoned, before.age()));
    let poisoned = poison(page, memory, true);
    if !matches!(poisoned, Ok(Served::Poisoned { .. })) {
        // Found lost again, and said so, when it is tried again.
        lock.set(before);
        return poisoned;
    }
    Ok(Served::Failed)
}

/// Did a hole get filled, so that the page in the file is now the one that counts?
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

/// Follow up on filling a hole. What is already in the file is the page (invariant 1; [`restore`] has seen to its being no
/// stranger's zeros): map that one.
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

/// Map a page whose word is Resident: it is in the file, or it is a hole that means zeros. The fault's kind is only a
/// hint (the page may have changed since it was raised), so whichever call comes first the other one follows.
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
