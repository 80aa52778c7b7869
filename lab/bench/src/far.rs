//! Compares far pages on other machines with those in RAM and on a disk: reads of one page and of a run, and puts. Then
//! guests touch far pages (`far_guests`).
//!
//! Before: six servers run on loopback, three of them replicas, with stores of each kind and daemons that use them.
//! After: the row has percentiles of single reads, times of runs, and pages per second to the cluster, and the same for
//! a bare connection that requests values of the same size from the same servers. Units: µs; pages per second.
//! Promise: every page that is read is compared. All processes share this machine's CPUs. There is no network but
//! relays that deliver late, if so ordered.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ballast_base::store::Ending;
use ballast_base::units::{GIB, MIB};
use ballast_base::wire::VmId;
use ballast_base::{Bytes, PAGE_SIZE, PageIdx};
use ballast_remote::{Access, Addr, Cluster, ClusterOptions, RemoteBudget, RemoteStore, Tls, lease, slot_of};
use ballast_store::{
    Budget, Codec, FileOptions, FileStore, GetOutcome, Handle, IoContext, NearStore, PageBytes, PageKey, PutOutcome,
    RamOptions, RamStore, RegionKey, SlowStore, Store, blob,
};
use ballast_testvm::valkey::{Layout, Valkey, valkey_missing};

use crate::far_guests::Guests;
use crate::order::{Data, GuestKind};
use crate::report::Row;
use crate::rig::Bench;
use crate::stats::{Summary, shuffle};

/// The headline figures.
const KEYS: [&str; 5] =
    ["far_get_us_p50", "far_restore_us_p50", "far_in_order_us_per_page", "far_spill_pages_per_s", "far_wrong_bytes"];
const REGION: RegionKey = RegionKey { vm: VmId([0x42; 16]), number: 0 };
/// Pages of a chunk, which are written as one.
const CHUNK: usize = 512;
/// Pages of a run that is read as one.
const RUN: usize = 64;

/// The figures of one store, or of a bare connection.
#[derive(Default)]
struct Series {
    single: Vec<Summary>,
    /// Microseconds per page, in runs.
    run: Vec<f64>,
    /// Pages written per second.
    out: Vec<f64>,
}

impl Series {
    fn of(&self, figure: impl Fn(&Summary) -> f64) -> Vec<f64> {
        self.single.iter().map(figure).collect()
    }
}

/// The pages of this data.
fn pages(data: Data, count: usize) -> Vec<PageBytes> {
    (0..count as u64).map(|page| data.page(page)).collect()
}

fn key(page: usize) -> PageKey {
    REGION.page(PageIdx(page as u64))
}

fn handles(outcomes: &[PutOutcome], store: Option<&dyn SlowStore>) -> Result<Vec<Handle>> {
    let handle = |outcome: &PutOutcome| match outcome {
        PutOutcome::Stored(handle) => Ok(*handle),
        other => Err(anyhow::anyhow!("a put came to {other:?}: {:?}", store.and_then(SlowStore::last_refusal))),
    };
    outcomes.iter().map(handle).collect()
}

/// Runs under way at a time.
const SENT: usize = 2;

/// A run that a store is about to have.
struct UnderWay {
    number: usize,
    pages: Vec<PageBytes>,
    blobs: Vec<Vec<u8>>,
    ending: Ending,
}

