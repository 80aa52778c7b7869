//! Just enough BPF to read kernel memory: an assembler, and the system calls to load a program and run it.
//!
//! Before: `pins` writes its program with [`Asm`]. After: the kernel has checked it, and [`Program::run`] runs it once,
//! on the calling thread.
//! Threads: any. Units: bytes. Promise: a program reads only what the kernel lets it read, and writes only to its map.
//! If the kernel's verifier rejects a program, the error has the last lines of the verifier's log.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Registers, by their numbers. The first argument of a program or call is in `R1`; calls keep `R6` to `R9` and put
/// their result into `R0`; `FP` is the upper end of 512 bytes of stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Reg {
    /// Result.
    R0 = 0,
    /// First argument.
    R1,
    /// Second argument.
    R2,
    /// Third argument.
    R3,
    /// Kept by calls.
    R6 = 6,
    /// Kept by calls.
    R7,
    /// Kept by calls.
    R8,
    /// Kept by calls.
    R9,
    /// The stack.
    Fp,
}

/// Kernel functions (helpers) that programs call (`linux/bpf.h`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Call {
    /// The value of an entry of a map, or null.
    MapLookup = 1,
    /// The `task_struct` of the thread that runs.
    CurrentTask = 35,
    /// Copy kernel memory: target, length, address. 0, or an error if no memory is mapped at that address.
    ProbeReadKernel = 113,
}

/// The size of a load or store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Width {
    /// Four bytes.
    Word = 0x00,
    /// Eight bytes.
    Double = 0x18,
}

/// Operations on two numbers of 64 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Op {
    /// Addition.
    Add = 0x00,
    /// Multiplication.
    Mul = 0x20,
    /// Bitwise and.
    And = 0x50,
    /// Shift to the left.
    Lsh = 0x60,
    /// Shift to the right.
    Rsh = 0x70,
    /// Copy.
    Mov = 0xB0,
}

/// Conditions of a jump; unsigned numbers of 64 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum If {
    /// Equal.
    Eq = 0x10,
    /// Greater.
    Gt = 0x20,
    /// Greater or equal.
    Ge = 0x30,
    /// Not equal.
    Ne = 0x50,
    /// Less or equal.
    Le = 0xB0,
}

/// The second operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum With {
    /// A register.
    Reg(Reg),
    /// A number.
    Imm(i32),
}

impl From<Reg> for With {
    fn from(reg: Reg) -> Self {
        Self::Reg(reg)
    }
}

impl From<i32> for With {
    fn from(value: i32) -> Self {
        Self::Imm(value)
    }
}

/// One instruction, in the kernel's layout.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct Insn {
    code: u8,
    regs: u8,
    off: i16,
    imm: i32,
}

/// A place to jump to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Label(usize);

/// A program under construction.
#[derive(Debug, Default)]
pub struct Asm {
    insns: Vec<Insn>,
    labels: usize,
    places: HashMap<Label, usize>,
    jumps: Vec<(usize, Label)>,
}

impl Asm {
    const ALU64: u8 = 0x07;
    const JMP: u8 = 0x05;
    /// A jump that the verifier need not follow to the end (Linux 6.9).
    const MAY_GOTO: u8 = Self::JMP | 0xE0;
    const X: u8 = 0x08;
    const LDX_MEM: u8 = 0x61;
    const STX_MEM: u8 = 0x63;
    const ST_MEM: u8 = 0x62;
    const LD_IMM64: u8 = 0x18;
    const PSEUDO_MAP_FD: u8 = 1;

    fn push(&mut self, code: u8, dst: Reg, src: u8, off: i16, imm: i32) {
        self.insns.push(Insn { code, regs: dst as u8 | src << 4, off, imm });
    }

    fn push_with(&mut self, code: u8, dst: Reg, off: i16, with: With) {
        match with {
            With::Reg(src) => self.push(code | Self::X, dst, src as u8, off, 0),
            With::Imm(imm) => self.push(code, dst, 0, off, imm),
        }
    }

    /// A label that is not placed yet.
    pub fn label(&mut self) -> Label {
        self.labels += 1;
        Label(self.labels)
    }

    /// Place the label here.
    pub fn place(&mut self, label: Label) {
        self.places.insert(label, self.insns.len());
    }

    /// `dst = dst op with`, or `dst = with`.
    pub fn alu(&mut self, op: Op, dst: Reg, with: impl Into<With>) {
        self.push_with(Self::ALU64 | op as u8, dst, 0, with.into());
    }

    /// `dst = *(base + off)`.
    pub fn load(&mut self, width: Width, dst: Reg, base: Reg, off: i16) {
        self.push(Self::LDX_MEM | width as u8, dst, base as u8, off, 0);
    }

    /// `*(base + off) = with`.
    pub fn store(&mut self, width: Width, base: Reg, off: i16, with: impl Into<With>) {
        match with.into() {
            With::Reg(src) => self.push(Self::STX_MEM | width as u8, base, src as u8, off, 0),
            With::Imm(imm) => self.push(Self::ST_MEM | width as u8, base, 0, off, imm),
        }
    }

