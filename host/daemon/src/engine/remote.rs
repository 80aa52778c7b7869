//! The cluster for far pages of all VMs, and the work for it that no VM's own workers do.
//!
//! Before: the settings name a cluster. After: each VM has a store in it; pages of VMs that are gone, here or on hosts
//! that died, are removed; operators learn of cluster settings that would lose pages.
//! Threads: one for all of that, which may wait for the network; callers do not wait.
//! Promise: a cluster that does not respond delays this thread only. The lease of a VM is renewed while its store
//! exists, even while its workers wait, and while it is closed and its far pages are written back. Pages are removed in
//! steps, and leases are renewed between any two of them.

use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use anyhow::Context;
use ballast_base::wire::VmId;
use ballast_handover::secret::Secret;
use ballast_handover::state_file::StateFile;
use ballast_pager::vm::Reporter;
use ballast_remote::check::{Finding, check};
use ballast_remote::identity::{self, Kept, Tell};
use ballast_remote::{Access, Addr, Cluster, ClusterOptions, RemoteBudget, RemoteStore, Seal, Tls, lease, seal};
use ballast_store::{Codec, SlowStore, Store};
use ballast_sys::lock::Lock;

use super::missing::MissingStore;
use crate::config::{self, RemoteTls};
use crate::events::Events;

/// Time between checks of the cluster's settings, and of the leases.
const CHECK_EVERY: Duration = Duration::from_secs(60);
/// Time between scans of all keys in the cluster for VMs without a lease; and before a failed scan continues.
const POLL_EVERY: Duration = Duration::from_secs(3600);
const POLL_AGAIN: Duration = Duration::from_secs(60);
/// Pause before a failed step in the removal of an ended VM's pages is repeated.
const RETRY: Duration = Duration::from_secs(5);
/// Pause between two steps in the removal of pages that a VM freed before it was closed.
const TIDY_EVERY: Duration = Duration::from_millis(100);

type Stores = Arc<Mutex<Vec<(String, Weak<RemoteStore>)>>>;

enum Told {
    Ended(VmId),
    /// The VM of this store is closed, and has freed pages that are still in the cluster. The VM may return.
    Closed(Arc<RemoteStore>),
}

#[derive(Debug)]
pub struct Remote {
    pub cluster: Arc<Cluster>,
    pub budget: Arc<RemoteBudget>,
    told: mpsc::Sender<Told>,
    findings: Arc<Mutex<Vec<Finding>>>,
    stores: Stores,
    /// Whether pages of VMs without a key yet will be sealed.
    encrypt: bool,
    events: Arc<Events>,
}

impl Remote {
    /// Uses the cluster in these settings, without waiting. Fails if an address is invalid, or no thread can be
    /// started.
    pub fn begin(settings: &config::Remote, events: Arc<Events>) -> anyhow::Result<Self> {
        let addr = |text: &String| Addr::parse(text).with_context(|| format!("remote.nodes: {text:?} is no address"));
        let options = ClusterOptions {
            nodes: settings.nodes.iter().map(addr).collect::<Result<_, _>>()?,
            access: Access {
                user: settings.user.clone(),
                password_file: settings.password_file.clone(),
                tls: settings.tls.clone().map(|RemoteTls { ca_file, cert_file, key_file, name }| Tls {
                    ca_file,
                    own: cert_file.zip(key_file),
                    name,
                }),
            },
            replicas: settings.replicas,
        };
        let cluster = Arc::new(Cluster::new(options));
        let (told, its_told) = mpsc::channel();
        let (findings, stores) = (Arc::<Mutex<Vec<Finding>>>::default(), Stores::default());
        let keeper = Caretaker {
            cluster: cluster.clone(),
            events: events.clone(),
            findings: findings.clone(),
            stores: stores.clone(),
            ended: lease::Ended::default(),
            closed: Vec::new(),
            late: Vec::new(),
            next_leases: Instant::now(),
            retry_at: Instant::now(),
        };
        std::thread::Builder::new()
            .name("remote".into())
            .spawn(move || keeper.run(&its_told))
            .context("Starting a thread for the remote store")?;
        let (budget, encrypt) = (RemoteBudget::new(settings.budget()), settings.encrypt);
        Ok(Self { cluster, budget, told, findings, stores, encrypt, events })
    }

