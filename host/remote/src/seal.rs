//! Sealing: pages leave the host encrypted with their VM's key (AES-256-GCM), so nobody else reads or forges them.
//!
//! Before: `store` has the blob of a page, or a value that a server returned. After: it has the sealed value; or the
//! blob, if the value was sealed for that page and generation.
//! Threads: any; pure. Units: a sealed value is [`TAG_BYTES`] longer.
//! Promise: no two values of a VM are sealed with the same nonce. The nonce is the generation, which is unique to one
//! run of pages (`store`), and the page's index in its chunk. VM, region, page and generation are authenticated. The
//! value of another page, or an older value of the same page, is refused like a damaged one.
//!
//! Servers still see which pages each VM has there, when they are written and removed, and how well each compresses.

use ballast_base::store::{Handle, PageBytes, PageKey};
use ballast_store::blob::{self, BLOB_MAX};
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::rand::{SecureRandom, SystemRandom};

use crate::name::CHUNK_PAGES;

/// Bytes that sealing adds to a value.
pub const TAG_BYTES: usize = 16;
/// The longest value.
pub const SEALED_MAX: usize = BLOB_MAX + TAG_BYTES;
/// Bytes of a key.
pub const KEY_BYTES: usize = 32;

/// The form in which pages of one VM leave the host.
#[derive(Debug)]
pub struct Seal(Kind);

enum Kind {
    Plain,
    /// Values of later generations are sealed; earlier values are not.
    Sealed {
        since: u64,
        key: Box<LessSafeKey>,
    },
    /// The VM had a key, and it is lost.
    Lost,
}

impl std::fmt::Debug for Kind {
    /// Does not print the key.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Plain => f.write_str("Plain"),
            Self::Sealed { since, .. } => write!(f, "Sealed since {since}"),
            Self::Lost => f.write_str("Lost"),
        }
    }
}

/// Makes a key.
pub fn new_key() -> std::io::Result<[u8; KEY_BYTES]> {
    let mut key = [0; KEY_BYTES];
    SystemRandom::new().fill(&mut key).map_err(|_| std::io::Error::other("the kernel has no random numbers"))?;
    Ok(key)
}

fn nonce(page: PageKey, generation: Handle) -> Nonce {
    let mut nonce = [0; NONCE_LEN];
    nonce[..8].copy_from_slice(&generation.bits().to_le_bytes());
    nonce[8..].copy_from_slice(&((page.page.0 % CHUNK_PAGES) as u32).to_le_bytes());
    Nonce::assume_unique_for_key(nonce)
}

fn names(page: PageKey, generation: Handle) -> Aad<[u8; 36]> {
    let mut bytes = [0; 36];
    bytes[..16].copy_from_slice(&page.region.vm.0);
    bytes[16..20].copy_from_slice(&page.region.number.to_le_bytes());
    bytes[20..28].copy_from_slice(&page.page.0.to_le_bytes());
    bytes[28..].copy_from_slice(&generation.bits().to_le_bytes());
    Aad::from(bytes)
}

impl Seal {
    /// Returns a seal that changes nothing.
    pub fn plain() -> Self {
        Self(Kind::Plain)
    }

    /// Returns the seal with this key. Values of generations up to `since` are not sealed.
    pub fn with(since: u64, key: &[u8; KEY_BYTES]) -> Self {
        let key = UnboundKey::new(&AES_256_GCM, key).expect("a key of this cipher has 32 bytes");
        Self(Kind::Sealed { since, key: Box::new(LessSafeKey::new(key)) })
    }

    /// Returns the seal of a VM whose key is lost: no value can be opened, and no page may leave the host.
    pub fn lost() -> Self {
        Self(Kind::Lost)
    }

    /// Returns whether pages may leave the host.
    pub fn works(&self) -> bool {
        !matches!(self.0, Kind::Lost)
    }

    /// Seals the value that begins at `start`, in place.
    pub fn seal(&self, page: PageKey, generation: Handle, values: &mut Vec<u8>, start: usize) {
        let Kind::Sealed { key, .. } = &self.0 else { return };
        let (nonce, names) = (nonce(page, generation), names(page, generation));
        // It fails only for values of more than 64 GiB.
        let tag = key.seal_in_place_separate_tag(nonce, names, &mut values[start..]).expect("a value is short");
        values.extend_from_slice(tag.as_ref());
    }

