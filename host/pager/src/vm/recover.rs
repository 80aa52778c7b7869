//! Recovery: repairs the words that an engine left when it died, before any fault is served.
//!
//! Before: the keeper reaped the old engine, so none of its threads runs. After: no word is locked, no page is half
//! moved, the gauges are exact, and each store knows which of its copies are alive.
//! Threads: the engine's start-up, once per VM, before its workers start.
//! Promise: invariant 1. If a page is in its file, the file's bytes are valid, whatever copy exists beside them; but
//! zeros in the place of a Far page are not that page.
//!
//! | Found | Meaning | Becomes |
//! |---|---|---|
//! | Resident, locked | a fault was mapping it | Resident; the wake raises the fault again |
//! | Quarantine | it was in quarantine | Resident, unmapped; a touch maps it |
//! | Evicting | a copy may exist, uncommitted | Resident; the store sweeps the copy |
//! | Far, locked | maybe not punched, or zeros being replaced | Resident if in the file and not zeros; else Far |
//! | Far, locked, by spill | a second copy may exist | Far, under its old handle; that store sweeps the copy |
//! | Restoring | maybe installed already | Resident if in the file, else Far |
//! | Zero, locked | maybe not punched, or just filled | Resident if in the file, else Zero |
//! | Far, Zero, Poisoned, unlocked | settled | unchanged; a fault finds zeros of a foreign mapper |
//! | the word itself was lost | unknown | Resident if bytes other than zeros are in the file, else Poisoned |
//!
//! Only Restoring is not made Far by zeros in the file: the copy may have been installed, and the guest may have
//! written zeros since. So a fault that finds zeros of a foreign mapper leaves Restoring before it replaces them.

use std::collections::BTreeMap;
use std::io;

use ballast_base::{PAGE_SIZE, PageIdx};
use ballast_handover::state_file::{StateError, StateFile};

use super::Vm;
use crate::vm::far::live::LiveCopies;
use crate::vm::region::Region;
use crate::vm::stats::{Counter, Stats};
use ballast_base::store::is_zero;
use ballast_page::copies::live_handle;
use ballast_page::memory::{Backing, ReadOutcome};
use ballast_page::page_state::{State, Word};

/// Result of recovery.
#[derive(Debug, Default)]
pub struct Recovered {
    /// Copies that a store must keep, by store number; it sweeps all others.
    pub live: BTreeMap<u8, LiveCopies>,
    /// Pages whose words were repaired.
    pub mended: u64,
    /// Pages that are lost with their words.
    pub lost: u64,
    /// Far pages, by region and page, whose file holds zeros ([`ballast_page::memory::Punched`]) or failed memory.
    pub zeroed: Vec<(u32, PageIdx)>,
}

impl Recovered {
    /// Copies that this store must keep.
    pub fn live_in(&self, store: u8) -> &LiveCopies {
        static NONE: LiveCopies = LiveCopies::new();
        self.live.get(&store).unwrap_or(&NONE)
    }
}

impl Vm {
    /// Repairs the words and stores of a VM of which no worker runs, after they ended or after a memory error.
    ///
    /// # Errors
    /// Words could not be read.
    pub fn recover(&self) -> Result<Recovered, StateError> {
        let regions = self.regions();
        let recovered = recover(&self.state, regions.iter().map(|region| &**region))?;
        for tier in self.stores.tiers() {
            let sweep = || tier.store.recover(&mut recovered.live_in(tier.number).iter());
            let swept = if tier.slow.is_some() { self.state.beside(sweep) } else { sweep() };
            if let Err(error) = swept {
                // The store works; stale copies occupy space in it until the next try.
                let text = format!("Freeing objects that no word names in the {}: {error}", tier.name);
                self.report("spill-unswept", text);
            }
        }
        self.expel(&recovered.zeroed);
        if recovered.lost > 0 {
            let text = format!("{} pages are lost with their page-state words", recovered.lost);
            self.report("memory-error", format!("{text}: the guest gets a memory error when it touches one"));
        }
        Ok(recovered)
    }
}

