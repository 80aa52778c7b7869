//! The program that a QEMU guest runs for a bench: it fills memory with known contents and touches it on command. The
//! guest's clock measures the time.
//!
//! Before: the guest's /init starts it, with the serial console as input and output. After: it exits at the end of its
//! input. Threads: one. Units: it prints times in ticks of the time stamp counter, and the whole round also in
//! nanoseconds. Promise: it uses no library. Every touch checks the word that it reads, and `v` compares every word.
//!
//! ```text
//! f PAGES KIND   fill (a power of two; KIND 0 half compressible, 1 noise)   -> filled
//! t SEED         touch every page once, in an order that SEED decides
//!                -> touched COUNT P50 P90 P99 MAX TICKS NS WRONG
//! r KIND MS      work for MS milliseconds (KIND 0 hot set, 1 zipf)          -> ran OPS NS WRONG
//! v              compare every word                                         -> verified WRONG
//! ```
#![no_std]
#![no_main]

use core::arch::{asm, global_asm};
use core::ptr::{read_volatile, write_volatile};

// The kernel enters with an aligned stack. A function expects a return address on it.
global_asm!(
    ".section .text._start",
    ".globl _start",
    "_start:",
    "xor ebp, ebp",
    "and rsp, -16",
    "call {main}",
    "ud2",
    main = sym main
);

const PAGE: usize = 4096;
const WORDS: usize = PAGE / 8;
/// Buckets of a histogram: exact below 32 ticks, then 32 per power of two.
const SUB: u64 = 32;
const BUCKETS: usize = 40 * SUB as usize;
/// Operations between two readings of the clock. A reading is a system call.
const BATCH: u64 = 64;

