//! Assemble: the workers of a VM, and who starts and ends them.
//!
//! Before: a VM is open (`vm`). After: its tasks run (`workers`), each process that maps its RAM is served (`views`),
//! and its clients are listened to (`listened`). Threads: any may call. This room names all others, and none names it.

mod listened;
mod views;
mod workers;
