//! The workers with servers that the test controls: input comes from eventfds, and a stuck server waits for a lock.

use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicUsize;
use std::sync::{Weak, mpsc};

use ballast_testkit::skip;
use rustix::event::{EventfdFlags, eventfd};

use super::super::queue::{Next, Queue};
use super::super::serve::{After, BATCH};
use super::super::until;
use super::*;

fn set_of(served: &Served) -> Weak<Set> {
    served.0.place().as_ref().map(Arc::downgrade).unwrap_or_default()
}

/// The part of a server that a test controls and sees.
#[derive(Default)]
struct Told {
    visits: AtomicUsize,
    input: AtomicUsize,
    visited: AtomicBool,
    thread: AtomicU32,
    ended: AtomicUsize,
    panics: AtomicUsize,
    stays_down: AtomicBool,
    roams: bool,
    /// Held by a test: visits are stuck.
    stuck: Mutex<()>,
}

struct Server<F> {
    fd: Arc<OwnedFd>,
    told: Arc<Told>,
    then: F,
}

impl<F: FnMut(&Told, Instant) -> After + Send> Serve for Server<F> {
    fn serve(&mut self, now: Instant, _until: Instant) -> After {
        let told = &self.told;
        assert!(!told.visited.swap(true, Ordering::SeqCst), "two threads at once");
        told.thread.store(this_thread(), Ordering::SeqCst);
        let mut count = [0; 8];
        if rustix::io::read(&*self.fd, &mut count).is_ok() {
            told.input.fetch_add(u64::from_ne_bytes(count) as usize, Ordering::SeqCst);
        }
        drop(told.stuck.lock().expect("no panic while held"));
        told.visits.fetch_add(1, Ordering::SeqCst);
        told.visited.store(false, Ordering::SeqCst);
        (self.then)(told, now)
    }

    fn panicked(&mut self, times: u32) -> bool {
        self.told.panics.store(times as usize, Ordering::SeqCst);
        !self.told.stays_down.load(Ordering::SeqCst)
    }

    fn end(&mut self) {
        assert!(!self.told.visited.load(Ordering::SeqCst), "it is visited");
        self.told.ended.fetch_add(1, Ordering::SeqCst);
    }

    fn roams(&self) -> bool {
        self.told.roams
    }
}

fn this_thread() -> u32 {
    rustix::thread::gettid().as_raw_pid() as u32
}

struct Client {
    told: Arc<Told>,
    fd: Arc<OwnedFd>,
    served: Served,
    notify: Notify,
}

impl Client {
    fn new(servers: &Servers, group: u64, then: impl FnMut(&Told, Instant) -> After + Send + 'static) -> Self {
        Self::over(servers, group, input_fd(), Told::default(), then)
    }

    fn over(
        servers: &Servers,
        group: u64,
        fd: Arc<OwnedFd>,
        told: Told,
        then: impl FnMut(&Told, Instant) -> After + Send + 'static,
    ) -> Self {
        let told = Arc::new(told);
        let mut given = None;
        let server = Server { fd: fd.clone(), told: told.clone(), then };
        let served = servers
            .add(group_of(group), fd.clone(), |notify| {
                given = Some(notify);
                Box::new(server)
            })
            .expect("added");
        Self { told, fd, served, notify: given.expect("given") }
    }

    /// A client that waits for input and does nothing with it.
    fn quiet(servers: &Servers, group: u64) -> Self {
        Self::new(servers, group, |_, _| After::next(Next::Idle))
    }

    fn input(&self) {
        rustix::io::write(&*self.fd, &1u64.to_ne_bytes()).expect("write");
    }

    /// Adds an input, and waits until a visit has read it.
    fn is_served(&self) {
        let before = self.told.input.load(Ordering::SeqCst);
        self.input();
        until(|| self.told.input.load(Ordering::SeqCst) > before);
    }

    fn visits(&self) -> usize {
        self.told.visits.load(Ordering::SeqCst)
    }
}

fn input_fd() -> Arc<OwnedFd> {
    Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("eventfd"))
}

fn group_of(group: u64) -> GroupId {
    let mut queue = Queue::default();
    (0..=group).map(|_| queue.add_group()).last().expect("one at least")
}

fn two_cpus(servers: &Servers) -> Option<[usize; 2]> {
    let cpus: Vec<usize> = servers.0.sets.iter().filter_map(|set| set.cpu).take(2).collect();
    let Ok(two) = cpus.try_into() else {
        skip("native", "two CPUs");
        return None;
    };
    Some(two)
}

