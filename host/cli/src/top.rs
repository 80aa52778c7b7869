//! `ballast top`: all VMs with their past, updated; or one VM and why it has its memory.
//!
//! `?` lists the keys. If the daemon stops responding, the last figures stay on the screen, under a line that says so.
//! `--json` prints one line for each look.

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
use look::{Look, More, Past};
use screen::{Asked, Pane, Screen};

const SAMPLES_EVERY: Duration = Duration::from_secs(10);

/// Shows frames until a key ends it, or prints one frame.
pub fn run(client: Client, args: &TopArgs, json: bool) -> Result<()> {
    // The client would retry for 5 s while engines change, and the screen would stand still. So it does not retry: the
    // screen shows the error, and the next frame makes a new request.
    let client = if args.once { client } else { client.retry_for(Duration::ZERO) };
    match (json, args.once) {
        (true, true) => show::json(&Look::take(&client)?),
        (true, false) => {
            while show::print_as_it_is(&(serde_json::to_string(&Look::take(&client)?)? + "\n"))? {
                std::thread::sleep(args.interval_s);
            }
            Ok(())
        }
        (false, _) => show_all(Source { client, past_read: None }, args),
    }
}

fn show_all(mut source: Source, args: &TopArgs) -> Result<()> {
    let mut screen = Screen { sort: args.sort, ..Screen::default() };
    if args.once {
        source.fill(&mut screen)?;
        return Ok(show::print(&screen.plain(plain_width()))?);
    }
    if !io::stdout().is_terminal() {
        let message = "top needs a terminal; use --once for one plain frame, or --json";
        return Err(Coded { exit: Exit::Usage, message: message.into() }.into());
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

struct Source {
    client: Client,
    past_read: Option<Instant>,
}

impl Source {
    fn fill(&mut self, screen: &mut Screen) -> Result<()> {
        screen.look = Look::take(&self.client)?;
        if self.past_read.is_none_or(|at| at.elapsed() >= SAMPLES_EVERY) {
            screen.past = Past::take(&self.client)?;
            self.past_read = Some(Instant::now());
        }
        self.fill_more(screen)
    }

    /// Gives the screen the history and the decisions of the VM that is shown.
    fn fill_more(&self, screen: &mut Screen) -> Result<()> {
        screen.more = match screen.vm().filter(|_| screen.pane == Pane::Vm).map(|vm| &vm.name) {
            Some(name) => More { history: self.client.vm_history(name, 60)?, decisions: self.client.decisions(name)? },
            None => More::default(),
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
            match screen.key(key) {
                Asked::Nothing => {}
                Asked::End => return Ok(()),
                Asked::More => screen.error = said(source.fill_more(screen)),
            }
        }
        screen.error = said(source.fill(screen));
    }
}

fn said(filled: Result<()>) -> Option<String> {
    filled.err().map(|error| crate::exit::chain(&error))
}
