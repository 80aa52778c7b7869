//! Complaints: lines of the log about what users' processes do wrong.
//!
//! Before: a connection or a request is refused. After: there is a line about it, unless its user has had
//! [`MOST`] in this minute; how many were left out is told with a later one.
//! Threads: the keeper's one. Units: lines. Promise: what is refused to one user's processes neither fills the disk
//! with lines nor keeps the lines about another user's out.

use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Lines about one user in [`EVERY`].
const MOST: u32 = 20;
const EVERY: Duration = Duration::from_secs(60);
/// Users that are remembered; if there are more, all are forgotten.
const MOST_USERS: usize = 1024;

/// What was said of each user.
#[derive(Debug, Default)]
pub(crate) struct Complaints(HashMap<u32, Said>);

#[derive(Debug)]
struct Said {
    since: Instant,
    lines: u32,
    left_out: u64,
}

impl Complaints {
    /// Is there to be another line about this user? If so, returns how many were left out since the last.
    pub fn next(&mut self, uid: u32, now: Instant) -> Option<u64> {
        if self.0.len() >= MOST_USERS && !self.0.contains_key(&uid) {
            self.0.clear();
        }
        let said = self.0.entry(uid).or_insert(Said { since: now, lines: 0, left_out: 0 });
        if now.saturating_duration_since(said.since) >= EVERY {
            (said.since, said.lines) = (now, 0);
        }
        if said.lines >= MOST {
            said.left_out += 1;
            return None;
        }
        said.lines += 1;
        Some(std::mem::take(&mut said.left_out))
    }

    /// Logs this about a process of this user, if there is to be another line.
    pub fn log(&mut self, pid: u32, uid: u32, text: std::fmt::Arguments<'_>) {
        if let Some(left_out) = self.next(uid, Instant::now()) {
            tracing::warn!(pid, uid, "{text}{}", self::left_out(left_out));
        }
    }
}

/// What a line says of those that were left out before it.
pub(crate) fn left_out(lines: u64) -> String {
    if lines == 0 { String::new() } else { format!(" ({lines} such lines were left out)") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_has_some_lines_a_minute_the_rest_are_counted_and_others_have_theirs() {
        let (mut complaints, now) = (Complaints::default(), Instant::now());
        let lines = |complaints: &mut Complaints, uid, now| (0..1000).filter_map(|_| complaints.next(uid, now)).count();
        assert_eq!(lines(&mut complaints, 7, now), MOST as usize);
        assert_eq!(complaints.next(8, now), Some(0));
        assert_eq!(complaints.next(7, now + EVERY / 2), None);
        assert_eq!(complaints.next(7, now + EVERY), Some(1001 - u64::from(MOST)));
        assert_eq!(lines(&mut complaints, 7, now + EVERY), MOST as usize - 1);
        (1000..5000).for_each(|uid| assert_eq!(complaints.next(uid, now), Some(0)));
        assert!(complaints.0.len() <= MOST_USERS);
    }
}