    /// `dst` = the map.
    pub fn load_map(&mut self, dst: Reg, map: BorrowedFd<'_>) {
        self.push(Self::LD_IMM64, dst, Self::PSEUDO_MAP_FD, 0, map.as_raw_fd());
        self.insns.push(Insn { code: 0, regs: 0, off: 0, imm: 0 });
    }

    /// `R0` = the function's result.
    pub fn call(&mut self, call: Call) {
        self.push(Self::JMP | 0x80, Reg::R0, 0, 0, call as i32);
    }

    /// Jump to the label if the condition holds for `a` and `b`.
    pub fn jump_if(&mut self, how: If, a: Reg, b: impl Into<With>, to: Label) {
        self.jumps.push((self.insns.len(), to));
        self.push_with(Self::JMP | how as u8, a, 0, b.into());
    }

    /// Jump to the label.
    pub fn jump(&mut self, to: Label) {
        self.jumps.push((self.insns.len(), to));
        self.push(Self::JMP, Reg::R0, 0, 0, 0);
    }

    /// Begin one more turn of a loop, or continue at the label if the program has had some millions of them. The
    /// kernel's verifier then goes through the loop until it finds nothing new, and not once for each turn.
    pub fn turn_or(&mut self, over: Label) {
        self.jumps.push((self.insns.len(), over));
        self.push(Self::MAY_GOTO, Reg::R0, 0, 0, 0);
    }

    /// Exit with this result.
    pub fn exit(&mut self, result: i32) {
        self.alu(Op::Mov, Reg::R0, result);
        self.push(Self::JMP | 0x90, Reg::R0, 0, 0, 0);
    }

    /// Every jump gets the offset of its label.
    fn finish(mut self) -> io::Result<Vec<Insn>> {
        for (at, label) in self.jumps {
            let place = self.places.get(&label).map(|place| *place as i64 - at as i64 - 1);
            let off = place.and_then(|off| i16::try_from(off).ok());
            self.insns[at].off = off.ok_or_else(|| io::Error::other("a jump of a BPF program has no target"))?;
        }
        Ok(self.insns)
    }
}

/// Call `bpf(2)` with one command and its arguments, laid out as the kernel expects them.
///
/// # Safety
/// `attr` is the structure of the command, and the addresses in it are of live memory of the lengths it says.
unsafe fn bpf<T>(command: libc::c_long, attr: &mut T) -> io::Result<i32> {
    // SAFETY: the caller's promise; the structure itself is exclusively ours during the call.
    let done = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(attr), size_of::<T>()) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(done as i32) }
}

