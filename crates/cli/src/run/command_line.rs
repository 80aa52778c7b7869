//! Checks a QEMU command line: can Ballast manage its guest RAM, and if not, which options are missing?
//!
//! Before: `options` has read the operator's command line. After: edits and notes, or the reason for a refusal.
//! Promise: a pure function of the words (a function argument tells which files can be RAM). It reads only the options
//! that concern guest RAM, and leaves all others to QEMU.

use ballast_base::pool::Pages;
use ballast_base::wire::{MAX_NAME, check_name};
use ballast_base::{Bytes, GIB, KIB, MIB};

use super::options::{Opt, options};
use super::stand_in::{check_stand_in, huge_size, is_size};

/// The memory that guest RAM is to have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// The memory that the command line says.
    AsGiven,
    /// A memfd, which is added where none is.
    Memfd,
    /// Memory of the pool: a memfd of such huge pages stands in for it, and is added where none is.
    Pool(Pages),
}

/// A change to the words of a command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Edit {
    /// Put this word where the one with this index is.
    Replace(usize, String),
    /// Put this word at the end.
    Append(String),
}

/// The changes to a command line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// They may be made in any order: indexes are those of the words as given.
    pub edits: Vec<Edit>,
    /// For the operator.
    pub notes: Vec<String>,
    /// From `-name`.
    pub name: Option<String>,
    /// An option locks guest RAM or holds it for a device, so that nothing can be taken from the VM.
    pub is_pinned: bool,
}

/// A size as `-m` takes it: a bare number is MiB.
pub(super) fn megabytes(text: &str) -> Option<Bytes> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let factor = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "b" => 1,
        "k" => KIB,
        "" | "m" => MIB,
        "g" => GIB,
        "t" => 1024 * GIB,
        _ => return None,
    };
    match digits.parse::<u64>() {
        Ok(number) => number.checked_mul(factor).map(Bytes),
        // QEMU takes fractions, such as 1.5G.
        Err(_) => digits.parse::<f64>().ok().filter(|number| *number > 0.0).map(|n| Bytes((n * factor as f64) as u64)),
    }
}

/// Check a QEMU command line (without the program). `Err` says why it cannot be managed and what to write instead.
pub fn inspect(words: &[String], backing: Backing, is_ram_file: &dyn Fn(&str) -> bool) -> Result<Plan, String> {
    let options = options(words);
    let all = |name: &'static str| options.iter().filter(move |option| option.name == name);
    let mut plan = Plan { name: all("name").next_back().and_then(vm_name), ..Plan::default() };

    if let Some(reason) = options.iter().find_map(refusal) {
        return Err(reason);
    }
    plan.notes.extend(options.iter().filter_map(note));
    plan.is_pinned = plan.notes.iter().any(|note| note.contains(PINNED));

    // Every backend that becomes guest RAM.
    let backend = all("machine").filter_map(|machine| machine.get("memory-backend")).next_back();
    let nodes = all("numa").filter(|numa| numa.head == "node").filter_map(|numa| numa.get("memdev"));
    let devices = all("device").filter_map(|device| device.get("memdev"));
    let used: Vec<&str> = backend.into_iter().chain(nodes.clone()).chain(devices).collect();
    for object in all("object").filter(|object| object.get("id").is_some_and(|id| used.contains(&id))) {
        match backing {
            Backing::Pool(pages) => check_stand_in(object, pages)?,
            _ => check_backend(object, is_ram_file)?,
        }
    }
    if backend.is_some() || nodes.count() > 0 {
        return Ok(plan);
    }

    // Guest RAM is QEMU's own, private memory.
    if all("numa").any(|numa| numa.get("mem").is_some()) {
        return Err("RAM given by `-numa node,mem=` is private memory. Give each node a backend instead: \
                    -object memory-backend-memfd,id=n0,size=SIZE,share=on -numa node,memdev=n0"
            .into());
    }
    let wanted = wanted(&options, backing)?;
    if all("mem-path").next().is_some() {
        return Err("`-mem-path` maps guest RAM privately. Leave it out, and add: ".to_owned() + &wanted.shown());
    }
    if backing == Backing::AsGiven {
        return Err(format!(
            "guest RAM is private memory; Ballast needs a shared memfd. {}\n\
             or let `ballast run --add-memory-backend` do it",
            wanted.explained()
        ));
    }
    plan.edits = wanted.edits;
    plan.notes.push(format!("added to the command line: {}", wanted.object));
    Ok(plan)
}

