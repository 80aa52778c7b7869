//! The record that a keeper leaves to the next program in the same process: all of its state.
//!
//! Before: a keeper is about to become another program by exec; its descriptors stay open. After: that program reads
//! this and is the keeper: of the same VMs, clients and engine, under the same sockets and the same pid.
//! Units: descriptors are numbers, which are the same before and after.
//! Promise: a program that cannot read it says so and changes nothing. The version rule is `ballast_base::format`'s: a
//! new field goes to the end of [`Kept`] itself, never into a part of it, and messages in it are bytes with versions of
//! their own.

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

/// The record of a keeper.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Kept {
    /// The file whose lock excludes a second keeper. The lock stays, because the process does.
    pub lock: Number,
    /// The attach socket.
    pub attach: Number,
    /// The API socket.
    pub api: Number,
    /// The program that engines are started from.
    pub program: Vec<u8>,
    /// The file of the keeper that wrote this.
    pub own_program: Vec<u8>,
    /// The settings that engines begin with.
    pub settings: Vec<u8>,
    /// A new VM is to have a file store.
    pub file_stores: bool,
    /// When the first keeper of this process began.
    pub since_unix_s: u64,
    /// Engines that died.
    pub restarts: u64,
    /// An [`crate::orders::Order::Upgrading`]: the state of the upgrade that this is a part of.
    pub upgrading: Vec<u8>,
    /// The engine.
    pub engine: KeptEngine,
    /// Engines that are dead and have not been reaped: pid and pidfd.
    pub zombies: Vec<(u32, Number)>,
    /// The VMs.
    pub vms: Vec<KeptVm>,
    /// VMs without processes: the number of the order that closes it, and whether an engine has been given that.
    pub closing: Vec<(u64, bool, KeptVm)>,
    /// Connections.
    pub clients: Vec<KeptClient>,
    /// Orders that clients wait for.
    pub pending: Vec<KeptAsk>,
    /// The key of the next connection.
    pub next_client: u64,
    /// The number of the next order.
    pub next_seq: u64,
    /// Groups whose members have equal pages once, and patterns of their members' names.
    pub groups: Vec<(String, Vec<String>)>,
    /// Clients that get a reply only after one that waits for the engine, and what they get, in order: a
    /// [`ballast_base::wire::KeeperToClient`], or nothing for each of their requests in `pending`.
    pub owed: Vec<(u64, Vec<Vec<u8>>)>,
}

/// An engine that serves.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct KeptEngine {
    /// The process.
    pub pid: u32,
    /// When it started.
    pub start: u64,
    /// Its pidfd.
    pub pidfd: Number,
    /// The keeper's end of its socket.
    pub socket: Number,
}

/// A VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KeptVm {
    /// The state file, which has the rest.
    pub state: Number,
    /// The files of its stores, by number.
    pub stores: Vec<(u8, Vec<Number>)>,
    /// The files of each region with device and inode; `None` for one without.
    pub ram: Vec<Option<Vec<KeptFile>>>,
    /// Whose it is.
    pub uid: u32,
    /// The VMM program.
    pub vmm: String,
    /// Why nothing may be reclaimed.
    pub pinned: Option<String>,
    /// See [`ballast_base::wire::Attach::may_pin`].
    pub may_pin: bool,
    /// How many engines had opened it when the last one was named.
    pub named_at: u64,
}

/// A RAM file: its descriptor, device and inode.
pub type KeptFile = (Number, u64, u64);

/// A connection.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KeptClient {
    /// Its key.
    pub key: u64,
    /// The connection.
    pub socket: Number,
    /// Its process.
    pub pid: u32,
    /// Its user.
    pub uid: u32,
    /// Messages of it that were refused.
    pub faults: u32,
    /// Its view, if it has attached.
    pub view: Option<KeptView>,
}

/// The descriptors that a process attached with.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KeptView {
    /// The VM.
    pub vm: VmId,
    /// In the client's order.
    pub uffds: Vec<Number>,
    /// Their features.
    pub uffd_features: u64,
    /// The engine's end of the control socket.
    pub control: Number,
    /// Where it maps which region.
    pub spans: Vec<(Span, u32)>,
}

/// A client's wait.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KeptAsk {
    /// The number of the order.
    pub seq: u64,
    /// The client's key.
    pub client: u64,
    /// An [`crate::orders::Order`].
    pub order: Vec<u8>,
    /// The reply is that it is attached, not only that the order succeeded.
    pub attaches: bool,
}

impl Message for Kept {
    const FORMAT: Format = Format { version: 1, least_reader: 1, oldest: 1 };
}

impl Kept {
    /// Every descriptor that it names.
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

    /// Write it as a memory file.
    ///
    /// # Errors
    /// There is no memory or no descriptor for it.
    pub fn write(&self) -> io::Result<OwnedFd> {
        let fd = memfd::create("ballast-kept", Bytes(0))?;
        let file = File::from(fd);
        file.write_all_at(&encode(self), 0)?;
        Ok(file.into())
    }

    /// Read such a file.
    ///
    /// # Errors It cannot be read, is no such file, or has a version that this program cannot read.
    pub fn read(file: impl AsFd) -> io::Result<Self> {
        let invalid = |error: WireError| io::Error::new(io::ErrorKind::InvalidData, error);
        // Another program wrote it and has ended. It may contain anything.
        let size = usize::try_from(memfd::size(&file)?.0).unwrap_or(usize::MAX);
        if size > LONGEST {
            return Err(io::Error::new(io::ErrorKind::InvalidData, format!("it has {size} bytes")));
        }
        let mut bytes = vec![0; size];
        File::from(file.as_fd().try_clone_to_owned()?).read_exact_at(&mut bytes, 0)?;
        decode(&bytes).map_err(invalid)
    }
}

/// Bytes of the longest one. A VM takes some hundred bytes, one with 32 RAM files in each of 32 regions some 20 KiB.
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
            named_at: 18,
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
    fn what_is_written_down_is_what_this_version_writes() {
        let said: String = encode(&kept())[HEADER..].iter().map(|byte| format!("{byte:02x}")).collect();
        let vm = "020101160202181a020001011c0f101101710101700112";
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
    fn it_is_read_as_it_was_written_and_names_every_descriptor() {
        let kept = kept();
        let file = kept.write().expect("a memory file");
        assert_eq!(Kept::read(&file).expect("readable"), kept);
        let mut numbers = kept.numbers();
        numbers.sort_unstable();
        assert_eq!(numbers, [4, 5, 6, 7, 8, 9, 10, 11, 11, 12, 12, 13, 13, 14, 14, 20, 22, 23, 24, 25]);
    }

    #[test]
    fn what_is_no_such_file_or_too_new_is_refused_with_both_versions() {
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
