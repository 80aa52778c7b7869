//! Replace: the keeper becomes another program, in the same process: pid, children, sockets and lock stay.
//!
//! Before: the engine of an upgrade serves all VMs. After: this process runs the upgrade's program, with the same VMs,
//! clients and engine; or the keeper continues as before, and operators are told why.
//! Threads: the keeper's one. An exec ends all other threads, and waits for a thread that is in an uninterruptible
//! call; so it begins only when there are no others.
//! Promise: all pending state of this keeper is recorded. A message that a client or the engine has sent is in its
//! socket, complete, until the next program reads it.
//!
//! | Step | Goes on when | Otherwise |
//! |---|---|---|
//! | Waiting: engine, VMs, attaches come to rest; then clients are not read | nothing prevents the exec | stays |
//! | Exec: descriptors are kept open, the record is written | the program runs | the exec fails: stays |
//! | Following: the new program makes the keeper ([`Keeper::of`]) | it is made | becomes the last program again |
//! | Serving: it has duplicates, and closes the descriptors that it was handed | | |
//!
//! | Dies in | What follows |
//! |---|---|
//! | Waiting: the engine | its successor is started from the new program, as usual; the wait goes on |
//! | Exec, Following, Serving: this process | as for any keeper: the engine serves on, clients come to the next one |
//! | Following: the engine | the keeper that is made finds its pidfd readable |
//! | Following: a client | the keeper that is made finds the end of its connection |

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Context;
use ballast_handover::failure::Failure;
use ballast_handover::kept::{Kept, Number};
use ballast_sys::exec::{become_program, close_kept, duplicate, keep};

use crate::engine::{Engine, Who};
use crate::keeper::{Keeper, SOON};
use crate::program::Program;
use crate::replacing::Replacing;
use crate::stage::Deadline;

/// How long an obstacle may prevent the exec. An engine that leaves has 5 s, as has an attach that waits for its file
/// store. Shorter than a client's time to attach, because clients may not be read during this wait.
const WAIT_WITHIN: Duration = Duration::from_secs(8);

/// Arguments of a program that becomes the keeper: the record, and the program to become if it cannot be the keeper; or
/// why it is the keeper again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Follow {
    /// Descriptor of the file that [`Kept`] wrote.
    pub kept: Number,
    /// The program before this one, to become if this one fails.
    pub back: Option<PathBuf>,
    /// Why the other program failed, if this one is the keeper again.
    pub because: Option<String>,
}

impl Keeper {
    /// The engine of this program serves: the keeper will become the program as well.
    pub(crate) fn begin_replacing(&mut self, program: Program) {
        if self.kept().is_none() {
            return self.stays("the engine ended");
        }
        self.replacing = Some(Replacing { program, deadline: Deadline::new(Instant::now()) });
        self.try_lost_now();
    }

    /// Continues the replacement. Returns how soon to check again.
    pub(crate) fn tend_replacing(&mut self) -> Option<Duration> {
        self.replacing.as_ref()?;
        let in_the_way = self.in_the_way();
        let Replacing { program, deadline } = self.replacing.as_mut()?;
        match in_the_way {
            Some(why) if deadline.is_over(Instant::now(), WAIT_WITHIN) => self.stays(&why),
            Some(_) => {}
            None => {
                let program = program.clone();
                let error = self.become_keeper(&program);
                self.stays(&format!("{error:#}"));
            }
        }
        self.replacing.as_ref().map(|_| SOON)
    }

    /// Whether clients are not read, because their requests would prevent the exec.
    pub(crate) fn is_hushed(&self) -> bool {
        self.replacing.is_some() && self.engine_in_the_way().is_none()
    }

    /// An obstacle that does not come from clients.
    fn engine_in_the_way(&self) -> Option<String> {
        let unrest = self.vms.all().find(|vm| !vm.place.is_at_rest());
        if !self.engines.serves() {
            Some("no engine serves".into())
        } else if self.upgrades.stage().is_some() {
            Some("VMs move".into())
        } else if !self.engines.have_left() {
            Some("the engine that was followed does not end".into())
        } else {
            unrest.map(|vm| {
                format!(
                    "VM {} waits for the end of an engine, for a process of it, or for what the engine lacks",
                    vm.name()
                )
            })
        }
    }

    fn in_the_way(&self) -> Option<String> {
        if let Some(why) = self.engine_in_the_way() {
            return Some(why);
        }
        if !self.making.is_empty() {
            return Some("a VM that attaches waits for its file store".into());
        }
        if self.engines.get(Who::Engine).is_some_and(Engine::has_orders) {
            return Some("the engine does not take its orders".into());
        }
        // The exec would wait for these threads, and no keeper would run while it waits.
        let threads = std::fs::read_dir("/proc/self/task").map_or(usize::MAX, Iterator::count);
        if threads > 1 {
            return Some("a descriptor that a client sent is being closed, or processes are being looked at".into());
        }
        None
    }

