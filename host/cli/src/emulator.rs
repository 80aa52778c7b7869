//! The command as an emulator: under the name `kvm` or one that begins with `qemu`, it takes QEMU's own command line.
//!
//! Before: a management program (libvirt, Proxmox) was told that `/usr/lib/ballast/qemu-system-x86_64`, a link to
//! `ballast`, is its QEMU. After: `ballast run` has a command line as an operator would have written it. Promise: a
//! command line that only queries QEMU's features reaches QEMU unchanged (`run`). QEMU is the program of the link's
//! name in `PATH` that is not this one; for a link `qemu` the name is that of this machine's architecture. A file names
//! options of `ballast run`, and another QEMU.

use std::ffi::OsString;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

/// This file has the words between `ballast run` and QEMU's arguments: options, then `--` and a QEMU, if it is another
/// than the link's name says.
const FILE: &str = "/etc/ballast/emulator";
const VARIABLE: &str = "BALLAST_EMULATOR";
const PLACES: [&str; 3] = ["/usr/bin", "/usr/libexec", "/usr/local/bin"];

/// The command line of `ballast run` if this program was started as an emulator; otherwise `words`.
pub fn command_line(words: impl Iterator<Item = OsString>) -> Result<Vec<OsString>> {
    let words: Vec<OsString> = words.collect();
    let name = words.first().and_then(|word| Path::new(word).file_name()).unwrap_or_default().to_string_lossy();
    if !name.starts_with("qemu") && name != "kvm" {
        return Ok(words);
    }
    let name = name.into_owned();
    let file = std::env::var_os(VARIABLE).map_or_else(|| PathBuf::from(FILE), PathBuf::from);
    let text = match std::fs::read_to_string(&file) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
        Err(error) => return Err(error).with_context(|| format!("Reading {}", file.display())),
    };
    let (options, mut program) = settings(&text);
    if program.is_empty() {
        program.push(find(&name)?.into());
    }
    // Memory of the pool takes the place of the backend, too.
    let backing = (!options.iter().any(|word| word.starts_with("--pool"))).then_some("--add-memory-backend");
    let before = ["ballast", "run"].into_iter().chain(backing).map(OsString::from);
    let options = options.into_iter().map(OsString::from).chain([OsString::from("--")]);
    Ok(before.chain(options).chain(program).chain(words.into_iter().skip(1)).collect())
}

/// The options and the program in a file: words between blanks, without lines that begin with `#`.
fn settings(text: &str) -> (Vec<String>, Vec<OsString>) {
    let lines = text.lines().filter(|line| !line.trim_start().starts_with('#'));
    let words: Vec<&str> = lines.flat_map(str::split_ascii_whitespace).collect();
    let end = words.iter().position(|word| *word == "--").unwrap_or(words.len());
    let program = words.iter().skip(end + 1).map(OsString::from).collect();
    (words[..end].iter().map(|word| (*word).to_owned()).collect(), program)
}

fn find(name: &str) -> Result<PathBuf> {
    let name = if name == "qemu" { format!("qemu-system-{}", std::env::consts::ARCH) } else { name.to_owned() };
    let path = std::env::var_os("PATH").unwrap_or_default();
    let places = std::env::split_paths(&path).chain(PLACES.map(PathBuf::from));
    let own = std::fs::metadata("/proc/self/exe").context("Looking at this program's own file")?;
    match places.map(|place| place.join(&name)).find(|program| is_another(program, (own.dev(), own.ino()))) {
        Some(program) => Ok(program),
        None => bail!(
            "QEMU is not there: no program {name} in PATH or in {} (write `-- /path/to/qemu` into {FILE})",
            PLACES.join(", ")
        ),
    }
}

/// Whether this is a program other than the one that runs.
fn is_another(program: &Path, own: (u64, u64)) -> bool {
    std::fs::metadata(program).is_ok_and(|found| {
        found.is_file() && found.permissions().mode() & 0o111 != 0 && (found.dev(), found.ino()) != own
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(words: &[&str]) -> Vec<String> {
        let words = command_line(words.iter().map(OsString::from)).expect("a command line");
        words.into_iter().map(|word| word.to_string_lossy().into_owned()).collect()
    }

    #[test]
    fn other_names_keep_their_words() {
        assert_eq!(line(&["ballast", "vm", "list"]), ["ballast", "vm", "list"]);
        assert_eq!(line(&["/usr/bin/ballast"]), ["/usr/bin/ballast"]);
    }

    #[test]
    fn a_file_names_options_and_another_qemu() {
        assert_eq!(settings(""), (vec![], vec![]));
        assert_eq!(settings("# --agent\n  --optional\n"), (vec!["--optional".into()], vec![]));
        let (options, program) = settings("--optional --agent\n-- taskset -c 0\n/opt/qemu-system-x86_64");
        assert_eq!(options, ["--optional", "--agent"]);
        assert_eq!(program, ["taskset", "-c", "0", "/opt/qemu-system-x86_64"]);
    }
}
