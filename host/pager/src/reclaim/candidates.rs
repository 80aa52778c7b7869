//! Candidates: the pages that go into quarantine next, proposed by heat and by the guest's agent.
//!
//! Before: the reclaim worker wants a number of pages. After: it puts the returned pages into quarantine.
//! Threads: the VM's reclaim worker. Units: pages.
//! Promise: a page must still stay untouched in quarantine, so a wrong proposal costs a fault and no byte.
//!
//! Heat proposes pages in rounds, in random order or, with tracking, the oldest first. If the guest has an agent, the
//! pages that it calls cold come first, until samples show that the guest touches them at once ([`Trust`]). Pages whose
//! accesses the agent cannot see stay in quarantine for longer.
//!
//! | | Below the limit | Above the limit |
//! |---|---|---|
//! | the agent reports | only its cold pages | its cold pages, its least warm ones, then heat's |
//! | otherwise | heat's cold pages | heat's pages |
//!
//! A restored page is no special case: a round reaches it again. Proposing restored pages first never converges on a
//! repeating load (`bench real`: 2,600 restores a second without end, against none).

use std::sync::Arc;
use std::time::Instant;

use ballast_heat::{ColdRun, HeatSource, Pages, Pick};

use crate::agent::trust::{By, Trust};
use crate::reclaim::quarantine::Accesses;
use crate::vm::Vm;
use crate::vm::guest::hints::Proposed;
use crate::vm::guest::told::Told;
use crate::vm::table::Table;

pub(super) struct Candidates {
    vm: Arc<Vm>,
    proposals: Proposals,
}

/// The sources of proposals; separate from the VM for tests.
struct Proposals {
    source: HeatSource,
    trust: Trust,
}

impl Candidates {
    pub fn new(vm: Arc<Vm>) -> Self {
        Self { proposals: Proposals::new(HeatSource::new(vm.heat.clone())), vm }
    }

    /// Returns whether the last pick left heat out, because not all memory was sorted yet.
    pub fn is_sorting(&self) -> bool {
        self.proposals.source.is_sorting()
    }

    /// Judges the guest's agent by the refaults since the last call.
    pub fn take_note(&mut self, now: Instant) {
        let vm = &self.vm;
        let (agent, trust) = (&vm.mail.agent, &mut self.proposals.trust);
        if !agent.has_port() {
            return;
        }
        while let Some(place) = vm.mail.refaults.take() {
            trust.restored(place, now);
            // An ignored agent is told, too: it counts the pages that were restored for its kernel's services.
            agent.restored(place);
        }
        let verdict = trust.judge(&Table::of(vm), now);
        let figures = trust.figures();
        if let Some(pause) = verdict {
            vm.report(
                "agent-ignored",
                format!(
                    "the guest touches pages at once that its agent calls cold: its reports are ignored for {} s",
                    pause.as_secs()
                ),
            );
        }
        agent.judged(figures, verdict.map(|pause| now + pause));
    }

    /// Picks up to about `want` pages. Also returns whether another pick may find more at once: the VM is so large that
    /// not all of it was examined.
    pub fn pick(&mut self, want: u64, pick: Pick, now: Instant) -> (Vec<(Accesses, ColdRun)>, bool) {
        self.proposals.pick(&self.vm.mail.agent, &Table::of(&self.vm), want, pick, now)
    }
}

impl Proposals {
    fn new(source: HeatSource) -> Self {
        Self { source, trust: Trust::default() }
    }

    fn pick(
        &mut self,
        agent: &Told,
        table: &dyn Pages,
        want: u64,
        pick: Pick,
        now: Instant,
    ) -> (Vec<(Accesses, ColdRun)>, bool) {
        // While a guest reports, its cold pages go. If more must go, its least warm pages follow, and then heat's.
        let (is_reporting, mut of_agent) = (agent.is_reporting(), Proposed::default());
        if is_reporting {
            of_agent = agent.hints().pick(table, want, pick);
            self.trust.picked(By::Agent, &of_agent.claimed, table, now);
        }
        let got = pages(&of_agent.seen) + pages(&of_agent.unseen);
        let want = if is_reporting && pick == Pick::Cold { 0 } else { want.saturating_sub(got) };
        let (mut has_more, mut of_host) = (false, Vec::new());
        if want > 0 {
            has_more = self.source.pick(table, want, pick, &mut of_host);
            if agent.has_port() {
                self.trust.picked(By::Host, &of_host, table, now);
            }
        }
        let all = [(Accesses::Seen, of_agent.seen), (Accesses::Unseen, of_agent.unseen), (Accesses::Seen, of_host)];
        let runs = all.into_iter().flat_map(|(accesses, runs)| runs.into_iter().map(move |run| (accesses, run)));
        (runs.collect(), has_more)
    }
}

