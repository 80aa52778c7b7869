//! Clusters of Valkey (or Redis) servers on loopback, with primaries and replicas, that a test can kill, stop and fill.
//!
//! Before: `scripts/valkey.sh` unpacked the server. After: tests of the remote store use the cluster.
//! Threads: the caller's. Units: ports on 127.0.0.1, free when they were picked; memory is `Bytes`.
//! Promise: servers write no data to disk; their logs are in a directory that is removed with the cluster. Each server
//! ends when the cluster is dropped, or when the thread that started it ends. A client library that the product does
//! not use sends the commands. A function fails if a node does not reply, or refuses.

use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use ballast_base::Bytes;
use ballast_testkit::program::Ends;
use redis::{Connection, Value};
use rustix::process::{Pid, Signal, kill_process, set_parent_process_death_signal};

const TIMEOUT: Duration = Duration::from_secs(60);
const LOOK: Duration = Duration::from_millis(20);

/// The layout of a cluster.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// The number of primaries.
    pub primaries: usize,
    /// The number of replicas of each primary.
    pub replicas: usize,
    /// A node counts as failed if it does not reply for this time.
    pub node_timeout: Duration,
    /// The memory limit of each node.
    pub maxmemory: Bytes,
    /// Serve clients also under TLS, on a second port, where they must have a certificate.
    pub tls: bool,
}

impl Default for Layout {
    fn default() -> Self {
        Self {
            primaries: 3,
            replicas: 1,
            node_timeout: Duration::from_secs(1),
            maxmemory: Bytes(512 << 20),
            tls: false,
        }
    }
}

/// A running cluster.
#[derive(Debug)]
pub struct Valkey {
    nodes: Vec<Server>,
    layout: Layout,
    dir: tempfile::TempDir,
    program: PathBuf,
}

#[derive(Debug)]
struct Server {
    port: u16,
    bus: u16,
    tls: u16,
    child: Option<Ends>,
}

/// Returns the server in `$BALLAST_VALKEY_DIR`, or in `target/valkey` of this directory or a parent of it.
fn program() -> Option<PathBuf> {
    let dirs = match std::env::var_os("BALLAST_VALKEY_DIR") {
        Some(dir) => vec![PathBuf::from(dir)],
        None => {
            let here = std::env::current_dir().unwrap_or_default();
            here.ancestors().map(|dir| dir.join("target/valkey")).collect()
        }
    };
    dirs.iter().map(|dir| dir.join("bin/server")).find(|program| program.is_file())
}

/// Convert a server's reply to this type.
pub fn read<T: redis::FromRedisValue>(said: Value) -> io::Result<T> {
    redis::from_redis_value(said).map_err(other)
}

/// Returns the reason if no cluster can run here.
pub fn valkey_missing() -> Option<String> {
    program().is_none().then(|| "no server in target/valkey; run scripts/valkey.sh".into())
}

/// Returns ports on which nobody listens. They are below the range that the kernel uses for connections (from 32,768):
/// a connection could otherwise take a port before its server starts.
fn free_ports(count: usize) -> io::Result<Vec<u16>> {
    let mut listeners: Vec<TcpListener> = Vec::new();
    for _ in 0..count * 100 {
        if listeners.len() == count {
            break;
        }
        let port = 10_000 + (RandomState::new().hash_one(listeners.len()) % 22_000) as u16;
        listeners.extend(TcpListener::bind(("127.0.0.1", port)));
    }
    if listeners.len() < count {
        return Err(other(format!("{count} ports are needed, and {} were found", listeners.len())));
    }
    listeners.iter().map(|at| Ok(at.local_addr()?.port())).collect()
}

/// Create an authority and the certificates that it signs, in this directory.
fn certify(dir: &std::path::Path) -> io::Result<()> {
    let authority = |name: &str| {
        let mut params = rcgen::CertificateParams::new(Vec::new()).map_err(other)?;
        params.distinguished_name.push(rcgen::DnType::CommonName, name);
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let key = rcgen::KeyPair::generate().map_err(other)?;
        let certificate = params.self_signed(&key).map_err(other)?;
        std::fs::write(dir.join(name), certificate.pem())?;
        io::Result::Ok(rcgen::Issuer::new(params, key))
    };
    let issuer = authority("ca.pem")?;
    authority("other.pem")?;
    for name in ["server", "client"] {
        let mut params = rcgen::CertificateParams::new(vec!["127.0.0.1".into()]).map_err(other)?;
        params.distinguished_name.push(rcgen::DnType::CommonName, name);
        let key = rcgen::KeyPair::generate().map_err(other)?;
        let certificate = params.signed_by(&key, &issuer).map_err(other)?;
        std::fs::write(dir.join(format!("{name}.pem")), certificate.pem())?;
        std::fs::write(dir.join(format!("{name}.key")), key.serialize_pem())?;
    }
    Ok(())
}

