//! Tests of the remote store in one program, which is linked once.

mod another_cluster;
mod begun;
mod between_vms;
mod blobs;
mod common;
mod conformance;
mod faults;
mod forged;
mod late;
mod leavings;
mod privacy;
mod reach;
mod replicas;
