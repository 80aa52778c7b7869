//! Upgrades, from the engine's side: receives the request, passes it to the keeper, and shows the state.
//!
//! Before: an operator asks the API. After: the keeper has replied whether it begins, and tells each engine the state:
//! a client that asks the successor learns the result. Threads: any; the one that takes orders brings the keeper's
//! messages.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::Mutex;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::time::Duration;

use anyhow::{Context, bail};
use ballast_api::{UpgradeStage, UpgradeStat};
use ballast_handover::failure::Failure;
use ballast_handover::orders::Report;
use ballast_handover::upgrading::{Stage, Upgrading};
use ballast_sys::lock::Lock;
use rustix::fs::OFlags;

/// How long the keeper may take to reply. It waits for no other process.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);

#[derive(Debug, Default)]
pub struct Upgrades(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    now: Upgrading,
    asked: HashMap<u64, Sender<Result<(), Failure>>>,
    last_ask: u64,
}

impl Upgrades {
    pub fn set(&self, now: Upgrading) {
        self.0.locked().now = now;
    }

    /// The keeper replies to request `ask` whether it begins an upgrade.
    pub fn answered(&self, ask: u64, result: Result<(), Failure>) {
        if let Some(waiting) = self.0.locked().asked.remove(&ask) {
            let _ = waiting.send(result);
        }
    }

    pub fn stat(&self) -> UpgradeStat {
        let now = self.0.locked().now.clone();
        UpgradeStat {
            number: now.number,
            program: now.program,
            stage: match now.stage {
                Stage::None => UpgradeStage::None,
                Stage::Checking => UpgradeStage::Checking,
                Stage::Switching => UpgradeStage::Switching,
                Stage::Returning => UpgradeStage::Returning,
                Stage::Done => UpgradeStage::Done,
                Stage::Failed => UpgradeStage::Failed,
            },
            vms: now.vms,
            checked: now.checked,
            moved: now.moved,
            took_us: now.took_us,
            longest_gap_us: now.longest_gap_us,
            longest_switch_us: now.longest_switch_us,
            message: now.message,
            keeper_replaced: now.keeper.as_ref().map(Result::is_ok),
            keeper_message: now.keeper.and_then(Result::err).map_or_else(String::new, |why| why.to_string()),
        }
    }

    /// Has the keeper begin an upgrade. `report` sends the request. The error says why the keeper does not begin.
    pub fn begin(
        &self,
        program: Option<String>,
        report: impl FnOnce(&Report) -> anyhow::Result<()>,
    ) -> anyhow::Result<UpgradeStat> {
        let program = program.unwrap_or_default();
        if !program.is_empty() {
            read_beginning(&program).with_context(|| format!("reading {program}"))?;
        }
        let (sender, answer) = mpsc::channel();
        let ask = {
            let mut state = self.0.locked();
            state.last_ask += 1;
            let ask = state.last_ask;
            state.asked.insert(ask, sender);
            ask
        };
        let sent = report(&Report::Upgrade { ask, program });
        let answer = sent.map(|()| answer.recv_timeout(ANSWER_WITHIN));
        self.0.locked().asked.remove(&ask);
        match answer? {
            Ok(begins) => begins?,
            Err(RecvTimeoutError::Timeout) => bail!("the keeper does not answer"),
            Err(RecvTimeoutError::Disconnected) => bail!("the keeper is not listened to any more"),
        }
        Ok(self.stat())
    }
}

/// Reads the beginning of a program's file, because the keeper opens the file without a time limit: a file server that
/// hangs delays this request instead.
fn read_beginning(program: &str) -> io::Result<()> {
    // Nonblocking, so as not to wait for a writer of a FIFO.
    let opened = File::options().read(true).custom_flags(OFlags::NONBLOCK.bits().cast_signed()).open(program);
    opened?.read(&mut [0; ballast_base::PAGE_SIZE]).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_keepers_reply_goes_to_the_caller() {
        let upgrades = Upgrades::default();
        let says = |result: Result<(), Failure>| {
            upgrades.begin(Some("/bin/true".into()), |report| {
                let Report::Upgrade { ask, program } = report else { panic!("{report:?}") };
                assert_eq!(program, "/bin/true");
                upgrades.set(Upgrading { number: 7, stage: Stage::Checking, ..Upgrading::default() });
                upgrades.answered(ask + 1, Err("another one's".into()));
                upgrades.answered(*ask, result);
                Ok(())
            })
        };
        let stat = says(Ok(())).expect("it begins");
        assert_eq!((stat.number, stat.stage), (7, UpgradeStage::Checking));
        assert_eq!(says(Err("no".into())).expect_err("it does not").to_string(), "no");
        upgrades.begin(None, |_| anyhow::bail!("gone")).expect_err("no keeper");
    }
}
