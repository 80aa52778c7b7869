//! Report of pool memory that failed.
//!
//! Before: [`crate::failed`] found it. After: an event. Units: slices; bytes of the VM's memory.

use ballast_base::Bytes;

use crate::host::Page;

/// A slice or page whose memory failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The node of the slice or page.
    pub numa: u32,
    /// The slice of the pool; `None`: a page of a VM on demand, which is in no slice.
    pub slice: Option<u32>,
    /// The size of the slice or page.
    pub page: Page,
    /// Its VM, and its offset in the VM's memory; `None`: it has no owner.
    pub owner: Option<(String, Bytes)>,
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { numa, slice, page, owner } = self;
        let slice = slice.map_or("a page".to_owned(), |slice| format!("slice {slice}"));
        write!(f, "memory of the pool failed: {slice} ({page}) of node {numa}, ")?;
        match owner {
            Some((name, at)) => write!(f, "which VM {name} has {at} from the start of its memory"),
            None => write!(f, "which no VM has; none will get it"),
        }
    }
}
