//! The whole state of a keeper, for the next program in the same process.
//!
//! Before: a keeper is about to exec another program; its descriptors stay open. After: that program reads this and is
//! becomes the keeper of the same VMs, clients and engine, with the same sockets and pid. Units: descriptors are
//! numbers,
//! exec does not change.
//! Promise: a program that cannot read it says so and changes nothing. `ballast_base::format` has the version rule: a
//! new field goes to the end of [`Kept`] itself, never into a part of it; messages in it are bytes with their own
//! versions.
#![expect(missing_docs, reason = "most fields only name what the keeper has")]

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;

use ballast_base::Bytes;
use ballast_base::format::{Format, Message, WireError, decode, encode};
use ballast_base::wire::{Span, VmId};
use ballast_sys::memfd;
use serde::{Deserialize, Serialize};

/// The number of a descriptor.
pub type Number = i32;

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Kept {
    /// The lock on this file excludes a second keeper, and outlives exec.
    pub lock: Number,
    pub attach: Number,
    pub api: Number,
    /// The program that engines are started from.
    pub program: Vec<u8>,
    /// The program of the keeper that wrote this record.
    pub own_program: Vec<u8>,
    /// The settings for new engines.
    pub settings: Vec<u8>,
    /// Whether a new VM gets a file store.
    pub file_stores: bool,
    /// Start of the first keeper of this process.
    pub since_unix_s: u64,
    /// Number of engines that died.
    pub restarts: u64,
    /// The state of the upgrade that replaces this keeper, an [`crate::orders::Order::Upgrading`].
    pub upgrading: Vec<u8>,
    pub engine: KeptEngine,
    /// Dead engines that were not reaped: pid and pidfd.
    pub zombies: Vec<(u32, Number)>,
    pub vms: Vec<KeptVm>,
    /// VMs without processes: number of the order that closes the VM, and whether an engine was given that order.
    pub closing: Vec<(u64, bool, KeptVm)>,
    pub clients: Vec<KeptClient>,
    /// Orders for which clients wait.
    pub pending: Vec<KeptAsk>,
    pub next_client: u64,
    pub next_seq: u64,
    /// Names of groups, and the patterns of their members' names.
    pub groups: Vec<(String, Vec<String>)>,
    /// Keys of clients whose replies wait for the engine, each with its replies in order: a
    /// [`ballast_base::wire::KeeperToClient`], or nothing for a request that is in `pending`.
    pub owed: Vec<(u64, Vec<Vec<u8>>)>,
}

/// The engine that serves.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct KeptEngine {
    pub pid: u32,
    pub start: u64,
    pub pidfd: Number,
    /// The keeper's end of the engine's socket.
    pub socket: Number,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KeptVm {
    /// The state file, which has the rest of the VM's state.
    pub state: Number,
    /// The files of its stores, by store number.
    pub stores: Vec<(u8, Vec<Number>)>,
    /// The files of each region; `None` for a region without files.
    pub ram: Vec<Option<Vec<KeptFile>>>,
    pub uid: u32,
    /// The VMM program.
    pub vmm: String,
    /// Why nothing may be reclaimed.
    pub pinned: Option<String>,
    /// See [`ballast_base::wire::Attach::may_pin`].
    pub may_pin: bool,
}

/// A RAM file: its descriptor, device and inode.
pub type KeptFile = (Number, u64, u64);

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KeptClient {
    pub key: u64,
    pub socket: Number,
    pub pid: u32,
    pub uid: u32,
    /// Number of its messages that were refused.
    pub faults: u32,
    /// Its view, if it has attached.
    pub view: Option<KeptView>,
}

/// The descriptors with which a process attached.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KeptView {
    pub vm: VmId,
    /// Userfaultfds, in the client's order.
    pub uffds: Vec<Number>,
    pub uffd_features: u64,
    /// The engine's end of the control socket.
    pub control: Number,
    /// Where the process maps which region.
    pub spans: Vec<(Span, u32)>,
}

/// An order for which a client waits.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KeptAsk {
    pub seq: u64,
    pub client: u64,
    /// An [`crate::orders::Order`].
    pub order: Vec<u8>,
    /// The reply says that the client is attached, not only that the order succeeded.
    pub attaches: bool,
}

impl Message for Kept {
    const FORMAT: Format = Format { version: 1, least_reader: 1, oldest: 1 };
}

impl Kept {
    /// The numbers of all descriptors in this record.
    pub fn numbers(&self) -> Vec<Number> {
        let mut all = vec![self.lock, self.attach, self.api, self.engine.pidfd, self.engine.socket];
        all.extend(self.zombies.iter().map(|(_, pidfd)| pidfd));
        for vm in self.vms.iter().chain(self.closing.iter().map(|(_, _, vm)| vm)) {
            all.push(vm.state);
            all.extend(vm.stores.iter().flat_map(|(_, files)| files));
            all.extend(vm.ram.iter().flatten().flatten().map(|(number, ..)| number));
        }
        for client in &self.clients {
            all.push(client.socket);
            if let Some(view) = &client.view {
                all.extend(&view.uffds);
                all.push(view.control);
            }
        }
        all
    }

