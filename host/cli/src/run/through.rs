//! Programs through which a VMM is started (`taskset`, `env`, a script), and whether they keep the preload library.
//!
//! Before: the operator typed a command. After: the position of QEMU and its arguments in the command is known.
//! Promise: a command that would lose the library on the way is refused with the reason. The calls of a script are not
//! known here; the library watches its `exec` calls (`vmm/preload/src/through.rs`).

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

/// Programs that have another process, which has neither this environment nor these descriptors, start a command.
#[rustfmt::skip]
const HAND_OVER: &[&str] = &[
    "at", "batch", "crictl", "ctr", "distrobox", "distrobox-enter", "docker", "flatpak-spawn", "incus", "kubectl",
    "lxc", "machinectl", "nerdctl", "oc", "podman", "run0", "screen", "ssh", "tmux", "toolbox", "virsh",
];

/// The index of QEMU in this command: its program, or an argument of a program that starts it.
pub(super) fn qemu_in(command: &[OsString]) -> Option<usize> {
    if command.first().is_some_and(|program| is_qemu(program)) {
        return Some(0);
    }
    // A shorter name may be a value of another program's option.
    let is_whole = |word: &OsString| {
        let text = word.to_string_lossy();
        let is_long =
            text.rsplit('/').next().is_some_and(|name| name.starts_with("qemu-system-") || name == "qemu-kvm");
        is_qemu(word) && (is_long || text.starts_with('/')) && !text.contains(char::is_whitespace)
    };
    command.iter().position(is_whole)
}

pub(super) fn is_qemu(program: &OsStr) -> bool {
    let name = Path::new(program).file_name().unwrap_or_default().to_string_lossy();
    name.starts_with("qemu-system-") || matches!(&*name, "qemu-kvm" | "kvm" | "qemu")
}

/// Refuses a command in which a program keeps the library from the VMM. The VMM is the last of these words if it is
/// known; otherwise there is one word.
pub(super) fn check_programs(words: &[OsString]) -> Result<()> {
    for (index, word) in words.iter().enumerate() {
        let text = word.to_string_lossy();
        // An argument is a program only if it can be executed. `exec` will report a missing program.
        let Some(path) = (index == 0 || !text.starts_with('-')).then(|| executable(word)).flatten() else { continue };
        check_program(&path)?;
        let name = text.rsplit('/').next().unwrap_or_default();
        let is_scope = words.iter().any(|word| word == "--scope");
        if index + 1 < words.len() && (HAND_OVER.contains(&name) || name == "systemd-run" && !is_scope) {
            bail!(
                "`{text}` has another process start the VMM, which would run unmanaged, without the preload library; \
                 write `{text} ... ballast run -- ...` instead"
            );
        }
    }
    Ok(())
}

fn executable(program: &OsStr) -> Option<PathBuf> {
    let candidates: Vec<PathBuf> = if program.to_string_lossy().contains('/') {
        vec![program.into()]
    } else {
        std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()).map(|dir| dir.join(program)).collect()
    };
    let can_run = |path: &PathBuf| {
        std::fs::metadata(path).is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
    };
    candidates.into_iter().find(can_run)
}

/// Refuses a program that the dynamic loader would start without the preload library: it would run unmanaged, and no
/// error would say so.
fn check_program(path: &Path) -> Result<()> {
    let mode = std::fs::metadata(path).map_or(0, |meta| meta.permissions().mode());
    if mode & 0o6000 != 0 {
        bail!("{} is set-user-ID or set-group-ID; the system loads no preload library into it", path.display());
    }
    if File::open(path).and_then(|file| is_static(&file)).unwrap_or(false) {
        bail!(
            "{} is linked statically; a preload library cannot be loaded into it (use the client crate)",
            path.display()
        );
    }
    Ok(())
}

