//! Resolves the name of a node to addresses.
//!
//! Before: `link` is about to connect to a node. After: it has the addresses.
//! Threads: a literal address needs no thread. A name is resolved on a separate thread, because the resolver has no
//! deadline: one at a time for each host.
//! Promise: a call returns soon after its deadline, or when other threads want a lock of its caller. The result of a
//! lookup counts whenever it comes: a resolver that needs longer than any deadline delays the first connection only.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ballast_store::IoContext;
use ballast_sys::lock::Lock;

use crate::refusal::Addr;
use crate::stream::{FIRST_WAIT, gives_way, left, step};

/// A result is used for this long without another lookup, by callers that had given up before it came.
const FRESH: Duration = Duration::from_secs(1);
/// If earlier addresses are known, a lookup may take 1/N of the time that is left. Then these are used.
const PART: u32 = 4;

/// Looks up a host. Replaced in tests.
type LookUp = dyn Fn(&str) -> io::Result<Vec<IpAddr>> + Send + Sync;

#[derive(Debug, Default)]
struct Host {
    is_asked: bool,
    /// The time at which the last lookup ended, and the reason if it failed.
    said: Option<(Instant, Option<String>)>,
    last: Vec<IpAddr>,
}

#[derive(Debug, Default)]
struct Hosts {
    all: Mutex<HashMap<String, Host>>,
    ended: Condvar,
}

static HOSTS: LazyLock<Arc<Hosts>> = LazyLock::new(Arc::default);

/// Returns the addresses of this node. Fails if the name is unknown, or was not resolved in time.
pub fn resolve(addr: &Addr, context: IoContext<'_>) -> io::Result<Vec<SocketAddr>> {
    if let Ok(at) = addr.host.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(at, addr.port)]);
    }
    let system = |host: &str| Ok((host, 0).to_socket_addrs()?.map(|at| at.ip()).collect());
    let found = HOSTS.find(&addr.host, context, Arc::new(system))?;
    Ok(found.into_iter().map(|at| SocketAddr::new(at, addr.port)).collect())
}

