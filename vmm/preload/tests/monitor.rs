//! Replies of QEMU's monitor about the guest's memory.

#[path = "../src/monitor.rs"]
#[allow(dead_code, reason = "only a part of it is tried here")]
mod monitor;

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;

use monitor::{Device, Monitor, address_in, base_in, devices_in, ram_in};

/// QEMU 7.2, `-M q35 -m 5G`, with its memory in a backend called `r (prio 0, rom): x`.
const Q35: &str = "address-space: I/O
  0000000000000000-000000000000ffff (prio 0, i/o): io

address-space: cpu-memory-0
address-space: memory
  0000000000000000-ffffffffffffffff (prio 0, i/o): system
    0000000000000000-000000007fffffff (prio 0, ram): alias ram-below-4g @r (prio 0, rom): x 0000000000000000-7fffffff
    0000000000000000-ffffffffffffffff (prio -1, i/o): pci
      00000000000c0000-00000000000dffff (prio 1, rom): pc.rom
    00000000000f0000-00000000000fffff (prio 1, ram): alias pam-ram @r 00000000000f0000-00000000000fffff [disabled]
    00000000fed40000-00000000fed44fff (prio 0, ramd): tpm
    0000000100000000-00000001bfffffff (prio 0, ram): alias ram-above-4g @r 0000000080000000-000000013fffffff
    0000000200000000-000000023fffffff (prio 0, nv-ram): n

address-space: mch
    0000000000000000-000000007fffffff (prio 0, ram): alias ram-below-4g @r 0000000000000000-000000007fffffff

memory-region: r
  0000000000000000-000000013fffffff (prio 0, ram): r
";

#[test]
fn ranges_that_may_be_memory_are_listed_once_and_the_longest_first() {
    let expected = [
        (0, 0x1_4000_0000),
        (0, 0x8000_0000),
        (0xf_0000, 0x1_0000),
        (0x1_0000_0000, 0xc000_0000),
        (0x2_0000_0000, 0x4000_0000),
    ];
    assert_eq!(ram_in(Q35), expected);
    let whole = "  0000000000000000-ffffffffffffffff (prio 0, ram): r\n";
    for nothing in ["", "address-space: memory\n", "  x-y (prio 0, ram): r\n", "(", whole] {
        assert_eq!(ram_in(nothing), [], "{nothing:?}");
    }
}

#[test]
fn the_last_word_is_the_address() {
    assert_eq!(address_in("Host virtual address for 0x0 (r is 0x1) is 0x7fcf5bfff000\r\n"), Some(0x7fcf_5bff_f000));
    for nothing in ["No memory is mapped at address 0xf0000000\r\n", "", " is 0x", "x is 0xzz"] {
        assert_eq!(address_in(nothing), None, "{nothing:?}");
    }
}

fn scripted(answers: &'static [&'static str]) -> UnixStream {
    let (ours, theirs) = UnixStream::pair().expect("socketpair");
    std::thread::spawn(move || {
        let mut asked = BufReader::new(theirs.try_clone().expect("dup")).lines();
        let mut theirs = theirs;
        for answer in answers {
            theirs.write_all(answer.as_bytes()).expect("write");
            if asked.next().is_none() {
                return;
            }
        }
    });
    ours
}

#[test]
fn events_between_request_and_reply_are_skipped() {
    let event = "{\"timestamp\": {\"seconds\": 1}, \"event\": \"RESUME\"}\r\n";
    let answers = [
        "{\"QMP\": {}}\r\n",
        "{\"timestamp\": 1, \"event\": \"STOP\"}\r\n{\"return\": {}}\r\n",
        "{\"event\": \"A\"}\r\n{\"return\": \"Host \\u0041 \\\"x\\\" is 0x10\\r\\n\"}\r\n",
        "{\"error\": {\"class\": \"GenericError\"}}\r\n",
    ];
    let mut monitor = Monitor::greet(scripted(Box::leak(Box::new(answers)))).expect("it greets");
    assert_eq!(monitor.host_address(0).expect("an answer"), Some(0x10));
    let refused = monitor.memory().expect_err("an error").to_string();
    assert!(refused.contains("GenericError"), "{refused}");
    drop(monitor);

    let (ours, mut theirs) = UnixStream::pair().expect("socketpair");
    theirs.write_all(b"{\"QMP\": {}}\n{\"return\": {}}\n").expect("write");
    let mut monitor = Monitor::greet(ours).expect("it greets");
    theirs.write_all(event.as_bytes()).expect("write");
    monitor.drain().expect("an event");
    drop(theirs);
    assert!(monitor.drain().is_err() && monitor.memory().is_err(), "it is gone");
}

