//! A guest to be: its command line, and its start.
//!
//! Before: a test says what it wants. After: [`QemuGuest`] runs.
//! Threads: `spawn` starts the console's reader.
//! Units: sizes are [`Bytes`].
//! Promise: it has only the requested devices; RAM is a shared memfd unless it was declined.

use std::fs::File;
use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use ballast_base::{Bytes, MIB};

use super::console::Console;
use super::error::Error;
use super::guest::QemuGuest;
use super::image::{Image, QEMU};
use super::initrd;

/// Hardware KVM where it is usable; TCG, QEMU's own interpreter, elsewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accel {
    /// `/dev/kvm` with hardware virtualisation below it.
    Kvm,
    /// Pure software; any machine has it.
    Tcg,
}

impl Accel {
    /// What this machine offers. A `/dev/kvm` without vmx or svm cannot boot a stock kernel.
    pub fn detect() -> Self {
        let flags = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let hardware = flags.lines().any(|line| {
            line.starts_with("flags") && line.split_whitespace().any(|flag| flag == "vmx" || flag == "svm")
        });
        if hardware && Path::new("/dev/kvm").exists() { Self::Kvm } else { Self::Tcg }
    }

    /// QEMU arguments. Under TCG a CPU *without* ERMS: it would copy memory one byte per interpreted step.
    fn args(self) -> [&'static str; 4] {
        match self {
            Self::Kvm => ["-accel", "kvm", "-cpu", "host"],
            Self::Tcg => ["-accel", "tcg,thread=multi", "-cpu", "qemu64"],
        }
    }
}

/// Which balloon device the guest gets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Balloon {
    /// None.
    #[default]
    None,
    /// A balloon moved by QMP only.
    Plain,
    /// The guest also hands back free pages on its own, 2-4 MiB at a time.
    FreePageReporting,
}

/// A guest to be. Everything has a default; see the methods.
#[derive(Clone, Debug)]
pub struct Builder {
    name: String,
    image: Option<Image>,
    memory: Bytes,
    hotplug_room: Bytes,
    cpus: u32,
    shared_memory: bool,
    huge_pages: bool,
    memory_object: Option<String>,
    balloon: Balloon,
    prefix: Vec<String>,
    env: Vec<(String, String)>,
    extra_args: Vec<String>,
    redis_maxmemory: Bytes,
    run: Option<String>,
    bench: bool,
    dir: Option<PathBuf>,
}

impl Builder {
    fn new() -> Self {
        Self {
            name: "guest".into(),
            image: None,
            memory: Bytes(512 * MIB),
            hotplug_room: Bytes(0),
            cpus: 1,
            shared_memory: true,
            huge_pages: false,
            memory_object: None,
            balloon: Balloon::None,
            prefix: Vec::new(),
            env: Vec::new(),
            extra_args: Vec::new(),
            redis_maxmemory: Bytes(0),
            run: None,
            bench: false,
            dir: None,
        }
    }

    /// Its name in messages and in `-name` (default: guest).
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// Kernel and initrd (default: [`Image::find`]).
    pub fn image(mut self, image: Image) -> Self {
        self.image = Some(image);
        self
    }

    /// RAM at boot (default: 512 MiB).
    pub fn memory(mut self, memory: Bytes) -> Self {
        self.memory = memory;
        self
    }

    /// How much RAM may be plugged in later, in at most four DIMMs (default: none).
    pub fn hotplug_room(mut self, room: Bytes) -> Self {
        self.hotplug_room = room;
        self
    }

    /// Virtual CPUs (default: 1).
    pub fn cpus(mut self, cpus: u32) -> Self {
        self.cpus = cpus;
        self
    }

    /// RAM in a shared memfd, as Ballast needs it (default), or QEMU's private anonymous memory.
    pub fn shared_memory(mut self, shared: bool) -> Self {
        self.shared_memory = shared;
        self
    }

    /// RAM of 2 MiB pages from the host's pool.
    pub fn huge_pages(mut self) -> Self {
        self.huge_pages = true;
        self
    }

    /// RAM in this object of QEMU's, whose id is `ram0` and which is as large as the memory, instead of a memfd.
    pub fn memory_object(mut self, object: &str) -> Self {
        self.memory_object = Some(object.to_owned());
        self
    }

    /// Balloon device (default: none).
    pub fn balloon(mut self, balloon: Balloon) -> Self {
        self.balloon = balloon;
        self
    }

    /// Words put before the QEMU command line, such as `ballast run --name a --` (default: none).
    pub fn prefix<S: Into<String>>(mut self, words: impl IntoIterator<Item = S>) -> Self {
        self.prefix = words.into_iter().map(Into::into).collect();
        self
    }

    /// Set an environment variable for the process.
    pub fn env(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.env.push((key.into(), value.into()));
        self
    }

    /// More QEMU arguments, put last.
    pub fn extra_args<S: Into<String>>(mut self, args: impl IntoIterator<Item = S>) -> Self {
        self.extra_args = args.into_iter().map(Into::into).collect();
        self
    }

    /// One more.
    pub fn extra_arg(mut self, arg: impl Into<String>) -> Self {
        self.extra_args.push(arg.into());
        self
    }

    /// Redis `maxmemory`; zero is none (default).
    pub fn redis_maxmemory(mut self, limit: Bytes) -> Self {
        self.redis_maxmemory = limit;
        self
    }

    /// Run this shell command in the guest instead of Redis, then power off; see [`QemuGuest::wait_run`].
    pub fn run(mut self, command: impl Into<String>) -> Self {
        self.run = Some(command.into());
        self
    }

