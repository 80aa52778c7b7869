//! Ranges of files: the files and bytes that RAM consists of, or that a process maps.
//!
//! Before: a region's extents, or the map of a process. After: it is known whether two sets of ranges have bytes in
//! common.
//! Threads: any; a plain value. Units: bytes of files.
//! Promise: a query costs no more than reading both lists, however they were made.

use std::collections::HashMap;

use crate::memfd::FileId;

/// Ranges by file, in ascending order. No two of a file overlap or touch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FileRanges(HashMap<FileId, Vec<(u64, u64)>>);

impl FromIterator<(FileId, u64, u64)> for FileRanges {
    /// From tuples: a file, the first byte, and the byte after the last one.
    fn from_iter<T: IntoIterator<Item = (FileId, u64, u64)>>(ranges: T) -> Self {
        let mut files: HashMap<FileId, Vec<(u64, u64)>> = HashMap::new();
        for (file, start, end) in ranges.into_iter().filter(|(_, start, end)| start < end) {
            let ranges = files.entry(file).or_default();
            match ranges.last_mut() {
                // Callers list ranges by address; most of them then follow each other in the file, too.
                Some((_, last)) if *last == start => *last = end,
                _ => ranges.push((start, end)),
            }
        }
        for ranges in files.values_mut() {
            ranges.sort_unstable();
            ranges.dedup_by(|next, kept| {
                let joins = next.0 <= kept.1;
                kept.1 = if joins { kept.1.max(next.1) } else { kept.1 };
                joins
            });
        }
        Self(files)
    }
}

impl FileRanges {
    /// Is there no byte in it?
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The files of which it has bytes.
    pub fn files(&self) -> impl Iterator<Item = FileId> + use<'_> {
        self.0.keys().copied()
    }

    /// The file and offset of a byte that is in both, if there is one.
    pub fn overlap(&self, other: &Self) -> Option<(FileId, u64)> {
        self.0.iter().find_map(|(file, ours)| {
            let (mut ours, mut theirs) = (ours.as_slice(), other.0.get(file)?.as_slice());
            while let (Some((one, ours_left)), Some((next, theirs_left))) = (ours.split_first(), theirs.split_first()) {
                let start = one.0.max(next.0);
                if start < one.1.min(next.1) {
                    return Some((*file, start));
                }
                if one.1 <= next.1 {
                    ours = ours_left;
                } else {
                    theirs = theirs_left;
                }
            }
            None
        })
    }

    /// The bytes of these that are not in `other`.
    #[must_use]
    pub fn without(&self, other: &Self) -> Self {
        let mut left = HashMap::new();
        for (file, ours) in &self.0 {
            let theirs = other.0.get(file).map_or(&[][..], Vec::as_slice);
            let (mut next, mut rest) = (0, Vec::new());
            for &(start, end) in ours {
                let mut start = start;
                // A range of theirs that ends in our next range is looked at again there.
                while let Some(&(from, to)) = theirs.get(next).filter(|(from, _)| *from < end) {
                    if start < from {
                        rest.push((start, from));
                    }
                    start = start.max(to);
                    if to > end {
                        break;
                    }
                    next += 1;
                }
                if start < end {
                    rest.push((start, end));
                }
            }
            if !rest.is_empty() {
                left.insert(*file, rest);
            }
        }
        Self(left)
    }

    /// The same ranges; if a file has more than `most`, one range from its first byte to its last.
    #[must_use]
    pub fn at_most(mut self, most: usize) -> Self {
        for ranges in self.0.values_mut().filter(|ranges| ranges.len() > most) {
            if let (Some(first), Some(last)) = (ranges.first(), ranges.last()) {
                *ranges = vec![(first.0, last.1)];
            }
        }
        self
    }

    /// Keep only the ranges of these files.
    pub fn retain(&mut self, keep: impl Fn(FileId) -> bool) {
        self.0.retain(|file, _| keep(*file));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    fn of(list: &[(u64, u64, u64)]) -> FileRanges {
        list.iter().map(|(ino, start, len)| (FileId { dev: 1, ino: *ino }, *start, start + len)).collect()
    }

    fn bytes(list: &[(u64, u64, u64)]) -> HashSet<(u64, u64)> {
        list.iter().flat_map(|(ino, start, len)| (*start..start + len).map(move |byte| (*ino, byte))).collect()
    }

    #[test]
    fn too_many_ranges_of_a_file_become_one() {
        let many = of(&[(1, 0, 1), (1, 5, 1), (1, 9, 1), (2, 3, 1)]);
        assert_eq!(many.clone().at_most(3), many);
        assert_eq!(many.at_most(2), of(&[(1, 0, 10), (2, 3, 1)]));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]

        #[test]
        fn two_have_in_common_and_apart_what_lists_of_all_bytes_say(
            ours in proptest::collection::vec((0u64..3, 0u64..60, 0u64..7), 0..6),
            theirs in proptest::collection::vec((0u64..3, 0u64..60, 0u64..7), 0..6),
        ) {
            let common: HashSet<_> = bytes(&ours).intersection(&bytes(&theirs)).copied().collect();
            let rest = of(&ours).without(&of(&theirs));
            let parts = |(file, parts): (&FileId, &Vec<(u64, u64)>)| {
                let ino = file.ino;
                parts.iter().map(move |(from, to)| (ino, *from, to - from)).collect::<Vec<_>>()
            };
            let rest = rest.0.iter().flat_map(parts);
            let expected: HashSet<_> = bytes(&ours).difference(&bytes(&theirs)).copied().collect();
            prop_assert_eq!(bytes(&rest.collect::<Vec<_>>()), expected);
            for (one, other) in [(&ours, &theirs), (&theirs, &ours)] {
                match of(one).overlap(&of(other)) {
                    Some((file, at)) => prop_assert!(common.contains(&(file.ino, at))),
                    None => prop_assert!(common.is_empty()),
                }
            }
        }
    }
}
