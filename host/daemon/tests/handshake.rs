//! The attach socket against clients of every kind: correct, late, greedy, random. A real keeper and a real engine.
//! Needs userfaultfd. This process plays several VMMs; a second process of a VM is this program, run again.

mod common;

use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use ballast_api::{LimitsPatch, VmStatus};
use ballast_base::store::{FILE_STORE, RAM_STORE};
use ballast_base::wire::{
    self, ClientToKeeper, KeeperToClient, MAX_FILES, MAX_REGIONS, MAX_SHARDS, RegionInfo, Span, StoreFiles,
};
use ballast_base::{Bytes, Extent, Hva};
use ballast_sys::{Uffd, memfd, scm};
use ballast_testkit::random::Random;
use common::raw::{Ram, RawClient, connect, files, hear, no_uffd, userfaultfd};
use common::{Daemon, limit_descriptors, may_fork, signal_process, stop_process, until};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::Signal;

fn add(region: RegionInfo) -> ClientToKeeper {
    ClientToKeeper::AddRegion { region, files: 1 }
}

fn files_of(stores: &[(u8, u8)]) -> Vec<StoreFiles> {
    stores.iter().map(|(store, count)| StoreFiles { store: *store, count: *count }).collect()
}

fn say(daemon: &Daemon, client: &RawClient, message: wire::Attach, ram: &[&Ram]) -> KeeperToClient {
    let socket = connect(&daemon.attach_socket()).expect("connect");
    scm::send(&socket, &wire::encode(&ClientToKeeper::Attach(message)), &client.descriptors(ram)).expect("send");
    hear(&socket).expect("an answer").0
}

fn extent(file: u16, first: u64, pages: u64) -> Extent {
    Extent { file, offset: Bytes(first * 4096), len: Bytes(pages * 4096) }
}

/// A region of these extents, mapped at `at`.
fn region(at: u64, extents: &[Extent]) -> RegionInfo {
    let len = extents.iter().fold(0u64, |sum, extent| sum.wrapping_add(extent.len.0));
    RegionInfo { span: Span { hva: Hva(at), len: Bytes(len) }, extents: extents.to_vec(), guest_address: None }
}

#[test]
fn impossible_extents_are_refused_by_name_and_the_keeper_continues() {
    let Some(daemon) = Daemon::with_uffd("") else { return };
    let (a, b) = (Ram::new(16), Ram::new(16));
    let client = RawClient::new(&daemon.attach_socket(), "web");
    let at = a.info().span.hva.0;
    // The tests of `ballast_base::wire` have each reason that needs no file.
    let wrong = [
        (
            vec![region(at, &[extent(0, 0, 4)]), region(at + 65536, &[extent(0, 2, 4)])],
            &b,
            "overlap at offset 0x2000 of file 0",
        ),
        (
            vec![region(at, &[extent(0, 0, 4), extent(1, 10, 7)])],
            &b,
            "extent 1 ends at offset 0x11000 of file 1, which has",
        ),
        (vec![region(at, &[extent(0, 0, 4), extent(1, 0, 4)])], &a, "the same file"),
    ];
    for (regions, second, why) in wrong {
        let message = wire::Attach { regions, files: 2, ..client.message(vec![a.info()]) };
        let answer = say(&daemon, &client, message, &[&a, second]);
        assert!(matches!(&answer, KeeperToClient::Refused(text) if text.contains(why)), "{why}: {answer:?}");
    }
    let mut good = attached(&daemon, "web", &[&a]);
    let overlapping = add(region(b.info().span.hva.0, &[extent(0, 15, 1)]));
    let answer = good.ask(&overlapping, &[a.fd.as_fd()]);
    assert!(
        matches!(&answer, Some(KeeperToClient::Refused(why)) if why.contains("overlaps, at offset 0xf000")),
        "{answer:?}"
    );
    good.hang_up();
}