    /// Restores a page from its value. Returns whether the value is that page.
    pub fn restores(&self, key: PageKey, handle: Handle, value: &[u8], out: &mut PageBytes) -> bool {
        let mut buffer = [0; SEALED_MAX];
        let blob = self.open(key, handle, value, &mut buffer);
        blob.is_some_and(|blob| blob::open(key, handle, blob, out))
    }

    /// Opens a value, in `buffer` if it is sealed. Returns `None` if it was not sealed for this page and generation.
    /// Any value from a server is safe to open.
    pub fn open<'a>(
        &self,
        page: PageKey,
        generation: Handle,
        value: &'a [u8],
        buffer: &'a mut [u8; SEALED_MAX],
    ) -> Option<&'a [u8]> {
        match &self.0 {
            Kind::Plain => Some(value),
            Kind::Sealed { since, .. } if generation.bits() <= *since => Some(value),
            Kind::Sealed { key, .. } => {
                let sealed = buffer.get_mut(..value.len())?;
                sealed.copy_from_slice(value);
                let opened = key.open_in_place(nonce(page, generation), names(page, generation), sealed);
                opened.ok().map(|opened| &*opened)
            }
            Kind::Lost => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_base::PageIdx;
    use ballast_base::store::RegionKey;
    use ballast_base::wire::VmId;
    use proptest::prelude::*;

    const PAGE: PageKey = RegionKey { vm: VmId([7; 16]), number: 1 }.page(PageIdx(2));

    fn handle(bits: u64) -> Handle {
        Handle::new(bits).expect("40 bits")
    }

    fn opens(seal: &Seal, page: PageKey, generation: u64, value: &[u8]) -> Option<Vec<u8>> {
        seal.open(page, handle(generation), value, &mut [0; SEALED_MAX]).map(<[u8]>::to_vec)
    }

    proptest! {
        #[test]
        fn a_value_opens_under_its_key_page_and_generation_and_no_other(
            text in proptest::collection::vec(any::<u8>(), 0..BLOB_MAX),
            key: [u8; 32],
            flip: prop::sample::Index,
        ) {
            let seal = Seal::with(10, &key);
            let mut values = b"before".to_vec();
            values.extend_from_slice(&text);
            seal.seal(PAGE, handle(11), &mut values, 6);
            prop_assert_eq!(&values[..6], b"before");
            let value = &values[6..];
            prop_assert_eq!(value.len(), text.len() + TAG_BYTES);
            prop_assert_eq!(opens(&seal, PAGE, 11, value), Some(text));
            let mut other = key;
            other[0] ^= 1;
            prop_assert_eq!(opens(&Seal::with(10, &other), PAGE, 11, value), None);
            prop_assert_eq!(opens(&seal, PAGE, 12, value), None, "of another time");
            prop_assert_eq!(opens(&seal, PAGE.region.page(PageIdx(3)), 11, value), None, "of another page");
            let mut damaged = value.to_vec();
            damaged[flip.index(value.len())] ^= 1;
            prop_assert_eq!(opens(&seal, PAGE, 11, &damaged), None);
            prop_assert_eq!(opens(&Seal::lost(), PAGE, 11, value), None);
        }

        #[test]
        fn any_other_value_from_a_server_is_refused(value: Vec<u8>, len in 0..SEALED_MAX * 2) {
            let seal = Seal::with(10, &[1; 32]);
            prop_assert_eq!(opens(&seal, PAGE, 11, &value), None);
            prop_assert_eq!(opens(&seal, PAGE, 11, &vec![0; len]), None);
        }
    }

    #[test]
    fn a_value_from_before_the_key_opens_as_it_is() {
        assert_eq!(opens(&Seal::with(10, &[1; 32]), PAGE, 10, b"plain"), Some(b"plain".to_vec()));
        assert_eq!(format!("{:?}", Seal::with(10, &[1; 32])), "Seal(Sealed since 10)");
    }
}
