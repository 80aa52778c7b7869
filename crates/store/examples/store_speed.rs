//! How quick the RAM store is on this machine: pages per second and microseconds per page, one thread.
//!
//! Before: `cargo run --release -p ballast-store --example store_speed`. After: one line per codec and kind of page.
//! Units: us per page, the median of the repetitions with the lowest and highest; ratio is page bytes over payload bytes.
//! Promise: the slabs of a repetition are fresh, so a put pays for the first touch of its memory, as it does in life.

use std::hint::black_box;
use std::time::Instant;

use ballast_base::{Bytes, GIB, PAGE_SIZE, PageIdx};
use ballast_store::{
    Budget, Codec, GetOutcome, Handle, PageBytes, PageKey, PutOutcome, RamOptions, RamStore, Store, pages,
};

const PAGES: u64 = 2000;
const REPETITIONS: usize = 7;

fn key(page: u64) -> PageKey {
    PageKey { region: 0, page: PageIdx(page) }
}

/// Median, lowest and highest microseconds per page.
fn spread(mut us: Vec<f64>) -> String {
    us.sort_by(f64::total_cmp);
    let median = us[us.len() / 2];
    format!("{median:6.2} us ({:.2}-{:.2}, {:7.0} pages/s)", us[0], us[us.len() - 1], 1e6 / median)
}

fn measure(codec_name: &str, codec: Codec, kind: &str, page: fn(u64) -> PageBytes) {
    let options = RamOptions { codec, ..RamOptions::new(Budget::new(Bytes(GIB))) };
    let (store, _arena) = RamStore::create(options).expect("create a store");
    let content: Vec<PageBytes> = (0..PAGES).map(page).collect();
    let mut out = [0; PAGE_SIZE];
    let mut times = [const { Vec::new() }; 3];
    for _ in 0..REPETITIONS {
        let us_per_page = |start: Instant| start.elapsed().as_secs_f64() * 1e6 / PAGES as f64;
        let start = Instant::now();
        let handles: Vec<Handle> = (0u64..)
            .zip(&content)
            .map(|(page, bytes)| match store.put(key(page), bytes) {
                PutOutcome::Stored(handle) => handle,
                other => panic!("page {page}: {other:?}"),
            })
            .collect();
        times[0].push(us_per_page(start));
        let start = Instant::now();
        for (page, handle) in (0u64..).zip(&handles) {
            assert_eq!(store.get(key(page), *handle, &mut out), GetOutcome::Found);
            black_box(&out);
        }
        times[1].push(us_per_page(start));
        let start = Instant::now();
        for (page, handle) in (0u64..).zip(&handles) {
            store.free(key(page), *handle);
        }
        times[2].push(us_per_page(start));
    }
    let usage = store.usage_detail();
    let ratio = usage.compressed_in_bytes as f64 / usage.compressed_out_bytes.max(1) as f64;
    let [put, get, free] = times.map(spread);
    println!("{codec_name:8} {kind:18} put {put}  get {get}  free {free}  ratio {ratio:.2}");
}

/// One run of noise and one of zeros: as many bytes to keep as `half_compressible`, in two sequences and not in sixty.
fn half_zero(seed: u64) -> PageBytes {
    let mut page = pages::incompressible(seed);
    page[PAGE_SIZE / 2..].fill(0);
    page
}

fn main() {
    println!("{PAGES} pages, {REPETITIONS} repetitions, 1 thread");
    for (name, codec) in
        [("lz4", Codec::Lz4), ("zstd 1", Codec::Zstd { level: 1 }), ("zstd -1", Codec::Zstd { level: -1 })]
    {
        measure(name, codec, "zero", |_| [0; PAGE_SIZE]);
        measure(name, codec, "half_compressible", pages::half_compressible);
        measure(name, codec, "half_zero", half_zero);
        measure(name, codec, "incompressible", pages::incompressible);
    }
}
