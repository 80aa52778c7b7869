//! The kernel's own description of its types (BTF, `/sys/kernel/btf/vmlinux`): the offsets of fields in structures.
//!
//! Before: nothing. After: `pins` knows the offsets of the running kernel.
//! Threads: any. Units: bytes. The file has some 100,000 types in 5 MiB; reading it takes some milliseconds, and its
//! user drops it afterwards.
//! Promise: a malformed file is an error that names the problem, never a panic and never an offset from outside the
//! file.

use std::io;

const PATH: &str = "/sys/kernel/btf/vmlinux";
const MAGIC: u32 = 0xEB9F;
/// Magic, version, flags, length of the header, then offset and length of types and of strings.
const HEADER: usize = 24;
/// The common part of each type: name, kind and count, size or type.
const COMMON: usize = 12;
/// How many typedefs and qualifiers may precede a structure, and how deep anonymous ones may be nested.
const DEEPEST: u32 = 32;

mod kind {
    pub(super) const INT: u32 = 1;
    pub(super) const POINTER: u32 = 2;
    pub(super) const ARRAY: u32 = 3;
    pub(super) const STRUCT: u32 = 4;
    pub(super) const UNION: u32 = 5;
    pub(super) const ENUM: u32 = 6;
    pub(super) const TYPEDEF: u32 = 8;
    pub(super) const VOLATILE: u32 = 9;
    pub(super) const CONST: u32 = 10;
    pub(super) const RESTRICT: u32 = 11;
    pub(super) const FUNC_PROTO: u32 = 13;
    pub(super) const VAR: u32 = 14;
    pub(super) const DATASEC: u32 = 15;
    pub(super) const DECL_TAG: u32 = 17;
    pub(super) const TYPE_TAG: u32 = 18;
    pub(super) const ENUM64: u32 = 19;
}

/// The types of a kernel.
#[derive(Debug)]
pub struct Btf {
    bytes: Vec<u8>,
    /// Offset of each type in the file; number 0 is `void`, and its entry is a placeholder.
    types: Vec<usize>,
    strings: std::ops::Range<usize>,
}

/// A field of a structure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// Bytes from the start of the structure.
    pub offset: u64,
    /// Its length in bytes; for an array, the length of all its elements.
    pub size: u64,
}

#[derive(Clone, Copy)]
struct Type {
    name: u32,
    kind: u32,
    /// Members, values or parameters.
    count: u32,
    /// The offsets of members include their lengths in bits.
    has_bits: bool,
    size_or_type: u32,
    /// Offset of the data that follows the common part.
    data: usize,
}

impl Btf {
    /// Read the types of the running kernel.
    pub fn of_kernel() -> io::Result<Self> {
        let bytes = std::fs::read(PATH).map_err(|error| io::Error::new(error.kind(), format!("{PATH}: {error}")))?;
        Self::parse(bytes)
    }

    /// Read the types from the bytes of such a file.
    pub fn parse(bytes: Vec<u8>) -> io::Result<Self> {
        let word = |at: usize| u32_at(&bytes, at).ok_or_else(|| broken("it ends within its header"));
        // Magic, version and flags share the first word.
        if word(0)? & 0xFFFF != MAGIC || (word(0)? >> 16) & 0xFF != 1 {
            return Err(broken("it is not BTF of version 1"));
        }
        let header = word(4)? as usize;
        let section = |at: usize| -> io::Result<std::ops::Range<usize>> {
            let start = header.checked_add(word(at)? as usize);
            let range = start.and_then(|start| Some(start..start.checked_add(u32_at(&bytes, at + 4)? as usize)?));
            range
                .filter(|range| header >= HEADER && range.end <= bytes.len())
                .ok_or_else(|| broken("a section lies outside"))
        };
        let (in_types, strings) = (section(8)?, section(16)?);
        // The placeholder of `void`, which is never read.
        let mut types = vec![in_types.start];
        let mut at = in_types.start;
        while at < in_types.end {
            types.push(at);
            at = read_type(&bytes, at).and_then(|found| Some(found.data + extra(&found)?)).ok_or_else(|| {
                broken(format!("type {} is of a kind that is not known, or ends outside", types.len() - 1))
            })?;
        }
        Ok(Self { bytes, types, strings })
    }

