//! Groups of users, by name.
//!
//! Before: an operator names a group. After: its number, from whatever the host's name service asks.
//! Threads: any. Promise: a number is a group by itself, so a host without a name service can name one, too.

use std::ffi::CString;
use std::io;

/// The number of this group; `None` if there is no group of this name.
pub fn id(name: &str) -> io::Result<Option<u32>> {
    if let Ok(number) = name.parse() {
        return Ok(Some(number));
    }
    lookup(name, |name, buffer| {
        let mut found = std::ptr::null_mut();
        // SAFETY: zeros are a `group` without members, which the call overwrites.
        let mut entry: libc::group = unsafe { std::mem::zeroed() };
        // SAFETY: the name ends with zero, the buffer has the length that is given, and all outlive the call.
        let error = unsafe {
            libc::getgrnam_r(name.as_ptr(), &raw mut entry, buffer.as_mut_ptr().cast(), buffer.len(), &raw mut found)
        };
        (error, (!found.is_null()).then_some(entry.gr_gid))
    })
}

/// The number of this user; `None` if there is no user of this name.
pub fn user_id(name: &str) -> io::Result<Option<u32>> {
    if let Ok(number) = name.parse() {
        return Ok(Some(number));
    }
    lookup(name, |name, buffer| {
        let mut found = std::ptr::null_mut();
        // SAFETY: zeros are a `passwd`, which the call overwrites.
        let mut entry: libc::passwd = unsafe { std::mem::zeroed() };
        // SAFETY: as in `id`.
        let error = unsafe {
            libc::getpwnam_r(name.as_ptr(), &raw mut entry, buffer.as_mut_ptr().cast(), buffer.len(), &raw mut found)
        };
        (error, (!found.is_null()).then_some(entry.pw_uid))
    })
}

fn lookup(name: &str, ask: impl Fn(&CString, &mut [u8]) -> (i32, Option<u32>)) -> io::Result<Option<u32>> {
    let Ok(name) = CString::new(name) else { return Ok(None) };
    let mut buffer = vec![0_u8; 1024];
    loop {
        match ask(&name, &mut buffer) {
            (0, number) => return Ok(number),
            (libc::ERANGE, _) if buffer.len() < 1 << 20 => buffer.resize(buffer.len() * 4, 0),
            (libc::ENOENT | libc::ESRCH, _) => return Ok(None),
            (error, _) => return Err(io::Error::from_raw_os_error(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_and_a_user_are_found_by_name_or_number() {
        assert_eq!((id("root").expect("ask"), user_id("root").expect("ask")), (Some(0), Some(0)));
        assert_eq!((id("4711").expect("ask"), user_id("4711").expect("ask")), (Some(4711), Some(4711)));
        for none in ["no-such-group-here", "", "a\0b"] {
            assert_eq!((id(none).expect("ask"), user_id(none).expect("ask")), (None, None), "{none:?}");
        }
    }
}
