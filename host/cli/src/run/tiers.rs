//! `--tiers fast=1G,slow=3G`: guest RAM as two NUMA nodes of different speed, in QEMU's words.
//!
//! Before: the operator's sizes and QEMU's command line. After: that command line with a backend and a node for each
//! tier, distances, and an HMAT by which the guest's kernel distinguishes the tiers (Demeter, section 3.3). Units:
//! bytes. Promise: a pure function of the words; for options that contradict each other, an error says which to leave
//! out. Node 0 is fast and has all CPUs, node 1 is slow and has none.
//!
//! The figures of the HMAT only say which node is faster. They are those of DRAM and of Optane in Demeter's table 2.

use std::str::FromStr;

use ballast_base::{Bytes, GIB, Invalid, MIB};

use super::command_line::{Edit, megabytes};
use super::options::{Opt, memory, options};

/// Linux counts memory in blocks of this size, each of one node. In guests of 64 GiB or more the blocks are larger.
const BLOCK: u64 = 128 * MIB;
const LARGE_GUEST: u64 = 64 * GIB;
const LARGE_BLOCK: u64 = 2 * GIB;
/// Distance from the CPUs to the slow node; to the fast one it is 10.
const DISTANCE: u32 = 20;
/// Names of the tiers, with latency in nanoseconds and bandwidth.
const SPEED: [(&str, u32, &str); 2] = [("fast", 69, "80G"), ("slow", 177, "20G")];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Tier {
    size: Bytes,
    /// Node of the host from which its memory comes.
    host_node: Option<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tiers([Tier; 2]);

impl FromStr for Tiers {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        let mut tiers = [None; 2];
        for part in text.split(',') {
            let (name, value) = part.split_once('=').ok_or_else(|| format!("{part:?} is no fast=SIZE or slow=SIZE"))?;
            let Some(at) = SPEED.iter().position(|(known, ..)| *known == name) else {
                return Err(format!("there is no tier {name:?}: write fast=SIZE,slow=SIZE").into());
            };
            let (size, node) = value.split_once('@').map_or((value, None), |(size, node)| (size, Some(node)));
            let size: Bytes = size.parse().map_err(|error| format!("the size of {name}: {error}"))?;
            let wrong = || format!("{name}: {:?} is no number of a node of the host", node.unwrap_or_default());
            let host_node = node.map(|node| node.parse().map_err(|_| wrong())).transpose()?;
            if tiers[at].replace(Tier { size, host_node }).is_some() {
                return Err(format!("{name} is there twice").into());
            }
        }
        let [Some(fast), Some(slow)] = tiers else {
            return Err("both tiers are needed: write fast=SIZE,slow=SIZE".into());
        };
        let total = fast.size.0.checked_add(slow.size.0).ok_or("that is more than there can be")?;
        let block = if total < LARGE_GUEST { BLOCK } else { LARGE_BLOCK };
        for (tier, (name, ..)) in [fast, slow].iter().zip(SPEED) {
            if tier.size.0 == 0 || !tier.size.0.is_multiple_of(block) {
                let (size, block) = (tier.size, Bytes(block));
                return Err(
                    format!("{name}={size} is no multiple of {block}, the part of memory that has one node").into()
                );
            }
        }
        Ok(Self([fast, slow]))
    }
}

impl Tiers {
    fn total(self) -> Bytes {
        Bytes(self.0.iter().map(|tier| tier.size.0).sum())
    }

    pub fn edits(self, words: &[String]) -> Result<Vec<Edit>, Invalid> {
        let options = options(words)?;
        if let Some(option) = options.iter().find(|option| option.name == "numa" || option.name == "mem-path") {
            return Err(format!("--tiers makes the guest's nodes; leave out `-{} {}`", option.name, option.text).into());
        }
        let machine = options.iter().find(|option| option.name == "machine" && !option.text.is_empty());
        if let Some(machine) = options.iter().find(|option| option.get("memory-backend").is_some()) {
            return Err(format!(
                "--tiers makes the backends of guest RAM; leave memory-backend out of `{}`",
                machine.text
            )
            .into());
        }
        let mut edits = Vec::new();
        let total = self.total();
        match memory(&options) {
            None => edits.extend(["-m".to_owned(), format!("{}M", total.0 / MIB)].map(Edit::Append)),
            Some((memory, text)) => {
                if megabytes(text) != Some(total) {
                    return Err(
                        format!("`-m {}` is not the size of both tiers, {total}; leave it out", memory.text).into()
                    );
                }
            }
        }
        match machine {
            Some(machine) if machine.get("hmat").is_some_and(|_| !machine.is_on("hmat")) => {
                return Err(format!("tiers need an HMAT; leave hmat out of `-machine {}`", machine.text).into());
            }
            Some(machine) if machine.is_on("hmat") => (),
            Some(Opt { index: Some(index), text, .. }) => edits.push(Edit::Replace(*index, format!("{text},hmat=on"))),
            Some(_) => edits.extend(["-machine", "hmat=on"].map(|word| Edit::Append(word.to_owned()))),
            None => edits.extend(["-machine", "q35,hmat=on"].map(|word| Edit::Append(word.to_owned()))),
        }
        let cpus = cpus(&options)?;
        let last = cpus - 1;
        let mut add = |name: &str, value: String| edits.extend([format!("-{name}"), value].map(Edit::Append));
        for (tier, (name, ..)) in self.0.iter().zip(SPEED) {
            let place = tier.host_node.map(|node| format!(",host-nodes={node},policy=bind")).unwrap_or_default();
            let size = tier.size.0 / MIB;
            add("object", format!("memory-backend-memfd,id=ballast-{name},size={size}M,share=on{place}"));
        }
        add("numa", format!("node,nodeid=0,cpus=0-{last},memdev=ballast-fast"));
        add("numa", "node,nodeid=1,initiator=0,memdev=ballast-slow".into());
        add("numa", format!("dist,src=0,dst=1,val={DISTANCE}"));
        for (node, (_, latency, bandwidth)) in SPEED.into_iter().enumerate() {
            let place = format!("hmat-lb,initiator=0,target={node},hierarchy=memory");
            add("numa", format!("{place},data-type=access-latency,latency={latency}"));
            add("numa", format!("{place},data-type=access-bandwidth,bandwidth={bandwidth}"));
        }
        Ok(edits)
    }
}