    /// The field at a path: `xa_head`, or `i_pages.xa_head`. The path skips anonymous structures and unions.
    pub fn field(&self, structure: &str, path: &str) -> Option<Field> {
        let mut offset = 0;
        let mut found = self.structure(structure)?;
        let mut size = 0;
        for name in path.split('.') {
            let (at, number) = self.member(found, name, 0)?;
            offset += at;
            size = self.size_of(number, 0)?;
            found = self.resolve(number)?;
        }
        Some(Field { offset, size })
    }

    /// The length of a structure in bytes.
    pub fn size(&self, structure: &str) -> Option<u64> {
        self.structure(structure).map(|found| found.size_or_type.into())
    }

    /// The value of a constant of an enumeration.
    pub fn constant(&self, enumeration: &str, name: &str) -> Option<u32> {
        let found = self.find(kind::ENUM, enumeration)?;
        let at = (0..found.count as usize).map(|index| found.data + index * 8);
        let mut values = at.map(|at| (u32_at(&self.bytes, at), u32_at(&self.bytes, at + 4)));
        values.find(|(named, _)| named.is_some_and(|named| self.is_named(named, name))).and_then(|(_, value)| value)
    }

    fn structure(&self, name: &str) -> Option<Type> {
        self.find(kind::STRUCT, name)
    }

    fn find(&self, kind: u32, name: &str) -> Option<Type> {
        let all = self.types.iter().skip(1).filter_map(|at| read_type(&self.bytes, *at));
        let mut of_kind = all.filter(|found| found.kind == kind);
        of_kind.find(|found| self.is_named(found.name, name))
    }

    fn is_named(&self, at: u32, name: &str) -> bool {
        let start = self.strings.start + at as usize;
        let end = start + name.len();
        end < self.strings.end && &self.bytes[start..end] == name.as_bytes() && self.bytes[end] == 0
    }

    /// The type of that number, without typedefs and qualifiers.
    fn resolve(&self, number: u32) -> Option<Type> {
        let mut number = number;
        for _ in 0..DEEPEST {
            let found = read_type(&self.bytes, *self.types.get(number as usize).filter(|_| number > 0)?)?;
            match found.kind {
                kind::TYPEDEF | kind::VOLATILE | kind::CONST | kind::RESTRICT | kind::TYPE_TAG => {
                    number = found.size_or_type
                }
                _ => return Some(found),
            }
        }
        None
    }

    fn size_of(&self, number: u32, depth: u32) -> Option<u64> {
        let found = self.resolve(number)?;
        match found.kind {
            kind::POINTER => Some(8),
            kind::INT | kind::STRUCT | kind::UNION | kind::ENUM | kind::ENUM64 => Some(found.size_or_type.into()),
            kind::ARRAY if depth < DEEPEST => {
                let element = self.size_of(u32_at(&self.bytes, found.data)?, depth + 1)?;
                element.checked_mul(u32_at(&self.bytes, found.data + 8)?.into())
            }
            _ => None,
        }
    }

    /// The offset of a member in a structure or union, in bytes, and the number of its type.
    fn member(&self, of: Type, name: &str, depth: u32) -> Option<(u64, u32)> {
        if !matches!(of.kind, kind::STRUCT | kind::UNION) || depth > DEEPEST {
            return None;
        }
        for at in (0..of.count as usize).map(|index| of.data + index * 12) {
            let [named, number, place] = [0, 4, 8].map(|field| u32_at(&self.bytes, at + field));
            let (named, number, place) = (named?, number?, place?);
            let (bits, width) = if of.has_bits { (place & 0xFF_FFFF, place >> 24) } else { (place, 0) };
            if self.is_named(named, name) {
                // A bit field has no byte of its own.
                return (bits % 8 == 0 && width == 0).then_some((u64::from(bits) / 8, number));
            }
            if self.is_named(named, "")
                && let Some((inner, number)) =
                    self.resolve(number).and_then(|inner| self.member(inner, name, depth + 1))
            {
                return Some((u64::from(bits) / 8 + inner, number));
            }
        }
        None
    }
}

fn broken(what: impl std::fmt::Display) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the kernel's type description is not understood: {what}"))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().map(|word| u32::from_ne_bytes(*word))
}