#[test]
fn two_vms_may_have_parts_of_one_file_and_neither_may_have_a_page_of_the_other() {
    let Some(daemon) = Daemon::with_uffd("") else { return };
    let ram = Ram::new(48);
    let at = ram.info().span.hva.0;
    let part = |first: u64, pages: u64| region(at + first * 4096, &[extent(0, first, pages)]);
    let vm = |name: &str, regions: Vec<RegionInfo>| {
        let client = RawClient::new(&daemon.attach_socket(), name);
        let message = wire::Attach { regions, files: 1, ..client.message(vec![ram.info()]) };
        let socket = connect(&daemon.attach_socket()).expect("connect");
        let bytes = wire::encode(&ClientToKeeper::Attach(message));
        scm::send(&socket, &bytes, &client.descriptors(&[&ram])).expect("send");
        let answer = hear(&socket).expect("an answer").0;
        (answer, socket, client)
    };
    let (first, _socket, _client) = vm("first", vec![part(0, 16)]);
    assert!(matches!(first, KeeperToClient::Attached { .. }), "{first:?}");
    let (second, _other_socket, _other) = vm("second", vec![part(32, 16)]);
    assert!(matches!(second, KeeperToClient::Attached { .. }), "{second:?}\n{}", daemon.log());
    until("both are served", || daemon.api.vm("first").is_ok() && daemon.api.vm("second").is_ok());
    assert_eq!(daemon.vm("second").size_bytes, 16 * 4096);
    let (third, ..) = vm("third", vec![part(15, 17)]);
    assert!(matches!(&third, KeeperToClient::Refused(_)), "{third:?}");
    let (both, ..) = vm("both", vec![part(0, 16), part(32, 16)]);
    assert!(matches!(&both, KeeperToClient::Refused(why) if why.contains("some of its RAM is that of")), "{both:?}");
}

fn attaches(client: &mut RawClient, ram: &[&Ram]) -> bool {
    matches!(client.attach(ram), Some(KeeperToClient::Attached { .. }))
}

/// Attaches, and repeats while the keeper is missing or busy; waits until the engine has the VM.
fn attached(daemon: &Daemon, name: &str, ram: &[&Ram]) -> RawClient {
    let (mut client, begun) = (RawClient::new(&daemon.attach_socket(), name), Instant::now());
    until("a good client attaches", || daemon.attach_socket().exists());
    loop {
        let last = client.attach(ram);
        if matches!(last, Some(KeeperToClient::Attached { .. })) {
            break;
        }
        let is_late = begun.elapsed() > Duration::from_secs(300);
        assert!(!is_late, "a good client is not attached: {last:?}\n{}", daemon.log());
        std::thread::sleep(Duration::from_millis(10));
    }
    until("it is served", || daemon.api.vm(name).is_ok());
    client
}

fn descriptors(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count)
}

/// Descriptors of every kind that a client might send.
fn zoo(escrow: &[OwnedFd]) -> Vec<OwnedFd> {
    let (stream, other) = std::os::unix::net::UnixStream::pair().expect("pair");
    let (packets, _) = scm::pair().expect("pair");
    let (reader, writer) = std::io::pipe().expect("pipe");
    let ram = memfd::create("zoo", Bytes(1 << 20)).expect("memfd");
    let file = |path: &str| -> OwnedFd { std::fs::File::open(path).expect("open").into() };
    let mut all: Vec<OwnedFd> = vec![
        memfd::reopen(ram.as_fd(), false).expect("reopen"),
        ram,
        stream.into(),
        other.into(),
        packets,
        reader.into(),
        writer.into(),
        file("/dev/null"),
        file("/"),
        file("/proc/self/stat"),
        std::net::UdpSocket::bind("127.0.0.1:0").expect("bind").into(),
    ];
    all.extend(escrow.iter().map(|fd| fd.try_clone().expect("dup")));
    all
}

