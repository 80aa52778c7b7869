//! Test against the real kernel, which first wakes waiters and then unregisters: memory that is unregistered while
//! threads touch it leaves none of them waiting. Needs userfaultfd.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ballast_base::{Bytes, Hva, PAGE_SIZE};
use ballast_sys::uffd::REQUIRED_FEATURES;
use ballast_sys::{Mapping, Uffd, memfd};
use ballast_testkit::skip;

const PAGES: usize = 64;
const LEN: u64 = (PAGES * PAGE_SIZE) as u64;
/// Duration of the test. The race window is some hundred nanoseconds, or longer if the thread is preempted.
const SPAN: Duration = Duration::from_secs(5);

#[test]
fn a_thread_that_touches_memory_while_it_is_unregistered_goes_on() {
    // Two threads touch page after page, while memory is registered, unmapped and unregistered repeatedly. No thread
    // serves their faults, so only the unregistering can end a wait.
    let Ok((uffd, _)) = Uffd::create(REQUIRED_FEATURES) else {
        return skip("uffd", "no userfaultfd for this user");
    };
    let fd = memfd::create("ballast-test", Bytes(LEN)).expect("memfd");
    let map = Mapping::shared(&fd, 0, LEN as usize).expect("map");
    map.populate(0, map.len()).expect("populate");
    let start = Hva(map.addr() as u64);
    let done = AtomicBool::new(false);
    let touched = [AtomicU64::new(0), AtomicU64::new(0)];
    let counts = || touched.each_ref().map(|touched| touched.load(Ordering::Relaxed));
    let left_waiting = std::thread::scope(|scope| {
        for touched in &touched {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    let page = touched.fetch_add(1, Ordering::Relaxed) as usize % PAGES;
                    map.words(page * PAGE_SIZE, 1)[0].load(Ordering::Relaxed);
                }
            });
        }
        let round = || {
            uffd.register(start, LEN).expect("register");
            map.zap(0, map.len()).expect("zap");
            // In two steps: the race window is longer if the kernel has to split a mapping.
            uffd.unregister(start, LEN / 2).expect("unregister");
            uffd.unregister(start + LEN / 2, LEN / 2).expect("unregister");
            let (before, since) = (counts(), Instant::now());
            while counts().iter().zip(before).any(|(now, before)| *now == before) {
                if since.elapsed() > Duration::from_mins(1) {
                    return true;
                }
                std::thread::yield_now();
            }
            false
        };
        let (began, mut rounds) = (Instant::now(), 0);
        let mut left_waiting = None;
        while left_waiting.is_none() && began.elapsed() < SPAN {
            left_waiting = round().then_some(rounds);
            rounds += 1;
        }
        done.store(true, Ordering::Relaxed);
        // The threads must end, whatever the result is.
        uffd.wake(start, LEN).expect("wake");
        left_waiting
    });
    assert_eq!(left_waiting, None, "a thread waits for memory that was given back in this round");
}
