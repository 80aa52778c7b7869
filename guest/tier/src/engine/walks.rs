//! Random histories of a guest's programs and nodes, against a model of its kernel.
//!
//! Before: files that stand for `/proc` and `/sys`, and a model of page tables and `move_pages`. After: each step kept
//! the engine's promises, and when nothing changes any more, hot memory is fast as far as it fits, and nothing moves.
//! Threads: one. Units: pages, epochs. Promise: a walk follows from its seed. `BALLAST_WALKS` is the number of walks,
//! `BALLAST_WALK` the first's seed.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};

use ballast_ranges::UNIT;
use ballast_sys::lock::Lock;
use ballast_sys::numa::Place;
use ballast_testkit::random::Random;

use super::*;
use crate::kernel::{Mapped, PageTable};
use crate::nodes::tests::{put, tell_apart, two_nodes};
use crate::programs::Choice;
use crate::source::{Each, Samples};

const NODES: &str = "/sys/devices/system/node";
/// Frames of a memory block, and the first block of each node (`two_nodes`).
const BLOCK: u64 = 1 << 15;
const FIRST_BLOCK: [u64; 3] = [0, 8, 24];
/// Pages that the kernel keeps of each node, and those below which it gives none.
const HIGH: u64 = 16;
const MIN: u64 = 4;
const UNIT_PAGES: usize = (UNIT / PAGE) as usize;
/// Where a program may have memory: below its code, its heap, and mappings.
const BASES: [u64; 4] = [0xc0_0000_0000, 0x55d0_1220_0000, 0x7f00_0000_0000, 0x7f10_0000_0000];
const MOST_LIVE: usize = 6;
/// The kernel gives no process ids from this one on: none of them is this process, which the engine leaves out.
const FIRST_PID: u32 = 5_000_000;
const WILD_EPOCHS: u64 = 150;
const QUIET_EPOCHS: u64 = 200;

#[derive(Clone, Copy, Debug)]
struct Page {
    node: usize,
    is_shared: bool,
    is_pinned: bool,
}

/// Memory in a row, from a multiple of 2 MiB on, and the samples of each unit in an epoch.
#[derive(Clone, Debug)]
struct Area {
    pages: Vec<Option<Page>>,
    heat: Vec<u32>,
}

#[derive(Clone, Debug, Default)]
struct Process {
    start: u64,
    refuses: bool,
    areas: BTreeMap<u64, Area>,
}

impl Process {
    fn page(&mut self, address: u64) -> Option<&mut Page> {
        let (start, area) = self.areas.range_mut(..=address).next_back()?;
        area.pages.get_mut(((address - start) / PAGE) as usize)?.as_mut()
    }

