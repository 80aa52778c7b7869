//! The traits of stores of far pages, the context of a read, and the names of stored pages.
//!
//! Before: the evict side hands over one page's bytes. After: the fault side reads them, once or more often, and then
//! frees the handle. The stores themselves are in the store crate.
//! Threads: every method may be called from any thread at any time; a store never calls back.
//! Units: one object is one base page of 4096 bytes.
//! Promise: [`Store::get`] returns the exact bytes that were put under that handle, or says that it cannot.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use crate::wire::VmId;
use crate::{PAGE_SIZE, PageIdx};

/// The bytes of one page.
pub type PageBytes = [u8; PAGE_SIZE];

/// A region of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RegionKey {
    /// The VM: a store may hold pages of many.
    pub vm: VmId,
    /// Number of the region inside its VM.
    pub number: u32,
}

/// Which page of which region an object belongs to. It seeds the checksum, so that a store that returns another page's
/// bytes is caught like one that returns damaged bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PageKey {
    /// The region.
    pub region: RegionKey,
    /// The page inside the region.
    pub page: PageIdx,
}

impl RegionKey {
    /// The key of a page of this region.
    pub const fn page(self, page: PageIdx) -> PageKey {
        PageKey { region: self, page }
    }
}

impl PageKey {
    /// The keys of this page and of those after it, each with its handle.
    pub fn run(self, handles: impl IntoIterator<Item = Handle>) -> Vec<(Self, Handle)> {
        (self.page.0..).map(|page| self.region.page(PageIdx(page))).zip(handles).collect()
    }
}

/// Where a store put a page: 40 bits that mean something to that store alone. They are part of the page-state word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Handle(u64);

impl Handle {
    /// Bits a handle may use.
    pub const BITS: u32 = 40;
    /// The largest handle.
    pub const MAX: u64 = (1 << Self::BITS) - 1;

    /// A handle from its bits; `None` if they do not fit.
    pub const fn new(bits: u64) -> Option<Self> {
        if bits <= Self::MAX { Some(Self(bits)) } else { None }
    }

    /// The bits.
    pub const fn bits(self) -> u64 {
        self.0
    }
}

/// The outcome of a put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PutOutcome {
    /// The page is complete in the store, and durable if the store is a durable one.
    Stored(Handle),
    /// The byte budget is used up. Nothing was kept.
    Full,
    /// The store could not take it in time (stalled device, lost connection). Nothing was kept.
    Busy,
}

/// The outcome of a get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GetOutcome {
    /// The buffer holds the exact bytes; the checksum matched.
    Found,
    /// The store has no such object: lost.
    Absent,
    /// An object is there but its checksum does not match: lost.
    Corrupt,
    /// The store did not return it in time. Silence is not loss: the copy may be there, so the caller asks again.
    Busy,
}

/// Number of the compressed store in RAM: where evicted pages go.
pub const RAM_STORE: u8 = 1;
/// Number of the store in a file: where pages go that have been far for long.
pub const FILE_STORE: u8 = 2;
/// Number of the store in a cluster of other machines: where such pages go if there is no file store, or it is full.
pub const REMOTE_STORE: u8 = 3;
/// Number of the store that a group of VMs shares: it takes the place of the RAM store for their evicted pages.
pub const GROUP_STORE: u8 = 4;

/// A set of store numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreSet([u64; 4]);

impl StoreSet {
    /// The set of all numbers.
    pub const ALL: Self = Self([u64::MAX; 4]);

    /// This set without one number.
    #[must_use]
    pub const fn without(mut self, number: u8) -> Self {
        self.0[number as usize / 64] &= !(1 << (number % 64));
        self
    }

    /// Is this one in it?
    pub const fn contains(self, number: u8) -> bool {
        self.0[number as usize / 64] >> (number % 64) & 1 != 0
    }
}

/// The findings of a store that took over from a dead process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recovered {
    /// Blobs that a live handle names; they are kept.
    pub kept_blobs: u64,
    /// Slots that were taken but that no live handle names; they are free now.
    pub freed_slots: u64,
    /// Slabs whose memory went back to the host.
    pub freed_slabs: u64,
    /// Live handles that name no blob; asking for one returns `Absent`.
    pub missing: u64,
    /// Same-filled pages among the live handles.
    pub same_filled: u64,
}

