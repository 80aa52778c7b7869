//! Adds a program to a guest's initrd, as a second archive behind the first. The kernel unpacks both in order.
//!
//! Before: the initrd of the image. After: a copy of it that also has `/bench-guest`.
//! Threads: none. Units: bytes; numbers in the archive are hexadecimal (`newc`).
//! Promise: the first archive is copied as it is.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

/// The path of the program in the guest.
pub(super) const BENCH: &str = "/bench-guest";
/// `guest/linux.rs`, as the build script compiled it.
static PROGRAM: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/linux-guest"));
/// Alignment in bytes of archives and of their parts.
const ALIGN: usize = 4;

/// Copy an initrd, and add the bench program to the copy.
pub(super) fn with_bench(from: &Path, to: &Path) -> io::Result<()> {
    if PROGRAM.is_empty() {
        return Err(io::Error::new(io::ErrorKind::Unsupported, "the bench program is for x86-64"));
    }
    let mut out = File::create(to)?;
    let copied = io::copy(&mut File::open(from)?, &mut out)?;
    out.write_all(&[0; ALIGN][..copied.next_multiple_of(ALIGN as u64) as usize - copied as usize])?;
    out.write_all(&archive(BENCH.trim_start_matches('/'), PROGRAM))
}

/// Returns an archive of one executable file.
fn archive(name: &str, contents: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(contents.len() + 512);
    let mut entry = |name: &str, mode: u32, contents: &[u8]| {
        // Inode, mode, owner, group, links, time, size, four device numbers, length of the name, checksum (unused).
        let fields = [1, mode, 0, 0, 1, 0, contents.len() as u32, 0, 0, 0, 0, name.len() as u32 + 1, 0]
            .map(|field| format!("{field:08x}"));
        bytes.extend_from_slice(format!("070701{}{name}\0", fields.concat()).as_bytes());
        bytes.resize(bytes.len().next_multiple_of(ALIGN), 0);
        bytes.extend_from_slice(contents);
        bytes.resize(bytes.len().next_multiple_of(ALIGN), 0);
    };
    entry(name, 0o100_755, contents);
    entry("TRAILER!!!", 0, &[]);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_have_110_bytes_and_parts_begin_at_multiples_of_four() {
        let bytes = archive("ab", b"12345");
        assert_eq!(&bytes[..6], b"070701");
        assert_eq!((&bytes[110..113], &bytes[116..121]), (&b"ab\0"[..], &b"12345"[..]));
        assert_eq!(&bytes[124..130], b"070701");
        assert!(bytes.len().is_multiple_of(ALIGN) && bytes.ends_with(b"TRAILER!!!\0\0\0\0"));
    }
}
