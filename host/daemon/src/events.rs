//! The last events for operators, in memory; each is logged as well.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::time::{SystemTime, UNIX_EPOCH};

use ballast_api::Event;
use ballast_base::text::shown;

/// Events remembered.
const MOST: usize = 1000;
/// Events in one message to another engine: their text is short, a message holds 64 KiB.
const IN_A_MESSAGE: usize = 50;

/// A bounded list of events.
#[derive(Debug, Default)]
pub struct Events(Mutex<VecDeque<Event>>);

impl Events {
    /// Remember one.
    pub fn add(&self, vm: Option<String>, kind: &str, message: String) {
        let message = shown(&message).into_owned();
        let at_unix_ms = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64);
        let mut events = self.0.lock().expect("no panic while held");
        if events.len() == MOST {
            events.pop_front();
        }
        events.push_back(Event { at_unix_ms, vm, kind: kind.to_owned(), message });
    }

    /// All of them for another engine, in messages.
    pub fn for_successor(&self) -> Vec<Vec<u8>> {
        let pieces = self.list();
        // Serialising plain data cannot fail.
        pieces.chunks(IN_A_MESSAGE).map(|events| serde_json::to_vec(events).expect("events serialise")).collect()
    }

    /// Add the events of an engine before this one, from such a message. They go before this engine's.
    pub fn add_past(&self, message: &[u8]) -> Result<(), serde_json::Error> {
        let past: Vec<Event> = serde_json::from_slice(message)?;
        let mut events = self.0.lock().expect("no panic while held");
        let later = events.iter().position(|event| past.last().is_some_and(|last| last.at_unix_ms < event.at_unix_ms));
        let at = later.unwrap_or(events.len());
        let rest = events.split_off(at);
        events.extend(past);
        events.extend(rest);
        let over = events.len().saturating_sub(MOST);
        events.drain(..over);
        Ok(())
    }

    /// All of them, oldest first.
    pub fn list(&self) -> Vec<Event> {
        self.0.lock().expect("no panic while held").iter().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_engine_remembered_comes_before_what_its_successor_saw() {
        let (before, after) = (Events::default(), Events::default());
        (0..120).for_each(|number| before.add(None, "old", number.to_string()));
        std::thread::sleep(std::time::Duration::from_millis(2));
        after.add(None, "new", "first".into());
        for message in before.for_successor() {
            after.add_past(&message).expect("understood");
        }
        let said: Vec<String> = after.list().into_iter().map(|event| event.message).collect();
        let expected: Vec<String> = (0..120).map(|number| number.to_string()).chain(["first".into()]).collect();
        assert_eq!(said, expected);
        after.add_past(b"{").expect_err("no list");
    }
}
