//! The rights of a peer, decided once per connection from its credentials.
//!
//! Before: a connection was accepted. After: `routes` refuses requests without the right.
//! Promise: credentials that cannot be read give no access.

use tokio::net::UnixStream;

/// The rights of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// May read and change.
    Write = 0,
    /// May read.
    Read = 1,
    /// Has no rights: each request gets a 403.
    Denied = 2,
}

/// The rights of users and groups. Root always has all rights.
#[derive(Clone, Copy, Debug)]
pub struct PeerPolicy {
    /// This user, the daemon's own, may read and change.
    pub owner_uid: u32,
    /// Members of this group may read.
    pub reader_gid: Option<u32>,
}

impl PeerPolicy {
    /// The user of this process has all rights; members of `reader_gid` may read.
    pub fn new(reader_gid: Option<u32>) -> Self {
        Self { owner_uid: rustix::process::geteuid().as_raw(), reader_gid }
    }

    /// The rights of a peer with this user, primary group and supplementary groups.
    pub fn access(&self, uid: u32, gid: u32, groups: &[u32]) -> Access {
        if uid == 0 || uid == self.owner_uid {
            Access::Write
        } else if self.reader_gid.is_some_and(|reader| gid == reader || groups.contains(&reader)) {
            Access::Read
        } else {
            Access::Denied
        }
    }

    pub(super) fn access_of(&self, stream: &UnixStream) -> Access {
        let Ok(peer) = stream.peer_cred() else { return Access::Denied };
        let groups = ballast_sys::peer::groups(stream).unwrap_or_default();
        self.access(peer.uid(), peer.gid(), &groups)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_and_the_owner_change_group_members_look_others_get_nothing() {
        let policy = PeerPolicy { owner_uid: 990, reader_gid: Some(77) };
        assert_eq!(policy.access(0, 0, &[]), Access::Write);
        assert_eq!(policy.access(990, 1, &[]), Access::Write);
        assert_eq!(policy.access(1000, 77, &[]), Access::Read);
        assert_eq!(policy.access(1000, 1000, &[4, 77]), Access::Read);
        assert_eq!(policy.access(1000, 1000, &[4]), Access::Denied);
        let nobody_reads = PeerPolicy { reader_gid: None, ..policy };
        assert_eq!(nobody_reads.access(1000, 77, &[77]), Access::Denied);
    }
}
