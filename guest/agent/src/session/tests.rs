//! Messages that the host receives while a report is made.

use super::*;
use std::fs;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;

/// A port that is a pipe with a name, and the host's end of it.
fn port(name: &str) -> (Port, fs::File) {
    let path = std::env::temp_dir().join(format!("ballast-{name}-{}", std::process::id()));
    let text = std::ffi::CString::new(path.to_str().expect("text")).expect("no zeros");
    // SAFETY: a string that lives as long as the call.
    assert_eq!(unsafe { libc::mkfifo(text.as_ptr(), 0o600) }, 0, "{}", io::Error::last_os_error());
    let port = Port::open(path.to_str()).expect("open");
    let host = fs::OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(&path).expect("open");
    fs::remove_file(path).expect("remove");
    (port, host)
}

/// A guest in a session, without DAMON, whose next report is late.
fn guest(now: Instant) -> Guest<'static> {
    let mut guest = Guest::new(None);
    guest.source = Source::Without(now + Duration::from_secs(3600));
    guest.next_report = now + Duration::from_secs(3600);
    guest
}

#[test]
fn a_new_session_does_not_bring_a_report_forward() {
    let ((mut port, _host), now) = (port("session"), Instant::now());
    let mut guest = guest(now);
    guest.begin(1, Wanted::default(), now, &mut port);
    assert_eq!((guest.next_tick, guest.next_report), (now, now + Duration::from_secs(3600)));
}

#[test]
fn the_host_has_the_hello_and_ticks_before_the_first_report_is_made() {
    let ((mut port, mut host), now) = (port("report"), Instant::now());
    let mut guest = guest(now);
    guest.flags = Flags::open().ok();
    guest.ram = vec![(0, 1)];
    guest.begin(1, Wanted { tick_ms: 100, ..Wanted::default() }, now, &mut port);
    guest.work(&mut port);
    let mut heard = move || {
        let (mut frames, mut bytes, mut heard) = (Frames::default(), vec![0; 1 << 16], Vec::new());
        while let Ok(count @ 1..) = host.read(&mut bytes) {
            frames.push(&bytes[..count]);
        }
        while let Some(Next::Frame(frame)) = frames.next_frame() {
            heard.push(match ToHost::decode(&frame).expect("readable") {
                Some(ToHost::Hello { .. }) => "hello",
                Some(ToHost::Tick(_)) => "tick",
                Some(ToHost::Report { .. }) => "report",
                _ => "other",
            });
        }
        heard
    };
    assert_eq!(heard(), ["hello", "tick"]);
    guest.next_tick = now;
    guest.report(now, &mut port);
    assert_eq!(heard(), if guest.flags.is_some() { vec!["tick"] } else { vec![] }, "the report waits for a flush");
    assert!(guest.next_tick > now || guest.flags.is_none());
}

#[test]
fn while_the_host_does_not_read_an_agent_whose_balloon_is_to_grow_sleeps() {
    let now = Instant::now();
    let mut guest = guest(now);
    (guest.session, guest.next_tick) = (Some(1), now + Duration::from_secs(1));
    guest.balloon.want(0, 1 << 20);
    assert_eq!([false, true].map(|is_behind| guest.pause(now, is_behind).is_zero()), [true, false]);
}

#[test]
fn memory_that_was_plugged_is_found_at_the_next_report() {
    let mut guest = guest(Instant::now());
    let all = std::mem::replace(&mut guest.ram, vec![(1, 2)]);
    guest.look_for_ram();
    assert_eq!(guest.ram, all);
}