#[test]
fn random_messages_do_not_stop_the_keeper_and_leave_nothing_open() {
    // With file stores where possible, so that their files are among the descriptors.
    let dir = std::env::temp_dir();
    let Some(daemon) = Daemon::with_uffd(&format!("[spill]\ndir = \"{}\"\nbudget = \"64M\"\n", dir.display())) else {
        return;
    };
    let (keeper, engine) = (daemon.keeper_pid(), daemon.engine_pid().expect("an engine"));
    let ram = Ram::new(64);
    let mut good = attached(&daemon, "good", &[&ram]);
    let escrow = good.escrow.take().expect("escrow").2;
    good.hang_up();
    until("the VM is forgotten", || daemon.api.vms().is_ok_and(|vms| vms.is_empty()));
    let before = [keeper, engine].map(descriptors);

    let mut rng = Random(1);
    let other = Ram::new(16);
    let stores = [(RAM_STORE, 1), (FILE_STORE, 2), (7, 1), (RAM_STORE, 255)];
    for _ in 0..400 {
        let Some(socket) = connect(&daemon.attach_socket()) else { panic!("nobody listens\n{}", daemon.log()) };
        let client = RawClient::new(&daemon.attach_socket(), ["mad", "good", "-", "x"][rng.index(4)]);
        for _ in 0..=rng.index(3) {
            let all_regions = [ram.info(), other.info()];
            let mut regions = all_regions[..rng.index(3)].to_vec();
            for extent in regions.iter_mut().flat_map(|region| &mut region.extents) {
                if rng.index(3) == 0 {
                    extent.offset = Bytes([0, 1, 4096, u64::MAX - 4095][rng.index(4)]);
                }
            }
            let message = match rng.index(6) {
                0 => add(ram.info()),
                1 => ClientToKeeper::RemoveRegion(Hva(rng.index(1 << 20) as u64)),
                2 => ClientToKeeper::Pin("p".repeat(rng.index(300))),
                3 => ClientToKeeper::MayPin,
                _ => ClientToKeeper::Attach(wire::Attach {
                    resume: [None, Some(wire::VmId([7; 16]))][rng.index(2)],
                    stores: files_of(&stores[..rng.index(stores.len() + 1)]),
                    files: [1, 1, 2, 0, 200][rng.index(5)],
                    shards: [1, 1, 0, 2, 9, 255][rng.index(6)],
                    ..client.message(regions)
                }),
            };
            let mut bytes = wire::encode(&message);
            for _ in 0..rng.index(3) {
                let at = rng.index(bytes.len());
                bytes[at] = rng.index(256) as u8;
            }
            bytes.truncate(if rng.index(8) == 0 { rng.index(bytes.len() + 1) } else { bytes.len() });
            let zoo = zoo(&escrow);
            let right = client.descriptors(&[&ram, &other]);
            let fds: Vec<BorrowedFd<'_>> = match rng.index(3) {
                // The first few of the right descriptors.
                0 => right[..rng.index(right.len() + 1)].to_vec(),
                1 => {
                    let mut fds = right;
                    let at = rng.index(fds.len());
                    fds[at] = zoo[rng.index(zoo.len())].as_fd();
                    fds
                }
                _ => (0..rng.index(scm::MAX_FDS + 1)).map(|_| zoo[rng.index(zoo.len())].as_fd()).collect(),
            };
            if scm::send(&socket, &bytes, &fds).is_err() {
                break;
            }
            if rng.index(2) == 0 && hear(&socket).is_none() {
                break;
            }
        }
    }
    assert_eq!((daemon.keeper_pid(), daemon.engine_pid()), (keeper, Some(engine)), "{}", daemon.log());
    let mut good = attached(&daemon, "good", &[&ram]);
    assert_eq!(daemon.vm("good").size_bytes, 64 * 4096);
    good.hang_up();
    until("the VM is forgotten", || daemon.api.vms().is_ok_and(|vms| vms.is_empty()));
    until("the keeper has closed everything", || descriptors(keeper) <= before[0]);
    until("the engine has closed everything", || descriptors(engine) <= before[1]);
}

#[test]
fn wrong_too_many_or_duplicate_userfaultfds_are_refused() {
    let Some(daemon) = Daemon::with_uffd("") else { return };
    let before = descriptors(daemon.keeper_pid());
    let ram = Ram::new(16);
    let of = |uffds: Vec<Uffd>| {
        let mut client = RawClient::new(&daemon.attach_socket(), "web");
        client.uffds = uffds;
        client
    };
    let made = |count: usize| (0..count).map(|_| userfaultfd()).collect::<Vec<Uffd>>();
    let twice = {
        let mut uffds = made(2);
        uffds.push(uffds[0].try_clone().expect("dup"));
        uffds
    };
    let (packets, _other) = scm::pair().expect("pair");
    let wrong = [
        (of(Vec::new()), "0 userfaultfds announced"),
        (of(made(MAX_SHARDS + 1)), "9 userfaultfds announced"),
        (of(twice), "descriptor 3 is a userfaultfd that came before"),
        (of(vec![userfaultfd(), packets.into()]), "descriptor 2 is"),
    ];
    for (mut client, why) in wrong {
        let answer = client.attach(&[&ram]);
        assert!(matches!(&answer, Some(KeeperToClient::Refused(text)) if text.contains(why)), "{why}: {answer:?}");
    }
    // Fewer descriptors than announced, and more.
    for (shards, count) in [(3, 2), (1, 2)] {
        let client = of(made(count));
        let message = wire::Attach { shards, ..client.message(vec![ram.info()]) };
        let answer = say(&daemon, &client, message, &[&ram]);
        assert!(matches!(&answer, KeeperToClient::Refused(why) if why.contains("descriptors came")), "{answer:?}");
    }
    let mut most = of(made(MAX_SHARDS));
    assert!(attaches(&mut most, &[&ram]), "{}", daemon.log());
    until("it is served", || daemon.api.vm("web").is_ok_and(|vm| vm.status == VmStatus::Running));
    most.hang_up();
    until("the keeper has closed everything", || descriptors(daemon.keeper_pid()) <= before);
}

