//! Which programs are managed, and which of their memory: from `/proc`.
//!
//! Before: the choice of the guest's owner. After: [`crate::engine`] samples these programs and moves their pages.
//! Threads: any. Units: bytes and addresses.
//! Promise: a program that opts out is left alone, and so is one whose files cannot be read. A program that ends
//! at this moment is left out without an error.

use std::io;

use ballast_base::{Invalid, PAGE_SIZE};
use ballast_ranges::{Roots, UNIT};

use crate::kernel_files::Files;

/// A program with this in its environment is left alone: `BALLAST_TIERING=off`.
pub const OPT_OUT: &str = "BALLAST_TIERING=off";

/// Programs to manage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Least resident memory of a program. Smaller ones gain too little.
    pub least: u64,
    /// Most at a time, the largest first.
    pub most: usize,
}

impl Default for Choice {
    fn default() -> Self {
        Self { least: 64 << 20, most: 8 }
    }
}

/// A program that is managed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// Its process.
    pub pid: u32,
    /// Its start time, which tells it from a later process with the same pid.
    pub start: u64,
    /// Its resident memory.
    pub resident: u64,
}

/// Returns the programs to manage now, the largest first.
///
/// # Errors
/// No `/proc`.
pub fn choose(files: &Files, choice: &Choice) -> io::Result<Vec<Program>> {
    let own = std::process::id();
    let mut found = Vec::new();
    for pid in files.numbered("/proc", "")?.into_iter().filter(|pid| *pid != own) {
        // A program whose files cannot be read keeps no other program out.
        found.extend(program(files, choice, pid).ok().flatten());
    }
    found.sort_by_key(|program| (std::cmp::Reverse(program.resident), program.pid));
    found.truncate(choice.most);
    Ok(found)
}

fn program(files: &Files, choice: &Choice, pid: u32) -> io::Result<Option<Program>> {
    let read = |file: &str| files.optional(&format!("/proc/{pid}/{file}"));
    let Some(statm) = read("statm")? else { return Ok(None) };
    let pages = statm.split_ascii_whitespace().nth(1).and_then(|word| word.parse::<u64>().ok()).unwrap_or(0);
    let resident = pages.saturating_mul(PAGE_SIZE as u64);
    if resident < choice.least {
        return Ok(None);
    }
    let (Some(stat), Some(environment)) = (read("stat")?, read("environ")?) else { return Ok(None) };
    if environment.split('\0').any(|word| word == OPT_OUT) {
        return Ok(None);
    }
    // The name of a program may contain any character; the fields follow the last parenthesis.
    let Some((_, rest)) = stat.rsplit_once(") ") else { return Ok(None) };
    let start = rest.split_ascii_whitespace().nth(19).and_then(|word| word.parse().ok());
    Ok(start.map(|start| Program { pid, start, resident }))
}

/// The memory of a program that can be classified, and where its pages are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Memory {
    /// Heap and mappings (Demeter §3.2.1), also those below the program's code, where Go and Java have their heaps:
    /// code, data and stack of the program itself are outside.
    pub roots: Roots,
    /// Parts of these with memory that the program alone decides about: anonymous, shared anonymous, tmpfs. Files
    /// belong to the page cache (§3.4.2). First addresses, and the addresses after the last.
    pub areas: Vec<(u64, u64)>,
}

/// Reads a program's memory map.
///
/// # Errors
/// It is gone, may not be read, or maps nothing that can be classified.
pub fn memory(files: &Files, pid: u32) -> io::Result<Memory> {
    let text = files.text(&format!("/proc/{pid}/maps"))?;
    let exe = std::fs::read_link(files.path(&format!("/proc/{pid}/exe"))).ok();
    let exe = exe.as_ref().and_then(|path| path.to_str());
    parse(&text, exe).map_err(|why| io::Error::other(format!("Looking at the memory of process {pid}: {why}")))
}

/// A line of `/proc/PID/maps`.
struct Area<'a> {
    start: u64,
    end: u64,
    mode: &'a str,
    is_file: bool,
    path: &'a str,
}