fn other(what: impl std::fmt::Display) -> io::Error {
    io::Error::other(what.to_string())
}

fn wait_for<T>(what: &str, mut find: impl FnMut() -> Option<T>) -> io::Result<T> {
    let begun = Instant::now();
    loop {
        if let Some(found) = find() {
            return Ok(found);
        }
        if begun.elapsed() > TIMEOUT {
            return Err(other(format!("{what}: not within {TIMEOUT:?}")));
        }
        std::thread::sleep(LOOK);
    }
}

impl Valkey {
    /// Start a cluster, and wait until all slots are served and all replicas follow.
    pub fn start(layout: Layout) -> io::Result<Self> {
        // Another program may take a free port before a server listens on it.
        let once = || Self::start_once(layout);
        once().or_else(|_| once()).or_else(|_| once())
    }

    fn start_once(layout: Layout) -> io::Result<Self> {
        let program = program().ok_or_else(|| other("no server in target/valkey; run scripts/valkey.sh"))?;
        let count = layout.primaries * (1 + layout.replicas);
        let ports = free_ports(count * 3)?;
        let server = |[port, bus, tls]: &[u16; 3]| Server { port: *port, bus: *bus, tls: *tls, child: None };
        let nodes = ports.as_chunks().0.iter().map(server).collect();
        let mut cluster = Self { nodes, layout, dir: tempfile::tempdir()?, program };
        if layout.tls {
            certify(cluster.dir.path())?;
        }
        (0..count).try_for_each(|node| cluster.restart(node))?;
        cluster.join()?;
        Ok(cluster)
    }

    fn join(&self) -> io::Result<()> {
        let Layout { primaries, .. } = self.layout;
        for node in 0..self.len() {
            // Every node needs a different epoch from the start, so that no election is tied.
            self.say(node, &["CLUSTER", "SET-CONFIG-EPOCH", &(node + 1).to_string()])?;
            let Server { port, bus, .. } = &self.nodes[node];
            self.say(0, &["CLUSTER", "MEET", "127.0.0.1", &port.to_string(), &bus.to_string()])?;
        }
        for node in 0..primaries {
            let (first, last) = (node * 16_384 / primaries, (node + 1) * 16_384 / primaries - 1);
            self.say(node, &["CLUSTER", "ADDSLOTSRANGE", &first.to_string(), &last.to_string()])?;
        }
        for node in primaries..self.len() {
            let primary = self.id(node % primaries)?;
            wait_for("a replica knows its primary", || self.say(node, &["CLUSTER", "REPLICATE", &primary]).ok())?;
        }
        self.wait_whole()
    }

    /// Wait until every running node reports that all slots are served, and every replica follows.
    pub fn wait_whole(&self) -> io::Result<()> {
        let running = || (0..self.len()).filter(|node| self.is_running(*node));
        wait_for("the cluster is whole", || {
            let whole = |node: usize| {
                let text = self.text(node, &["CLUSTER", "INFO"]).ok()?;
                let follows = self.text(node, &["INFO", "replication"]).ok()?;
                let linked = follows.contains("role:master") || follows.contains("master_link_status:up");
                let all = text.contains("cluster_state:ok") && text.contains("cluster_slots_ok:16384");
                (all && linked && self.sees_all(node)?).then_some(())
            };
            running().try_for_each(whole)
        })
    }

    /// Returns whether this node lists every running node with the right role.
    fn sees_all(&self, node: usize) -> Option<bool> {
        let nodes = self.text(node, &["CLUSTER", "NODES"]).ok()?;
        let known = |of: usize| {
            let at = format!(":{}@", self.nodes[of].port);
            let line = nodes.lines().find(|line| line.contains(&at));
            line.is_some_and(|line| !line.contains("fail") && !line.contains("handshake"))
        };
        let replicas = nodes.lines().filter(|line| line.contains("slave") && !line.contains("fail")).count();
        let running = (0..self.len()).filter(|node| self.is_running(*node)).count();
        let all = (0..self.len()).filter(|of| self.is_running(*of)).all(known);
        Some(all && replicas + self.layout.primaries >= running)
    }

