//! Messages between keeper and engine, on the socket that is the engine's standard input.
//!
//! Before: keeper or engine sends a message. After: the other process obeys; an order with a number gets a reply.
//! Threads: the keeper's one, and the engine's first. Units: in the field names.
//! Promise: a message that the reader cannot decode but must not ignore is refused by name; other unknown messages are
//! skipped. The bytes of each message are those of `FORMAT`'s version, which a test compares.
//!
//! Framed like the client's messages (`base::format`), but with versions of their own: the engine is started from the
//! keeper's file, from its replacement, or from the program that an operator named for an upgrade. An engine that
//! cannot read its first order says so and ends; a restart of the keeper helps.
#![expect(missing_docs, reason = "most fields are a VM, a process, or the number of the order")]

use ballast_base::Hva;
use ballast_base::format::{Format, Message};
use ballast_base::wire::{Span, StoreFiles, VmId};
use serde::{Deserialize, Serialize};

use crate::failure::Failure;
use crate::upgrading::Upgrading;

/// The versions of the messages in this file.
pub const FORMAT: Format = Format { version: 1, least_reader: 1, oldest: 1 };

/// The parameters of a new engine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Begin {
    pub keeper_pid: u32,
    /// Number of engines that died before this one.
    pub restarts: u64,
    pub since_unix_s: u64,
    /// In the engine's own format, which the keeper does not read.
    pub settings: Vec<u8>,
}

/// Keeper to engine. An order with `seq` is answered by a [`Report`] with that number.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Order {
    /// The first order. Descriptor: the listening API socket.
    Begin(Begin),
    /// Serve this VM. Descriptors: the state file, the files of its stores, and each RAM file that the state file
    /// names, once, in any order.
    OpenVm {
        vm: VmId,
        /// The VMM program.
        vmm: String,
        /// Why nothing may be reclaimed.
        pinned: Option<String>,
        /// See [`ballast_base::wire::Attach::may_pin`].
        may_pin: bool,
        stores: Vec<StoreFiles>,
        files: u8,
        /// Another engine serves the faults of this VM, and does nothing else for it ([`Order::ServeFaults`]): only
        /// serve faults, too, until [`Order::Alone`], and repair nothing.
        beside: bool,
        /// Number of regions in the state file. The file may have more when the engine reads this order; those come
        /// with [`Order::AddRegion`].
        regions: u32,
    },
    /// Serve the faults of this process. Descriptors: its userfaultfds in its order, then the control socket.
    AddView {
        vm: VmId,
        pid: u32,
        uffd_features: u64,
        spans: Vec<(Span, u32)>,
        /// Since when no engine serves this process, on the monotonic clock.
        unserved_since_ns: Option<u64>,
    },
    /// RAM was hot-plugged. Descriptors: its files.
    AddRegion {
        vm: VmId,
        /// The process that announced the region.
        pid: u32,
        /// Where that process maps the region; `None` if that comes with its view.
        span: Option<Span>,
        number: u32,
        files: u8,
    },
    /// RAM is about to be unplugged. Answered by [`Report::Done`].
    RemoveRegion {
        seq: u64,
        vm: VmId,
        /// The process that announced the removal.
        pid: u32,
        /// Where that process maps the region.
        hva: Hva,
        /// The region, if the keeper knows it. It may not know it, because [`Order::AddView`] may come without it.
        region: Option<u32>,
    },
    /// Keep all pages resident from now on. Answered by [`Report::Done`] when all are resident: a VMM that is about to
    /// pin its memory must find no page far or in transit.
    Pin { seq: u64, vm: VmId, reason: String },
    /// From now on the VM's memory may be pinned for a while. Answered by [`Report::Done`].
    MayPin { seq: u64, vm: VmId },
    /// Answered by [`Report::Done`] when this process can touch these regions: its faults there are served, or, if that
    /// is impossible, each page of the VM is resident and stays resident.
    Reach { seq: u64, vm: VmId, pid: u32, regions: Vec<u32> },
    /// A process of the VM is gone.
    RemoveView { vm: VmId, pid: u32 },
    /// No process of the VM is left. If some process can still reach a RAM file, the file's far pages are written back
    /// to it. Answered by [`Report::Done`] when that is done and nothing of the VM is open in this engine.
    CloseVm { seq: u64, vm: VmId },
    /// Make a file store for a VM that has none. Answered by [`Report::Made`].
    MakeFileStore { seq: u64 },
    /// All existing VMs were handed over: answer the API from now on. Answered by [`Report::Serving`].
    Serve,
    /// Answered by [`Report::Pong`].
    Ping,
    /// An entry for the event list.
    Note {
        vm: Option<String>,
        kind: String,
        /// One sentence.
        message: String,
    },
    /// Check whether this engine could serve this VM, which another engine serves, and change nothing. Descriptors as
    /// for [`Order::OpenVm`]. Answered by [`Report::Done`].
    CheckVm {
        seq: u64,
        vm: VmId,
        stores: Vec<StoreFiles>,
        /// Number of RAM files.
        files: u8,
        regions: u32,
    },
    /// Make no more decisions for the host, and answer no requests: VMs are about to move from this engine or to it.
    /// Complete current operations. Answered by [`Report::Done`], after [`Report::Past`].
    Rest { seq: u64 },
    /// Decide for the host and answer requests again, as soon as earlier orders are done.
    Resume,
    /// Another engine will serve this VM: complete current operations, and close the VM. Answered by [`Report::Done`]
    /// when this engine can no longer change anything of it.
    HandOver { seq: u64, vm: VmId },
    /// Answered by [`Report::Done`] when earlier orders for this VM are done; with an error if the VM is not open and
    /// served.
    Tell { seq: u64, vm: VmId },
    /// Another engine serves all VMs: end.
    Leave,
    /// The event list of another engine.
    Past(Vec<u8>),
    /// The state of an upgrade.
    Upgrading(Upgrading),
    /// The result of [`Report::Upgrade`].
    Asked {
        /// The number in the report.
        ask: u64,
        /// An error is the reason why there is no upgrade.
        result: Result<(), Failure>,
    },
    /// Only serve this VM's faults from now on: another engine is about to serve it, too, and then to take it over.
    /// Answered by [`Report::Done`]. If the reply is an error, the VM may be restricted to its faults all the same.
    /// [`Order::HandOver`] follows.
    ServeFaults { seq: u64, vm: VmId },
    /// The engine that served this VM beside this one has closed it.
    Alone { vm: VmId },
}