/// Bytes and pages a store holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreUsage {
    /// Objects stored, same-filled pages included.
    pub pages: u64,
    /// Memory or disk the store really occupies, in bytes.
    pub bytes: u64,
    /// The budget, in bytes.
    pub budget_bytes: u64,
}

impl StoreUsage {
    /// Is more than 15/16 of the budget used?
    pub const fn is_short(self) -> bool {
        self.bytes > self.budget_bytes - self.budget_bytes / 16
    }
}

/// Receives the descriptor that has input when a reply comes: see [`SlowStore::begin`].
pub type OnReply<'a> = &'a (dyn Fn(BorrowedFd<'_>) + Sync);

/// Who waits for the bytes of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reader {
    /// A guest's thread.
    Guest,
    /// No thread of a guest: pages are read ahead, or all are brought back. The errors of these reads do not count as
    /// the guest's, and no page of a disk that is gone for a while is given up.
    Background,
}

/// The event that ends a read early, as [`GetOutcome::Busy`].
#[derive(Clone, Copy)]
pub enum Ends<'a> {
    /// There is none.
    Never,
    /// The caller has a lock, and the number of threads that want it is not zero any more. A read goes on until its
    /// first wait for a page is over, at most 0.1 s: else none would succeed while the lock is wanted often.
    Wanted(&'a AtomicU32),
    /// The read never waits: it takes the page of a [`SlowStore::begin`], or this gets its descriptor again.
    AtOnce(OnReply<'a>),
}

impl std::fmt::Debug for Ends<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Never => "Never",
            Self::Wanted(_) => "Wanted",
            Self::AtOnce(_) => "AtOnce",
        })
    }
}

/// For whom a store reads, how long, and which event ends the read early.
#[derive(Clone, Copy, Debug)]
pub struct IoContext<'a> {
    /// Who waits for the bytes.
    pub reader: Reader,
    /// The time at which the read ends, if that is before the store's own bound.
    pub until: Option<Instant>,
    /// The event that ends the read early.
    pub ends: Ends<'a>,
}

impl<'a> IoContext<'a> {
    /// A guest's thread waits, as long as the store's own bound lasts.
    pub const GUEST: Self = Self { reader: Reader::Guest, until: None, ends: Ends::Never };
    /// A background read, as long as the store's own bound lasts.
    pub const BACKGROUND: Self = Self { reader: Reader::Background, ..Self::GUEST };

    /// This context with an earlier end of the read.
    #[must_use]
    pub fn until(self, until: Instant) -> Self {
        Self { until: Some(self.until.map_or(until, |before| before.min(until))), ..self }
    }

    /// This context with another event that ends the read.
    #[must_use]
    pub const fn ended_by(self, ends: Ends<'a>) -> Self {
        Self { ends, ..self }
    }

    /// Does another thread want the lock that the caller has?
    pub fn is_wanted(self) -> bool {
        matches!(self.ends, Ends::Wanted(threads) if threads.load(Ordering::Acquire) > 0)
    }
}

/// Waits until the pages of a [`SlowStore::begin_put`] are stored, and appends each one's outcome.
pub type Ending = Box<dyn FnOnce(&mut Vec<PutOutcome>) + Send>;

/// A place for far pages.
///
/// The caller's duty: a handle is freed once, under the key it was put under, and not while another call uses that
/// handle. A caller that breaks this may lose that page (or one of the same key), but never gets another page's bytes.
///
/// The store's promises (which the store crate's conformance tests check):
/// - `Found` means the exact bytes that were put under that handle *and key*.
/// - A get of a handle under another key returns `Absent` or `Corrupt`. One exception is unavoidable: a store may keep
///   a same-filled page in the handle itself, and then only a few bits of the handle can tell keys apart; about one
///   wrong key in 128 returns `Found` with the bytes of that handle.
/// - A freed handle returns `Absent` or `Corrupt`, or `Found` with bytes that were once put under that same key.
/// - `Full` and `Busy` store nothing, and do not disturb stored pages. After enough frees, `put` succeeds again.
/// - Each operation ends within a bound of the store's own, at most some seconds, and is `Busy` if it is not done then.
///   How long a caller goes on asking is the caller's decision.
pub trait Store: Send + Sync + std::fmt::Debug {
    /// Keep these bytes. When this returns `Stored`, the bytes can be got back even if this process dies.
    fn put(&self, key: PageKey, bytes: &PageBytes) -> PutOutcome;

