//! Builds the command line of a guest, and starts it.
//!
//! Before: a test sets the options. After: a [`QemuGuest`] runs.
//! Threads: the caller's. `spawn` starts the console's reader.
//! Units: sizes are [`Bytes`].
//! Promise: the guest has only the requested devices. RAM is a shared memfd unless an option changes it.

use std::fs::File;
use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;

use anyhow::{Context, Result};
use ballast_base::{Bytes, MIB};

use super::console::Console;
use super::guest::QemuGuest;
use super::image::{Image, QEMU};

/// The accelerator: KVM where the hardware can run it, else TCG, QEMU's emulation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accel {
    /// `/dev/kvm` with hardware virtualisation below it.
    Kvm,
    /// QEMU's software emulation, which works on any machine.
    Tcg,
}

impl Accel {
    /// Returns the best accelerator of this machine. A `/dev/kvm` without vmx or svm cannot boot a stock kernel.
    pub fn detect() -> Self {
        let flags = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let hardware = flags.lines().any(|line| {
            line.starts_with("flags") && line.split_whitespace().any(|flag| flag == "vmx" || flag == "svm")
        });
        if hardware && Path::new("/dev/kvm").exists() { Self::Kvm } else { Self::Tcg }
    }

    /// Returns QEMU's arguments. Under TCG the CPU has no ERMS, because TCG would copy one byte per step with it.
    fn args(self) -> [&'static str; 4] {
        match self {
            Self::Kvm => ["-accel", "kvm", "-cpu", "host"],
            Self::Tcg => ["-accel", "tcg,thread=multi", "-cpu", "qemu64"],
        }
    }
}

/// The options of a guest. All have defaults; see the methods.
#[derive(Clone, Debug)]
pub struct Builder {
    name: String,
    image: Option<Image>,
    memory: Bytes,
    hotplug_room: Bytes,
    shared_memory: bool,
    huge_pages: bool,
    memory_object: Option<String>,
    balloon: bool,
    prefix: Vec<String>,
    env: Vec<(String, String)>,
    extra_args: Vec<String>,
    run: Option<String>,
}

impl Builder {
    fn new() -> Self {
        Self {
            name: "guest".into(),
            image: None,
            memory: Bytes(512 * MIB),
            hotplug_room: Bytes(0),
            shared_memory: true,
            huge_pages: false,
            memory_object: None,
            balloon: false,
            prefix: Vec::new(),
            env: Vec::new(),
            extra_args: Vec::new(),
            run: None,
        }
    }

    /// Set its name in messages and in `-name` (default: guest).
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// Set kernel and initrd (default: [`Image::find`]).
    pub fn image(mut self, image: Image) -> Self {
        self.image = Some(image);
        self
    }

    /// Set the size of RAM at boot (default: 512 MiB).
    pub fn memory(mut self, memory: Bytes) -> Self {
        self.memory = memory;
        self
    }

    /// Set the amount of RAM that may be plugged in later, in at most four DIMMs (default: none).
    pub fn hotplug_room(mut self, room: Bytes) -> Self {
        self.hotplug_room = room;
        self
    }

    /// Put RAM into a shared memfd, which Ballast needs (default), or into private anonymous memory.
    pub fn shared_memory(mut self, shared: bool) -> Self {
        self.shared_memory = shared;
        self
    }

    /// Back RAM with 2 MiB pages of the host's hugetlb pool.
    pub fn huge_pages(mut self) -> Self {
        self.huge_pages = true;
        self
    }

    /// Put RAM into this QEMU object instead of a memfd. Its id is `ram0`, and its size is that of the memory.
    pub fn memory_object(mut self, object: &str) -> Self {
        self.memory_object = Some(object.to_owned());
        self
    }

    /// Add a balloon with free page reporting: the guest also returns free pages by itself, 2-4 MiB at a time.
    pub fn balloon(mut self) -> Self {
        self.balloon = true;
        self
    }

    /// Set the words before the QEMU command line, such as `ballast run --name a --` (default: none).
    pub fn prefix<S: Into<String>>(mut self, words: impl IntoIterator<Item = S>) -> Self {
        self.prefix = words.into_iter().map(Into::into).collect();
        self
    }

