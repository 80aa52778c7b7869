//! `ballast libvirt status`: says for each of libvirt's domains what Ballast lacks to page it.
//!
//! Before: libvirt has domains, and `ballastd` may run. After: a table with the commands to type; nothing is changed.
//! Promise: the command line of a domain's next QEMU comes from libvirt itself (`virsh domxml-to-native`), and `ballast
//! run`'s own check judges it.

use std::io::{ErrorKind, Write};
use std::path::Path;
use std::process::{Command, Output, Stdio};

use anyhow::{Context, Result, anyhow, bail};
use ballast_api::{Client, VmKind, VmStat};
use serde::Serialize;

use crate::exit::{Coded, Exit};
use crate::{run, show};

const EMULATORS: &str = "/usr/lib/ballast";

#[derive(Debug, clap::Subcommand)]
pub enum LibvirtCommand {
    /// Say of each domain whether it is paged, and what is missing if it is not; changes nothing
    Status,
}

#[derive(Debug, Serialize)]
struct Domain {
    name: String,
    uuid: String,
    now: Now,
    /// Steps that an operator must take before the domain's next start, or why none would help.
    missing: Vec<String>,
}

/// The present state of a domain's pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Now {
    Off,
    Paged,
    Adopted,
    Unmanaged,
    Unknown,
}

pub fn status(client: &Client, json: bool) -> Result<()> {
    let vms = client.vms();
    if let Err(error) = &vms {
        show::say(&format!("whether domains are paged now is not known: {error}"));
    }
    let running = virsh(&["list", "--uuid"], None)?;
    let all = virsh(&["list", "--all", "--uuid", "--name"], None)?;
    let each = |(uuid, name): (&str, &str)| {
        let is_running = running.lines().any(|line| line.trim() == uuid);
        let vm = vms.as_ref().map(|vms| vms.iter().find(|vm| vm.uuid.as_deref() == Some(uuid)));
        let (now, unmanaged) = now(is_running, vm.ok());
        let mut missing = missing(name, &command_line(uuid));
        if missing.is_empty() && now == Now::Unmanaged {
            missing.push("restart it: it was started before it had this emulator, or without ballastd".into());
        }
        if unmanaged > 0 {
            let size = show::size(unmanaged);
            missing.push(format!("{size} were plugged in as private memory, and are paged from its next start on"));
        }
        Domain { name: name.into(), uuid: uuid.into(), now, missing }
    };
    let domains: Vec<Domain> = listed(&all).map(each).collect();
    show::answer(json, &domains, |domains| describe(domains))
}

fn listed(text: &str) -> impl Iterator<Item = (&str, &str)> {
    text.lines().filter_map(|line| line.trim().split_once(' ')).map(|(uuid, name)| (uuid, name.trim()))
}

/// The state of the domain's pages, and how much of its RAM is not managed. `vm` is `None` if no daemon answers.
fn now(is_running: bool, vm: Option<Option<&VmStat>>) -> (Now, u64) {
    match vm {
        _ if !is_running => (Now::Off, 0),
        None => (Now::Unknown, 0),
        Some(None) => (Now::Unmanaged, 0),
        Some(Some(vm)) if vm.kind == VmKind::Adopted => (Now::Adopted, 0),
        Some(Some(vm)) => (Now::Paged, vm.unmanaged_bytes),
    }
}

/// The missing steps, by the command line that the domain's next QEMU would have.
fn missing(name: &str, command_line: &Result<Vec<String>>) -> Vec<String> {
    let words = match command_line {
        Ok(words) => words,
        Err(error) => return vec![format!("libvirt does not say how it would start it: {error:#}")],
    };
    let emulator = Path::new(&words[0]);
    let mut missing = Vec::new();
    match run::check(&words[1..]) {
        Err(reason) => missing.push(reason.to_string()),
        Ok(Some(pinned)) => missing.push(pinned),
        Ok(None) => {}
    }
    if !is_ours(emulator) {
        let program = emulator.file_name().unwrap_or_default().to_string_lossy();
        let program = if program.starts_with("qemu-system-") { &*program } else { "qemu" };
        let name = shlex::try_quote(name).unwrap_or(name.into());
        missing.push(format!("virt-xml {name} --edit --boot emulator={EMULATORS}/{program}"));
    }
    missing
}

/// Whether the emulator is this program under another name.
fn is_ours(emulator: &Path) -> bool {
    let own = std::env::current_exe().and_then(|own| own.canonicalize());
    own.is_ok_and(|own| emulator.canonicalize().is_ok_and(|emulator| emulator == own))
}

