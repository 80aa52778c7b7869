//! The use of the kernel's swap.
//!
//! Before: the bench has swap that no other program uses. After: figures of it. Units: bytes, pages.

use std::path::Path;

use anyhow::{Context, Result};
use ballast_base::PAGE_SIZE;

use crate::setting::{read, selected};

pub(crate) fn used_pages() -> Result<u64> {
    let text = read(Path::new("/proc/swaps"))?;
    let used_kib = |line: &str| line.split_ascii_whitespace().nth(3)?.parse::<u64>().ok();
    Ok(text.lines().skip(1).filter_map(used_kib).sum::<u64>() * 1024 / PAGE_SIZE as u64)
}

/// Bytes of memory that the zram device of this name uses for its pages, and its compression algorithm.
pub(crate) fn used(device: &Path) -> Result<(u64, String)> {
    let block = Path::new("/sys/block").join(device.file_name().context("a device has a name")?);
    let stat = read(&block.join("mm_stat"))?;
    let used = stat.split_ascii_whitespace().nth(2).and_then(|bytes| bytes.parse().ok());
    let algorithm = selected(&read(&block.join("comp_algorithm"))?).to_owned();
    Ok((used.with_context(|| format!("mm_stat says {stat:?}"))?, algorithm))
}