#[test]
fn each_input_and_each_notification_is_followed_by_a_visit_until_the_close() {
    let servers = Servers::new().expect("servers");
    let clients: Vec<Client> = (0..100).map(|group| Client::quiet(&servers, group)).collect();
    assert!(servers.threads() as usize <= servers.0.sets.len(), "{servers:?}");
    for _ in 0..20 {
        clients.iter().for_each(Client::is_served);
        for client in &clients {
            let before = client.visits();
            client.notify.notify();
            until(|| client.visits() > before);
        }
    }
    for client in &clients {
        client.served.close();
        client.served.wait();
        assert_eq!(client.told.ended.load(Ordering::SeqCst), 1);
        let before = client.visits();
        client.input();
        client.notify.notify();
        client.served.close();
        assert_eq!(client.visits(), before, "it is over");
    }
    assert!(servers.0.sets.iter().all(|set| set.len() == 0));
}

#[test]
fn a_server_is_visited_at_the_time_that_it_asked_for_and_not_without_a_reason() {
    let servers = Servers::new().expect("servers");
    let timed = |told: &Told, now: Instant| match told.visits.load(Ordering::SeqCst) {
        0..10 => After::next(Next::At(now + Duration::from_millis(1))),
        _ => After::next(Next::Idle),
    };
    let (timed, quiet) = (Client::new(&servers, 0, timed), Client::quiet(&servers, 1));
    until(|| timed.visits() >= 10 && quiet.visits() >= 1);
    assert_eq!((timed.visits(), quiet.visits()), (10, 1), "the first visit is for what came before it was served");
}

#[test]
fn a_server_moves_to_the_preferred_cpu_and_loses_no_input() {
    let servers = Servers::new().expect("servers");
    let Some(cpus) = two_cpus(&servers) else { return };
    let mut turn = 0;
    let moves = Client::new(&servers, 0, move |_, _| {
        turn += 1;
        After { placement: Placement::Cpu(cpus[turn % 2]), ..After::next(Next::Idle) }
    });
    let others: Vec<Client> = (1..10).map(|group| Client::quiet(&servers, group)).collect();
    let mut threads = std::collections::HashSet::new();
    for _ in 0..2000 {
        moves.is_served();
        threads.insert(moves.told.thread.load(Ordering::SeqCst));
    }
    others.iter().for_each(Client::is_served);
    assert_eq!(threads.len(), 2, "the workers of both CPUs");
    moves.served.close();
    moves.served.wait();
    assert_eq!(moves.told.ended.load(Ordering::SeqCst), 1);
}

#[test]
fn a_server_ends_once_while_other_threads_move_notify_and_visit_it() {
    let servers = Servers::new().expect("servers");
    let Some(cpus) = two_cpus(&servers) else { return };
    for round in 0..200 {
        let mut turn = round;
        let moves = Client::new(&servers, 0, move |_, _| {
            turn += 1;
            After { placement: Placement::Cpu(cpus[turn % 2]), ..After::next(Next::Again) }
        });
        let close = || {
            (0..round % 7).for_each(|_| moves.notify.notify());
            moves.served.close();
            moves.served.wait();
        };
        std::thread::scope(|scope| {
            scope.spawn(close);
            scope.spawn(close);
        });
        assert_eq!(moves.told.ended.load(Ordering::SeqCst), 1);
    }
}

#[test]
fn more_stuck_servers_than_cpus_stop_no_other_and_rejoin_them() {
    let servers = Servers::new().expect("servers");
    let base = servers.0.sets.len() as u32;
    let stuck: Vec<Client> = (0..3 * u64::from(base)).map(|group| Client::quiet(&servers, group)).collect();
    let others: Vec<Client> = (100..110).map(|group| Client::quiet(&servers, group)).collect();
    {
        let held: Vec<_> = stuck.iter().map(|client| client.told.stuck.lock().expect("no panic")).collect();
        stuck.iter().for_each(Client::input);
        until(|| stuck.iter().all(|client| client.told.visited.load(Ordering::SeqCst)));
        for _ in 0..10 {
            others.iter().for_each(Client::is_served);
        }
        until(|| servers.threads() >= stuck.len() as u32);
        // Closing a server that is not stuck waits for none that is.
        others[0].served.close();
        others[0].served.wait();
        // A stuck server that is closed ends after its visit.
        stuck[0].served.close();
        stuck[1].notify.notify();
        assert!(!stuck[0].served.is_over() && stuck[0].told.ended.load(Ordering::SeqCst) == 0);
        drop(held);
    }
    stuck[0].served.wait();
    assert_eq!(stuck[0].told.ended.load(Ordering::SeqCst), 1);
    until(|| stuck[1].visits() >= 2);
    stuck[1..].iter().chain(&others[1..]).for_each(Client::is_served);
    until(|| servers.threads() <= base);
    stuck[1..].iter().chain(&others[1..]).for_each(Client::is_served);
    // No set apart is left.
    until(|| servers.0.sets.iter().map(|set| set.len()).sum::<usize>() == stuck.len() + others.len() - 2);
}

