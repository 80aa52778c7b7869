//! The code that tests of several crates share. No product crate links it.
//!
//! Before: a test tried something and was refused. After: [`skip`] prints a line that `scripts/test.sh` counts, or the
//! test fails. Other parts: [`program`] makes executable files and [`random`] makes numbers from a seed.
//! [`conformance`] has the checks that every store must pass. [`NullStore`] is the simplest correct store,
//! [`FaultyStore`] makes any store fail on command, [`pages`] makes pages of known content, [`published`] is a rule for
//! comparisons, and [`swap`] and [`PoolLoan`] provide swap and huge pages for a test.
//! Threads: none of its own. Units: none; a need is one word, like `uffd`, `kvm` or `root`.
//! Promise: a need that the variable `REQUIRE` names (`REQUIRE=kvm,qemu`) is never skipped: the test fails.

#![forbid(unsafe_code)]

pub mod conformance;
mod faulty;
mod null;
pub mod pages;
mod pool_loan;
pub mod program;
pub mod published;
pub mod random;
pub mod swap;

use std::fmt::Display;

pub use faulty::{Calls, Faults, FaultyStore, PutFault};
pub use null::NullStore;
pub use pool_loan::PoolLoan;

/// Prints `SKIP` and the reason; the caller returns, or uses a substitute. Fails if `REQUIRE` names the need.
#[track_caller]
pub fn skip(needs: &str, why: impl Display) {
    let required = std::env::var("REQUIRE").unwrap_or_default();
    assert!(!names(&required, needs), "REQUIRE={required}, but {needs} is missing: {why}");
    println!("SKIP needs={needs}: {why}");
}

/// If there is a reason why something is missing, calls [`skip`] and returns true.
#[track_caller]
pub fn missing(needs: &str, why: Option<impl Display>) -> bool {
    let Some(why) = why else { return false };
    skip(needs, why);
    true
}

/// Is the need one of these words, which commas separate?
fn names(required: &str, needs: &str) -> bool {
    required.split(',').any(|word| word.trim() == needs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_whole_word_of_the_list_names_a_need() {
        assert!(names("kvm", "kvm"));
        assert!(names("root,kvm", "kvm") && names("root, kvm ,qemu", "kvm"));
        assert!(!names("", "kvm") && !names(",,", "kvm"));
        assert!(!names("kvm2,nokvm", "kvm") && !names("cgroup2", "cgroup") && !names("root kvm", "kvm"));
    }

    #[test]
    fn what_is_not_missing_is_not_skipped() {
        assert!(!missing("everything", None::<&str>));
    }
}