/// Whether this is a 64-bit ELF program that names no dynamic loader. Only its headers are read: a VMM has tens of MiB.
fn is_static(program: &File) -> std::io::Result<bool> {
    const PT_INTERP: u32 = 3;
    let mut header = [0; 64];
    program.read_exact_at(&mut header, 0)?;
    let number =
        |at: usize, len: usize| header[at..at + len].iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte));
    let (start, size, count) = (number(32, 8), number(54, 2) as usize, number(56, 2) as usize);
    // The kernel runs no program with headers of another size.
    if !header.starts_with(b"\x7fELF\x02\x01") || size != 56 {
        return Ok(false);
    }
    let mut headers = vec![0; size * count];
    program.read_exact_at(&mut headers, start)?;
    Ok(!headers.chunks(size).any(|header| header.starts_with(&PT_INTERP.to_le_bytes())))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<OsString> {
        line.split_ascii_whitespace().map(OsString::from).collect()
    }

    #[test]
    fn qemu_is_found_behind_the_programs_that_start_it() {
        for (line, at) in [
            ("qemu-system-x86_64 -m 1G", Some(0)),
            ("/usr/bin/kvm -m 1G", Some(0)),
            ("taskset -c 0,1 qemu-system-x86_64 -m 1G", Some(3)),
            ("nice env A=1 prlimit --memlock=1 /opt/qemu-system-aarch64 -m 1G", Some(5)),
            ("sh -c exec_\"$@\" sh qemu-kvm -m 1G", Some(4)),
            ("cloud-hypervisor --name kvm", None),
            ("sh -c script", None),
        ] {
            assert_eq!(qemu_in(&words(line)), at, "{line}");
        }
        let script = ["sh", "-c", "qemu-system-x86_64 -m 1G"].map(OsString::from);
        assert_eq!(qemu_in(&script), None, "a line of a shell is no list of words");
    }

    #[test]
    fn a_program_that_keeps_the_library_from_the_vmm_is_refused() {
        let dir = tempfile::tempdir().expect("a directory");
        let program = dir.path().join("sudo");
        std::fs::write(&program, "#!/bin/sh\n").expect("write");
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o4755)).expect("mode");
        let sudo = program.to_string_lossy();
        let other = |name: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, "#!/bin/sh\n").expect("write");
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("mode");
            path.to_string_lossy().into_owned()
        };
        let (run, docker) = (other("systemd-run"), other("docker"));
        for (line, why) in [
            (format!("nice {sudo} qemu-system-x86_64"), "set-user-ID"),
            (format!("{run} qemu-system-x86_64"), "another process"),
            (format!("nice {docker} run image qemu-system-x86_64"), "another process"),
        ] {
            let said = check_programs(&words(&line)).expect_err(&line).to_string();
            assert!(said.contains(why), "{line}: {said}");
        }
        let scope = format!("{run} --scope qemu-kvm");
        for line in [&*scope, "taskset -c 0 env A=b qemu-system-x86_64", "chroot /srv/docker qemu-kvm"] {
            check_programs(&words(line)).expect(line);
        }
    }

    #[test]
    fn qemu_and_static_programs_are_recognised() {
        assert!(is_qemu("/usr/bin/qemu-system-aarch64".as_ref()) && is_qemu("kvm".as_ref()));
        assert!(!is_qemu("cloud-hypervisor".as_ref()));
        let dir = tempfile::tempdir().expect("a directory");
        let is_static = |bytes: &[u8]| {
            std::fs::write(dir.path().join("program"), bytes).expect("write");
            is_static(&File::open(dir.path().join("program")).expect("it is there")).unwrap_or(false)
        };
        // A header, and two program headers at the end of the file, as after `patchelf`.
        let program = |kinds: [u32; 2]| {
            let mut bytes = vec![0; 5000 + 2 * 56];
            bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
            bytes[32..40].copy_from_slice(&5000_u64.to_le_bytes());
            bytes[54..58].copy_from_slice(&[56, 0, 2, 0]);
            kinds
                .iter()
                .zip([5000, 5056])
                .for_each(|(kind, at)| bytes[at..at + 4].copy_from_slice(&kind.to_le_bytes()));
            bytes
        };
        assert!(is_static(&program([1, 2])) && !is_static(&program([1, 3])) && !is_static(&program([3, 1])));
        assert!(!is_static(&program([1, 2])[..5060]), "half of it says nothing");
        assert!(!is_static(b"#!/bin/sh") && !is_static(b"\x7fELF\x02\x01"));
        assert!(!super::is_static(&File::open("/proc/self/exe").expect("own image")).expect("read"));
    }
}
