//! Chores of the repository: `cargo run -p xtask -- COMMAND`.
//!
//! Before: a checkout. After: `target/guest` holds what `testvm::qemu` boots.
//! Threads: one; the work is done by the scripts this names, which also run without cargo.
//! Units: none.
//! Promise: exit status 0 means done, 1 that the chore failed (it said why), 2 that the command line was wrong.

use std::path::Path;
use std::process::{Command, ExitCode};

/// Name, script, what it does.
const CHORES: [(&str, &str, &str); 2] = [
    ("setup", "scripts/setup.sh", "install what demo and tests need (Debian, root)"),
    ("guest", "scripts/guest-image.sh", "make the test guest's kernel and initrd; --refresh: anew"),
];

fn main() -> ExitCode {
    let mut args = std::env::args_os().skip(1);
    let wanted = args.next().unwrap_or_default();
    let Some((_, script, _)) = CHORES.iter().find(|(name, ..)| *name == wanted) else {
        eprintln!("usage: xtask COMMAND");
        CHORES.iter().for_each(|(name, _, what)| eprintln!("  {name:8}{what}"));
        return ExitCode::from(2);
    };
    // Cargo tells where the manifest is when it runs us; without cargo, the repository is the current directory.
    let root = std::env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| ".".into(), |dir| Path::new(&dir).join(".."));
    match Command::new(root.join(script)).args(args).status() {
        Ok(status) if status.success() => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("xtask: running {script}: {error}");
            ExitCode::FAILURE
        }
    }
}