    /// Executes the program. Returns why that failed.
    fn become_keeper(&mut self, program: &Program) -> anyhow::Error {
        let exec = || -> anyhow::Result<()> {
            let kept = self.kept().context("There is no engine")?;
            let file = kept.write().context("Writing down what the keeper holds")?;
            // Other files may have the names of both by now. The new program gets the name by which it was opened.
            let own = File::open("/proc/self/exe").context("Opening this program's own file")?;
            let numbers = [kept.numbers(), vec![file.as_raw_fd(), own.as_raw_fd(), program.number()]].concat();
            let keep_all = |stays| numbers.iter().try_for_each(|number| keep(*number, stays));
            let error = keep_all(true).err().unwrap_or_else(|| {
                tracing::info!(program = %program.path().display(), "the keeper becomes another program");
                let [new, back] = [program.number(), own.as_raw_fd()].map(|number| format!("/proc/self/fd/{number}"));
                let follow = Follow { kept: file.as_raw_fd(), back: Some(back.into()), because: None };
                become_follower(new.as_ref(), program.path().as_os_str(), &follow)
            });
            keep_all(false).context("Closing descriptors at the next exec")?;
            Err(error).with_context(|| format!("Becoming {}", program.path().display()))
        };
        exec().err().unwrap_or_else(|| anyhow::anyhow!("the exec has returned"))
    }

    /// Abandons the exec: the keeper stays what it is.
    pub(crate) fn stays(&mut self, why: &str) {
        self.replacing = None;
        self.replaced(Err(why.into()));
    }

    pub(crate) fn replaced(&mut self, result: Result<(), Failure>) {
        let program = &self.upgrades.last().program;
        let message = match &result {
            Ok(()) => format!("the keeper is {program} from now on"),
            Err(why) => format!("the keeper is not {program}, and stays what it was: {why}"),
        };
        tracing::info!("{message}");
        let kind = if result.is_ok() { "keeper-upgraded" } else { "keeper-stays" };
        self.upgrades.finish(result);
        // Before the upgrade is shown as done, so that an observer who sees that finds the event.
        self.host_note(kind, message);
        self.show_upgrade();
    }
}

/// Executes this file as a keeper, under this name. Returns why that failed.
fn become_follower(file: &OsStr, name: &OsStr, Follow { kept, back, because }: &Follow) -> std::io::Error {
    let mut args: Vec<OsString> = vec!["keeper".into(), kept.to_string().into()];
    for (name, value) in
        [("--back", back.as_ref().map(|path| path.as_os_str())), ("--because", because.as_ref().map(OsStr::new))]
    {
        args.extend(value.into_iter().flat_map(|value| [name.into(), value.to_owned()]));
    }
    become_program(file, name, &args.iter().map(OsString::as_os_str).collect::<Vec<_>>())
}

/// Makes, in this program, the keeper that the previous program was. If that fails, becomes the previous program again.
pub(crate) fn follow(follow: &Follow) -> anyhow::Result<Keeper> {
    // A program that was executed from a descriptor has the descriptor's number as its name.
    let _ = rustix::thread::set_name(c"ballastd");
    let made = duplicate(follow.kept).context("Taking over what the keeper held").and_then(|file| {
        let kept = Kept::read(&file).context("Reading what the keeper held")?;
        // It was executed from its open file, so the record has its name. The engine is of the same program, unless
        // that program could not be the keeper.
        let own = if follow.because.is_some() { &kept.own_program } else { &kept.program };
        let own = Program::own(OsString::from_vec(own.clone()).into()).context("Opening this program's own file")?;
        Ok((Keeper::of(&kept, own, follow.because.is_some())?, kept))
    });
    let (mut keeper, kept) = match made {
        Ok(made) => made,
        Err(error) => return Err(go_back(follow, error)),
    };
    // Not earlier: the previous program would need the record's descriptors. The lock's is never closed: the lock would
    // go with it.
    keep(kept.lock, false).context("Taking over the lock")?;
    close_kept().context("Closing what is not needed twice")?;
    keeper.replaced(follow.because.as_deref().map_or(Ok(()), |why| Err(why.into())));
    Ok(keeper)
}

/// Becomes the previous program. Returns why that failed.
fn go_back(Follow { kept, back, .. }: &Follow, error: anyhow::Error) -> anyhow::Error {
    let Some(back) = back else { return error };
    tracing::error!("this program cannot be the keeper: {error:#}; going back to the last one");
    let again = Follow { kept: *kept, back: None, because: Some(format!("{error:#}")) };
    let failed = become_follower(back.as_os_str(), back.as_os_str(), &again);
    error.context(format!("Becoming the last keeper again: {failed}"))
}