fn read_type(bytes: &[u8], at: usize) -> Option<Type> {
    let info = u32_at(bytes, at + 4)?;
    Some(Type {
        name: u32_at(bytes, at)?,
        kind: info >> 24 & 0x1F,
        count: info & 0xFFFF,
        has_bits: info >> 31 != 0,
        size_or_type: u32_at(bytes, at + 8)?,
        data: at + COMMON,
    })
}

/// Bytes that follow the common part; `None` for an unknown kind.
fn extra(found: &Type) -> Option<usize> {
    let count = found.count as usize;
    Some(match found.kind {
        kind::INT | kind::VAR | kind::DECL_TAG => 4,
        kind::ARRAY => 12,
        kind::STRUCT | kind::UNION | kind::DATASEC | kind::ENUM64 => 12 * count,
        kind::ENUM | kind::FUNC_PROTO => 8 * count,
        1..=kind::ENUM64 => 0,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_testkit::skip;

    /// `struct a { int x; struct { const b *p; }; int y[3]; }`, `typedef struct c { int z } b` and an enumeration.
    fn small() -> Vec<u8> {
        let strings = b"\0int\0a\0x\0p\0y\0b\0c\0z\0e\0ONE\0";
        let name = |word: &str| {
            let word = [word.as_bytes(), b"\0"].concat();
            strings.windows(word.len() + 1).position(|at| at[0] == 0 && at[1..] == word[..]).expect("there") as u32 + 1
        };
        let info = |kind: u32, count: u32| kind << 24 | count;
        let types: Vec<u32> = [
            vec![name("int"), info(1, 0), 4, 32],
            vec![name("c"), info(4, 1), 4, name("z"), 1, 0],
            vec![name("b"), info(8, 0), 2],
            vec![0, info(10, 0), 3],
            vec![0, info(2, 0), 4],
            vec![0, info(4, 1), 8, name("p"), 5, 0],
            vec![0, info(3, 0), 0, 1, 1, 3],
            vec![name("a"), info(4, 4), 40, name("x"), 1, 0, 0, 6, 64, name("y"), 7, 128, name("z"), 3, 224],
            vec![name("e"), info(6, 1), 4, name("ONE"), 1],
        ]
        .concat();
        let types: Vec<u8> = types.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let header = [MAGIC | 1 << 16, HEADER as u32, 0, types.len() as u32, types.len() as u32, strings.len() as u32];
        [header.iter().flat_map(|word| word.to_ne_bytes()).collect::<Vec<u8>>(), types, strings.to_vec()].concat()
    }

    #[test]
    fn fields_are_found_through_nameless_members_typedefs_and_paths() {
        let btf = Btf::parse(small()).expect("of the format");
        let field = |path| btf.field("a", path);
        assert_eq!(field("x"), Some(Field { offset: 0, size: 4 }));
        assert_eq!(field("p"), Some(Field { offset: 8, size: 8 }));
        assert_eq!(field("y"), Some(Field { offset: 16, size: 12 }));
        assert_eq!(field("z.z"), Some(Field { offset: 28, size: 4 }));
        assert_eq!((field("q"), field("x.q"), field("p.z")), (None, None, None), "a pointer is not followed");
        assert_eq!((btf.size("a"), btf.size("b"), btf.constant("e", "ONE")), (Some(40), None, Some(1)));
    }

    #[test]
    fn a_cut_or_changed_file_is_refused_or_read_and_never_causes_a_panic() {
        let whole = small();
        for len in 0..whole.len() {
            assert!(Btf::parse(whole[..len].to_vec()).is_err(), "cut to {len}");
        }
        for at in 0..whole.len() {
            for flip in [1, 0x80, 0xFF] {
                let mut changed = whole.clone();
                changed[at] ^= flip;
                if let Ok(btf) = Btf::parse(changed) {
                    for path in ["x", "p", "y", "z.z", "q"] {
                        let _ = btf.field("a", path);
                    }
                    let _ = btf.constant("e", "ONE");
                }
            }
        }
    }

    #[test]
    fn this_kernels_structures_are_found() {
        let Ok(btf) = Btf::of_kernel().inspect_err(|error| skip("btf", error)) else { return };
        assert!(btf.size("task_struct").expect("every kernel has it") > 1024);
        assert_eq!(btf.field("address_space", "i_pages.xa_head").expect("every kernel has it").size, 8);
        assert!(btf.constant("pageflags", "PG_head").expect("every kernel has it") < 32);
    }
}
