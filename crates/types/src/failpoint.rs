//! Where a test makes things go wrong ([`fail_point!`]), and which rule it takes away to see that it would be missed
//! ([`without!`]).
//!
//! A crate has both in its own unit tests and with its feature `failpoints`; any other build holds nothing of them. A point's name is
//! `part.place`, or `part.place:WHAT` where one place serves many calls. In a process of its own a point is set by
//! `RLOOD_FAILPOINTS=NAME=ACTION` (`error`, `panic`, `exit`, `no_space`; several with `;`): it acts once, in whichever process
//! comes first, and leaves a file of its name in `RLOOD_FAILPOINTS_DIR`. `*=note` notes every point that is reached there.
//! `files.hash=slow:10000000` holds the hashing of files to so many bytes a second, every time ([`pace!`]).

use std::cell::{Cell, RefCell};
use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::OnceLock;

/// `std::io::Result<()>`: an error where a test asks for one.
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

/// True where a test has taken this rule away.
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

/// `Option<u64>`: the bytes a second to which a test holds this place.
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

/// The code of a process that ends at a point.
pub const EXIT: i32 = 86;

/// What happens at a point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// The call fails.
    Error,
    /// The thread panics.
    Panic,
    /// The process ends at once.
    Exit,
    /// The call fails: no space is left on the device.
    NoSpace,
    /// Nothing; it is only noted.
    Note,
    /// Bytes a second: the place is slow, every time.
    Slow(u64),
}

/// What a test can take away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rule {
    /// Writes of a worker name the attempt that owns the job.
    Fence,
    /// Transactions take the write lock as they begin.
    Immediate,
    /// A lease holds several heartbeats.
    LeaseMargin,
    /// A server that comes back gives every claim a whole lease first.
    BootMargin,
    /// A checkpoint is named when all of it is there.
    ManifestLast,
    /// A change and the event that tells of it are one transaction.
    SameTransaction,
    /// Progress is measured against what any earlier attempt reached.
    Reached,
}

type Hook = Box<dyn FnMut(&str) -> Option<Action>>;

thread_local! {
    static HOOK: RefCell<Option<Hook>> = const { RefCell::new(None) };
    static OFF: Cell<Option<Rule>> = const { Cell::new(None) };
}

/// Asks `hook` at every point that this thread reaches, until it is replaced.
pub fn set_hook(hook: Option<Hook>) {
    HOOK.set(hook);
}

/// Takes a rule away from this thread, or gives it back.
pub fn take_away(rule: Option<Rule>) {
    OFF.set(rule);
}

/// See [`without!`](crate::without).
pub fn is_off(rule: Rule) -> bool {
    OFF.get() == Some(rule)
}

/// See [`fail_point!`](crate::fail_point).
///
/// # Errors
/// When the test says so.
pub fn reach(point: &str, what: &str) -> io::Result<()> {
    let name = if what.is_empty() { point.to_owned() } else { format!("{point}:{what}") };
    let hooked = HOOK.with_borrow_mut(|hook| hook.as_mut().and_then(|hook| hook(&name)));
    match hooked.or_else(|| of_environment(&name)) {
        None | Some(Action::Note | Action::Slow(_)) => Ok(()),
        Some(Action::Error) => Err(io::Error::other(format!("a test lets {name} fail"))),
        Some(Action::NoSpace) => Err(io::Error::from_raw_os_error(libc::ENOSPC)),
        Some(Action::Exit) => std::process::exit(EXIT),
        Some(Action::Panic) => panic!("a test lets {name} panic"),
    }
}

/// See [`pace!`](crate::pace).
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
    // Whoever makes the file is the one it happens to.
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
        other => panic!("RLOOD_FAILPOINTS: '{other}' is no action"),
    };
    let entry = |entry: &str| {
        let (point, word) = entry.rsplit_once('=').expect("RLOOD_FAILPOINTS: NAME=ACTION");
        (point.to_owned(), action(word))
    };
    text.split(';').filter(|entry| !entry.is_empty()).map(entry).collect()
}