/// Put pages into a store in RAM and move them on, as the spill worker does: while two runs are under way, the next one
/// is read and the one before is freed. Returns their handles, and how many went per second.
fn spilled(ram: &dyn NearStore, store: &Arc<dyn SlowStore>, content: &[PageBytes]) -> Result<(Vec<Handle>, f64)> {
    let (mut near, mut far) = (Vec::new(), Vec::with_capacity(content.len()));
    ram.put_run(key(0), content, &mut near);
    let near = handles(&near, None)?;
    let chunk = |number: usize| (number * CHUNK..).map(key).zip(near.chunks(CHUNK).nth(number).unwrap_or_default());
    let mut spare = None;
    let mut under_way: VecDeque<UnderWay> = VecDeque::new();
    let (chunks, begun) = (near.len().div_ceil(CHUNK), Instant::now());
    // Some more, which send nothing.
    for number in 0..chunks + SENT {
        let buffers = || (vec![[0; PAGE_SIZE]; CHUNK], vec![Vec::new(); CHUNK]);
        let (mut pages, mut blobs) = spare.take().unwrap_or_else(buffers);
        let mut count = 0;
        for ((key, handle), (page, blob)) in chunk(number).zip(pages.iter_mut().zip(&mut blobs)) {
            let outcome = ram.get_blob(key, *handle, page, blob);
            ensure!(outcome == GetOutcome::Found, "{key:?} comes to {outcome:?} in RAM");
            count += 1;
        }
        let waits = under_way.len() >= SENT || count == 0;
        let before = under_way.pop_front_if(|_| waits).map(|UnderWay { number, pages, blobs, ending }| {
            ending(&mut far);
            (number, pages, blobs)
        });
        if count > 0 {
            let ending = store.clone().begin_put(key(number * CHUNK), &pages[..count], &blobs[..count]);
            under_way.push_back(UnderWay { number, pages, blobs, ending });
        }
        let Some((number, pages, blobs)) = before else { continue };
        for ((key, handle), (page, blob)) in chunk(number).zip(pages.iter().zip(&blobs)) {
            ensure!(ram.still_has(key, *handle, page, blob), "{key:?} has changed in RAM");
            ram.free(key, *handle);
        }
        spare = Some((pages, blobs));
    }
    let per_s = content.len() as f64 / begun.elapsed().as_secs_f64();
    ram.tidy();
    Ok((handles(&far, Some(&**store))?, per_s))
}

/// A store that is busy is asked again until this has passed; the time counts.
const ANSWER: Duration = Duration::from_secs(60);

/// Put all into `ram`, and on into `slow` if there is one; read each in random order, read runs, and free all.
fn stored(
    (ram, slow): (&dyn NearStore, Option<&Arc<dyn SlowStore>>),
    content: &[PageBytes],
    seed: u64,
    series: &mut Series,
) -> Result<()> {
    let store: &dyn Store = if let Some(slow) = slow { &**slow } else { ram };
    let handles = if let Some(slow) = slow {
        let (handles, per_s) = spilled(ram, slow, content)?;
        series.out.push(per_s);
        handles
    } else {
        let (begun, mut outcomes) = (Instant::now(), Vec::with_capacity(content.len()));
        for (number, chunk) in content.chunks(CHUNK).enumerate() {
            store.put_run(key(number * CHUNK), chunk, &mut outcomes);
        }
        series.out.push(content.len() as f64 / begun.elapsed().as_secs_f64());
        handles(&outcomes, None)?
    };
    let mut order: Vec<usize> = (0..content.len()).collect();
    shuffle(&mut order, seed);
    let (mut times, mut bytes) = (Vec::with_capacity(order.len()), [0; PAGE_SIZE]);
    for page in order {
        let begun = Instant::now();
        let outcome = loop {
            let outcome = store.get(key(page), handles[page], &mut bytes, IoContext::GUEST);
            if outcome != GetOutcome::Busy || begun.elapsed() > ANSWER {
                break outcome;
            }
        };
        times.push(u32::try_from(begun.elapsed().as_nanos()).unwrap_or(u32::MAX));
        ensure!(outcome == GetOutcome::Found && bytes == content[page], "WRONG DATA: page {page}, {outcome:?}");
    }
    series.single.push(Summary::of(&mut times));
    let (mut taken, mut run) = (Duration::ZERO, vec![[0; PAGE_SIZE]; RUN]);
    for (number, content) in content.chunks_exact(RUN).enumerate() {
        let first = number * RUN;
        let (pages, begun) = (key(first).run(handles[first..first + RUN].iter().copied()), Instant::now());
        let outcomes = loop {
            let outcomes = store.get_run(&pages, &mut run, IoContext::GUEST);
            if !outcomes.contains(&GetOutcome::Busy) || begun.elapsed() > ANSWER {
                break outcomes;
            }
        };
        taken += begun.elapsed();
        ensure!(outcomes.iter().all(|o| *o == GetOutcome::Found) && run == content, "WRONG DATA in the run at {first}");
    }
    series.run.push(taken.as_secs_f64() * 1e6 / content.len() as f64);
    handles.iter().enumerate().for_each(|(page, handle)| store.free(key(page), *handle));
    store.tidy();
    Ok(())
}

/// A connection that only sends requests and reads replies.
struct Bare {
    streams: Vec<TcpStream>,
    buffer: Vec<u8>,
}

impl Bare {
    fn connect(valkey: &Valkey) -> Result<Self> {
        let connect = |node| -> Result<TcpStream> {
            let stream = TcpStream::connect(valkey.addr(node)).context("Connecting to a server")?;
            stream.set_nodelay(true)?;
            Ok(stream)
        };
        Ok(Self { streams: (0..3).map(connect).collect::<Result<_>>()?, buffer: vec![0; 8 << 20] })
    }

