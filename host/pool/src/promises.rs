//! The promises to VMs on demand, how large they may be, and how many slices are set aside for them.
//!
//! Before: a VM is to have memory on demand. After: `live` has its promise, and `demand` keeps it. Threads: none; plain
//! values. Units: slices. Promise: no more is set aside than is promised, and no more is promised than the *backing*
//! (the slices that the pool has for these VMs) and the memory that they can have far.

use std::collections::BTreeMap;

use ballast_base::{Bytes, MIB};
use serde::{Deserialize, Serialize};

/// The name of slices that are set aside. No VM has it.
pub(crate) const ASIDE: &str = "-";
pub(crate) const FILE: &str = "demand.json";
/// The file that says how much more the pool may promise than it has.
pub(crate) const TERMS_FILE: &str = "overcommit.json";
/// Slices of a piece, 256 MiB, which is set aside and given back as a whole. See [`OnDemand::step`].
pub(crate) const STEP: u32 = 128;
/// 1/N of the untouched places have a page set aside in advance, at least [`STEP`].
const AHEAD: u32 = 8;

pub(crate) type Promises = BTreeMap<u64, Promise>;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Promise {
    pub name: String,
    pub slices: u32,
    /// Its parts: the node's number on the host, and the slices of it. Each part has a file.
    pub parts: Vec<(u32, u32)>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct OnDemand {
    pub promised: u32,
    /// Pages that VMs on demand have.
    pub touched: u32,
    pub aside: u32,
}

impl std::ops::Add for OnDemand {
    type Output = Self;

    fn add(self, more: Self) -> Self {
        let (promised, touched) = (self.promised + more.promised, self.touched + more.touched);
        Self { promised, touched, aside: self.aside + more.aside }
    }
}

impl OnDemand {
    /// How many slices should be set aside: whole steps, because each call that sets some aside uses a VM slot.
    pub(crate) fn wanted(self) -> u32 {
        let untouched = self.promised.saturating_sub(self.touched);
        let wanted = self.touched + (untouched / AHEAD).max(STEP);
        // A VM that made its file longer has more than was promised to it, and takes it from others.
        self.promised.min(wanted.next_multiple_of(self.step()))
    }

    /// Slices that are set aside at once: enough that there are at most some 500 pieces.
    pub(crate) fn step(self) -> u32 {
        STEP.max((self.promised / 512).next_multiple_of(STEP))
    }

    /// How many slices to set aside now, if this many are ready. Fewer than wanted are set aside only if touches need
    /// them: otherwise they wait for the rest, which is being zeroed.
    pub(crate) fn lacks(self, ready: u32) -> u32 {
        let lacks = self.wanted().saturating_sub(self.aside);
        if lacks <= ready || self.aside <= self.touched { lacks.min(ready) } else { 0 }
    }
}

/// The part of their promised memory that VMs on demand can have far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Far {
    /// The sum if all of them have memory far at the same time.
    pub all: Bytes,
    /// The sum of the VMs of one node, by the node's number on the host, if the VMs of other nodes had nothing far.
    pub nodes: BTreeMap<u32, Bytes>,
}

/// The terms of a node: how much more it may promise than its backing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Terms {
    /// The part of the backing that may be promised, in percent, as set by the operator.
    pub percent: u32,
    /// The part of the promises that these VMs can have far at the same time.
    #[serde(skip)]
    pub far: u32,
}

impl Default for Terms {
    fn default() -> Self {
        Self { percent: 100, far: 0 }
    }
}

impl Terms {
    pub const PERCENTS: std::ops::RangeInclusive<u32> = 100..=1000;

    /// The terms of a node whose VMs can have `here` far, while all VMs can have `all` far. `others` are the promises
    /// and the backing of each other node: the far memory that these need is not there for this node.
    pub fn of_node(percent: u32, here: u32, all: u32, others: impl Iterator<Item = (u32, u32)>) -> Self {
        let theirs: u32 = others.map(|(promised, backing)| Self::beyond(promised, backing)).sum();
        Self { percent, far: here.min(all.saturating_sub(theirs)) }
    }

    /// The memory that VMs must have far, for these promises and this backing.
    fn beyond(promised: u32, backing: u32) -> u32 {
        if promised > backing { promised - Self::divided(backing) } else { 0 }
    }

