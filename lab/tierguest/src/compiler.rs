//! A compiler that compiles the same file again and again.
//!
//! Before: `cc1` of GCC is in the guest (`scripts/agent-image.sh --with cc1`). After: [`Compiler::compile`] compares
//! the output with the first one. Threads: the caller's, and a process for each compilation. Units: MiB. Promise: the
//! file has the same bytes in every run.

use std::fmt::Write;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::heat::random;

const SOURCE: &str = "/tmp/compiled.c";
const OUTPUT: &str = "/tmp/compiled.s";
/// Functions of the file, and statements of each.
const FUNCTIONS: u32 = 120;
const STATEMENTS: u32 = 20;

pub struct Compiler {
    mib: usize,
    first: Vec<u8>,
}

impl Compiler {
    /// A compiler that collects garbage only when it has this much.
    pub fn new(mib: usize) -> Result<Self> {
        std::fs::write(SOURCE, source()).context("Writing the file to be compiled")?;
        let mut this = Self { mib, first: Vec::new() };
        this.first = this.output()?;
        ensure!(!this.first.is_empty(), "the compiler wrote nothing");
        Ok(this)
    }

    pub fn compile(&self) -> Result<bool> {
        Ok(self.output()? == self.first)
    }

    fn output(&self) -> Result<Vec<u8>> {
        let heap = format!("ggc-min-heapsize={}", self.mib << 10);
        let words = ["-quiet", "-O2", "-ffreestanding", "--param", &heap, SOURCE, "-o", OUTPUT];
        let status = Command::new("cc1").args(words).status().context("Starting the compiler")?;
        ensure!(status.success(), "the compiler ended with {status}");
        std::fs::read(OUTPUT).context("Reading what was compiled")
    }
}

/// Functions with loops, branches and calls of each other.
fn source() -> String {
    let mut seed = 11;
    let mut next = move |below: u64| random(&mut seed) % below;
    let mut text = String::from("static unsigned t[256];\n");
    for function in 0..FUNCTIONS {
        let _ = writeln!(text, "unsigned f{function}(unsigned a, unsigned b) {{ unsigned c = a ^ b, d = 0;");
        for _ in 0..STATEMENTS {
            let (x, y, z) = (next(256), next(31) + 1, next(7) + 2);
            let _ = match next(4) {
                0 => {
                    writeln!(text, "for (unsigned i = 0; i < {z}; i++) {{ d += t[(a + i) & 255] * c; c ^= d >> {y}; }}")
                }
                1 => writeln!(text, "if (d & {x}) c += t[{x}]; else {{ a = b * {z} + c; t[a & 255] = d; }}"),
                2 if function > 0 => writeln!(text, "d ^= f{}(c, a + {x});", next(u64::from(function))),
                2 => writeln!(text, "d ^= c * {x};"),
                _ => writeln!(text, "switch (c % {z}) {{ case 0: a += {x}; break; case 1: b ^= d; default: d -= b; }}"),
            };
        }
        text.push_str("return a + b + c + d; }\n");
    }
    text
}
