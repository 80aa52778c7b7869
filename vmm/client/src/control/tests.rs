//! The control socket and discards, against an engine that reads, dies and replies in every order.

use super::*;
use ballast_base::Hva;
use ballast_sys::lock::Lock;
use std::sync::Arc;

const RANGE: Range = (Hva(0x10000), 4096);
/// How long a discard waits for an engine that will read it, even if the engine's thread runs late.
const LONG: Duration = Duration::from_secs(5);

fn read(pair: &Pair) -> ClientToEngine {
    let message = scm::receive(&pair.theirs).expect("receive").expect("open");
    wire::decode(&message.bytes).expect("a message")
}

fn reply_to_all(control: &ControlSocket, pair: &Pair, is_over: impl Fn() -> bool) {
    while !is_over() {
        if let Some(ClientToEngine::Discard { seq, .. }) =
            pair.take_back().first().and_then(|bytes| wire::decode(bytes).ok())
        {
            control.discard_done(seq, Ok(()));
        }
        std::thread::yield_now();
    }
}

fn connected() -> (ControlSocket, Arc<Pair>) {
    let control = ControlSocket::default();
    let pair = Arc::new(Pair::new().expect("pair"));
    control.replace(pair.clone());
    (control, pair)
}

#[test]
fn an_unread_discard_is_taken_back_and_other_messages_stay_in_order() {
    let (control, pair) = connected();
    pair.send(&ClientToEngine::Pong { seq: 71 }).expect("send");
    let error = control.discard(vec![RANGE], Duration::from_millis(300), || ()).expect_err("nobody answers");
    assert!(matches!(error, DiscardError::NoAnswer(_)));
    pair.send(&ClientToEngine::Pong { seq: 72 }).expect("send");
    assert_eq!(read(&pair), ClientToEngine::Pong { seq: 71 });
    assert_eq!(read(&pair), ClientToEngine::Pong { seq: 72 });
}

#[test]
fn a_discard_that_a_dead_engine_read_is_answered_by_the_next_engine() {
    let (control, pair) = connected();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| control.discard(vec![RANGE], LONG, || ()));
        // The first engine dies after it read the message, and does not reply.
        let ClientToEngine::Discard { seq: first, .. } = read(&pair) else { panic!("not a discard") };
        let ClientToEngine::Discard { seq: second, ranges } = read(&pair) else { panic!("not a discard") };
        assert_eq!(ranges, [RANGE]);
        control.discard_done(first, Ok(()));
        assert!(second > first);
        control.discard_done(second, Ok(()));
        reply_to_all(&control, &pair, || waiting.is_finished());
        waiting.join().expect("no panic").expect("answered in the end");
    });
}

#[test]
fn a_reply_counts_if_no_later_copy_was_read_and_the_later_copies_are_taken_back() {
    let (control, pair) = connected();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| control.discard(vec![RANGE], LONG, || ()));
        let ClientToEngine::Discard { seq, .. } = read(&pair) else { panic!("not a discard") };
        // The engine takes longer than the time between copies.
        let peek = rustix::net::RecvFlags::DONTWAIT | rustix::net::RecvFlags::PEEK;
        while rustix::net::recv(&pair.theirs, &mut [0_u8; 64][..], peek).is_err() {
            std::thread::yield_now();
        }
        control.discard_done(seq, Ok(()));
        waiting.join().expect("no panic").expect("it is over");
        assert!(pair.take_back().is_empty(), "a copy is left to be read");
    });
}

#[test]
fn a_repeated_copy_is_not_overtaken_by_the_reply_to_a_later_one() {
    let (control, pair) = connected();
    let mut state = control.state.locked();
    let [first, second] = [RANGE, (Hva(0x20000), 4096)].map(|range| state.add_waiter(vec![range]));
    state.send_copy(first);
    let ClientToEngine::Discard { .. } = read(&pair) else { panic!("not a discard") };
    [second, first, second].into_iter().for_each(|id| state.send_copy(id));
    // The first waiter's copies are taken back, while an engine reads the ones behind them.
    let bytes = || scm::receive(&pair.theirs).expect("receive").expect("open").bytes;
    let taken = vec![bytes(), bytes()];
    let ClientToEngine::Discard { seq, .. } = read(&pair) else { panic!("not a discard") };
    state.settle(first, taken);
    drop(state);
    control.discard_done(seq, Ok(()));
    let state = control.state.locked();
    let is_done = state.waiters.iter().any(|waiter| waiter.id == second && waiter.done.is_some());
    assert!(is_done, "no later copy is left to be read");
    assert!(pair.take_back().is_empty(), "a discard that is over would take effect");
}

