//! Command lines that are taken, changed and refused.

use super::super::options::{is_probe, is_without_machine, options};
use super::*;

const SHARED: &str = "-object memory-backend-memfd,id=ram0,size=1G,share=on";

fn planned(line: &str, add: bool) -> Result<Plan, String> {
    planned_for(line, if add { Backing::Memfd } else { Backing::AsGiven })
}

fn planned_for(line: &str, backing: Backing) -> Result<Plan, String> {
    let words: Vec<String> = line.split_ascii_whitespace().map(str::to_owned).collect();
    inspect(&words, backing, &|path| path.starts_with("/dev/shm")).map_err(|why| why.to_string())
}

fn added(line: &str) -> String {
    let mut words: Vec<String> = line.split_ascii_whitespace().map(str::to_owned).collect();
    for edit in planned(line, true).unwrap_or_else(|reason| panic!("{line}: {reason}")).edits {
        match edit {
            Edit::Replace(index, word) => words[index] = word,
            Edit::Append(word) => words.push(word),
        }
    }
    words.join(" ")
}

#[test]
fn a_shared_memfd_in_any_spelling_is_taken_as_it_is() {
    for line in [
        "-machine q35,memory-backend=ram0 -m 1G",
        "-M pc,memory-backend=ram0 -m size=1G,slots=2,maxmem=4G -nographic",
        "--machine type=q35,accel=kvm,memory-backend=ram0 -m 1024 -daemonize disk.img",
        "-machine q35 -machine memory-backend=ram0 -accel tcg,thread=multi -S",
        "-m 1G -numa node,nodeid=0,cpus=0,memdev=ram0",
    ] {
        let plan = planned(&format!("{line} {SHARED}"), false).expect(line);
        assert_eq!(plan, Plan::default(), "{line}");
        assert_eq!(planned(&format!("{line} {SHARED}"), true).expect(line).edits, [], "nothing to add: {line}");
    }
    let machine = "-machine q35,memory-backend=r";
    for object in [
        "memory-backend-memfd,id=r,size=1G",
        "memory-backend-memfd,id=r,size=1G,share,prealloc=on",
        "qom-type=memory-backend-memfd,id=r,size=1G,share=yes",
        "memory-backend-file,id=r,size=1G,mem-path=/dev/shm/a,share=on",
        "memory-backend-shm,id=r,size=1G",
        r#"{"qom-type":"memory-backend-memfd","id":"r","size":1073741824,"share":true}"#,
    ] {
        planned(&format!("{machine} -object {object}"), false).expect(object);
    }
}

#[test]
fn private_ram_is_refused_with_the_flags_for_this_command_line() {
    let reason = planned("-M q35,accel=tcg -m 1.5G -nographic", false).expect_err("private");
    assert!(reason.contains("-object memory-backend-memfd,id=ballast-ram0,size=1536M,share=on"), "{reason}");
    assert!(reason.contains("-machine q35,accel=tcg,memory-backend=ballast-ram0"), "{reason}");
    assert!(reason.contains("instead of\n  -machine q35,accel=tcg"), "{reason}");
    let reason = planned("-enable-kvm -m 512", false).expect_err("private");
    assert!(reason.contains("size=512M,share=on -machine memory-backend=ballast-ram0"), "{reason}");
}

#[test]
fn the_missing_flags_are_added_and_nothing_else_is_changed() {
    let tail = |size: &str| format!("-object memory-backend-memfd,id=ballast-ram0,size={size},share=on");
    let default = "-machine memory-backend=ballast-ram0";
    assert_eq!(added("-m 1G d.img"), format!("-m 1G d.img {} {default}", tail("1024M")));
    assert_eq!(added("-nographic"), format!("-nographic {} {default}", tail("128M")));
    assert_eq!(
        added("-m size=2048,slots=2,maxmem=4G -machine q35 -mem-prealloc -smp 2"),
        format!(
            "-m size=2048,slots=2,maxmem=4G -machine q35,memory-backend=ballast-ram0 -mem-prealloc -smp 2 {}",
            tail("2048M")
        )
    );
    assert_eq!(
        added("-m 262148k -M pc -numa node -numa node"),
        format!("-m 262148k -M pc,memory-backend=ballast-ram0 -numa node -numa node {}", tail("268439552"))
    );
}

