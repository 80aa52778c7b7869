//! Adopting real processes: how they are found, which pages go to swap and come back, and when they are refused.
//!
//! Needs `cc`; tests that page out need root and zram. Promise: memory is right if the process itself compared every
//! byte.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::OnceLock;

use ballast_adopt::swap::Swap as HostSwap;
use ballast_adopt::{Adopted, Memory, Program, Refusal, look};
use ballast_base::MIB;
use ballast_testkit::program::install;
use ballast_testkit::skip;
use ballast_testkit::swap::Swap;

/// The program, under the names of VMMs, in cargo's directory: a static is never dropped, so it could not clean up.
fn programs() -> Option<&'static Path> {
    static DIR: OnceLock<Option<PathBuf>> = OnceLock::new();
    let make = || {
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("adopt");
        std::fs::create_dir_all(&dir).expect("a directory");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vmm.c");
        let qemu = dir.join("qemu-system-x86_64");
        let made = Command::new("cc").args(["-O2", "-o"]).args([&qemu, &source]).status();
        made.is_ok_and(|status| status.success()).then(|| {
            install(&qemu, &dir.join("firecracker"));
            install(&qemu, &dir.join("database"));
            dir
        })
    };
    let dir = DIR.get_or_init(make).as_deref();
    if dir.is_none() {
        skip("cc", "there is no C compiler");
    }
    dir
}

struct Vmm {
    child: Child,
    says: BufReader<ChildStdout>,
}

impl Vmm {
    fn start(program: &str, args: &[&str]) -> Option<Self> {
        Some(Self::run(Command::new(programs()?.join(program)).args(args)))
    }

    fn run(command: &mut Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it starts");
        let says = BufReader::new(child.stdout.take().expect("piped"));
        let mut vmm = Self { child, says };
        assert_eq!(vmm.line(), "ready");
        vmm
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.says.read_line(&mut line).expect("it says something");
        line.trim().to_owned()
    }

    /// Sends it a command. Returns the number of words that were wrong.
    fn tell(&mut self, what: &str) -> u64 {
        let stdin = self.child.stdin.as_mut().expect("piped");
        writeln!(stdin, "{what}").expect("it listens");
        self.line().parse().expect("a number")
    }

    fn adopted(&self) -> Adopted {
        Adopted::new(look(self.child.id()).expect("it is a VMM")).expect("it is adopted")
    }
}