fn pages(runs: &[ColdRun]) -> u64 {
    runs.iter().map(|run| run.pages.count()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vm::guest::hints::Hints;
    use crate::vm::guest::places::Places;
    use ballast_base::guest::GuestRange;
    use ballast_base::{Bytes, PageIdx, PageRange};
    use ballast_heat::{Settings, VmHeat, touched};
    use ballast_messages::run::{COLD, HOTTEST};
    use ballast_messages::{Kind, Run};
    use proptest::collection::vec;
    use proptest::prelude::*;
    use std::cell::RefCell;

    /// Pages of the only region; the guest sees its first half from page 100 on, and has proved it.
    const PAGES: u64 = 64;
    const GUEST: u64 = 100;

    /// Ages; `None`: the page is absent or not Resident.
    struct Memory(RefCell<Vec<Option<u8>>>);

    impl Memory {
        fn new() -> Self {
            Self(RefCell::new(vec![Some(0); PAGES as usize]))
        }

        /// Makes these pages quarantined or far. Returns them, in order.
        fn take(&self, picked: Vec<(Accesses, ColdRun)>) -> Vec<u64> {
            let pages = |(_, run): &(Accesses, ColdRun)| run.pages.start().0..run.pages.end().0;
            let taken: Vec<u64> = picked.iter().flat_map(pages).collect();
            taken.iter().for_each(|page| self.0.borrow_mut()[*page as usize] = None);
            taken
        }
    }

    impl Pages for Memory {
        fn regions(&self) -> u32 {
            1
        }
        fn len(&self, _: u32) -> u64 {
            PAGES
        }
        fn next_present(&self, _: u32, range: PageRange) -> Option<PageRange> {
            let pages = self.0.borrow();
            let until = PAGES.min(range.end().0);
            let first = (range.start().0..until).find(|page| pages[*page as usize].is_some())?;
            let end = (first..until).find(|page| pages[*page as usize].is_none()).unwrap_or(until);
            Some(PageRange::new(PageIdx(first), PageIdx(end)))
        }
        fn age(&self, _: u32, page: PageIdx) -> Option<u8> {
            self.0.borrow()[page.0 as usize]
        }
        fn set_age(&self, _: u32, page: PageIdx, age: u8) {
            self.0.borrow_mut()[page.0 as usize] = Some(age);
        }
    }

    fn proposals() -> Proposals {
        Proposals::new(HeatSource::new(Arc::new(VmHeat::new(Settings::default()))))
    }

    fn agent(report: Vec<Run>) -> Told {
        let range = |offset, address| GuestRange {
            address: address << 12,
            offset: Bytes(offset << 12),
            len: Bytes(PAGES << 11),
        };
        let mut places = Places::new([(0, vec![range(0, GUEST), range(PAGES / 2, 1000)])].into_iter());
        places.prove(0);
        let told = Told::default();
        told.set_port(true);
        told.set_reporting(true);
        *told.hints() = Hints::new(report, &places).0;
        told
    }

    fn run(page: u64, count: u32, kind: Kind, level: u8) -> Run {
        Run { page: GUEST + page, count, kind, level }
    }

    fn pick(proposals: &mut Proposals, told: &Told, memory: &Memory, want: u64, pick: Pick) -> Vec<u64> {
        let (picked, has_more) = proposals.pick(told, memory, want, pick, Instant::now());
        assert!(!has_more, "this memory is small");
        memory.take(picked)
    }

    fn pages_of(parts: &[std::ops::Range<u64>]) -> Vec<u64> {
        parts.iter().cloned().flatten().collect()
    }

    /// Three levels of heat, with the coldest in the middle of memory; pages from 16 on are not reported.
    fn levels() -> Vec<Run> {
        vec![
            run(8, 2, Kind::Free, COLD),
            run(6, 2, Kind::Anon, COLD),
            run(12, 2, Kind::FileClean, COLD),
            run(2, 2, Kind::FileClean, 9),
            run(4, 2, Kind::Anon, 3),
            run(14, 2, Kind::FileClean, 3),
        ]
    }

    #[test]
    fn above_the_limit_the_least_warm_pages_of_a_report_go_before_the_hosts() {
        let (mut proposals, told, memory) = (proposals(), agent(levels()), Memory::new());
        let mut pick = |want| pick(&mut proposals, &told, &memory, want, Pick::Any);
        assert_eq!(pick(4), pages_of(&[8..10, 6..8]), "cold, in the order of the report");
        assert_eq!(pick(4), pages_of(&[12..14, 4..6]), "then the least warm level");
        assert_eq!(pick(4), pages_of(&[14..16, 2..4]), "to the warmest");
        let of_host = pick(8);
        assert_eq!(of_host, pages_of(&[0..2, 10..12, 16..20]), "the round");
        assert_eq!(pick(99).len() as u64, PAGES - 20, "in the end all");
    }

    #[test]
    fn below_the_limit_only_the_agents_cold_pages_go_and_without_an_agent_the_hosts() {
        let (mut proposals, told, memory) = (proposals(), agent(levels()), Memory::new());
        let mut pick = |want| pick(&mut proposals, &told, &memory, want, Pick::Cold);
        assert_eq!(pick(99), pages_of(&[8..10, 6..8, 12..14]));
        assert_eq!(pick(99), Vec::<u64>::new(), "however many are wanted");
        told.set_reporting(false);
        assert_eq!(pick(4), [0, 1, 2, 3], "of an agent that is silent or ignored nothing counts");
    }

    #[test]
    fn the_agents_cold_pages_are_its_samples_and_its_warm_and_unseen_ones_are_nobodys() {
        let unknown = [run(10, 2, Kind::Other, COLD)];
        let (mut proposals, memory) = (proposals(), Memory::new());
        let told = agent(unknown.into_iter().chain(levels()).collect());
        let (picked, _) = proposals.pick(&told, &memory, 20, Pick::Any, Instant::now());
        let unseen: Vec<_> = picked.iter().filter(|(accesses, _)| *accesses == Accesses::Unseen).copied().collect();
        memory.take(picked);
        assert_eq!(memory.take(unseen), [10, 11]);
        *memory.0.borrow_mut() = vec![Some(touched(0)); PAGES as usize];
        let later = Instant::now() + crate::agent::trust::SOON;
        assert_eq!(proposals.trust.judge(&memory, later), None);
        let (by_agent, by_host) = proposals.trust.figures();
        assert_eq!((by_agent.judged, by_agent.wrong), (6, 6));
        assert!((1..=6).contains(&by_host.judged) && by_host.wrong == by_host.judged, "{by_host:?}");
    }

    #[test]
    fn a_sampled_page_with_quarantine_hits_is_skipped_for_1_3_7_then_15_reports() {
        let (mut proposals, memory, start) = (proposals(), Memory::new(), Instant::now());
        let mut picked = Vec::new();
        for report in 0..100 {
            let (told, now) = (agent(vec![run(0, 1, Kind::Anon, COLD)]), start + crate::agent::trust::SOON * report);
            assert_eq!(proposals.trust.judge(&memory, now), None);
            if !proposals.pick(&told, &memory, 1, Pick::Cold, now).0.is_empty() {
                picked.push(report);
                let age = memory.age(0, PageIdx(0)).expect("it is there");
                memory.set_age(0, PageIdx(0), touched(age));
            }
        }
        assert_eq!(picked, [0, 2, 6, 14, 30, 46, 62, 78, 94]);
    }

    #[test]
    fn of_a_forged_report_proved_pages_count_once_and_the_host_picks_the_rest() {
        let whole = Run { page: 0, count: u32::MAX, kind: Kind::Free, level: COLD };
        let foreign = Run { page: 1 << 39, count: 9, kind: Kind::Free, level: COLD };
        let unproved = Run { page: 1000, count: 32, kind: Kind::Free, level: COLD };
        let (mut proposals, memory) = (proposals(), Memory::new());
        let told = agent(vec![foreign, unproved, whole, run(0, 32, Kind::Anon, HOTTEST), whole]);
        // The page was touched in quarantine just before, whatever the guest says.
        memory.0.borrow_mut()[5] = Some(touched(0));
        assert_eq!(pick(&mut proposals, &told, &memory, 99, Pick::Cold), pages_of(&[0..5, 6..32]));
        assert_eq!(pick(&mut proposals, &told, &memory, 99, Pick::Cold), []);
        let mut rest = pick(&mut proposals, &told, &memory, 99, Pick::Any);
        rest.sort_unstable();
        assert_eq!(rest, pages_of(&[5..6, 32..64]));
    }

    proptest! {
        #[test]
        fn no_report_protects_pages_that_must_go_or_proposes_absent_ones(
            runs in vec((prop_oneof![0u64..300, Just(1u64 << 39)], 1u32..200, 0u8..16), 0..40),
            ages in vec(proptest::option::of(any::<u8>()), PAGES as usize), wants in vec(1u64..50, 1..5),
        ) {
            let report = runs.iter().map(|(page, count, level)| {
                Run { page: *page, count: *count, kind: Kind::Anon, level: *level }
            });
            let (mut proposals, told, memory) = (proposals(), agent(report.collect()), Memory(RefCell::new(ages)));
            for want in wants {
                let there = memory.0.borrow().clone();
                let (picked, _) = proposals.pick(&told, &memory, want, Pick::Any, Instant::now());
                // The agent and the host may propose one page each: the second proposal finds it in quarantine.
                prop_assert!(memory.take(picked).iter().all(|page| there[*page as usize].is_some()));
            }
            for _ in 0..3 * PAGES {
                let (picked, _) = proposals.pick(&told, &memory, 9, Pick::Any, Instant::now());
                memory.take(picked);
            }
            prop_assert!(memory.0.borrow().iter().all(Option::is_none), "all that must go has gone");
        }
    }
}