#[test]
fn a_discard_read_before_the_socket_was_replaced_is_not_reported_as_failed() {
    use std::sync::atomic::{AtomicBool, Ordering};
    let (control, old) = connected();
    let is_announced = AtomicBool::new(false);
    let announced = &is_announced;
    std::thread::scope(|scope| {
        let announce = || announced.store(true, Ordering::Release);
        let control = &control;
        let waiting = scope.spawn(move || control.discard(vec![RANGE], LONG, announce));
        read(&old);
        let new = Arc::new(Pair::new().expect("pair"));
        control.replace(new.clone());
        while !announced.load(Ordering::Acquire) {
            assert!(!waiting.is_finished(), "nobody knows its result");
            std::thread::yield_now();
        }
        reply_to_all(control, &new, || waiting.is_finished());
        waiting.join().expect("no panic").expect("answered on the new socket");
    });
}

#[test]
fn the_announcement_of_a_waiting_discard_does_not_block_the_socket() {
    let (control, pair) = connected();
    std::thread::scope(|scope| {
        let (control, pair) = (&control, &pair);
        let (said, heard) = std::sync::mpsc::channel();
        let announce = move || {
            // Like the service thread in each of its turns.
            std::thread::scope(|scope| scope.spawn(|| control.pair()).join()).expect("no panic").expect("a pair");
            let _ = said.send(());
        };
        let waiting = scope.spawn(move || control.discard(vec![RANGE], LONG, announce));
        read(pair);
        heard.recv().expect("announced");
        reply_to_all(control, pair, || waiting.is_finished());
        waiting.join().expect("no panic").expect("answered in the end");
    });
}

#[test]
fn a_discard_with_a_reply_is_not_sent_on_a_new_socket() {
    let (control, old) = connected();
    let mut state = control.state.locked();
    let id = state.add_waiter(vec![RANGE]);
    state.send_copy(id);
    drop(state);
    let ClientToEngine::Discard { seq, .. } = read(&old) else { panic!("not a discard") };
    control.discard_done(seq, Ok(()));
    // The waiter's thread does not run between the reply and the new socket.
    let new = Arc::new(Pair::new().expect("pair"));
    control.replace(new.clone());
    assert!(new.take_back().is_empty(), "it would take effect after the reply");
}

#[test]
fn no_discard_that_failed_was_ever_read_by_an_engine() {
    use std::collections::HashSet;
    use std::sync::atomic::{AtomicBool, Ordering};
    const DISCARDS: u64 = 300;
    let (control, pair) = connected();
    let over = AtomicBool::new(false);
    let (read, failed) = std::thread::scope(|scope| {
        let engine = scope.spawn(|| {
            let mut read = HashSet::new();
            let mut random = 0x9E37_79B9_7F4A_7C15_u64;
            while !over.load(Ordering::Relaxed) {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                // The engine is absent for longer or shorter than the discards wait, so both orders occur.
                std::thread::sleep(Duration::from_micros(random >> 51));
                let mut buffer = vec![0; scm::MAX_MESSAGE];
                let got = rustix::net::recv(&pair.theirs, buffer.as_mut_slice(), rustix::net::RecvFlags::DONTWAIT);
                let Ok((len, _)) = got else { continue };
                let Ok(ClientToEngine::Discard { seq, ranges }) = wire::decode(&buffer[..len]) else {
                    panic!("not a discard");
                };
                read.insert(ranges[0].0.0);
                // In one of eight cases the engine dies before it replies.
                if random >> 40 & 7 != 0 {
                    control.discard_done(seq, Ok(()));
                }
            }
            read
        });
        let vmm = |first: u64| {
            let control = &control;
            move || -> Vec<u64> {
                let numbers = (first..DISCARDS).step_by(2);
                let timeout = Duration::from_millis(4);
                let failed = |number: &u64| control.discard(vec![(Hva(number * 4096), 4096)], timeout, || ()).is_err();
                numbers.filter(failed).map(|number| number * 4096).collect()
            }
        };
        let threads = [scope.spawn(vmm(0)), scope.spawn(vmm(1))];
        let failed = threads.map(|thread| thread.join().expect("no panic")).concat();
        over.store(true, Ordering::Relaxed);
        (engine.join().expect("no panic"), failed)
    });
    let wrong: Vec<_> = failed.iter().filter(|start| read.contains(start)).collect();
    assert!(wrong.is_empty(), "failed, yet read: {wrong:?}");
    eprintln!("read by engines: {}, failed: {}", read.len(), failed.len());
    assert!(!read.is_empty(), "the engine never read anything");
}
