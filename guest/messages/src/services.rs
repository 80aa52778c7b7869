//! Restores for services of a guest's kernel, in the messages.
//!
//! Before: an agent has compared the pages that were restored with what its kernel did. After: the host has the counts.
//! Units: pages of 4 KiB. Promise: all of it is the guest's own claim.

use crate::bytes::{Reader, Refused, Writer};

/// Far pages that a service of the guest's kernel touched and no program did, about. Counters are of this agent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServiceRestores {
    /// khugepaged read them, or wrote a huge page there.
    pub khugepaged: u64,
    /// Compaction moved them.
    pub compaction: u64,
    /// kswapd, or a program that needed memory, wrote them to swap.
    pub reclaim: u64,
    /// Pages of files: they were written to their file.
    pub writeback: u64,
}

pub(crate) fn put(body: &mut Writer, of: ServiceRestores) {
    [of.khugepaged, of.compaction, of.reclaim, of.writeback].into_iter().for_each(|number| body.u64(number));
}

pub(crate) fn get(body: &mut Reader<'_>) -> Result<ServiceRestores, Refused> {
    Ok(ServiceRestores {
        khugepaged: body.u64()?,
        compaction: body.u64()?,
        reclaim: body.u64()?,
        writeback: body.u64()?,
    })
}
