//! The places where a process is served: which bytes of which files it maps at which addresses, as it announced.
//!
//! Before: the engine has its views. After: it knows whether a line of the process's memory map is in place, or
//! elsewhere, where touches raise no faults that the engine serves.
//! Threads: any; a plain value. Units: bytes; addresses of the process.

use ballast_sys::memfd::FileId;

/// A mapping of a part of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// First address.
    pub start: u64,
    /// The address after the last one.
    pub end: u64,
    /// The file.
    pub file: FileId,
    /// Offset of the first byte in the file.
    pub offset: u64,
}

impl Place {
    /// A part of this mapping: file, first byte, and the byte after the last one.
    fn part(&self, start: u64, end: u64) -> (FileId, u64, u64) {
        let offset = |address: u64| self.offset.saturating_add(address - self.start);
        (self.file, offset(start), offset(end))
    }

    /// Whether both map the same byte at each address that they share.
    fn agrees(&self, other: &Self) -> bool {
        self.file == other.file && self.start.wrapping_sub(self.offset) == other.start.wrapping_sub(other.offset)
    }
}

/// The places of a process, ascending, without overlap.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Places(Vec<Place>);

impl FromIterator<Place> for Places {
    fn from_iter<T: IntoIterator<Item = Place>>(places: T) -> Self {
        let mut places: Vec<Place> = places.into_iter().collect();
        places.sort_unstable_by_key(|place| place.start);
        Self(places)
    }
}

impl Places {
    /// All places, ascending.
    pub fn iter(&self) -> impl Iterator<Item = Place> + use<'_> {
        self.0.iter().copied()
    }

    /// The parts of this mapping that are in no place: file, first byte, and the byte after the last one.
    pub fn elsewhere(&self, mapping: &Place) -> Vec<(FileId, u64, u64)> {
        let first = self.0.partition_point(|place| place.end <= mapping.start);
        let (mut rest, mut next) = (Vec::new(), mapping.start);
        for place in self.0[first..].iter().take_while(|place| place.start < mapping.end) {
            if place.agrees(mapping) {
                rest.extend((next < place.start).then(|| mapping.part(next, place.start)));
                next = place.end.min(mapping.end);
            }
        }
        rest.extend((next < mapping.end).then(|| mapping.part(next, mapping.end)));
        rest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(ino: u64) -> FileId {
        FileId { dev: 1, ino }
    }

    fn at(start: u64, end: u64, ino: u64, offset: u64) -> Place {
        Place { start, end, file: file(ino), offset }
    }

    #[test]
    fn bytes_mapped_at_another_address_or_from_another_offset_are_elsewhere() {
        let places: Places = [at(30, 40, 2, 0), at(10, 20, 1, 100), at(20, 30, 1, 200)].into_iter().collect();
        let of_one = |from, to| vec![(file(1), from, to)];
        for (mapping, expected) in [
            (at(10, 20, 1, 100), vec![]),
            (at(12, 18, 1, 102), vec![]),
            (at(30, 40, 2, 0), vec![]),
            (at(5, 25, 1, 95), [of_one(95, 100), of_one(110, 115)].concat()),
            (at(10, 20, 1, 101), of_one(101, 111)),
            (at(20, 30, 1, 100), of_one(100, 110)),
            (at(30, 40, 1, 0), of_one(0, 10)),
            (at(50, 60, 1, 100), of_one(100, 110)),
            (at(0, 5, 1, 90), of_one(90, 95)),
        ] {
            assert_eq!(places.elsewhere(&mapping), expected, "{mapping:?}");
        }
        assert_eq!(Places::default().elsewhere(&at(1, 2, 1, u64::MAX)), of_one(u64::MAX, u64::MAX), "no overflow");
    }
}