    /// Set an environment variable for the process.
    pub fn env(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.env.push((key.into(), value.into()));
        self
    }

    /// Set more QEMU arguments, which come last.
    pub fn extra_args<S: Into<String>>(mut self, args: impl IntoIterator<Item = S>) -> Self {
        self.extra_args = args.into_iter().map(Into::into).collect();
        self
    }

    /// Add one more QEMU argument.
    pub fn extra_arg(mut self, arg: impl Into<String>) -> Self {
        self.extra_args.push(arg.into());
        self
    }

    /// Run this shell command in the guest instead of Redis, then power off: see [`QemuGuest::wait_run`].
    pub fn run(mut self, command: impl Into<String>) -> Self {
        self.run = Some(command.into());
        self
    }

    fn qemu_args(&self, image: &Image, redis_port: u16, qmp: &Path) -> Vec<String> {
        let mut args: Vec<String> = Vec::new();
        let mut put = |words: &[&str]| args.extend(words.iter().map(|word| word.to_string()));
        put(&["-name", &format!("{},debug-threads=on", self.name)]);
        put(&["-nodefaults", "-display", "none", "-no-reboot"]);
        put(&Accel::detect().args());
        let size = self.memory.0;
        if self.shared_memory {
            // The pages are not reserved, so a far page frees a page of the pool for other users.
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
        // panic=-1 with -no-reboot makes a kernel panic end the process. cryptomgr.notests saves a second under TCG.
        // no_timer_check avoids a panic: an emulated CPU that the host does not schedule fails that check.
        let mut append =
            "console=ttyS0 quiet panic=-1 no_timer_check cryptomgr.notests mitigations=off init_on_alloc=0".to_string();
        if let Some(command) = &self.run {
            append += &format!(" -- ballast.run={command}");
        }
        put(&["-append", &append]);
        put(&["-serial", "stdio"]);
        put(&["-qmp", &format!("unix:{},server=on,wait=off", qmp.display())]);
        put(&["-netdev", &format!("user,id=net0,restrict=on,hostfwd=tcp:127.0.0.1:{redis_port}-10.0.2.15:6379")]);
        put(&["-device", "virtio-net-pci,netdev=net0,romfile="]);
        if self.balloon {
            put(&["-device", "virtio-balloon-pci,id=balloon0,free-page-reporting=on"]);
        }
        args.extend(self.extra_args.iter().cloned());
        args
    }

    /// Start the guest. Returns at once: [`QemuGuest::wait_ready`] waits for the boot.
    pub fn spawn(self) -> Result<QemuGuest> {
        let image = match self.image.clone() {
            Some(image) => image,
            None => Image::find()?,
        };
        let dir = tempfile::Builder::new().prefix("ballast-guest-").tempdir().context("Making a directory")?;
        let redis_port = free_port().context("Picking a port")?;
        let qmp = dir.path().join("qmp");
        let args = self.qemu_args(&image, redis_port, &qmp);
        let words: Vec<&str> = self.prefix.iter().map(String::as_str).chain([QEMU]).collect();
        let stderr = File::create(dir.path().join("stderr.log")).context("Making a log")?;
        let serial = File::create(dir.path().join("serial.log")).context("Making a log")?;
        let mut child = Command::new(words[0])
            .args(&words[1..])
            .args(&args)
            .envs(self.env.iter().map(|(key, value)| (key, value)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(stderr)
            .spawn()
            .with_context(|| format!("Starting {}", words[0]))?;
        let (input, stdout) = (child.stdin.take(), child.stdout.take());
        let console = Arc::new(Console::default());
        let writer = Arc::clone(&console);
        let guest = QemuGuest { name: self.name.clone(), child, input, console, redis_port, dir };
        std::thread::Builder::new()
            .name(format!("serial {}", self.name))
            .spawn(move || stdout.map(|stdout| writer.follow(stdout, serial)))
            .context("Starting a thread")?;
        Ok(guest)
    }
}

impl QemuGuest {
    /// Returns the default options.
    pub fn builder() -> Builder {
        Builder::new()
    }
}

/// Returns a port of 127.0.0.1 on which nobody listens now.
fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}