    /// Writes this record to a new memfd.
    pub fn write(&self) -> io::Result<OwnedFd> {
        let fd = memfd::create("ballast-kept", Bytes(0))?;
        let file = File::from(fd);
        file.write_all_at(&encode(self), 0)?;
        Ok(file.into())
    }

    /// Reads a record from a memfd.
    ///
    /// # Errors
    /// The file cannot be read, is not a keeper's record, or has a version that this program cannot read.
    pub fn read(file: impl AsFd) -> io::Result<Self> {
        let invalid = |error: WireError| io::Error::new(io::ErrorKind::InvalidData, error);
        // The program that wrote the record has ended: the record may contain anything.
        let size = usize::try_from(memfd::size(&file)?.0).unwrap_or(usize::MAX);
        if size > LONGEST {
            return Err(io::Error::new(io::ErrorKind::InvalidData, format!("it has {size} bytes")));
        }
        let mut bytes = vec![0; size];
        File::from(file.as_fd().try_clone_to_owned()?).read_exact_at(&mut bytes, 0)?;
        decode(&bytes).map_err(invalid)
    }
}

/// Longest record, in bytes. A VM takes some hundred bytes; with 32 RAM files in each of 32 regions, some 20 KiB.
const LONGEST: usize = 1 << 30;

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_base::Hva;
    use ballast_base::format::HEADER;

    fn kept() -> Kept {
        let vm = |state| KeptVm {
            state,
            stores: vec![(1, vec![11]), (2, vec![12, 13])],
            ram: vec![None, Some(vec![(14, 15, 16)])],
            uid: 17,
            vmm: "q".into(),
            pinned: Some("p".into()),
            may_pin: true,
        };
        let spans = vec![(Span { hva: Hva(4096), len: Bytes(8192) }, 1)];
        let view = KeptView { vm: VmId([7; 16]), uffds: vec![23, 24], uffd_features: 3, control: 25, spans };
        Kept {
            lock: 4,
            attach: 5,
            api: 6,
            program: b"/p".to_vec(),
            own_program: b"/o".to_vec(),
            settings: vec![1],
            file_stores: true,
            since_unix_s: 2,
            restarts: 3,
            upgrading: vec![4],
            engine: KeptEngine { pid: 5, start: 6, pidfd: 7, socket: 8 },
            zombies: vec![(1, 9)],
            vms: vec![vm(10)],
            closing: vec![(2, true, vm(20))],
            clients: vec![KeptClient { key: 3, socket: 22, pid: 4, uid: 5, faults: 6, view: Some(view) }],
            pending: vec![KeptAsk { seq: 7, client: 3, order: vec![8], attaches: true }],
            next_client: 9,
            next_seq: 10,
            groups: vec![("g".into(), vec!["m".into()])],
            owed: vec![(3, vec![vec![], vec![5, 6]])],
        }
    }

    #[test]
    fn the_bytes_are_those_of_this_version() {
        let said: String = encode(&kept())[HEADER..].iter().map(|byte| format!("{byte:02x}")).collect();
        let vm = "020101160202181a020001011c0f1011017101017001";
        let expected = (
            1,
            format!(
                "080a0c022f70022f6f0101010203010405060e100101120114{vm}01020128{vm}\
                 01032c0405060107070707070707070707070707070707022e300332018020804001010703010801090a\
                 01016701016d01030200020506"
            ),
        );
        assert_eq!((Kept::FORMAT.version, said), expected, "raise FORMAT, and put what is written now here");
    }

    #[test]
    fn a_record_is_read_as_written_and_names_every_descriptor() {
        let kept = kept();
        let file = kept.write().expect("a memory file");
        assert_eq!(Kept::read(&file).expect("readable"), kept);
        let mut numbers = kept.numbers();
        numbers.sort_unstable();
        assert_eq!(numbers, [4, 5, 6, 7, 8, 9, 10, 11, 11, 12, 12, 13, 13, 14, 14, 20, 22, 23, 24, 25]);
    }

    #[test]
    fn a_file_that_is_no_record_or_is_too_new_is_refused_with_both_versions() {
        let mut bytes = encode(&kept());
        bytes[4..8].copy_from_slice(&[5, 0, 4, 0]);
        let file = memfd::create("ballast-test", Bytes(0)).expect("memfd");
        let file = File::from(file);
        file.write_all_at(&bytes, 0).expect("written");
        let said = Kept::read(&file).expect_err("too new").to_string();
        assert!(said.contains("version 5 and needs a reader of at least 4; this program has version"), "{said}");
        let (reader, _writer) = io::pipe().expect("a pipe");
        Kept::read(&reader).expect_err("a pipe");
        Kept::read(memfd::create("ballast-test", Bytes(2 << 30)).expect("memfd")).expect_err("too long");
        Kept::read(memfd::create("ballast-test", Bytes(64)).expect("memfd")).expect_err("zeros");
    }
}