/// The flags that are missing.
struct Wanted {
    object: String,
    machine: String,
    replaces: Option<String>,
    edits: Vec<Edit>,
}

impl Wanted {
    fn shown(&self) -> String {
        format!("{} {}", self.object, self.machine)
    }

    fn explained(&self) -> String {
        match &self.replaces {
            Some(old) => format!("Add\n  {}\nand write\n  {}\ninstead of\n  {old}", self.object, self.machine),
            None => format!("Add\n  {}", self.shown()),
        }
    }
}

fn wanted(options: &[Opt], backing: Backing) -> Result<Wanted, String> {
    let memory = options.iter().rev().find(|option| option.name == "m");
    let size = match memory {
        None => Bytes(128 * MIB), // QEMU's own default
        Some(memory) => {
            let text = memory.get("size").unwrap_or(&memory.head);
            megabytes(text).ok_or_else(|| format!("`-m {}`: the size {text:?} is not understood", memory.text))?
        }
    };
    let huge = match backing {
        Backing::Pool(pages) if !size.0.is_multiple_of(pages.size().0) => {
            return Err(format!("guest RAM of {size} is no multiple of {}, the unit of --pool {pages}", pages.size()));
        }
        Backing::Pool(pages) => format!(",hugetlb=on,hugetlbsize={}", huge_size(pages)),
        _ => String::new(),
    };
    let size = if size.0.is_multiple_of(MIB) { format!("{}M", size.0 / MIB) } else { size.0.to_string() };
    let backend = format!("memory-backend-memfd,id=ballast-ram0,size={size},share=on{huge}");
    let object = format!("-object {backend}");
    let mut edits = vec![Edit::Append("-object".into()), Edit::Append(backend)];
    let machine = options.iter().find(|option| option.name == "machine" && !option.text.is_empty());
    let value = match machine {
        Some(machine) => format!("{},memory-backend=ballast-ram0", machine.text),
        None => "memory-backend=ballast-ram0".into(),
    };
    match machine {
        Some(machine) => edits.push(Edit::Replace(machine.index, value.clone())),
        None => edits.extend(["-machine".to_owned(), value.clone()].map(Edit::Append)),
    }
    let replaces = machine.map(|machine| format!("-machine {}", machine.text));
    Ok(Wanted { object, machine: format!("-machine {value}"), replaces, edits })
}

/// Can this backend be managed?
fn check_backend(object: &Opt, is_ram_file: &dyn Fn(&str) -> bool) -> Result<(), String> {
    let id = object.get("id").unwrap_or_default();
    let wrong = |what: &str| Err(format!("RAM backend {id} ({}): {what}", object.head));
    // memory-backend-memfd and -shm are shared unless told otherwise; the others are private.
    let shared = match object.get("share") {
        None => matches!(object.head.as_str(), "memory-backend-memfd" | "memory-backend-shm"),
        Some(_) => object.is_on("share"),
    };
    match object.head.as_str() {
        "memory-backend-memfd" if object.get("hugetlbsize").is_some_and(|size| !is_size(size, Pages::Slices)) => {
            wrong("only huge pages of 2 MiB are managed; write hugetlbsize=2M")
        }
        "memory-backend-memfd" | "memory-backend-shm" | "memory-backend-file" if !shared => {
            wrong("it is private memory; write share=on")
        }
        "memory-backend-file" if object.is_on("readonly") => wrong("it is read-only"),
        "memory-backend-file" => match object.get("mem-path") {
            Some(path) if !is_ram_file(path) => wrong(&format!(
                "{path} is neither in a tmpfs nor in a hugetlbfs of 2 MiB pages; use memory-backend-memfd"
            )),
            _ => Ok(()),
        },
        "memory-backend-memfd" | "memory-backend-shm" => Ok(()),
        _ => wrong("it is not a shared memory file; write memory-backend-memfd,...,share=on"),
    }
}

/// The reason if this option makes a VM impossible to manage.
fn refusal(option: &Opt) -> Option<String> {
    let shown = || format!("`-{} {}`", option.name, option.text);
    let foreign = "another process maps guest RAM, and its touches would not restore far pages";
    match option.name.as_str() {
        "netdev" if option.head == "vhost-user" => Some(format!("{}: {foreign}", shown())),
        "device" if option.head.starts_with("vhost-user-") => Some(format!("{}: {foreign}", shown())),
        "device" if option.head.starts_with("ivshmem-") => {
            Some(format!("{}: its memory is shared with other VMs", shown()))
        }
        // The second name is that of before QEMU 6.0.
        "machine" if option.get("confidential-guest-support").or(option.get("memory-encryption")).is_some() => {
            Some(format!("{}: memory encrypted for one guest cannot be evicted and restored", shown()))
        }
        _ => None,
    }
}

