//! Takes over the descriptors that the program before this one left open.
//!
//! Before: a record names their numbers. After: there is a duplicate of each. Threads: the keeper's one.

use std::os::fd::OwnedFd;

use anyhow::Context;
use ballast_handover::kept::Number;
use ballast_sys::exec::duplicate;
use ballast_sys::spawn::Child;

use ballast_sys::slow_fd::SlowFd;

pub(crate) fn fd(number: Number) -> anyhow::Result<OwnedFd> {
    duplicate(number).with_context(|| format!("Taking over descriptor {number}"))
}

pub(crate) fn sent(number: Number) -> anyhow::Result<SlowFd> {
    Ok(fd(number)?.into())
}

pub(crate) fn child(pid: u32, pidfd: Number) -> anyhow::Result<Child> {
    Child::known(pid, fd(pidfd)?).with_context(|| format!("Taking over child {pid}"))
}