    /// The store of the VM of this state file. If another engine has the VM, too (`beside`), no key is made before that
    /// engine is gone, because it would not know the key. Fails if the kernel has no random numbers.
    pub fn store(&self, state: &StateFile, beside: bool, codec: Codec) -> anyhow::Result<Arc<RemoteStore>> {
        let (name, events) = (state.name(), self.events.clone());
        let tell: Tell =
            Box::new(move |text| events.add(Some(name.clone()), "remote-other", format!("VM {name}: {text}")));
        let store = RemoteStore::new(state.id(), self.cluster.clone(), self.budget.clone(), codec, lease::LEASE)
            .kept_in(ItsCluster(state.share()), Some(tell));
        if !beside {
            // If an engine died while it wrote the key, no page was sealed yet.
            state.forget_unused_secret();
        }
        let store = match state.secret() {
            Secret::Kept { since, key } => store.sealed(Seal::with(since, &key)),
            Secret::Damaged => {
                let text = "the key of its pages in the remote store is damaged: those are lost, and memory errors \
                            when they are touched; no more go there";
                tracing::error!(vm = state.name(), "{text}");
                self.events.add(Some(state.name()), "remote-key-lost", text.into());
                store.sealed(Seal::lost())
            }
            Secret::None if !self.encrypt => store,
            Secret::None if beside => {
                let own = state.share();
                store.sealed_when_alone(move || match own.secret() {
                    Secret::Kept { since, key } => Seal::with(since, &key),
                    Secret::Damaged => Seal::lost(),
                    // Without a key no page leaves the host.
                    Secret::None => make_key(&own).unwrap_or_else(|_| Seal::lost()),
                })
            }
            Secret::None => store.sealed(make_key(state).context("Making the key of a VM's far pages")?),
        };
        let store = Arc::new(store);
        self.stores.locked().push((state.name(), Arc::downgrade(&store)));
        Ok(store)
    }

    /// This VM is gone for good: removes its pages from the cluster, if it ever had any.
    pub fn ended(&self, vm: VmId) {
        if of(&self.stores, vm).iter().any(|store| store.may_be_used()) {
            // Without the thread, the VM's lease expires.
            let _ = self.told.send(Told::Ended(vm));
        }
    }

    /// This VM is closed, and may return: its freed pages are still removed.
    pub fn closed(&self, vm: VmId) {
        for store in of(&self.stores, vm).into_iter().filter(|store| !store.is_tidy()) {
            let _ = self.told.send(Told::Closed(store));
        }
    }

    pub fn findings(&self) -> Vec<Finding> {
        self.findings.locked().clone()
    }
}

/// The remote store of a VM. Without a cluster in the settings it is a replacement, if the VM's words may name pages in
/// a cluster. Fails as [`Remote::store`].
pub fn store_of(
    remote: Option<&Remote>,
    state: &StateFile,
    beside: bool,
    codec: Codec,
    report: &Reporter,
) -> anyhow::Result<Option<Arc<dyn SlowStore>>> {
    Ok(match remote {
        Some(remote) => Some(remote.store(state, beside, codec)?),
        None if state.cluster() != 0 => Some(Arc::new(MissingStore::new(state.name(), report.clone()))),
        None => None,
    })
}

#[derive(Debug)]
struct ItsCluster(StateFile);

impl Kept for ItsCluster {
    fn get(&self) -> u64 {
        self.0.cluster()
    }

    fn keep(&self, identity: u64) {
        self.0.keep_cluster(identity);
    }

    fn forget(&self) {
        self.0.forget_cluster();
    }
}

fn make_key(state: &StateFile) -> std::io::Result<Seal> {
    let (since, key) = (ballast_remote::tick_now(), seal::new_key()?);
    state.keep_secret(since, &key);
    Ok(Seal::with(since, &key))
}

fn all(stores: &Stores) -> Vec<(String, Arc<RemoteStore>)> {
    let mut stores = stores.locked();
    stores.retain(|(_, store)| store.strong_count() > 0);
    stores.iter().filter_map(|(name, store)| Some((name.clone(), store.upgrade()?))).collect()
}

fn of(stores: &Stores, vm: VmId) -> Vec<Arc<RemoteStore>> {
    all(stores).into_iter().map(|(_, store)| store).filter(|store| store.vm() == vm).collect()
}

struct Caretaker {
    cluster: Arc<Cluster>,
    events: Arc<Events>,
    findings: Arc<Mutex<Vec<Finding>>>,
    stores: Stores,
    /// VMs that are gone, and whose keys are still in the cluster.
    ended: lease::Ended,
    closed: Vec<Arc<RemoteStore>>,
    next_leases: Instant,
    retry_at: Instant,
    /// VMs whose leases could not be renewed for long, as last reported.
    late: Vec<VmId>,
}

