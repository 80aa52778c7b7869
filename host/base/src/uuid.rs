//! A VM's UUID, as its operator gave it.
//!
//! Before: the VMM's own command line has it (`-uuid`), or the program that links the client. After: the keeper keeps
//! it in the VM's state file. Promise: only the form with hyphens is read, which QEMU and libvirt write; the UUID of
//! zeros, which stands for none, is refused.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::invalid::Invalid;

/// 128 bits that an operator, or a management program, gave a VM. It stays with the VM over restarts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Uuid(pub [u8; 16]);

/// The bytes before which there is a hyphen.
const HYPHENS: [usize; 4] = [4, 6, 8, 10];

impl fmt::Display for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, byte) in self.0.iter().enumerate() {
            let hyphen = if HYPHENS.contains(&at) { "-" } else { "" };
            write!(f, "{hyphen}{byte:02x}")?;
        }
        Ok(())
    }
}

impl FromStr for Uuid {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        let wrong = || Invalid::from(format!("{text:?} is not a UUID, such as 123e4567-e89b-12d3-a456-426614174000"));
        let digits: String = text.split('-').collect();
        if digits.len() != 32 || !digits.is_ascii() {
            return Err(wrong());
        }
        let mut bytes = [0; 16];
        for (byte, at) in bytes.iter_mut().zip((0..32).step_by(2)) {
            *byte = u8::from_str_radix(&digits[at..at + 2], 16).map_err(|_| wrong())?;
        }
        let uuid = Self(bytes);
        // This refuses signs, and hyphens in other places.
        match uuid.to_string().eq_ignore_ascii_case(text) && bytes != [0; 16] {
            true => Ok(uuid),
            false => Err(wrong()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_is_read_in_one_form_and_written_in_it() {
        let text = "123e4567-e89b-12d3-a456-426614174000";
        let uuid: Uuid = text.parse().expect("one");
        assert_eq!((uuid.to_string().as_str(), uuid.0[0], uuid.0[15]), (text, 0x12, 0));
        assert_eq!(text.to_uppercase().parse(), Ok(uuid));
        for wrong in [
            "",
            "123e4567e89b12d3a456426614174000",
            "123e4567-e89b-12d3-a456-42661417400",
            "123e4567-e89b-12d3-a456-4266141740000",
            "123e-4567-e89b-12d3-a456426614174000",
            "+23e4567-e89b-12d3-a456-426614174000",
            "é23e456-e89b-12d3-a456-426614174000",
            "00000000-0000-0000-0000-000000000000",
        ] {
            assert!(wrong.parse::<Uuid>().is_err(), "{wrong}");
        }
    }
}
