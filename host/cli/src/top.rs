//! `ballast top`: all VMs, updated, with their past; one VM with why it has its memory; a recording of that.
//!
//! `?` lists the keys. If the daemon stops responding, the last figures stay on the screen, under a line that says so.
//! `--json` prints a look a line: the recording that `--replay` shows.

mod draw;
mod look;
mod screen;
#[cfg(test)]
mod tests;

use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use ballast_api::Client;
use ratatui::crossterm::event::{self, Event, KeyEventKind};
use ratatui::crossterm::terminal;

use crate::args::TopArgs;
use crate::exit::{Coded, Exit};
use crate::show;
use look::{Look, More, Past, Tape};
use screen::{Asked, Pane, Screen};

/// The daemon takes samples of the past this far apart.
const SAMPLES_EVERY: Duration = Duration::from_secs(10);

/// Where looks come from.
enum Source {
    Daemon { client: Client, past_read: Option<Instant> },
    Tape(Tape),
}

/// Watch, or print one frame.
pub fn run(client: Client, args: &TopArgs, json: bool) -> Result<()> {
    if let Some(file) = &args.replay {
        if json {
            return usage("--json prints what --replay would read; use one of them");
        }
        return show_all(Source::Tape(Tape::open(file)?), args);
    }
    // The client would retry for 5 s while engines change, and the screen would stand still. So it does not retry: the
    // screen shows the error, and the next frame asks again.
    let client = if args.once { client } else { client.retry_for(Duration::ZERO) };
    match (json, args.once) {
        (true, true) => show::json(&Look::take(&client)?),
        (true, false) => {
            while show::print_as_it_is(&(serde_json::to_string(&Look::take(&client)?)? + "\n"))? {
                std::thread::sleep(args.interval_s);
            }
            Ok(())
        }
        (false, _) => show_all(Source::Daemon { client, past_read: None }, args),
    }
}

fn usage(message: &str) -> Result<()> {
    Err(Coded { exit: Exit::Usage, message: message.into() }.into())
}

fn show_all(mut source: Source, args: &TopArgs) -> Result<()> {
    let mut screen = Screen { sort: args.sort, ..Screen::default() };
    if args.once {
        // The last look of a recording.
        source.step(isize::MAX);
        source.fill(&mut screen)?;
        return Ok(show::print(&screen.plain(plain_width()))?);
    }
    if !io::stdout().is_terminal() {
        return usage("top needs a terminal; use --once for one plain frame, or --json");
    }
    screen.is_live = true;
    source.fill(&mut screen)?;
    let mut terminal = ratatui::try_init().context("Preparing the terminal")?;
    let ended = watch(&mut terminal, &mut source, &mut screen, args.interval_s);
    ratatui::restore();
    ended
}

fn plain_width() -> u16 {
    const WIDE: u16 = 140;
    if io::stdout().is_terminal() {
        terminal::size().map_or(WIDE, |(width, _)| if width > 0 { width } else { WIDE })
    } else {
        WIDE
    }
}

impl Source {
    /// Another look of a tape.
    fn step(&mut self, by: isize) {
        if let Self::Tape(tape) = self {
            tape.step(by);
        }
    }

    /// Time went by.
    fn tick(&mut self) {
        if let Self::Tape(tape) = self
            && tape.plays
        {
            tape.step(1);
        }
    }

    /// Gives the screen what there is now.
    fn fill(&mut self, screen: &mut Screen) -> Result<()> {
        match self {
            Self::Tape(tape) => {
                (screen.look, screen.past) = (tape.look().clone(), tape.past());
                let ((at, count), time) = (tape.position(), show::time(tape.look().at_unix_ms));
                let state = if tape.plays && at < count { "" } else { ", stopped" };
                screen.tape = Some(format!("recording: {at} of {count}, {time}{state}"));
            }
            Self::Daemon { client, past_read } => {
                screen.look = Look::take(client)?;
                if past_read.is_none_or(|at| at.elapsed() >= SAMPLES_EVERY) {
                    screen.past = Past::take(client)?;
                    *past_read = Some(Instant::now());
                }
            }
        }
        self.fill_more(screen)
    }

    /// Gives it more about the VM that is shown.
    fn fill_more(&self, screen: &mut Screen) -> Result<()> {
        let Some(name) = screen.vm().filter(|_| screen.pane == Pane::Vm).map(|vm| vm.name.clone()) else {
            screen.more = More::default();
            return Ok(());
        };
        screen.more = match self {
            Self::Tape(tape) => tape.more(&name),
            Self::Daemon { client, .. } => {
                More { history: client.vm_history(&name, 60)?, decisions: client.decisions(&name)? }
            }
        };
        Ok(())
    }
}

fn watch(
    terminal: &mut ratatui::DefaultTerminal,
    source: &mut Source,
    screen: &mut Screen,
    interval: Duration,
) -> Result<()> {
    loop {
        let next = Instant::now() + interval;
        loop {
            terminal.draw(|frame| frame.render_widget(&*screen, frame.area())).context("Drawing")?;
            let left = next.saturating_duration_since(Instant::now());
            if left.is_zero() || !event::poll(left).context("Waiting for a key")? {
                break;
            }
            let Event::Key(key) = event::read().context("Reading a key")? else { continue };
            if key.kind != KeyEventKind::Press {
                continue;
            }
            let filled = match screen.key(key) {
                Asked::Nothing => continue,
                Asked::End => return Ok(()),
                Asked::More => source.fill_more(screen),
                Asked::Pause => {
                    if let Source::Tape(tape) = source {
                        tape.plays = !tape.plays;
                    }
                    source.fill(screen)
                }
                Asked::Step(by) => {
                    source.step(by);
                    source.fill(screen)
                }
            };
            screen.error = filled.err().map(|error| crate::exit::chain(&error));
        }
        source.tick();
        screen.error = source.fill(screen).err().map(|error| crate::exit::chain(&error));
    }
}
