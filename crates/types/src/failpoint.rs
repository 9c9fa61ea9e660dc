//! Failure injection for tests: points at which a test makes a call fail ([`fail_point!`]), and rules that a test turns off to show
//! that they are needed ([`without!`]).
//!
//! A crate has both in its own unit tests and with its feature `failpoints`; any other build contains none of them. A point's name
//! is `part.place`, or `part.place:WHAT` if one place serves many calls. In a separate process, points are set by
//! `RLOOD_FAILPOINTS=NAME=ACTION` (`error`, `panic`, `exit`, `no_space`; separated by `;`). A point acts once, in the first process
//! that reaches it, and creates a file of its name in `RLOOD_FAILPOINTS_DIR`. `*=note` records every point that is reached.
//! `files.hash=slow:10000000` limits the hashing of files to that many bytes per second, every time ([`pace!`]).

use std::cell::{Cell, RefCell};
use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::OnceLock;

/// Evaluates to `std::io::Result<()>`: an error if a test requests one.
#[macro_export]
macro_rules! fail_point {
    ($point:expr) => {
        $crate::fail_point!($point, "")
    };
    ($point:expr, $what:expr) => {{
        #[cfg(any(test, feature = "failpoints"))]
        let reached = $crate::failpoint::reach($point, $what);
        #[cfg(not(any(test, feature = "failpoints")))]
        let reached = std::io::Result::Ok(());
        reached
    }};
}

/// Evaluates to true if a test has turned off this rule.
#[macro_export]
macro_rules! without {
    ($rule:ident) => {{
        #[cfg(any(test, feature = "failpoints"))]
        let off = $crate::failpoint::is_off($crate::failpoint::Rule::$rule);
        #[cfg(not(any(test, feature = "failpoints")))]
        let off = false;
        off
    }};
}

/// Evaluates to `Option<u64>`: the bytes per second to which a test limits this place.
#[macro_export]
macro_rules! pace {
    ($point:expr) => {{
        #[cfg(any(test, feature = "failpoints"))]
        let bytes_per_s = $crate::failpoint::bytes_per_s_at($point);
        #[cfg(not(any(test, feature = "failpoints")))]
        let bytes_per_s: Option<u64> = None;
        bytes_per_s
    }};
}

pub use crate::{fail_point, pace, without};

/// Exit code of a process that ends at a failpoint.
pub const EXIT: i32 = 86;

/// The action at a failpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// The call fails with an error.
    Error,
    /// The current thread panics.
    Panic,
    /// The process exits immediately.
    Exit,
    /// The call fails because no space is left on the device.
    NoSpace,
    /// Nothing happens; the point is only recorded.
    Note,
    /// The place, such as the hashing of a file, is limited to this many bytes per second, every time.
    Slow(u64),
}

/// A rule that a test can turn off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rule {
    /// Rule: a worker's writes name the attempt that owns the job.
    Fence,
    /// Rule: transactions take the write lock when they begin.
    Immediate,
    /// Rule: a lease lasts for several heartbeat intervals.
    LeaseMargin,
    /// Rule: a restarted server first renews every lease.
    BootMargin,
    /// Rule: a checkpoint gets its name only when all its files are there.
    ManifestLast,
    /// Rule: a change and its event are written in one transaction.
    SameTransaction,
    /// Rule: progress is measured against the furthest step of any earlier attempt.
    Reached,
}

type Hook = Box<dyn FnMut(&str) -> Option<Action>>;

thread_local! {
    static HOOK: RefCell<Option<Hook>> = const { RefCell::new(None) };
    static OFF: Cell<Option<Rule>> = const { Cell::new(None) };
}

/// Calls `hook` at every failpoint that this thread reaches, until it is replaced.
pub fn set_hook(hook: Option<Hook>) {
    HOOK.set(hook);
}

/// Turns off a rule in this thread, or turns all rules on again (`None`).
pub fn turn_off_rule(rule: Option<Rule>) {
    OFF.set(rule);
}

/// Implementation of [`without!`](crate::without): whether the rule is off.
pub fn is_off(rule: Rule) -> bool {
    OFF.get() == Some(rule)
}

/// Carries out the action that a test has set for this point; see [`fail_point!`](crate::fail_point).
///
/// # Errors
/// Returns the error that the test requests.
pub fn reach(point: &str, what: &str) -> io::Result<()> {
    let name = if what.is_empty() { point.to_owned() } else { format!("{point}:{what}") };
    let hooked = HOOK.with_borrow_mut(|hook| hook.as_mut().and_then(|hook| hook(&name)));
    match hooked.or_else(|| of_environment(&name)) {
        None | Some(Action::Note | Action::Slow(_)) => Ok(()),
        Some(Action::Error) => Err(io::Error::other(format!("a test makes {name} fail"))),
        Some(Action::NoSpace) => Err(io::Error::from_raw_os_error(libc::ENOSPC)),
        Some(Action::Exit) => std::process::exit(EXIT),
        Some(Action::Panic) => panic!("a test makes {name} panic"),
    }
}

/// Returns the limit that [`pace!`](crate::pace) applies, in bytes per second.
pub fn bytes_per_s_at(name: &str) -> Option<u64> {
    plan().iter().find_map(|(point, action)| match action {
        Action::Slow(bytes_per_s) if point == name => Some(*bytes_per_s),
        _ => None,
    })
}

fn plan() -> &'static [(String, Action)] {
    static PLAN: OnceLock<Vec<(String, Action)>> = OnceLock::new();
    PLAN.get_or_init(|| std::env::var("RLOOD_FAILPOINTS").map(|text| parse(&text)).unwrap_or_default())
}

fn of_environment(name: &str) -> Option<Action> {
    let (_, action) = plan().iter().find(|(point, _)| point == name || point == "*")?;
    let dir = PathBuf::from(std::env::var_os("RLOOD_FAILPOINTS_DIR")?);
    // A point acts once: only the process that creates the point's file fails.
    File::create_new(dir.join(name.replace('/', "_"))).ok().map(|_| *action)
}

fn parse(text: &str) -> Vec<(String, Action)> {
    let action = |word: &str| match word {
        "error" => Action::Error,
        "panic" => Action::Panic,
        "exit" => Action::Exit,
        "no_space" => Action::NoSpace,
        "note" => Action::Note,
        slow if slow.starts_with("slow:") => {
            Action::Slow(slow["slow:".len()..].parse().expect("RLOOD_FAILPOINTS: slow:BYTES_A_SECOND"))
        }
        other => panic!("RLOOD_FAILPOINTS: '{other}' is not an action"),
    };
    let entry = |entry: &str| {
        let (point, word) = entry.rsplit_once('=').expect("RLOOD_FAILPOINTS: NAME=ACTION");
        (point.to_owned(), action(word))
    };
    text.split(';').filter(|entry| !entry.is_empty()).map(entry).collect()
}