impl Order {
    /// Renumbers an order for which a client waits.
    pub fn number(&mut self, number: u64) {
        if let Self::RemoveRegion { seq, .. }
        | Self::Pin { seq, .. }
        | Self::MayPin { seq, .. }
        | Self::Reach { seq, .. } = self
        {
            *seq = number;
        }
    }

    /// The VM of an order about a VM that the engine may have open.
    pub fn vm(&self) -> Option<VmId> {
        match self {
            Self::OpenVm { vm, .. }
            | Self::AddView { vm, .. }
            | Self::AddRegion { vm, .. }
            | Self::RemoveRegion { vm, .. }
            | Self::Pin { vm, .. }
            | Self::MayPin { vm, .. }
            | Self::Reach { vm, .. }
            | Self::RemoveView { vm, .. }
            | Self::CloseVm { vm, .. }
            | Self::CheckVm { vm, .. }
            | Self::HandOver { vm, .. }
            | Self::Tell { vm, .. }
            | Self::ServeFaults { vm, .. }
            | Self::Alone { vm } => Some(*vm),
            Self::Begin(_)
            | Self::MakeFileStore { .. }
            | Self::Serve
            | Self::Ping
            | Self::Note { .. }
            | Self::Rest { .. }
            | Self::Resume
            | Self::Leave
            | Self::Past(_)
            | Self::Upgrading(_)
            | Self::Asked { .. } => None,
        }
    }
}

/// Engine to keeper.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Report {
    /// The order with this number is done, or the reason why not.
    Done { seq: u64, result: Result<(), Failure> },
    /// A file store was made, or the reason why not. Descriptors: the place of its file, and its index.
    Made { seq: u64, result: Result<(), Failure> },
    /// The engine has opened the VMs that it was given.
    Serving,
    /// Answers [`Order::Ping`].
    Pong,
    /// An operator changed the settings: the next engine will begin with these.
    Settings(Vec<u8>),
    /// This engine cannot begin, for this reason, and ends.
    Refused(String),
    /// A part of the event list, for the next engine.
    Past(Vec<u8>),
    /// An operator wants an engine of this program. Answered by [`Order::Asked`].
    Upgrade {
        /// Number of the request, which the answer repeats.
        ask: u64,
        /// Path of the program; if empty, the one that engines are started from.
        program: String,
    },
    /// The engine lacked descriptors, memory or a thread to serve all of this VM: the VM must be opened again.
    Lost(VmId),
}

impl Message for Order {
    const FORMAT: Format = FORMAT;
}

impl Message for Report {
    const FORMAT: Format = FORMAT;
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_base::Bytes;
    use ballast_base::format::{HEADER, encode};