    /// Read the bytes into `out`. After any outcome except `Found`, the content of `out` is unspecified. Any 40-bit
    /// handle is safe to get; one that was never returned gives `Absent` or `Corrupt`.
    ///
    /// With [`Ends::AtOnce`] a [`SlowStore`] returns `Found` or `Busy`. If it returns `Busy` and passed no descriptor
    /// on, the read was not begun, or the reply is not the page: a get that may wait must ask for it again. The caller
    /// locks the page for each get: since the read was begun, the handle may have been freed and given to another page.
    fn get(&self, key: PageKey, handle: Handle, out: &mut PageBytes, context: IoContext<'_>) -> GetOutcome;

    /// Keep a run: `pages[i]` is the page `i` after `first`. Each page's outcome is appended, in order. A store on a
    /// device writes up to 512 pages (2 MiB) as one extent if it can; the pages of a run may have different outcomes.
    fn put_run(&self, first: PageKey, pages: &[PageBytes], outcomes: &mut Vec<PutOutcome>) {
        for (page, bytes) in (first.page.0..).zip(pages) {
            outcomes.push(self.put(PageKey { page: PageIdx(page), ..first }, bytes));
        }
    }

    /// Read pages of one region, in rising order, with gaps or without: `out[i]` belongs to `pages[i]`. Returns each
    /// page's outcome, in order. Pages that were put as one extent are read as one, and a store on a network asks for
    /// all of them at once. A store that waits for one after the other returns `Busy` for all after a busy one, because
    /// all of them are locked.
    fn get_run(&self, pages: &[(PageKey, Handle)], out: &mut [PageBytes], context: IoContext<'_>) -> Vec<GetOutcome> {
        let mut is_busy = false;
        let get = |(&(key, handle), out): (&(PageKey, Handle), &mut PageBytes)| {
            let outcome = if is_busy { GetOutcome::Busy } else { self.get(key, handle, out, context) };
            is_busy |= outcome == GetOutcome::Busy;
            outcome
        };
        pages.iter().zip(out).map(get).collect()
    }

    /// Forget an object. Any 40-bit handle is safe to free; one that names no object, or the object of another key, is
    /// ignored. (For a same-filled page kept in its handle the store cannot know; then only the count of pages is
    /// wrong.)
    fn free(&self, key: PageKey, handle: Handle);

    /// Do deferred work, such as returning memory, that no fault should wait for. Called now and then by a thread that
    /// may wait; costs nothing when there is nothing to do.
    fn tidy(&self) {}

    /// The usage of the store now; emptied space counts until [`Store::tidy`] returns it. Reads counters: never waits.
    fn usage(&self) -> StoreUsage;
}

/// A store whose pages outlive the engine that put them.
pub trait DurableStore: Store {
    /// After an unclean death: free what is not in `live` (the pages whose words name this store, and their handles),
    /// finish what was begun, make the counts agree. A live handle that names nothing is counted and otherwise ignored;
    /// `get` will return `Absent`. No other thread or process may use the store during this call.
    ///
    /// # Errors
    /// It cannot be done now. Nothing was freed; the store works, and leaked objects stay until this is done.
    fn recover(&self, live: &mut dyn Iterator<Item = (PageKey, Handle)>) -> io::Result<Recovered>;

    /// For a store that knows only in this process's memory which objects words name: the calls that tell it.
    fn attach(&self) -> Option<&dyn Attach> {
        None
    }
}

/// See [`DurableStore::attach`].
pub trait Attach {
    /// Another process uses the store for these pages, and this one begins to use it, too: both get and free, neither
    /// puts. `live` has all objects that words name, or have named since that process put its last page; some may be
    /// gone by now. Only objects in `live` are freed.
    fn attach_shared(&self, live: &mut dyn Iterator<Item = (PageKey, Handle)>);

