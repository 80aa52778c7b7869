//! VMMs that request memory of the pool.
//!
//! Before: the engine has the pool, and listens at its socket. After: a VMM has descriptors, or the reason why not.
//! Threads: one that listens, and one for each VMM with a request, which may wait until enough is zeroed.
//! Promise: a VM is refused for lack of memory only after the memory of VMs that are gone was taken back and zeroed. A
//! VMM that hangs up while it waits is forgotten.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use ballast_base::pool::{Given, Take};
use ballast_base::wire;
use ballast_pool::map::Refused;
use ballast_pool::{Error, Grant, Page};
use ballast_sys::lock::Lock;
use ballast_sys::scm;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{AGAIN_EVERY, POLL_EVERY, PoolService, State};
use crate::engine::pool_parts;
use crate::settings::Pooling;

const ZEROED_WITHIN: Duration = Duration::from_secs(30);
/// How long a VM waits until pages that other processes hold are replaced.
const REPLACED_WITHIN: Duration = Duration::from_secs(5);
/// How long a VM waits for one that has just ended, and whose files keeper and engine still have. Seen: up to 0.1 s.
const CLOSED_WITHIN: Duration = Duration::from_millis(300);
const ASKS_WITHIN: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(super) struct Handed<'a> {
    pub(super) grant: Grant,
    service: &'a PoolService,
}

impl Drop for Handed<'_> {
    fn drop(&mut self) {
        // The files first: then only the VMM has them.
        self.grant.files.clear();
        self.service.handing.fetch_sub(1, Ordering::Release);
        self.service.changed.notify_all();
    }
}

impl PoolService {
    /// Listens for VMMs, in place of this engine's predecessor.
    pub(super) fn listen(self: &Arc<Self>, place: &Pooling) -> anyhow::Result<()> {
        let socket = ballast_keeper::listen(&place.socket, rustix::net::SocketType::SEQPACKET, place.gid)?;
        rustix::io::ioctl_fionbio(&socket, false).context("Preparing the pool's socket")?;
        let service = self.clone();
        std::thread::Builder::new().name("pool-socket".into()).spawn(move || {
            loop {
                match rustix::net::accept_with(&socket, rustix::net::SocketFlags::CLOEXEC) {
                    Ok(client) => service.serve(client),
                    Err(error) => {
                        tracing::warn!("Accepting a VMM at the pool's socket: {error}");
                        std::thread::sleep(POLL_EVERY);
                    }
                }
            }
        })?;
        Ok(())
    }

    fn serve(self: &Arc<Self>, client: OwnedFd) {
        let service = self.clone();
        let started = std::thread::Builder::new().name("pool-vmm".into()).spawn(move || {
            if let Err(error) = service.answer(&client) {
                tracing::warn!("Answering a VMM at the pool's socket: {error:#}");
            }
        });
        if let Err(error) = started {
            tracing::warn!("Starting a thread that answers a VMM: {error}");
        }
    }

    fn answer(&self, client: &OwnedFd) -> anyhow::Result<()> {
        use rustix::net::sockopt::{Timeout, set_socket_timeout};
        for which in [Timeout::Recv, Timeout::Send] {
            set_socket_timeout(client, which, Some(ASKS_WITHIN)).context("Preparing a socket")?;
        }
        let Some(asked) = scm::receive(client).context("Receiving a request")? else { return Ok(()) };
        let take = wire::decode::<Take>(&asked.bytes).context("Understanding a request")?;
        let handed = wire::check_name(&take.name)
            .map_err(anyhow::Error::msg)
            .and_then(|()| self.take(&take, || has_hung_up(client)));
        let given = match &handed {
            Ok(handed) => Given::Memory(handed.grant.extents.clone()),
            Err(error) => Given::Refused(format!("{error:#}")),
        };
        let fds: Vec<_> = handed.iter().flat_map(|handed| &handed.grant.files).map(AsFd::as_fd).collect();
        // If the VMM does not receive it, no process has the files, and the memory returns to the pool.
        scm::send(client, &wire::encode(&given), &fds).context("Sending a VM its memory")
    }

