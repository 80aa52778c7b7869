//! The Redis driver: it fills a guest with data that can be checked, uses it, and reads every byte back.
//!
//! Before: [`super::QemuGuest::redis_addr`] or any Redis. After: tests and the demo compare [`Verified`] with the
//! loaded keys.
//! Threads: the caller's; one connection per call. Several guests may be loaded at the same time.
//! Units: sizes are bytes, times are `Duration`, rates are per second.
//! Promise: a value is a function of seed, key and version, so a swapped, stale or damaged value is found. A value
//! counts as right only if all of it was read back and compared.

use std::net::SocketAddr;
use std::ops::Range;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use ballast_testkit::random::Random;
use redis::{Connection, Pipeline};

/// Timeout of a Redis reply. Much of the guest may be far.
const TIMEOUT: Duration = Duration::from_secs(120);
/// Operations per round trip of [`throughput`].
const PIPELINE: usize = 8;
/// The part of the operations of [`throughput`] that uses hot keys.
const HOT_OPS: f64 = 0.9;
/// Value bytes in flight per round trip.
const BATCH_BYTES: usize = 256 << 10;

/// The data that a Redis must hold: one value per key, each at a version.
#[derive(Clone, Debug)]
pub struct Dataset {
    seed: u64,
    value_bytes: usize,
    versions: Vec<u32>,
}

impl Dataset {
    /// Returns `keys` values of `value_bytes` each, at version 0.
    pub fn new(keys: usize, value_bytes: usize, seed: u64) -> Self {
        Self { seed, value_bytes, versions: vec![0; keys] }
    }

    /// The number of keys.
    pub fn keys(&self) -> usize {
        self.versions.len()
    }

    /// The bytes of all values.
    pub fn bytes(&self) -> u64 {
        self.keys() as u64 * self.value_bytes as u64
    }

    fn name(key: usize) -> String {
        format!("key:{key:08}")
    }

    fn batch(&self) -> usize {
        (BATCH_BYTES / self.value_bytes.max(1)).clamp(1, 256)
    }

    /// Returns the present value of `key`: 64 random bytes and 64 equal ones in turn, so each page compresses to about
    /// half.
    pub fn value(&self, key: usize) -> Vec<u8> {
        // The seed is mixed first, because the seeds of two guests often differ in one bit, as two versions do.
        let mut random = Random(Random(self.seed).word() ^ ((key as u64) << 32 | u64::from(self.versions[key])));
        let filler = random.word() as u8;
        let mut value = Vec::with_capacity(self.value_bytes + 128);
        while value.len() < self.value_bytes {
            (0..8).for_each(|_| value.extend_from_slice(&random.word().to_le_bytes()));
            value.extend_from_slice(&[filler; 64]);
        }
        value.truncate(self.value_bytes);
        value
    }
}

/// The result of reading values back.
#[derive(Clone, Debug, Default)]
pub struct Verified {
    /// Keys whose value was right in every byte.
    pub verified: usize,
    /// Keys with another value than the last written one.
    pub wrong: usize,
    /// Keys that Redis does not have.
    pub missing: usize,
    /// Bytes that differ or are missing, over all keys.
    pub bytes_lost: u64,
    /// A text about the first wrong or missing key.
    pub first_wrong: Option<String>,
}

impl Verified {
    fn check(&mut self, data: &Dataset, key: usize, got: Option<&[u8]>) {
        let want = data.value(key);
        let Some(got) = got else {
            self.missing += 1;
            self.bytes_lost += want.len() as u64;
            self.first_wrong.get_or_insert_with(|| format!("{} is missing", Dataset::name(key)));
            return;
        };
        if got == want {
            self.verified += 1;
            return;
        }
        let differ = want.iter().zip(got).filter(|(want, got)| want != got).count() + want.len().abs_diff(got.len());
        self.wrong += 1;
        self.bytes_lost += differ as u64;
        self.first_wrong.get_or_insert_with(|| {
            let at = want.iter().zip(got).position(|(want, got)| want != got).unwrap_or(want.len().min(got.len()));
            format!("{}: {differ} bytes differ, the first at {at} of {}", Dataset::name(key), want.len())
        });
    }
}

/// The distribution of operations over keys.
#[derive(Clone, Copy, Debug)]
pub struct Mix {
    /// The operations stop after this time.
    pub duration: Duration,
    /// The operations stop after this number, if that is reached before `duration`.
    pub max_ops: u64,
    /// The hot part of the keys, the first ones.
    pub hot_keys: f64,
    /// The part of the operations that writes a new version. The others read and compare.
    pub writes: f64,
    /// The seed of the random choices.
    pub seed: u64,
}

impl Default for Mix {
    /// 5 s; most operations use 10 % of the keys; 10 % of the operations write.
    fn default() -> Self {
        let duration = Duration::from_secs(5);
        Self { duration, max_ops: u64::MAX, hot_keys: 0.1, writes: 0.1, seed: 1 }
    }
}

/// The result of [`throughput`].
#[derive(Clone, Debug, Default)]
pub struct Throughput {
    /// Operations done.
    pub ops: u64,
    /// Writes among them.
    pub writes: u64,
    /// Time of the operations.
    pub elapsed: Duration,
    /// The comparison of every value that was read.
    pub reads: Verified,
}