#[test]
fn stuck_clients_of_a_user_are_bounded_until_their_visits_end() {
    let (servers, stuck) = (Servers::new().expect("servers"), stuck::Stuck::default());
    let clients: Vec<Client> = (0..16).map(|group| Client::quiet(&servers, group)).collect();
    {
        let held: Vec<_> = clients.iter().map(|client| client.told.stuck.lock().expect("no panic")).collect();
        for client in &clients {
            assert!(!stuck.is_full(7));
            client.input();
            until(|| client.told.visited.load(Ordering::SeqCst));
            client.served.close();
            stuck.add(7, client.served.clone());
            stuck.add(0, client.served.clone());
        }
        assert!(stuck.is_full(7) && !stuck.is_full(8) && !stuck.is_full(0));
        drop(held);
    }
    clients[3].served.wait();
    assert!(!stuck.is_full(7));
}

/// Makes the client stuck until it is in a set apart. Returns that set.
fn part(servers: &Servers, client: &Client) -> std::sync::Weak<Set> {
    let base = servers.threads();
    let held = client.told.stuck.lock().expect("no panic");
    client.input();
    until(|| servers.threads() > base && set_of(&client.served).upgrade().is_some_and(|set| set.is_apart));
    drop(held);
    set_of(&client.served)
}

#[test]
fn a_stuck_server_leaves_no_thread_and_no_set_when_it_rejoins_or_is_closed() {
    let servers = Servers::new().expect("servers");
    let client = Client::quiet(&servers, 0);
    let base = servers.threads();
    let set = part(&servers, &client);
    until(|| servers.threads() <= base && set.upgrade().is_none());
    client.is_served();
    client.served.0.stuck.store(MOST_DOUBLED + 1, Ordering::Relaxed);
    let set = part(&servers, &client);
    client.is_served();
    client.served.close();
    client.served.wait();
    until(|| servers.threads() <= base && set.upgrade().is_none());
}

#[test]
fn a_roaming_server_is_never_visited_by_a_worker_of_a_cpu() {
    let servers = Servers::new().expect("servers");
    let on_cpu = Client::quiet(&servers, 0);
    on_cpu.is_served();
    let fd = input_fd();
    rustix::io::write(&*fd, &1u64.to_ne_bytes()).expect("write");
    let told = Told { roams: true, ..Told::default() };
    let first = servers.0.sets[0].cpu.expect("a CPU");
    let client = Client::over(&servers, 1, fd, told, move |_, _| After {
        placement: Placement::Cpu(first),
        ..After::next(Next::Idle)
    });
    until(|| client.visits() > 0);
    let is_roaming = || set_of(&client.served).upgrade().is_some_and(|set| set.cpu.is_none() && !set.is_apart);
    assert!(is_roaming());
    let set = part(&servers, &client);
    until(|| set.upgrade().is_none());
    client.is_served();
    assert!(is_roaming());
    let cpus = || servers.0.sets.iter().filter(|set| set.cpu.is_some());
    assert_eq!(cpus().map(|set| set.current_visit().0).sum::<u64>() as usize, on_cpu.visits());
}

#[test]
fn a_panic_affects_one_server_which_decides_whether_it_ends() {
    let servers = Servers::new().expect("servers");
    let panics = Client::new(&servers, 0, |told, _| {
        assert!(told.input.load(Ordering::SeqCst) != 1, "a bug");
        After::next(Next::Idle)
    });
    let others: Vec<Client> = (1..10).map(|group| Client::quiet(&servers, group)).collect();
    panics.input();
    until(|| panics.told.panics.load(Ordering::SeqCst) > 2);
    others.iter().for_each(Client::is_served);
    panics.told.stays_down.store(true, Ordering::SeqCst);
    panics.served.wait();
    assert_eq!(panics.told.ended.load(Ordering::SeqCst), 1);
    others.iter().for_each(Client::is_served);
    assert!(servers.threads() as usize <= servers.0.sets.len());
}

