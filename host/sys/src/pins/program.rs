//! The program of the pin check: the offsets that it reads at, and the findings that it leaves in its slot of the map.
//!
//! Before: `pins` wrote a descriptor and page numbers into a slot. After: it judges the findings.
//! Threads: none of its own. Units: bytes in structures, pages in files.
//! Promise: it is made only for the kernel it runs on, from that kernel's description of its types.

use std::os::fd::BorrowedFd;

use super::found;
use super::slot::{self, BATCH};
use crate::bpf::{Asm, Call, If, Label, Op, Reg, Width};
use crate::btf::Btf;

/// The offsets in this kernel, in bytes from the start of the structure named first.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    task_files: i32,
    files_table: i32,
    table_descriptors: i32,
    file_mapping: i32,
    mapping_head: i32,
    node_shift: i32,
    node_slots: i32,
    folio_flags: i16,
    folio_mapping: i16,
    folio_index: i16,
    folio_mapcount: i16,
    folio_refcount: i16,
    /// These three are in the second `struct page` of a folio, and there only if it is a large one.
    folio_order: i32,
    folio_mappings: i32,
    /// Bit of the flags that marks a large folio.
    large_bit: i32,
    /// Bit of the flags that marks failed memory; `None` if the kernel does not handle such failures.
    failed_bit: Option<i32>,
}

/// Bytes of a `struct page`: 64 on every 64-bit kernel that a distribution builds.
const PAGE_STRUCT: u64 = 64;
/// A node of a file's tree has 2^6 slots, each for 1/64 of what the node covers.
const CHUNK_SHIFT: i32 = 6;
pub(super) const CHUNK: i32 = 1 << CHUNK_SHIFT;

impl Layout {
    pub(super) fn of(btf: &Btf) -> Result<Self, String> {
        let field = |structure: &str, path: &str, size: u64| match btf.field(structure, path) {
            Some(field) if field.size == size && field.offset < 1 << 15 => Ok(field.offset as i32),
            Some(field) => Err(format!("{structure}.{path} has {} bytes at {}", field.size, field.offset)),
            None => Err(format!("there is no {structure}.{path}")),
        };
        let within = |path: &str, size: u64, of: std::ops::Range<u64>| match field("folio", path, size)? {
            offset if of.contains(&(offset as u64)) => Ok(offset),
            offset => Err(format!("folio.{path} is at {offset}")),
        };
        if btf.size("page") != Some(PAGE_STRUCT) {
            return Err(format!("struct page has {:?} bytes", btf.size("page")));
        }
        let (head, second) = (0..PAGE_STRUCT, PAGE_STRUCT..2 * PAGE_STRUCT);
        let first = |path, size| within(path, size, head.clone()).map(|offset| offset as i16);
        Ok(Self {
            task_files: field("task_struct", "files", 8)?,
            files_table: field("files_struct", "fdt", 8)?,
            table_descriptors: field("fdtable", "fd", 8)?,
            file_mapping: field("file", "f_mapping", 8)?,
            mapping_head: field("address_space", "i_pages.xa_head", 8)?,
            node_shift: field("xa_node", "shift", 1)?,
            node_slots: field("xa_node", "slots", CHUNK as u64 * 8)?,
            folio_flags: first("flags", 8)?,
            folio_mapping: first("mapping", 8)?,
            folio_index: first("index", 8)?,
            folio_mapcount: first("_mapcount", 4)?,
            folio_refcount: first("_refcount", 4)?,
            // The order is in the lowest byte.
            folio_order: within("_flags_1", 8, second.clone())?,
            folio_mappings: within("_large_mapcount", 4, second)?,
            large_bit: match btf.constant("pageflags", "PG_head") {
                Some(bit @ 0..64) => bit as i32,
                _ => return Err("there is no PG_head".into()),
            },
            failed_bit: btf.constant("pageflags", "PG_hwpoison").filter(|bit| *bit < 64).map(|bit| bit as i32),
        })
    }
}

