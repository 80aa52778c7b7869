//! The agent in a real guest: Debian's 6.12 kernel under unmodified QEMU and `ballast run --agent`.
//!
//! Needs QEMU and the image of `scripts/agent-image.sh`. Under TCG a boot takes ten seconds or more, so one boot
//! carries all claims. What the guest does is in `scripts/guest/agent-test`.

mod common;

use std::path::PathBuf;
use std::time::Duration;

use ballast_api::{AgentStat, AgentState};
use ballast_base::{Bytes, MIB};
use ballast_testvm::qemu::{Image, QemuGuest, qemu_missing};
use common::{Daemon, missing, until};

const TIMEOUT: Duration = Duration::from_secs(240);
/// Kernel and initrd with the agent.
fn image() -> Result<Image, String> {
    let whole = Image::find().map_err(|error| error.to_string())?;
    let folder = whole.kernel.with_file_name("agent");
    let image = Image { kernel: folder.join("vmlinuz"), initrd: folder.join("initrd.img") };
    match image.kernel.is_file() && image.initrd.is_file() {
        true => Ok(image),
        false => Err("no guest with an agent in target/guest/agent; run scripts/agent-image.sh".into()),
    }
}

#[test]
fn a_debian_guest_tells_what_is_cold_and_that_goes_and_the_agent_may_die_and_come_again() {
    if missing("qemu", qemu_missing()) || missing("agent-image", image().err()) {
        return;
    }
    let daemon = Daemon::start("quarantine_ms = 500\n[heat]\ntrack = \"auto\"\n");
    let ballast = PathBuf::from(env!("CARGO_BIN_EXE_ballastd")).with_file_name("ballast");
    let attach = daemon.attach_socket().to_string_lossy().into_owned();
    let words = ["run", "--agent", "--name", "guest", "--attach-socket", &attach, "--"].map(str::to_owned);
    let mut guest = QemuGuest::builder()
        .name("guest")
        .image(image().expect("looked at above"))
        .memory(Bytes(256 * MIB))
        .run("agent-test")
        .prefix([ballast.to_string_lossy().into_owned()].into_iter().chain(words))
        .spawn()
        .expect("QEMU starts");
    guest.wait_ready(TIMEOUT).expect("the guest boots");
    let agent = || daemon.vm("guest").agent.unwrap_or_default();
    let until_reporting = |what: &str, is: &dyn Fn(&AgentStat) -> bool| {
        until(what, || {
            let agent = agent();
            agent.state == AgentState::Reporting && is(&agent)
        });
    };
    until_reporting("most of what is cold is told", &|agent| agent.cold_bytes - agent.free_bytes > 64 * MIB);
    let first = agent();
    assert!(first.kernel.starts_with("6.") && first.pieces_proved > 0, "{first:?}");
    assert_eq!((first.rejected_messages, first.garbage_bytes, first.times_ignored), (0, 0, 0), "{first:?}");

    let before = daemon.vm("guest");
    let limit = before.resident_bytes - 64 * MIB;
    daemon.api.set_limit("guest", Some(limit)).expect("limit");
    until("it is within its limit", || daemon.vm("guest").resident_bytes <= limit);
    let heat = daemon.api.heat("guest", 1).expect("heat");
    assert!(heat.source.is_none() || agent().state != AgentState::Reporting, "{heat:?}");

    guest.tell("kill the agent").expect("its console");
    let reports = agent().reports;
    until_reporting("it reports again", &|agent| agent.reports > reports + 1);
    let after = daemon.vm("guest");
    assert!(after.far_bytes > 32 * MIB && after.poisoned_bytes == 0, "{after:?}");
    guest.tell("compare").expect("its console");
    assert_eq!(guest.wait_run(TIMEOUT).expect("it ends"), 0, "{}", guest.serial_log());
}