/// The words with which libvirt would start the domain: QEMU's program first.
fn command_line(uuid: &str) -> Result<Vec<String>> {
    let xml = virsh(&["dumpxml", "--inactive", uuid], None)?;
    words(&virsh(&["domxml-to-native", "qemu-argv", "--xml", "/dev/stdin"], Some(&xml))?)
}

/// The words of a shell command, without the variables before it.
fn words(text: &str) -> Result<Vec<String>> {
    let words = shlex::split(text).ok_or_else(|| anyhow!("a quote is not closed in {text}"))?;
    let words: Vec<String> = words.into_iter().skip_while(|word| !word.starts_with('/')).collect();
    if words.is_empty() {
        bail!("no program in {text:?}");
    }
    Ok(words)
}

fn virsh(args: &[&str], input: Option<&str>) -> Result<String> {
    let mut command = Command::new("virsh");
    command.arg("-q").args(args).env("LC_ALL", "C");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|error| match error.kind() {
        ErrorKind::NotFound => {
            let message = "virsh is not installed (package libvirt-clients)".into();
            Coded { exit: Exit::MissingFeature, message }.into()
        }
        _ => anyhow!(error).context("Starting virsh"),
    })?;
    if let (Some(input), Some(mut to)) = (input, child.stdin.take()) {
        // If the program does not read all of it, its status says why.
        let _ = to.write_all(input.as_bytes());
    }
    let Output { status, stdout, stderr } = child.wait_with_output().context("Waiting for virsh")?;
    if !status.success() {
        bail!("virsh {}: {}", args[0], String::from_utf8_lossy(&stderr).trim());
    }
    Ok(String::from_utf8_lossy(&stdout).into_owned())
}

fn describe(domains: &[Domain]) -> String {
    if domains.is_empty() {
        return "libvirt has no domain\n".into();
    }
    let mut table = show::table(&["DOMAIN", "NOW", "WHAT IS MISSING FOR ITS NEXT START"]);
    for Domain { name, now, missing, .. } in domains {
        let now = format!("{now:?}").to_lowercase();
        let missing = if missing.is_empty() { "-".into() } else { missing.join("\n") };
        table.add_row([name.clone(), now, missing]);
    }
    show::lines(&table)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_what_follows_the_variables() {
        let text = "LC_ALL=C \\\nPATH=/usr/bin \\\n'A=b c' \\\n/usr/bin/qemu-system-x86_64 \\\n-object \
                    '{\"qom-type\":\"memory-backend-ram\"}' \\\n-m 1G\n";
        assert_eq!(
            words(text).expect("words"),
            ["/usr/bin/qemu-system-x86_64", "-object", "{\"qom-type\":\"memory-backend-ram\"}", "-m", "1G"]
        );
        words("LC_ALL=C").expect_err("no program");
        words("/usr/bin/kvm 'a").expect_err("no end");
    }

    #[test]
    fn a_domain_lacks_the_emulator_or_cannot_be_paged_for_a_reason() {
        let of = |emulator: &str, rest: &str| {
            missing("my db", &Ok([emulator].into_iter().chain(rest.split(' ')).map(str::to_owned).collect()))
        };
        let own = std::env::current_exe().expect("a path").display().to_string();
        let stock = "-machine pc,memory-backend=pc.ram -object memory-backend-ram,id=pc.ram,size=1G -m 1G";
        assert_eq!(of(&own, stock), [""; 0]);
        let edit = "virt-xml 'my db' --edit --boot emulator=/usr/lib/ballast/";
        assert_eq!(of("/usr/bin/qemu-system-x86_64", stock), [format!("{edit}qemu-system-x86_64")]);
        assert_eq!(of("/usr/bin/kvm", stock), [format!("{edit}qemu")]);
        for (word, why) in [("-netdev vhost-user,id=n", "another process"), ("-device vfio-pci,host=1", "nothing is")] {
            let said = of(&own, &format!("{stock} {word}"));
            assert!(said.len() == 1 && said[0].contains(why), "{said:?}");
        }
        assert!(missing("db", &Err(anyhow::anyhow!("no such domain")))[0].ends_with("no such domain"));
    }

    #[test]
    fn a_running_domain_is_what_the_daemon_says_of_it() {
        let paged = VmStat { unmanaged_bytes: 7, ..VmStat::default() };
        let adopted = VmStat { kind: VmKind::Adopted, ..VmStat::default() };
        let vms = [None, Some(None), Some(Some(&adopted)), Some(Some(&paged))];
        let all = [(Now::Unknown, 0), (Now::Unmanaged, 0), (Now::Adopted, 0), (Now::Paged, 7)];
        assert_eq!(vms.map(|vm| now(true, vm)), all);
        assert_eq!(now(false, Some(None)), (Now::Off, 0));
    }
}
