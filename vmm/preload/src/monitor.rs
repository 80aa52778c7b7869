//! QEMU's monitor: translates guest-physical addresses to addresses of QEMU's process.
//!
//! Before: `ballast run` has given QEMU a monitor, whose other end is here. After: `guest` has ranges of guest-physical
//! addresses, and their addresses in QEMU.
//! Threads: the one of `guest`.
//! Promise: any input from QEMU is a result or an error. Events, which may come at any time, are skipped. A request
//! fails if QEMU is gone, or refuses.
//!
//! QMP has no command for these addresses. `info mtree` lists the memory regions of the machine, and `gpa2hva`
//! translates a guest-physical address: both are commands of the human monitor, which QMP carries as text. `info mtree
//! -f`, which lists the view of the CPUs, is not used: in QEMU 7.2 it leaks references, so that memory which it has
//! listed is never unmapped after an unplug.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;

/// Longest reply in bytes: a machine has some hundred ranges of some ten words each.
const LONGEST: usize = 4 << 20;

#[derive(Debug)]
pub struct Monitor {
    stream: UnixStream,
    /// Bytes that were read and are not a whole line yet.
    rest: Vec<u8>,
}

impl Monitor {
    /// Greets the monitor at the other end of this socket. QEMU's reply comes when the machine is made.
    pub fn greet(stream: UnixStream) -> io::Result<Self> {
        let mut monitor = Self { stream, rest: Vec::new() };
        monitor.answer("{\"QMP\"")?;
        monitor.stream.write_all(b"{\"execute\": \"qmp_capabilities\"}\n")?;
        monitor.answer("{\"return\"")?;
        Ok(monitor)
    }

    /// The socket, for `poll`: between requests it has only events, or the end.
    pub fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// Reads and drops the events that have come.
    pub fn drain(&mut self) -> io::Result<()> {
        self.fill()?;
        if let Some(end) = self.rest.iter().rposition(|byte| *byte == b'\n') {
            self.rest.drain(..=end);
        }
        Ok(())
    }

    /// Ranges that may be guest-physical addresses of memory, as start and length, ascending, the longest first. A
    /// range is one if [`Monitor::host_address`] translates both of its ends.
    pub fn memory(&mut self) -> io::Result<Vec<(u64, u64)>> {
        Ok(ram_in(&self.human("info mtree")?))
    }

    /// The address in QEMU's process of a guest-physical address; `None` if there is no memory.
    pub fn host_address(&mut self, address: u64) -> io::Result<Option<u64>> {
        Ok(address_in(&self.human(&format!("gpa2hva {address:#x}"))?))
    }

    /// The RAM of the machine without plugged memory, in bytes.
    pub fn base_memory(&mut self) -> io::Result<u64> {
        Ok(base_in(&self.human("info memory_size_summary")?).unwrap_or(0))
    }

    /// The memory devices of the machine.
    pub fn memory_devices(&mut self) -> io::Result<Vec<Device>> {
        Ok(devices_in(&self.human("info memory-devices")?))
    }

    /// Bytes of the guest's RAM that are in none of these regions: address, length, and whether the guest sees it.
    pub fn unmanaged(&mut self, regions: &[(u64, u64, bool)]) -> io::Result<u64> {
        let (mut missing, mut of_devices) = (0, Vec::new());
        for device in self.memory_devices()? {
            match self.region_of(&device, regions)? {
                Some(number) => of_devices.push(number),
                None => missing += device.ram,
            }
        }
        let is_base = |number: usize, is_shown: bool| is_shown && !of_devices.contains(&number);
        let base = regions.iter().enumerate().filter(|(number, region)| is_base(*number, region.2));
        let managed: u64 = base.map(|(_, (_, len, _))| len).sum();
        Ok(missing + self.base_memory()?.saturating_sub(managed))
    }

    /// The region that has the memory of this device. Of a virtio-mem, QEMU shows only slots with memory for the guest.
    fn region_of(&mut self, device: &Device, regions: &[(u64, u64, bool)]) -> io::Result<Option<usize>> {
        let at = |hva: u64| regions.iter().position(|(start, len, _)| *start <= hva && hva < start + len);
        if let Some(hva) = self.host_address(device.address)? {
            return Ok(at(hva));
        }
        for (address, _) in self.memory()? {
            if (device.address..device.address.saturating_add(device.len)).contains(&address)
                && let Some(number) = self.host_address(address)?.and_then(at)
            {
                return Ok(Some(number));
            }
        }
        Ok(None)
    }