    /// The memory that VMs have here if some of theirs is far: the backing without the part kept free for touches.
    fn divided(backing: u32) -> u32 {
        backing.saturating_sub(left(backing.div_ceil(16)))
    }

    /// The most that may be promised with this backing.
    pub fn most(self, backing: u32) -> u32 {
        let said = u64::from(backing) * u64::from(self.percent) / 100;
        let divided = u64::from(Self::divided(backing));
        said.min(u64::from(backing).max(divided + u64::from(self.far))).min(u32::MAX.into()) as u32
    }

    /// The smallest backing with which this much may be promised.
    pub fn least(self, promised: u32) -> u32 {
        let said = (u64::from(promised) * 100).div_ceil(self.percent.max(1).into());
        let divided = match promised.saturating_sub(self.far) {
            0 => 0,
            here => here.saturating_add(left(here.div_ceil(15))),
        };
        (said as u32).max(divided.min(promised))
    }
}

/// The slices that are kept free for touches: `part`, in the bounds of [`Overcommitted::high`].
fn left(part: u32) -> u32 {
    part.clamp(8, 256)
}

/// The slices that each node lacks for its promises, by its number on the host.
pub type Lacks = BTreeMap<u32, u32>;

/// A node that has promised VMs on demand more than their backing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overcommitted {
    /// The backing.
    pub has: Bytes,
    /// The promises.
    pub promised: Bytes,
    /// The part of the promises that the VMs have touched.
    pub touched: Bytes,
}

impl Overcommitted {
    /// If less than this is free for touches, room must be made: 1/32 of the backing, 8 to 256 MiB.
    pub fn low(&self) -> Bytes {
        Bytes((self.has.0 / 32).clamp(8 * MIB, 256 * MIB))
    }

    /// The memory that is to be kept free for touches.
    pub fn high(&self) -> Bytes {
        Bytes(2 * self.low().0)
    }

