//! One byte for each slice, and its truth table.
//!
//! Before: `layout` has the place of the byte. After: `table` changes it, and nothing else writes it.
//! Promise: a slice becomes [`SliceState::Used`] by [`Move::Take`] alone, which requires [`Content::Zeroed`]. So no VM
//! gets a slice with the data of another one. Two codes differ in at least four bits, so that a damaged byte is no
//! other state.
//!
//! The states are those of Vmem, 4.2.1, except for its error state: a slice that could not be filled waits for a page.
//! The state of a free slice also has its content.
//!
//! | from \ by | Reserve | Begin | Stop | Clean | Take | Release | Poison | Lend | TakeBack | Expose |
//! |---|---|---|---|---|---|---|---|---|---|---|
//! | hole | free, dirty | | | | | | | | | |
//! | free, dirty | | zeroing | | | | | mce | borrow | | |
//! | free, zeroing | | | dirty | zeroed | | | mce | | | |
//! | free, zeroed | | | | | used | | mce | borrow | | dirty |
//! | used | | | | | | free, dirty | mce_used | | | |
//! | mce_used | | | | | | mce | | | | |
//! | borrow | | | | | | | | | free, dirty | |
//! | mce | | | | | | | | | | |

/// Content of an unused slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Content {
    /// Unknown content; perhaps no memory yet.
    Dirty,
    /// A worker of this run is filling it with zeros.
    Zeroing,
    /// Allocated memory that is zero.
    Zeroed,
}

/// State of a slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SliceState {
    /// The pool has no memory for the slice.
    Hole,
    /// The slice is unused.
    Free(Content),
    /// A VM has the slice.
    Used,
    /// The memory of the slice failed.
    Mce,
    /// The memory of the slice failed while a VM has it.
    MceUsed,
    /// The slice is lent to the host.
    Borrow,
}

/// A change of a slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Move {
    /// The host gave memory.
    Reserve,
    /// A worker begins to fill the slice with zeros.
    Begin,
    /// The worker stopped before it had filled the slice.
    Stop,
    /// The worker has filled the slice.
    Clean,
    /// A VM gets the slice.
    Take,
    /// The VM is gone.
    Release,
    /// The memory of the slice failed.
    Poison,
    /// The host gets the slice.
    Lend,
    /// The host has returned the slice.
    TakeBack,
    /// A VM that is gone could write to the slice, because it had a slice of the same file.
    Expose,
}

impl Move {
    /// Every move.
    pub const ALL: [Self; 10] = [
        Self::Reserve,
        Self::Begin,
        Self::Stop,
        Self::Clean,
        Self::Take,
        Self::Release,
        Self::Poison,
        Self::Lend,
        Self::TakeBack,
        Self::Expose,
    ];
}

impl SliceState {
    /// Every state.
    pub const ALL: [Self; 8] = [
        Self::Hole,
        Self::Free(Content::Dirty),
        Self::Free(Content::Zeroing),
        Self::Free(Content::Zeroed),
        Self::Used,
        Self::Mce,
        Self::MceUsed,
        Self::Borrow,
    ];
    /// Words of the extended Hamming code of 8 bits. A hole is 0, so that a new file is one of holes.
    const CODES: [u8; 8] = [0x00, 0x0F, 0x33, 0x3C, 0x55, 0x66, 0x69, 0x96];

    /// Returns the state after this move; `None` if there is no such move.
    pub const fn after(self, by: Move) -> Option<Self> {
        const DIRTY: SliceState = SliceState::Free(Content::Dirty);
        Some(match (self, by) {
            (Self::Hole, Move::Reserve) => DIRTY,
            (Self::Free(Content::Dirty), Move::Begin) => Self::Free(Content::Zeroing),
            (Self::Free(Content::Zeroing), Move::Stop) => DIRTY,
            (Self::Free(Content::Zeroing), Move::Clean) => Self::Free(Content::Zeroed),
            (Self::Free(Content::Zeroed), Move::Take) => Self::Used,
            (Self::Used, Move::Release) => DIRTY,
            (Self::MceUsed, Move::Release) | (Self::Free(_), Move::Poison) => Self::Mce,
            (Self::Used, Move::Poison) => Self::MceUsed,
            (Self::Free(Content::Dirty | Content::Zeroed), Move::Lend) => Self::Borrow,
            (Self::Borrow, Move::TakeBack) | (Self::Free(Content::Zeroed), Move::Expose) => DIRTY,
            _ => return None,
        })
    }

