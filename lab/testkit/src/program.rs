//! Programs that a test makes and runs.
//!
//! Before: a program elsewhere, or the text of a script. After: a file that can be executed at once.
//! Threads: any. Promise: this process never has the file open for writing. Otherwise a child of another test could
//! have it open between fork and exec, and the kernel does not execute such a file.

use std::path::Path;
use std::process::{Child, Command};

/// A child process that is killed when this is dropped.
#[derive(Debug)]
pub struct Ends(pub Child);

impl Drop for Ends {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Copy a program, with its mode.
pub fn install(from: &Path, to: &Path) {
    let done = Command::new("cp").arg(from).arg(to).status().expect("run cp");
    assert!(done.success(), "{} is not copied to {}", from.display(), to.display());
}

/// Makes a program of this shell script, without a first line (`#!`).
pub fn install_script(to: &Path, text: &str) {
    let script = r#"printf '%s\n' '#!/bin/sh' "$2" >"$1" && chmod 755 "$1""#;
    let done = Command::new("sh").args(["-c", script, "sh"]).arg(to).arg(text).status().expect("run sh");
    assert!(done.success(), "{} is not written", to.display());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_and_its_copy_can_be_executed_at_once() {
        let dir = std::env::temp_dir().join(format!("ballast-testkit-{}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("a directory");
        let [script, copy] = ["script", "copy"].map(|name| dir.join(name));
        install_script(&script, "a='it'\necho \"$a $1\"");
        install(&script, &copy);
        for program in [&script, &copy] {
            let said = Command::new(program).arg("runs").output().expect("executed");
            assert_eq!(said.stdout, b"it runs\n");
        }
        std::fs::remove_dir_all(&dir).expect("remove");
    }
}