    /// Send this and read a number of bytes.
    fn ask(&mut self, node: usize, ask: &[u8], bytes: usize) -> Result<&[u8]> {
        self.streams[node].write_all(ask)?;
        self.streams[node].read_exact(&mut self.buffer[..bytes])?;
        Ok(&self.buffer[..bytes])
    }
}

fn command(words: &[&[u8]]) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
    for word in words {
        bytes.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
        bytes.extend_from_slice(word);
        bytes.extend_from_slice(b"\r\n");
    }
    bytes
}

/// Measure bare connections: values of the same size, in the same chunks, at the same nodes.
fn bare(valkey: &Valkey, content: &[PageBytes], seed: u64, series: &mut Series) -> Result<()> {
    let mut bare = Bare::connect(valkey)?;
    let names: Vec<Vec<u8>> =
        (0..content.len()).map(|page| format!("x{{{:x}}}{:x}", page / CHUNK, page % CHUNK).into_bytes()).collect();
    let owners: Vec<usize> = names
        .iter()
        .step_by(CHUNK)
        .map(|name| valkey.owner(slot_of(name)).context("No owner"))
        .collect::<Result<_>>()?;
    let handle = Handle::new(1).context("A handle")?;
    let blob = |(page, bytes): (usize, &PageBytes)| {
        let mut sealed = Vec::new();
        blob::seal(key(page), handle, bytes, Codec::Lz4, &mut sealed);
        sealed
    };
    let blobs: Vec<Vec<u8>> = content.iter().enumerate().map(blob).collect();
    let wait = command(&[b"WAIT", b"1", b"5000"]);
    let writes: Vec<Vec<u8>> = (0..content.len() / CHUNK)
        .map(|chunk| {
            let pairs = (chunk * CHUNK..(chunk + 1) * CHUNK).flat_map(|page| [&names[page][..], &blobs[page]]);
            [command(&[&b"MSET"[..]].into_iter().chain(pairs).collect::<Vec<_>>()), wait.clone()].concat()
        })
        .collect();
    let begun = Instant::now();
    for (write, owner) in writes.iter().zip(&owners) {
        let said = bare.ask(*owner, write, b"+OK\r\n:1\r\n".len())?;
        ensure!(said == b"+OK\r\n:1\r\n", "a server says {:?}", String::from_utf8_lossy(said));
    }
    series.out.push(content.len() as f64 / begun.elapsed().as_secs_f64());
    let mut order: Vec<usize> = (0..content.len()).collect();
    shuffle(&mut order, seed);
    let asks: Vec<Vec<u8>> = names.iter().map(|name| command(&[b"GET", name])).collect();
    let answer = |page: usize| format!("${}\r\n", blobs[page].len()).len() + blobs[page].len() + 2;
    let mut times = Vec::with_capacity(order.len());
    for page in order {
        let begun = Instant::now();
        let said = bare.ask(owners[page / CHUNK], &asks[page], answer(page))?;
        times.push(u32::try_from(begun.elapsed().as_nanos()).unwrap_or(u32::MAX));
        ensure!(said[said.len() - 2 - blobs[page].len()..said.len() - 2] == blobs[page], "WRONG DATA: page {page}");
    }
    series.single.push(Summary::of(&mut times));
    let mut taken = Duration::ZERO;
    for (number, run) in names.chunks_exact(RUN).enumerate() {
        let ask = command(&[&b"MGET"[..]].into_iter().chain(run.iter().map(Vec::as_slice)).collect::<Vec<_>>());
        let first = number * RUN;
        let bytes = format!("*{RUN}\r\n").len() + (first..first + RUN).map(answer).sum::<usize>();
        let begun = Instant::now();
        bare.ask(owners[first / CHUNK], &ask, bytes)?;
        taken += begun.elapsed();
    }
    series.run.push(taken.as_secs_f64() * 1e6 / content.len() as f64);
    for (chunk, owner) in names.chunks(CHUNK).zip(&owners) {
        let words: Vec<&[u8]> = [&b"UNLINK"[..]].into_iter().chain(chunk.iter().map(Vec::as_slice)).collect();
        bare.ask(*owner, &command(&words), format!(":{}\r\n", chunk.len()).len())?;
    }
    Ok(())
}