    /// Is the slice unused?
    pub const fn is_free(self) -> bool {
        matches!(self, Self::Free(_))
    }

    /// May a VM get the slice?
    pub const fn is_ready(self) -> bool {
        matches!(self, Self::Free(Content::Zeroed))
    }

    /// Does a VM have the slice?
    pub const fn is_owned(self) -> bool {
        matches!(self, Self::Used | Self::MceUsed)
    }

    /// Returns the stored byte.
    pub fn to_byte(self) -> u8 {
        let at = Self::ALL.iter().position(|state| *state == self).expect("ALL has every state");
        Self::CODES[at]
    }

    /// Reads a stored byte; `None` if it stands for no state.
    pub fn from_byte(byte: u8) -> Option<Self> {
        Self::CODES.iter().position(|code| *code == byte).map(|at| Self::ALL[at])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_byte_with_three_wrong_bits_is_no_other_state() {
        for (at, one) in SliceState::CODES.iter().enumerate() {
            for other in &SliceState::CODES[at + 1..] {
                assert!((one ^ other).count_ones() >= 4, "{one:#x}, {other:#x}");
            }
        }
        for state in SliceState::ALL {
            assert_eq!(SliceState::from_byte(state.to_byte()), Some(state));
        }
        assert_eq!((0..=u8::MAX).filter(|byte| SliceState::from_byte(*byte).is_some()).count(), SliceState::ALL.len());
    }

    #[test]
    fn a_vm_gets_only_what_is_zeroed_and_a_released_slice_is_dirty() {
        for from in SliceState::ALL {
            for by in Move::ALL {
                match from.after(by) {
                    Some(SliceState::Used) => assert_eq!((from, by), (SliceState::Free(Content::Zeroed), Move::Take)),
                    Some(SliceState::Free(Content::Zeroed)) => {
                        assert_eq!((from, by), (SliceState::Free(Content::Zeroing), Move::Clean));
                    }
                    Some(SliceState::Free(Content::Zeroing)) => assert_eq!(by, Move::Begin),
                    _ => {}
                }
            }
        }
        assert_eq!(SliceState::Used.after(Move::Release), Some(SliceState::Free(Content::Dirty)));
    }

    #[test]
    fn a_slice_whose_memory_failed_is_never_free_again() {
        let mut reached = vec![SliceState::MceUsed];
        while let Some(at) = reached.pop() {
            assert!(!at.is_free() && at != SliceState::Used && at != SliceState::Borrow, "{at:?}");
            reached.extend(Move::ALL.iter().filter_map(|by| at.after(*by)));
        }
    }

    #[test]
    fn the_table_is_the_code() {
        let text = include_str!("state.rs");
        let name = |state: SliceState| match state {
            SliceState::Hole => "hole",
            SliceState::Free(Content::Dirty) => "free, dirty",
            SliceState::Free(Content::Zeroing) => "free, zeroing",
            SliceState::Free(Content::Zeroed) => "free, zeroed",
            SliceState::Used => "used",
            SliceState::Mce => "mce",
            SliceState::MceUsed => "mce_used",
            SliceState::Borrow => "borrow",
        };
        for from in SliceState::ALL {
            let row = text.lines().find_map(|line| line.strip_prefix(&format!("//! | {} |", name(from))));
            let cells: Vec<&str> = row.expect("a row").split('|').map(str::trim).collect();
            for (by, cell) in Move::ALL.iter().zip(cells) {
                let said = from.after(*by).map_or("", name);
                assert!(said == cell || said.strip_prefix("free, ") == Some(cell), "{from:?} {by:?}: {said}, {cell}");
            }
        }
    }
}