/// Result of a run that wrote its findings for every page.
pub(super) const DONE: u32 = 0;

/// Entries of a file's tree, as `linux/xarray.h` has them: the lowest bits give the kind. `x1` is a value (a page
/// swapped out); `10` is internal: a node above 4096, else one that refers to the entry of another slot, up to 63, or a
/// mark of the tree's own. Any other entry is a page.
const VALUE: i32 = 1;
const INTERNAL: i32 = 2;
const KIND: i32 = 3;
const LAST_INTERNAL: i32 = 4096;
const FIRST_NO_SIBLING: i32 = (CHUNK - 1) << 2 | INTERNAL;
/// Levels of the tree of a file of 2^36 pages, 256 TiB.
const LEVELS: usize = 6;

/// The program. Its argument is the number of its slot.
pub(super) fn program(at: &Layout, map: BorrowedFd<'_>) -> Asm {
    use Reg::{Fp, R0, R1, R2, R3, R6, R7, R8, R9};
    use Width::{Double, Word};
    // Places on the stack.
    const READ: i16 = -8;
    const KEY: i16 = -16;
    const MAPPING: i16 = -24;
    const HEAD: i16 = -32;
    const FOLIO: i16 = -32 - PAGE_STRUCT as i16;

    let mut asm = Asm::default();
    let [lost, start, next, turn, done, bad, root, single, descend, sibling, leaf, entry, absent, large] =
        std::array::from_fn(|_| asm.label());
    // Copies kernel memory at R3 to the stack.
    let read = |asm: &mut Asm, to: i16, bytes: i32, failed: Label| {
        asm.alu(Op::Mov, R1, Fp);
        asm.alu(Op::Add, R1, i32::from(to));
        asm.alu(Op::Mov, R2, bytes);
        asm.call(Call::ProbeReadKernel);
        asm.jump_if(If::Ne, R0, 0, failed);
    };
    // R3 = the pointer at R3 + offset.
    let follow = |asm: &mut Asm, offset: i32| {
        asm.alu(Op::Add, R3, offset);
        read(asm, READ, 8, lost);
        asm.load(Double, R3, Fp, READ);
        asm.jump_if(If::Eq, R3, 0, lost);
    };
    // R1 = where to write the findings for page R7.
    let found_of = |asm: &mut Asm| {
        asm.alu(Op::Mov, R1, R7);
        asm.alu(Op::Mul, R1, slot::FOUND_BYTES);
        asm.alu(Op::Add, R1, R6);
        asm.alu(Op::Add, R1, slot::FOUND);
    };

    // R6 = the slot.
    asm.load(Double, R2, R1, 0);
    asm.store(Word, Fp, KEY, R2);
    asm.alu(Op::Mov, R2, Fp);
    asm.alu(Op::Add, R2, i32::from(KEY));
    asm.load_map(R1, map);
    asm.call(Call::MapLookup);
    asm.jump_if(If::Ne, R0, 0, start);
    asm.exit(2);
    asm.place(lost);
    asm.exit(1);
    asm.place(start);
    asm.alu(Op::Mov, R6, R0);

    // From this thread to the file behind its descriptor, and to the file's pages.
    asm.call(Call::CurrentTask);
    asm.alu(Op::Mov, R3, R0);
    follow(&mut asm, at.task_files);
    follow(&mut asm, at.files_table);
    follow(&mut asm, at.table_descriptors);
    asm.load(Double, R1, R6, slot::FD);
    asm.alu(Op::Lsh, R1, 3);
    asm.alu(Op::Add, R3, R1);
    follow(&mut asm, 0);
    follow(&mut asm, at.file_mapping);
    asm.store(Double, Fp, MAPPING, R3);
    asm.alu(Op::Add, R3, at.mapping_head);
    read(&mut asm, HEAD, 8, lost);
    asm.store(Double, R6, slot::NODE, 0);

    // For each page: R7 counts, R8 is its number. The count begins with what memory has, which is 0: to the verifier it
    // may be any number, as it is in all later turns.
    asm.load(Double, R7, R6, slot::NODE);
    asm.jump(turn);
    asm.place(bad);
    asm.store(Double, R6, slot::NODE, 0);
    asm.place(next);
    asm.alu(Op::Add, R7, 1);
    asm.place(turn);
    asm.turn_or(done);
    asm.jump_if(If::Ge, R7, BATCH as i32, done);
    asm.load(Double, R1, R6, slot::COUNT);
    asm.jump_if(If::Ge, R7, R1, done);
    asm.alu(Op::Mov, R1, R7);
    asm.alu(Op::Lsh, R1, 3);
    asm.alu(Op::Add, R1, R6);
    asm.alu(Op::Add, R1, slot::PAGES);
    asm.load(Double, R8, R1, 0);

    // R9 = the node of the last page, if this page is in it, too. A stale node does no harm: a held page does not leave
    // it.
    asm.load(Double, R9, R6, slot::NODE);
    asm.jump_if(If::Eq, R9, 0, root);
    asm.load(Double, R1, R6, slot::SHIFT);
    asm.alu(Op::Mov, R2, R8);
    asm.alu(Op::Rsh, R2, R1);
    asm.alu(Op::Rsh, R2, CHUNK_SHIFT);
    asm.load(Double, R3, R6, slot::PREFIX);
    asm.jump_if(If::Eq, R2, R3, descend);

    // Else start at the root.
    asm.place(root);
    asm.store(Double, R6, slot::NODE, 0);
    asm.load(Double, R9, Fp, HEAD);
    asm.alu(Op::Mov, R1, R9);
    asm.alu(Op::And, R1, KIND);
    asm.jump_if(If::Ne, R1, INTERNAL, single);
    asm.jump_if(If::Le, R9, LAST_INTERNAL, bad);
    asm.alu(Op::Add, R9, -INTERNAL);
    asm.store(Double, Fp, READ, 0);
    asm.alu(Op::Mov, R3, R9);
    asm.alu(Op::Add, R3, at.node_shift);
    read(&mut asm, READ, 1, bad);
    asm.load(Double, R1, Fp, READ);
    asm.store(Double, R6, slot::SHIFT, R1);
    asm.alu(Op::Mov, R2, R8);
    asm.alu(Op::Rsh, R2, R1);
    asm.jump_if(If::Ge, R2, CHUNK, absent);
    asm.jump(descend);
    asm.place(single);
    asm.jump_if(If::Ne, R8, 0, absent);
    asm.jump(entry);

    // Descend the tree, unrolled: a nested loop costs the verifier many times the work.
    asm.place(descend);
    for _ in 0..LEVELS {
        asm.load(Double, R1, R6, slot::SHIFT);
        asm.alu(Op::Mov, R3, R8);
        asm.alu(Op::Rsh, R3, R1);
        asm.alu(Op::And, R3, CHUNK - 1);
        asm.alu(Op::Lsh, R3, 3);
        asm.alu(Op::Add, R3, R9);
        asm.alu(Op::Add, R3, at.node_slots);
        read(&mut asm, READ, 8, bad);
        asm.load(Double, R0, Fp, READ);
        asm.alu(Op::Mov, R1, R0);
        asm.alu(Op::And, R1, KIND);
        asm.jump_if(If::Ne, R1, INTERNAL, leaf);
        asm.jump_if(If::Le, R0, LAST_INTERNAL, sibling);
        asm.alu(Op::Add, R0, -INTERNAL);
        asm.alu(Op::Mov, R9, R0);
        asm.load(Double, R1, R6, slot::SHIFT);
        asm.alu(Op::Add, R1, -CHUNK_SHIFT);
        asm.store(Double, R6, slot::SHIFT, R1);
    }
    asm.jump(bad);
    // One of several slots of a large folio: the entry is in the first.
    asm.place(sibling);
    asm.jump_if(If::Ge, R0, FIRST_NO_SIBLING, bad);
    asm.alu(Op::Rsh, R0, 2);
    asm.alu(Op::Lsh, R0, 3);
    asm.alu(Op::Mov, R3, R9);
    asm.alu(Op::Add, R3, R0);
    asm.alu(Op::Add, R3, at.node_slots);
    read(&mut asm, READ, 8, bad);
    asm.load(Double, R0, Fp, READ);
    asm.alu(Op::Mov, R1, R0);
    asm.alu(Op::And, R1, KIND);
    asm.jump_if(If::Eq, R1, INTERNAL, bad);
    asm.place(leaf);
    asm.store(Double, R6, slot::NODE, R9);
    asm.load(Double, R1, R6, slot::SHIFT);
    asm.alu(Op::Mov, R2, R8);
    asm.alu(Op::Rsh, R2, R1);
    asm.alu(Op::Rsh, R2, CHUNK_SHIFT);
    asm.store(Double, R6, slot::PREFIX, R2);
    asm.alu(Op::Mov, R9, R0);

    // R9 = the entry.
    asm.place(entry);
    asm.jump_if(If::Eq, R9, 0, absent);
    asm.alu(Op::Mov, R1, R9);
    asm.alu(Op::And, R1, VALUE);
    asm.jump_if(If::Ne, R1, 0, absent);
    asm.alu(Op::Mov, R3, R9);
    read(&mut asm, FOLIO, PAGE_STRUCT as i32, bad);
    asm.load(Double, R1, Fp, FOLIO + at.folio_mapping);
    asm.load(Double, R2, Fp, MAPPING);
    asm.jump_if(If::Ne, R1, R2, bad);
    found_of(&mut asm);
    asm.load(Double, R2, Fp, FOLIO + at.folio_index);
    asm.store(Double, R1, found::INDEX, R2);
    asm.load(Word, R2, Fp, FOLIO + at.folio_mapcount);
    asm.store(Word, R1, found::MAPCOUNT, R2);
    asm.load(Word, R2, Fp, FOLIO + at.folio_refcount);
    asm.store(Word, R1, found::REFS, R2);
    asm.alu(Op::Mov, R3, 0);
    if let Some(bit) = at.failed_bit {
        asm.load(Double, R3, Fp, FOLIO + at.folio_flags);
        asm.alu(Op::Rsh, R3, bit);
        asm.alu(Op::And, R3, 1);
    }
    asm.store(Word, R1, found::FAILED, R3);
    asm.load(Double, R3, Fp, FOLIO + at.folio_flags);
    asm.alu(Op::Rsh, R3, at.large_bit);
    asm.alu(Op::And, R3, 1);
    asm.jump_if(If::Ne, R3, 0, large);
    asm.store(Word, R1, found::WHAT, found::PAGE);
    asm.jump(next);

    asm.place(large);
    asm.store(Double, Fp, READ, 0);
    asm.alu(Op::Mov, R3, R9);
    asm.alu(Op::Add, R3, at.folio_order);
    read(&mut asm, READ, 1, bad);
    asm.load(Double, R2, Fp, READ);
    found_of(&mut asm);
    asm.store(Word, R1, found::ORDER, R2);
    for reading in 0..found::READINGS {
        let of = if reading % 2 == 0 { at.folio_mappings } else { i32::from(at.folio_refcount) };
        found_of(&mut asm);
        asm.alu(Op::Add, R1, i32::from(found::AGAIN + 4 * reading));
        asm.alu(Op::Mov, R2, 4);
        asm.alu(Op::Mov, R3, R9);
        asm.alu(Op::Add, R3, of);
        asm.call(Call::ProbeReadKernel);
        asm.jump_if(If::Ne, R0, 0, bad);
    }
    found_of(&mut asm);
    asm.store(Word, R1, found::WHAT, found::LARGE);
    asm.jump(next);

    asm.place(absent);
    found_of(&mut asm);
    asm.store(Word, R1, found::WHAT, found::ABSENT);
    asm.jump(next);
    asm.place(done);
    asm.exit(DONE as i32);
    asm
}
