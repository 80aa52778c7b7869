//! Resolves the name of a node to addresses.
//!
//! Before: `link` is about to connect to a node. After: it has the addresses.
//! Threads: a literal address needs no thread. A name is resolved on a separate thread, because the resolver has no
//! deadline, and a server can choose the name (in a redirection).
//! Promise: a call returns soon after its deadline, and at most [`LOOKUPS`] lookups run at a time.

use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc;
use std::time::Instant;

use crate::refusal::Addr;
use crate::stream::left;

/// Lookups that run at a time.
const LOOKUPS: usize = 16;

static UNDER_WAY: AtomicUsize = AtomicUsize::new(0);

/// Returns the addresses of this node.
///
/// # Errors
/// The name is unknown, or was not resolved in time.
pub fn resolve(addr: &Addr, until: Instant) -> io::Result<Vec<SocketAddr>> {
    if let Ok(at) = addr.host.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(at, addr.port)]);
    }
    if UNDER_WAY.fetch_add(1, Relaxed) >= LOOKUPS {
        UNDER_WAY.fetch_sub(1, Relaxed);
        return Err(io::Error::new(io::ErrorKind::TimedOut, "too many names are being looked up"));
    }
    let (tell, told) = mpsc::channel();
    let (host, port) = (addr.host.clone(), addr.port);
    let look_up = move || {
        let found = (host.as_str(), port).to_socket_addrs().map(Iterator::collect);
        UNDER_WAY.fetch_sub(1, Relaxed);
        // The caller may have given up.
        let _ = tell.send(found);
    };
    let started = std::thread::Builder::new().name("resolve".into()).spawn(look_up);
    if let Err(error) = started {
        UNDER_WAY.fetch_sub(1, Relaxed);
        return Err(error);
    }
    let late = |_| io::Error::new(io::ErrorKind::TimedOut, format!("the name {:?} is not known in time", addr.host));
    told.recv_timeout(left(until)?).map_err(late)?
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn addresses_are_themselves_and_names_are_looked_up() {
        let soon = Instant::now() + Duration::from_secs(60);
        let at = |host: &str| resolve(&Addr { host: host.into(), port: 7 }, soon);
        assert_eq!(at("::1").expect("an address"), ["[::1]:7".parse().expect("an address")]);
        assert!(at("localhost").is_ok_and(|found| found.iter().all(|at| at.ip().is_loopback())));
        at("no such name").expect_err("it is none");
        assert_eq!(UNDER_WAY.load(Relaxed), 0);
    }
}
