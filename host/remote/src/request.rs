//! A request for pages of one chunk, and so of one slot. It goes to the slot's owner, and follows the slot if it moves.
//!
//! Before: the store has keys, and values to write. After: the outcome of each key, or the reason of the failure.
//! Threads: any; the caller waits until a deadline. Units: keys of one slot.
//! Promise: a write counts only if each key got an `OK` and a `WAIT` that followed on the same connection reported all
//! replicas that may be elected, and the required number. Otherwise each key may or may not have been written.
//!
//! The first attempt is one command for all keys (`MGET`, `MSET`, `UNLINK`). Values that are still being produced are
//! sent as they become ready, in several `MSET`, with one `WAIT` after the last ([`send_as_made`]). While a slot moves
//! to another node, each node has some of the keys. Then each key gets its own command, and a second round after
//! `ASKING` requests the keys at the other node.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ballast_store::IoContext;

use crate::cluster::Cluster;
use crate::link::Link;
use crate::nodes::{Kind, Node, TooFew, is_late, is_too_few};
use crate::refusal::{Addr, Refusal};
use crate::resp::{Commands, Replies, Said};
use crate::slot::slot_of;
use crate::stream::left;

#[derive(Clone, Debug, Default)]
pub struct Values {
    bytes: Vec<u8>,
    ends: Vec<usize>,
}

impl Values {
    /// Adds the value that `append` appends.
    pub fn add(&mut self, append: impl FnOnce(&mut Vec<u8>)) {
        append(&mut self.bytes);
        self.ends.push(self.bytes.len());
    }

    pub fn len(&self) -> usize {
        self.ends.len()
    }

    pub fn bytes(&self) -> usize {
        self.bytes.len()
    }

    fn get(&self, at: usize) -> &[u8] {
        &self.bytes[at.checked_sub(1).map_or(0, |before| self.ends[before])..self.ends[at]]
    }
}

#[derive(Clone, Copy, Debug)]
pub enum Verb<'a> {
    Get,
    /// Store these values on the primary and its replicas.
    Set(&'a Values),
    Unlink,
}