    #[test]
    fn the_bytes_are_those_of_this_version() {
        let vm = VmId([7; 16]);
        let span = Span { hva: Hva(4096), len: Bytes(8192) };
        let stores = vec![StoreFiles { store: 1, count: 1 }, StoreFiles { store: 2, count: 2 }];
        let begin = Begin { keeper_pid: 1, restarts: 2, since_unix_s: 3, settings: vec![4, 5] };
        let (vmm, pinned) = ("q".into(), Some("p".into()));
        let open = Order::OpenVm { vm, vmm, pinned, may_pin: true, stores, files: 5, beside: true, regions: 6 };
        let add = Order::AddView { vm, pid: 1, uffd_features: 2, spans: vec![(span, 3)], unserved_since_ns: Some(4) };
        let keeper = Some(Err("k".into()));
        let (program, message) = ("p".into(), "m".into());
        let upgrading = Upgrading { number: 1, program, message, keeper, ..Upgrading::default() };
        let orders = [
            Order::Begin(begin),
            open,
            add,
            Order::AddRegion { vm, pid: 1, span: Some(span), number: 2, files: 3 },
            Order::RemoveRegion { seq: 1, vm, pid: 2, hva: Hva(3), region: Some(4) },
            Order::Pin { seq: 1, vm, reason: "r".into() },
            Order::MayPin { seq: 1, vm },
            Order::Reach { seq: 1, vm, pid: 2, regions: vec![3] },
            Order::RemoveView { vm, pid: 1 },
            Order::CloseVm { seq: 1, vm },
            Order::MakeFileStore { seq: 1 },
            Order::Serve,
            Order::Ping,
            Order::Note { vm: Some("v".into()), kind: "k".into(), message: "m".into() },
            Order::CheckVm { seq: 1, vm, stores: vec![], files: 2, regions: 3 },
            Order::Rest { seq: 1 },
            Order::Resume,
            Order::HandOver { seq: 1, vm },
            Order::Tell { seq: 1, vm },
            Order::Leave,
            Order::Past(vec![7]),
            Order::Upgrading(upgrading),
            Order::Asked { ask: 1, result: Err("e".into()) },
            Order::ServeFaults { seq: 1, vm },
            Order::Alone { vm },
        ];
        let reports = [
            Report::Done { seq: 1, result: Err("e".into()) },
            Report::Made { seq: 1, result: Err("e".into()) },
            Report::Serving,
            Report::Pong,
            Report::Settings(vec![6]),
            Report::Refused("r".into()),
            Report::Past(vec![7]),
            Report::Upgrade { ask: 1, program: "p".into() },
            Report::Lost(vm),
        ];
        let hex = |bytes: Vec<u8>| bytes[HEADER..].iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let said: Vec<String> = orders
            .iter()
            .map(|order| hex(encode(order)))
            .chain(reports.iter().map(|report| hex(encode(report))))
            .collect();
        assert_eq!(
            (FORMAT.version, said.join(" ")),
            (1, SAID.to_owned()),
            "raise FORMAT, and put what is said now into SAID"
        );
    }

    #[test]
    fn an_order_of_a_newer_keeper_that_an_engine_may_not_ignore_is_refused_by_name() {
        let mut bytes = encode(&Order::Ping);
        bytes[4..8].copy_from_slice(&[FORMAT.version as u8 + 1, 0, FORMAT.version as u8 + 1, 0]);
        let said = ballast_base::format::decode::<Order>(&bytes).expect_err("too new").to_string();
        let expected = format!("this program has version {}", FORMAT.version);
        assert!(said.contains(&expected), "{said}");
    }

    const SAID: &str = "00010203020405 \
        01070707070707070707070707070707070171010170010201010202050106 \
        020707070707070707070707070707070701020180208040030104 \
        03070707070707070707070707070707070101802080400203 04010707070707070707070707070707070702030104 \
        0501070707070707070707070707070707070172 060107070707070707070707070707070707 \
        070107070707070707070707070707070707020103 080707070707070707070707070707070701 \
        090107070707070707070707070707070707 0a01 0b 0c 0d010176016b016d \
        0e0107070707070707070707070707070707000203 0f01 10 110107070707070707070707070707070707 \
        120107070707070707070707070707070707 13 140107 15010170000000000000016d0101016b00 1601010165 \
        170107070707070707070707070707070707 1807070707070707070707070707070707 0001010165 \
        0101010165 02 03 \
        040106 050172 060107 07010170 0807070707070707070707070707070707";
}
