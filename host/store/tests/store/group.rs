//! A group of VMs beside a model of what their words name. Members join and leave, engines die with puts and frees half
//! done, one engine takes over from another VM by VM, and members end seen or unseen. Each page that a word names has
//! its bytes, and once no member is missing, only blobs that a word names are left.
//!
//! Threads: one; the last test has four. Units: pages; a content is a number.

use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use ballast_base::wire::VmId;
use ballast_base::{Bytes, PAGE_SIZE, PageIdx};
use ballast_handover::arena::{self, GROUP};
use ballast_store::{
    Attach, Budget, DurableStore, GetOutcome, Group, GroupMember, Handle, IoContext, PageBytes, PageKey, RamOptions,
    RegionKey, Store,
};
use ballast_sys::memfd;
use ballast_testkit::{conformance, pages};
use proptest::prelude::*;

use crate::common::stored;

pub const SLABS: u32 = 256;

fn options() -> RamOptions {
    RamOptions { max_slabs: SLABS, ..RamOptions::new(Budget::new(Bytes(16 << 20))) }
}

fn new_arena() -> OwnedFd {
    arena::create().expect("memfd")
}

fn vm(number: u8) -> VmId {
    VmId([number + 1; 16])
}

pub fn key(vm: VmId, page: u64) -> PageKey {
    RegionKey { vm, number: 0 }.page(PageIdx(page))
}

fn bytes(content: u64) -> PageBytes {
    // Some are stored raw, some compressed, one in its handle.
    match content {
        0 => pages::filled(0x7777_7777_7777_7777),
        content if content % 2 == 0 => pages::incompressible(content),
        content => pages::half_compressible(content),
    }
}

/// An opening of the arena that shows this VM.
fn opening(arena: &OwnedFd, vm: VmId) -> OwnedFd {
    let fd = memfd::reopen(arena.as_fd(), true).expect("reopen");
    arena::announce(&fd, vm).expect("announce");
    fd
}

pub fn join(group: &Arc<Group>, arena: &OwnedFd, vm: VmId, new: bool) -> GroupMember {
    group.join(vm, opening(arena, vm), new).expect("room for a member")
}

fn get(store: &dyn Store, key: PageKey, handle: Handle) -> (GetOutcome, Box<PageBytes>) {
    let mut out = Box::new([0; PAGE_SIZE]);
    (store.get(key, handle, &mut out, IoContext::GUEST), out)
}

#[test]
fn a_member_alone_is_a_store_like_others() {
    conformance::run_near(&|| {
        let arena = new_arena();
        let group = Group::open(&arena, options()).expect("a group");
        Box::new(join(&group, &arena, VmId([7; 16]), true))
    });
}

struct Vm {
    id: VmId,
    /// The handle in each word, and the number of its content.
    words: HashMap<u64, (Handle, u64)>,
    /// The opening of the arena that the VM's processes hold.
    _escrow: OwnedFd,
    was_opened: bool,
    /// The engine that has the VM, and the VM's store there.
    at: Option<(usize, GroupMember)>,
    /// Its store in the second engine, if both engines have it.
    beside: Option<GroupMember>,
}

impl Vm {
    fn live(&self) -> Vec<(PageKey, Handle)> {
        self.words.iter().map(|(page, (handle, _))| (key(self.id, *page), *handle)).collect()
    }
}

#[derive(Clone, Debug)]
enum Op {
    /// A VM joins the last engine; `late`: the first one, which had the order before the second one started.
    Comes {
        late: bool,
    },
    Evict {
        vm: usize,
        page: u64,
        content: u64,
    },
    /// Two copies of a page are being put; the first is dropped.
    Again {
        vm: usize,
        page: u64,
        content: u64,
    },
    Restore {
        vm: usize,
        page: u64,
    },
    /// All engines die, before one copy is committed and one is freed.
    Die {
        vm: usize,
        page: u64,
        content: u64,
    },
    Open {
        vm: usize,
    },
    Upgrade,
    Move {
        vm: usize,
    },
    /// The second engine has the VM, too; the first only serves its faults.
    Beside {
        vm: usize,
    },
    /// The first engine closes all VMs that both have, while this page is restored.
    Alone {
        vm: usize,
        page: u64,
    },
    Ends {
        vm: usize,
    },
}

