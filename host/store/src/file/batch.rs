//! Reads that a call submits together.
//!
//! Before: `reading` has pieces to read. After: each is in flight, or done: with its bytes or an error.
//! Threads: none of its own; a batch belongs to a call, or to the store and its lock. Units: a block is 4096 bytes; a
//! piece is 1 to 64 consecutive blocks.
//! Promise: short reads are continued. The kernel reads into buffers that a batch owns through its ring, which leaks a
//! buffer rather than free what the kernel may write to.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ballast_base::PAGE_SIZE;
use ballast_sys::ring::{Buffer, Direction, Ring, Ticket, Transfer};

use super::disk::{Disk, READ_TIMEOUT, Returned, TRIES, Transfers};
use super::errors::FailedRead;
use super::faults::Ordered;
use crate::{IoContext, PageBytes};

/// How long a call waits for each of its reads, for which reader, and the event that ends the wait.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wait<'a> {
    pub timeout: Duration,
    pub context: IoContext<'a>,
}

#[derive(Debug)]
pub(super) enum State {
    /// In flight. `ordered` is a fault that a test injects.
    UnderWay {
        ticket: Ticket,
        ordered: Ordered,
        tries: usize,
    },
    Kept(Buffer),
    /// With the time at which the failure was seen.
    Failed(io::Error, Instant),
}

/// Blocks that one read covers.
#[derive(Debug)]
pub(super) struct Piece {
    pub first: u64,
    pub blocks: usize,
    /// A bit for each block whose page may still be wanted.
    pub wanted: u64,
    pub state: State,
}

impl Piece {
    /// The bits of these blocks, if the piece has all of them and all are wanted.
    pub fn bits(&self, (first, blocks): (u64, usize)) -> Option<u64> {
        let at = first.checked_sub(self.first)?;
        let bits = (u64::MAX >> (64 - blocks)).checked_shl(u32::try_from(at).ok()?)?;
        (at as usize + blocks <= self.blocks && self.wanted & bits == bits).then_some(bits)
    }

    pub fn is_under_way(&self) -> bool {
        matches!(self.state, State::UnderWay { .. })
    }

    /// The blocks for which its buffer, if kept, has room.
    pub fn room(&self) -> usize {
        if let State::Kept(buffer) = &self.state { buffer.as_slice().len() / PAGE_SIZE } else { 0 }
    }

    pub fn pages(&self, (first, blocks): (u64, usize)) -> Option<&[PageBytes]> {
        let State::Kept(buffer) = &self.state else { return None };
        buffer.as_slice().as_chunks().0.get((first - self.first) as usize..)?.get(..blocks)
    }

    pub fn lasts(&self) -> bool {
        matches!(&self.state, State::UnderWay { ordered, .. } if !ordered.takes.is_zero())
    }

    /// Notes a wait of this length, which an injected delay passes without real time. Returns whether the delay is
    /// over.
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

#[derive(Debug)]
pub(super) struct Batch {
    /// `None` once no read is in flight.
    pub ring: Option<Ring>,
    pub pieces: Vec<Piece>,
    pub begun: Instant,
    /// The last time at which a caller asked for one of the pieces.
    pub asked: Instant,
}

impl Batch {
    pub fn begin(
        disk: &Disk,
        transfers: &mut Transfers,
        pieces: impl Iterator<Item = (u64, usize)>,
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
        Ok(Self { ring: Some(ring), pieces, begun: now, asked: now })
    }

    /// The times of a failed read of the batch: it began with the batch, and it failed before now.
    pub fn read(&self) -> FailedRead {
        FailedRead { begun: self.begun, over: Instant::now() }
    }

    fn hand_over(disk: &Disk, ring: &mut Ring, transfer: Transfer, tries: usize) -> State {
        match disk.begin(ring, Direction::Read, transfer) {
            Ok((ticket, ordered)) => State::UnderWay { ticket, ordered, tries },
            Err((_, error)) => State::Failed(error, Instant::now()),
        }
    }

    /// Notes which reads are done, without a wait.
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
                // The read was continued or restarted too often, or no caller wants it.
                (Returned::Rest(_), _) => State::Failed(io::ErrorKind::WouldBlock.into(), Instant::now()),
            };
        }
        if !ring.is_submitted() {
            // Transfers that were continued, or that the kernel could not take before.
            ring.submit();
        }
    }

    pub fn idle_ring(&mut self) -> Option<Ring> {
        self.ring.take_if(|_| !self.pieces.iter().any(Piece::is_under_way))
    }

    /// Waits for a piece. All are in flight at once, so the waits do not add up. If another thread wants the caller's
    /// lock, the wait ends after [`READ_TIMEOUT`].
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
