//! The examples, compiled by the system's C compiler against the header and the shared library: the VMM is in another
//! process than the engine that serves its faults.

mod double;

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use ballast_base::Bytes;
use ballast_base::guest::GuestRange;
use ballast_base::wire::{ClientToKeeper, EngineToClient, KeeperToClient};
use ballast_sys::memfd;
use ballast_sys::uffd::FillOutcome;
use ballast_testkit::missing;
use double::Keeper;

/// Compiles the example; `None`, with a printed skip, without a C compiler.
fn compile(out: &Path, example: &str) -> Option<PathBuf> {
    let works = Command::new("cc").arg("--version").output().is_ok_and(|output| output.status.success());
    if missing("cc", (!works).then_some("no C compiler called cc")) {
        return None;
    }
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    // The test program is in `deps`, where the build also puts the shared library.
    let libraries = std::env::current_exe().expect("own path").parent().expect("a folder").to_owned();
    let program = out.join(example);
    let status = Command::new("cc")
        .args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-O1"])
        .arg(here.join("examples").join(example).with_extension("c"))
        .arg("-I")
        .arg(here.join("include"))
        .arg("-L")
        .arg(&libraries)
        .arg(format!("-Wl,-rpath,{}", libraries.display()))
        .arg("-lballast_client")
        .arg("-o")
        .arg(&program)
        .status()
        .expect("run cc");
    assert!(status.success(), "the example does not compile");
    Some(program)
}

#[test]
fn the_c_example_attaches_keeps_its_bytes_discards_and_stops_when_told() {
    let Some(keeper) = Keeper::start() else { return };
    let dir = tempfile::tempdir().expect("tempdir");
    let Some(program) = compile(dir.path(), "embed") else { return };
    let mut child = Command::new(program)
        .env("BALLAST_SOCKET", &keeper.path)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("start");
    let session = keeper.client();
    assert_eq!((session.attach.name.as_str(), session.attach.limit), ("embed-c", Some(Bytes(2 << 20))));
    assert_eq!(session.attach.vmm, "embed");
    assert!(session.attach.may_pin, "a config that does not say is safe");
    session.accept();
    let mut input = child.stdin.take().expect("stdin");
    let mut lines = BufReader::new(child.stdout.take().expect("stdout")).lines();
    let mut say = |line: &str| writeln!(input, "{line}").expect("write");
    let mut next = || lines.next().expect("a line").expect("text");
    assert_eq!(next(), "attached");

    // All of RAM is zapped; this process maps the pages by UFFDIO_CONTINUE while the child reads them.
    session.register_all();
    let (start, len) = session.whole(0);
    assert_eq!(session.zap(1, vec![(start, len)]), None);
    say("check");
    for _ in 0..len / 4096 {
        let fault = session.next_fault();
        assert_eq!(session.uffd.map_existing(fault.addr, 4096).expect("continue"), FillOutcome::Done);
    }
    assert_eq!(next(), "right");

    let before = memfd::resident(&session.ram[0]).expect("stat");
    say("balloon");
    let text = std::cell::RefCell::new(None);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(next);
        assert_eq!(session.acknowledge_discards(|| waiting.is_finished()), [(start, 1 << 20)]);
        text.replace(waiting.join().ok());
    });
    assert_eq!(text.take().as_deref(), Some("freed"));
    let after = memfd::resident(&session.ram[0]).expect("stat");
    assert_eq!(before.0 - after.0, 256, "the megabyte went back to the host");

    session.tell(&EngineToClient::FailStop { reason: "the arena is gone".into() });
    let output = child.wait_with_output().expect("wait");
    assert_eq!(output.status.signal(), Some(libc::SIGABRT));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains("cannot be kept right: the arena is gone"), "{stderr}");
}

#[test]
fn the_c_example_with_ram_in_pieces_describes_them_and_keeps_its_bytes() {
    const PIECE: u64 = 1 << 20;
    let Some(keeper) = Keeper::start() else { return };
    let dir = tempfile::tempdir().expect("tempdir");
    let Some(program) = compile(dir.path(), "pieces") else { return };
    let mut child = Command::new(program)
        .env("BALLAST_SOCKET", &keeper.path)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("start");
    let session = keeper.client();
    let [region] = &session.attach.regions[..] else { panic!("{:?}", session.attach.regions) };
    let extents: Vec<_> = region.extents.iter().map(|extent| (extent.file, extent.offset.0, extent.len.0)).collect();
    assert_eq!(extents, [(0, 3 * PIECE, PIECE), (1, 0, PIECE), (0, PIECE, PIECE)]);
    assert_eq!((region.guest_address, session.ram.len()), (None, 2));
    session.accept();
    let seen = |offset, address, len| GuestRange { address, offset: Bytes(offset), len: Bytes(len) };
    let ranges = vec![seen(0, 0, PIECE), seen(PIECE, 1 << 32, 2 * PIECE)];
    assert_eq!(session.request().0, ClientToKeeper::GuestRanges { hva: region.span.hva, ranges });
    session.answer(&KeeperToClient::Ok);
    let mut input = child.stdin.take().expect("stdin");
    let mut lines = BufReader::new(child.stdout.take().expect("stdout")).lines();
    assert_eq!(lines.next().expect("a line").expect("text"), "attached");
    session.register_all();
    let (start, len) = session.whole(0);
    assert_eq!(session.zap(1, vec![(start, len)]), None, "across all pieces");
    writeln!(input, "check").expect("write");
    for _ in 0..len / 4096 {
        let fault = session.next_fault();
        assert_eq!(session.uffd.map_existing(fault.addr, 4096).expect("continue"), FillOutcome::Done);
    }
    assert_eq!(lines.next().expect("a line").expect("text"), "right");
    drop(input);
    assert!(child.wait().expect("wait").success());
}
