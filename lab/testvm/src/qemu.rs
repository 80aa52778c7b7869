//! QEMU guests with a Debian kernel and Redis, all unmodified. A test starts, observes and stops them.
//!
//! Before: `scripts/guest-image.sh` made kernel and initrd. After: [`load`] fills Redis and checks every byte of it.
//! Threads: one per guest copies the serial console to a file and notifies waiters for READY.
//! Units: sizes are `Bytes`; ports are on 127.0.0.1 and were free when they were picked.
//! Promise: a guest that ends early is an error with its last console lines, never a timeout. Dropping a guest kills
//! it.

mod builder;
mod console;
mod guest;
mod image;
pub mod load;
mod qmp;

pub use builder::{Accel, Builder};
pub use guest::QemuGuest;
pub use image::{Image, QEMU, qemu_missing};
pub use qmp::Qmp;
