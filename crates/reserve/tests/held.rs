//! What processes keep of base pages whose VM ended: in the pool's memory cgroup, of version 2. Needs root, and a
//! cgroup of this test's own; `scripts/newer-kernel-suite.sh` runs it where this machine has none.

mod common;

use std::path::{Path, PathBuf};

use ballast_base::{HUGE_SIZE, MIB};
use ballast_testkit::skip;
use ballast_reserve::Page;

use common::{Place, grant, hold_in_pipe, map, search_and_mark, sum, zero_all};

/// A memory cgroup that this process is in, until it is dropped.
struct Own(PathBuf);

impl Own {
    fn enter() -> Result<Self, String> {
        let root = Path::new("/sys/fs/cgroup");
        let controllers = std::fs::read_to_string(root.join("cgroup.controllers")).unwrap_or_default();
        if !controllers.split_ascii_whitespace().any(|controller| controller == "memory") {
            return Err(format!("{} is no cgroup of version 2 with a memory controller", root.display()));
        }
        let write = |file: &Path, text: &str| {
            std::fs::write(file, text).map_err(|error| format!("writing {text} to {}: {error}", file.display()))
        };
        write(&root.join("cgroup.subtree_control"), "+memory")?;
        let own = Self(root.join(format!("ballast-test-{}", std::process::id())));
        std::fs::create_dir(&own.0).map_err(|error| format!("making {}: {error}", own.0.display()))?;
        write(&own.0.join("cgroup.procs"), "0")?;
        Ok(own)
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        let _ = std::fs::write("/sys/fs/cgroup/cgroup.procs", "0");
        let _ = std::fs::remove_dir(&self.0);
    }
}

#[test]
fn no_more_than_a_part_is_filled_in_place_of_what_pipes_keep_of_vms_that_ended() {
    let Some(place) = Place::of(Page::Base) else { return };
    let own = match Own::enter() {
        Ok(own) => own,
        Err(why) => return skip("cgroup", why),
    };
    let Some(mut reserve) = place.pool(128, 16) else { return };
    let vm = grant(&mut reserve, "vm", 64);
    let ram = map(&vm);
    assert_eq!(search_and_mark(&ram), 0);
    // One page of each 2 MiB: 128 KiB in all.
    let pipes: Vec<_> = (0..ram.len()).step_by(HUGE_SIZE).map(|at| hold_in_pipe(&ram, at)).collect();
    drop((ram, vm));
    assert_eq!(reserve.tend().expect("tend"), 1);
    let huge = std::fs::read_to_string(own.0.join("memory.stat")).expect("memory.stat");
    let huge = ballast_sys::meminfo::number_in(&huge.replace(' ', ": "), "shmem_thp").unwrap_or(0);
    if huge < 64 * MIB {
        return skip("collapse", format!("{huge} bytes of the pool are huge pages"));
    }
    zero_all(&mut reserve);
    let dirty = sum(&reserve, |node| node.dirty);
    // 16 MiB are filled, and what the kernel's count may be wrong by.
    let processors = std::thread::available_parallelism().expect("processors").get() as u64;
    let expected = 48 * MIB - 2 * MIB * processors..=48 * MIB;
    assert!(expected.contains(&dirty), "{dirty}: {:?}", reserve.overview());
    let notes = reserve.overview().notes;
    assert!(notes.iter().any(|note| note.contains("processes still hold")), "{notes:?}");
    assert!(!reserve.is_zeroing(), "a VM that asks is told at once");
    // Others get what is filled, and the rest is filled when the pipes are gone.
    drop(grant(&mut reserve, "other", 64));
    assert_eq!(reserve.tend().expect("tend"), 1);
    zero_all(&mut reserve);
    assert!(expected.contains(&sum(&reserve, |node| node.dirty)), "{:?}", reserve.overview());
    drop(pipes);
    reserve.tend().expect("tend");
    zero_all(&mut reserve);
    assert_eq!(sum(&reserve, |node| node.ready), 128 * MIB, "{:?}", reserve.overview());
    assert_eq!(reserve.overview().notes, Vec::<String>::new());
    reserve.validate().expect("valid");
}