    /// The memory that is free for touches.
    pub fn free(&self) -> Bytes {
        Bytes(self.has.0.saturating_sub(self.touched.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn pages_are_set_aside_for_what_is_touched_and_a_part_of_the_rest_and_never_for_more_than_is_promised() {
        let wanted = |promised, touched| OnDemand { promised, touched, aside: 0 }.wanted();
        assert_eq!([wanted(0, 0), wanted(32, 0), wanted(32, 32), wanted(32, 40)], [0, 32, 32, 32]);
        assert_eq!([wanted(2048, 0), wanted(2048, 1024), wanted(2048, 2000)], [256, 1152, 2048]);
    }

    #[test]
    fn a_large_vm_that_is_touched_page_by_page_has_some_hundred_pieces_set_aside() {
        for promised in [512, 8192, 1 << 20] {
            let (mut aside, mut pieces) = (0, 0);
            for touched in 0..=promised {
                let now = OnDemand { promised, touched, aside };
                let lacks = now.lacks(u32::MAX);
                pieces += lacks.div_ceil(now.step());
                aside += lacks;
                assert!(aside > touched || aside == promised);
            }
            assert!(pieces <= 600 && aside == promised, "{pieces} pieces for {promised}");
        }
    }

    #[test]
    fn what_may_be_promised_ends_where_the_operator_or_the_far_stores_say() {
        let terms = |percent, far| Terms { percent, far };
        assert_eq!([terms(100, 99).most(64), terms(150, 99).most(64), terms(150, 10).most(64)], [64, 96, 66]);
        assert_eq!([terms(100, 99).least(64), terms(150, 99).least(97), terms(150, 10).least(97)], [64, 65, 95]);
        assert_eq!([terms(150, 8).most(64), terms(150, 0).most(64), terms(1000, 9).most(0)], [64, 64, 0]);
        assert_eq!(terms(1000, u32::MAX).most(u32::MAX), u32::MAX);
    }

    proptest! {
        #[test]
        fn with_the_least_that_a_promise_needs_it_may_be_made_and_with_less_it_may_not(
            percent in 100u32..1001, far in 0u32..6000, promised in 0u32..9000, backing in 0u32..9000,
        ) {
            let terms = Terms { percent, far };
            prop_assert_eq!(backing >= terms.least(promised), promised <= terms.most(backing));
            let has = Bytes(u64::from(backing) * 2 * MIB);
            let high = Overcommitted { has, promised: Bytes(0), touched: Bytes(0) }.high();
            let here = u64::from(promised.saturating_sub(far)) * 2 * MIB;
            prop_assert!(promised > terms.most(backing) || promised <= backing || here <= has.0 - high.0);
        }
    }

    /// A pool of this many slices, and its VMs on demand: the promise, the touched slices and the far slices of each. A
    /// VM that does not page has all touched slices in memory.
    #[derive(Debug, Default)]
    struct Model {
        at_once: u32,
        aside: u32,
        vms: Vec<(u32, u32, bool)>,
    }

    impl Model {
        fn now(&self) -> OnDemand {
            let sum = |of: fn(&(u32, u32, bool)) -> u32| self.vms.iter().map(of).sum();
            OnDemand { promised: sum(|vm| vm.0), touched: sum(|vm| vm.1), aside: self.aside }
        }
        fn backing(&self, pool: u32) -> u32 {
            pool - self.at_once
        }
        /// A VM that pages keeps an eighth in memory, so that it can continue.
        fn keeps(vm: &(u32, u32, bool)) -> u32 {
            if vm.2 { vm.0.div_ceil(8) } else { vm.0 }
        }
        fn terms(&self, percent: u32, stores: u32) -> Terms {
            let far = self.vms.iter().map(|vm| vm.0 - Self::keeps(vm)).sum::<u32>().min(stores);
            Terms { percent, far }
        }
        fn set_aside(&mut self, pool: u32) {
            let now = self.now();
            self.aside = match self.aside < now.wanted() {
                true => self.aside + now.lacks(self.backing(pool) - self.aside),
                false => self.aside.min(now.wanted().max(now.touched)),
            };
        }
    }

    proptest! {
        #[test]
        fn every_promise_can_be_kept_by_the_pool_and_the_far_stores_whatever_vms_do(
            pool in 64u32..4096, percent in 100u32..300, stores in 0u32..4096,
            steps in proptest::collection::vec((0u8..6, 0u32..2048, any::<prop::sample::Index>()), 1..80),
        ) {
            let mut model = Model::default();
            for (what, slices, which) in steps {
                let (terms, now) = (model.terms(percent, stores), model.now());
                let backing = model.backing(pool);
                let at_most = backing.saturating_sub(terms.least(now.promised)).min(backing - model.aside);
                let some = (!model.vms.is_empty()).then(|| which.index(model.vms.len()));
                match (what, some) {
                    // A VM on demand, and a VM that gets its memory at once.
                    (0, _) if slices > 0 && now.promised + slices <= terms.most(backing) => {
                        model.vms.push((slices, 0, slices % 3 > 0));
                    }
                    (1, _) if slices <= at_most => model.at_once += slices,
                    (2, Some(at)) => {
                        model.vms.swap_remove(at);
                    }
                    // A VM touches memory. Without a free page the touch waits, and a VM that pages gives up a page.
                    (3 | 4, Some(at)) => {
                        let free = model.aside - now.touched;
                        let (promised, touched, _) = &mut model.vms[at];
                        *touched += slices.min(free).min(*promised - *touched);
                    }
                    (5, Some(at)) if model.vms[at].2 => model.vms[at].1 -= slices.min(model.vms[at].1),
                    _ => {}
                }
                model.set_aside(pool);
                let (terms, now, backing) = (model.terms(percent, stores), model.now(), model.backing(pool));
                prop_assert!(now.promised <= terms.most(backing), "{model:?}");
                prop_assert!(backing >= terms.least(now.promised), "{model:?}");
                prop_assert!(now.touched <= now.aside && now.aside <= backing, "{model:?}");
                // If all VMs that page have as much far as there is room, the others have all of their promised memory,
                // and the part that is kept free for touches is free.
                let keep: u32 = model.vms.iter().map(Model::keeps).sum();
                let here = keep.max(now.promised - terms.far.min(now.promised)) + left(backing / 16);
                prop_assert!(now.promised <= backing || here <= backing, "{model:?}");
                // No touch waits for ever: a missing page can be set aside, or a VM that pages can give one up.
                let waits = now.touched == now.aside && now.touched < now.promised;
                prop_assert!(!waits || now.aside < backing || model.vms.iter().any(|vm| vm.2 && vm.1 > 0), "{model:?}");
            }
        }
    }

    /// Two nodes of a pool, and VMs on demand of one node or of both. A VM of both counts as a VM that does not page.
    #[derive(Clone, Debug, Default)]
    struct Nodes {
        at_once: [u32; 2],
        vms: Vec<([u32; 2], bool)>,
    }

    impl Nodes {
        fn promised(&self, node: usize) -> u32 {
            self.vms.iter().map(|(parts, _)| parts[node]).sum()
        }
        fn far(&self, node: usize) -> u32 {
            let alone = self.vms.iter().filter(|(parts, pages)| *pages && parts[1 - node] == 0);
            alone.map(|(parts, _)| parts[node] - parts[node].div_ceil(8)).sum()
        }
        fn terms(&self, node: usize, pool: [u32; 2], percent: u32, stores: u32) -> Terms {
            let other = 1 - node;
            let others = [(self.promised(other), pool[other].saturating_sub(self.at_once[other]))];
            let all = (self.far(0) + self.far(1)).min(stores);
            Terms::of_node(percent, self.far(node), all, others.into_iter())
        }
        fn keeps(&self, pool: [u32; 2], percent: u32, stores: u32) -> bool {
            let needs = |node| self.terms(node, pool, percent, stores).least(self.promised(node));
            (0..2).all(|node| pool[node] >= self.at_once[node] && pool[node] - self.at_once[node] >= needs(node))
        }
    }

    proptest! {
        #[test]
        fn all_nodes_can_keep_their_promises_at_once_by_the_far_stores_that_they_share(
            pool in [64u32..2048, 64u32..2048], percent in 100u32..300, stores in 0u32..3000,
            steps in proptest::collection::vec((0u8..5, 0usize..2, 1u32..1024, any::<prop::sample::Index>()), 1..60),
        ) {
            let mut nodes = Nodes::default();
            for (what, node, slices, which) in steps {
                let mut then = nodes.clone();
                let has = pool[node] - nodes.at_once[node];
                let left = nodes.terms(node, pool, percent, stores).most(has).saturating_sub(nodes.promised(node));
                let mut parts = [0; 2];
                parts[node] = slices;
                match what {
                    // A VM of one node is judged by what is left there; a VM of both nodes by the result of both.
                    0 | 1 if slices <= left => nodes.vms.push((parts, what > 0)),
                    2 => then.vms.push(([slices, slices / 2 + 1], true)),
                    3 => then.at_once[node] += slices,
                    4 if !nodes.vms.is_empty() => drop(nodes.vms.swap_remove(which.index(nodes.vms.len()))),
                    _ => {}
                }
                if matches!(what, 2 | 3) && then.keeps(pool, percent, stores) {
                    nodes = then;
                }
                let beyond = [0, 1].map(|node| {
                    let (promised, has) = (nodes.promised(node), pool[node] - nodes.at_once[node]);
                    if promised > has { promised - (has - left_of(has).min(has)) } else { 0 }
                });
                prop_assert!(beyond.iter().sum::<u32>() <= stores, "{nodes:?}: {beyond:?}");
                prop_assert!((0..2).all(|node| beyond[node] <= nodes.far(node)), "{nodes:?}: {beyond:?}");
                prop_assert!((0..2).all(|node| u64::from(nodes.promised(node)) * 100
                    <= u64::from(pool[node] - nodes.at_once[node]) * u64::from(percent)), "{nodes:?}");
            }
        }
    }

    /// The slices that are to be kept free of a backing of this many.
    fn left_of(has: u32) -> u32 {
        super::left(has.div_ceil(16))
    }

    #[test]
    fn a_part_of_a_step_is_set_aside_only_if_touches_need_it() {
        let lacks = |touched, ready| OnDemand { promised: 8192, touched, aside: 1280 }.lacks(ready);
        assert_eq!([lacks(1000, 3), lacks(1279, 3), lacks(1280, 3), lacks(1000, 9000)], [0, 0, 3, 640]);
    }
}
