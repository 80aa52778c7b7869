//! Reads that a call begins together.
//!
//! Before: `reading` has pieces to read. After: each is under way, or over: with its bytes, or with an error.
//! Threads: none of its own; a batch is a call's, or the store's and under its lock. Units: a block is 4096 bytes; a
//! piece is 1 to 64 blocks that follow one another.
//! Promise: short reads are continued. The kernel reads into buffers that a batch owns, through its ring, which leaks
//! them rather than free what the kernel may write to.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ballast_base::PAGE_SIZE;
use ballast_sys::ring::{Buffer, Direction, Ring, Ticket, Transfer};

use super::disk::{Disk, READ_TIMEOUT, Returned, TRIES, Transfers};
use super::errors::FailedRead;
use super::faults::Ordered;
use crate::{IoContext, PageBytes};

/// How long a call waits for each of its reads, for whom, and the event that ends that.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wait<'a> {
    pub timeout: Duration,
    pub context: IoContext<'a>,
}

/// The state of a piece.
#[derive(Debug)]
pub(super) enum State {
    /// The kernel has it. What a test ordered has to last for some more.
    UnderWay {
        ticket: Ticket,
        ordered: Ordered,
        tries: usize,
    },
    Kept(Buffer),
    /// Noticed then.
    Failed(io::Error, Instant),
}

/// Blocks that are read together.
#[derive(Debug)]
pub(super) struct Piece {
    pub first: u64,
    pub blocks: usize,
    /// A bit for each block whose page may still be wanted.
    pub wanted: u64,
    pub state: State,
}

impl Piece {
    /// The bits of these blocks, if all of them are of this piece, and wanted.
    pub fn bits(&self, (first, blocks): (u64, usize)) -> Option<u64> {
        let at = first.checked_sub(self.first)?;
        let bits = (u64::MAX >> (64 - blocks)).checked_shl(u32::try_from(at).ok()?)?;
        (at as usize + blocks <= self.blocks && self.wanted & bits == bits).then_some(bits)
    }

    pub fn is_under_way(&self) -> bool {
        matches!(self.state, State::UnderWay { .. })
    }

    /// The blocks for which its buffer has room, if it is kept.
    pub fn room(&self) -> usize {
        if let State::Kept(buffer) = &self.state { buffer.as_slice().len() / PAGE_SIZE } else { 0 }
    }

    /// The bytes of these blocks, which are of this piece.
    pub fn pages(&self, (first, blocks): (u64, usize)) -> Option<&[PageBytes]> {
        let State::Kept(buffer) = &self.state else { return None };
        buffer.as_slice().as_chunks().0.get((first - self.first) as usize..)?.get(..blocks)
    }

    /// Did a test order that it is not over yet?
    pub fn lasts(&self) -> bool {
        matches!(&self.state, State::UnderWay { ordered, .. } if !ordered.takes.is_zero())
    }

    /// Somebody waits for it for so long. What a test ordered takes no real time. Returns whether it may be over then.
    pub fn is_waited_for(&mut self, timeout: Duration) -> bool {
        let State::UnderWay { ordered, .. } = &mut self.state else { return false };
        let may_be_over = ordered.takes <= timeout;
        ordered.takes = match ordered.takes {
            _ if ordered.is_late_once => Duration::ZERO,
            Duration::MAX => Duration::MAX,
            takes => takes.saturating_sub(timeout),
        };
        may_be_over
    }
}

/// Reads that were begun together, on one ring.
#[derive(Debug)]
pub(super) struct Batch {
    /// While one is under way.
    pub ring: Option<Ring>,
    pub pieces: Vec<Piece>,
    pub begun: Instant,
    /// Other blocks could be read then.
    pub began_beside_good: bool,
    /// When somebody asked for one of them.
    pub asked: Instant,
}

impl Batch {
    pub fn begin(
        disk: &Disk,
        transfers: &mut Transfers,
        pieces: impl Iterator<Item = (u64, usize)>,
        began_beside_good: bool,
    ) -> io::Result<Self> {
        let mut ring = transfers.for_reads()?;
        let begin = |(first, blocks): (u64, usize)| {
            let (file, offset, end) = (Arc::clone(&disk.file), first * PAGE_SIZE as u64, blocks * PAGE_SIZE);
            let transfer = |buffer| Transfer { file, direction: Direction::Read, offset, buffer, done: 0, end };
            let state = match transfers.buffer(end) {
                Ok(buffer) => Self::hand_over(disk, &mut ring, transfer(buffer), 0),
                Err(error) => State::Failed(error, Instant::now()),
            };
            Piece { first, blocks, wanted: u64::MAX >> (64 - blocks), state }
        };
        let pieces = pieces.map(begin).collect();
        ring.submit();
        let now = Instant::now();
        Ok(Self { ring: Some(ring), pieces, begun: now, began_beside_good, asked: now })
    }

    /// A read of it that is over now, as far as is known here.
    pub fn read(&self) -> FailedRead {
        FailedRead { begun: self.begun, over: Instant::now(), began_beside_good: self.began_beside_good }
    }

    fn hand_over(disk: &Disk, ring: &mut Ring, transfer: Transfer, tries: usize) -> State {
        match disk.begin(ring, Direction::Read, transfer) {
            Ok((ticket, ordered)) => State::UnderWay { ticket, ordered, tries },
            Err((_, error)) => State::Failed(error, Instant::now()),
        }
    }

    /// Notices what is over. Waits for nothing.
    pub fn reap(&mut self, disk: Option<&Disk>) {
        let Some(ring) = &mut self.ring else { return };
        for piece in &mut self.pieces {
            let State::UnderWay { ticket, ordered, tries } = &piece.state else { continue };
            if !ordered.takes.is_zero() && piece.wanted != 0 {
                continue;
            }
            let Some((transfer, mut result)) = ring.now(ticket) else { continue };
            if let Some(errno) = ordered.errno {
                result = Err(io::Error::from_raw_os_error(errno));
            }
            piece.state = match (Returned::of(transfer, result, piece.blocks * PAGE_SIZE), disk) {
                (Returned::Done(buffer), _) => State::Kept(buffer),
                (Returned::Failed(_, error), _) => State::Failed(error, Instant::now()),
                (Returned::Rest(transfer), Some(disk)) if *tries < TRIES => {
                    Self::hand_over(disk, ring, transfer, tries + 1)
                }
                // It was continued or restarted too often without progress, or nobody wants it.
                (Returned::Rest(_), _) => State::Failed(io::ErrorKind::WouldBlock.into(), Instant::now()),
            };
        }
        if !ring.is_submitted() {
            // What was continued, and what the kernel could not take before.
            ring.submit();
        }
    }

    /// Its ring, if nothing is under way on it.
    pub fn idle_ring(&mut self) -> Option<Ring> {
        self.ring.take_if(|_| !self.pieces.iter().any(Piece::is_under_way))
    }

    /// Waits for a piece. All are under way at once, so the waits do not add up. If the lock of the caller is wanted,
    /// it waits no longer than for a page at first.
    pub fn wait_for(&mut self, disk: &Disk, index: usize, wait: Wait<'_>) {
        if !self.pieces[index].is_waited_for(wait.timeout) {
            return;
        }
        while let (Some(ring), State::UnderWay { ticket, .. }) = (&mut self.ring, &self.pieces[index].state) {
            let left = wait.timeout.saturating_sub(self.begun.elapsed());
            ring.wait_until_over(ticket, left.min(READ_TIMEOUT));
            self.reap(Some(disk));
            if left.is_zero() || wait.context.is_wanted() && self.begun.elapsed() >= READ_TIMEOUT {
                return;
            }
        }
    }
}
