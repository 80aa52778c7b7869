//! Reads `/proc/meminfo`.
//!
//! Before: code needs to know how much memory the host has. After: it has the number, in the kernel's unit or in bytes;
//! `None` if the kernel does not tell. Threads: any.

/// The number on the line of this key, in KiB or as a count of huge pages.
pub fn number(key: &str) -> Option<u64> {
    number_in(&std::fs::read_to_string("/proc/meminfo").ok()?, key)
}

/// As [`number`], from a text in the format of that file.
pub fn number_in(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
    line.split_ascii_whitespace().next()?.parse().ok()
}

/// The value of a line that is in KiB, converted to bytes.
pub fn bytes(key: &str) -> Option<u64> {
    number(key).map(|kib| kib * ballast_base::KIB)
}
