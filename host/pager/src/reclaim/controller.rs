//! The reclaim controller: how far reclaim goes for one VM, round by round.
//!
//! Before: a round of the reclaim worker has measured the VM. After: the mode, T, the number of pages to keep in
//! quarantine, and the ceiling hold for that round.
//! Threads: the VM's reclaim worker. Units: pages of 4 KiB, where a name does not say bytes. Promise: no clock, no I/O;
//! T is never longer than configured. After ten seconds within the limit, findings above it are forgotten.
//!
//! ```text
//! resident:  0 ......... low ............ limit .............. ceiling ..............
//!               rest      |   background    |  direct or forced   |  and faults wait
//! ```
//!
//! | Mode | While | Takes | T |
//! |---|---|---|---|
//! | rest | the VM is at or below low | nothing | |
//! | background | it is above low | cold pages | the configured one, 1 s |
//! | direct | it is above its limit, or a fault waits for credits | the next pages | 0.3 s, less under pressure |
//! | forced | direct, and nearly all pages are touched even if T is none | the next, locked while copied | none |
//!
//! *Pressure* is a fault that waits for credits, memory above the ceiling that still grows (a VM that touches memory
//! for the first time causes no fault that the engine sees, so nothing slows it), or a round in which the guest had
//! touched nearly all pages of which T was over. Under the first two, T is halved once in T/8, because a change shows
//! only later. T grows by 1/16 in each round within the limit, and is doubled after each second above it without
//! pressure. In the background nothing is urgent: there the number of pages in quarantine is halved if nearly all were
//! touched, and doubled if not.
//!
//! # The table
//!
//! These are all numbers that stand between a limit and the pages of a VM. `lab/notebook/ablation.md` has the
//! experiments, and the former rules that changed no figure.
//!
//! | Constant | Unit | What it bounds | Experiment |
//! |---|---|---|---|
//! | [`MARGIN_PART`] | of the limit | how far low is below it, the ceiling above; quarantine | `real.md` |
//! | [`MARGIN_LEAST`] | bytes | the margin of a small VM | 16 pages of readahead of each thread fit |
//! | [`BATCH`] | bytes | what one round puts into quarantine | some ms of picking and zapping |
//! | [`PART`] | of T, of pages | a step of T; nearly all: fewer evicted | density: doubling alone loses half |
//! | [`LOOK`] | time | how long a finding holds (calm, refusal) | not varied |
//! | [`UNSEEN`] | time | T of pages whose accesses nobody sees | 350 pages of a guest's kernel are used within it |
//! | [`MOST_WAIT`] | time | the wait of a fault; the pause of a VM that grows | no limit holds if no fault waits |
//! | [`PRICE`] | pages | evicted above the ceiling for each that comes in | with 1 a VM never comes down from there |
//! | [`SLICE`] | time | a turn of evicting; a pause above the limit | another VM's turn waits for it |
//! | [`BACKGROUND`] | time | a pause in the background | not varied |
//! | [`REST`] | time | the longest pause of a VM at rest | idle: 1,000 VMs take 2 % of a CPU |

use std::time::{Duration, Instant};

use ballast_base::Bytes;
use ballast_base::units::MIB;

pub(super) use crate::vm::serve::throttle::MOST_WAIT;
#[cfg(doc)]
use crate::vm::serve::throttle::PRICE;

/// The margin is 1/N of the limit. It must be small, because the guest cannot use it.
const MARGIN_PART: u64 = 256;
const MARGIN_LEAST: Bytes = Bytes(MIB);
/// Most memory put into quarantine in one round. While the first of it waits for T, more is picked.
const BATCH: Bytes = Bytes(32 * MIB);
/// 1/N of T is the time from one step of T to the next while faults wait, and T grows by half of that part in a round
/// within the limit. If fewer than 1/N of the pages whose T was over were evicted, the guest touched nearly all.
const PART: u64 = 8;
/// How long a finding holds.
pub(super) const LOOK: Duration = Duration::from_secs(1);
/// T of memory whose accesses an agent cannot see: the time without accesses after which it calls other memory cold.
const UNSEEN: Duration = Duration::from_secs(10);
/// Longest time for which a round evicts, beyond the run in hand, and the pause after none was evicted above the limit.
pub(super) const SLICE: Duration = Duration::from_millis(2);
pub(super) const BACKGROUND: Duration = Duration::from_millis(20);
/// The longest pause of a VM at rest; `growth` and restores end it.
pub(super) const REST: Duration = Duration::from_secs(8);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    Rest,
    /// It takes cold pages, and waits for T.
    Background,
    /// It takes the next pages, and waits for a T that pressure shortens.
    Direct,
    /// It takes the next pages, and locks them before they are copied.
    Forced,
}

