//! Speed of the RAM store on this machine (pages per second and microseconds per page, one thread), and of its LZ4
//! beside `lz4_flex` on the same pages.
//!
//! Before: `cargo run --release -p ballast-store --example store_speed [FILE...]`. After: one line per codec and kind
//! of page, then one per kind of page and encoder; each FILE is a kind of its own, cut into pages. Units: us per page,
//! the median of the repetitions with the lowest and highest; ratio is page bytes over payload bytes, where a page
//! stored raw counts 4096.
//! Promise: "put" includes the first touch of its slabs, as for the first pages of a VM; "again" puts into slabs in
//! use.

use std::hint::black_box;
use std::time::Instant;

use ballast_base::wire::VmId;
use ballast_base::{Bytes, GIB, PAGE_SIZE, PageIdx};
use ballast_store::{
    Budget, Codec, GetOutcome, Handle, IoContext, PageBytes, PageKey, PutOutcome, RamOptions, RamStore, RegionKey,
    Store,
};
use ballast_testkit::pages;

const PAGES: usize = 2000;
const REPETITIONS: usize = 15;
/// One page per this many stays while the others are freed, so that no slab is freed: a slab has at least 15 slots.
const STAYS: usize = 8;

fn key(page: usize) -> PageKey {
    RegionKey { vm: VmId([7; 16]), number: 0 }.page(PageIdx(page as u64))
}

/// Median, lowest and highest microseconds per page.
fn spread(mut us: Vec<f64>) -> String {
    us.sort_by(f64::total_cmp);
    format!("{:6.2} us ({:.2}-{:.2})", us[us.len() / 2], us[0], us[us.len() - 1])
}

fn us_per_page<R>(pages: usize, work: impl FnOnce() -> R) -> (f64, R) {
    let start = Instant::now();
    let done = work();
    (start.elapsed().as_secs_f64() * 1e6 / pages as f64, done)
}

fn put(store: &RamStore, page: usize, bytes: &PageBytes) -> Handle {
    match store.put(key(page), bytes) {
        PutOutcome::Stored(handle) => handle,
        other => panic!("page {page}: {other:?}"),
    }
}

fn measure(codec_name: &str, codec: Codec, kind: &str, content: &[PageBytes]) {
    let options = RamOptions { codec, ..RamOptions::new(Budget::new(Bytes(GIB))) };
    let (store, _arena) = RamStore::create(options).expect("create a store");
    let mut out = [0; PAGE_SIZE];
    let mut times = [const { Vec::new() }; 4];
    for _ in 0..REPETITIONS {
        let (us, mut handles) = us_per_page(content.len(), || {
            content.iter().enumerate().map(|(page, bytes)| put(&store, page, bytes)).collect::<Vec<_>>()
        });
        times[0].push(us);
        let goes = |page: &usize| !page.is_multiple_of(STAYS);
        for page in (0..content.len()).filter(goes) {
            store.free(key(page), handles[page]);
        }
        let (us, ()) = us_per_page(content.len() - content.len().div_ceil(STAYS), || {
            for page in (0..content.len()).filter(goes) {
                handles[page] = put(&store, page, &content[page]);
            }
        });
        times[1].push(us);
        let (us, ()) = us_per_page(content.len(), || {
            for (page, handle) in handles.iter().enumerate() {
                assert_eq!(store.get(key(page), *handle, &mut out, IoContext::GUEST), GetOutcome::Found);
                black_box(&out);
            }
        });
        times[2].push(us);
        let (us, ()) = us_per_page(content.len(), || {
            for (page, handle) in handles.iter().enumerate() {
                store.free(key(page), *handle);
            }
        });
        times[3].push(us);
    }
    let [fresh, again, get, free] = times.map(spread);
    println!("{codec_name:8} {kind:18} put {fresh}  again {again}  get {get}  free {free}");
}