    /// Takes memory for a VM. If there is enough but some is dirty, waits until it is zeroed, or the VMM is gone.
    pub(super) fn take(&self, take: &Take, is_gone: impl Fn() -> bool) -> anyhow::Result<Handed<'_>> {
        let (page, mode) = pool_parts::for_vm(take.pages);
        let (begun, mut far, mut next_try) = (Instant::now(), self.demand.far(), Instant::now());
        let mut state = self.state.locked();
        loop {
            let State::Ours(parts) = &mut *state else { bail!("this engine has not got the pool yet") };
            let reserve = parts.of(page)?;
            let was_zeroing = reserve.has_dirty();
            if !was_zeroing || Instant::now() >= next_try {
                reserve.set_far(std::mem::take(&mut far));
                // A VM may have ended since the last check.
                let granted = match mode {
                    Some(mode) => reserve.grant(&take.name, take.size, mode, &take.nodes),
                    None => reserve.grant_on_demand(&take.name, take.size, &take.nodes),
                };
                let error = match granted {
                    Ok(grant) => {
                        self.demand.show(reserve);
                        // From now on the end of this VM must be noticed.
                        self.changed.notify_all();
                        self.handing.fetch_add(1, Ordering::Relaxed);
                        drop(state);
                        return self.confirm(page, Handed { grant, service: self });
                    }
                    Err(error) => error,
                };
                // Read before the check for ended VMs: this engine may still have files of a VM that got its memory and
                // is gone.
                let is_handing = self.handing.load(Ordering::Acquire) > 0;
                let waits = begun.elapsed() < REPLACED_WITHIN && reserve.waits_for_pages()
                    || begun.elapsed() < CLOSED_WITHIN && reserve.has_vms();
                let has_ended = reserve.tend()? > 0;
                let is_coming = match error {
                    Error::Refused(Refused::NoRoom { .. }, _) => {
                        has_ended || is_handing || waits || reserve.has_dirty()
                    }
                    // The refusal itself may have made memory dirty, which does not help this VM. The next try is when
                    // the rest is zeroed.
                    Error::Promised { .. } => {
                        next_try = Instant::now() + AGAIN_EVERY;
                        has_ended || is_handing || waits || was_zeroing
                    }
                    _ => false,
                };
                if !is_coming || begun.elapsed() > ZEROED_WITHIN {
                    return Err(error.into());
                }
                // Other requests are woken only by a change that may help them: two requests must not keep each other
                // awake.
                if has_ended || !was_zeroing && reserve.has_dirty() {
                    self.changed.notify_all();
                }
            }
            drop(self.changed.wait_timeout(state, POLL_EVERY));
            if is_gone() {
                bail!("VM {} does not wait for its memory any more", take.name);
            }
            // Less may be able to go far by now. Read without the lock.
            far = self.demand.far();
            state = self.state.locked();
        }
    }

    /// Takes memory back if the promises to VMs on demand could no longer be kept, because an operator has changed a
    /// VM's settings since the amount that can be far was computed. A later change takes this promise into account.
    fn confirm<'a>(&self, page: Page, handed: Handed<'a>) -> anyhow::Result<Handed<'a>> {
        let far = self.demand.far();
        let mut state = self.state.locked();
        let State::Ours(parts) = &mut *state else { return Ok(handed) };
        let reserve = parts.of(page)?;
        reserve.set_far(far);
        if let Err(error) = reserve.check_kept(&handed.grant.lacked) {
            // No process has seen the memory.
            drop(handed);
            reserve.tend()?;
            self.demand.show(reserve);
            return Err(error.into());
        }
        Ok(handed)
    }
}

fn has_hung_up(client: &OwnedFd) -> bool {
    let mut socket = [PollFd::new(client, PollFlags::empty())];
    let polled = poll(&mut socket, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
    polled.is_ok() && socket[0].revents().contains(PollFlags::HUP)
}
