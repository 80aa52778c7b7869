//! The number of engine threads that may serve this process's faults at a time: one per userfaultfd of the client.
//!
//! Before: the VMM attaches. After: the number is fixed for the life of the process.
//! Promise: small VMs and small hosts have one.

use ballast_base::Invalid;
use ballast_base::units::GIB;
use ballast_base::wire::MAX_SHARDS;

/// The environment variable that sets the number.
pub const VARIABLE: &str = "BALLAST_FAULT_WORKERS";
/// CPUs per worker. A worker with faults all the time takes one CPU, so busy workers take 1/8 of a host.
const CPUS: u64 = 8;
/// Guest RAM per worker: 8 vCPUs usually have 16 GiB or more. Each worker costs a descriptor in three processes.
const RAM: u64 = 16 * GIB;

/// The number for a process with `cpus` CPUs and `ram` bytes of guest RAM, unless the VMM or the environment sets one.
pub fn count(asked: Option<usize>, variable: Option<&str>, cpus: u64, ram: u64) -> Result<u8, Invalid> {
    let (asked, whose) = match (asked, variable.filter(|text| !text.is_empty())) {
        (Some(asked), _) => (Some(asked), format!("{asked} fault workers")),
        (None, Some(text)) => (text.parse().ok().or(Some(0)), format!("{VARIABLE}={text:?}")),
        (None, None) => (None, String::new()),
    };
    match asked {
        None => Ok((cpus / CPUS).min(ram / RAM).clamp(1, MAX_SHARDS as u64) as u8),
        Some(count) if (1..=MAX_SHARDS).contains(&count) => Ok(count as u8),
        Some(_) => Err(format!("{whose}: a number from 1 to {MAX_SHARDS} is allowed").into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_worker_per_8_cpus_and_16_gib_at_least_one_and_at_most_the_keepers_limit() {
        let of = |cpus, gib| count(None, None, cpus, gib * GIB).expect("no number was asked for");
        assert_eq!([of(1, 1024), of(2, 64), of(15, 64)], [1; 3], "few CPUs");
        assert_eq!([of(128, 0), of(128, 31)], [1; 2], "little RAM");
        assert_eq!([of(16, 64), of(32, 48), of(128, 64), of(512, 4096)], [2, 3, 4, 8]);
    }

    #[test]
    fn a_requested_number_is_taken_or_refused() {
        assert_eq!(count(None, Some("3"), 1, 0), Ok(3));
        assert_eq!(count(Some(2), Some("3"), 1, 0), Ok(2), "the VMM knows better than the environment");
        assert_eq!(count(None, Some(""), 1, 0), Ok(1), "said nothing");
        for text in ["0", "9", "-1", "two", "1.5", "18446744073709551617"] {
            let refused = count(None, Some(text), 64, 64 * GIB).expect_err(text).to_string();
            assert!(refused.contains(VARIABLE) && refused.contains(text), "{refused}");
        }
        count(Some(0), None, 64, 64 * GIB).expect_err("none");
        count(Some(MAX_SHARDS + 1), None, 64, 64 * GIB).expect_err("too many");
    }
}