    /// The other process no longer uses the store. `live` has the objects that words name now. This process has put
    /// nothing since [`Attach::attach_shared`], but may have freed objects.
    fn attach_exclusive(&self, live: &mut dyn Iterator<Item = (PageKey, Handle)>);
}

/// A store in this host's memory: it returns at once. Evicted pages go to one, and move on to a [`SlowStore`].
pub trait NearStore: DurableStore {
    /// As [`Store::get`]. `blob` becomes the form in which the store keeps the page, checked together with `out`, for a
    /// store that keeps that form ([`SlowStore::begin_put`]); empty: there is none. Without `Found`, both are
    /// unspecified.
    fn get_blob(&self, key: PageKey, handle: Handle, out: &mut PageBytes, blob: &mut Vec<u8>) -> GetOutcome {
        blob.clear();
        self.get(key, handle, out, IoContext::BACKGROUND)
    }

    /// Is the object of this handle still what [`NearStore::get_blob`] found there?
    fn still_has(&self, key: PageKey, handle: Handle, bytes: &PageBytes, _blob: &[u8]) -> bool {
        let mut now: PageBytes = [0; PAGE_SIZE];
        self.get(key, handle, &mut now, IoContext::BACKGROUND) == GetOutcome::Found && now == *bytes
    }

    /// Does the object of this handle occupy memory? Moving a page that is kept in its handle would free nothing.
    fn takes_room(&self, handle: Handle) -> bool;

    /// Is more than 15/16 of the budget used? Asked often, so it must be cheap.
    fn is_short(&self) -> bool;
}

/// A store that may wait for a device or for other machines.
pub trait SlowStore: DurableStore {
    /// This page will be read soon. The store sends the request now, if it can do so without waiting; before that
    /// `watch` gets the descriptor that has input when the reply comes. Returns whether it was sent; see
    /// [`Ends::AtOnce`].
    fn begin(&self, _key: PageKey, _handle: Handle, _watch: OnReply<'_>) -> bool {
        false
    }

    /// [`Store::put_run`] in two steps: the pages are on their way when this returns, and the result waits until they
    /// are stored and appends the outcomes. It must be called: if it is dropped, some of the pages may be stored, and
    /// stay until [`DurableStore::recover`]. A store that waits for no other machine does all of it now. `blobs` is
    /// empty, or has the forms of the pages in another store, as [`NearStore::get_blob`] returned them: a store that
    /// keeps that form does not compress the pages again.
    fn begin_put(self: Arc<Self>, first: PageKey, pages: &[PageBytes], _blobs: &[Vec<u8>]) -> Ending {
        let mut outcomes = Vec::with_capacity(pages.len());
        self.put_run(first, pages, &mut outcomes);
        Box::new(move |all| all.append(&mut outcomes))
    }

    /// Would [`Store::tidy`] have something to do at once?
    fn is_untidy(&self) -> bool {
        false
    }

    /// Does an operation outlive this process, so that the next user must wait for it and [`DurableStore::recover`]?
    fn must_recover(&self) -> bool {
        false
    }

    /// The reason for the last refusal of a put, if this store knows more than `Full` and `Busy`.
    fn last_refusal(&self) -> Option<String> {
        None
    }

    /// Would it refuse any page now, for a reason other than its room? Never waits.
    fn refuses(&self) -> bool {
        false
    }
}

/// Is the page all zeros?
pub fn is_zero(bytes: &PageBytes) -> bool {
    // In chunks that the compiler turns into vector instructions.
    bytes.chunks_exact(64).all(|chunk| chunk.iter().fold(0, |acc, byte| acc | byte) == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_has_the_numbers_that_were_not_taken_out() {
        let set = [0, 63, 64, 255].into_iter().fold(StoreSet::ALL, StoreSet::without);
        assert!((0..=255).all(|number| set.contains(number) != [0, 63, 64, 255].contains(&number)));
    }
}