/// Repairs the words of all regions of a VM, in order, and sets the gauges.
pub fn recover<'a>(state: &StateFile, regions: impl IntoIterator<Item = &'a Region>) -> Result<Recovered, StateError> {
    let mut found = Recovered::default();
    let (mut far, mut zero, mut poisoned, mut registered) = (0, 0, 0, 0);
    for (region, record) in regions.into_iter().zip(state.regions()) {
        if region.is_removed() {
            continue;
        }
        registered += region.registered().0;
        // A word that was never written says Resident, age 0: only the parts of a guest that ever moved are read.
        for pages in state.written_words(&record)? {
            // Words are written by whole pages of words, which are whole granules.
            for page in region.granules(pages) {
                let granule = region.granule(page);
                let before = granule.cell().load();
                let mut zeroed = false;
                let holds_zeros = || -> io::Result<bool> {
                    let mut bytes = vec![[0; PAGE_SIZE]; granule.pages() as usize];
                    zeroed = match region.read(page, &mut bytes)? {
                        // The copy was complete before the word was Far and locked, and the page was not mapped since.
                        ReadOutcome::Failed => true,
                        ReadOutcome::Done => bytes.iter().all(is_zero),
                    };
                    Ok(zeroed)
                };
                let after = mend(before, || region.is_present(page), holds_zeros)?;
                if zeroed {
                    found.zeroed.push((region.number, page));
                }
                if after != before {
                    granule.cell().reset(after);
                    found.mended += 1;
                }
                if before.is_lost() && after.state() == State::Poisoned {
                    found.lost += granule.pages();
                }
                if after.state() != State::Far {
                    granule.take_rest();
                }
                for (page, word) in (page.0..).zip(std::iter::once(after).chain(granule.rest())) {
                    if let Some(handle) = live_handle(word) {
                        found.live.entry(word.store()).or_default().note(region.key(PageIdx(page)), handle);
                    }
                }
                match after.state() {
                    State::Far => far += granule.pages(),
                    State::Zero => zero += granule.pages(),
                    State::Poisoned => poisoned += granule.pages(),
                    _ => {}
                }
            }
        }
    }
    let stats = Stats::of(state);
    stats.set(Counter::Quarantined, 0);
    stats.set(Counter::RegisteredBytes, registered);
    stats.set(Counter::Far, far);
    stats.set(Counter::Zero, zero);
    stats.set(Counter::Poisoned, poisoned);
    Ok(found)
}

fn mend(
    word: Word,
    is_present: impl Fn() -> io::Result<bool>,
    holds_zeros: impl FnOnce() -> io::Result<bool>,
) -> io::Result<Word> {
    if word.is_lost() {
        // Bytes in the file are the page (invariant 1). Zeros may be the page, an unfinished punch, or a foreign
        // mapper's fill in the place of a far page.
        let is_page = is_present()? && !holds_zeros()?;
        return Ok(Word::new(if is_page { State::Resident } else { State::Poisoned }, 0));
    }
    let resident = Word::new(State::Resident, word.age());
    Ok(match word.state() {
        State::Resident | State::Quarantine | State::Evicting => resident,
        State::Far | State::Zero if !word.is_locked() => word,
        // A page committed as Far was not all zeros: these zeros are of an unfinished punch. Or its memory failed.
        State::Far if is_present()? && holds_zeros()? => word.unlocked(),
        State::Far | State::Restoring | State::Zero if is_present()? => resident,
        State::Restoring => word.in_state(State::Far).unlocked(),
        State::Far | State::Zero | State::Poisoned => word.unlocked(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_base::store::{FILE_STORE, Handle};
    use ballast_page::page_state::Ticket;

    #[test]
    fn every_word_an_engine_can_leave_behind_is_mended_as_the_table_says() {
        let far = Word::far(1, Handle::new(77).expect("in range"), 3);
        let resident = Word::new(State::Resident, 3);
        let zero = Word::new(State::Zero, 3);
        let poisoned = Word::new(State::Poisoned, 3);
        let filed = Word::far(FILE_STORE, Handle::new(78).expect("in range"), 3);
        let table = [
            (resident.locked(), resident, resident),
            (Word::quarantine(Ticket::new(1, 2), 3), resident, resident),
            (Word::quarantine(Ticket::new(1, 2), 3).in_state(State::Evicting), resident, resident),
            (far.locked(), resident, far),
            (far.in_state(State::Restoring).locked(), resident, far),
            (zero.locked(), resident, zero),
            (far, far, far),
            (far.marked(), far.marked(), far.marked()),
            (far.marked().locked(), resident, far.marked()),
            (filed, filed, filed),
            (filed.locked(), resident, filed),
            (filed.in_state(State::Restoring).locked(), resident, filed),
            (zero, zero, zero),
            (poisoned, poisoned, poisoned),
            (poisoned.locked(), poisoned, poisoned),
        ];
        for (left, if_present, if_absent) in table {
            let mended = |present, zeros| mend(left, || Ok(present), || Ok(zeros)).expect("no I/O");
            assert_eq!(mended(true, false), if_present, "{left:?}, in the file");
            assert_eq!(mended(false, false), if_absent, "{left:?}, not in the file");
            let if_zeros = if left.state() == State::Far { left.unlocked() } else { if_present };
            assert_eq!(mended(true, true), if_zeros, "{left:?}, zeros in the file");
        }
        let lost = |present, zeros| mend(Word::LOST, || Ok(present), || Ok(zeros)).expect("no I/O");
        assert_eq!(lost(true, false), Word::new(State::Resident, 0));
        let nobody_knows = [lost(true, true), lost(false, false)];
        assert_eq!(nobody_knows, [Word::new(State::Poisoned, 0); 2]);
    }
}
