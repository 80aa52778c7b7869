//! Tests of the pool in one program, which is linked once.

mod changes;
mod common;
mod crash;
mod damage;
mod failed;
mod gib;
mod isolation;
mod model;
mod numa;
mod reserve;
