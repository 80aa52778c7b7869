//! Checks a QEMU command line: whether Ballast can manage its guest RAM, and which options are missing if not.
//!
//! Before: `options` has read the operator's command line. After: edits and notes, or the reason for a refusal.
//! Promise: a pure function of the words (a function argument tells which files can be RAM). It reads only the options
//! that concern guest RAM, and leaves all others to QEMU.

use ballast_base::pool::Pages;
use ballast_base::{Bytes, Invalid, MIB};

use super::options::{Opt, memory, options};
use super::shared;
use super::stand_in::{check_stand_in, huge_size, is_size};

/// The memory that guest RAM will have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// The memory that the command line names.
    AsGiven,
    /// A memfd, which is added if there is no backend, and takes the place of private memory.
    Memfd,
    /// Memory of the pool: a memfd of such huge pages stands in for it, and is added if there is no backend.
    Pool(Pages),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Edit {
    Replace(usize, String),
    Append(String),
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// They may be made in any order: indexes are those of the words as given.
    pub edits: Vec<Edit>,
    pub notes: Vec<String>,
    /// Whether an option locks guest RAM or holds it for a device, so that nothing can be taken from the VM.
    pub is_pinned: bool,
}

/// A size as `-m` takes it: a bare number is MiB.
pub(super) fn megabytes(text: &str) -> Option<Bytes> {
    ballast_adopt::vmm::size(text, MIB).map(Bytes)
}

/// Checks a QEMU command line (without the program). The error says why it cannot be managed and what to write instead.
pub fn inspect(words: &[String], backing: Backing, is_ram_file: &dyn Fn(&str) -> bool) -> Result<Plan, Invalid> {
    let options = options(words)?;
    let all = |name: &'static str| options.iter().filter(move |option| option.name == name);
    let mut plan = Plan::default();

    if let Some(reason) = options.iter().find_map(refusal) {
        return Err(reason.into());
    }
    plan.notes.extend(options.iter().filter_map(note));
    plan.is_pinned = plan.notes.iter().any(|note| note.contains(PINNED));

    let backend = all("machine").filter_map(|machine| machine.get("memory-backend")).next_back();
    let nodes = all("numa").filter(|numa| numa.head == "node").filter_map(|numa| numa.get("memdev"));
    let (images, devices): (Vec<&Opt>, Vec<&Opt>) = all("device").partition(|device| is_image(device));
    plan.notes.extend(images.iter().map(|image| {
        format!("`-device {}`: its memory is an image of the operator's, which Ballast leaves alone", image.text)
    }));
    let devices = devices.into_iter().filter_map(|device| device.get("memdev"));
    let used: Vec<&str> = backend.into_iter().chain(nodes.clone()).chain(devices).collect();
    for object in all("object").filter(|object| object.get("id").is_some_and(|id| used.contains(&id))) {
        match backing {
            // libvirt writes such a backend unless its XML asks for huge pages.
            Backing::Pool(pages) if object.head == "memory-backend-ram" => {
                if let Some((huge, index, note)) = shared::form(object, Some(pages.size()))? {
                    plan.edits.push(Edit::Replace(index, huge.text));
                    plan.notes.push(note);
                }
            }
            Backing::Pool(pages) => check_stand_in(object, pages)?,
            Backing::AsGiven => check_backend(object, is_ram_file)?,
            Backing::Memfd => match shared::form(object, None)? {
                Some((shared, index, note)) => {
                    check_backend(&shared, is_ram_file)?;
                    plan.edits.push(Edit::Replace(index, shared.text));
                    plan.notes.push(note);
                }
                None => check_backend(object, is_ram_file)?,
            },
        }
    }
    if backend.is_some() || nodes.count() > 0 {
        return Ok(plan);
    }

    // No backend is named: guest RAM is QEMU's own, private memory, or is named in a file that cannot be read here.
    if let Some(file) = all("readconfig").find(|file| !file.is_read) {
        let unread = format!("`-readconfig {}` cannot be read here, and may say what guest RAM is", file.text);
        match backing {
            Backing::AsGiven => plan.notes.push(format!("{unread}; a VM with private RAM will not start")),
            _ => return Err(format!("{unread}: give the options on the command line").into()),
        }
        return Ok(plan);
    }
    if all("numa").any(|numa| numa.get("mem").is_some()) {
        return Err("RAM given by `-numa node,mem=` is private memory. Give each node a backend instead: \
                    -object memory-backend-memfd,id=n0,size=SIZE,share=on -numa node,memdev=n0"
            .into());
    }
    let wanted = wanted(&options, backing)?;
    if all("mem-path").next().is_some() {
        let shown = wanted.shown();
        return Err(format!("`-mem-path` maps guest RAM privately. Leave it out, and add: {shown}").into());
    }
    if backing == Backing::AsGiven {
        return Err(format!(
            "guest RAM is private memory; Ballast needs a shared memfd. {}\n\
             or let `ballast run --add-memory-backend` do it",
            wanted.explained()
        )
        .into());
    }
    plan.edits = wanted.edits;
    plan.notes.push(format!("added to the command line: {}", wanted.object));
    Ok(plan)
}

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

