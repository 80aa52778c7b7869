//! Upgrades, from the engine's side: it is asked for one, passes that on to the keeper, and shows the state.
//!
//! Before: an operator asks the API. After: the keeper has said whether it begins, and tells each engine the state, so
//! that a client that asks the successor learns the result.
//! Threads: any; the one that takes orders brings the keeper's messages.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ballast_api::{UpgradeStage, UpgradeStat};
use ballast_handover::orders::Report;
use ballast_handover::upgrading::{Stage, Upgrading};
use rustix::fs::OFlags;

/// How long the keeper may take to reply whether it begins. It waits for no other process.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);

/// How long the beginning of a program's file may take to come. Starting a program stops the keeper until its file was
/// opened, so a file server that does not answer must not be met there.
const READ_WITHIN: Duration = Duration::from_secs(3);
/// Threads that may wait for such file servers, permanently.
const MOST_READS: u32 = 4;

/// The state of the last upgrade, and open requests.
#[derive(Debug, Default)]
pub struct Upgrades(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    now: Upgrading,
    asked: HashMap<u64, Sender<Result<(), String>>>,
    last_ask: u64,
}

impl Upgrades {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The keeper reports the state.
    pub fn set(&self, now: Upgrading) {
        self.lock().now = now;
    }

    /// The keeper says whether it begins one.
    pub fn answered(&self, ask: u64, result: Result<(), String>) {
        if let Some(waiting) = self.lock().asked.remove(&ask) {
            // The caller may have given up.
            let _ = waiting.send(result);
        }
    }

    /// The state of the last one.
    pub fn stat(&self) -> UpgradeStat {
        let now = self.lock().now.clone();
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
            keeper_message: now.keeper.and_then(Result::err).unwrap_or_default(),
        }
    }

    /// Have the keeper begin one. `report` brings it the request.
    ///
    /// # Errors
    /// Why it does not begin.
    pub fn begin(
        &self,
        program: Option<String>,
        report: impl FnOnce(&Report) -> anyhow::Result<()>,
    ) -> Result<UpgradeStat, String> {
        let program = program.unwrap_or_default();
        if !program.is_empty() {
            read_beginning(&program)?;
        }
        let (sender, answer) = mpsc::channel();
        let ask = {
            let mut state = self.lock();
            state.last_ask += 1;
            let ask = state.last_ask;
            state.asked.insert(ask, sender);
            ask
        };
        let sent = report(&Report::Upgrade { ask, program });
        let answer = match sent {
            Ok(()) => answer.recv_timeout(ANSWER_WITHIN).unwrap_or_else(|error| match error {
                RecvTimeoutError::Timeout => Err("the keeper does not answer".into()),
                RecvTimeoutError::Disconnected => Err("the keeper is not listened to any more".into()),
            }),
            Err(error) => Err(format!("{error:#}")),
        };
        self.lock().asked.remove(&ask);
        answer.map(|()| self.stat())
    }
}

/// Threads that read the beginning of a program's file now.
static READS: AtomicU32 = AtomicU32::new(0);

/// Counts such a thread until it is dropped.
struct Reading;

impl Drop for Reading {
    fn drop(&mut self) {
        READS.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Reads the beginning of a program's file, on a thread that may wait for ever.
///
/// # Errors
/// It cannot be read, or its file server does not answer.
fn read_beginning(program: &str) -> Result<(), String> {
    let (earlier, reading) = (READS.fetch_add(1, Ordering::Relaxed), Reading);
    if earlier >= MOST_READS {
        return Err(format!("the files of {MOST_READS} earlier programs still do not come"));
    }
    let (sender, result) = mpsc::channel();
    let path = program.to_owned();
    let read = move || {
        let _reading = reading;
        // Not to wait for a writer, if it is a FIFO.
        let opened = File::options().read(true).custom_flags(OFlags::NONBLOCK.bits().cast_signed()).open(path);
        // The caller may have given up.
        let _ = sender.send(opened.and_then(|mut file| file.read(&mut [0; ballast_base::PAGE_SIZE])));
    };
    let begun = std::thread::Builder::new().name("program".into()).spawn(read);
    let read = begun.and_then(|_| {
        let late = |_| io::Error::new(io::ErrorKind::TimedOut, format!("nothing came within {READ_WITHIN:?}"));
        result.recv_timeout(READ_WITHIN).map_err(late)?
    });
    read.map(drop).map_err(|error| format!("reading {program}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_keepers_reply_goes_to_the_caller() {
        let upgrades = Upgrades::default();
        let says = |result: Result<(), String>| {
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
        assert_eq!(says(Err("no".into())), Err("no".into()));
        upgrades.begin(None, |_| anyhow::bail!("gone")).expect_err("no keeper");
    }
}