/// # Safety
/// The arguments are those of this system call, and pointers among them are valid for it.
unsafe fn call(number: usize, a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> isize {
    let result;
    // SAFETY: the caller's promise; the kernel changes rcx, r11 and the result only.
    unsafe {
        asm!("syscall", inlateout("rax") number => result, in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d,
            in("r8") e, in("r9") f, lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    result
}

fn read(byte: &mut u8) -> bool {
    // SAFETY: read(0, byte, 1).
    unsafe { call(0, 0, byte as *mut u8 as usize, 1, 0, 0, 0) == 1 }
}

fn write(text: &[u8]) {
    let mut done = 0;
    while done < text.len() {
        // SAFETY: write(1, text, len).
        let wrote = unsafe { call(1, 1, text.as_ptr() as usize + done, text.len() - done, 0, 0, 0) };
        if wrote <= 0 {
            exit(1);
        }
        done += wrote as usize;
    }
}

fn exit(status: usize) -> ! {
    loop {
        // SAFETY: exit_group(status).
        unsafe { call(231, status, 0, 0, 0, 0, 0) };
    }
}

fn now_ns() -> u64 {
    let mut time = [0u64; 2];
    // SAFETY: clock_gettime(CLOCK_MONOTONIC, time).
    unsafe { call(228, 1, time.as_mut_ptr() as usize, 0, 0, 0, 0) };
    time[0].wrapping_mul(1_000_000_000).wrapping_add(time[1])
}

fn ticks() -> u64 {
    // SAFETY: every x86-64 processor has it, and this kernel lets user mode read it.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// Print one line to the console: a name and numbers.
fn say(name: &[u8], numbers: &[u64]) {
    let mut line = [0u8; 256];
    let mut len = 0;
    let mut put = |byte: u8| {
        if len < line.len() {
            line[len] = byte;
            len += 1;
        }
    };
    b"BALLAST-SAYS ".iter().chain(name).for_each(|byte| put(*byte));
    for number in numbers {
        put(b' ');
        let mut unit = 1u64;
        while *number / unit >= 10 {
            unit *= 10;
        }
        while unit > 0 {
            put(b'0' + (*number / unit % 10) as u8);
            unit /= 10;
        }
    }
    put(b'\n');
    write(&line[..len]);
}

/// Read a command: its letter and two numbers. Returns false at the end of input.
fn hear(command: &mut (u8, u64, u64)) -> bool {
    *command = (0, 0, 0);
    let (mut at, mut byte) = (0, 0);
    loop {
        if !read(&mut byte) {
            return false;
        }
        match byte {
            b'\n' if command.0 == 0 => {}
            b'\n' => return true,
            b' ' => at += 1,
            b'0'..=b'9' => {
                let number = if at == 1 { &mut command.1 } else { &mut command.2 };
                *number = number.wrapping_mul(10).wrapping_add(u64::from(byte - b'0'));
            }
            b'a'..=b'z' => command.0 = byte,
            _ => {}
        }
    }
}

fn mix(mut word: u64) -> u64 {
    word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ word >> 31
}

/// Guest memory, and the rule for its contents.
struct Memory {
    base: *mut u64,
    pages: u64,
    noise: bool,
    /// Rounds of touches. Each added one to the first word of every page.
    rounds: u64,
}

impl Memory {
    fn word(&self, page: u64, index: usize) -> u64 {
        // 64 bytes of noise alternate with 64 of zeros.
        if !self.noise && index / 8 % 2 == 1 {
            return 0;
        }
        let word = mix((page * WORDS as u64 + index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        if index == 0 { word.wrapping_add(self.rounds) } else { word }
    }

    fn at(&self, page: u64, index: usize) -> *mut u64 {
        // SAFETY: callers pass pages below `self.pages` and indexes below WORDS: inside the mapping.
        unsafe { self.base.add(page as usize * WORDS + index) }
    }

    fn read(&self, page: u64, index: usize) -> u64 {
        // SAFETY: inside the mapping.
        unsafe { read_volatile(self.at(page, index)) }
    }

    fn write(&self, page: u64, index: usize, word: u64) {
        // SAFETY: inside the mapping, which is this thread's alone.
        unsafe { write_volatile(self.at(page, index), word) }
    }

    /// A permutation of the pages that needs no table: it multiplies and folds, and both can be inverted.
    fn permuted(&self, number: u64, seed: u64) -> u64 {
        let mask = self.pages - 1;
        let fold = (64 - mask.leading_zeros()).div_ceil(2).max(1);
        let mut page = number.wrapping_add(mix(seed.wrapping_add(1))) & mask;
        for factor in [0x9e37_79b9_7f4a_7c15, 0xbf58_476d_1ce4_e5b9, 0x94d0_49bb_1331_11eb_u64] {
            page = page.wrapping_mul(factor | 1) & mask;
            page ^= page >> fold;
        }
        page
    }
}

fn fill(pages: u64, kind: u64) -> Memory {
    // SAFETY: mmap(any, pages, READ | WRITE, PRIVATE | ANONYMOUS, -1, 0).
    let base = unsafe { call(9, 0, pages as usize * PAGE, 3, 0x22, usize::MAX, 0) };
    if base < 0 || !pages.is_power_of_two() {
        say(b"cannot-fill", &[pages]);
        exit(1);
    }
    let memory = Memory { base: base as *mut u64, pages, noise: kind == 1, rounds: 0 };
    for page in 0..pages {
        (0..WORDS).for_each(|index| memory.write(page, index, memory.word(page, index)));
    }
    memory
}

fn bucket(ticks: u64) -> usize {
    if ticks < SUB {
        return ticks as usize;
    }
    let power = u64::from(ticks.ilog2() - SUB.ilog2());
    (((power + 1) * SUB + (ticks >> power) - SUB) as usize).min(BUCKETS - 1)
}

fn upper_edge(bucket: usize) -> u64 {
    let (power, sub) = (bucket as u64 / SUB, bucket as u64 % SUB);
    if power == 0 { sub } else { ((SUB + sub + 1) << (power - 1)) - 1 }
}

fn touch(memory: &mut Memory, seed: u64, counts: &mut [u32; BUCKETS]) {
    (0..BUCKETS).for_each(|bucket| counts[bucket] = 0);
    let (mut wrong, mut longest) = (0, 0);
    let (start_ns, start) = (now_ns(), ticks());
    for number in 0..memory.pages {
        let page = memory.permuted(number, seed);
        let begin = ticks();
        let found = memory.read(page, 0);
        memory.write(page, 0, found.wrapping_add(1));
        let took = ticks().wrapping_sub(begin);
        counts[bucket(took)] += 1;
        longest = if took > longest { took } else { longest };
        wrong += u64::from(found != memory.word(page, 0));
    }
    let (took, took_ns) = (ticks().wrapping_sub(start), now_ns().wrapping_sub(start_ns));
    memory.rounds = memory.rounds.wrapping_add(1);
    let percentile = |percent: u64| {
        let rank = (memory.pages * percent).div_ceil(100);
        let (mut seen, mut at) = (0, 0);
        while at < BUCKETS {
            seen += u64::from(counts[at]);
            if seen >= rank {
                break;
            }
            at += 1;
        }
        if upper_edge(at) < longest { upper_edge(at) } else { longest }
    };
    let at = [percentile(50), percentile(90), percentile(99)];
    say(b"touched", &[memory.pages, at[0], at[1], at[2], longest, took, took_ns, wrong]);
}

/// Operations on pages. Each checks eight words of a page and writes one.
fn work(memory: &Memory, zipf: bool, ms: u64, state: &mut u64) {
    let (start, mut ops, mut wrong) = (now_ns(), 0u64, 0u64);
    let bits = u64::from(memory.pages.ilog2());
    loop {
        for _ in 0..BATCH {
            *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let draw = mix(*state);
            // Hot set: 9 operations of 10 take a tenth of the pages. Zipf: each power of two of ranks takes as many.
            let rank = if zipf {
                let power = draw % (bits + 1);
                let upto = 1u64 << power;
                if power == 0 { 0 } else { upto / 2 + (draw >> 32) % (upto / 2) }
            } else if draw % 10 == 0 {
                (draw >> 32) % memory.pages
            } else {
                (draw >> 32) % (memory.pages / 10).max(1)
            };
            let page = if zipf { memory.permuted(rank, 0) } else { rank };
            for part in 0..8 {
                let index = part * (WORDS / 8);
                wrong += u64::from(memory.read(page, index) != memory.word(page, index));
            }
            memory.write(page, 0, memory.word(page, 0));
        }
        ops += BATCH;
        let took = now_ns().wrapping_sub(start);
        if took >= ms * 1_000_000 {
            return say(b"ran", &[ops, took, wrong]);
        }
    }
}

extern "C" fn main() -> ! {
    let mut command = (0, 0, 0);
    let mut counts = [0; BUCKETS];
    let mut memory = Memory { base: core::ptr::null_mut(), pages: 0, noise: false, rounds: 0 };
    let mut state = 0;
    while hear(&mut command) {
        match (command.0, memory.pages) {
            (b'f', 0) => {
                memory = fill(command.1, command.2);
                say(b"filled", &[]);
            }
            (b't', 1..) => touch(&mut memory, command.1, &mut counts),
            (b'r', 1..) => work(&memory, command.1 == 1, command.2, &mut state),
            (b'v', 1..) => {
                let mut wrong = 0;
                for page in 0..memory.pages {
                    (0..WORDS).for_each(|index| {
                        wrong += u64::from(memory.read(page, index) != memory.word(page, index));
                    });
                }
                say(b"verified", &[wrong]);
            }
            _ => say(b"cannot", &[]),
        }
    }
    exit(0)
}

/// The compiler turns loops and array initializers into calls of it.
///
/// # Safety
/// The rules of `memset` in C.
#[unsafe(no_mangle)]
unsafe extern "C" fn memset(to: *mut u8, byte: i32, len: usize) -> *mut u8 {
    // SAFETY: the caller's promise.
    unsafe {
        asm!("rep stosb", inout("rdi") to => _, in("al") byte as u8, inout("rcx") len => _, options(nostack));
    }
    to
}

/// The unwind tables of `core` name it. Nothing unwinds here.
#[unsafe(no_mangle)]
extern "C" fn rust_eh_personality() {}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    exit(2)
}
