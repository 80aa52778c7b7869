//! Swap devices: writes a swap header with a note, and switches a device on and off.
//!
//! Before: `bench` has a zram device of its own. After: the kernel swaps to it, until it is switched off.
//! Threads: any. Units: bytes. Promise: `sign` writes only the first page of the device.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::Path;

use ballast_base::{Bytes, PAGE_SIZE};

/// The highest priority that a swap device can have.
pub const TOP_PRIORITY: u16 = 0x7FFF;

const SWAP_FLAG_PREFER: i32 = 0x8000;

/// Bytes at the beginning of a swap header that the kernel does not use: space for a boot loader, or for a note.
const BOOT_BITS: usize = 1024;

/// Write the header of an empty swap area of `size` bytes (`union swap_header`, version 1) with a note of up to 1 KiB.
pub fn sign(device: &Path, size: Bytes, note: &str) -> io::Result<()> {
    let mut page = [0; PAGE_SIZE];
    if note.len() >= BOOT_BITS {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the note is longer than 1 KiB"));
    }
    page[..note.len()].copy_from_slice(note.as_bytes());
    let last_page = u32::try_from(size.pages_floor().0.saturating_sub(1)).map_err(io::Error::other)?;
    page[BOOT_BITS..BOOT_BITS + 4].copy_from_slice(&1u32.to_ne_bytes());
    page[BOOT_BITS + 4..BOOT_BITS + 8].copy_from_slice(&last_page.to_ne_bytes());
    page[PAGE_SIZE - 10..].copy_from_slice(b"SWAPSPACE2");
    let file = File::options().write(true).open(device)?;
    file.write_all_at(&page, 0)?;
    file.sync_all()
}

/// The note in the header of a swap area, also of one in use; empty if there is none.
pub fn note(device: &Path) -> io::Result<String> {
    let mut page = [0; BOOT_BITS];
    File::open(device)?.read_exact_at(&mut page, 0)?;
    let len = page.iter().position(|byte| *byte == 0).unwrap_or(BOOT_BITS);
    Ok(String::from_utf8_lossy(&page[..len]).into_owned())
}

/// Let the kernel swap to a signed device, with this priority.
pub fn on(device: &Path, priority: u16) -> io::Result<()> {
    let path = CString::new(device.as_os_str().as_bytes())?;
    let flags = SWAP_FLAG_PREFER | i32::from(priority.min(TOP_PRIORITY));
    // SAFETY: the path is a live C string; the call takes it and an integer.
    if unsafe { libc::swapon(path.as_ptr(), flags) } == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Stop swapping to a device; its pages are read into memory first.
pub fn off(device: &Path) -> io::Result<()> {
    let path = CString::new(device.as_os_str().as_bytes())?;
    // SAFETY: the path is a live C string.
    if unsafe { libc::swapoff(path.as_ptr()) } == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