/// In the notes about options that hold guest RAM.
const PINNED: &str = "class pinned";

/// In the notes about options that may keep QEMU from the keeper's socket once it runs.
const LOST: &str = "QEMU must still be able to connect to the keeper's socket then, or it will not find a keeper that \
                    restarts";

/// A note for the operator about this option.
fn note(option: &Opt) -> Option<String> {
    let pinned = |why: &str| {
        Some(format!(
            "`-{} {}`: {why}; the VM will be of {PINNED}, and nothing is taken from it",
            option.name, option.text
        ))
    };
    match option.name.as_str() {
        "device" if option.head.starts_with("vfio-") => pinned("the device holds all guest RAM for DMA"),
        "device" if option.head.starts_with("vhost-vdpa-device") => pinned("the device holds all guest RAM for DMA"),
        "netdev" if option.head == "vhost-vdpa" => pinned("the device holds all guest RAM for DMA"),
        "device" if option.head.starts_with("virtio-gpu") && option.is_on("blob") => pinned("its blobs hold guest RAM"),
        "overcommit" if option.is_on("mem-lock") => pinned("memory is locked"),
        "realtime" if option.is_on("mlock") => pinned("memory is locked"),
        "chroot" | "runas" => Some(format!("`-{} {}`: {LOST}", option.name, option.text)),
        "run-with" if ["chroot", "user"].iter().any(|key| option.get(key).is_some()) => {
            Some(format!("`-run-with {}`: {LOST}", option.text))
        }
        "readconfig" => Some(format!("`-readconfig {}` was not read", option.text)),
        _ => None,
    }
}

/// A VM name made from QEMU's `-name`: each other character becomes `-`.
fn vm_name(option: &Opt) -> Option<String> {
    let given = option.get("guest").unwrap_or(&option.head);
    let allowed = |c: char| if c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-') { c } else { '-' };
    let name: String = given.chars().map(allowed).take(MAX_NAME).collect();
    let name = name.trim_start_matches(['.', '-']).to_owned();
    check_name(&name).is_ok().then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHARED: &str = "-object memory-backend-memfd,id=ram0,size=1G,share=on";

    fn planned(line: &str, add: bool) -> Result<Plan, String> {
        planned_for(line, if add { Backing::Memfd } else { Backing::AsGiven })
    }

    fn planned_for(line: &str, backing: Backing) -> Result<Plan, String> {
        let words: Vec<String> = line.split_ascii_whitespace().map(str::to_owned).collect();
        inspect(&words, backing, &|path| path.starts_with("/dev/shm"))
    }

    /// The command line after the edits.
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
            let error = planned(&format!("{machine} -object {object}"), true).expect_err(object);
            assert!(error.contains(reason) && error.starts_with("RAM backend r"), "{object}: {error}");
        }
        let dimm = "-object memory-backend-ram,id=d,size=1G -device pc-dimm,id=d0,memdev=d";
        assert!(
            planned(&format!("-machine memory-backend=ram0 {SHARED} {dimm}"), false).expect_err("dimm").contains(" d ")
        );
        assert!(planned("-m 1G -mem-path /dev/shm", true).expect_err("private").contains("Leave it out"));
        assert!(
            planned("-m 1G -numa node,mem=512M -numa node,mem=512M", true).expect_err("legacy").contains("memdev=n0")
        );
        // A last option without its value is for QEMU to complain about.
        assert_eq!(planned("-m 1G -machine", true).expect("as if it were not there").edits.len(), 4);
        assert!(planned("-m lots", true).expect_err("size").contains("\"lots\""));
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
        for words in
            ["-chroot /srv/vm", "-run-with async-teardown=on,chroot=/srv/vm", "-run-with user=qemu", "-runas qemu"]
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
        let plan = inspect(&words, Backing::Memfd, &|_| false).expect("fine");
        assert_eq!(plan.name.as_deref(), Some("web-1"));
        let value = ["-append", "-mem-path", "-m", "1G"].map(str::to_owned).to_vec();
        inspect(&value, Backing::Memfd, &|_| false).expect("the value of -append is not an option");
        assert_eq!(
            planned(&format!("-name web -machine memory-backend=ram0 {SHARED}"), false).expect("ok").name.as_deref(),
            Some("web")
        );
        assert_eq!(planned(&format!("-name .. -machine memory-backend=ram0 {SHARED}"), false).expect("ok").name, None);
    }
}