impl<'a> Area<'a> {
    fn parse(line: &'a str) -> Option<Self> {
        let (bounds, rest) = line.split_once(' ')?;
        let (start, end) = bounds.split_once('-')?;
        let (start, end) = (u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?);
        let mut words = rest.splitn(5, ' ');
        let (mode, inode) = (words.next()?, words.nth(2)?);
        Some(Self { start, end, mode, is_file: inode != "0", path: words.next().unwrap_or_default().trim() })
    }

    /// Memory that the program alone decides about.
    fn is_its_own(&self) -> bool {
        const MEMORY: [&str; 4] = ["/dev/shm/", "/memfd:", "/SYSV", "/dev/zero"];
        let is_special = self.path.starts_with("[v") || self.path.starts_with("[stack");
        let is_memory = !self.is_file || MEMORY.iter().any(|start| self.path.starts_with(start));
        is_memory && !is_special && self.mode != "---p" && self.start < self.end
    }
}

/// Finds roots and areas in a map of memory, of a program whose own file is `exe`.
fn parse(maps: &str, exe: Option<&str>) -> Result<Memory, Invalid> {
    let all: Vec<Area<'_>> = maps.lines().filter_map(Area::parse).collect();
    // The program has no memory above its stack.
    let stack = all.iter().find(|area| area.path == "[stack]").map(|area| area.start);
    let top = stack.unwrap_or_else(|| all.iter().filter(|area| area.is_its_own()).map(|a| a.end).max().unwrap_or(0));
    let heap: Vec<&Area<'_>> = all.iter().filter(|area| area.path == "[heap]").collect();
    let heap = heap.first().zip(heap.last()).map(|(first, last)| (first.start, last.end));
    // The program's own code and data are below the heap, and its mappings are above the heap; without a heap, its
    // mappings are above the program's own file.
    let is_exe = |area: &&Area<'_>| area.is_file && Some(area.path) == exe;
    let own = all.iter().find(is_exe).or_else(|| all.iter().find(|area| area.is_file)).map(|area| area.path);
    let code: Vec<&Area<'_>> = all.iter().filter(|area| own == Some(area.path)).collect();
    let above = heap.map_or_else(|| code.iter().map(|area| area.end).max().unwrap_or(0), |(_, end)| end);
    let own_areas = || all.iter().filter(|area| area.is_its_own() && area.end <= top);
    let mapped = own_areas().filter(|area| area.start >= above).map(|area| area.start).min();
    // Mappings below the code are the heaps of Go and Java, which grow up.
    let below = heap.map(|(start, _)| start).into_iter().chain(code.iter().map(|area| area.start)).min().unwrap_or(0);
    let lowest = own_areas().filter(|area| area.end <= below).map(|area| area.start).min();
    let low = lowest.map(|start| (start / UNIT * UNIT, below / UNIT * UNIT));
    // The heap grows up and the mappings grow down; the gap between them is divided in the middle.
    let units = |(start, end): (u64, u64)| (start / UNIT * UNIT, end.div_ceil(UNIT) * UNIT);
    let middle = |low: u64, high: u64| low + (high - low) / 2 / UNIT * UNIT;
    let top = top / UNIT * UNIT;
    let rest = match (heap.map(units), mapped) {
        (Some((start, end)), Some(mapped)) if mapped / UNIT * UNIT > end => {
            let border = middle(end, mapped / UNIT * UNIT);
            vec![(start, border), (border, top)]
        }
        (Some((start, _)), _) => vec![(start, top)],
        (None, Some(mapped)) => vec![(mapped / UNIT * UNIT, top)],
        (None, None) => Vec::new(),
    };
    let roots: Vec<(u64, u64)> = low.into_iter().chain(rest).filter(|(start, end)| start < end).collect();
    let inside = |area: &Area<'_>| {
        // No area crosses the border of two roots that touch. The root below the code ends with a unit, inside an area.
        let root = roots[..roots.partition_point(|(start, _)| *start <= area.start)].last();
        root.filter(|(_, end)| area.start < *end).map(|(_, end)| (area.start, area.end.min(*end)))
    };
    let areas = all.iter().filter(|area| area.is_its_own() && area.end <= top).filter_map(inside).collect();
    Ok(Memory { roots: Roots::new(&roots)?, areas })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nodes::tests::put;
    use proptest::prelude::*;

    const PIE: &str = "\
55d000000000-55d000001000 r--p 00000000 fe:01 77   /usr/bin/redis server
55d000001000-55d000100000 r-xp 00001000 fe:01 77   /usr/bin/redis server
55d000200000-55d000210000 rw-p 00000000 00:00 0
55d012345000-55d052345000 rw-p 00000000 00:00 0    [heap]
7f0000000000-7f0040000000 rw-p 00000000 00:00 0
7f0040000000-7f0044000000 ---p 00000000 00:00 0
7f1000000000-7f1000200000 rw-s 00000000 00:01 5    /dev/zero (deleted)
7f2000000000-7f2000200000 r-xp 00000000 fe:01 99   /lib/libc.so.6
7f2000200000-7f2000300000 rw-s 00000000 00:05 12   /memfd:buffer (deleted)
7ffff0000000-7ffff0021000 rw-p 00000000 00:00 0    [stack]
7ffff0100000-7ffff0104000 r--p 00000000 00:00 0    [vvar]
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0 [vsyscall]
";

    #[test]
    fn heap_and_mappings_are_roots_and_code_data_and_stack_are_not() {
        let memory = parse(PIE, None).expect("a program");
        let roots: Vec<_> = memory.roots.ranges().collect();
        assert_eq!(roots.len(), 2);
        assert_eq!(roots[0].0, 0x55d0_1220_0000);
        assert_eq!((roots[0].1, roots[1].1), (roots[1].0, 0x7fff_f000_0000));
        assert!(roots[0].1 > 0x55d0_5234_5000 && roots[1].0 < 0x7f00_0000_0000);
        let starts: Vec<u64> = memory.areas.iter().map(|(start, _)| *start).collect();
        let heap = 0x55d0_1234_5000;
        assert_eq!(starts, [heap, 0x7f00_0000_0000, 0x7f10_0000_0000, 0x7f20_0020_0000]);
    }

    #[test]
    fn a_program_without_a_heap_has_one_root_and_one_without_memory_none() {
        let text: String =
            PIE.lines().filter(|line| !line.ends_with("[heap]")).map(|line| format!("{line}\n")).collect();
        let memory = parse(&text, None).expect("a program");
        assert_eq!(memory.roots.ranges().next().map(|(start, _)| start), Some(0x55d0_0020_0000));
        assert!(parse("", None).expect_err("nothing").to_string().contains("no roots"));
    }

    /// A JVM: its heap and its archive of classes lie far below its code, its own C heap behind that.
    const JAVA: &str = "\
6c0000000-6e0000000 rw-p 00000000 00:00 0
6e0000000-7c0000000 ---p 00000000 00:00 0
800000000-800c00000 rw-p 00001000 fe:01 70   /usr/lib/jvm/lib/server/classes.jsa
801000000-801400000 rw-p 00000000 00:00 0
40000000000-40080000000 rw-s 00000000 00:01 5    /memfd:java_heap (deleted)
561000000000-561000001000 r-xp 00000000 fe:01 77   /usr/lib/jvm/bin/java
561000003000-561000004000 rw-p 00000000 00:00 0
561001000000-561001021000 rw-p 00000000 00:00 0    [heap]
7f0000000000-7f0040000000 rw-p 00000000 00:00 0
7ffff0000000-7ffff0021000 rw-p 00000000 00:00 0    [stack]
";
    /// A Go program, built as a position-independent one: it has no C heap.
    const GO: &str = "\
c000000000-c040000000 rw-p 00000000 00:00 0
55d000000000-55d000800000 r-xp 00000000 fe:01 77   /usr/bin/server
55d000800000-55d000900000 rw-p 00800000 fe:01 77   /usr/bin/server
55d000900000-55d000980000 rw-p 00000000 00:00 0
7f0000000000-7f0004000000 rw-p 00000000 00:00 0
7ffff0000000-7ffff0021000 rw-p 00000000 00:00 0    [stack]
";

    #[test]
    fn memory_below_a_programs_code_is_a_root_and_may_grow_up_to_it() {
        let java = parse(JAVA, Some("/usr/lib/jvm/bin/java")).expect("a program");
        let roots: Vec<_> = java.roots.ranges().collect();
        assert_eq!(roots.len(), 3);
        assert_eq!((roots[0], roots[1].0), ((0x6_c000_0000, 0x5610_0000_0000), 0x5610_0100_0000));
        let starts: Vec<u64> = java.areas.iter().map(|(start, _)| *start).collect();
        let heaps = [0x6_c000_0000, 0x8_0100_0000, 0x400_0000_0000, 0x5610_0100_0000, 0x7f00_0000_0000];
        assert_eq!(starts, heaps, "all but code, data and stack");
        let go = parse(GO, Some("/usr/bin/server")).expect("a program");
        let roots: Vec<_> = go.roots.ranges().collect();
        assert_eq!(roots, [(0xc0_0000_0000, 0x55d0_0000_0000), (0x55d0_0080_0000, 0x7fff_f000_0000)]);
        assert_eq!((go.areas[0].0, go.areas.len()), (0xc0_0000_0000, 3));
        let unknown = parse(GO, None).expect("a program");
        assert_eq!(unknown, go, "the first file is taken for the program's");
    }

    #[test]
    fn the_memory_of_this_very_process_can_be_classified() {
        let found = memory(&Files::default(), std::process::id()).expect("this process");
        let here = Box::new([7u8; 1 << 20]);
        let address = here.as_ptr() as u64;
        assert!(found.roots.unit_of(address).is_some(), "{address:#x} in {found:?}");
        let gone = memory(&Files::default(), 0).expect_err("no process 0");
        assert!(gone.to_string().contains("/proc/0/maps"), "{gone}");
    }

    proptest! {
        #[test]
        fn any_text_is_a_map_or_an_error(
            text in "([0-9a-f]{1,16}-[0-9a-f]{1,16} [-rwxp]{4} 0 0:0 [01] [a-z/\\[\\]]{0,8}\n|.{0,30}\n){0,9}",
        ) {
            if let Ok(memory) = parse(&text, Some("/a")) {
                prop_assert!(memory.areas.iter().all(|(start, end)| start < end));
                let is_in = |address| memory.roots.ranges().any(|(start, end)| (start..end).contains(&address));
                prop_assert!(memory.areas.iter().all(|(start, end)| is_in(*start) && is_in(end - 1)));
            }
        }
    }

    fn process(root: &std::path::Path, pid: u32, pages: u64, environment: &str) {
        put(root, &format!("/proc/{pid}/statm"), &format!("{} {pages} 1 1 0 1 0\n", 2 * pages));
        let numbers: String = (0..30).map(|number| format!(" {}", number * 100 + pid)).collect();
        put(root, &format!("/proc/{pid}/stat"), &format!("{pid} (odd) name) S{numbers}\n"));
        put(root, &format!("/proc/{pid}/environ"), environment);
    }

    #[test]
    fn programs_are_chosen_by_size_and_their_own_word() {
        let root = tempfile::tempdir().expect("directory");
        let files = Files::below(root.path());
        process(root.path(), 10, 50_000, "A=1\0B=2\0");
        process(root.path(), 11, 90_000, "A=1\0BALLAST_TIERING=off\0");
        process(root.path(), 12, 100, "");
        process(root.path(), 13, 70_000, "");
        process(root.path(), 14, 60_000, "");
        put(root.path(), "/proc/self/statm", "1 1");
        let pids = |choice: &Choice| {
            choose(&files, choice).expect("chosen").iter().map(|program| program.pid).collect::<Vec<_>>()
        };
        let all = Choice::default();
        assert_eq!(pids(&all), [13, 14, 10]);
        assert_eq!(pids(&Choice { most: 1, ..all.clone() }), [13]);
        let found = choose(&files, &all).expect("chosen");
        assert_eq!((found[2].start, found[2].resident), (1810, 50_000 * 4096));
    }

    #[test]
    fn a_program_of_which_a_file_cannot_be_read_is_left_out_and_keeps_no_other_one_out() {
        let root = tempfile::tempdir().expect("directory");
        let files = Files::below(root.path());
        for (pid, file) in [(10, "statm"), (11, "stat"), (13, "environ"), (14, "none")] {
            process(root.path(), pid, 50_000, "");
            let path = root.path().join(format!("proc/{pid}/{file}"));
            let _ = std::fs::remove_file(&path);
            std::fs::create_dir(&path).expect("a directory, which has no text");
        }
        let found = choose(&files, &Choice::default()).expect("chosen");
        assert_eq!(found.iter().map(|program| program.pid).collect::<Vec<_>>(), [14]);
    }
}
