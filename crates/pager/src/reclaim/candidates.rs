//! Candidates: the pages that go into quarantine next. Each guess of the engine proposes some.
//!
//! Before: the reclaim worker wants a number of pages. After: it puts those that are returned here into quarantine, and
//! reports which were evicted.
//! Threads: the VM's reclaim worker. Units: pages.
//! Promise: a page of any guess must still stay untouched in quarantine, so a wrong guess costs a fault and no byte.
//!
//! Three guesses propose pages: the guest's agent, if there is one; heat (the clock, or the oldest of tracking); and
//! recent refaults ([`refault`](super::refault)), which learns whether its pages or those of heat have the longer
//! refault interval. What the agent calls cold comes first, until samples show that the guest touches it at once
//! ([`Trust`]).

use std::sync::Arc;
use std::time::Instant;

use ballast_base::Bytes;
use ballast_heat::{ColdRun, HeatSource, Pick};

use crate::agent::trust::{By, Trust};
use crate::reclaim::refault::{Guess, Place, RefaultHistory};
use crate::vm::Vm;
use crate::vm::table::Table;

/// The guesses of one VM.
pub(super) struct Candidates {
    vm: Arc<Vm>,
    source: HeatSource,
    history: RefaultHistory,
    /// Samples of evicted pages; the guest's agent proposed some of them.
    trust: Trust,
}

impl Candidates {
    /// The guesses of a VM of which nothing is known yet.
    pub fn new(vm: Arc<Vm>) -> Self {
        let source = HeatSource::new(vm.heat.clone());
        Self { source, history: RefaultHistory::default(), trust: Trust::default(), vm }
    }

    /// Returns whether the last pick had to leave heat out, because all of the memory was not sorted yet.
    pub fn is_sorting(&self) -> bool {
        self.source.is_sorting()
    }

    /// Notes that this page was evicted by this guess, with its neighbours.
    pub fn evicted(&mut self, guess: Guess, place: Place, now: Instant) {
        self.history.guesses.evicted(guess, place, now);
    }

    /// Takes the refaults since the last call, and judges the guest's agent by them.
    pub fn take_note(&mut self, limit: Bytes, now: Instant) {
        let vm = &self.vm;
        let (agent, trust) = (&vm.mail.agent, &mut self.trust);
        // Also one that is ignored: it says which were restored for services of its kernel.
        let has_port = agent.has_port();
        self.history.take_note(&vm.mail.refaults, limit.pages_floor().0, now, |place| {
            trust.restored(place, now);
            if has_port {
                agent.restored(place);
            }
        });
        if !has_port {
            return;
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

    /// Picks up to about `want` pages, `urgent` of them from any guess that has them. Also returns whether there may be
    /// more at once: the VM is so large that not all of it was looked at.
    pub fn pick(&mut self, want: u64, urgent: u64, pick: Pick, now: Instant) -> (Vec<(Guess, ColdRun)>, bool) {
        let vm = &self.vm;
        let table = Table::of(vm);
        let (agent, mut cold) = (&vm.mail.agent, Vec::new());
        let is_reporting = agent.is_reporting();
        if is_reporting {
            agent.hints().pick(&table, want, Pick::Cold, &mut cold);
            self.trust.picked(By::Agent, &cold, &table, now);
        }
        // If a guest reports, other pages than its cold ones are evicted only if they must be: the least warm ones, and
        // then those of the host's guesses. The agent knows more of what was restored than that.
        let mut picked = Vec::new();
        if is_reporting && pick == Pick::Any {
            agent.hints().pick(&table, want.saturating_sub(pages(&cold)), pick, &mut picked);
        }
        let got = pages(&cold) + pages(&picked);
        let want = if is_reporting && pick == Pick::Cold { 0 } else { want.saturating_sub(got) };
        let urgent = urgent.saturating_sub(got);
        let asked = self.history.guesses.from_refaults(want, now);
        let refaulted = self.history.pick(&table, asked);
        let found = pages(&refaulted).min(asked);
        // The clock makes up for missing refaults, but only for pages that must be evicted now.
        let more = (asked - found).min(urgent.saturating_sub(found + want - asked));
        let (warm, mut has_more) = (want - asked + more, false);
        if warm > 0 {
            let of_agent = picked.len();
            has_more = self.source.pick(&table, warm, pick, &mut picked);
            if agent.has_port() {
                self.trust.picked(By::Host, &picked[of_agent..], &table, now);
            }
        }
        let picked = cold.into_iter().chain(picked).map(|run| (Guess::Clock, run));
        (picked.chain(refaulted.into_iter().map(|run| (Guess::Refaulted, run))).collect(), has_more)
    }
}

/// Returns the number of pages of these runs.
fn pages(runs: &[ColdRun]) -> u64 {
    runs.iter().map(|run| run.pages.count()).sum()
}