impl Verb<'_> {
    fn kind(self, keys: usize) -> Kind {
        match self {
            Self::Get if keys > 1 => Kind::Run,
            Self::Get => Kind::Read,
            Self::Set(_) => Kind::Write,
            Self::Unlink => Kind::Unlink,
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub enum Found<'a> {
    Value(&'a [u8]),
    /// The slot's owner has no value.
    Nothing,
    /// This node has no value, but the slot is moving to another node.
    Elsewhere,
    /// The operation is done, for this many of the keys that this outcome stands for.
    Done(u64),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failed {
    /// The cluster is out of memory; otherwise it cannot serve the request now.
    pub full: bool,
    pub why: String,
    /// The request may have been executed, completely or in part.
    pub unknown: bool,
}

/// Time to read replies that have come already.
const READ: Duration = Duration::from_millis(50);
const HOPS: u32 = 6;

/// One round: these keys, at this node.
struct Round {
    at: Addr,
    keys: Vec<usize>,
    one_by_one: bool,
    asking: bool,
    replicas: u32,
}

/// Requests all of `keys`, which are of one slot. `each` gets the index of a key and its outcome. For an `UNLINK` of
/// all keys in one command, it is called once, with the first key.
pub fn run(
    cluster: &Cluster,
    verb: Verb<'_>,
    keys: &[Vec<u8>],
    each: &mut dyn FnMut(usize, Found<'_>),
    context: IoContext<'_>,
) -> Result<(), Failed> {
    let Some(first) = keys.first() else { return Ok(()) };
    let failed = |why: String, unknown| Failed { full: false, why, unknown };
    let at = cluster.owner(slot_of(first), context).map_err(|error| failed(error.to_string(), false))?;
    let kind = verb.kind(keys.len());
    let deadline = kind.deadline(Instant::now(), cluster.node(&at).timeout(kind), context);
    let mut unknown = false;
    let (one_by_one, all) = (keys.len() == 1, (0..keys.len()).collect());
    let mut rounds = vec![Round { at, keys: all, one_by_one, asking: false, replicas: 0 }];
    for _ in 0..HOPS {
        let Some(mut round) = rounds.pop() else { return Ok(()) };
        if matches!(verb, Verb::Set(_)) {
            cluster.refresh_if_old();
            round.replicas = cluster.replicas_of(&round.at).map_err(|why| failed(why.to_string(), unknown))?;
        }
        let wait = left(deadline.context).unwrap_or_default() / 2;
        let commands = commands(verb, keys, &round, wait);
        let mut may_be_done = false;
        let read = cluster.with_as(kind, &round.at, deadline.context, |link| {
            may_be_done = matches!(verb, Verb::Set(_));
            let replies = link.ask(&commands, deadline)?;
            may_be_done &= !is_refused(&round, &replies);
            in_time(if round.one_by_one {
                read_each(verb, &round, &replies, each)
            } else {
                read_all(verb, &round, &replies, each)
            })
        });
        unknown |= may_be_done;
        let refused = match read {
            Ok(Ok(more)) => {
                if more.iter().any(|round| !round.asking) {
                    cluster.refresh(context);
                }
                rounds.extend(more);
                continue;
            }
            Ok(Err(refusal)) => refusal,
            Err(error) => {
                // Other nodes may know a new owner.
                cluster.refresh(context);
                return Err(failed(broken(&round.at, &error), unknown));
            }
        };
        match refused {
            Refusal::Moved(to) => {
                cluster.refresh(context);
                rounds.push(Round { at: to, asking: false, ..round });
            }
            Refusal::Ask(to) => rounds.push(Round { at: to, asking: true, one_by_one: true, ..round }),
            Refusal::OneByOne if !round.one_by_one => rounds.push(Round { one_by_one: true, ..round }),
            Refusal::OneByOne => return Err(failed(format!("{} moves the slot", round.at), unknown)),
            Refusal::Full(why) => return Err(Failed { full: true, why, unknown }),
            Refusal::Busy(why) | Refusal::Late(why) => {
                cluster.refresh(context);
                return Err(failed(why, unknown));
            }
        }
    }
    if rounds.is_empty() { Ok(()) } else { Err(failed("the nodes send us from one to the other".into(), unknown)) }
}

/// A write that was sent, with its `WAIT`; the replies are still to be read.
#[derive(Debug)]
pub struct Sent {
    node: Arc<Node>,
    link: Link,
    /// Commands before the `WAIT`.
    parts: usize,
    begun: Instant,
    timeout: Duration,
    replicas: u32,
}

/// Sends values that are still being produced. Each call of `make` appends one or more values, for the next keys, and
/// the previous ones are sent meanwhile. One `WAIT` follows the last. [`Sent::end`] reads the replies.
pub fn send_as_made(
    cluster: &Cluster,
    keys: &[Vec<u8>],
    values: &mut Values,
    make: &mut dyn FnMut(&mut Values),
) -> Result<Sent, Failed> {
    cluster.refresh_if_old();
    let context = IoContext::BACKGROUND;
    let owner = cluster.owner(slot_of(keys.first().map_or(&[], Vec::as_slice)), context);
    let known = owner.and_then(|at| cluster.replicas_of(&at).map(|replicas| (at, replicas)));
    let (at, replicas) = known.map_err(|why| Failed { full: false, why: why.to_string(), unknown: false })?;
    let (node, begun) = (cluster.node(&at), Instant::now());
    let timeout = node.timeout(Kind::Write);
    let context = context.until(begun + timeout);
    let failed = |error: &io::Error, unknown| {
        cluster.refresh(IoContext::BACKGROUND);
        Failed { full: false, why: broken(&at, error), unknown }
    };
    let link = node.take(Kind::Write, &cluster.options().access, begun, context);
    let mut link = link.map_err(|error| failed(&error, false))?;
    let mut parts = 0;
    let mut send = || {
        while values.len() < keys.len() {
            let from = values.len();
            make(values);
            let part = (from..values.len()).collect();
            let round = Round { at: at.clone(), keys: part, one_by_one: false, asking: false, replicas: 0 };
            link.send(&commands(Verb::Set(values), keys, &round, Duration::ZERO), context)?;
            parts += 1;
        }
        let mut wait = Commands::default();
        add_wait(&mut wait, replicas, left(context).unwrap_or_default() / 2);
        link.send(&wait, context)
    };
    if let Err(error) = send() {
        node.note(Kind::Write, begun, timeout, Some(&error));
        return Err(failed(&error, true));
    }
    Ok(Sent { node, link, parts, begun, timeout, replicas })
}

impl Sent {
    /// Waits for the replies. If the slot has moved, sends `keys` and `values`, which are those of the request, again.
    pub fn end(self, cluster: &Cluster, keys: &[Vec<u8>], values: &Values) -> Result<(), Failed> {
        let Self { node, link, parts, begun, timeout, replicas } = self;
        let at = &node.addr;
        let mut unknown = true;
        let kept = node.end(link, Kind::Write, begun, timeout, |link| {
            // The caller may come late: replies that are there by then are in time.
            let context = IoContext::BACKGROUND.until((begun + timeout).max(Instant::now() + READ));
            let replies = link.receive(parts + usize::from(replicas > 0), context)?;
            // A command that got an error was not executed.
            unknown = (0..parts).any(|part| replies.get(part).error().is_none());
            let error = (0..parts).find_map(|part| {
                let said = replies.get(part);
                said.error().map_or_else(
                    || (said.text() != Some("OK")).then(|| senseless(at)),
                    |error| Some(Refusal::of(&error, at)),
                )
            });
            in_time(error.map_or_else(|| check_wait(replicas, at, &replies), Err))
        });
        let failed = |why: String| Failed { full: false, why, unknown };
        match kept {
            Ok(Ok(())) => Ok(()),
            Ok(Err(Refusal::Full(why))) => Err(Failed { full: true, ..failed(why) }),
            Ok(Err(Refusal::Busy(why) | Refusal::Late(why))) => {
                cluster.refresh(IoContext::BACKGROUND);
                Err(failed(why))
            }
            // The slot moves, or has moved. All values are ready, so this continues as an ordinary request.
            Ok(Err(Refusal::Moved(_) | Refusal::Ask(_) | Refusal::OneByOne)) => {
                cluster.refresh(IoContext::BACKGROUND);
                run(cluster, Verb::Set(values), keys, &mut |_, _| (), IoContext::BACKGROUND)
                    .map_err(|error| Failed { unknown: unknown || error.unknown, ..error })
            }
            Err(error) => {
                cluster.refresh(IoContext::BACKGROUND);
                Err(failed(broken(at, &error)))
            }
        }
    }
}

/// Adds a `WAIT` for the replicas of the writes on this connection, if any replica is required.
fn add_wait(commands: &mut Commands, replicas: u32, within: Duration) {
    if replicas > 0 {
        let ms = (within.as_millis() as u64).max(1).to_string();
        commands.add(&[b"WAIT", replicas.to_string().as_bytes(), ms.as_bytes()]);
    }
}

fn broken(at: &Addr, error: &io::Error) -> String {
    match error.get_ref() {
        Some(why) if is_too_few(error) => why.to_string(),
        _ if is_late(error) => format!("{at} does not answer in time"),
        _ => format!("{at}: {error}"),
    }
}

/// A `WAIT` that was too short counts as a late reply, so that the next one may take longer.
fn in_time<T>(read: Result<T, Refusal>) -> io::Result<Result<T, Refusal>> {
    match read {
        Err(Refusal::Late(why)) => Err(io::Error::new(io::ErrorKind::TimedOut, TooFew(why))),
        read => Ok(read),
    }
}

fn commands(verb: Verb<'_>, keys: &[Vec<u8>], round: &Round, wait: Duration) -> Commands {
    let mut commands = Commands::default();
    let (many, one) = match verb {
        Verb::Get => ("MGET", "GET"),
        Verb::Set(_) => ("MSET", "SET"),
        Verb::Unlink => ("UNLINK", "UNLINK"),
    };
    let words = |commands: &mut Commands, at: usize| {
        commands.word(&keys[at]);
        if let Verb::Set(values) = verb {
            commands.word(values.get(at));
        }
    };
    let words_each = if matches!(verb, Verb::Set(_)) { 2 } else { 1 };
    if !round.one_by_one {
        commands.begin(1 + words_each * round.keys.len());
        commands.word(many.as_bytes());
        round.keys.iter().for_each(|at| words(&mut commands, *at));
    }
    for at in round.keys.iter().filter(|_| round.one_by_one) {
        if round.asking {
            commands.add(&[b"ASKING"]);
        }
        commands.begin(1 + words_each);
        commands.word(one.as_bytes());
        words(&mut commands, *at);
    }
    add_wait(&mut commands, round.replicas, wait);
    commands
}

/// Returns whether every key got an error: then none of the commands was executed.
fn is_refused(round: &Round, replies: &Replies<'_>) -> bool {
    let (count, step) = if round.one_by_one { (round.keys.len(), 1 + usize::from(round.asking)) } else { (1, 1) };
    (0..count).all(|number| replies.get(number * step + step - 1).error().is_some())
}

fn check_wait(replicas: u32, at: &Addr, replies: &Replies<'_>) -> Result<(), Refusal> {
    if replicas == 0 {
        return Ok(());
    }
    let last = replies.get(replies.iter().len().saturating_sub(1));
    match last.int() {
        Some(have) if have >= i64::from(replicas) => Ok(()),
        Some(have) => Err(Refusal::Late(format!("{have} replicas of {at} have it in time, {replicas} are needed"))),
        None => Err(last.error().map_or_else(|| senseless(at), |error| Refusal::of(&error, at))),
    }
}

fn senseless(at: &Addr) -> Refusal {
    Refusal::Busy(format!("{at} sent a malformed reply"))
}

fn found<'a>(verb: Verb<'_>, round: &Round, said: Said<'a, '_>) -> Result<Found<'a>, Refusal> {
    if let Some(error) = said.error() {
        return Err(Refusal::of(&error, &round.at));
    }
    match verb {
        Verb::Get if said.is_nil() => Ok(if round.asking { Found::Elsewhere } else { Found::Nothing }),
        Verb::Get => said.bytes().map(Found::Value).ok_or_else(|| senseless(&round.at)),
        Verb::Set(_) => {
            if said.text() == Some("OK") {
                Ok(Found::Done(1))
            } else {
                Err(senseless(&round.at))
            }
        }
        Verb::Unlink => said.int().map(|gone| Found::Done(gone.max(0) as u64)).ok_or_else(|| senseless(&round.at)),
    }
}

/// Reads the replies to one command for all keys.
fn read_all(
    verb: Verb<'_>,
    round: &Round,
    replies: &Replies<'_>,
    each: &mut dyn FnMut(usize, Found<'_>),
) -> Result<Vec<Round>, Refusal> {
    let first = replies.get(0);
    if let (Verb::Get, Some(values)) = (verb, first.array()) {
        if values.len() != round.keys.len() {
            return Err(senseless(&round.at));
        }
        for (at, value) in round.keys.iter().zip(values) {
            each(*at, found(verb, round, value)?);
        }
        return Ok(Vec::new());
    }
    let done = found(verb, round, first)?;
    if matches!(verb, Verb::Get) {
        return Err(senseless(&round.at));
    }
    check_wait(round.replicas, &round.at, replies)?;
    round.keys.iter().take(1).for_each(|at| each(*at, done));
    Ok(Vec::new())
}

/// Reads the replies to one command for each key. Returns the rounds for keys that other nodes have.
fn read_each(
    verb: Verb<'_>,
    round: &Round,
    replies: &Replies<'_>,
    each: &mut dyn FnMut(usize, Found<'_>),
) -> Result<Vec<Round>, Refusal> {
    let mut more: Vec<Round> = Vec::new();
    let (step, mut stored) = (1 + usize::from(round.asking), false);
    for (number, at) in round.keys.iter().enumerate() {
        match found(verb, round, replies.get(number * step + step - 1)) {
            Ok(found) => {
                stored = true;
                each(*at, found);
            }
            Err(Refusal::Ask(to) | Refusal::Moved(to)) => {
                let asking =
                    replies.get(number * step + step - 1).error().is_some_and(|error| error.starts_with("ASK"));
                match more.iter_mut().find(|round| round.at == to && round.asking == asking) {
                    Some(round) => round.keys.push(*at),
                    None => more.push(Round { at: to, keys: vec![*at], one_by_one: true, asking, replicas: 0 }),
                }
            }
            Err(refusal) => return Err(refusal),
        }
    }
    if stored {
        check_wait(round.replicas, &round.at, replies)?;
    }
    Ok(more)
}