#[test]
fn a_client_that_returns_with_its_userfaultfds_reordered_loses_only_its_limit() {
    let Some(daemon) = Daemon::with_uffd("quarantine_ms = 5\n") else { return };
    let ram = Ram::new(16 << 10);
    ram.mark();
    let mut client = RawClient::new(&daemon.attach_socket(), "confused");
    client.uffds.push(userfaultfd());
    assert!(attaches(&mut client, &[&ram]), "{}", daemon.log());
    until("it is served", || daemon.api.vm("confused").is_ok());
    // It answers no zap, so nothing is evicted; memory is registered before a zap.
    daemon.api.set_limit("confused", Some(1 << 20)).expect("limit");
    until("memory is registered", || daemon.vm("confused").registered_bytes > 0);
    client.hang_up();
    client.uffds.reverse();
    until("it is attached again", || attaches(&mut client, &[&ram]));
    until("the kernel refuses the other userfaultfd", || !daemon.events("view-incomplete").is_empty());
    until("nothing is taken", || daemon.api.vm("confused").is_ok_and(|vm| vm.status == VmStatus::Blocked));
    let other = Ram::new(16);
    drop(attached(&daemon, "good", &[&other]));
}

#[test]
fn a_client_that_does_not_read_is_answered_in_turn_and_hung_up_on_for_garbage() {
    let Some(daemon) = Daemon::with_uffd("") else { return };
    let ram = Ram::new(16);
    let greedy = attached(&daemon, "greedy", &[&ram]);
    for _ in 0..50 {
        greedy.send(&ClientToKeeper::MayPin);
    }
    for _ in 0..50 {
        assert_eq!(greedy.hear(), Some(KeeperToClient::Ok));
    }
    let mad = connect(&daemon.attach_socket()).expect("connect");
    let mut refused = 0;
    while scm::send(&mad, b"nonsense", &[]).is_ok() && hear(&mad).is_some() {
        refused += 1;
        assert!(refused < 1000, "it may talk nonsense for ever");
    }
    assert!(refused > 0 && greedy.ask(&ClientToKeeper::MayPin, &[]) == Some(KeeperToClient::Ok));
}

#[test]
fn a_vmm_that_plugs_ram_too_often_is_refused_each_time_and_never_hung_up_on() {
    let Some(daemon) = Daemon::with_uffd("") else { return };
    let (ram, plugged) = (Ram::new(16), Ram::new(16));
    let vmm = attached(&daemon, "web", &[&ram]);
    let plug = || vmm.ask(&add(plugged.info()), &[plugged.fd.as_fd()]);
    for _ in 1..MAX_REGIONS {
        assert_eq!(plug(), Some(KeeperToClient::Ok), "{}", daemon.log());
        let unplug = ClientToKeeper::RemoveRegion(plugged.info().span.hva);
        assert_eq!(vmm.ask(&unplug, &[]), Some(KeeperToClient::Ok), "{}", daemon.log());
    }
    for _ in 0..3 * MAX_REGIONS {
        assert!(matches!(plug(), Some(KeeperToClient::Refused(_))), "{}", daemon.log());
    }
    assert_eq!(vmm.ask(&ClientToKeeper::MayPin, &[]), Some(KeeperToClient::Ok));
}

#[test]
fn a_keeper_without_descriptors_left_serves_again_when_there_are_some() {
    if no_uffd() {
        return;
    }
    let daemon = Daemon::start_within("", Some(48));
    let mut idle = Vec::new();
    // More than the keeper can hold; the rest waits in the queue of the listening socket.
    for _ in 0..60 {
        idle.push(connect(&daemon.attach_socket()).expect("connect"));
    }
    until("it has run out", || daemon.log().contains("Accepting a client"));
    drop(idle);
    let ram = Ram::new(16);
    attached(&daemon, "good", &[&ram]);
}

/// A second process of the VM: this program, run again, with RAM of the first process.
struct Second {
    child: Child,
    says: BufReader<std::process::ChildStdout>,
}

fn path_of(ram: &Ram) -> String {
    format!("/proc/{}/fd/{}", std::process::id(), ram.fd.as_raw_fd())
}

