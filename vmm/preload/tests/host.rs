//! A C program with the preload library against a scripted keeper and engine: hooked calls, valid and invalid.

mod common;
#[path = "../../client/tests/double/mod.rs"]
mod double;

use std::path::{Path, PathBuf};
use std::process::Command;

use ballast_base::wire::{ClientToEngine, ClientToKeeper, KeeperToClient};
use ballast_base::{Bytes, MIB};
use ballast_sys::memfd;
use ballast_testkit::missing;
use common::{Driven, preloaded};
use double::{Keeper, Session};

fn compile(dir: &Path, name: &str) -> Option<PathBuf> {
    build(dir, name, "host.c", &["-pthread"])
}

fn build(dir: &Path, name: &str, source: &str, words: &[&str]) -> Option<PathBuf> {
    let works = Command::new("cc").arg("--version").output().is_ok_and(|output| output.status.success());
    if missing("cc", (!works).then_some("no C compiler called cc")) {
        return None;
    }
    let program = dir.join(name);
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(source);
    let status = Command::new("cc")
        .args(["-std=c11", "-Wall", "-Wextra", "-O1"])
        .args(words)
        .arg(source)
        .arg("-o")
        .arg(&program)
        .status()
        .expect("run cc");
    assert!(status.success(), "the host program does not compile");
    Some(program)
}

struct Stage {
    _dir: tempfile::TempDir,
    keeper: Keeper,
    host: Driven,
    session: Session,
}

fn stage() -> Option<Stage> {
    stage_as("host")
}

/// The attached host program, under this name.
fn stage_as(name: &str) -> Option<Stage> {
    stage_that(name, |session| drop(session.accept()))
}

/// The host program under this name, attached by `accept`.
fn stage_that(name: &str, accept: fn(&Session)) -> Option<Stage> {
    let dir = tempfile::tempdir().expect("tempdir");
    let program = compile(dir.path(), name)?;
    let keeper = Keeper::start()?;
    let mut host = Driven::start(preloaded(program, &keeper.path));
    let session = keeper.client();
    assert_eq!(session.attach.regions.len(), 1);
    assert!(session.attach.may_pin, "a VMM that nobody taught of Ballast promises nothing");
    assert_eq!(session.attach.regions[0].span.len, Bytes(4 * MIB));
    accept(&session);
    assert_eq!(host.next(), "ready");
    Some(Stage { _dir: dir, keeper, host, session })
}

impl Stage {
    /// Makes the program do a call, and confirms each discard and request. Returns its output, discards and requests.
    fn deed(&mut self, line: &str) -> (String, Vec<ClientToEngine>, Vec<ClientToKeeper>) {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let Self { host, session, .. } = self;
        let (mut heard, mut asked) = (Vec::new(), Vec::new());
        let said = std::thread::scope(|scope| {
            let said = scope.spawn(|| host.ask(line));
            while !said.is_finished() {
                let both = [&session.control, &session.socket];
                let mut fds = both.map(|fd| PollFd::new(fd, PollFlags::IN));
                let _ = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 5_000_000 }));
                let [control, request] = fds.map(|fd| !fd.revents().is_empty());
                if control {
                    let message = session.hear();
                    if let ClientToEngine::Discard { seq, .. } = message {
                        session.tell(&ballast_base::wire::EngineToClient::DiscardDone { seq, error: None });
                    }
                    heard.push(message);
                }
                if request {
                    asked.push(session.request().0);
                    session.answer(&KeeperToClient::Ok);
                }
            }
            said.join().expect("the host answers")
        });
        (said, heard, asked)
    }

    fn resident(&self) -> u64 {
        memfd::resident(&self.session.ram[0]).expect("stat").0
    }
}