#[test]
fn plugged_ram_is_distinguished_from_the_images_of_other_memory_devices() {
    let text = "Memory device [dimm]: \"d\"\r\n  addr: 0x100000000\r\n  slot: 0\r\n  node: 0\r\n  size: 134217728\r\n\
                  memdev: /objects/p\r\n\
                Memory device [nvdimm]: \"n\"\r\n  addr: 0x200000000\r\n  size: 134217728\r\n\
                Memory device [virtio-pmem]: \"i\"\r\n  memaddr: 0x300000000\r\n  size: 134217728\r\n\
                Memory device [virtio-mem]: \"v\"\r\n  memaddr: 0x140000000\r\n  requested-size: 1\r\n  \
                  size: 2097152\r\n  max-size: 1073741824\r\n\
                Memory device [virtio-mem]: \"e\"\r\n  memaddr: 0x180000000\r\n  size: 0\r\n";
    let device = |address, len, ram| Device { address, len, ram };
    let expected = [
        device(0x1_0000_0000, 128 << 20, 128 << 20),
        device(0x2_0000_0000, 128 << 20, 0),
        device(0x3_0000_0000, 128 << 20, 0),
        device(0x1_4000_0000, 1 << 30, 2 << 20),
        device(0x1_8000_0000, 0, 0),
    ];
    assert_eq!(devices_in(text), expected);
    assert_eq!((devices_in(""), devices_in("Memory device [dimm]: \"d\"\n  addr: x\n")), (vec![], vec![]));
    assert_eq!(base_in("base memory: 268435456\r\nplugged memory: 0\r\n"), Some(268_435_456));
    assert_eq!(base_in("unknown command"), None);
}

/// The unmanaged amount of a machine with 256 MiB in the region at 0x10000000 (`is_base_managed`: the guest sees it),
/// this memory device, and 1 GiB in the region at 0x40000000.
fn unmanaged_beside(answers: Vec<String>, is_base_managed: bool) -> u64 {
    let reply = |text: &str| format!("{{\"return\": \"{text}\"}}\n");
    let mut all = vec!["{\"QMP\": {}}\n".to_owned(), "{\"return\": {}}\n".to_owned()];
    all.extend(answers.iter().map(|text| reply(text)));
    all.push(reply("base memory: 268435456\\r\\nplugged memory: 0\\r\\n"));
    let all: Vec<&'static str> = all.into_iter().map(|text| &*text.leak()).collect();
    let mut monitor = Monitor::greet(scripted(all.leak())).expect("it greets");
    let regions = [(0x1000_0000, 256 << 20, is_base_managed), (0x4000_0000, 1 << 30, true)];
    monitor.unmanaged(&regions).expect("an answer")
}

#[test]
fn a_memory_device_on_a_managed_file_is_neither_base_memory_nor_missing() {
    let at = "Host virtual address for 0x140000000 (r) is 0x40000000";
    let nothing = "No memory is mapped at address 0x140000000";
    let virtio_mem = |size: u64| {
        format!(
            "Memory device [virtio-mem]: x\\r\\n memaddr: 0x140000000\\r\\n size: {size}\\r\\n max-size: 1073741824"
        )
    };
    let nvdimm = "Memory device [nvdimm]: x\\r\\n addr: 0x140000000\\r\\n size: 1073741824".to_owned();
    // The second slot has all of the guest's memory.
    let slot = "    0000000160000000-000000017fffffff (prio 0, ram): alias memslot-1 @v 20000000-3fffffff";
    let in_slot = "Host virtual address for 0x160000000 (v) is 0x60000000";
    let slots = || vec![virtio_mem(2 << 20), nothing.to_owned(), slot.to_owned(), in_slot.to_owned()];
    let whole = |device: String| vec![device, at.to_owned()];
    for (answers, what) in [
        (slots(), "virtio-mem with dynamic slots"),
        (whole(virtio_mem(2 << 20)), "virtio-mem"),
        (whole(virtio_mem(0)), "virtio-mem without memory"),
        (whole(nvdimm), "NVDIMM"),
    ] {
        assert_eq!(unmanaged_beside(answers.clone(), true), 0, "{what}");
        assert_eq!(unmanaged_beside(answers, false), 256 << 20, "{what}: the base memory is missing");
    }
    let elsewhere = in_slot.replace("0x60000000", "0x90000000");
    let answers = vec![virtio_mem(2 << 20), nothing.to_owned(), slot.to_owned(), elsewhere];
    assert_eq!(unmanaged_beside(answers, true), 2 << 20, "its memory is private");
}