#[test]
fn a_server_that_always_has_more_to_do_starves_no_other() {
    let servers = Servers::new().expect("servers");
    // Each visit takes as long as it may.
    let flood = |_: &Told, now: Instant| {
        until(|| now.elapsed() >= BATCH);
        After::next(Next::Again)
    };
    let floods: Vec<Client> = (0..10).map(|group| Client::new(&servers, group, flood)).collect();
    let other = Client::quiet(&servers, 100);
    (0..50).for_each(|_| other.is_served());
    floods.iter().for_each(|flood| flood.served.close());
    floods.iter().for_each(|flood| flood.served.wait());
}

#[test]
fn busy_groups_are_visited_by_their_shares_within_bounds() {
    let mut queue = Queue::new(BATCH);
    let now = Instant::now();
    let shares = [0, 500, 1000, 2000, 100_000];
    let ids: Vec<TaskId> = (0..5).map(|number| TaskId::new(number + 1)).collect();
    ids.iter().for_each(|id| queue.add_as(*id, group_of(id.number())));
    let mut visits = [0; 5];
    for _ in 0..9250 {
        let id = queue.take(now).expect("all have more to do");
        let at = id.number() as usize - 1;
        visits[at] += 1;
        let after = After { shares: shares[at], ..After::next(Next::Again) };
        queue.ran(id, after.charge(BATCH), after.next);
    }
    for (visits, wanted) in visits.into_iter().zip([250i32, 500, 1000, 2000, 4000]) {
        assert!((visits - wanted * 9250 / 7750).abs() <= 8, "{visits} of {wanted}");
    }
}

#[test]
fn a_server_that_may_run_anywhere_moves_to_an_idle_worker() {
    let servers = Servers::new().expect("servers");
    let Some([first, _]) = two_cpus(&servers) else { return };
    let gathers = Arc::new(AtomicBool::new(true));
    let busy = || {
        let gathers = gathers.clone();
        move |_: &Told, now: Instant| {
            until(|| now.elapsed() >= BATCH);
            let placement = if gathers.load(Ordering::SeqCst) { Placement::Cpu(first) } else { Placement::Any };
            After { placement, ..After::next(Next::Again) }
        }
    };
    let clients: Vec<Client> = (0..2).map(|group| Client::new(&servers, group, busy())).collect();
    let on_first = || servers.0.sets.iter().find(|set| set.cpu == Some(first)).expect("a set").len();
    until(|| on_first() == 2);
    gathers.store(false, Ordering::SeqCst);
    until(|| on_first() == 1);
    clients.iter().for_each(|client| client.served.close());
    clients.iter().for_each(|client| client.served.wait());
}

/// Takes a CPU from all threads that are not real-time while it lives, except the share that the kernel reserves.
struct Hog(Arc<AtomicBool>, Option<std::thread::JoinHandle<()>>);

impl Hog {
    /// `None`, with a printed skip, where that is not permitted.
    fn on(cpu: usize) -> Option<Self> {
        let done = Arc::new(AtomicBool::new(false));
        let (say, hear) = mpsc::channel();
        let is_done = done.clone();
        let thread = std::thread::spawn(move || {
            Cpus::only(cpu).hold(0).expect("pin");
            let param = libc::sched_param { sched_priority: 1 };
            // SAFETY: of the calling thread; the kernel reads the parameter, which lives here.
            let set = unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &param) };
            say.send(set == 0).expect("heard");
            while set == 0 && !is_done.load(Ordering::SeqCst) {}
        });
        let hog = Self(done, Some(thread));
        if hear.recv().expect("told") {
            return Some(hog);
        }
        skip("root", "real-time threads");
        None
    }
}

impl Drop for Hog {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
        let _ = self.1.take().map(std::thread::JoinHandle::join);
    }
}

#[test]
fn a_worker_whose_cpu_is_taken_by_a_real_time_thread_moves_to_another() {
    let servers = Servers::new().expect("servers");
    let Some([first, _]) = two_cpus(&servers) else { return };
    let there = move |_: &Told, _| After { placement: Placement::Cpu(first), ..After::next(Next::Idle) };
    let client = Client::new(&servers, 0, there);
    let on_first = servers.0.sets.iter().find(|set| set.cpu == Some(first)).expect("a set");
    until(|| on_first.len() == 1);
    client.is_served();
    let thread = client.told.thread.load(Ordering::SeqCst);
    let Some(_hog) = Hog::on(first) else { return };
    let affinity = || Cpus::of(thread).expect("it runs");
    // The time that the kernel reserves for other threads may suffice for some inputs.
    until(|| {
        client.input();
        affinity().iter().count() > 1
    });
    client.is_served();
}