impl Drop for Vmm {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn swap() -> Option<Swap> {
    Swap::new("1G").map_err(|why| skip("zram", why)).ok()
}

/// A scan of its pages, after a check that they add up.
fn memory(vm: &Adopted) -> Memory {
    let memory = vm.scan().expect("its pages are counted");
    let Memory { size, resident, far, zero, untouched, .. } = memory;
    assert_eq!(size, resident + far + zero + untouched, "{memory:?}");
    memory
}

/// Steps until it has no more resident memory than `limit`.
fn squeeze(vm: &Adopted, limit: u64) {
    for _ in 0..1000 {
        let resident = memory(vm).resident;
        if resident <= limit {
            return;
        }
        vm.step((resident - limit).min(4 * MIB)).expect("a step");
    }
    panic!("never at {limit}: {:?}", memory(vm));
}

#[test]
fn a_vmm_is_found_by_its_program_and_its_memory_is_where_it_put_it() {
    let Some(mut vmm) = Vmm::start("qemu-system-x86_64", &["-name", "guest=web", "-m", "64"]) else { return };
    let found = look(vmm.child.id()).expect("found");
    assert_eq!((found.vmm.program, found.vmm.name.as_deref()), (Program::Qemu, Some("web")));
    let vm = Adopted::new(found).expect("adopted");
    assert_eq!((vm.size(), vm.pinned(), vm.has_ended()), (64 * MIB, None, false));
    assert_eq!((memory(&vm).untouched, memory(&vm).resident), (64 * MIB, 0));
    vmm.tell("touch 0 4");
    vmm.tell("fill 16");
    let Memory { resident, far, untouched, .. } = memory(&vm);
    assert_eq!((resident, far, untouched), (16 * MIB, 0, 48 * MIB));
    let quick = vm.quick().expect("counters");
    assert!(quick.resident >= 16 * MIB && quick.resident < 20 * MIB, "{quick:?}");
    assert!(ballast_adopt::found::all().contains(&vmm.child.id()));
}

#[test]
fn memory_goes_to_swap_and_every_byte_is_right_afterwards() {
    let Some(_swap) = swap() else { return };
    for args in [&["-m", "64"][..], &["-m", "64", "-shared"], &["-m", "64", "-split"]] {
        let Some(mut vmm) = Vmm::start("firecracker", args) else { return };
        vmm.tell("fill 48");
        let vm = vmm.adopted();
        squeeze(&vm, 8 * MIB);
        let now = memory(&vm);
        assert_eq!((now.resident + now.far, now.untouched), (48 * MIB, 16 * MIB), "{args:?}: {now:?}");
        assert!(vm.out_pages() >= 40 * 256, "{args:?}: {}", vm.out_pages());
        assert_eq!(vmm.tell("check 48"), 0, "{args:?}");
        assert!(vm.restored_pages() >= 39 * 256, "{args:?}: {}", vm.restored_pages());
        squeeze(&vm, 8 * MIB);
        vm.bring_back().expect("all of it");
        let now = memory(&vm);
        assert_eq!((now.resident, now.far), (48 * MIB, 0), "{args:?}: {now:?}");
        assert_eq!(vmm.tell("check 48"), 0, "{args:?}");
    }
}

#[test]
fn pages_that_are_used_stay_while_others_go() {
    let Some(_swap) = swap() else { return };
    let Some(mut vmm) = Vmm::start("qemu-system-x86_64", &["-m", "64"]) else { return };
    vmm.tell("fill 64");
    let vm = vmm.adopted();
    let mut restored = Vec::new();
    for _ in 0..24 {
        squeeze(&vm, 32 * MIB);
        let before = vm.restored_pages();
        vmm.tell("touch 8 24");
        restored.push(vm.restored_pages() - before);
    }
    let [first, last] = [&restored[..4], &restored[20..]].map(|some| some.iter().sum::<u64>());
    assert!(last < first / 4, "the 4096 pages that are used were restored {restored:?} times");
}

#[test]
fn what_is_no_vmm_is_refused_with_a_reason() {
    assert!(matches!(look(u32::MAX), Err(Refusal::NoProcess)));
    assert!(matches!(look(0), Err(Refusal::NoProcess)));
    assert!(matches!(look(std::process::id()), Err(Refusal::NotVmm(_))), "this test");
    let Some(vmm) = Vmm::start("database", &["-m", "64"]) else { return };
    let refused = look(vmm.child.id()).expect_err("another program");
    assert!(refused.to_string().contains("database"), "{refused}");
    let wrong = Vmm::start("qemu-system-x86_64", &["-m", "64", "-m", "1G"]).expect("a program");
    let refused = look(wrong.child.id()).expect_err("its RAM is not of that size");
    assert!(refused.to_string().contains("1 GiB"), "{refused}");
    let is_kernel = |pid: &u32| std::fs::read_link(format!("/proc/{pid}/exe")).is_err();
    match (2..200).filter(|pid| Path::new(&format!("/proc/{pid}/stat")).exists()).find(is_kernel) {
        Some(kernel) => assert!(matches!(look(kernel), Err(Refusal::KernelThread)), "{kernel}"),
        None => skip("kthread", "no thread of the kernel is seen"),
    }
}

#[test]
fn locked_memory_is_pinned_with_the_reason() {
    let Some(_swap) = swap() else { return };
    let Some(mut vmm) = Vmm::start("qemu-system-x86_64", &["-m", "16"]) else { return };
    vmm.tell("fill 16");
    let vm = vmm.adopted();
    assert_eq!(vm.pinned(), None);
    if vmm.tell("lock") != 0 {
        return skip("mlock", "memory may not be locked here");
    }
    vm.step(MIB).expect_err("the kernel refuses");
    vm.look_again().expect("its RAM is there");
    assert!(vm.pinned().is_some_and(|why| why.contains("locked")), "{:?}", vm.pinned());
    assert!(vmm.adopted().pinned().is_some());
    assert_eq!((memory(&vm).resident, vmm.tell("check 16")), (16 * MIB, 0));
}

#[test]
fn a_step_passes_memory_that_stays_until_some_goes() {
    let Some(_swap) = swap() else { return };
    let Some(mut vmm) = Vmm::start("qemu-system-x86_64", &["-m", "64"]) else { return };
    vmm.tell("fill 64");
    vmm.tell("share 48");
    let vm = vmm.adopted();
    let step = vm.step(2 * MIB).expect("a step");
    assert!(step.out_pages > 0, "of 16 MiB that can go none went: {step:?}");
    assert_eq!(vmm.tell("check 64"), 0);
}

#[test]
fn a_vm_that_has_ended_is_gone_in_every_call() {
    let Some(mut vmm) = Vmm::start("qemu-system-x86_64", &["-m", "16"]) else { return };
    vmm.tell("fill 16");
    let (vm, late) = (vmm.adopted(), look(vmm.child.id()).expect("found"));
    vmm.child.kill().expect("killed");
    assert_eq!(vmm.child.wait().expect("reaped").signal(), Some(9));
    assert!(vm.has_ended());
    assert!(matches!(look(vmm.child.id()), Err(Refusal::NoProcess)));
    Adopted::new(late).expect_err("it ended after it was found");
    let _ = (vm.memory(), vm.quick(), vm.scan(), vm.pinned(), vm.how(), vm.stall_us(), vm.restored_pages());
    let _ = vm.blocked(&HostSwap::now());
    vm.step(MIB).map(|step| assert_eq!(step.out_pages, 0)).unwrap_or_default();
    vm.look_again().expect_err("it has no memory");
    let _ = vm.bring_back();
    assert!(vm.has_ended());
}

#[test]
fn a_vm_in_namespaces_of_its_own_is_adopted_by_its_pid_here() {
    let Some(dir) = programs() else { return };
    let unshare = |program: &PathBuf| {
        let mut command = Command::new("unshare");
        command
            .args(["--pid", "--fork", "--kill-child", "--mount-proc"])
            .arg(program)
            .args(["-name", "pod", "-m", "16"]);
        command
    };
    let qemu = dir.join("qemu-system-x86_64");
    if !Command::new("unshare").args(["--pid", "--fork", "true"]).output().is_ok_and(|done| done.status.success()) {
        return skip("root", "no namespace can be made");
    }
    let vmm = Vmm::run(&mut unshare(&qemu));
    let children = format!("/proc/{0}/task/{0}/children", vmm.child.id());
    let children = std::fs::read_to_string(children).expect("children");
    let pid = children.trim().parse().expect("one child");
    let vm = Adopted::new(look(pid).expect("found")).expect("adopted");
    assert_eq!((vm.vmm.name.as_deref(), vm.size(), vm.process.pid), (Some("pod"), 16 * MIB, pid));
    assert_eq!(memory(&vm).size, 16 * MIB);
}

#[test]
fn a_dimm_that_is_plugged_in_later_is_counted_and_goes_to_swap() {
    let Some(mut vmm) = Vmm::start("qemu-system-x86_64", &["-m", "16,slots=2,maxmem=1G"]) else { return };
    vmm.tell("fill 16");
    let vm = vmm.adopted();
    assert_eq!(vm.memory().expect("counted").size, 16 * MIB);
    assert_eq!(vmm.tell("plug 128"), 0);
    let now = vm.memory().expect("counted");
    assert_eq!((now.size, now.resident, memory(&vm).resident), (144 * MIB, 144 * MIB, 144 * MIB));
    assert_eq!(vmm.adopted().size(), 144 * MIB, "a DIMM that was there before");
    let Some(_swap) = swap() else { return };
    squeeze(&vm, 8 * MIB);
    assert_eq!((memory(&vm).far, vmm.tell("check 16")), (136 * MIB, 0));
}
