//! `ballast events`: recent events, and with `--follow` those to come.
//!
//! Before: the engine remembers the last 1,000. After: a table, or lines as events come. Promise: while it follows, the
//! replacement of an engine costs no event that the next engine has.

use std::io::Write;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Result;
use ballast_api::{Client, Event};

use crate::args::EventsArgs;
use crate::show;

/// Pause between two requests while it follows.
const PAUSE: Duration = Duration::from_millis(500);

pub fn run(client: &Client, args: &EventsArgs, json: bool) -> Result<()> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let since_us = args.since.map_or(0, |since| now.saturating_sub(since).as_micros() as u64);
    let ask = |after| if args.decisions { client.decisions_after(after) } else { client.events_after(after) };
    let mut events = ask(since_us)?;
    let mut last = events.last().map_or(since_us, |event| event.id);
    let is_wanted = |event: &Event| args.vm.is_none() || event.vm == args.vm;
    events.retain(is_wanted);
    if !args.follow {
        return show::answer(json, &events, |events| story(events));
    }
    let mut out = std::io::stdout().lock();
    loop {
        for event in events.iter().filter(|event| is_wanted(event)) {
            let vm = event.vm.as_deref().unwrap_or("-");
            let written = match json {
                true => writeln!(out, "{}", serde_json::to_string(event)?),
                false => writeln!(out, "{}  {vm}  {}  {}", show::time(event.at_unix_ms), event.kind, event.message),
            };
            // The reader of this output has ended.
            if written.and_then(|()| out.flush()).is_err() {
                return Ok(());
            }
        }
        std::thread::sleep(PAUSE);
        events = ask(last)?;
        last = events.last().map_or(last, |event| event.id);
    }
}

fn story(events: &[Event]) -> String {
    if events.is_empty() {
        return "No events.\n".into();
    }
    let mut table = show::table(&["TIME", "VM", "KIND", "MESSAGE"]);
    for event in events {
        let vm = event.vm.as_deref().unwrap_or("-");
        table.add_row([&show::time(event.at_unix_ms), vm, &event.kind, &event.message]);
    }
    show::lines(&table)
}
