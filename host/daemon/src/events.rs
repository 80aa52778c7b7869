//! The last events for operators, in memory; each is logged as well.
//!
//! Each event has a number that rises, so that a reader can go on where it was. Threads: any.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, MutexGuard};
use std::time::{SystemTime, UNIX_EPOCH};

use ballast_api::Event;
use ballast_base::text::shown;
use tokio::sync::watch;

/// Events remembered.
const MOST: usize = 1000;
/// Events in one message to another engine: their text is short, a message holds 64 KiB.
const IN_A_MESSAGE: usize = 50;

/// A bounded list of events.
#[derive(Debug, Default)]
pub struct Events {
    list: Mutex<List>,
    /// The number of the last event.
    last: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct List {
    events: VecDeque<Event>,
    /// Events by kind, also those that are forgotten.
    counts: BTreeMap<String, u64>,
}

impl Events {
    /// Remember one.
    pub fn add(&self, vm: Option<String>, kind: &str, message: String) {
        let message = shown(&message).into_owned();
        let now_us = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_micros() as u64);
        let mut list = self.lock();
        if list.events.len() == MOST {
            list.events.pop_front();
        }
        let id = list.events.back().map_or(now_us, |last| now_us.max(last.id + 1));
        list.events.push_back(Event { id, at_unix_ms: now_us / 1000, vm, kind: kind.to_owned(), message });
        *list.counts.entry(kind.to_owned()).or_default() += 1;
        self.last.send_replace(id);
    }

    fn lock(&self) -> MutexGuard<'_, List> {
        self.list.lock().expect("no panic while held")
    }

    /// Changes with each event.
    pub fn watch(&self) -> watch::Receiver<u64> {
        self.last.subscribe()
    }

    /// How many events of each kind there were, with those of engines before this one that handed them over.
    pub fn counts(&self) -> BTreeMap<String, u64> {
        self.lock().counts.clone()
    }

    /// All of them for another engine, in messages.
    pub fn for_successor(&self) -> Vec<Vec<u8>> {
        let pieces = self.list();
        // Serialising plain data cannot fail.
        pieces.chunks(IN_A_MESSAGE).map(|events| serde_json::to_vec(events).expect("events serialise")).collect()
    }

    /// Add the events of an engine before this one, from such a message. They are sorted among this engine's.
    pub fn add_past(&self, message: &[u8]) -> Result<(), serde_json::Error> {
        let past: Vec<Event> = serde_json::from_slice(message)?;
        let mut list = self.lock();
        past.iter().for_each(|event| *list.counts.entry(event.kind.clone()).or_default() += 1);
        list.events.extend(past);
        list.events.make_contiguous().sort_by_key(|event| event.id);
        let over = list.events.len().saturating_sub(MOST);
        list.events.drain(..over);
        if let Some(last) = list.events.back() {
            self.last.send_replace(last.id);
        }
        Ok(())
    }

    /// All of them, oldest first.
    pub fn list(&self) -> Vec<Event> {
        self.after(0)
    }

    /// Those with a higher number, oldest first.
    pub fn after(&self, id: u64) -> Vec<Event> {
        let list = self.lock();
        let from = list.events.partition_point(|event| event.id <= id);
        list.events.range(from..).cloned().collect()
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
        let all = after.list();
        assert!(all.is_sorted_by(|a, b| a.id < b.id), "numbers rise");
        assert_eq!(after.after(all[118].id), all[119..]);
        assert_eq!(after.counts().into_iter().collect::<Vec<_>>(), [("new".into(), 1), ("old".into(), 120)]);
        after.add_past(b"{").expect_err("no list");
    }
}
