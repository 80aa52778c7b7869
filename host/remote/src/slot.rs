//! Maps a key to its slot of the cluster: CRC16 of its hash tag.
//!
//! Before: `name` made a key. After: the slot map says which node has it.
//! Threads: any; pure. Units: slots, 0 to 16,383. Promise: follows the cluster specification for any bytes.

/// Number of slots in a cluster.
pub const SLOTS: u16 = 16_384;

const TABLE: [u16; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let (mut crc, mut bit) = ((byte as u16) << 8, 0);
        while bit < 8 {
            crc = if crc & 0x8000 == 0 { crc << 1 } else { crc << 1 ^ 0x1021 };
            bit += 1;
        }
        table[byte] = crc;
        byte += 1;
    }
    table
};

pub fn crc16(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |crc, byte| crc << 8 ^ TABLE[usize::from(crc >> 8 ^ u16::from(*byte))])
}

/// Returns the part of a key that is hashed: the bytes between the first `{` and the next `}`, or the whole key.
fn tag(key: &[u8]) -> &[u8] {
    let inside = key.iter().position(|byte| *byte == b'{').map(|open| &key[open + 1..]);
    let closed = inside.and_then(|inside| Some(&inside[..inside.iter().position(|byte| *byte == b'}')?]));
    closed.filter(|tag| !tag.is_empty()).unwrap_or(key)
}

/// Returns the slot of a key.
pub fn slot_of(key: &[u8]) -> u16 {
    crc16(tag(key)) % SLOTS
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn slots_are_those_of_the_specification() {
        // The check value of CRC16/XMODEM, and slots that a server gives (`CLUSTER KEYSLOT`).
        assert_eq!(crc16(b"123456789"), 0x31c3);
        for (key, slot) in [
            ("", 0),
            ("foo", 12_182),
            ("bar", 5_061),
            ("123456789", 12_739),
            ("{user1000}.following", 3_443),
            ("foo{}{bar}", 8_363),
            ("foo{{bar}}zap", 4_015),
            ("foo{bar}{zap}", 5_061),
        ] {
            assert_eq!(slot_of(key.as_bytes()), slot, "{key}");
        }
    }

    proptest! {
        #[test]
        fn any_key_has_a_slot_and_one_tag_is_one_slot(tag in "[^{}]{1,12}", before in "[^{]{0,5}", after: Vec<u8>) {
            let key = [before.as_bytes(), b"{", tag.as_bytes(), b"}", &after].concat();
            prop_assert_eq!(slot_of(&key), crc16(tag.as_bytes()) % SLOTS);
            prop_assert!(slot_of(&after) < SLOTS);
        }
    }
}
