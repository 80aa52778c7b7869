//! Other programs that move pages between nodes, so that no two fight: the kernel's NUMA balancing and its demotion.
//!
//! Before: a kernel that may tier by itself. After: [`crate::engine`] moves pages, or names the other program.
//! Threads: none. Promise: nothing is switched off unless the guest's owner said so ([`Balancing`]), and all is undone.

use std::io;

use crate::kernel_files::Files;

const BALANCING: &str = "/proc/sys/kernel/numa_balancing";
const DEMOTION: &str = "/sys/kernel/mm/numa/demotion_enabled";
/// The mode in which the kernel promotes hot pages: a bit of the setting.
const TIERING: u64 = 2;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Beside {
    /// A program that promotes by heat. Two such programs undo each other's moves.
    pub promoter: Option<String>,
    /// Those that do not disturb ours, but may use the memory that ours keeps free.
    pub notes: Vec<String>,
}

/// Returns the other programs that move pages. DAMON does not: its threads are ours.
pub fn look(files: &Files) -> io::Result<Beside> {
    let mut beside = Beside::default();
    let mode = files.optional(BALANCING)?.and_then(|text| text.parse::<u64>().ok()).unwrap_or(0);
    if mode & TIERING != 0 {
        beside.promoter = Some(format!("the kernel's NUMA balancing promotes (kernel.numa_balancing is {mode})"));
    } else if mode != 0 {
        beside.notes.push(format!(
            "NUMA balancing is on (kernel.numa_balancing is {mode}): it moves pages to the CPU that uses them"
        ));
    }
    if files.optional(DEMOTION)?.as_deref() == Some("true") {
        beside.notes.push("the kernel demotes instead of swapping when a node is short of memory".into());
    }
    Ok(beside)
}

/// NUMA balancing, switched off for as long as this lives.
#[derive(Debug)]
pub struct Balancing {
    files: Files,
    before: String,
}

impl Balancing {
    /// Switches NUMA balancing off. Returns `None` if it is off already, or absent. Fails if that is not permitted.
    pub fn off(files: &Files) -> io::Result<Option<Self>> {
        let Some(before) = files.optional(BALANCING)?.filter(|mode| mode != "0") else { return Ok(None) };
        files.write(BALANCING, 0)?;
        Ok(Some(Self { files: files.clone(), before }))
    }
}

impl Drop for Balancing {
    fn drop(&mut self) {
        // If a program has set it since, that setting has precedence.
        if self.files.optional(BALANCING).is_ok_and(|mode| mode.as_deref() == Some("0")) {
            let _ = self.files.write(BALANCING, &self.before);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nodes::tests::put;

    #[test]
    fn the_program_that_promotes_is_named_and_others_are_noted() {
        let root = tempfile::tempdir().expect("directory");
        let files = Files::below(root.path());
        assert_eq!(look(&files).expect("looked"), Beside::default());
        put(root.path(), BALANCING, "1\n");
        put(root.path(), DEMOTION, "true\n");
        let beside = look(&files).expect("looked");
        assert_eq!((beside.promoter, beside.notes.len()), (None, 2));
        put(root.path(), BALANCING, "3\n");
        let said = look(&files).expect("looked").promoter.expect("promotes");
        assert!(said.contains("numa_balancing is 3"), "{said}");
    }

    #[test]
    fn balancing_is_off_for_a_while_unless_somebody_sets_it_meanwhile() {
        let root = tempfile::tempdir().expect("directory");
        let files = Files::below(root.path());
        assert!(Balancing::off(&files).expect("not there").is_none());
        put(root.path(), BALANCING, "2\n");
        let off = Balancing::off(&files).expect("permitted").expect("it was on");
        assert_eq!(files.text(BALANCING).expect("read"), "0");
        drop(off);
        assert_eq!(files.text(BALANCING).expect("read"), "2");
        let off = Balancing::off(&files).expect("permitted").expect("it was on");
        put(root.path(), BALANCING, "1\n");
        drop(off);
        assert_eq!(files.text(BALANCING).expect("read"), "1");
    }
}