    fn present(&self) -> impl Iterator<Item = &Page> {
        self.areas.values().flat_map(|area| area.pages.iter().flatten())
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Answers {
    /// Pages that are where they were to go, and those of them that were there before, by target.
    there: [u64; 3],
    before: [u64; 3],
}

struct Model {
    root: std::path::PathBuf,
    random: Random,
    processes: BTreeMap<u32, Process>,
    /// Sizes, pages that processes have, and pages that others have.
    size: [u64; 3],
    used: [u64; 3],
    others: [u64; 3],
    is_online: [bool; 3],
    fast: usize,
    clock: u64,
    answers: Answers,
    /// Processes end while they are looked at, and samples lie.
    is_wild: bool,
}

impl Model {
    fn count(&mut self) {
        self.used = [0; 3];
        let Self { processes, used, .. } = self;
        processes.values().flat_map(Process::present).for_each(|page| used[page.node] += 1);
    }

    fn free(&self, node: usize) -> u64 {
        self.size[node].saturating_sub(self.others[node] + self.used[node])
    }

    fn show_node(&self, node: usize) {
        let (size, free) = (self.size[node] * 4, self.free(node) * 4);
        let text = format!("Node {node} MemTotal: {size} kB\nNode {node} MemFree: {free} kB\n");
        put(&self.root, &format!("{NODES}/node{node}/meminfo"), &text);
    }

    fn show_nodes(&self) {
        let list: Vec<String> = (0..3).filter(|node| self.is_online[*node]).map(|node| node.to_string()).collect();
        put(&self.root, &format!("{NODES}/has_memory"), &list.join(","));
        tell_apart(
            &self.root,
            &[self.fast, 1 - self.fast, 2].map(|node| node.to_string()).each_ref().map(String::as_str),
        );
        (0..3).for_each(|node| self.show_node(node));
    }

    fn show(&self, pid: u32) {
        let process = &self.processes[&pid];
        let _ = std::fs::remove_dir_all(self.root.join(format!("proc/{pid}")));
        let path = |file: &str| format!("/proc/{pid}/{file}");
        let resident = process.present().count();
        put(&self.root, &path("statm"), &format!("{resident} {resident} 0 0 0 0 0\n"));
        put(&self.root, &path("stat"), &format!("{pid} (p) S{}\n", format!(" {}", process.start).repeat(30)));
        put(&self.root, &path("environ"), "");
        let mut lines = BTreeMap::new();
        for (start, area) in &process.areas {
            let name = if *start == BASES[1] { "[heap]" } else { "" };
            let end = start + area.pages.len() as u64 * PAGE;
            lines.insert(*start, format!("{start:x}-{end:x} rw-p 00000000 00:00 0 {name}\n"));
        }
        for line in
            ["55d000000000-55d000100000 r-xp 00000000 fe:01 77 /p\n", "7ffff0000000-7ffff0021000 rw-p 0 0 0 [stack]\n"]
        {
            let start = line.split('-').next().and_then(|start| u64::from_str_radix(start, 16).ok());
            lines.insert(start.expect("an address"), line.to_owned());
        }
        put(&self.root, &path("maps"), &lines.into_values().collect::<String>());
    }

    /// Gives memory to pages that have none, on the fast node first.
    fn fill(&mut self, pid: u32) {
        self.count();
        let mut free = [0, 1, 2].map(|node| if self.is_online[node] { self.free(node) } else { 0 });
        let order = [self.fast, 1 - self.fast, 2];
        let process = self.processes.get_mut(&pid).expect("a process");
        for area in process.areas.values_mut() {
            for page in area.pages.iter_mut().filter(|page| page.is_none()) {
                let Some(node) = order.into_iter().find(|node| free[*node] > 4 * HIGH) else { return };
                free[node] -= 1;
                *page = Some(Page { node, is_shared: false, is_pinned: false });
            }
        }
    }

    fn new_area(&mut self) -> Area {
        let units = 1 + self.random.below(5) as usize;
        Area { pages: vec![None; units * UNIT_PAGES], heat: vec![0; units] }
    }

    fn begin(&mut self) {
        self.clock += 1;
        // Process ids are reused.
        let pid = FIRST_PID + self.random.below(12) as u32;
        if self.processes.len() >= MOST_LIVE || self.processes.contains_key(&pid) {
            return;
        }
        let (base, area) = (BASES[self.random.below(4) as usize], self.new_area());
        let areas = BTreeMap::from([(base, area)]);
        self.processes.insert(pid, Process { start: self.clock, refuses: self.random.one_in(8), areas });
        self.fill(pid);
        self.show(pid);
    }

    fn end(&mut self, pid: u32) {
        self.processes.remove(&pid);
        self.count();
        // Its files may be there for a moment longer.
        if !self.random.one_in(3) {
            let _ = std::fs::remove_dir_all(self.root.join(format!("proc/{pid}")));
        }
    }

    fn any_process(&mut self) -> Option<u32> {
        let at = self.random.below(self.processes.len().max(1) as u64) as usize;
        self.processes.keys().nth(at).copied()
    }

    fn heat(&mut self, pid: u32) {
        let Self { random, processes, .. } = self;
        let process = processes.get_mut(&pid).expect("a process");
        for heat in process.areas.values_mut().flat_map(|area| area.heat.iter_mut()) {
            *heat = if random.one_in(3) { 50 } else { 0 };
        }
    }

    /// Makes one random change.
    fn happen(&mut self) {
        let what = self.random.below(16);
        let Some(pid) = self.any_process().filter(|_| what > 1) else {
            self.begin();
            return self.count();
        };
        let area = self.new_area();
        let (some, base) = (self.random.below(2), BASES[self.random.below(4) as usize]);
        let has_room = self.processes.len() < MOST_LIVE;
        let Self { random, processes, .. } = self;
        let process = processes.get_mut(&pid).expect("a process");
        match what {
            2 => self.end(pid),
            // A fork shares all pages.
            3 if has_room => {
                let pages = process.areas.values_mut().flat_map(|area| area.pages.iter_mut().flatten());
                pages.for_each(|page| page.is_shared = true);
                let (child, copy) = (FIRST_PID + 20 + random.below(9) as u32, process.clone());
                self.clock += 1;
                let copy = Process { start: self.clock, ..copy };
                self.processes.entry(child).or_insert(copy);
                self.show(child);
            }
            4 => {
                process.areas.entry(base).or_insert(area);
                self.fill(pid);
                self.show(pid);
            }
            5 => {
                process.areas.remove(&base);
                self.show(pid);
            }
            // Pages are freed, and come back on other nodes.
            6 => {
                for page in process.areas.values_mut().flat_map(|area| area.pages.iter_mut()) {
                    *page = page.filter(|_| !random.one_in(5));
                }
                if some == 0 {
                    self.fill(pid);
                }
            }
            7 => process.refuses = some == 0,
            8 => {
                let pages = process.areas.values_mut().flat_map(|area| area.pages.iter_mut().flatten());
                pages.for_each(|page| page.is_pinned = random.one_in(if some == 0 { 2 } else { 300 }));
            }
            9..=11 => self.heat(pid),
            12 => {
                let node = random.below(3) as usize;
                let room = self.free(node) + self.others[node];
                self.others[node] = self.random.below(room + 1);
            }
            13 => {
                let file = ["statm", "stat", "environ", "maps"][random.below(4) as usize];
                let path = self.root.join(format!("proc/{pid}/{file}"));
                let _ = std::fs::remove_file(&path);
                if some == 0 {
                    let _ = std::fs::create_dir(&path);
                }
            }
            14 => {
                self.is_online[2] = !self.is_online[2] || self.used[2] > 0;
            }
            15 if random.one_in(4) => {
                self.fast = 1 - self.fast;
            }
            _ => (),
        }
        self.count();
        self.show_nodes();
    }

    fn move_pages(&mut self, pid: u32, pages: &[u64], node: u32) -> io::Result<Option<Vec<Place>>> {
        let to = node as usize;
        if self.is_wild && self.random.one_in(40) {
            self.end(pid);
        }
        if !self.is_online[to] {
            return Err(io::ErrorKind::NotFound.into());
        }
        let (mut room, mut has_moved) = (self.free(to).saturating_sub(MIN), false);
        let Some(process) = self.processes.get_mut(&pid) else { return Ok(None) };
        if process.refuses {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        let mut of = |address: &u64| match process.page(*address) {
            None => Place::Absent,
            Some(page) if page.node == to => {
                self.answers.before[to] += 1;
                Place::Node(node)
            }
            Some(page) if page.is_shared => Place::Shared,
            Some(page) if page.is_pinned || room == 0 => Place::Untried,
            Some(page) => {
                self.used[page.node] -= 1;
                self.used[to] += 1;
                (page.node, room, has_moved) = (to, room - 1, true);
                Place::Node(node)
            }
        };
        let places: Vec<Place> = pages.iter().map(&mut of).collect();
        self.answers.there[to] += places.iter().filter(|place| **place == Place::Node(node)).count() as u64;
        if has_moved {
            (0..3).for_each(|node| self.show_node(node));
        }
        Ok(Some(places))
    }
}

#[derive(Clone)]
struct Shared(Arc<Mutex<Model>>);

impl Shared {
    fn get(&self) -> MutexGuard<'_, Model> {
        self.0.locked()
    }
}

/// The page table of a process, by its process id and the time at which it began.
struct Table(Shared, u32, u64);

impl PageTable for Table {
    fn pages(&self, start: u64, count: usize) -> io::Result<Vec<Option<Mapped>>> {
        let Self(model, pid, began) = self;
        let mut model = model.get();
        let process = model.processes.get_mut(pid).filter(|process| process.start == *began);
        let process = process.ok_or(io::ErrorKind::UnexpectedEof)?;
        let of = |page: &mut Page| (FIRST_BLOCK[page.node] * BLOCK, !page.is_shared);
        Ok((0..count as u64).map(|at| process.page(start + at * PAGE).map(of)).collect())
    }
}

impl Kernel for Shared {
    fn open(&self, pid: u32) -> io::Result<Box<dyn PageTable>> {
        let start = self.get().processes.get(&pid).ok_or(io::ErrorKind::NotFound)?.start;
        Ok(Box::new(Table(self.clone(), pid, start)))
    }

    fn move_pages(&self, pid: u32, pages: &[u64], node: u32) -> io::Result<Option<Vec<Place>>> {
        self.get().move_pages(pid, pages, node)
    }
}

struct Source(Shared, Vec<u32>);

impl SampleSource for Source {
    fn watch(&mut self, processes: &[u32]) -> io::Result<()> {
        self.1 = processes.to_vec();
        Ok(())
    }

    fn take(&mut self, each: &mut Each<'_>) -> io::Result<()> {
        let mut found = Vec::new();
        let mut model = self.0.get();
        let Model { random, processes, is_wild, .. } = &mut *model;
        for (pid, process) in processes.iter() {
            for (start, area) in &process.areas {
                let hot = area.heat.iter().zip(0..).filter(|(heat, _)| **heat > 0);
                let at = |unit: u64, random: &mut Random| start + unit * UNIT + random.below(512) * PAGE;
                found.extend(hot.map(|(heat, unit)| (*pid, at(unit, random), Samples { count: *heat, each: 1 })));
            }
        }
        if *is_wild {
            // Some samples are lost, some are of no process, and some numbers are absurd.
            found.retain(|_| !random.one_in(4));
            let extremes = [0, 1, u32::MAX];
            for address in [0, PAGE, BASES[0], BASES[3] + 1, u64::MAX] {
                let pid = self.1.get(random.below(4) as usize).copied().unwrap_or(u32::MAX);
                let [count, each] = [0, 0].map(|_| extremes[random.below(3) as usize]);
                if random.one_in(6) {
                    found.push((pid, address, Samples { count, each }));
                }
            }
        }
        drop(model);
        let watched = found.into_iter().filter(|(pid, ..)| self.1.contains(pid));
        watched.for_each(|(pid, address, samples)| each(pid, address, samples));
        Ok(())
    }
}

fn tierer(model: &Shared, most: u64) -> Option<Tierer> {
    let files = Files::below(&model.get().root);
    let choice = Choice { least: 0, ..Choice::default() };
    let settings = Settings { choice, most_bytes_per_s: 2 * most * PAGE, ..Settings::default() };
    match Tierer::with_files(files, settings, Box::new(Source(model.clone(), Vec::new()))) {
        Err(Unavailable::Frames(why)) => {
            ballast_testkit::skip("root", why);
            None
        }
        tierer => {
            let mut tierer = tierer.expect("two tiers");
            tierer.kernel = Box::new(model.clone());
            Some(tierer)
        }
    }
}

/// Runs one step, and checks its promises for any history. Returns the pages that were moved, and those that were
/// already where they were to go.
fn step(tierer: &mut Tierer, model: &Shared, most: u64) -> (u64, u64) {
    // Another test is about the cost of a step, by which the next plan waits.
    tierer.plan_again = Instant::now();
    model.get().answers = Answers::default();
    let (before, epochs) = (tierer.status.moves, tierer.status.epochs);
    tierer.step().expect("an epoch");
    let (moves, Answers { there, before: needless }) = (tierer.status.moves, model.get().answers);
    assert_eq!(tierer.status.epochs, epochs + 1);
    let fast: u64 = (0..3).filter(|node| tierer.tiers.is_fast(*node)).map(|node| there[node as usize]).sum();
    let (promoted, demoted) = (moves.promoted - before.promoted, moves.demoted - before.demoted);
    assert_eq!((promoted, demoted), (fast, there.iter().sum::<u64>() - fast), "each move is booked once");
    assert!(promoted <= most && demoted <= 2 * most, "{promoted} up and {demoted} down of {most}");
    assert!(tierer.status.managed_fast_bytes <= tierer.status.managed_bytes);
    let needless = needless.iter().sum::<u64>();
    (promoted + demoted - needless, needless)
}

/// Describes hot memory that is slow though it could be fast, if there is any.
fn starved(tierer: &Tierer, model: &Model) -> Option<String> {
    let (fast, slow) = (model.fast, 1 - model.fast);
    let reserve = (model.size[fast] / RESERVE_PART).max(1);
    let room = |node: usize| model.free(node).saturating_sub(HIGH);
    // [hot and slow, cold and fast]
    let mut count = [0u64; 2];
    for area in model.processes.values().flat_map(|process| process.areas.values()) {
        for (pages, heat) in area.pages.chunks(UNIT_PAGES).zip(&area.heat) {
            let free = pages.iter().flatten().filter(|page| !page.is_shared && !page.is_pinned);
            let wrong = free.filter(|page| (page.node == fast) == (*heat == 0)).count() as u64;
            count[usize::from(*heat == 0)] += wrong;
        }
    }
    let [hot, cold] = count;
    let may_swap = room(slow) > 0 || room(fast) >= reserve;
    let is_starved = hot > 0 && (room(fast) > reserve || (cold > 0 && may_swap));
    is_starved.then(|| {
        let rooms = [0, 1, 2].map(room);
        format!(
            "{hot} hot pages are slow, {cold} cold ones fast; room {rooms:?}, reserve {reserve}; {:?}",
            tierer.status
        )
    })
}

fn walk(seed: u64) {
    let root = tempfile::tempdir().expect("directory");
    two_nodes(root.path());
    let mut random = Random(seed);
    let size = [1 << 11, 1 << 13, 1 << 12].map(|least| least + random.below(3 * least));
    let most = [64, 300, 2000][random.below(3) as usize];
    let model = Model {
        root: root.path().into(),
        random,
        processes: BTreeMap::new(),
        size,
        used: [0; 3],
        others: [0; 3],
        is_online: [true, true, false],
        fast: 0,
        clock: 0,
        answers: Answers::default(),
        is_wild: true,
    };
    files_of_nodes(root.path());
    model.show_nodes();
    let model = Shared(Arc::new(Mutex::new(model)));
    let Some(mut tierer) = tierer(&model, most) else { return };
    for _ in 0..WILD_EPOCHS {
        (0..2).for_each(|_| model.get().happen());
        step(&mut tierer, &model, most);
        let live = tierer.watched.len();
        assert!(live <= MOST_LIVE + CHOOSE_EVERY as usize && tierer.worth.len() <= 1 << 14, "{live} programs");
    }
    // From now on nothing changes. The slow tier may be full.
    {
        let mut model = model.get();
        model.is_wild = false;
        // Programs that have ended would take the places of others.
        for pid in (FIRST_PID..FIRST_PID + 30).filter(|pid| !model.processes.contains_key(pid)) {
            let _ = std::fs::remove_dir_all(model.root.join(format!("proc/{pid}")));
        }
        let pids: Vec<u32> = model.processes.keys().copied().collect();
        for pid in pids {
            model.processes.get_mut(&pid).expect("a process").refuses = false;
            model.heat(pid);
            model.show(pid);
        }
        let (fast, slow) = (model.fast, 1 - model.fast);
        (model.others[fast], model.others[slow]) = (0, 0);
        if model.random.one_in(2) {
            model.others[slow] = model.free(slow).saturating_sub(HIGH);
            let reserve = (model.size[fast] / RESERVE_PART).max(1);
            model.others[fast] = model.free(fast).saturating_sub(HIGH + reserve);
        }
        model.show_nodes();
    }
    let moved: Vec<(u64, u64)> = (0..QUIET_EPOCHS).map(|_| step(&mut tierer, &model, most)).collect();
    let last = &moved[QUIET_EPOCHS as usize - 40..];
    let starved = starved(&tierer, &model.get());
    assert!(starved.is_none(), "{}", starved.unwrap_or_default());
    // A pinned page is tried again after 30 s, and its partner may change places before.
    let has_pinned = model.get().processes.values().flat_map(Process::present).any(|page| page.is_pinned);
    let most_last = if has_pinned { 4 } else { 0 };
    assert!(last.iter().map(|(up, down)| up + down).sum::<u64>() <= most_last, "moves do not end: {last:?}");
    model.get().processes.clear();
    let _ = std::fs::remove_dir_all(root.path().join("proc"));
    put(root.path(), "/proc/zoneinfo", &zones());
    for _ in 0..100 {
        step(&mut tierer, &model, most);
    }
    assert_eq!((tierer.watched.len(), tierer.worth.len()), (0, 0));
}

fn zones() -> String {
    (0..3).map(|node| format!("Node {node}, zone   Normal\n        high     {HIGH}\n")).collect()
}

/// Writes the files of three nodes that do not change.
fn files_of_nodes(root: &Path) {
    (24..32).for_each(|block| put(root, &format!("{NODES}/node2/memory{block}/state"), "online\n"));
    put(root, "/proc/zoneinfo", &zones());
}

#[test]
fn whatever_programs_and_nodes_do_moves_are_few_and_booked_and_what_stays_hot_is_fast_at_last() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let first = number("BALLAST_WALK").unwrap_or(1);
    for seed in first..first + number("BALLAST_WALKS").unwrap_or(4) {
        println!("BALLAST_WALK={seed}");
        walk(seed);
    }
}
