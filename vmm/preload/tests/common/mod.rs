//! Helpers that start programs with the preload library, and send QMP to QEMU.
#![allow(dead_code, reason = "each test program uses a part of it")]

use std::io::{BufRead, BufReader, Lines, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use serde_json::{Value, json};

/// The library, which the build puts beside the test program.
pub fn library() -> PathBuf {
    let path = std::env::current_exe().expect("own path").with_file_name("libballast_preload.so");
    assert!(path.exists(), "{} was not built", path.display());
    path
}

/// A command that loads the library and finds the keeper at `socket`.
pub fn preloaded(program: impl AsRef<std::ffi::OsStr>, socket: &Path) -> Command {
    let mut command = Command::new(program);
    command
        .env("LD_PRELOAD", library())
        .env("BALLAST_SOCKET", socket)
        .env("BALLAST_VM_NAME", "preload-test")
        .env("BALLAST_REQUIRE", "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// A child process driven by lines; killed on drop.
pub struct Driven {
    pub child: Child,
    input: Option<ChildStdin>,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Driven {
    pub fn start(mut command: Command) -> Self {
        let mut child = command.spawn().expect("start");
        let input = child.stdin.take();
        let lines = BufReader::new(child.stdout.take().expect("stdout")).lines();
        Self { child, input, lines }
    }

    pub fn say(&mut self, line: &str) {
        // In one write, because QEMU may execute the command and exit before a separate write of the newline.
        if let Err(error) = self.input.as_mut().expect("open").write_all(format!("{line}\n").as_bytes()) {
            self.died(&format!("writing {line:?}: {error}"));
        }
    }

    /// Panics because the child ended early, with its status and standard error.
    fn died(&mut self, what: &str) -> ! {
        use std::io::Read;
        let status = self.child.wait();
        let mut text = String::new();
        if let Some(mut stderr) = self.child.stderr.take() {
            let _ = stderr.read_to_string(&mut text);
        }
        panic!("{what}; the child ended with {status:?} and said: {text}");
    }

    pub fn next(&mut self) -> String {
        match self.lines.next() {
            Some(line) => line.expect("text"),
            None => self.died("waiting for a line"),
        }
    }

    pub fn ask(&mut self, line: &str) -> String {
        self.say(line);
        self.next()
    }

    /// One QMP command; events before the reply are dropped.
    pub fn qmp(&mut self, command: &str, arguments: Value) -> Value {
        self.say(&json!({ "execute": command, "arguments": arguments }).to_string());
        loop {
            let answer: Value = serde_json::from_str(&self.next()).expect("JSON");
            if let Some(result) = answer.get("return") {
                return result.clone();
            }
            assert!(answer.get("error").is_none(), "{command}: {answer}");
        }
    }

    pub fn qmp_start(&mut self) {
        let greeting = self.next();
        assert!(greeting.contains("QMP"), "{greeting}");
        self.qmp("qmp_capabilities", json!({}));
    }

    /// Has QEMU quit. Returns as [`Driven::finish`].
    pub fn quit(mut self) -> (Option<i32>, String) {
        self.qmp("quit", json!({}));
        self.finish()
    }

    /// Closes its input and waits for its end. Returns the exit code and standard error.
    pub fn finish(mut self) -> (Option<i32>, String) {
        use std::io::Read;
        drop(self.input.take());
        let mut text = String::new();
        self.child.stderr.take().expect("stderr").read_to_string(&mut text).expect("text");
        (self.child.wait().expect("wait").code(), text)
    }
}

impl Drop for Driven {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
