//! The bidirectional strategy (Vmem, 4.2.2): 1 GiB from the front, 2 MiB from the back.
//!
//! Before: a request. After: `intent` makes the slices the VM's. Promise: reads only; the same state and request give
//! the same plan. The three rules as published:
//!
//! 1. Whole frames come first, the lowest first, as far as the guest's memory has aligned GiB and the node whole
//!    frames; the rest is slices.
//! 2. Slices come from fragmented frames, the highest first, and in each the highest slice first.
//! 3. Only when these have none left, a whole frame is used for slices, the highest first.
//!
//! There is one addition: slices in bricks of other trust domains are not available.

use crate::map::request::{Part, Refused, Request};
use crate::map::state::{Content, SliceState};
use crate::map::table::{Entry, Table};
use crate::map::unit::{Domain, Extent, FRAME_SLICES, FrameIdx, GuestIdx, Mode, NodeIdx, SliceIdx};
use crate::map::words::Words;

struct Chosen {
    /// Whole frames, ascending.
    frames: Vec<FrameIdx>,
    /// Runs of slices, ascending.
    slices: Vec<Extent>,
}

/// The extents of a request, in the order of guest memory, for this VM slot.
pub(crate) fn plan<W: Words>(table: &Table<W>, request: &Request, slot: u16) -> Result<Vec<Entry>, Refused> {
    check(table, request)?;
    let mut entries = Vec::new();
    for (node, _) in table.layout.nodes() {
        let parts: Vec<Part> = request.parts.iter().copied().filter(|part| part.node == node).collect();
        if !parts.is_empty() {
            let chosen = choose(table, request, node, &parts)?;
            lay_out(&parts, chosen, slot, &mut entries);
        }
    }
    entries.sort_by_key(|entry: &Entry| entry.guest);
    Ok(entries)
}

/// Checks that the pool could ever grant the request.
fn check<W: Words>(table: &Table<W>, request: &Request) -> Result<(), Refused> {
    let wanted: u64 = request.parts.iter().map(|part| u64::from(part.slices)).sum();
    let wrong = |why: &str| Err(Refused::Request { vm: request.vm, why: why.into() });
    if wanted == 0 {
        return wrong("it asks for none");
    }
    if wanted > u64::from(table.layout.slices()) {
        return wrong("it asks for more than the pool has");
    }
    Ok(())
}

fn aligned(part: &Part) -> std::ops::Range<u32> {
    let start = part.guest.0.div_ceil(FRAME_SLICES);
    start..((part.guest.0 + part.slices) / FRAME_SLICES).max(start)
}

fn choose<W: Words>(table: &Table<W>, request: &Request, node: NodeIdx, parts: &[Part]) -> Result<Chosen, Refused> {
    let place = table.layout.nodes[usize::from(node.0)];
    let all = || (place.first..place.first + place.frames).map(FrameIdx);
    let wanted: u32 = parts.iter().map(|part| part.slices).sum();
    let most_frames: usize = match request.mode {
        Mode::Slices => 0,
        Mode::Mix => parts.iter().map(|part| aligned(part).len()).sum(),
    };
    let frames: Vec<FrameIdx> = all().filter(|frame| table.count(*frame).is_whole()).take(most_frames).collect();
    let mut left = wanted - frames.len() as u32 * FRAME_SLICES;
    let mut slices = Vec::new();
    for frame in for_slices(table, node) {
        if left == 0 {
            break;
        }
        if frames.binary_search(&frame).is_ok() || table.count(frame).ready == 0 {
            continue;
        }
        let ready = frame.extent().each().rev().filter(|at| is_for(table, *at, request.domain));
        slices.extend(ready.take(left as usize).inspect(|_| left -= 1));
    }
    if left > 0 {
        return Err(no_room(table, request, node, wanted));
    }
    slices.sort_unstable();
    Ok(Chosen { frames, slices: join(&slices) })
}

