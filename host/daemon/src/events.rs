//! The last events for operators, in memory; each is logged as well.
//!
//! Each event has a rising number, so that a reader can continue after the last one that it read. Threads: any.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Mutex;
use std::time::{SystemTime, UNIX_EPOCH};

use ballast_api::Event;
use ballast_base::text::shown;
use ballast_sys::lock::Lock;
use tokio::sync::watch;

const MOST: usize = 1000;
const DECISION: &str = "decision";
/// Events in one message to another engine: a message has at most 64 KiB, and the texts are short.
const IN_A_MESSAGE: usize = 50;

#[derive(Debug, Default)]
pub struct Events {
    list: Mutex<List>,
    last: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct List {
    events: VecDeque<Event>,
    /// Decisions of the policy, in a list of their own, because there are many.
    decisions: VecDeque<Event>,
    /// Events by kind, including those that were dropped.
    counts: BTreeMap<String, u64>,
}

impl List {
    fn next(&self, vm: Option<String>, kind: &str, message: &str) -> Event {
        let now_us = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_micros() as u64);
        let last = self.events.back().into_iter().chain(self.decisions.back()).map(|event| event.id).max();
        let id = last.map_or(now_us, |last| now_us.max(last + 1));
        let message = shown(message).into_owned();
        Event { id, at_unix_ms: now_us / 1000, vm, kind: kind.to_owned(), message }
    }
}

fn add_to(events: &mut VecDeque<Event>, event: Event) {
    if events.len() == MOST {
        events.pop_front();
    }
    events.push_back(event);
}

impl Events {
    pub fn add(&self, vm: Option<String>, kind: &str, message: String) {
        let mut list = self.list.locked();
        let event = list.next(vm, kind, &message);
        self.last.send_replace(event.id);
        add_to(&mut list.events, event);
        *list.counts.entry(kind.to_owned()).or_default() += 1;
    }

    /// Adds a decision of the policy about a VM, which differs from the decision before.
    pub fn decided(&self, vm: String, message: String) {
        let mut list = self.list.locked();
        let event = list.next(Some(vm), DECISION, &message);
        self.last.send_replace(event.id);
        add_to(&mut list.decisions, event);
    }

    pub fn watch(&self) -> watch::Receiver<u64> {
        self.last.subscribe()
    }

    /// Events by kind, including those that earlier engines handed over.
    pub fn counts(&self) -> BTreeMap<String, u64> {
        self.list.locked().counts.clone()
    }

    /// All events for another engine, in messages.
    pub fn for_successor(&self) -> Vec<Vec<u8>> {
        let pieces = self.list();
        pieces.chunks(IN_A_MESSAGE).map(|events| serde_json::to_vec(events).expect("events serialise")).collect()
    }

    pub fn add_past(&self, message: &[u8]) -> Result<(), serde_json::Error> {
        let past: Vec<Event> = serde_json::from_slice(message)?;
        let mut list = self.list.locked();
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

    /// Reads all events, oldest first, without a copy. No event is added during the call.
    pub fn read<T>(&self, by: impl FnOnce(&VecDeque<Event>) -> T) -> T {
        by(&self.list.locked().events)
    }

    pub fn list(&self) -> Vec<Event> {
        self.after(0, false)
    }

    /// Events with a higher number, oldest first; with the policy's decisions, if requested.
    pub fn after(&self, id: u64, decisions: bool) -> Vec<Event> {
        let list = self.list.locked();
        let later = |events: &VecDeque<Event>| -> Vec<Event> {
            events.range(events.partition_point(|event| event.id <= id)..).cloned().collect()
        };
        let mut all = later(&list.events);
        if decisions {
            all.extend(later(&list.decisions));
            all.sort_by_key(|event| event.id);
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_of_an_earlier_engine_come_before_those_of_its_successor() {
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
        assert_eq!(after.after(all[118].id, false), all[119..]);
        assert_eq!(after.counts().into_iter().collect::<Vec<_>>(), [("new".into(), 1), ("old".into(), 120)]);
        after.add_past(b"{").expect_err("no list");
        after.decided("web".into(), "gain: it may use 1 GiB".into());
        assert_eq!((after.list().len(), after.after(0, true).len()), (121, 122));
    }
}
