//! The other end of an agent's channel, played by a test. This process is the VMM: it maps the guest RAM and listens on
//! the socket of the port. There is one such VM at a time, because it is large.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use ballast_api::AgentStat;
use ballast_base::{Bytes, GIB, Hva, PAGE_SIZE};
use ballast_client::{AgentPort, Client, GuestRange};
use ballast_messages::frame::Next;
use ballast_messages::message::{NONCE, Tick, Tracking};
use ballast_messages::{Frames, Kind, Run, ToGuest, ToHost};
use ballast_sys::lock::Lock;

use super::raw::Ram;
use super::{Daemon, until};

pub const PAGES: u64 = 16 << 10;
/// The guest's page number of the second half of its memory.
pub const HIGH: u64 = GIB / PAGE_SIZE as u64;

pub fn one_at_a_time() -> MutexGuard<'static, ()> {
    static PORT: Mutex<()> = Mutex::new(());
    PORT.locked()
}

pub struct Port {
    listener: UnixListener,
    pub dir: tempfile::TempDir,
}

impl Port {
    pub fn new() -> Self {
        let private = std::fs::Permissions::from_mode(0o700);
        let dir = tempfile::Builder::new().permissions(private).tempdir().expect("a folder");
        let listener = UnixListener::bind(dir.path().join("agent.sock")).expect("bind");
        Self { listener, dir }
    }

    pub fn for_client(&self) -> AgentPort {
        AgentPort::Listening(self.dir.path().join("agent.sock"))
    }
}

/// A VM of this process with marked pages, whose guest sees its memory in two pieces.
pub fn attach(daemon: &Daemon, port: &Port, ram: &Ram, name: &str) -> Client {
    ram.mark();
    let client = ram.vm(daemon, name).agent_port(port.for_client()).attach().expect("attach");
    let half = Bytes(PAGES / 2 * PAGE_SIZE as u64);
    let low = GuestRange { address: 0, offset: Bytes(0), len: half };
    let high = GuestRange { address: HIGH * PAGE_SIZE as u64, offset: half, len: half };
    client.set_guest_ranges(Hva(ram.map.addr() as u64), &[low, high]).expect("where the guest sees it");
    // The keeper has replied, but the engine may still be opening the VM.
    daemon.vm(name);
    client
}

/// Like [`attach`], with an agent that has proved its places in guest memory.
pub fn proved(daemon: &Daemon, port: &Port, ram: &Ram, name: &str) -> (Client, Fake) {
    let client = attach(daemon, port, ram, name);
    let mut fake = Fake::accept(port);
    fake.begin(ram);
    until("both pieces are proved", || agent_of(daemon, name).pieces_proved == 2);
    (client, fake)
}

pub fn seen(page: u64) -> u64 {
    if page < PAGES / 2 { page } else { HIGH + (page - PAGES / 2) }
}

pub fn run(page: u64, count: u32, level: u8) -> Run {
    Run { page, count, kind: Kind::Anon, level }
}

pub struct Fake {
    pub stream: UnixStream,
    frames: Frames,
    pub session: u64,
    reports: u32,
    ticked: Instant,
}

impl Fake {
    /// Accepts the engine's connection; the engine sends a hello.
    pub fn accept(port: &Port) -> Self {
        let (stream, _) = port.listener.accept().expect("the engine connects");
        Self::of(stream)
    }

    pub fn of(stream: UnixStream) -> Self {
        let mut fake = Self { stream, frames: Frames::default(), session: 0, reports: 0, ticked: Instant::now() };
        fake.next_session();
        fake
    }

    pub fn next_session(&mut self) {
        let old = self.session;
        while self.session == old {
            let hello = self.hear_frame().expect("a hello");
            self.session = hello.session;
            assert!(matches!(ToGuest::decode(&hello), Ok(Some(ToGuest::Hello(_)))));
        }
    }

    /// An honest beginning: the agent's hello, and the proof of its pages.
    pub fn begin(&mut self, ram: &Ram) {
        self.say(&ToHost::Hello { agent: "9.9".into(), kernel: "6.12-fake".into() });
        self.tick();
        let (nonce, pieces) = loop {
            if let Some(ToGuest::Prove { nonce, pieces }) = self.hear() {
                break (nonce, pieces);
            }
        };
        assert_eq!(pieces, [Run::of(0, PAGES as u32 / 2), Run::of(HIGH, PAGES as u32 / 2)]);
        NONCES.iter().for_each(|page| put_nonce(ram, *page, &nonce));
        self.say(&ToHost::Proof(NONCES.map(|page| Run::of(seen(page), 1)).to_vec()));
    }

    pub fn say(&mut self, message: &ToHost) {
        self.stream.write_all(&message.frame(self.session)).expect("the engine listens");
    }

    pub fn tick(&mut self) {
        self.say(&ToHost::Tick(Tick { total: PAGES, tracking: Tracking::Damon, ..Tick::default() }));
    }

    /// Sends a tick if it is time, so that the agent does not count as silent. Returns whether it was time.
    pub fn stay_alive(&mut self) -> bool {
        let is_time = self.ticked.elapsed() > Duration::from_secs(1);
        if is_time {
            self.ticked = Instant::now();
            self.tick();
        }
        is_time
    }

    pub fn report(&mut self, runs: Vec<Run>) {
        self.reports += 1;
        self.say(&ToHost::Report { number: self.reports, last: true, runs });
    }

    pub fn hear_frame(&mut self) -> Option<ballast_messages::Frame> {
        let mut buffer = [0; 4096];
        loop {
            match self.frames.next_frame() {
                Some(Next::Frame(frame)) => return Some(frame),
                Some(other) => panic!("{other:?}"),
                None => {}
            }
            match self.stream.read(&mut buffer) {
                Ok(0) => return None,
                Err(error) if matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::WouldBlock) => {
                    return None;
                }
                count => self.frames.push(&buffer[..count.expect("read")]),
            }
        }
    }

    /// The next message, if one comes within a second.
    pub fn hear_soon(&mut self) -> Option<ToGuest> {
        self.stream.set_read_timeout(Some(Duration::from_secs(1))).expect("a timeout");
        let frame = self.hear_frame();
        self.stream.set_read_timeout(None).expect("no timeout");
        frame.and_then(|frame| ToGuest::decode(&frame).expect("it speaks sense"))
    }

    pub fn hear(&mut self) -> Option<ToGuest> {
        let frame = self.hear_frame().expect("the engine is there");
        ToGuest::decode(&frame).expect("it speaks sense")
    }
}

pub fn put_nonce(ram: &Ram, page: u64, nonce: &[u8; NONCE]) {
    let words = ram.map.words(page as usize * PAGE_SIZE, NONCE / 8);
    for (word, bytes) in words.iter().zip(nonce.as_chunks().0) {
        word.store(u64::from_le_bytes(*bytes), Ordering::Relaxed);
    }
}

pub const NONCES: [u64; 2] = [PAGES / 2 - 1, PAGES - 1];

pub fn all_is_there(ram: &Ram) {
    let wrong = (0..PAGES).filter(|page| !NONCES.contains(page) && !ram.is_marked(*page)).count();
    assert_eq!(wrong, 0, "pages with wrong bytes");
}

pub fn agent_of(daemon: &Daemon, name: &str) -> AgentStat {
    daemon.vm(name).agent.unwrap_or_default()
}

pub fn no_worker_panicked(daemon: &Daemon) {
    let events = daemon.api.events().expect("events");
    let panics: Vec<_> = events.iter().filter(|event| event.kind == "worker-panic").collect();
    assert!(panics.is_empty(), "{panics:?}");
}