fn cluster(valkey: &Valkey, tls: bool) -> Result<Arc<Cluster>> {
    let addr = if tls { valkey.tls_addr(0) } else { valkey.addr(0) };
    let file = |name: &str| valkey.dir().join(name);
    let own = Some((file("client.pem"), file("client.key")));
    let access = Access { tls: tls.then(|| Tls { ca_file: file("ca.pem"), own, name: None }), ..Access::default() };
    let nodes = vec![Addr::parse(&addr).context("An address")?];
    Ok(Arc::new(Cluster::new(ClusterOptions { nodes, access, replicas: 1 })))
}

pub(crate) fn run(bench: &mut Bench, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    let missing = valkey_missing().or_else(|| {
        let other = !bench.options.is(GuestKind::Native);
        other.then(|| "the network is what is measured, and it is the same for all guests (--guest native)".into())
    });
    if let Some(why) = missing {
        let mut row = bench.row("pages on other machines");
        row.because(&why);
        KEYS.iter().for_each(|key| row.figure(key, &[]));
        return each(row);
    }
    let latency = bench.options.latency;
    let valkey = Valkey::start(Layout { maxmemory: Bytes(GIB), tls: true, latency, ..Layout::default() })
        .context("Starting a cluster")?;
    let (count, repetitions) = if bench.options.quick { (4096, 2) } else { (16_384, 5) };
    let all = bench.options.data();
    for data in all.into_iter().take(if bench.options.quick { 1 } else { usize::MAX }) {
        let mut row = bench.row(data.name());
        row.fact("data", data.name());
        row.fact("pages", count as u64);
        row.fact("repetitions", repetitions);
        row.fact("network_us", latency.as_micros() as u64);
        measure(bench, &valkey, data, (count, repetitions), &mut row)?;
        each(row)?;
    }
    Ok(())
}

fn measure(bench: &mut Bench, valkey: &Valkey, data: Data, (count, rounds): (usize, u64), row: &mut Row) -> Result<()> {
    let content = pages(data, count);
    let budget = Budget::new(Bytes(GIB));
    let (ram, _arena) = RamStore::create(RamOptions::new(budget.clone())).context("A store in RAM")?;
    let (file, _index, _data) =
        FileStore::create(&bench.options.dir, FileOptions::new(budget)).context("A store on the disk")?;
    let file: Arc<dyn SlowStore> = Arc::new(file);
    let remote = |vm: u8, tls| -> Result<Arc<dyn SlowStore>> {
        let budget = RemoteBudget::new(Bytes(GIB));
        let store = RemoteStore::new(VmId([vm; 16]), cluster(valkey, tls)?, budget, Codec::Lz4, lease::LEASE);
        Ok(Arc::new(store))
    };
    let (plain, tls) = (remote(0x42, false)?, remote(0x43, true)?);
    let stores = [None, Some(&file), Some(&plain), Some(&tls)];
    let mut series: [Series; 5] = Default::default();
    let mut guests = Guests::default();
    for round in bench.progress.over("round", 0..=rounds) {
        // Round 0 warms up.
        let mut warm_up: [Series; 5] = Default::default();
        let of = if round == 0 { &mut warm_up } else { &mut series };
        for (store, of) in stores.iter().zip(of.iter_mut()) {
            stored((&ram, *store), &content, round, of)?;
        }
        bare(valkey, &content, round, &mut of[4])?;
        // Fails if a byte is wrong.
        guests.round(bench, valkey, (data, count as u64), round, row)?;
    }
    row.figure("far_wrong_bytes", &[0.0]);
    for (name, series) in ["ram", "file", "far", "far_tls", "bare"].iter().zip(&series) {
        row.figure(&format!("{name}_get_us_p50"), &series.of(|s| s.p50_us));
        row.figure(&format!("{name}_get_us_p99"), &series.of(|s| s.p99_us));
        row.figure(&format!("{name}_run64_us_per_page"), &series.run);
        row.figure(&format!("{name}_spill_pages_per_s"), &series.out);
    }
    let [_, _, far, far_tls, bare] = &series;
    let bare_us = bare.of(|s| s.p50_us);
    guests.figures(row, &bare_us);
    row.ratio("ratio_far_get", &far.of(|s| s.p50_us), &bare_us);
    row.ratio("ratio_far_tls_get", &far_tls.of(|s| s.p50_us), &bare_us);
    row.ratio("ratio_far_run64", &far.run, &bare.run);
    row.ratio("ratio_far_spill", &far.out, &bare.out);
    row.ratio("ratio_far_tls_spill", &far_tls.out, &bare.out);
    row.fact("data_mib", (count * PAGE_SIZE) as u64 / MIB);
    Ok(())
}