fn op() -> impl Strategy<Value = Op> {
    let (vm, page, content) = (0..6usize, 0..6u64, 0..6u64);
    let at = (vm.clone(), page.clone(), content);
    prop_oneof![
        2 => any::<bool>().prop_map(|late| Op::Comes { late }),
        10 => at.clone().prop_map(|(vm, page, content)| Op::Evict { vm, page, content }),
        2 => at.clone().prop_map(|(vm, page, content)| Op::Again { vm, page, content }),
        6 => (vm.clone(), page.clone()).prop_map(|(vm, page)| Op::Restore { vm, page }),
        2 => at.prop_map(|(vm, page, content)| Op::Die { vm, page, content }),
        4 => vm.clone().prop_map(|vm| Op::Open { vm }),
        1 => Just(Op::Upgrade),
        1 => vm.clone().prop_map(|vm| Op::Move { vm }),
        3 => vm.clone().prop_map(|vm| Op::Beside { vm }),
        3 => (vm.clone(), page).prop_map(|(vm, page)| Op::Alone { vm, page }),
        1 => vm.prop_map(|vm| Op::Ends { vm }),
    ]
}

struct World {
    arena: OwnedFd,
    /// The engine that serves, and the one that will follow.
    engines: Vec<Arc<Group>>,
    vms: Vec<Vm>,
    ever: u8,
}

impl World {
    fn new() -> Self {
        let arena = new_arena();
        let engines = vec![Group::open(&arena, options()).expect("a group")];
        Self { arena, engines, vms: Vec::new(), ever: 0 }
    }

    fn open(&mut self, vm: usize) {
        self.open_in(self.engines.len() - 1, vm);
    }

    fn open_in(&mut self, engine: usize, vm: usize) {
        let Vm { id, words, was_opened, at, .. } = &mut self.vms[vm];
        let member = join(&self.engines[engine], &self.arena, *id, !*was_opened);
        if *was_opened {
            let mut live = words.iter().map(|(page, (handle, _))| (key(*id, *page), *handle));
            let recovered = member.recover(&mut live).expect("no device");
            assert_eq!(recovered.missing, 0, "a blob was freed that a word of {id} names");
        }
        (*was_opened, *at) = (true, Some((engine, member)));
    }

    fn die(&mut self) {
        self.vms.iter_mut().for_each(|vm| (vm.at, vm.beside) = (None, None));
        self.engines = Vec::new();
        self.engines.push(Group::open(&self.arena, options()).expect("a group"));
    }

    /// Once the second engine has all open VMs, the first one ends.
    fn leave(&mut self) {
        if self.vms.iter().all(|vm| vm.beside.is_none() && vm.at.as_ref().is_none_or(|(engine, _)| *engine == 1)) {
            self.engines.remove(0);
            self.vms.iter_mut().filter_map(|vm| vm.at.as_mut()).for_each(|(engine, _)| *engine = 0);
        }
    }

    fn run(&mut self, op: &Op) {
        match *op {
            Op::Comes { late } if self.vms.len() < 6 => {
                let id = vm(self.ever);
                self.ever += 1;
                let escrow = opening(&self.arena, id);
                let (words, was_opened, at, beside) = Default::default();
                self.vms.push(Vm { id, words, _escrow: escrow, was_opened, at, beside });
                let last = self.engines.len() - 1;
                self.open_in(if late { 0 } else { last }, self.vms.len() - 1);
            }
            Op::Evict { vm, page, content } => {
                let Some(Vm { id, words, at: Some((_, store)), beside: None, .. }) = self.vms.get_mut(vm) else {
                    return;
                };
                words.entry(page).or_insert_with(|| (stored(store.put(key(*id, page), &bytes(content))), content));
            }
            Op::Again { vm, page, content } => {
                let Some(Vm { id, words, at: Some((_, store)), beside: None, .. }) = self.vms.get_mut(vm) else {
                    return;
                };
                if words.contains_key(&page) {
                    return;
                }
                let [first, second] = [(); 2].map(|()| stored(store.put(key(*id, page), &bytes(content))));
                store.free(key(*id, page), first);
                words.insert(page, (second, content));
            }
            Op::Restore { vm, page } => {
                let Some(Vm { id, words, at: Some((_, store)), beside, .. }) = self.vms.get_mut(vm) else { return };
                let store = beside.as_ref().filter(|_| page % 2 == 0).unwrap_or(store);
                if let Some((handle, _)) = words.remove(&page) {
                    store.free(key(*id, page), handle);
                    // A second free of a handle harms no other page.
                    store.free(key(*id, page), handle);
                }
            }
            Op::Die { vm, page, content } => {
                if let Some(Vm { id, words, at: Some((_, store)), .. }) = self.vms.get_mut(vm) {
                    stored(store.put(key(*id, page + 100), &bytes(content)));
                    words.remove(&page);
                }
                self.die();
            }
            Op::Open { vm } if self.vms.get(vm).is_some_and(|vm| vm.at.is_none()) => self.open(vm),
            Op::Upgrade if self.engines.len() == 1 => {
                self.engines.push(Group::open(&self.arena, options()).expect("a group"));
            }
            Op::Move { vm } if self.engines.len() == 2 => {
                let Some(Vm { at, beside: None, .. }) = self.vms.get_mut(vm) else { return };
                let Some((_, store)) = at.take_if(|(engine, _)| *engine == 0) else { return };
                store.tidy();
                store.part();
                drop(store);
                self.open(vm);
                self.leave();
            }
            Op::Beside { vm } if self.engines.len() == 2 => {
                let Some(vm) = self.vms.get_mut(vm) else { return };
                let Some((0, store)) = vm.at.as_ref().filter(|_| vm.beside.is_none()) else { return };
                store.part();
                store.tidy();
                let beside = join(&self.engines[1], &self.arena, vm.id, false);
                beside.attach_shared(&mut vm.live().into_iter());
                vm.beside = Some(beside);
            }
            Op::Alone { vm, page } => {
                let Some(vm) = self.vms.get_mut(vm) else { return };
                let Some(beside) = vm.beside.take() else { return };
                let first = vm.at.take().expect("the first one has it").1;
                first.part();
                first.tidy();
                drop(first);
                // One page is restored before its word is read, and freed after the list was passed; one is read, then
                // freed.
                let freed_later = vm.words.remove(&page);
                let live = vm.live();
                let freed_before = vm.words.remove(&(page + 1));
                let free = |page, freed: Option<(Handle, u64)>| {
                    freed.into_iter().for_each(|(handle, _)| beside.free(key(vm.id, page), handle));
                };
                free(page + 1, freed_before);
                beside.attach_exclusive(&mut live.into_iter());
                free(page, freed_later);
                vm.at = Some((1, beside));
                self.leave();
            }
            Op::Ends { vm } if vm < self.vms.len() => {
                let Vm { at, beside, .. } = self.vms.remove(vm);
                // The end of a VM that no engine has goes unseen. Of a VM that both engines have, both see it.
                for store in at.into_iter().map(|(_, store)| store).chain(beside) {
                    store.end();
                }
            }
            _ => {}
        }
    }

