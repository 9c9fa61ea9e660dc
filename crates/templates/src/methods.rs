//! Methods of Python's `str` that minijinja does not provide.

use minijinja::value::{Kwargs, from_args};
use minijinja::{Error, ErrorKind, Value};

use super::budget::charge;

/// Calls a method of Python's `str` on a text; `None` if this module does not have the method.
pub(super) fn of_text(text: &str, name: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    Ok(Some(match name {
        "removeprefix" => one(args, |prefix| text.strip_prefix(prefix).unwrap_or(text).into())?,
        "removesuffix" => one(args, |suffix| text.strip_suffix(suffix).unwrap_or(text).into())?,
        "partition" => parts(text.split_once(separator(args)?), separator(args)?, [text, "", ""]),
        "rpartition" => parts(text.rsplit_once(separator(args)?), separator(args)?, ["", "", text]),
        "rsplit" => rsplit(text, args)?,
        "index" => place(text, one(args, |part| text.find(part).into())?)?,
        "rindex" => place(text, one(args, |part| text.rfind(part).into())?)?,
        "swapcase" => {
            from_args::<()>(args)?;
            swapped(text).into()
        }
        "ljust" | "rjust" | "center" | "zfill" => padded(text, name, args)?,
        _ => return Ok(None),
    }))
}

fn one(args: &[Value], then: impl FnOnce(&str) -> Value) -> Result<Value, Error> {
    let (part,): (&str,) = from_args(args)?;
    Ok(then(part))
}

fn separator(args: &[Value]) -> Result<&str, Error> {
    let (separator,): (&str,) = from_args(args)?;
    if separator.is_empty() {
        return Err(Error::new(ErrorKind::InvalidOperation, "empty separator"));
    }
    Ok(separator)
}

fn parts(found: Option<(&str, &str)>, separator: &str, else_: [&str; 3]) -> Value {
    let [before, between, after] = found.map_or(else_, |(before, after)| [before, separator, after]);
    vec![Value::from(before), Value::from(between), Value::from(after)].into()
}

/// Splits a text from the right (`rsplit`), at most `maxsplit` times; without a separator, at runs of whitespace.
fn rsplit(text: &str, args: &[Value]) -> Result<Value, Error> {
    let (separator, most, named): (Option<&str>, Option<i64>, Kwargs) = from_args(args)?;
    let most = most.or(named.get("maxsplit")?).unwrap_or(-1);
    named.assert_all_used()?;
    let most = usize::try_from(most).unwrap_or(usize::MAX - 1);
    let mut pieces: Vec<&str> = Vec::new();
    match separator {
        Some("") => return Err(Error::new(ErrorKind::InvalidOperation, "empty separator")),
        Some(separator) => pieces.extend(text.rsplitn(most + 1, separator)),
        None => {
            let mut rest = text.trim_end();
            while !rest.is_empty() && pieces.len() < most {
                let Some((at, space)) = rest.char_indices().rfind(|(_, letter)| letter.is_whitespace()) else { break };
                pieces.push(&rest[at + space.len_utf8()..]);
                rest = rest[..at].trim_end();
            }
            pieces.extend(Some(rest).filter(|rest| !rest.is_empty()));
        }
    }
    Ok(pieces.into_iter().rev().map(Value::from).collect::<Vec<_>>().into())
}

/// Converts a position in a text from bytes to characters.
fn place(text: &str, at: Value) -> Result<Value, Error> {
    match at.as_usize().and_then(|at| text.get(..at)) {
        Some(before) => Ok(before.chars().count().into()),
        None => Err(Error::new(ErrorKind::InvalidOperation, "substring not found")),
    }
}

fn swapped(text: &str) -> String {
    let mut swapped = String::with_capacity(text.len());
    for letter in text.chars() {
        if letter.is_uppercase() {
            swapped.extend(letter.to_lowercase());
        } else {
            swapped.extend(letter.to_uppercase());
        }
    }
    swapped
}

/// Pads a text to a width in characters, as Python's `center`, `ljust` and `rjust` do.
fn padded(text: &str, name: &str, args: &[Value]) -> Result<Value, Error> {
    let (width, fill): (i64, Option<char>) = from_args(args)?;
    let length = text.chars().count();
    let width = usize::try_from(width).unwrap_or(0);
    let missing = width.saturating_sub(length);
    charge(missing as u64 * 4)?;
    let fill = |count: usize| fill.unwrap_or(if name == "zfill" { '0' } else { ' ' }).to_string().repeat(count);
    let padded = match name {
        "ljust" => format!("{text}{}", fill(missing)),
        "rjust" => format!("{}{text}", fill(missing)),
        // If the padding of `center` is odd, the additional character goes to the side where Python puts it.
        "center" => {
            let before = missing / 2 + (missing & width & 1);
            format!("{}{text}{}", fill(before), fill(missing - before))
        }
        _ => {
            let sign = text.len() - text.trim_start_matches(['+', '-']).len();
            let (sign, digits) = text.split_at(sign.min(1));
            format!("{sign}{}{digits}", fill(missing))
        }
    };
    Ok(padded.into())
}