impl Caretaker {
    fn run(mut self, told: &Receiver<Told>) {
        let mut leaseless = lease::Leaseless::default();
        let (mut next_check, mut next_look) = (Instant::now(), Instant::now() + POLL_EVERY);
        loop {
            self.keep_leases_in_time();
            let now = Instant::now();
            if now >= next_check {
                self.check();
                next_check = now + CHECK_EVERY;
            }
            if now >= next_look {
                next_look = Instant::now() + if self.sweep(&mut leaseless) { POLL_EVERY } else { POLL_AGAIN };
            }
            match told.recv_timeout(self.remove().min(CHECK_EVERY)) {
                Ok(told) => self.heed(told),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            told.try_iter().for_each(|told| self.heed(told));
        }
    }

    fn heed(&mut self, told: Told) {
        match told {
            Told::Ended(vm) => self.ended.add(vm),
            Told::Closed(store) if self.closed.iter().any(|known| Arc::ptr_eq(known, &store)) => {}
            Told::Closed(store) => self.closed.push(store),
        }
    }

    /// Removes some of the pages that VMs left. Returns when there is more to do.
    fn remove(&mut self) -> Duration {
        for store in std::mem::take(&mut self.closed) {
            store.tidy();
            if !store.is_tidy() {
                self.closed.push(store);
            }
            self.keep_leases_in_time();
        }
        let pause = if self.closed.is_empty() { Duration::MAX } else { TIDY_EVERY };
        if self.ended.is_empty() {
            return pause;
        }
        let now = Instant::now();
        if now >= self.retry_at {
            match self.ended.step(&self.cluster) {
                Ok(gone) => gone.into_iter().for_each(|(vm, pages)| {
                    tracing::info!(%vm, pages, "removed the pages of an ended VM from the remote store");
                }),
                Err(error) => {
                    tracing::warn!("Removing the pages of ended VMs from the remote store: {error}");
                    self.retry_at = now + RETRY;
                }
            }
        }
        pause.min(self.retry_at.saturating_duration_since(now))
    }

    /// Reports new problems of the cluster. A VM's own problems were reported by its store.
    fn check(&self) {
        identity::mend(&self.cluster);
        let found = check(&self.cluster);
        let of = |(name, store): (String, Arc<RemoteStore>)| Some(format!("VM {name}: {}", store.elsewhere()?));
        let elsewhere = all(&self.stores).into_iter().filter_map(of).map(|text| Finding { serious: true, text });
        let all = elsewhere.chain(found.iter().cloned()).collect();
        let before = std::mem::replace(&mut *self.findings.locked(), all);
        for finding in found.into_iter().filter(|finding| finding.serious && !before.contains(finding)) {
            self.events.add(None, "remote-unsafe", format!("the remote store: {}", finding.text));
        }
    }

    fn keep_leases_in_time(&mut self) {
        if Instant::now() >= self.next_leases {
            self.keep_leases();
            self.next_leases = Instant::now() + CHECK_EVERY;
        }
    }

    /// Renews the leases. Reports those that could not be renewed for half of their duration.
    fn keep_leases(&mut self) {
        let mut late = Vec::new();
        for (name, store) in all(&self.stores) {
            let Some((age, why)) = store.keep_lease() else { continue };
            if !self.late.contains(&store.vm()) {
                let text = format!(
                    "the lease of VM {name} in the remote store has not been renewed for {} s ({why}): if that goes \
                     on, another host may remove its pages",
                    age.as_secs()
                );
                self.events.add(Some(name), "remote-lease", text);
            }
            late.push(store.vm());
        }
        self.late = late;
    }

    /// Removes the pages of VMs without a lease. Returns whether the scan came to its end.
    fn sweep(&mut self, leaseless: &mut lease::Leaseless) -> bool {
        let (cluster, stores) = (self.cluster.clone(), self.stores.clone());
        let is_here = |vm| !of(&stores, vm).is_empty();
        let gone = leaseless.sweep(&cluster, lease::LEASE, &is_here, &mut || self.keep_leases_in_time());
        let gone = gone.inspect_err(|error| {
            tracing::warn!("Looking for VMs without a lease in the remote store: {error}");
        });
        let is_over = gone.is_ok();
        for (vm, pages) in gone.unwrap_or_default() {
            let text = format!("the lease of VM {vm} was not renewed for a day: its {pages} pages were removed");
            self.events.add(None, "remote-swept", text);
        }
        is_over
    }
}
