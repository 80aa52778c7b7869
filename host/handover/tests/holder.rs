//! Who can reach a file. This test has a process of its own: with others in the process, a child that one of them
//! starts would have the file, too, until the child executes its program.

use std::collections::HashSet;

use ballast_base::Bytes;
use ballast_handover::holder::find;
use ballast_sys::memfd;
use ballast_sys::process::Process;

#[test]
fn a_process_that_has_a_file_open_holds_it_until_it_ends() {
    let fd = std::fs::File::from(memfd::create("ballast-test", Bytes(4096)).expect("memfd"));
    let theirs = fd.try_clone().expect("duplicate");
    let files = HashSet::from([memfd::file_id(&fd).expect("stat")]);
    let me = Process::this().expect("this process");
    let [nobody, mine] = [HashSet::new(), HashSet::from([me.pid])];
    assert_eq!(find(&files, &nobody, &[]).expect("readable"), Some(me));
    assert_eq!(find(&files, &mine, &[]).expect("readable"), None);
    let mut child = std::process::Command::new("sleep").arg("1000").stdin(theirs).spawn().expect("sleep");
    let holder = Process::find(child.id()).expect("readable");
    assert!(holder.is_some() && find(&files, &mine, &[]).expect("readable") == holder);
    child.kill().and_then(|()| child.wait()).expect("end it");
    assert_eq!(find(&files, &mine, &[]).expect("readable"), None);
}