#[test]
fn freeing_ram_is_announced_before_it_happens_and_filling_it_is_refused() {
    let Some(mut stage) = stage() else { return };
    let base = stage.session.whole(0).0;
    let (said, heard, _) = stage.deed("punch");
    assert_eq!(said, "ok");
    assert!(matches!(&heard[0], ClientToEngine::Discard { ranges, .. } if *ranges == [(base, 8192)]), "{heard:?}");
    assert_eq!(stage.resident(), 1022);
    let (said, heard, _) = stage.deed("remove");
    assert_eq!(said, "ok");
    let fifth = (base + 4 * 4096, 4096);
    assert!(matches!(&heard[0], ClientToEngine::Discard { ranges, .. } if *ranges == [fifth]), "{heard:?}");
    assert_eq!(stage.resident(), 1021);
    let cases = [
        ("dontneed", "ok"),
        ("punch-odd", "EINVAL"),
        ("fill", "EOPNOTSUPP"),
        ("fill-posix", "EOPNOTSUPP"),
        ("mremap", "EINVAL"),
        ("mremap-copy", "EINVAL"),
    ];
    for (line, answer) in cases {
        let (said, heard, asked) = stage.deed(line);
        assert_eq!((said.as_str(), heard.len(), asked.len()), (answer, 0, 0), "{line}");
    }
    assert_eq!(stage.resident(), 1021, "refused calls change nothing");
}

#[test]
fn ram_of_a_new_vm_that_was_never_zapped_is_freed_without_a_message() {
    let Some(mut stage) = stage_that("host", Session::accept_first) else { return };
    for (line, resident) in [("punch", 1022), ("remove", 1021)] {
        let (said, heard, _) = stage.deed(line);
        assert_eq!((said.as_str(), heard.len(), stage.resident()), ("ok", 0, resident), "{line}");
    }
    for (line, answer) in [("punch-odd", "EINVAL"), ("fill", "EOPNOTSUPP"), ("fill-posix", "EOPNOTSUPP")] {
        assert_eq!(stage.deed(line).0, answer, "{line}");
    }
    let page = (stage.session.whole(0).0 + 9 * 4096, 4096);
    assert_eq!(stage.session.zap(1, vec![page]), None, "no call that is over holds it up");
    for line in ["punch", "remove"] {
        let (said, heard, _) = stage.deed(line);
        assert!(said == "ok" && matches!(heard[..], [ClientToEngine::Discard { .. }]), "{line}: {said}, {heard:?}");
    }
}

#[test]
fn a_punch_that_no_engine_confirms_is_eagain_and_frees_nothing() {
    let Some(mut stage) = stage() else { return };
    assert_eq!(stage.host.ask("punch"), "EAGAIN");
    assert_eq!(stage.resident(), 1024);
    stage.session.ping(1);
}

#[test]
fn a_call_that_takes_long_term_references_to_ram_pins_the_vm_first() {
    let Some(mut stage) = stage() else { return };
    let cases = [
        ("mlock", "ok", "memory is locked (mlock)"),
        ("vfio", "EBADF", "a VFIO device holds its memory for DMA"),
        ("sev", "EBADF", "its memory is encrypted for the guest (SEV)"),
        ("udmabuf", "EBADF", "its memory is exported as a DMA buffer (udmabuf)"),
        ("send", "ok", "another process maps the same RAM (vhost-user, or a passed RAM file)"),
        ("twice", "ok", "the VMM maps the same RAM twice"),
    ];
    for (line, answer, reason) in cases {
        let (said, _, asked) = stage.deed(line);
        assert_eq!((said.as_str(), asked), (answer, vec![ClientToKeeper::Pin(reason.into())]), "{line}");
    }
}

#[test]
#[cfg(target_arch = "x86_64")]
fn the_first_vcpu_gets_its_reset_when_it_has_run_and_others_at_once() {
    let dir = tempfile::tempdir().expect("tempdir");
    let Some(program) = compile(dir.path(), "host") else { return };
    let kvm = build(dir.path(), "kvm.so", "kvm.c", &["-shared", "-fPIC"]).expect("a compiler");
    let Some(keeper) = Keeper::start() else { return };
    let mut command = preloaded(program, &keeper.path);
    command.env("LD_PRELOAD", format!("{}:{}", common::library().display(), kvm.display()));
    let mut host = Driven::start(command);
    let session = keeper.client();
    drop(session.accept());
    assert_eq!(host.next(), "ready");
    for line in ["reset-first", "reset-other", "reset-on"] {
        assert_eq!(host.ask(line), "ok", "{line}");
    }
}

