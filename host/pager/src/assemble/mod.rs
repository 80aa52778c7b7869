//! Assemble: starts and ends the workers of a VM.
//!
//! Before: a VM is open (`vm`). After: its tasks run (`workers`), the faults of each process that maps its RAM are
//! served (`views`), and messages of its clients are read (`listened`).
//! Threads: any may call. This room names all others, and none names it.

mod listened;
mod views;
mod workers;