    /// Returns the number of nodes.
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Returns false: a cluster has nodes.
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// Returns the address of a node.
    pub fn addr(&self, node: usize) -> String {
        format!("127.0.0.1:{}", self.nodes[node].port)
    }

    /// Returns the address of a node under TLS.
    pub fn tls_addr(&self, node: usize) -> String {
        format!("127.0.0.1:{}", self.nodes[node].tls)
    }

    /// Returns its directory. With TLS it has `ca.pem`, the authority that signed `server.pem` and `client.pem` for
    /// 127.0.0.1, their keys, and `other.pem`, an authority that signed nothing.
    pub fn dir(&self) -> &std::path::Path {
        self.dir.path()
    }

    /// Returns the process id of a node, if it runs.
    pub fn pid(&self, node: usize) -> Option<u32> {
        self.nodes[node].child.as_ref().map(|child| child.0.id())
    }

    /// Returns true if the node has a process.
    pub fn is_running(&self, node: usize) -> bool {
        self.pid(node).is_some()
    }

    /// Start a node that does not run. It has lost its data, but keeps its identity.
    pub fn restart(&mut self, node: usize) -> io::Result<()> {
        let dir = self.dir.path().join(node.to_string());
        std::fs::create_dir_all(&dir)?;
        let log = dir.join("log");
        let Server { port, bus, tls, .. } = self.nodes[node];
        let timeout = self.layout.node_timeout.as_millis().to_string();
        let mut command = Command::new(&self.program);
        command.args(["--bind", "127.0.0.1", "--port", &port.to_string(), "--cluster-port", &bus.to_string()]);
        command.args(["--save", "", "--appendonly", "no", "--cluster-enabled", "yes"]);
        command.args(["--cluster-node-timeout", &timeout, "--cluster-require-full-coverage", "no"]);
        command.args(["--cluster-replica-validity-factor", "0", "--repl-diskless-sync-delay", "0"]);
        command.args(["--maxmemory", &self.layout.maxmemory.0.to_string(), "--maxmemory-policy", "noeviction"]);
        if self.layout.tls {
            command.args(["--tls-port", &tls.to_string(), "--tls-auth-clients", "yes"]);
            for (word, file) in [("ca-cert", "ca.pem"), ("cert", "server.pem"), ("key", "server.key")] {
                command.arg(format!("--tls-{word}-file")).arg(self.dir.path().join(file));
            }
        }
        command.arg("--dir").arg(&dir).arg("--logfile").arg(&log);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        // SAFETY: the closure makes one system call between fork and exec, and allocates nothing.
        unsafe { command.pre_exec(|| Ok(set_parent_process_death_signal(Some(Signal::KILL))?)) };
        self.nodes[node].child = Some(Ends(command.spawn()?));
        let up = wait_for("a server answers", || self.say(node, &["PING"]).ok());
        up.map(drop).map_err(|error| {
            let text = std::fs::read_to_string(&log).unwrap_or_default();
            other(format!("{error}; {}", text.lines().last().unwrap_or_default()))
        })
    }

    /// Kill a node, as a power failure would.
    pub fn kill(&mut self, node: usize) {
        self.nodes[node].child = None;
    }

    /// Stop a node with SIGSTOP. Its process exists and does nothing.
    pub fn stop(&self, node: usize) -> io::Result<()> {
        self.signal(node, Signal::STOP)
    }

    /// Continue a stopped node.
    pub fn go_on(&self, node: usize) -> io::Result<()> {
        self.signal(node, Signal::CONT)
    }

    fn signal(&self, node: usize, signal: Signal) -> io::Result<()> {
        let pid = self.pid(node).and_then(|pid| Pid::from_raw(pid.cast_signed()));
        Ok(kill_process(pid.ok_or_else(|| other("the node does not run"))?, signal)?)
    }

    fn connect(&self, node: usize) -> io::Result<Connection> {
        // Not through the relay: the commands of tests are not measured.
        let client = redis::Client::open(format!("redis://127.0.0.1:{}/", self.nodes[node].port)).map_err(other)?;
        let connection = client.get_connection_with_timeout(Duration::from_secs(1)).map_err(other)?;
        connection.set_read_timeout(Some(Duration::from_secs(5))).map_err(other)?;
        Ok(connection)
    }