/// Make an array of `entries` values of `value_bytes` each that can be mapped as a shared file.
pub fn create_array(entries: u32, value_bytes: u32) -> io::Result<OwnedFd> {
    #[repr(C)]
    struct Attr {
        map_type: u32,
        key_size: u32,
        value_size: u32,
        max_entries: u32,
        flags: u32,
    }
    const MAP_CREATE: libc::c_long = 0;
    const ARRAY: u32 = 2;
    const MMAPABLE: u32 = 1 << 10;
    let mut attr =
        Attr { map_type: ARRAY, key_size: 4, value_size: value_bytes, max_entries: entries, flags: MMAPABLE };
    // SAFETY: `Attr` begins as `union bpf_attr` does for this command (missing fields count as zero); no addresses.
    let fd = unsafe { bpf(MAP_CREATE, &mut attr)? };
    // SAFETY: the kernel just gave us this descriptor, and no other code knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// A loaded program.
#[derive(Debug)]
pub struct Program {
    fd: OwnedFd,
}

impl Program {
    /// Load a program for raw tracepoints. It is attached to none; it runs only when [`Program::run`] is called.
    ///
    /// # Errors
    /// The kernel does not allow it, or its verifier rejects the program: the error has the last lines of its log.
    pub fn load(asm: Asm) -> io::Result<Self> {
        #[repr(C)]
        struct Attr {
            program_type: u32,
            count: u32,
            insns: u64,
            license: u64,
            log_level: u32,
            log_size: u32,
            log: u64,
        }
        const PROG_LOAD: libc::c_long = 5;
        const RAW_TRACEPOINT: u32 = 17;
        const LAST: usize = 4;
        let insns = asm.finish()?;
        // To read kernel memory a program must have a licence that the kernel considers compatible; this one has.
        let license = c"Dual BSD/GPL";
        let attempt = |log: &mut [u8]| {
            let mut attr = Attr {
                program_type: RAW_TRACEPOINT,
                count: insns.len() as u32,
                insns: insns.as_ptr() as u64,
                license: license.as_ptr() as u64,
                log_level: u32::from(!log.is_empty()),
                log_size: log.len() as u32,
                log: if log.is_empty() { 0 } else { log.as_mut_ptr() as u64 },
            };
            // SAFETY: `Attr` begins as `union bpf_attr` does for this command; the instructions, the licence and the
            // log outlive the call, and have the lengths in `Attr`.
            unsafe { bpf(PROG_LOAD, &mut attr) }
        };
        let fd = attempt(&mut []).or_else(|error| {
            let mut log = vec![0; 1 << 20];
            let error = match attempt(&mut log) {
                Ok(fd) => return Ok(fd),
                // The log was too short for all its text; the first error is the one that counts.
                Err(again) if again.raw_os_error() == Some(libc::ENOSPC) => error,
                Err(again) => again,
            };
            let text = String::from_utf8_lossy(log.split(|byte| *byte == 0).next().unwrap_or_default()).into_owned();
            let mut last: Vec<&str> = text.lines().rev().take(LAST).collect();
            last.reverse();
            let said = if last.is_empty() { String::new() } else { format!(" ({})", last.join("; ")) };
            Err(io::Error::new(error.kind(), format!("loading a BPF program: {error}{said}")))
        })?;
        // SAFETY: the kernel just gave us this descriptor, and no other code knows it.
        Ok(Self { fd: unsafe { OwnedFd::from_raw_fd(fd) } })
    }

    /// Run the program once with these arguments. Returns its result.
    pub fn run(&self, arguments: &[u64]) -> io::Result<u32> {
        #[repr(C)]
        struct Attr {
            program: u32,
            result: u32,
            data: [u32; 2],
            data_in_out: [u64; 2],
            repeat: u32,
            duration: u32,
            context_bytes: u32,
            context_out_bytes: u32,
            context: u64,
            context_out: u64,
            flags: u32,
            cpu: u32,
        }
        const PROG_TEST_RUN: libc::c_long = 10;
        let mut attr = Attr {
            program: self.fd.as_raw_fd() as u32,
            result: 0,
            data: [0; 2],
            data_in_out: [0; 2],
            repeat: 0,
            duration: 0,
            context_bytes: size_of_val(arguments) as u32,
            context_out_bytes: 0,
            context: arguments.as_ptr() as u64,
            context_out: 0,
            flags: 0,
            cpu: 0,
        };
        // SAFETY: `Attr` begins as `union bpf_attr` does for this command; the arguments outlive the call and are as
        // long as it says. The kernel writes only the result.
        unsafe { bpf(PROG_TEST_RUN, &mut attr)? };
        Ok(attr.result)
    }

    /// How many instructions the kernel's verifier went through, and how many the program has.
    #[cfg(test)]
    pub(crate) fn verified(&self) -> io::Result<(u32, u32)> {
        #[repr(C)]
        struct Attr {
            program: u32,
            bytes: u32,
            info: u64,
        }
        const OBJ_GET_INFO_BY_FD: libc::c_long = 15;
        /// Words of `struct bpf_prog_info` up to `verified_insns`, and which one is the length in bytes.
        const WORDS: usize = 55;
        const XLATED_BYTES: usize = 5;
        let mut info = [0_u32; WORDS];
        let bytes = size_of_val(&info) as u32;
        let mut attr = Attr { program: self.fd.as_raw_fd() as u32, bytes, info: info.as_mut_ptr() as u64 };
        // SAFETY: `Attr` begins as `union bpf_attr` does for this command; the kernel writes at most as many bytes as
        // it says to `info`, which outlives the call.
        unsafe { bpf(OBJ_GET_INFO_BY_FD, &mut attr)? };
        Ok((info[WORDS - 1], info[XLATED_BYTES] / size_of::<Insn>() as u32))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_testkit::skip;

    #[test]
    fn a_program_runs_with_its_argument_and_returns_a_result() {
        let mut asm = Asm::default();
        let (again, out) = (asm.label(), asm.label());
        // Returns twice the argument, at most 16.
        asm.load(Width::Double, Reg::R6, Reg::R1, 0);
        asm.alu(Op::Mov, Reg::R7, 0);
        asm.place(again);
        asm.jump_if(If::Ge, Reg::R7, Reg::R6, out);
        asm.alu(Op::Add, Reg::R7, 1);
        asm.jump_if(If::Le, Reg::R7, 7, again);
        asm.place(out);
        asm.alu(Op::Lsh, Reg::R7, 1);
        asm.alu(Op::Mov, Reg::R0, Reg::R7);
        asm.push(Asm::JMP | 0x90, Reg::R0, 0, 0, 0);
        let Ok(program) = Program::load(asm).inspect_err(|error| skip("bpf", error)) else { return };
        assert_eq!([3, 100].map(|argument| program.run(&[argument]).expect("run")), [6, 16]);
        assert!(program.run(&[]).is_err(), "an argument is missing");
    }

    #[test]
    fn a_program_that_the_kernel_does_not_accept_is_an_error_that_says_why() {
        let mut asm = Asm::default();
        asm.load(Width::Double, Reg::R1, Reg::R9, 0);
        asm.exit(0);
        let error = Program::load(asm).expect_err("it reads a register that was never written").to_string();
        if error.contains("Operation not permitted") {
            return skip("bpf", error);
        }
        assert!(error.contains("R9"), "{error}");
        let mut asm = Asm::default();
        let nowhere = asm.label();
        asm.jump(nowhere);
        assert!(Program::load(asm).is_err());
    }
}
