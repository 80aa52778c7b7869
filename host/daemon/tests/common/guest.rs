//! A test VM (`ballast-testvm`) attached to a [`super::Daemon`]: writes and verifies self-checking data until it is
//! told to stop, then verifies each byte.

use std::io::Write;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use ballast_api::Client;

use super::{Daemon, soak, until};

pub struct Guest {
    name: String,
    child: Option<Child>,
    waits_for_itself: bool,
}

pub struct Ended {
    pub outcome: serde_json::Value,
}

impl Guest {
    /// Starts a guest and waits until the daemon knows it; `args` are `ballast-testvm`'s.
    pub fn start(daemon: &Daemon, name: &str, args: &str) -> Self {
        Self::start_with(daemon, name, args, &[])
    }

    pub fn start_with(daemon: &Daemon, name: &str, args: &str, variables: &[(&str, &str)]) -> Self {
        Self::start_beside(Path::new(env!("CARGO_BIN_EXE_ballastd")), daemon, name, args, variables)
    }

    /// As [`Self::start_with`], with the `ballast-testvm` beside this `ballastd`.
    pub fn start_beside(ballastd: &Path, daemon: &Daemon, name: &str, args: &str, variables: &[(&str, &str)]) -> Self {
        Self::start_at(ballastd, (&daemon.api, &daemon.attach_socket()), name, args, variables)
    }

    /// As [`Self::start_beside`], at the daemon with this API and this attach socket.
    pub fn start_at(
        ballastd: &Path,
        (api, attach_socket): (&Client, &Path),
        name: &str,
        args: &str,
        variables: &[(&str, &str)],
    ) -> Self {
        let program = ballastd.with_file_name("ballast-testvm");
        assert!(program.is_file(), "{} is not built: run `cargo build --workspace` first", program.display());
        let child = Command::new(program)
            .args(args.split_ascii_whitespace())
            .envs(variables.iter().copied())
            .args(soak::is_on().then_some("--latency"))
            .args(["--attach", name, "--attach-socket"])
            .arg(attach_socket)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("start a test VM");
        let waits_for_itself = args.contains("--park-on");
        let guest = Self { name: name.to_owned(), child: Some(child), waits_for_itself };
        until("the guest is attached", || api.vm(name).is_ok());
        guest
    }

    pub fn tell(&mut self, line: &str) {
        let stdin = self.child.as_mut().and_then(|child| child.stdin.as_mut()).expect("running, and listening");
        stdin.write_all(line.as_bytes()).expect("tell the test VM");
    }

    pub fn pid(&self) -> u32 {
        self.child.as_ref().expect("running").id()
    }

    /// Ends the guest's operations, waits for the last verification, and checks that no byte was wrong.
    pub fn finish(mut self) -> Ended {
        let mut child = self.child.take().expect("running");
        drop(child.stdin.take().map(|mut stdin| stdin.write_all(b"stop\n")));
        let output = child.wait_with_output().expect("wait for the test VM");
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        if let Ok(outcome) = serde_json::from_str(out.trim()) {
            soak::ended(&self.name, &outcome, self.waits_for_itself);
        }
        assert!(output.status.success(), "VM {} ended with {}:\n{out}\n{err}", self.name, output.status);
        let outcome: serde_json::Value = serde_json::from_str(out.trim()).expect("one line of JSON");
        assert_eq!(outcome["wrong_bytes"], 0, "{out}");
        Ended { outcome }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let Some(mut child) = self.child.take() else { return };
        let ended = child.try_wait().ok().flatten();
        let _ = child.kill();
        let output = child.wait_with_output();
        if let (true, Some(ended), Ok(output)) = (std::thread::panicking(), ended, output) {
            let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
            eprintln!("VM {} had ended by itself, with {ended}:\n{out}\n{err}", self.name);
        }
    }
}

pub fn moves(api: &Client, name: &str) {
    let vm = || api.vm(name).expect("the VM");
    let before = vm();
    until("pages go out and come back", || {
        let now = vm();
        now.reclaim.evicted_pages > before.reclaim.evicted_pages && now.faults.restore > before.faults.restore
    });
}