#[test]
fn ram_of_the_pool_needs_a_backend_of_huge_pages_which_is_added_and_whole_ones() {
    let (huge, gib) = (Backing::Pool(Pages::Mix), Backing::Pool(Pages::Gib));
    for (backing, size) in [(huge, "2M"), (gib, "1G")] {
        let plan = planned_for("-m 1G d.img", backing).expect("added");
        let backend = "memory-backend-memfd,id=ballast-ram0,size=1024M,share=on,hugetlb=on,hugetlbsize=";
        assert_eq!(plan.edits[1], Edit::Append(format!("{backend}{size}")));
    }
    let machine = "-machine q35,memory-backend=r -object memory-backend-";
    for given in ["memfd,id=r,size=1G,share=on,hugetlb=on,hugetlbsize=2M", "memfd,id=r,size=1G,hugetlb=on"] {
        assert_eq!(planned_for(&format!("{machine}{given}"), huge).expect(given), Plan::default());
        assert!(planned_for(&format!("{machine}{given}"), gib).expect_err(given).contains("hugetlbsize=1G"));
    }
    let shared = "share=on,x-use-canonical-path-for-ramblock-id=off,hugetlb=on,hugetlbsize=2097152";
    let plan = planned_for(&format!("{machine}ram,id=r,size=1G"), huge).expect("libvirt's");
    assert_eq!(plan.edits, [Edit::Replace(3, format!("memory-backend-memfd,id=r,size=1G,{shared}"))]);
    for (line, why) in [
        (format!("{machine}memfd,id=r,size=1G,share=on"), "hugetlb=on,hugetlbsize=2M"),
        (format!("{machine}file,id=r,size=1G,share=on,mem-path=/dev/shm/a"), "takes the place of huge pages"),
        ("-m 1025".into(), "no multiple of 2 MiB"),
    ] {
        let said = planned_for(&line, huge).expect_err(&line);
        assert!(said.contains(why), "{line}: {said}");
    }
    let said = planned_for("-m 1536", gib).expect_err("half a page");
    assert!(said.contains("1.5 GiB is no multiple of 1 GiB"), "{said}");
}