impl Mode {
    /// Returns whether pages must go although they are warm.
    pub fn is_urgent(self) -> bool {
        matches!(self, Self::Direct | Self::Forced)
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Seen {
    pub limit: Bytes,
    pub resident: Bytes,
    pub faults_wait: bool,
    /// Other VMs wait for the memory that this one is above its limit.
    pub others_wait: bool,
    pub now: Instant,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Round {
    pub mode: Mode,
    /// Pages above low, which are to go.
    pub excess: u64,
    /// T above the limit, if T is not needed for safety. `None` in the background.
    pub direct: Option<Duration>,
    pub unseen: Duration,
    /// The VM is so far below low that nothing need be in quarantine.
    pub is_far_below: bool,
    margin: u64,
}

#[derive(Debug)]
pub(super) struct Controller {
    /// T above the limit without pressure.
    longest: Duration,
    /// T above the limit now, in microseconds, and when pressure or calm changed it.
    wait_us: u64,
    changed_at: Option<Instant>,
    is_forced: bool,
    /// Most pages in quarantine in the background.
    few: u64,
    /// Since when the VM has been above its limit, except for moments, and when it was above it last.
    above: Option<(Instant, Instant)>,
    /// Resident pages in the round before.
    held: u64,
}

/// Returns the distance between the limit and low, and between the limit and the ceiling, in pages.
pub(super) fn margin(limit: Bytes) -> u64 {
    Bytes((limit.0 / MARGIN_PART).max(MARGIN_LEAST.0)).pages_floor().0
}

impl Controller {
    /// The state of a VM that was never above its limit. T is `direct` above the limit without pressure.
    pub fn new(direct: Duration) -> Self {
        Self {
            longest: direct,
            wait_us: direct.as_micros() as u64,
            changed_at: None,
            is_forced: false,
            few: u64::MAX,
            above: None,
            held: u64::MAX,
        }
    }

    pub fn begin(&mut self, seen: &Seen) -> Round {
        let (limit, resident) = (seen.limit.pages_floor().0, seen.resident.pages_floor().0);
        let margin = margin(seen.limit);
        let low = limit.saturating_sub(margin);
        let is_above = seen.resident > seen.limit || seen.faults_wait;
        let before = std::mem::replace(&mut self.held, resident);
        let grows = resident > limit + margin && resident > before;
        let mode = if resident <= low {
            Mode::Rest
        } else if !is_above {
            Mode::Background
        } else {
            self.above(seen, seen.faults_wait || grows);
            if self.is_forced { Mode::Forced } else { Mode::Direct }
        };
        if !mode.is_urgent() {
            self.relax();
        }
        Round {
            mode,
            excess: resident.saturating_sub(low),
            direct: mode.is_urgent().then(|| self.wait()),
            unseen: self.unseen(mode, seen),
            is_far_below: resident + 2 * margin <= low,
            margin,
        }
    }

    /// Judges a round that ends now: T of `due` pages was over, and `gone` of these were evicted. (Pages whose accesses
    /// are not seen may have been evicted, too.)
    pub fn judge(&mut self, mode: Mode, (due, gone): (u64, u64), now: Instant) {
        let is_nearly_all = gone * PART < due;
        match mode {
            Mode::Rest => {}
            Mode::Background if due == 0 => {}
            Mode::Background if is_nearly_all => self.few = (self.few / 2).max(1),
            Mode::Background => self.few = self.few.saturating_mul(2),
            Mode::Direct | Mode::Forced if is_nearly_all => {
                self.is_forced |= self.wait_us == 0;
                self.halve(now);
            }
            Mode::Direct | Mode::Forced => {}
        }
    }

    /// A round evicted this many pages. Returns how many are to be in quarantine, in all: the pages that are left to
    /// go, and the margin.
    pub fn evicted(&mut self, round: &Round, pages: u64) -> u64 {
        let all = round.excess.saturating_sub(pages) + round.margin;
        if round.mode == Mode::Background {
            self.few = self.few.min(all.max(1));
            return all.min(self.few);
        }
        all
    }

    pub fn batch() -> u64 {
        BATCH.pages_floor().0
    }

    fn wait(&self) -> Duration {
        Duration::from_micros(self.wait_us)
    }

    /// The least T of pages whose accesses nobody sees: none if the VM has been above its limit for as long, or a fault
    /// or another VM waits, because a guest must gain nothing by memory of this kind.
    fn unseen(&self, mode: Mode, seen: &Seen) -> Duration {
        let is_over = self.above.is_some_and(|(since, _)| seen.now.saturating_duration_since(since) >= UNSEEN);
        let may_go = mode.is_urgent() && is_over || seen.faults_wait || seen.others_wait;
        if may_go { Duration::ZERO } else { UNSEEN }
    }

    /// The VM is above its limit, or a fault waits. `is_pressed`: T is too long.
    fn above(&mut self, seen: &Seen, is_pressed: bool) {
        let now = seen.now;
        let since = self.above.filter(|(_, last)| now.saturating_duration_since(*last) < UNSEEN);
        self.above = Some((since.map_or(now, |(since, _)| since), now));
        self.few = u64::MAX;
        if since.is_none() {
            // Findings from so long ago say nothing now.
            (self.wait_us, self.changed_at, self.is_forced) = (self.longest_us(), None, false);
        }
        let after = |time| self.changed_at.is_none_or(|at| now.saturating_duration_since(at) >= time);
        if is_pressed && after(self.wait() / PART as u32) {
            self.halve(now);
        } else if !is_pressed && !self.is_forced && self.wait_us < self.longest_us() && after(LOOK) {
            // Otherwise one moment of pressure would keep T short for ever.
            (self.wait_us, self.changed_at) = ((self.wait_us * 2).clamp(1, self.longest_us()), Some(now));
        }
    }

    fn halve(&mut self, now: Instant) {
        (self.wait_us, self.changed_at) = (self.wait_us / 2, Some(now));
    }

    /// The VM is within its limit.
    fn relax(&mut self) {
        let more = (self.wait_us / (2 * PART)).max(1);
        self.wait_us = (self.wait_us + more).min(self.longest_us());
        self.is_forced = false;
    }

    fn longest_us(&self) -> u64 {
        self.longest.as_micros() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIRECT: Duration = Duration::from_millis(300);
    /// Low is at 255 MiB, the ceiling at 257 MiB.
    const LIMIT: Bytes = Bytes(256 * MIB);

    struct Vm {
        controller: Controller,
        now: Instant,
    }

    impl Vm {
        fn new() -> Self {
            Self { controller: Controller::new(DIRECT), now: Instant::now() }
        }

        fn round(&mut self, after: Duration, resident_mib: u64, faults_wait: bool) -> Round {
            self.now += after;
            let seen = Seen {
                limit: LIMIT,
                resident: Bytes(resident_mib * MIB),
                faults_wait,
                others_wait: false,
                now: self.now,
            };
            self.controller.begin(&seen)
        }

        /// A round above the limit, after this time, in which the guest touched all pages.
        fn all_touched(&mut self, after: Duration) -> Round {
            let round = self.round(after, 300, false);
            self.controller.judge(round.mode, (1000, 0), self.now);
            round
        }
    }

    #[test]
    fn the_mode_is_by_what_the_vm_holds_and_whether_faults_wait() {
        let mut vm = Vm::new();
        let modes = [(200, false), (200, true), (256, false), (256, true), (257, false)];
        let modes = modes.map(|(mib, waits)| vm.round(Duration::ZERO, mib, waits).mode);
        assert_eq!(modes, [Mode::Rest, Mode::Rest, Mode::Background, Mode::Direct, Mode::Direct]);
        let round = vm.round(Duration::ZERO, 256, false);
        assert_eq!((round.excess, round.direct, round.is_far_below), (256, None, false));
        assert!(vm.round(Duration::ZERO, 100, false).is_far_below);
    }

    #[test]
    fn waiting_faults_halve_t_step_by_step_and_it_grows_again_without_them() {
        let mut vm = Vm::new();
        let mut t = |after, mib, waits| vm.round(after, mib, waits).direct;
        assert_eq!([t(Duration::ZERO, 257, false), t(LOOK, 257, true)], [Some(DIRECT), Some(DIRECT / 2)]);
        let step = DIRECT / 16;
        assert_eq!([t(step / 2, 257, true), t(step / 2, 257, true)], [Some(DIRECT / 2), Some(DIRECT / 4)]);
        assert_eq!([t(LOOK / 2, 257, false), t(LOOK / 2, 257, false)], [Some(DIRECT / 4), Some(DIRECT / 2)]);
        (0..1000).for_each(|_| _ = t(SLICE, 257, true));
        assert_eq!(t(SLICE, 257, false), Some(Duration::ZERO), "pressure that stays ends all looks");
        (0..250).for_each(|_| _ = t(BACKGROUND, 256, false));
        assert_eq!(t(SLICE, 257, false), Some(DIRECT), "it was within its limit");
        (0..1000).for_each(|_| _ = t(SLICE, 257, true));
        assert_eq!(t(UNSEEN, 257, false), Some(DIRECT), "that was long ago");
    }

    #[test]
    fn t_is_halved_while_memory_above_the_ceiling_grows_without_faults() {
        let mut vm = Vm::new();
        let mut t = |mib| vm.round(DIRECT, mib, false).direct;
        assert_eq!([257, 300].map(&mut t), [Some(DIRECT), Some(DIRECT / 2)]);
        assert_eq!([310, 310, 305].map(t), [DIRECT / 4; 3].map(Some), "it does not grow any more");
    }

    #[test]
    fn reclaim_is_forced_only_if_even_without_t_nearly_all_pages_are_touched() {
        let mut vm = Vm::new();
        while !vm.controller.wait().is_zero() {
            assert_eq!(vm.all_touched(SLICE).mode, Mode::Direct);
        }
        assert_eq!(vm.all_touched(SLICE).mode, Mode::Direct);
        assert_eq!([vm.all_touched(SLICE).mode, vm.all_touched(LOOK).mode], [Mode::Forced; 2]);
        assert_eq!(vm.round(SLICE, 256, false).mode, Mode::Background);
        assert_eq!(vm.round(SLICE, 300, false).mode, Mode::Direct, "it was within its limit for a moment");
    }

    #[test]
    fn in_the_background_a_guest_that_touches_all_is_left_alone_and_one_that_does_not_is_not() {
        let mut vm = Vm::new();
        let round = vm.round(Duration::ZERO, 256, false);
        let wanted = |vm: &mut Vm, judged| {
            vm.controller.judge(Mode::Background, judged, vm.now);
            vm.controller.evicted(&round, 0)
        };
        assert_eq!(wanted(&mut vm, (0, 0)), 512, "excess and margin");
        assert_eq!([(); 3].map(|()| wanted(&mut vm, (100, 12))), [256, 128, 64]);
        assert_eq!([(); 10].map(|()| wanted(&mut vm, (100, 0)))[9], 1, "it never gives up");
        assert_eq!([(); 10].map(|()| wanted(&mut vm, (8, 1)))[9], 512);
        wanted(&mut vm, (100, 0));
        let above = vm.round(Duration::ZERO, 257, false);
        assert_eq!(vm.controller.evicted(&above, 0), 768, "pages must go although the guest touches them");
    }

    #[test]
    fn memory_that_nobody_sees_stays_for_longer_until_the_vm_was_above_its_limit_or_a_fault_waits() {
        let mut vm = Vm::new();
        let mut unseen = |after, mib, waits| vm.round(after, mib, waits).unseen;
        assert_eq!(unseen(UNSEEN * 9, 256, false), UNSEEN);
        assert_eq!([Duration::ZERO, UNSEEN / 2].map(|after| unseen(after, 257, false)), [UNSEEN; 2]);
        assert_eq!(unseen(Duration::ZERO, 257, true), Duration::ZERO);
        assert_eq!(unseen(UNSEEN / 2, 257, false), Duration::ZERO, "it was above it for long");
        assert_eq!(unseen(Duration::ZERO, 256, false), UNSEEN);
        assert_eq!(unseen(UNSEEN - SLICE, 257, false), Duration::ZERO, "it was within it for a moment");
        assert_eq!(unseen(UNSEEN * 2, 257, false), UNSEEN, "it was not above it for long");
    }

    #[test]
    fn a_vm_that_may_hold_next_to_nothing_has_the_least_margin_and_nothing_panics() {
        let mut controller = Controller::new(Duration::ZERO);
        let now = Instant::now();
        let seen = Seen { limit: Bytes(0), resident: Bytes(MIB), faults_wait: true, others_wait: true, now };
        let round = controller.begin(&seen);
        controller.judge(round.mode, (1, 0), now);
        assert_eq!((round.direct, round.unseen), (Some(Duration::ZERO), Duration::ZERO));
        assert_eq!(controller.evicted(&round, 256), round.margin);
        assert_eq!(controller.begin(&Seen { now: now + LOOK, ..seen }).mode, Mode::Forced);
    }
}
