//! Bounds: the connections and the RAM that one user may have.
//!
//! Before: a user's process connects, or announces RAM. After: it is within its user's share, or it is refused.
//! Threads: the keeper's one. Units: connections, bytes.
//! Promise: one user who is not root leaves room for the others.

use ballast_base::Bytes;
use ballast_sys::meminfo;

use crate::keeper::Keeper;

/// Connections, attached or not.
const MOST_CLIENTS: usize = 4096;
/// Connections of a user who is not root: a quarter, so that three such users cannot keep all others out.
const MOST_OF_A_USER: usize = MOST_CLIENTS / 4;
/// RAM that all processes of such a user may announce, in times the host's memory. It costs the user nothing while it
/// is not touched, but each page of it that is discarded or watched costs the engine a word: 1/512 of it.
const RAM_OF_A_USER: u64 = 16;
/// Connections of one user that have not attached: some VMs that start or come back at the same time.
const MOST_UNATTACHED: usize = 64;

/// May this user have one more connection, given the users of all connections (and whether each is attached)?
pub(crate) fn has_room(uid: u32, clients: impl Iterator<Item = (u32, bool)>) -> Result<(), &'static str> {
    let (mut all, mut own, mut unattached) = (0, 0, 0);
    for (whose, attached) in clients {
        all += 1;
        own += usize::from(whose == uid);
        unattached += usize::from(whose == uid && !attached);
    }
    if all >= MOST_CLIENTS {
        Err("as many clients as there may be are connected")
    } else if uid != 0 && own >= MOST_OF_A_USER {
        Err("as many clients as one user may have are connected")
    } else if unattached >= MOST_UNATTACHED {
        Err("too many connections of this user have not attached")
    } else {
        Ok(())
    }
}

/// May a user's processes announce `more` RAM, on a host with this much memory?
fn has_memory(uid: u32, announced: u64, more: u64, host: u64) -> Result<(), String> {
    let most = host.saturating_mul(RAM_OF_A_USER);
    if uid == 0 || announced.saturating_add(more) <= most {
        return Ok(());
    }
    let [announced, more, most] = [announced, more, most].map(Bytes);
    Err(format!(
        "{more} of RAM and the {announced} of this user's other processes are more than the {most} one user may have"
    ))
}

impl Keeper {
    /// May this user's processes announce these regions, too?
    pub(crate) fn check_memory(&self, uid: u32, more: impl IntoIterator<Item = Bytes>) -> Result<(), String> {
        let views = self.clients.values().filter(|client| client.uid == uid).filter_map(|client| client.view.as_ref());
        let closing = self.closing_ram(uid).0;
        let announced =
            views.flat_map(|view| &view.spans).map(|(span, _)| span.len.0).fold(closing, u64::saturating_add);
        let more = more.into_iter().map(|len| len.0).fold(0, u64::saturating_add);
        has_memory(uid, announced, more, meminfo::bytes("MemTotal").unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_user_cannot_announce_more_ram_than_the_host_can_keep_account_of() {
        let host = 24 << 30;
        assert_eq!(has_memory(7, 15 * host, host, host), Ok(()));
        let why = has_memory(7, 15 * host, host + 1, host).expect_err("a byte more");
        assert!(why.contains("384.0 GiB") || why.contains("384 GiB"), "{why}");
        has_memory(7, u64::MAX, u64::MAX, host).expect_err("no overflow");
        assert_eq!(has_memory(0, u64::MAX, 1, host), Ok(()), "root's VMs are everybody's");
    }

    #[test]
    fn one_user_who_connects_and_says_nothing_keeps_nobody_else_out() {
        let silent = |uid, count| std::iter::repeat_n((uid, false), count);
        let attached = |uid, count| std::iter::repeat_n((uid, true), count);
        assert_eq!(has_room(1, silent(1, MOST_UNATTACHED - 1).chain(attached(1, 100))), Ok(()));
        has_room(1, silent(1, MOST_UNATTACHED)).expect_err("too many that have not attached");
        assert_eq!(has_room(2, silent(1, MOST_UNATTACHED)), Ok(()));
        has_room(0, silent(0, MOST_UNATTACHED)).expect_err("root may err, too");

        has_room(1, attached(1, MOST_OF_A_USER)).expect_err("more than one user's share");
        assert_eq!(has_room(2, attached(1, MOST_OF_A_USER)), Ok(()));
        assert_eq!(has_room(0, attached(0, MOST_CLIENTS - 1)), Ok(()), "root's VMs are everybody's");
        has_room(0, attached(0, MOST_CLIENTS)).expect_err("full");
    }
}