    fn human(&mut self, command: &str) -> io::Result<String> {
        let asked =
            format!("{{\"execute\": \"human-monitor-command\", \"arguments\": {{\"command-line\": \"{command}\"}}}}\n");
        self.stream.write_all(asked.as_bytes())?;
        let answer = self.answer("{\"return\": \"")?;
        let text = answer.strip_prefix("{\"return\": \"").and_then(text_of);
        text.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, format!("QEMU's monitor says {answer:?}")))
    }

    /// The next line that is not an event, if it begins with `begins`.
    fn answer(&mut self, begins: &str) -> io::Result<String> {
        loop {
            if let Some(end) = self.rest.iter().position(|byte| *byte == b'\n') {
                let line = String::from_utf8_lossy(&self.rest[..end]).trim().to_owned();
                self.rest.drain(..=end);
                if line.starts_with(begins) {
                    return Ok(line);
                }
                if line.starts_with("{\"error\"") || line.starts_with("{\"return\"") {
                    return Err(io::Error::other(format!("QEMU's monitor says {line}")));
                }
                continue;
            }
            self.fill()?;
        }
    }

    fn fill(&mut self) -> io::Result<()> {
        let mut bytes = [0; 4096];
        let count = loop {
            match self.stream.read(&mut bytes) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                other => break other?,
            }
        };
        if count == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if self.rest.len() + count > LONGEST {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a reply of QEMU's monitor is too long"));
        }
        self.rest.extend_from_slice(&bytes[..count]);
        Ok(())
    }
}

/// A JSON string, up to its closing quotation mark.
fn text_of(json: &str) -> Option<String> {
    let (mut text, mut chars) = (String::new(), json.chars());
    loop {
        match chars.next()? {
            '"' => return Some(text),
            '\\' => match chars.next()? {
                'n' => text.push('\n'),
                't' => text.push('\t'),
                'r' | 'b' | 'f' => {}
                'u' => {
                    let code: String = chars.by_ref().take(4).collect();
                    text.push(char::from_u32(u32::from_str_radix(&code, 16).ok()?).unwrap_or('?'));
                }
                other => text.push(other),
            },
            other => text.push(other),
        }
    }
}

/// The ranges of RAM in the reply of `info mtree`, of all address spaces, each once.
pub fn ram_in(text: &str) -> Vec<(u64, u64)> {
    let range = |line: &str| {
        let (place, rest) = line.trim_start().split_once(" (prio ")?;
        let (start, last) = place.split_once('-')?;
        let (_, kind) = rest.split_once(')')?.0.split_once(", ")?;
        let number = |text| u64::from_str_radix(text, 16).ok();
        let (start, last) = (number(start)?, number(last)?);
        // `ram`, `nv-ram`; not `rom`, `romd`, `ramd` (a device's), `i/o`.
        let len = last.checked_sub(start)?.checked_add(1)?;
        kind.ends_with("ram").then_some((start, len))
    };
    let mut found: Vec<_> = text.lines().filter_map(range).collect();
    found.sort_unstable_by_key(|(start, len)| (*start, u64::MAX - len));
    found.dedup();
    found
}

/// The base memory in the reply of `info memory_size_summary`.
pub fn base_in(text: &str) -> Option<u64> {
    text.lines().find_map(|line| line.trim().strip_prefix("base memory: "))?.trim().parse().ok()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device {
    pub address: u64,
    /// Length of its range of guest-physical addresses.
    pub len: u64,
    /// The guest's RAM in it, in bytes: 0 in an NVDIMM and a virtio-pmem, which have an image.
    pub ram: u64,
}

/// The devices in the reply of `info memory-devices`.
pub fn devices_in(text: &str) -> Vec<Device> {
    let mut found = Vec::new();
    for device in text.split("Memory device [").skip(1) {
        let Some((kind, rest)) = device.split_once(']') else { continue };
        let value = |key: &str| rest.lines().find_map(|line| line.trim().strip_prefix(key)).map(str::trim);
        let size = |key| value(key).and_then(|text| text.parse::<u64>().ok());
        let address = value("addr:").or_else(|| value("memaddr:"));
        let address = address.and_then(|text| u64::from_str_radix(text.trim_start_matches("0x"), 16).ok());
        let ram = size("size:").filter(|_| matches!(kind, "dimm" | "virtio-mem")).unwrap_or(0);
        let len = size("max-size:").or_else(|| size("size:")).unwrap_or(0);
        found.extend(address.map(|address| Device { address, len, ram }));
    }
    found
}

pub fn address_in(text: &str) -> Option<u64> {
    let (_, address) = text.trim().rsplit_once(" is 0x")?;
    u64::from_str_radix(address, 16).ok()
}