fn wanted(options: &[Opt], backing: Backing) -> Result<Wanted, Invalid> {
    let given = |option: &&Opt| option.name == "machine" && option.get("memory.size").is_some();
    if let Some(machine) = options.iter().find(given) {
        return Err(format!("`-machine {}`: write the size of guest RAM as `-m`", machine.text).into());
    }
    let size = match memory(options) {
        None => Bytes(128 * MIB), // QEMU's own default
        Some((memory, text)) => {
            megabytes(text).ok_or_else(|| format!("`-m {}`: the size {text:?} is not understood", memory.text))?
        }
    };
    let huge = match backing {
        Backing::Pool(pages) if !size.0.is_multiple_of(pages.size().0) => {
            return Err(
                format!("guest RAM of {size} is no multiple of {}, the unit of --pool {pages}", pages.size()).into()
            );
        }
        Backing::Pool(pages) => format!(",hugetlb=on,hugetlbsize={}", huge_size(pages)),
        _ => String::new(),
    };
    let size = if size.0.is_multiple_of(MIB) { format!("{}M", size.0 / MIB) } else { size.0.to_string() };
    let backend = format!("memory-backend-memfd,id=ballast-ram0,size={size},share=on{huge}");
    let object = format!("-object {backend}");
    let mut edits = vec![Edit::Append("-object".into()), Edit::Append(backend)];
    // QEMU merges several `-machine` options.
    let machine = options.iter().find(|option| option.name == "machine" && option.index.is_some());
    let machine = machine.filter(|machine| !machine.text.is_empty());
    let value = match machine {
        Some(machine) => format!("{},memory-backend=ballast-ram0", machine.text),
        None => "memory-backend=ballast-ram0".into(),
    };
    match machine.and_then(|machine| machine.index) {
        Some(index) => edits.push(Edit::Replace(index, value.clone())),
        None => edits.extend(["-machine".to_owned(), value.clone()].map(Edit::Append)),
    }
    let replaces = machine.map(|machine| format!("-machine {}", machine.text));
    Ok(Wanted { object, machine: format!("-machine {value}"), replaces, edits })
}

/// Whether this device's memory is an image (of a disk, of a root file system), and not guest RAM.
fn is_image(device: &Opt) -> bool {
    device.head == "nvdimm" || device.head.starts_with("virtio-pmem")
}

fn check_backend(object: &Opt, is_ram_file: &dyn Fn(&str) -> bool) -> Result<(), Invalid> {
    let id = object.get("id").unwrap_or_default();
    let wrong = |what: &str| Err(format!("RAM backend {id} ({}): {what}", object.head).into());
    let shared = shared::is_shared(object);
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

/// Why this option makes a VM impossible to manage; `None` if it does not.
fn refusal(option: &Opt) -> Option<String> {
    let shown = || format!("`-{} {}`", option.name, option.text);
    let foreign = "another process maps guest RAM, and its touches would not restore far pages";
    match option.name.as_str() {
        "netdev" if option.head == "vhost-user" => Some(format!("{}: {foreign}", shown())),
        "device" if option.head.starts_with("vhost-user-") => Some(format!("{}: {foreign}", shown())),
        "device" if option.head.starts_with("ivshmem-") => {
            Some(format!("{}: its memory is shared with other VMs", shown()))
        }
        // The second name is that of QEMU before 6.0.
        "machine" if option.get("confidential-guest-support").or(option.get("memory-encryption")).is_some() => {
            Some(format!("{}: memory encrypted for one guest cannot be evicted and restored", shown()))
        }
        _ => None,
    }
}

/// Part of each note about an option that holds guest RAM.
pub const PINNED: &str = "class pinned";

/// Part of each note about an option that may keep QEMU from the keeper's socket once it runs.
const LOST: &str = "QEMU must still be able to connect to the keeper's socket then, or it will not find a keeper that \
                    restarts";

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
        _ => None,
    }
}

#[cfg(test)]
mod tests;