impl Second {
    fn start(daemon: &Daemon, name: &str, ram: &Ram) -> Self {
        Self::start_with(daemon, name, ram, None)
    }

    /// A process that also maps RAM with which it does not attach.
    fn start_with(daemon: &Daemon, name: &str, ram: &Ram, more: Option<&Ram>) -> Self {
        let mut program = Command::new(std::env::current_exe().expect("this program"));
        program.envs(more.map(|more| ("BALLAST_TEST_MORE", path_of(more))));
        Self::start_by(program, daemon, name, ram)
    }

    /// A process that announces the RAM where nothing is mapped.
    fn start_that_lies(daemon: &Daemon, name: &str, ram: &Ram) -> Self {
        let mut program = Command::new(std::env::current_exe().expect("this program"));
        program.env("BALLAST_TEST_LIES", "1");
        Self::start_by(program, daemon, name, ram)
    }

    fn start_by(mut program: Command, daemon: &Daemon, name: &str, ram: &Ram) -> Self {
        let _forks = may_fork();
        let mut child = program
            .args(["--exact", "second_process", "--ignored", "--nocapture"])
            .env("BALLAST_TEST_RAM", path_of(ram))
            .env("BALLAST_TEST_SOCKET", daemon.attach_socket())
            .env("BALLAST_TEST_NAME", name)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("run this program again");
        let says = BufReader::new(child.stdout.take().expect("piped"));
        Self { child, says }
    }

    fn attach(&mut self) -> String {
        self.ask();
        self.hear("answer: ")
    }

    fn ask(&mut self) {
        self.child.stdin.as_ref().expect("piped").write_all(b"attach\n").expect("it lives");
        self.hear("asked");
    }

    fn hear(&mut self, word: &str) -> String {
        let mut line = String::new();
        while !line.contains(word) {
            line.clear();
            assert!(self.says.read_line(&mut line).expect("read") > 0, "the second process ended");
        }
        line
    }