#[test]
fn a_second_mapping_of_ram_pins_the_vm_first_but_one_in_its_own_place_does_not() {
    for name in ["host", "qemu-system-host"] {
        let Some(mut stage) = stage_as(name) else { return };
        for line in ["again-read", "again-private", "again-none", "twice"] {
            let (said, _, asked) = stage.deed(line);
            let pin = ClientToKeeper::Pin("the VMM maps the same RAM twice".into());
            assert_eq!((said.as_str(), asked), ("ok", vec![pin]), "{name}: {line}");
        }
        let (said, _, asked) = stage.deed("in-place");
        assert_eq!((said.as_str(), asked.len()), ("ok", 0), "{name}");
        std::thread::scope(|scope| {
            let said = scope.spawn(|| stage.host.ask("again-read"));
            stage.session.request();
            stage.session.answer(&KeeperToClient::Refused("not today".into()));
            assert_eq!(said.join().expect("thread"), "EAGAIN", "{name}");
        });
    }
}

#[test]
fn a_ram_file_does_not_report_holes_and_is_not_read_past_its_mapping() {
    let Some(mut stage) = stage() else { return };
    let cases = [
        ("data", "EINVAL"),
        ("hole-after", "EINVAL"),
        ("end", "ok"),
        ("pread", "EOPNOTSUPP"),
        ("sendfile", "EOPNOTSUPP"),
        ("copy", "EOPNOTSUPP"),
    ];
    for (line, answer) in cases {
        let (said, heard, asked) = stage.deed(line);
        assert_eq!((said.as_str(), heard.len(), asked.len()), (answer, 0, 0), "{line}");
    }
}

#[test]
fn a_guest_that_starts_on_private_ram_is_stopped_or_reported_as_unmanaged() {
    let dir = tempfile::tempdir().expect("tempdir");
    let Some(program) = compile(dir.path(), "host") else { return };
    let Some(keeper) = Keeper::start() else { return };
    let host = |required: &str| {
        let mut command = preloaded(&program, &keeper.path);
        command.env("BALLAST_REQUIRE", required).arg("run");
        Driven::start(command)
    };
    let (code, said) = host("1").finish();
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("not a shared memory file. Stopping before the guest starts"), "{said}");
    let mut host = host("0");
    assert_eq!([host.next(), host.next()], ["EBADF", "ready"]);
    assert_eq!(host.ask("data"), "ok", "nothing is managed");
    let (code, said) = host.finish();
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("The VM runs unmanaged"), "{said}");
}

#[test]
fn a_qemu_that_is_spawned_without_the_library_does_not_start_or_is_reported() {
    let dir = tempfile::tempdir().expect("tempdir");
    let Some(program) = compile(dir.path(), "starter") else { return };
    let Some(keeper) = Keeper::start() else { return };
    let link = dir.path().join("qemu-system-link");
    std::os::unix::fs::symlink("/bin/sh", &link).expect("link");
    let starts_as = |deed: &str, required: &str, file: Option<&Path>| {
        let mut command = preloaded(&program, &keeper.path);
        command.env("BALLAST_REQUIRE", required).arg(deed);
        if let Some(file) = file {
            command.env("SPAWNS", file);
        }
        let mut starter = Driven::start(command);
        let answer = starter.next();
        let session = keeper.client();
        session.accept();
        assert_eq!(starter.next(), "ready", "{deed}");
        (answer, starter.finish().1)
    };
    let starts = |deed: &str, required: &str| starts_as(deed, required, None);
    assert_eq!(starts_as("spawn-bare", "1", Some(&link)).0, "EPERM", "by its path");
    assert_eq!(starts_as("spawn-bare", "1", Some(Path::new("/bin/sh"))).0, "ok", "another program");
    for deed in ["spawn", "spawnp"] {
        let (answer, said) = starts(deed, "1");
        assert!(answer == "ok" && !said.contains("without this library"), "{deed}: {answer}, {said}");
        for (required, expected) in [("1", "EPERM"), ("0", "ok")] {
            let (answer, said) = starts(&format!("{deed}-bare"), required);
            assert_eq!(answer, expected, "{deed}: {said}");
            assert!(said.contains("without this library in its environment"), "{deed}: {said}");
        }
    }
}

#[test]
fn unmapped_ram_is_not_zapped_and_a_whole_region_is_removed_first() {
    let Some(mut stage) = stage() else { return };
    let base = stage.session.whole(0).0;
    let (said, _, asked) = stage.deed("hole");
    assert_eq!((said.as_str(), asked.len()), ("ok", 0));
    assert_eq!(stage.session.zap(1, vec![(base + 8 * 4096, 4096)]), Some(libc::EINVAL));
    assert_eq!(stage.session.zap(2, vec![(base + 9 * 4096, 4096)]), None);
    let (said, _, asked) = stage.deed("unmap");
    assert_eq!((said.as_str(), asked), ("ok", vec![ClientToKeeper::RemoveRegion(base)]));
    assert_eq!(stage.session.zap(3, vec![(base, 4096)]), Some(libc::EINVAL));
}