fn cpus(options: &[Opt]) -> Result<u64, Invalid> {
    let Some(smp) = options.iter().rev().find(|option| option.name == "smp") else { return Ok(1) };
    let number = |text: &str| -> Result<u64, Invalid> {
        let number = text.parse::<u64>().ok().filter(|number| *number > 0);
        number.ok_or_else(|| format!("`-smp {}`: {text:?} is no number of CPUs", smp.text).into())
    };
    if let Some(most) = smp.get("maxcpus").or_else(|| smp.get("cpus")) {
        return number(most);
    }
    if !smp.head.is_empty() {
        return number(&smp.head);
    }
    let mut product = 1u64;
    for part in ["sockets", "dies", "clusters", "cores", "threads"] {
        product = product.saturating_mul(smp.get(part).map_or(Ok(1), number)?);
    }
    Ok(product)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(tiers: &str, line: &str) -> Result<String, Invalid> {
        let mut words: Vec<String> = line.split_ascii_whitespace().map(str::to_owned).collect();
        for edit in tiers.parse::<Tiers>()?.edits(&words.clone())? {
            match edit {
                Edit::Replace(index, word) => words[index] = word,
                Edit::Append(word) => words.push(word),
            }
        }
        Ok(words.join(" "))
    }

    #[test]
    fn a_guest_gets_a_node_for_each_tier_and_all_cpus_are_at_the_fast_one() {
        let line = with("fast=1G,slow=3G", "-machine q35,accel=kvm -smp 4,maxcpus=8 disk").expect("fine");
        for words in [
            "-machine q35,accel=kvm,hmat=on -smp",
            " -m 4096M ",
            "-object memory-backend-memfd,id=ballast-fast,size=1024M,share=on ",
            "-object memory-backend-memfd,id=ballast-slow,size=3072M,share=on ",
            "-numa node,nodeid=0,cpus=0-7,memdev=ballast-fast ",
            "-numa node,nodeid=1,initiator=0,memdev=ballast-slow ",
            "-numa dist,src=0,dst=1,val=20 ",
            "-numa hmat-lb,initiator=0,target=1,hierarchy=memory,data-type=access-latency,latency=177 ",
        ] {
            assert!(line.contains(words), "{words} in {line}");
        }
        let line = with("slow=256M@1,fast=128M@0", "-m 384 -smp sockets=2,cores=3").expect("fine");
        assert!(line.starts_with("-m 384 -smp sockets=2,cores=3 -machine q35,hmat=on -object"), "{line}");
        assert!(line.contains("size=128M,share=on,host-nodes=0,policy=bind "), "{line}");
        assert!(line.contains("cpus=0-5,") && line.contains("size=256M,share=on,host-nodes=1,policy=bind"), "{line}");
    }

    #[test]
    fn what_does_not_go_together_is_an_error_that_says_what_to_leave_out() {
        for (tiers, line, reason) in [
            ("fast=1G", "", "both tiers"),
            ("fast=1G,slow=1G,fast=1G", "", "fast is there twice"),
            ("fast=1G,cold=1G", "", "no tier \"cold\""),
            ("fast,slow=1G", "", "\"fast\" is no"),
            ("fast=lots,slow=1G", "", "size of fast"),
            ("fast=100M,slow=1G", "", "no multiple of 128 MiB"),
            ("fast=0M,slow=1G", "", "no multiple"),
            ("fast=1G,slow=64G", "", "no multiple of 2 GiB"),
            ("fast=1G@x,slow=1G", "", "no number of a node"),
            ("fast=1G,slow=1G", "-m 3G", "not the size of both tiers, 2 GiB"),
            ("fast=1G,slow=1G", "-numa node,cpus=0", "leave out `-numa node,cpus=0`"),
            ("fast=1G,slow=1G", "-machine q35,memory-backend=ram0", "leave memory-backend out"),
            ("fast=1G,slow=1G", "-machine q35,hmat=off", "leave hmat out"),
            ("fast=1G,slow=1G", "-smp cpus=many", "\"many\" is no number of CPUs"),
        ] {
            let said = with(tiers, line).expect_err(tiers).to_string();
            assert!(said.contains(reason), "{tiers} {line}: {said}");
        }
    }
}