    fn check(&self) {
        for Vm { id, words, at, beside, .. } in &self.vms {
            let stores = || at.iter().map(|(_, store)| store).chain(beside);
            for (store, (page, (handle, content))) in stores().flat_map(|store| words.iter().map(move |w| (store, w))) {
                let (outcome, found) = get(store, key(*id, *page), *handle);
                assert!(
                    outcome == GetOutcome::Found && *found == bytes(*content),
                    "page {page} of {id} has content {content} and came to {outcome:?}"
                );
                let (outcome, _) = get(store, key(*id, page + 50), *handle);
                assert!(outcome != GetOutcome::Found || *content == 0, "a page got what another one names");
            }
        }
    }

    /// Another engine gets all existing members: no blob without a name is left.
    fn settle(&mut self) {
        self.die();
        (0..self.vms.len()).for_each(|vm| self.open(vm));
        let group = self.engines[0].clone();
        // With this member, the group finds that a member that came and ended unseen is gone.
        let guest = join(&group, &self.arena, VmId([0xee; 16]), true);
        guest.tidy();
        guest.end();
        self.check();
        group.validate().expect("consistent");
        let words = self.vms.iter().flat_map(|vm| vm.words.values()).filter(|(_, content)| *content != 0);
        let named: HashSet<Handle> = words.clone().map(|(handle, _)| *handle).collect();
        let usage = group.usage();
        assert_eq!((usage.missing, usage.blobs), (0, named.len() as u64), "{usage:?}");
        assert_eq!(usage.references, words.count() as u64, "{usage:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn whatever_happens_words_name_their_bytes_and_in_the_end_no_other_blob_is_left(
        ops in prop::collection::vec(op(), 1..80)
    ) {
        let mut world = World::new();
        for op in &ops {
            world.run(op);
            world.check();
        }
        world.settle();
    }
}

#[test]
fn equal_pages_are_stored_once_and_charged_by_their_shares() {
    let arena = new_arena();
    let group = Group::open(&arena, options()).expect("a group");
    let members = [0, 1, 2].map(|number| join(&group, &arena, vm(number), true));
    // One page that all have, and one page of each member's own.
    let mut handles = Vec::new();
    for (number, member) in (0..).zip(&members) {
        let id = vm(number as u8);
        handles.push(stored(member.put(key(id, 0), &bytes(2))));
        stored(member.put(key(id, 1), &bytes(100 + 2 * number)));
    }
    assert!(handles.iter().all(|handle| *handle == handles[0]));
    let usage = group.usage();
    assert_eq!((usage.references, usage.blobs, usage.equal_puts), (6, 4, 2));
    // A page that does not compress takes a slot of 4112 bytes.
    for member in &members {
        assert_eq!(member.usage().bytes, 4112 + 4112 / 3);
    }
    // The end of a member leaves the others their pages.
    members[0].end();
    assert_eq!(get(&members[1], key(vm(1), 0), handles[0]).0, GetOutcome::Found);
    assert_eq!(members[1].usage().bytes, 4112 + 4112 / 2);
    members[1..].iter().for_each(GroupMember::end);
    assert_eq!((group.usage().references, group.usage().blobs), (0, 0));
    group.validate().expect("consistent");
}

#[test]
fn a_lost_header_costs_no_page_of_any_member_even_if_the_engine_that_finds_it_dies() {
    for dies in [false, true] {
        let arena = new_arena();
        let group = Group::open(&arena, options()).expect("a group");
        let members: Vec<_> = (0..3).map(|number| (vm(number), join(&group, &arena, vm(number), true))).collect();
        let put = |(id, member): &(VmId, GroupMember)| -> Vec<(PageKey, Handle)> {
            let pages = (1..200).map(|page| (key(*id, page), bytes(page + u64::from(id.0[0]) * 50)));
            pages.map(|(key, bytes)| (key, stored(member.put(key, &bytes)))).collect()
        };
        let named: Vec<_> = members.iter().map(put).collect();
        drop((members, group));
        memfd::punch(&arena, 0, PAGE_SIZE as u64).expect("punched");
        arena::inspect(&GROUP, &arena).expect("a keeper takes it");
        if dies {
            drop(Group::open(&arena, options()).expect("an engine that dies at once"));
        }
        let group = Group::open(&arena, options()).expect("a group");
        assert!(group.usage().bytes > 0);
        let members: Vec<_> = named
            .iter()
            .map(|named| {
                let member = join(&group, &arena, named[0].0.region.vm, false);
                let recovered = member.recover(&mut named.iter().copied()).expect("recovered");
                assert_eq!((recovered.kept_blobs, recovered.missing), (199, 0));
                member
            })
            .collect();
        for (member, named) in members.iter().zip(&named) {
            member.tidy();
            for (at, handle) in named {
                let expected = bytes(at.page.0 + u64::from(at.region.vm.0[0]) * 50);
                assert!(get(member, *at, *handle) == (GetOutcome::Found, Box::new(expected)), "{at:?}");
            }
        }
        assert_eq!(group.usage().missing, 1, "those of the list that was lost");
    }
}

#[test]
fn nothing_is_freed_while_a_member_is_missing_and_all_its_blobs_when_it_is_gone() {
    let arena = new_arena();
    let (first, escrow) = (Group::open(&arena, options()).expect("a group"), opening(&arena, vm(1)));
    let [here, away] = [0, 1].map(|number| join(&first, &arena, vm(number), true));
    let both = stored(here.put(key(vm(0), 0), &bytes(2)));
    assert_eq!(both, stored(away.put(key(vm(1), 0), &bytes(2))));
    drop((here, away, first));
    let next = Group::open(&arena, options()).expect("a group");
    let here = join(&next, &arena, vm(0), false);
    here.recover(&mut [(key(vm(0), 0), both)].into_iter()).expect("no device");
    here.free(key(vm(0), 0), both);
    here.tidy();
    assert_eq!((next.usage().blobs, next.usage().missing), (1, 1), "the other one may name it");
    // A put of equal bytes finds the blob, although no word of a member here names it.
    assert_eq!(both, stored(here.put(key(vm(0), 3), &bytes(2))));
    here.free(key(vm(0), 3), both);
    // No process has the other member's words now.
    drop((here, next, escrow));
    let last = Group::open(&arena, options()).expect("a group");
    let here = join(&last, &arena, vm(0), false);
    here.recover(&mut std::iter::empty()).expect("no device");
    here.tidy();
    assert_eq!((last.usage().blobs, last.usage().missing), (0, 0));
}

#[test]
fn threads_of_several_members_get_their_own_bytes_and_leave_nothing() {
    let arena = new_arena();
    let group = Group::open(&arena, options()).expect("a group");
    std::thread::scope(|scope| {
        for number in 0..4 {
            let member = join(&group, &arena, vm(number), true);
            scope.spawn(move || {
                let (id, mut kept) = (vm(number), std::collections::VecDeque::new());
                for round in 0..3000u64 {
                    let content = 2 + round * 7 % 13;
                    kept.push_back((round, content, stored(member.put(key(id, round), &bytes(content)))));
                    if kept.len() > 10 {
                        let (page, content, handle) = kept.pop_front().expect("not empty");
                        let (outcome, found) = get(&member, key(id, page), handle);
                        assert!(outcome == GetOutcome::Found && *found == bytes(content), "{outcome:?}");
                        member.free(key(id, page), handle);
                    }
                }
                member.end();
            });
        }
    });
    assert_eq!((group.usage().references, group.usage().blobs), (0, 0));
    group.validate().expect("consistent");
}