impl Hosts {
    fn all(&self) -> MutexGuard<'_, HashMap<String, Host>> {
        self.all.locked()
    }

    fn find(self: &Arc<Self>, name: &str, context: IoContext<'_>, look_up: Arc<LookUp>) -> io::Result<Vec<IpAddr>> {
        let begun = Instant::now();
        let mut all = self.all();
        let host = all.entry(name.to_owned()).or_default();
        let is_fresh = |host: &Host| host.said.as_ref().is_some_and(|(at, _)| begun <= *at + FRESH);
        if !host.is_asked && !is_fresh(host) {
            self.ask(name, look_up)?;
            host.is_asked = true;
        }
        let context = context.until(begun + left(context)? / if host.last.is_empty() { 1 } else { PART });
        while all.get(name).is_some_and(|host| host.is_asked)
            && let Ok(wait) = step(context)
        {
            (all, _) = self.ended.wait_timeout(all, wait).unwrap_or_else(PoisonError::into_inner);
            if context.is_wanted() && begun.elapsed() >= FIRST_WAIT {
                return Err(gives_way());
            }
        }
        let host = all.get(name);
        match host {
            Some(host) if !host.last.is_empty() => Ok(host.last.clone()),
            Some(Host { is_asked: false, said: Some((_, why)), .. }) => {
                let why = why.as_deref().unwrap_or("it has no address");
                Err(io::Error::new(io::ErrorKind::NotFound, format!("the name {name:?}: {why}")))
            }
            _ => Err(io::Error::new(io::ErrorKind::TimedOut, format!("the name {name:?} is not known in time"))),
        }
    }

    fn ask(self: &Arc<Self>, name: &str, look_up: Arc<LookUp>) -> io::Result<()> {
        let (hosts, name) = (self.clone(), name.to_owned());
        let run = move || {
            let found = look_up(&name);
            let mut all = hosts.all();
            let host = all.entry(name).or_default();
            host.is_asked = false;
            host.said = Some((Instant::now(), found.as_ref().err().map(io::Error::to_string)));
            if let Ok(found) = found {
                host.last = found;
            }
            drop(all);
            hosts.ended.notify_all();
        };
        std::thread::Builder::new().name("resolve".into()).spawn(run).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::is_giving_way;
    use ballast_store::Ends;
    use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering::Relaxed};
    use std::sync::mpsc;

    fn within(time: Duration) -> IoContext<'static> {
        IoContext::BACKGROUND.until(Instant::now() + time)
    }

    const LONG: Duration = Duration::from_secs(60);
    const SHORT: Duration = Duration::from_millis(10);

    #[test]
    fn addresses_are_themselves_and_names_are_looked_up() {
        let at = |host: &str| resolve(&Addr { host: host.into(), port: 7 }, within(LONG));
        assert_eq!(at("::1").expect("an address"), ["[::1]:7".parse().expect("an address")]);
        assert!(at("localhost").is_ok_and(|found| found.iter().all(|at| at.ip().is_loopback() && at.port() == 7)));
        at("no such name").expect_err("it is none");
    }

    #[test]
    fn a_thread_with_a_lock_that_others_want_waits_for_no_resolver() {
        let hosts = Arc::<Hosts>::default();
        let (_answer, answers) = mpsc::channel::<IpAddr>();
        let answers = Mutex::new(answers);
        let look_up: Arc<LookUp> = Arc::new(move |_| {
            let answers = answers.lock().expect("one at a time");
            answers.recv().map(|at| vec![at]).map_err(io::Error::other)
        });
        let wanted = AtomicU32::new(0);
        let ends = Ends::Wanted(&wanted);
        let late = hosts.find("a", within(SHORT).ended_by(ends), look_up.clone()).expect_err("no answer");
        assert_eq!(late.kind(), io::ErrorKind::TimedOut, "nobody wants the lock");
        wanted.fetch_add(1, Relaxed);
        for last in [vec![], vec![IpAddr::from([127, 0, 0, 1])]] {
            hosts.all().values_mut().for_each(|host| host.last.clone_from(&last));
            let gone = hosts.find("a", within(LONG).ended_by(ends), look_up.clone()).expect_err("no answer");
            assert!(is_giving_way(&gone), "{gone}");
        }
    }

    #[test]
    fn an_answer_that_comes_late_is_kept_for_the_next_call_and_is_what_is_left_if_no_other_comes() {
        let hosts = Arc::<Hosts>::default();
        let (answer, answers) = mpsc::channel::<IpAddr>();
        let (answers, asked) = (Mutex::new(answers), Arc::new(AtomicUsize::new(0)));
        let counted = asked.clone();
        // Each lookup waits until the test gives it a result.
        let look_up: Arc<LookUp> = Arc::new(move |_| {
            counted.fetch_add(1, Relaxed);
            let answers = answers.lock().expect("one at a time");
            answers.recv().map(|at| vec![at]).map_err(io::Error::other)
        });
        for _ in 0..3 {
            let late = hosts.find("a", within(SHORT), look_up.clone()).expect_err("no answer yet");
            assert_eq!(late.kind(), io::ErrorKind::TimedOut);
        }
        let (first, second) = (IpAddr::from([127, 0, 0, 1]), IpAddr::from([127, 0, 0, 2]));
        answer.send(first).expect("asked");
        assert_eq!(hosts.find("a", within(LONG), look_up.clone()).expect("it came"), [first]);
        assert_eq!(asked.load(Relaxed), 1, "one lookup for all of these");
        // The next lookup does not end in time, and the last addresses are used.
        hosts.all().values_mut().for_each(|host| host.said = None);
        assert_eq!(hosts.find("a", within(SHORT), look_up.clone()).expect("the last ones"), [first]);
        answer.send(second).expect("asked");
        while hosts.find("a", within(LONG), look_up.clone()).expect("found") != [second] {}
        // The next lookup fails, and the last addresses are used.
        hosts.all().values_mut().for_each(|host| host.said = None);
        drop(answer);
        assert_eq!(hosts.find("a", within(LONG), look_up).expect("the last ones"), [second]);
    }
}