#[test]
fn backends_that_cannot_be_managed_are_named_with_the_reason() {
    let machine = "-machine q35,memory-backend=r";
    for (object, reason) in [
        ("memory-backend-memfd,id=r,size=1G,share=off", "share=on"),
        ("memory-backend-memfd,id=r,size=1G,share=on,hugetlb=on,hugetlbsize=1G", "hugetlbsize=2M"),
        ("memory-backend-ram,id=r,size=1G", "memory-backend-memfd"),
        ("memory-backend-ram,id=r,size=1G,share=on", "memory-backend-memfd"),
        ("memory-backend-file,id=r,size=1G,mem-path=/dev/shm/a", "share=on"),
        ("memory-backend-file,id=r,size=1G,mem-path=/var/lib/a,share=on", "neither in a tmpfs"),
        (r#"{"qom-type":"memory-backend-ram","id":"r","size":1073741824}"#, "memory-backend-memfd"),
    ] {
        let error = planned(&format!("{machine} -object {object}"), false).expect_err(object);
        assert!(error.contains(reason) && error.starts_with("RAM backend r"), "{object}: {error}");
    }
    for object in [
        "memory-backend-memfd,id=r,size=1G,share=off,hugetlb=on,hugetlbsize=1G",
        "memory-backend-file,id=r,size=1G,mem-path=/var/lib/a,share=on",
        "memory-backend-file,id=r,size=1G,mem-path=/etc/passwd",
    ] {
        let error = planned(&format!("{machine} -object {object}"), true).expect_err(object);
        assert!(error.starts_with("RAM backend r"), "no other form is better: {object}: {error}");
    }
    let dimm = "-object memory-backend-ram,id=d,size=1G -device pc-dimm,id=d0,memdev=d";
    assert!(
        planned(&format!("-machine memory-backend=ram0 {SHARED} {dimm}"), false).expect_err("dimm").contains(" d ")
    );
    assert!(planned("-m 1G -mem-path /dev/shm", true).expect_err("private").contains("Leave it out"));
    assert!(planned("-m 1G -numa node,mem=512M -numa node,mem=512M", true).expect_err("legacy").contains("memdev=n0"));
    // QEMU itself complains about a last option without its value.
    assert_eq!(planned("-m 1G -machine", true).expect("as if it were not there").edits.len(), 4);
    assert!(planned("-m lots", true).expect_err("size").contains("\"lots\""));
}

#[test]
fn a_backend_of_private_memory_becomes_a_shared_memfd_with_all_else_as_it_was() {
    let stream = "x-use-canonical-path-for-ramblock-id";
    let dir = tempfile::tempdir_in("/dev/shm").expect("a directory in a tmpfs");
    let folder = dir.path().display();
    for (object, shared) in [
        ("memory-backend-ram,id=r,size=1G", format!("memory-backend-memfd,id=r,size=1G,share=on,{stream}=off")),
        (
            "qom-type=memory-backend-ram,id=r,size=1G,share=no,host-nodes=0,policy=bind",
            format!("qom-type=memory-backend-memfd,id=r,size=1G,host-nodes=0,policy=bind,share=on,{stream}=off"),
        ),
        (
            r#"{"qom-type":"memory-backend-ram","id":"r","size":1073741824,"prealloc":true}"#,
            format!(
                r#"{{"id":"r","prealloc":true,{},"share":true,"size":1073741824,"{stream}":false}}"#,
                r#""qom-type":"memory-backend-memfd""#
            ),
        ),
        (
            r#"{"qom-type":"memory-backend-memfd","id":"r","hugetlb":true,"size":8388608,"share":false}"#,
            r#"{"hugetlb":true,"id":"r","qom-type":"memory-backend-memfd","share":true,"size":8388608}"#.into(),
        ),
        (
            &format!("memory-backend-file,id=r,size=1G,share,mem-path={folder},share=off"),
            format!("memory-backend-file,id=r,size=1G,mem-path={folder},share=on"),
        ),
    ] {
        let plan = planned(&format!("-object {object} -machine pc,memory-backend=r"), true).expect(object);
        assert_eq!(plan.edits, [Edit::Replace(1, shared)], "{object}");
        assert!(plan.notes.len() == 1 && plan.notes[0].starts_with("RAM backend r is shared"), "{:?}", plan.notes);
    }
    // Nodes, and a DIMM that a restored VM has from its start; the image of a device stays what it is.
    let ram = |id: &str| format!(r#"-object {{"qom-type":"memory-backend-ram","id":"{id}","size":1073741824}}"#);
    let line = format!(
        "{} {} {} {} -m 3G -numa node,nodeid=0,memdev=n0 -numa node,nodeid=1,memdev=n1 -device pc-dimm,memdev=d0 \
         -device nvdimm,memdev=i0",
        ram("n0"),
        ram("n1"),
        ram("d0"),
        ram("i0")
    );
    let places = planned(&line, true).expect("converted").edits;
    let places: Vec<_> =
        places.iter().map(|edit| matches!(edit, Edit::Replace(at, _) if [1, 3, 5].contains(at))).collect();
    assert_eq!(places, [true; 3]);
    // Shared memory is made only on request.
    assert!(planned(&line, false).is_err());
}

#[test]
fn options_that_share_ram_are_refused_and_options_that_hold_it_are_announced() {
    let ram = format!("-machine q35,memory-backend=ram0 {SHARED}");
    for (words, reason) in [
        ("-chardev socket,id=c,path=/x -netdev vhost-user,id=n,chardev=c", "another process"),
        ("-netdev type=vhost-user,id=n,chardev=c", "another process"),
        ("-device vhost-user-fs-pci,chardev=c,tag=t", "another process"),
        (r#"-device {"driver":"vhost-user-blk-pci","chardev":"c"}"#, "another process"),
        ("-device ivshmem-plain,memdev=s", "other VMs"),
        ("-device ivshmem-doorbell,chardev=c", "other VMs"),
        ("-machine confidential-guest-support=sev0", "encrypted"),
        ("-machine q35,memory-encryption=sev0", "encrypted"),
    ] {
        let error = planned(&format!("{ram} {words}"), true).expect_err(words);
        assert!(error.contains(reason), "{words}: {error}");
    }
    for words in [
        "-device vfio-pci,host=01:00.0",
        "-overcommit mem-lock=on",
        "-netdev vhost-vdpa,id=n,vhostdev=/dev/vhost-vdpa-0",
        "-device virtio-gpu-pci,blob=on",
    ] {
        let plan = planned(&format!("{ram} {words}"), false).expect(words);
        assert!(plan.notes.len() == 1 && plan.is_pinned, "{words}: {:?}", plan.notes);
    }
    for words in ["-chroot /srv/vm", "-run-with async-teardown=on,chroot=/srv/vm", "-run-with user=qemu", "-runas qemu"]
    {
        let plan = planned(&format!("{ram} {words}"), false).expect(words);
        assert!(plan.notes.len() == 1 && plan.notes[0].contains(words), "{words}: {:?}", plan.notes);
    }
    let quiet = "-netdev tap,id=n,vhost=on -device virtio-net-pci,netdev=n -chardev stdio,id=c \
                 -overcommit mem-lock=off -run-with async-teardown=on";
    assert_eq!(planned(&format!("{ram} {quiet}"), false).expect(quiet).notes, [""; 0]);
}

#[test]
fn values_that_look_like_options_and_commas_written_twice_are_understood() {
    // The value of -append is one word; its content must not be taken for options.
    let words = ["-append", "-device vhost-user-fs-pci", "-m", "1G", "-name", "guest=web,,1,debug-threads=on"];
    let words: Vec<String> = words.map(str::to_owned).to_vec();
    inspect(&words, Backing::Memfd, &|_| false).expect("fine");
    let value = ["-append", "-mem-path", "-m", "1G"].map(str::to_owned).to_vec();
    inspect(&value, Backing::Memfd, &|_| false).expect("the value of -append is not an option");
}

#[test]
fn an_option_without_a_value_leaves_the_next_word_alone() {
    for flag in ["-async-teardown", "--enable-sync-profile", "-jitdump", "-perfmap", "-no-kvm", "-tdf"] {
        let line = format!("{flag} -machine q35,memory-backend=ram0 {SHARED}");
        assert_eq!(planned(&line, true).expect(flag), Plan::default(), "{flag}");
        let plan = planned(&format!("-m 1G {flag} -overcommit mem-lock=on"), true).expect(flag);
        assert!(plan.is_pinned, "{flag}");
    }
    let why = planned("-new-in-qemu-99 -machine q35 -m 1G", true).expect_err("nobody knows whether that is a value");
    assert!(why.contains("`-new-in-qemu-99`") && why.contains("`-machine`"), "{why}");
    for line in ["-m 1G -new-in-qemu-99", "-new-in-qemu-99 value -m 1G"] {
        assert!(planned(line, true).expect(line).notes[0].contains("size=1024M"), "{line}");
    }
}

#[test]
fn several_options_for_the_size_of_ram_are_merged_as_qemu_does() {
    for line in ["-m 256M -m slots=4,maxmem=1G", "-m slots=4,maxmem=1G -m 1G -m 256M", "-m maxmem=1G -m size=256M"] {
        assert!(added(line).contains("size=256M,share=on"), "{line}");
    }
    assert!(added("-m slots=4,maxmem=1G").contains("size=128M,share=on"), "QEMU's own default");
    assert!(planned("-machine q35,memory.size=1G", true).expect_err("another unit").contains("as `-m`"));
}

#[test]
fn memory_and_machine_in_a_configuration_file_are_read() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("vm.conf");
    let file = path.display();
    let machine = "# LXD\n[machine]\n  type = \"q35\"\n  memory-backend = \"r\"\n\n[memory]\nsize = \"256M\"\n";
    let object =
        |kind: &str| format!("[object \"r\"]\nqom-type = \"{kind}\"\nsize = \"256M\"\nshare = \"on\"\n{machine}");
    std::fs::write(&path, object("memory-backend-memfd")).expect("write");
    assert_eq!(planned(&format!("-S -readconfig {file}"), true).expect("managed"), Plan::default());
    std::fs::write(&path, object("memory-backend-ram")).expect("write");
    assert!(planned(&format!("-readconfig {file}"), true).expect_err("private").starts_with("RAM backend r"));
    std::fs::write(&path, "[memory]\nsize = \"256M\"\n[machine]\ntype = \"q35\"\n").expect("write");
    assert!(added(&format!("-readconfig {file}")).ends_with("size=256M,share=on -machine memory-backend=ballast-ram0"));
    std::fs::write(&path, "[device \"h\"]\ndriver = \"vfio-pci\"\nhost = \"01:00.0\"\n").expect("write");
    assert!(planned(&format!("-readconfig {file}"), true).expect("pinned").is_pinned);
    let unread = "-readconfig /dev/fd/63";
    assert!(planned(unread, false).expect("the library finds out").notes[0].contains("will not start"));
    assert!(planned(unread, true).expect_err("what to add?").contains("cannot be read here"));
}

#[test]
fn the_image_of_an_nvdimm_or_a_virtio_pmem_is_left_alone() {
    let ram = format!("-machine q35,nvdimm=on,memory-backend=ram0 {SHARED}");
    for device in ["nvdimm,id=nv0,memdev=i,unarmed=on", "virtio-pmem-pci,memdev=i"] {
        let image = "-object memory-backend-file,id=i,mem-path=/usr/share/kata.img,size=128M,share=on,readonly=on";
        let plan = planned(&format!("{ram} {image} -device {device}"), true).expect(device);
        assert!(plan.edits.is_empty() && plan.notes.len() == 1 && plan.notes[0].contains(device), "{:?}", plan.notes);
    }
}

#[test]
fn a_command_line_that_only_asks_is_told_from_a_guest() {
    let probes = |line: &str| {
        let words: Vec<String> = line.split_ascii_whitespace().map(str::to_owned).collect();
        let options = options(&words).expect(line);
        is_probe(&options) || is_without_machine(&options)
    };
    for line in [
        "-version",
        "--help",
        "-machine help",
        "-M ?",
        "-nodefaults -device help",
        "-device virtio-net-pci,help",
        "-cpu help",
        "-nic model=help",
        "-S -no-user-config -nodefaults -nographic -machine none,accel=kvm:tcg -qmp unix:/x,server=on -daemonize",
    ] {
        assert!(probes(line), "{line}");
    }
    for line in ["-name help -m 1G", "-append help", "-machine none -machine q35", "-drive file=help", "-m 1G -k help"]
    {
        assert!(!probes(line), "{line}");
    }
}