    fn has_more_to_say(&self) -> bool {
        let mut fds = [PollFd::new(self.says.get_ref(), PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        !self.says.buffer().is_empty() || poll(&mut fds, Some(&now)).expect("poll") > 0
    }
}

impl Drop for Second {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
#[ignore = "run by tests that need a second process"]
fn second_process() {
    let [Ok(ram), Ok(socket), Ok(name)] =
        ["BALLAST_TEST_RAM", "BALLAST_TEST_SOCKET", "BALLAST_TEST_NAME"].map(std::env::var)
    else {
        return;
    };
    let open = |path| Ram::of(std::fs::File::options().read(true).write(true).open(path).expect("open it").into());
    let ram = open(ram);
    let _more = std::env::var("BALLAST_TEST_MORE").ok().map(open);
    let mut client = RawClient::new(Path::new(&socket), &name);
    let mut info = ram.info();
    if std::env::var_os("BALLAST_TEST_LIES").is_some() {
        info.span.hva = Hva(1 << 30);
    }
    for line in std::io::stdin().lines() {
        assert_eq!(line.expect("a line"), "attach");
        client.hang_up();
        let mut socket = client.ask_to_attach_at(vec![info.clone()], &[&ram]);
        println!("asked");
        let answer = loop {
            let answer = socket.and_then(|socket| client.hear_of_attach(socket));
            if !matches!(answer, Some(KeeperToClient::Later(_))) {
                break answer;
            }
            socket = client.ask_to_attach_at(vec![info.clone()], &[&ram]);
        };
        println!("answer: {answer:?}");
    }
}

#[test]
fn a_process_of_a_vm_that_maps_more_of_it_than_it_attached_with_holds_the_vm() {
    let Some(daemon) = Daemon::with_uffd("") else { return };
    let (a, b) = (Ram::new(512), Ram::new(512));
    let _vmm = attached(&daemon, "web", &[&a, &b]);
    daemon.api.set_limit("web", Some(4 << 20)).expect("the limit");
    // The second process may touch far pages of the second region, where it has no userfaultfd.
    let mut second = Second::start_with(&daemon, "web", &a, Some(&b));
    assert!(second.attach().contains("Attached"));
    let pid = second.child.id();
    let says_so = |reason: String| reason.contains(&format!("process {pid} ")) && reason.contains("not served in");
    let reason = || daemon.vm("web").status_reason.unwrap_or_default();
    until("it is held for that process", || says_so(reason()));
    drop(second);
    until("it is released", || daemon.vm("web").status == VmStatus::Running);
}

#[test]
fn ram_unplugged_by_one_process_is_gone_when_the_other_one_that_had_it_ends() {
    let Some(daemon) = Daemon::with_uffd("") else { return };
    let (a, b) = (Ram::new(16), Ram::new(32));
    let vmm = attached(&daemon, "web", &[&a, &b]);
    let mut second = Second::start(&daemon, "web", &b);
    assert!(second.attach().contains("Attached"));
    let answer = vmm.ask(&ClientToKeeper::RemoveRegion(b.info().span.hva), &[]);
    assert_eq!(answer, Some(KeeperToClient::Ok));
    assert_eq!(daemon.vm("web").regions.len(), 2, "the second process has it");
    drop(second);
    until("the region is gone", || daemon.vm("web").regions.len() == 1);
    let (keeper, engine) = (daemon.keeper_pid(), daemon.engine_pid().expect("an engine"));
    for pid in [engine, keeper] {
        let inode = memfd::file_id(&b.fd).expect("stat").ino;
        let has = |path: &String| {
            std::fs::metadata(path).is_ok_and(|file| std::os::unix::fs::MetadataExt::ino(&file) == inode)
        };
        until("and nobody has its file", || !files(pid, "guest-ram").iter().any(has));
    }
}

#[test]
fn one_limit_for_many_unknown_vms_is_answered_within_the_time_of_a_request() {
    let daemon = Daemon::start("");
    // Each VM could attach at any moment, so the engine waits a second for all of them together.
    let names: Vec<String> = (0..30).map(|number| format!("nobody-{number}")).collect();
    let client = ballast_api::Client::new(daemon.dir().join("api.sock")).expect("a client");
    let changes = client.set_limits(&LimitsPatch { vms: Some(names), limit_bytes: None }).expect("an answer in time");
    assert_eq!(changes.iter().filter(|change| change.problem.is_some()).count(), 30);
}

#[test]
fn a_vm_for_whose_descriptors_the_engine_had_no_place_is_given_to_it_again() {
    let Some(daemon) = Daemon::with_uffd("") else { return };
    let engine = daemon.engine_pid().expect("an engine runs");
    // The engine's lowest three descriptors are open, and it can open no other.
    assert!(limit_descriptors(engine, "3"));
    let ram = Ram::new(16);
    let mut client = RawClient::new(&daemon.attach_socket(), "web");
    assert!(attaches(&mut client, &[&ram]), "the keeper takes it: {}", daemon.log());
    until("the engine has lost them", || daemon.log().contains("its descriptors did not come"));
    assert!(limit_descriptors(engine, "1024"));
    until("it is served", || daemon.api.vm("web").is_ok());
    assert_eq!(daemon.engine_pid(), Some(engine), "by the same engine");
}

#[test]
fn a_keeper_whose_descriptor_limit_is_lowered_too_far_raises_it_and_continues() {
    let Some(daemon) = Daemon::with_uffd("") else { return };
    let keeper = daemon.keeper_pid();
    daemon.engine_pid().expect("an engine runs");
    assert!(limit_descriptors(keeper, "2"));
    until("it has raised the limit", || {
        let limits = std::fs::read_to_string(format!("/proc/{keeper}/limits")).expect("its limits");
        let files = limits.lines().find(|line| line.starts_with("Max open files")).expect("a line");
        files.split_whitespace().nth(3).is_some_and(|soft| soft != "2")
    });
    let ram = Ram::new(16);
    let mut client = RawClient::new(&daemon.attach_socket(), "web");
    assert!(attaches(&mut client, &[&ram]), "the keeper takes it: {}", daemon.log());
}

fn next_keeper(daemon: &mut Daemon) {
    daemon.kill_keeper();
    daemon.restart_keeper();
    until("the keeper listens", || connect(&daemon.attach_socket()).is_some());
}

/// Waits until the keeper has handled all earlier messages: after two answers it has served every client.
fn has_heard(daemon: &Daemon) {
    let socket = connect(&daemon.attach_socket()).expect("connect");
    let ram = Ram::new(16);
    for _ in 0..2 {
        let nonsense = wire::encode(&add(ram.info()));
        scm::send(&socket, &nonsense, &[ram.fd.as_fd()]).expect("send");
        assert!(matches!(hear(&socket), Some((KeeperToClient::Refused(_), _))), "it has not attached");
    }
}

/// A VM of two regions under its next keeper, which waits: a process that maps only the first has returned, but not the
/// process that maps both.
fn half_back(daemon: &mut Daemon, a: &Ram, b: &Ram) -> (RawClient, Second) {
    let mut vmm = attached(daemon, "web", &[a, b]);
    let mut second = Second::start(daemon, "web", a);
    assert!(second.attach().contains("Attached"));
    next_keeper(daemon);
    vmm.hang_up();
    assert!(second.attach().contains("Attached"), "what it touches is registered: {}", daemon.log());
    (vmm, second)
}

#[test]
fn processes_of_one_vm_return_in_any_order_each_with_the_regions_it_maps() {
    let Some(mut daemon) = Daemon::with_uffd("") else { return };
    let (a, b, plugged) = (Ram::new(16), Ram::new(32), Ram::new(64));
    let mut vmm = attached(&daemon, "web", &[&a, &b]);
    let mut second = Second::start(&daemon, "web", &a);
    assert!(second.attach().contains("Attached"));
    let id = daemon.vm("web").id;

    next_keeper(&mut daemon);
    vmm.hang_up();
    // The second process maps only one of the regions, and comes first.
    assert!(second.attach().contains("Attached"), "{}", daemon.log());
    assert!(attaches(&mut vmm, &[&a, &b, &plugged]), "{}", daemon.log());
    until("the VM runs", || daemon.api.vm("web").is_ok_and(|vm| vm.status == VmStatus::Running));
    let vm = daemon.vm("web");
    assert_eq!(vm.id, id);
    let sizes: Vec<u64> = vm.regions.iter().map(|region| region.size_bytes / 4096).collect();
    assert_eq!(sizes, [16, 32, 64], "no region was given up, and the new one is there: {vm:?}");

    // In the other order, with an engine that has the VM when the second process comes.
    next_keeper(&mut daemon);
    assert!(attaches(&mut vmm, &[&a, &b, &plugged]), "{}", daemon.log());
    until("the VM is served", || daemon.api.vm("web").is_ok());
    assert!(second.attach().contains("Attached"), "{}", daemon.log());
    assert_eq!(daemon.vm("web").regions.len(), 3);
}

#[test]
fn a_process_that_joins_a_vm_gets_its_answer_only_once_its_faults_are_served() {
    let Some(daemon) = Daemon::with_uffd("") else { return };
    let (ram, other) = (Ram::new(16), Ram::new(16));
    let _vmm = attached(&daemon, "web", &[&ram]);
    let mut second = Second::start(&daemon, "web", &ram);
    let engine = daemon.engine_pid().expect("an engine runs");
    stop_process(engine);
    second.ask();
    has_heard(&daemon);
    assert!(!second.has_more_to_say(), "the engine cannot have seen it");
    assert!(attaches(&mut RawClient::new(&daemon.attach_socket(), "other"), &[&other]));
    signal_process(engine, Signal::CONT);
    assert!(second.hear("answer: ").contains("Attached"), "{}", daemon.log());
}

#[test]
fn a_process_that_joins_a_vm_and_cannot_be_served_is_answered_once_no_page_is_far() {
    const PAGES: u64 = 16384;
    let Some(daemon) = Daemon::with_uffd("quarantine_ms = 100\n") else { return };
    let ram = Ram::new(PAGES);
    ram.mark();
    let _client = ram.vm(&daemon, "web").limit(1 << 20).attach().expect("attach");
    until("most pages are far", || daemon.api.vm("web").is_ok_and(|vm| vm.far_bytes > (PAGES - 512) * 4096));
    let mut second = Second::start_that_lies(&daemon, "web", &ram);
    assert!(second.attach().contains("Attached"), "{}", daemon.log());
    let vm = daemon.vm("web");
    assert_eq!((vm.far_bytes, vm.resident_bytes, vm.status), (0, PAGES * 4096, VmStatus::Blocked), "{vm:?}");
    assert!(!daemon.events("view-incomplete").is_empty(), "{}", daemon.log());
}

#[test]
fn a_process_that_joins_a_vm_that_waits_for_regions_is_answered_later() {
    let Some(mut daemon) = Daemon::with_uffd("") else { return };
    let (a, b) = (Ram::new(16), Ram::new(32));
    let (mut vmm, _second) = half_back(&mut daemon, &a, &b);
    // This process was not part of the VM, so its memory is not either.
    let mut third = Second::start(&daemon, "web", &a);
    third.ask();
    has_heard(&daemon);
    assert!(!third.has_more_to_say(), "nobody serves the VM yet");
    assert!(attaches(&mut vmm, &[&a, &b]), "{}", daemon.log());
    assert!(third.hear("answer: ").contains("Attached"), "{}", daemon.log());
    assert_eq!(daemon.vm("web").regions.len(), 2);
}

#[test]
fn a_process_that_brings_a_missing_region_joins_the_vm_once_that_has_it() {
    let Some(mut daemon) = Daemon::with_uffd("") else { return };
    let (a, b) = (Ram::new(16), Ram::new(32));
    let (mut vmm, _second) = half_back(&mut daemon, &a, &b);
    let id = vmm.escrow.as_ref().map(|(vm, ..)| vm.to_string()).expect("it was attached");
    let mut third = Second::start(&daemon, "other", &b);
    assert!(third.attach().contains("Attached"), "{}", daemon.log());
    assert!(attaches(&mut vmm, &[&a, &b]), "{}", daemon.log());
    until("the VM is served", || daemon.api.vm("web").is_ok());
    assert_eq!((daemon.vm("web").id, daemon.api.vms().expect("VMs").len()), (id, 1));
}

#[test]
fn a_cut_attach_socket_is_a_pause_and_the_engine_opens_the_vm_again() {
    let Some(daemon) = Daemon::with_uffd("") else { return };
    let engine = daemon.engine_pid();
    let ram = Ram::new(16);
    let mut vmm = attached(&daemon, "web", &[&ram]);
    let id = vmm.escrow.as_ref().expect("escrow").0;
    for _ in 0..30 {
        vmm.hang_up();
        until("it is attached again", || attaches(&mut vmm, &[&ram]));
        assert_eq!(vmm.escrow.as_ref().expect("escrow").0, id);
    }
    until("it is served", || daemon.api.vm("web").is_ok_and(|vm| vm.status == VmStatus::Running));
    assert_eq!(daemon.engine_pid(), engine, "{}", daemon.log());
    assert!(!daemon.log().contains("ERROR"), "{}", daemon.log());
}

#[test]
fn a_region_that_was_unplugged_while_no_keeper_ran_is_not_waited_for() {
    let Some(mut daemon) = Daemon::with_uffd("") else { return };
    let (a, b) = (Ram::new(16), Ram::new(32));
    let mut vmm = attached(&daemon, "web", &[&a, &b]);
    daemon.kill_keeper();
    drop(b);
    daemon.restart_keeper();
    until("the keeper listens", || connect(&daemon.attach_socket()).is_some());
    assert!(attaches(&mut vmm, &[&a]), "{}", daemon.log());
    until("the VM is served", || daemon.api.vm("web").is_ok());
    assert_eq!(daemon.vm("web").size_bytes, 16 * 4096);
    // The memory may be plugged again, as a new region.
    let again = Ram::new(8);
    let answer = vmm.ask(&add(again.info()), &[again.fd.as_fd()]);
    assert_eq!(answer, Some(KeeperToClient::Ok));
    until("it is part of the VM", || daemon.vm("web").size_bytes == 24 * 4096);
}

#[test]
fn one_region_too_many_or_a_duplicate_is_refused_and_the_vm_stays() {
    let Some(daemon) = Daemon::with_uffd("") else { return };
    let ram = Ram::new(16);
    let vmm = attached(&daemon, "web", &[&ram]);
    let twice = vmm.ask(&add(ram.info()), &[ram.fd.as_fd()]);
    assert!(matches!(twice, Some(KeeperToClient::Refused(_))), "{twice:?}");
    let more: Vec<Ram> = (0..MAX_REGIONS as u64).map(|_| Ram::new(1)).collect();
    let answers: Vec<bool> =
        more.iter().map(|ram| vmm.ask(&add(ram.info()), &[ram.fd.as_fd()]) == Some(KeeperToClient::Ok)).collect();
    assert_eq!(answers.iter().filter(|added| **added).count(), MAX_REGIONS - 1);
    assert!(!answers[MAX_REGIONS - 1]);
    let why = format!("{MAX_FILES} are allowed");
    until("operators are told", || daemon.events("ram-unmanaged").iter().any(|event| event.message.contains(&why)));
    let far = RegionInfo { span: Span { hva: Hva(u64::MAX - 4095), len: Bytes(4096) }, ..ram.info() };
    let outside = vmm.ask(&add(far), &[ram.fd.as_fd()]);
    assert!(matches!(outside, Some(KeeperToClient::Refused(_))), "{outside:?}");
    until("the VM has them all", || daemon.vm("web").regions.len() == MAX_REGIONS);
}