#[test]
fn ram_that_stays_mapped_because_the_call_fails_has_all_of_its_pages() {
    let Some(mut stage) = stage() else { return };
    let base = stage.session.whole(0).0;
    assert_eq!(stage.deed("punch").0, "ok");
    let (said, _, asked) = stage.deed("unmap-odd");
    assert_eq!((said.as_str(), asked.len(), stage.resident()), ("EINVAL", 0, 1022), "it is managed as before");
    let (said, _, asked) = stage.deed("over-nothing");
    assert_eq!((said.as_str(), asked), ("EBADF", vec![ClientToKeeper::RemoveRegion(base)]));
    assert_eq!(stage.resident(), 1024, "it was touched before the keeper was told");
}

#[test]
fn children_are_left_alone_and_errno_is_kept() {
    let Some(mut stage) = stage() else { return };
    for line in ["fork", "clone", "exec"] {
        let (said, heard, asked) = stage.deed(line);
        assert_eq!((said.as_str(), heard.len(), asked.len()), ("ok", 0, 0), "{line}");
    }
    let (said, _, asked) = stage.deed("errno");
    assert_eq!(said, "ok");
    assert!(matches!(asked[..], [ClientToKeeper::AddRegion { .. }]), "{asked:?}");
}

#[test]
fn a_mapping_of_qemu_at_any_address_is_no_ram_but_that_of_another_vmm_is() {
    for (name, buffers) in [("qemu-system-host", 0), ("host", 1)] {
        let Some(mut stage) = stage_as(name) else { return };
        for (line, count) in [("buffer", buffers), ("plug", 1), ("buffer", buffers), ("plug", 1)] {
            let (said, _, asked) = stage.deed(line);
            let added = |request: &ClientToKeeper| matches!(request, ClientToKeeper::AddRegion { .. });
            assert_eq!((said.as_str(), asked.len()), ("ok", count), "{name}: {line}");
            assert!(asked.iter().all(added), "{name}: {line}: {asked:?}");
        }
    }
}

#[test]
fn plugged_ram_for_which_the_keeper_is_not_ready_is_enomem_and_not_mapped() {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let Some(mut stage) = stage() else { return };
    let regions = stage.session.attach.regions.clone();
    let Stage { host, session, .. } = &mut stage;
    let later = || {
        let (message, _) = session.request();
        assert!(matches!(message, ClientToKeeper::AddRegion { .. }), "{message:?}");
        session.answer(&KeeperToClient::Later("it is being written back".into()));
    };
    std::thread::scope(|scope| {
        let said = scope.spawn(|| host.ask("plug-or-not"));
        while !said.is_finished() {
            let mut fds = [PollFd::new(&session.socket, PollFlags::IN)];
            if poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 5_000_000 })).is_ok_and(|ready| ready > 0) {
                later();
            }
        }
        assert_eq!(said.join().expect("the host answers"), "ENOMEM");
    });
    let whole = session.whole(0);
    assert_eq!(session.zap(1, vec![whole]), None, "the other RAM is managed as before");
    let (said, _, asked) = stage.deed("plug-or-not");
    assert_eq!(
        (said.as_str(), asked.len()),
        ("wrong", 2),
        "a ready keeper takes it, and is told when it goes: {asked:?}"
    );
    let Stage { keeper, session, host: _host, .. } = stage;
    drop(session);
    assert_eq!(keeper.client().attach.regions, regions);
}

#[test]
fn threads_that_map_and_unmap_ram_all_the_time_leave_nothing_behind() {
    let Some(mut stage) = stage() else { return };
    let (said, _, asked) = stage.deed("storm");
    assert_eq!(said, "ok");
    let added = asked.iter().filter(|request| matches!(request, ClientToKeeper::AddRegion { .. })).count();
    let removed = asked.iter().filter(|request| matches!(request, ClientToKeeper::RemoveRegion(_))).count();
    assert_eq!((added, removed), (100, 100));
    // Only the first RAM is still announced, as the next attach message shows.
    let Stage { keeper, session, host: _host, .. } = stage;
    let regions = session.attach.regions.clone();
    drop(session);
    assert_eq!(keeper.client().attach.regions, regions);
}
