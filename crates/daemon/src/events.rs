//! The last things worth telling an operator, in memory; each is logged as well.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::time::{SystemTime, UNIX_EPOCH};

use ballast_api::Event;

/// Events remembered.
const MOST: usize = 1000;

/// A bounded list of events.
#[derive(Debug, Default)]
pub struct Events(Mutex<VecDeque<Event>>);

impl Events {
    /// Remember one.
    pub fn add(&self, vm: Option<String>, kind: &str, message: String) {
        let at_unix_ms = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64);
        let mut events = self.0.lock().expect("no panic while held");
        if events.len() == MOST {
            events.pop_front();
        }
        events.push_back(Event { at_unix_ms, vm, kind: kind.to_owned(), message });
    }

    /// All of them, oldest first.
    pub fn list(&self) -> Vec<Event> {
        self.0.lock().expect("no panic while held").iter().cloned().collect()
    }
}
