//! A small VMM written in C (`tests/vmm.c`) under the preload library, attached to a [`Daemon`] and driven by lines.

use std::io::{BufRead, BufReader, Lines, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use super::{Daemon, built, missing, until};

pub struct Program {
    dir: tempfile::TempDir,
}

impl Program {
    /// Compiles it; `None`, with a message, without a compiler or userfaultfd.
    pub fn compile() -> Option<Self> {
        let works = Command::new("cc").arg("--version").output().is_ok_and(|output| output.status.success());
        if super::raw::no_uffd() || missing("cc", (!works).then_some("no C compiler called cc")) {
            return None;
        }
        let dir = tempfile::tempdir().expect("temporary directory");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vmm.c");
        let mut compiler = Command::new("cc");
        compiler.args(["-std=c11", "-Wall", "-Wextra", "-O1"]).arg(source).arg("-o").arg(dir.path().join("vmm"));
        assert!(compiler.status().expect("run cc").success(), "the VMM does not compile");
        Some(Self { dir })
    }

    /// Starts it with RAM in this file, attached by the preload library under this name.
    pub fn start(&self, daemon: &Daemon, name: &str, file: &str, pages: u64) -> Vmm {
        let vmm = self.launch(Some((daemon, name)), ["ram", file, &pages.to_string()]);
        until("it is attached", || daemon.api.vm(name).is_ok());
        vmm
    }

    /// Starts it with these arguments; with a daemon, attached.
    pub fn launch(&self, attached: Option<(&Daemon, &str)>, words: [&str; 3]) -> Vmm {
        self.launch_behind(&[], attached, words)
    }

    /// Starts it through another program, which has the words `before`.
    pub fn launch_behind(&self, before: &[&str], attached: Option<(&Daemon, &str)>, words: [&str; 3]) -> Vmm {
        let vmm = self.dir.path().join("vmm");
        let mut command = match before.split_first() {
            None => Command::new(vmm),
            Some((program, options)) => {
                // That program may become another user.
                std::fs::set_permissions(self.dir.path(), PermissionsExt::from_mode(0o755)).expect("mode");
                let mut command = Command::new(program);
                command.args(options).arg(vmm);
                command
            }
        };
        if let Some((daemon, name)) = attached {
            let variables = [("BALLAST_VM_NAME", name), ("BALLAST_REQUIRE", "1")];
            command
                .env("LD_PRELOAD", built("libballast_preload.so"))
                .env("BALLAST_SOCKET", daemon.attach_socket())
                .envs(variables);
        }
        command.args(words).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("start the VMM");
        let input = child.stdin.take().expect("piped");
        let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let mut vmm = Vmm { child, input, lines };
        let expected = if words[0] == "ram" { "ready" } else { "next" };
        assert_eq!(vmm.hear(), expected);
        vmm
    }
}

pub struct Vmm {
    pub child: Child,
    input: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Vmm {
    pub fn say(&mut self, line: &str) {
        self.input.write_all(format!("{line}\n").as_bytes()).expect("it listens");
    }

    pub fn hear(&mut self) -> String {
        match self.lines.next() {
            Some(line) => line.expect("text"),
            None => {
                let status = self.child.wait();
                panic!("the VMM ended with {status:?} and said: {}", self.errors());
            }
        }
    }

    pub fn ask(&mut self, line: &str) -> String {
        self.say(line);
        self.hear()
    }

    pub fn kill(mut self) -> String {
        self.child.kill().expect("kill the VMM");
        self.child.wait().expect("reap the VMM");
        self.errors()
    }

    fn errors(&mut self) -> String {
        let stderr = self.child.stderr.take();
        stderr.and_then(|stderr| std::io::read_to_string(stderr).ok()).unwrap_or_default()
    }
}

impl Drop for Vmm {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