/// Ratios of the store (without headers and slots) and of `lz4_flex` under the same rule, side by side.
fn compare(kind: &str, content: &[PageBytes]) {
    const RAW_ABOVE: usize = 3568;
    let (store, _arena) = RamStore::create(RamOptions::new(Budget::new(Bytes(GIB)))).expect("create a store");
    for (page, bytes) in content.iter().enumerate() {
        put(&store, page, bytes);
    }
    let usage = store.usage_detail();
    let ours = usage.compressed_out_bytes as usize + usage.raw_puts as usize * PAGE_SIZE;
    let mut block = vec![0; lz4_flex::block::get_maximum_output_size(PAGE_SIZE)];
    let mut table = lz4_flex::block::CompressTable::small();
    let mut times = Vec::new();
    let mut theirs = 0;
    for _ in 0..REPETITIONS {
        let (us, bytes) = us_per_page(content.len(), || {
            let lens = content.iter().filter(|bytes| bytes[8..] != bytes[..PAGE_SIZE - 8]).map(|bytes| {
                let len = lz4_flex::block::compress_into_with_table(bytes, &mut block, &mut table).unwrap_or(PAGE_SIZE);
                if len > RAW_ABOVE { PAGE_SIZE } else { len }
            });
            lens.sum::<usize>()
        });
        times.push(us);
        theirs = bytes;
    }
    let not_filled = content.len() - usage.same_filled_puts as usize;
    let ratio = |bytes: usize| (not_filled * PAGE_SIZE) as f64 / bytes.max(1) as f64;
    println!(
        "{kind:18} {not_filled} pages, ratio {:.3}, lz4_flex {:.3} and {} to compress alone",
        ratio(ours),
        ratio(theirs),
        spread(times)
    );
}

/// Half noise, half zeros: as many incompressible bytes as `half_compressible`, in two sequences instead of sixty.
fn half_zero(seed: u64) -> PageBytes {
    let mut page = pages::incompressible(seed);
    page[PAGE_SIZE / 2..].fill(0);
    page
}

/// An array of pointers into one heap, every fourth null.
fn pointers(seed: u64) -> PageBytes {
    let mut page = pages::incompressible(seed);
    for word in page.chunks_exact_mut(8) {
        let random = u64::from_le_bytes(*word.first_chunk().expect("8 bytes"));
        let pointer = if random % 4 == 0 { 0 } else { 0x7f12_3400_0000 + (random >> 40) * 16 };
        word.copy_from_slice(&pointer.to_le_bytes());
    }
    page
}

fn file_pages(path: &str) -> Vec<PageBytes> {
    let bytes = std::fs::read(path).unwrap_or_else(|error| panic!("reading {path}: {error}"));
    let pages: Vec<PageBytes> =
        bytes.chunks_exact(PAGE_SIZE).filter_map(|chunk| chunk.first_chunk().copied()).collect();
    pages.iter().step_by(pages.len().div_ceil(PAGES).max(1)).copied().collect()
}

fn main() {
    println!("{PAGES} pages (files: up to as many), {REPETITIONS} repetitions, 1 thread");
    let made = |page: fn(u64) -> PageBytes| (0..PAGES as u64).map(page).collect::<Vec<_>>();
    let mut kinds = vec![
        ("zero".to_owned(), made(|_| [0; PAGE_SIZE])),
        ("half_compressible".to_owned(), made(pages::half_compressible)),
        ("half_zero".to_owned(), made(half_zero)),
        ("incompressible".to_owned(), made(pages::incompressible)),
        ("pointers".to_owned(), made(pointers)),
    ];
    for path in std::env::args().skip(1) {
        let name = path.rsplit('/').next().unwrap_or(&path).to_owned();
        kinds.push((name, file_pages(&path)));
    }
    for (name, codec) in
        [("lz4", Codec::Lz4), ("zstd 1", Codec::Zstd { level: 1 }), ("zstd -1", Codec::Zstd { level: -1 })]
    {
        for (kind, content) in &kinds {
            measure(name, codec, kind, content);
        }
    }
    for (kind, content) in &kinds {
        compare(kind, content);
    }
}