#[test]
fn a_worker_that_a_real_time_thread_preempts_during_a_visit_moves_to_another_cpu() {
    let servers = Servers::new().expect("servers");
    let Some([first, _]) = two_cpus(&servers) else { return };
    // Its worker is always in a visit.
    let busy = move |_: &Told, now: Instant| {
        until(|| now.elapsed() >= BATCH);
        After { placement: Placement::Cpu(first), ..After::next(Next::Again) }
    };
    let client = Client::new(&servers, 0, busy);
    let on_first = servers.0.sets.iter().find(|set| set.cpu == Some(first)).expect("a set");
    until(|| on_first.len() == 1);
    let Some(_hog) = Hog::on(first) else { return };
    let cpus = || {
        let thread = client.told.thread.load(Ordering::SeqCst);
        Cpus::of(thread).map_or(0, |cpus| cpus.iter().count())
    };
    until(|| cpus() > 1);
    client.is_served();
    client.served.close();
    client.served.wait();
}

struct Rng(u64);

impl Rng {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB) % n
    }
}

/// A client over this descriptor that randomly moves, is stuck, panics, and has more to do.
fn erratic(servers: &Servers, fd: &Arc<OwnedFd>, seed: u64) -> Client {
    let cpus: Vec<usize> = servers.0.sets.iter().filter_map(|set| set.cpu).collect();
    let mut rng = Rng(seed);
    let then = move |told: &Told, now: Instant| {
        match rng.below(200) {
            0 => std::thread::sleep(TICK * 4),
            1..5 => std::thread::sleep(TICK / 10),
            5 => {
                told.visited.store(false, Ordering::SeqCst);
                std::panic::resume_unwind(Box::new("as it likes"));
            }
            _ => {}
        }
        let next = match rng.below(8) {
            0 => Next::Again,
            1 => Next::At(now + Duration::from_micros(rng.below(3000))),
            _ => Next::Idle,
        };
        let placement = match rng.below(8) {
            0..4 => Placement::Cpu(cpus[rng.below(cpus.len() as u64) as usize]),
            4 => Placement::Roam,
            5 => Placement::Any,
            _ => Placement::Stay,
        };
        After { placement, is_eager: rng.below(10) == 0, ..After::next(next) }
    };
    Client::over(servers, seed % 7, fd.clone(), Told::default(), then)
}

fn steps() -> u64 {
    std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(3000)
}

#[test]
fn each_input_is_followed_by_a_visit_while_servers_do_anything_and_come_and_go() {
    let servers = Servers::new().expect("servers");
    let seed = u64::from(this_thread()) << 32;
    println!("seed {seed:#x}");
    let drive = &|driver: u64| {
        let mut rng = Rng(seed + driver);
        let fds: Vec<_> = (0..8).map(|_| input_fd()).collect();
        let mut clients: Vec<Client> = fds.iter().map(|fd| erratic(&servers, fd, rng.below(u64::MAX))).collect();
        for _ in 0..steps() {
            let at = rng.below(clients.len() as u64) as usize;
            match rng.below(10) {
                0 => {
                    let client = &clients[at];
                    if rng.below(2) == 0 {
                        client.input();
                    }
                    client.served.close();
                    client.served.wait();
                    assert_eq!(client.told.ended.load(Ordering::SeqCst), 1, "seed {seed:#x}");
                    // Serves the descriptor again, as if its VM attached again.
                    clients[at] = erratic(&servers, &fds[at], rng.below(u64::MAX));
                }
                1 | 2 => {
                    let (client, before) = (&clients[at], clients[at].visits());
                    client.notify.notify();
                    until(|| client.visits() > before || client.told.panics.load(Ordering::SeqCst) > 0);
                }
                _ => clients[at].is_served(),
            }
        }
        clients.iter().for_each(|client| client.served.close());
        clients.iter().for_each(|client| client.served.wait());
    };
    std::thread::scope(|scope| {
        (0..4).for_each(|driver| drop(scope.spawn(move || drive(driver))));
    });
    assert!(servers.0.sets.iter().all(|set| set.len() == 0));
    until(|| servers.threads() as usize <= servers.0.sets.len());
}
