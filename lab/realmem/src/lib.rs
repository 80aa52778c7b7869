//! Real programs of the distribution as native guests: their speed while most of their memory is far.
//!
//! Before: `scripts/real-programs.sh` has unpacked the programs, and `ballast bench real` has started a daemon. After:
//! each window of the load has its speed, its latencies, and the number of wrong bytes.
//! Threads: the program has its own; the load is the caller's thread. Units: in the names.
//! Promise: every byte that the program returns is compared with the byte that was written.
//!
//! A synthetic guest touches pages in a loop whose code stays in the CPU's caches. A real program evicts the engine's
//! code and data from them between two faults, has values that span two pages, and has an allocator that moves values.
//!
//! | File | What it has |
//! |---|---|
//! | `realmem.c` | the preload library: large memory comes from one memfd, which it attaches |
//! | `server.rs` | a server of the distribution, started with it, on one CPU |
//! | `protocol.rs` | the requests and replies of Redis and memcached |
//! | `keys.rs` | which key a request names: Zipf, repeated, moving, in order |
//! | `load.rs` | pipelined requests from the other CPU; checks every byte |
//! | `batch.rs` | a program without a load (`programs/`): TPC-H, a graph, dgemm, k-means |

pub mod batch;
pub mod keys;
pub mod load;
pub mod protocol;
pub mod server;