    /// Send a command to a node. Returns its reply.
    pub fn say(&self, node: usize, words: &[&str]) -> io::Result<Value> {
        self.say_bytes(node, &words.iter().map(|word| word.as_bytes()).collect::<Vec<_>>())
    }

    /// As [`Self::say`], with words of any bytes.
    pub fn say_bytes(&self, node: usize, words: &[&[u8]]) -> io::Result<Value> {
        redis::Cmd::new().arg(words).query(&mut self.connect(node)?).map_err(other)
    }

    /// Send a command to a node. Returns its reply as text.
    pub fn text(&self, node: usize, words: &[&str]) -> io::Result<String> {
        redis::from_redis_value(self.say(node, words)?).map_err(other)
    }

    /// Returns true if this node reports that it has slots.
    pub fn is_primary(&self, node: usize) -> bool {
        self.text(node, &["CLUSTER", "NODES"]).is_ok_and(|text| {
            let own = text.lines().find(|line| line.contains("myself"));
            own.is_some_and(|line| line.contains("master") && line.split(' ').count() > 8)
        })
    }

    fn id(&self, node: usize) -> io::Result<String> {
        self.text(node, &["CLUSTER", "MYID"])
    }

    /// Returns the first running node that reports this slot as its own.
    pub fn owner(&self, slot: u16) -> Option<usize> {
        (0..self.len()).filter(|node| self.is_running(*node)).find(|node| {
            let text = self.text(*node, &["CLUSTER", "NODES"]).unwrap_or_default();
            let own = text.lines().find(|line| line.contains("myself,master")).unwrap_or_default();
            own.split(' ').skip(8).any(|range| {
                let (first, last) = range.split_once('-').unwrap_or((range, range));
                let number = |text: &str| text.parse::<u16>().ok();
                number(first).zip(number(last)).is_some_and(|(first, last)| (first..=last).contains(&slot))
            })
        })
    }

    /// Begin to move a slot. Until the end of the move, each of the two nodes may have some of its keys.
    pub fn begin_move(&self, slot: u16, from: usize, to: usize) -> io::Result<()> {
        let slot = slot.to_string();
        self.say(to, &["CLUSTER", "SETSLOT", &slot, "IMPORTING", &self.id(from)?])?;
        self.say(from, &["CLUSTER", "SETSLOT", &slot, "MIGRATING", &self.id(to)?])?;
        Ok(())
    }

    /// Move up to `most` keys of the slot. Returns the number of moved keys.
    pub fn move_keys(&self, slot: u16, from: usize, to: usize, most: usize) -> io::Result<usize> {
        let keys = self.say(from, &["CLUSTER", "GETKEYSINSLOT", &slot.to_string(), &most.to_string()])?;
        let keys: Vec<String> = redis::from_redis_value(keys).map_err(other)?;
        let port = self.nodes[to].port.to_string();
        let mut words = vec!["MIGRATE", "127.0.0.1", &port, "", "0", "5000", "KEYS"];
        words.extend(keys.iter().map(String::as_str));
        if !keys.is_empty() {
            self.say(from, &words)?;
        }
        Ok(keys.len())
    }

    /// End the move of a slot. Its new node owns it.
    pub fn end_move(&self, slot: u16, from: usize, to: usize) -> io::Result<()> {
        let (slot, id) = (slot.to_string(), self.id(to)?);
        self.say(to, &["CLUSTER", "SETSLOT", &slot, "NODE", &id])?;
        self.say(from, &["CLUSTER", "SETSLOT", &slot, "NODE", &id])?;
        Ok(())
    }

    /// Returns the number of keys on all primaries, without those of the cluster's identity.
    pub fn keys(&self) -> io::Result<u64> {
        let primaries = (0..self.len()).filter(|node| self.is_primary(*node));
        let sizes = primaries.map(|node| {
            let all: u64 = redis::from_redis_value(self.say(node, &["DBSIZE"])?).map_err(other)?;
            let of_it: Vec<String> =
                redis::from_redis_value(self.say(node, &["KEYS", "bl{cluster:*"])?).map_err(other)?;
            Ok(all - of_it.len() as u64)
        });
        sizes.sum()
    }
}