    /// Run the bench program (`guest/linux.rs`) in the guest instead of Redis; see [`QemuGuest::tell`].
    pub fn bench(mut self) -> Self {
        self.bench = true;
        self.run(initrd::BENCH)
    }

    /// Where console log and QMP socket go and stay (default: a temporary directory that goes with the guest).
    pub fn dir(mut self, dir: impl Into<PathBuf>) -> Self {
        self.dir = Some(dir.into());
        self
    }

    /// QEMU's arguments.
    fn qemu_args(&self, image: &Image, redis_port: u16, qmp: &Path) -> Vec<String> {
        let mut args: Vec<String> = Vec::new();
        let mut put = |words: &[&str]| args.extend(words.iter().map(|word| word.to_string()));
        put(&["-name", &format!("{},debug-threads=on", self.name)]);
        put(&["-nodefaults", "-display", "none", "-no-reboot"]);
        put(&Accel::detect().args());
        put(&["-smp", &self.cpus.to_string()]);
        let size = self.memory.0;
        if self.shared_memory {
            // Not reserved beforehand: a far page frees its place in the pool for other users.
            let huge = if self.huge_pages { ",hugetlb=on,hugetlbsize=2M,reserve=off" } else { "" };
            let memfd = format!("memory-backend-memfd,id=ram0,size={size},share=on{huge}");
            put(&["-object", self.memory_object.as_ref().unwrap_or(&memfd)]);
            put(&["-machine", "pc,memory-backend=ram0"]);
        } else {
            put(&["-machine", "pc"]);
        }
        match self.hotplug_room.0 {
            0 => put(&["-m", &format!("{size}B")]),
            room => put(&["-m", &format!("{size}B,slots=4,maxmem={}B", size + room)]),
        }
        put(&["-kernel", &image.kernel.to_string_lossy(), "-initrd", &image.initrd.to_string_lossy()]);
        // panic=-1 with -no-reboot: a kernel panic ends the process. No crypto self-tests: a second less under TCG. No
        // check of the timer: an emulated CPU that gets no time of the host's fails it, and the kernel panics.
        let mut append =
            "console=ttyS0 quiet panic=-1 no_timer_check cryptomgr.notests mitigations=off init_on_alloc=0".to_string();
        append += &format!(" ballast.maxmemory={}", self.redis_maxmemory.0);
        if let Some(command) = &self.run {
            append += &format!(" -- ballast.run={command}");
        }
        put(&["-append", &append]);
        put(&["-serial", "stdio"]);
        put(&["-qmp", &format!("unix:{},server=on,wait=off", qmp.display())]);
        put(&["-netdev", &format!("user,id=net0,restrict=on,hostfwd=tcp:127.0.0.1:{redis_port}-10.0.2.15:6379")]);
        put(&["-device", "virtio-net-pci,netdev=net0,romfile="]);
        match self.balloon {
            Balloon::None => {}
            Balloon::Plain => put(&["-device", "virtio-balloon-pci,id=balloon0"]),
            Balloon::FreePageReporting => {
                put(&["-device", "virtio-balloon-pci,id=balloon0,free-page-reporting=on"]);
            }
        }
        args.extend(self.extra_args.iter().cloned());
        args
    }

    /// Start it. Returns at once; [`QemuGuest::wait_ready`] waits for the boot.
    pub fn spawn(self) -> Result<QemuGuest, Error> {
        let io = |doing| {
            let guest = self.name.clone();
            move |source| Error::Io { doing, guest, source }
        };
        let mut image = match self.image.clone() {
            Some(image) => image,
            None => Image::find()?,
        };
        let (dir, owned_dir) = match &self.dir {
            Some(dir) => {
                std::fs::create_dir_all(dir).map_err(io("Making the directory of"))?;
                (dir.clone(), None)
            }
            None => {
                let owned = tempfile::Builder::new().prefix("ballast-guest-").tempdir();
                let owned = owned.map_err(io("Making the directory of"))?;
                (owned.path().to_path_buf(), Some(owned))
            }
        };
        if self.bench {
            let with_program = dir.join("initrd");
            initrd::with_bench(&image.initrd, &with_program).map_err(io("Making the initrd of"))?;
            image.initrd = with_program;
        }
        let redis_port = free_port().map_err(io("Picking a port for"))?;
        let qmp = dir.join("qmp");
        let args = self.qemu_args(&image, redis_port, &qmp);
        let words: Vec<&str> = self.prefix.iter().map(String::as_str).chain([QEMU]).collect();
        let stderr = File::create(dir.join("stderr.log")).map_err(io("Making the log of"))?;
        let serial = File::create(dir.join("serial.log")).map_err(io("Making the log of"))?;
        let mut child = Command::new(words[0])
            .args(&words[1..])
            .args(&args)
            .envs(self.env.iter().map(|(key, value)| (key, value)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(stderr)
            .spawn()
            .map_err(io("Starting"))?;
        let (input, stdout) = (child.stdin.take(), child.stdout.take());
        let console = Arc::new(Console::default());
        let writer = Arc::clone(&console);
        let guest =
            QemuGuest { name: self.name.clone(), child, input, console, redis_port, dir, _owned_dir: owned_dir };
        std::thread::Builder::new()
            .name(format!("serial {}", self.name))
            .spawn(move || stdout.map(|stdout| writer.follow(stdout, serial)))
            .map_err(io("Watching"))?;
        Ok(guest)
    }
}

impl QemuGuest {
    /// A guest with every default.
    pub fn builder() -> Builder {
        Builder::new()
    }
}

/// A port of 127.0.0.1 that nobody listens on now.
fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}