/// The frames of a node in the order in which rules 2 and 3 use them for slices: fragmented ones first.
pub(crate) fn for_slices<W: Words>(table: &Table<W>, node: NodeIdx) -> impl Iterator<Item = FrameIdx> {
    let place = table.layout.nodes[usize::from(node.0)];
    let all = move || (place.first..place.first + place.frames).rev().map(FrameIdx);
    [true, false].into_iter().flat_map(move |is| all().filter(move |at| table.count(*at).is_fragmented() == is))
}

/// May a VM of this domain get this slice?
fn is_for<W: Words>(table: &Table<W>, at: SliceIdx, domain: Domain) -> bool {
    table.state(at).is_ready() && table.owner(at).is_none_or(|owner| owner == domain)
}

/// Returns the refusal, with the counts of the available memory.
fn no_room<W: Words>(table: &Table<W>, request: &Request, node: NodeIdx, wanted: u32) -> Refused {
    let place = table.layout.nodes[usize::from(node.0)];
    let (mut ready, mut unzeroed, mut fenced) = (0, 0, 0);
    for frame in (place.first..place.first + place.frames).map(FrameIdx) {
        for at in frame.extent().each() {
            match table.state(at) {
                SliceState::Free(_) if table.owner(at).is_some_and(|owner| owner != request.domain) => fenced += 1,
                SliceState::Free(Content::Zeroed) => ready += 1,
                SliceState::Free(_) => unzeroed += 1,
                _ => {}
            }
        }
    }
    Refused::NoRoom { vm: request.vm, numa: place.spec.numa, wanted, ready, unzeroed, fenced }
}

/// Joins neighbours to extents. Nodes begin at frames, so slices of two nodes are never in one extent.
pub(crate) fn join(slices: &[SliceIdx]) -> Vec<Extent> {
    let mut extents: Vec<Extent> = Vec::new();
    for at in slices {
        match extents.last_mut() {
            Some(last) if last.end() == at.0 => last.slices += 1,
            _ => extents.push(Extent { start: *at, slices: 1 }),
        }
    }
    extents
}

/// Give each part of guest memory its frames, as far as it is aligned, and slices.
fn lay_out(parts: &[Part], chosen: Chosen, slot: u16, entries: &mut Vec<Entry>) {
    let mut frames = chosen.frames.into_iter();
    let mut slices = chosen.slices.into_iter();
    let mut rest: Option<Extent> = None;
    let mut parts = parts.to_vec();
    parts.sort_by_key(|part| part.guest);
    for part in parts {
        let aligned = aligned(&part);
        let end = part.guest.0 + part.slices;
        let mut at = part.guest.0;
        while at < end {
            let is_frame = at.is_multiple_of(FRAME_SLICES) && aligned.contains(&(at / FRAME_SLICES));
            if let Some(frame) = is_frame.then(|| frames.next()).flatten() {
                push(entries, Entry { slot, guest: GuestIdx(at), extent: frame.extent() });
                at += FRAME_SLICES;
                continue;
            }
            // Slices up to the place where the next frame may begin.
            let next = (at / FRAME_SLICES + 1) * FRAME_SLICES;
            let stop = if frames.len() > 0 && next < end { next } else { end };
            // `choose` has found as many slices as are wanted.
            let Some(have) = rest.take().or_else(|| slices.next()) else { return };
            let take = have.slices.min(stop - at);
            let extent = Extent { start: have.start, slices: take };
            push(entries, Entry { slot, guest: GuestIdx(at), extent });
            if take < have.slices {
                rest = Some(Extent { start: SliceIdx(have.start.0 + take), slices: have.slices - take });
            }
            at += take;
        }
    }
}

fn push(entries: &mut Vec<Entry>, entry: Entry) {
    if let Some(last) = entries.last_mut()
        && last.extent.end() == entry.extent.start.0
        && last.guest.0 + last.extent.slices == entry.guest.0
    {
        last.extent.slices += entry.extent.slices;
    } else {
        entries.push(entry);
    }
}
