//! The key that seals a VM's pages on other machines, in the VM's state file: each engine of the VM gets it with the
//! VM's descriptors, and no other process does.
//!
//! Before: an engine made the key, for a VM whose pages will be sealed. After: each later engine has it.
//! Threads: the one that opens the VM. Units: words.
//! Promise: a key is complete, or known to be damaged, or never existed.
//!
//! The VM's own VMM, which keeps the file in escrow, could read the key, but it has the guest's memory anyway.

use std::sync::atomic::Ordering;

use crate::state_file::{SECRET_WORDS, StateFile};

/// The generation from which the key is used (0: there is no key), the key, a checksum.
const WORDS: usize = SECRET_WORDS;

/// The key of a VM, if any.
#[derive(Clone, PartialEq, Eq)]
pub enum Secret {
    /// The VM has no key.
    None,
    /// The VM had a key, and its words are damaged.
    Damaged,
    /// The VM has a key.
    Kept {
        /// Pages whose handle in their store is larger are sealed.
        since: u64,
        /// Seals the pages on other machines.
        key: [u8; 32],
    },
}

impl std::fmt::Debug for Secret {
    /// Without the key.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::None => f.write_str("None"),
            Self::Damaged => f.write_str("Damaged"),
            Self::Kept { since, .. } => write!(f, "Kept since {since}"),
        }
    }
}

/// A checksum that is not 0 for zeros, and that each change of one word changes.
fn checksum(since: u64, key: &[u64; 4]) -> u64 {
    key.iter()
        .chain([&since])
        .fold(0x6261_6c6c_6173_7421, |sum: u64, word| (sum ^ word).rotate_left(29).wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

impl StateFile {
    /// The VM's key.
    pub fn secret(&self) -> Secret {
        let words: [u64; WORDS] = std::array::from_fn(|at| self.secret_words()[at].load(Ordering::Acquire));
        let [since, a, b, c, d, sum] = words;
        if words == [0; WORDS] {
            return Secret::None;
        }
        let key = [a, b, c, d];
        if since == 0 || sum != checksum(since, &key) {
            return Secret::Damaged;
        }
        let mut bytes = [0; 32];
        bytes.as_chunks_mut::<8>().0.iter_mut().zip(key).for_each(|(bytes, word)| *bytes = word.to_le_bytes());
        Secret::Kept { since, key: bytes }
    }

    /// Writes this key for a VM that has none. `since` is not 0.
    pub fn keep_secret(&self, since: u64, key: &[u8; 32]) {
        let words: [u64; 4] = std::array::from_fn(|at| u64::from_le_bytes(key.as_chunks::<8>().0[at]));
        let values = words.into_iter().chain([checksum(since, &words), since]);
        // The generation is written last: until then the key counts as damaged, and seals no page.
        for (at, value) in [1, 2, 3, 4, 5, 0].into_iter().zip(values) {
            self.secret_words()[at].store(value, Ordering::Release);
        }
        self.remember();
    }

    /// Removes a key whose engine died while it wrote it, before it sealed any page.
    pub fn forget_unused_secret(&self) {
        if self.secret_words()[0].load(Ordering::Acquire) == 0 {
            self.secret_words().iter().for_each(|word| word.store(0, Ordering::Release));
            self.remember();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_base::wire::VmId;

    fn open(file: &StateFile) -> StateFile {
        StateFile::open(file.fd().try_clone_to_owned().expect("dup")).expect("open")
    }

    #[test]
    fn the_next_reader_of_the_file_finds_the_key() {
        let file = StateFile::create(VmId([1; 16]), "vm").expect("create");
        assert_eq!(file.secret(), Secret::None);
        let key = std::array::from_fn(|at| at as u8);
        file.keep_secret(7, &key);
        assert_eq!(open(&file).secret(), Secret::Kept { since: 7, key });
        assert!(!format!("{:?}", file.secret()).contains("31"));
    }

    #[test]
    fn a_damaged_key_is_recognised_and_an_incomplete_one_is_removed() {
        for word in 0..WORDS {
            let file = StateFile::create(VmId([1; 16]), "vm").expect("create");
            file.keep_secret(7, &[3; 32]);
            file.secret_words()[word].fetch_xor(1 << 17, Ordering::AcqRel);
            assert_eq!(open(&file).secret(), Secret::Damaged, "word {word}");
            file.forget_unused_secret();
            assert_eq!(open(&file).secret(), Secret::Damaged, "word {word}");
            file.secret_words()[0].store(0, Ordering::Release);
            open(&file).forget_unused_secret();
            assert_eq!(open(&file).secret(), Secret::None);
        }
    }
}