impl Throughput {
    /// Returns the operations per second.
    pub fn ops_per_s(&self) -> f64 {
        self.ops as f64 / self.elapsed.as_secs_f64().max(1e-9)
    }
}

/// Set every key of `data`.
pub fn load(addr: SocketAddr, data: &Dataset) -> Result<()> {
    let mut connection = connect(addr)?;
    for keys in batches(data) {
        let mut pipeline = redis::pipe();
        keys.for_each(|key| set(&mut pipeline, data, key));
        pipeline.exec(&mut connection).context("Setting keys")?;
    }
    Ok(())
}

/// Read every key of `data` back and compare every byte.
pub fn verify(addr: SocketAddr, data: &Dataset) -> Result<Verified> {
    let mut connection = connect(addr)?;
    let mut verified = Verified::default();
    for keys in batches(data) {
        let mut pipeline = redis::pipe();
        for key in keys.clone() {
            pipeline.get(Dataset::name(key));
        }
        let values: Vec<Option<Vec<u8>>> = pipeline.query(&mut connection).context("Reading keys")?;
        keys.zip(values).for_each(|(key, value)| verified.check(data, key, value.as_deref()));
    }
    Ok(verified)
}

/// Use `data` by `mix`, and count operations per second. A write moves a key to its next version, also in `data`. After
/// an error it is unknown which operations of the last round trip Redis did.
pub fn throughput(addr: SocketAddr, data: &mut Dataset, mix: &Mix) -> Result<Throughput> {
    let mut connection = connect(addr)?;
    let mut random = Random(mix.seed);
    let hot = ((data.keys() as f64 * mix.hot_keys) as usize).clamp(1, data.keys().max(1));
    let mut seen = Throughput::default();
    let start = Instant::now();
    while data.keys() > 0 && start.elapsed() < mix.duration && seen.ops < mix.max_ops {
        let mut pipeline = redis::pipe();
        // Keys that this batch reads. It must not write them later: they would be compared with the new version.
        let mut wants = Vec::with_capacity(PIPELINE);
        for _ in 0..PIPELINE {
            let range = if unit(&mut random) < HOT_OPS { hot } else { data.keys() };
            let key = (unit(&mut random) * range as f64) as usize;
            if unit(&mut random) < mix.writes && !wants.contains(&key) {
                data.versions[key] = data.versions[key].wrapping_add(1);
                set(&mut pipeline, data, key);
                seen.writes += 1;
            } else {
                pipeline.get(Dataset::name(key));
                wants.push(key);
            }
            seen.ops += 1;
        }
        let values: Vec<Option<Vec<u8>>> = pipeline.query(&mut connection).context("Using keys")?;
        wants.into_iter().zip(values).for_each(|(key, value)| seen.reads.check(data, key, value.as_deref()));
    }
    seen.elapsed = start.elapsed();
    Ok(seen)
}

fn connect(addr: SocketAddr) -> Result<Connection> {
    let client = redis::Client::open(format!("redis://{addr}/"))?;
    let connection = client.get_connection_with_timeout(TIMEOUT).context("Connecting to Redis")?;
    connection.set_read_timeout(Some(TIMEOUT))?;
    connection.set_write_timeout(Some(TIMEOUT))?;
    Ok(connection)
}

fn batches(data: &Dataset) -> impl Iterator<Item = Range<usize>> {
    let keys = data.keys();
    (0..keys).step_by(data.batch()).map(move |start| start..keys.min(start + data.batch()))
}

fn set(pipeline: &mut Pipeline, data: &Dataset, key: usize) {
    pipeline.set(Dataset::name(key), data.value(key)).ignore();
}

fn unit(random: &mut Random) -> f64 {
    (random.word() >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_depends_on_seed_key_and_version_and_is_the_same_each_time() {
        let mut data = Dataset::new(2, 4096, 7);
        let value = data.value(0);
        assert_eq!(value, data.value(0));
        assert_eq!(value.len(), 4096);
        assert_ne!(value, data.value(1));
        assert_ne!(value, Dataset::new(1, 4096, 8).value(0));
        data.versions[0] = 1;
        assert_ne!(value, data.value(0));
        // 6 ^ 1 == 7. If seed and version were combined by XOR alone, one guest's data would pass as another's.
        let mut neighbour = Dataset::new(1, 4096, 6);
        neighbour.versions[0] = 1;
        assert_ne!(value, neighbour.value(0));
    }

    #[test]
    fn wrong_stale_short_and_missing_values_are_counted() {
        let mut data = Dataset::new(5, 1000, 1);
        let stale = data.value(3);
        data.versions[3] = 1;
        let mut wrong = data.value(1);
        wrong[500] ^= 1;
        let mut seen = Verified::default();
        seen.check(&data, 0, Some(&data.value(0)));
        seen.check(&data, 1, Some(&wrong));
        seen.check(&data, 2, None);
        seen.check(&data, 3, Some(&stale));
        seen.check(&data, 4, Some(&data.value(4)[..999]));
        assert_eq!((seen.verified, seen.wrong, seen.missing), (1, 3, 1));
        assert_eq!(seen.first_wrong.as_deref(), Some("key:00000001: 1 bytes differ, the first at 500 of 1000"));
        assert!(seen.bytes_lost > 1 + 1000 + 1, "{seen:?}");
    }
}
