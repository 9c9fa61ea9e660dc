//! Strict JSON: duplicate keys in an object and integers that would be rounded are errors.
//!
//! [RFC 8259](https://www.rfc-editor.org/rfc/rfc8259#section-4) leaves both to the parser. Most parsers keep the last of two
//! values, and round. In a training row or a job, that would be an unnoticed mistake. Fractions are rounded to the nearest 64-bit
//! float, as in other parsers.

use std::fmt;

use serde::de::{Deserialize, DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::map::Entry;
use serde_json::{Map, Number, Value};

/// Magnitude from which integers are parsed as floats: 2^63.
const LARGE: f64 = 9_223_372_036_854_775_808.0;
/// serde_json treats an object that begins with this key specially, so an object with the key could not be read back.
const RESERVED: &str = "$serde_json::private::RawValue";
/// Maximum number of characters of a key or a number that an error shows.
const SHOWN: usize = 40;

/// Parses a text as JSON.
///
/// # Errors
/// Fails with line and column if the text is not JSON, or has a duplicate key in an object or an integer beyond 64 bits. The last
/// two have the category `Data`.
pub fn read(text: &[u8]) -> Result<Value, serde_json::Error> {
    serde_json::from_slice::<Exact>(text)?.checked(text)
}

/// Returns the error's message without its position.
pub fn error_text(error: &serde_json::Error) -> String {
    let text = error.to_string();
    text.rsplit_once(" at line ").map_or(text.as_str(), |(words, _)| words).to_owned()
}

/// A value without duplicate keys, for callers that use another deserializer than [`read`].
#[derive(Debug)]
pub struct Exact {
    value: Value,
    /// Whether a value contains a number so large that it may be a rounded integer.
    large: bool,
}

impl Exact {
    /// Returns the value, if none of its integers was rounded; `text` is the text it was parsed from.
    ///
    /// # Errors
    /// Fails as [`read`] does.
    pub fn checked(self, text: &[u8]) -> Result<Value, serde_json::Error> {
        let rounded = if self.large { long_integer(text) } else { None };
        match rounded {
            None => Ok(self.value),
            // serde_json reads an error's position from the end of the error's text.
            Some(Integer { line, column, digits }) => Err(serde_json::Error::custom(format!(
                "the integer {} has more than 64 bits and would be rounded: write it as a string at line {line} column {column}",
                shown(&digits)
            ))),
        }
    }
}

impl<'de> Deserialize<'de> for Exact {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Exact, D::Error> {
        deserializer.deserialize_any(Exactly)
    }
}

struct Exactly;

fn small<E>(value: Value) -> Result<Exact, E> {
    Ok(Exact { value, large: false })
}

impl<'de> Visitor<'de> for Exactly {
    type Value = Exact;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Exact, E> {
        small(Value::Null)
    }

    fn visit_bool<E>(self, flag: bool) -> Result<Exact, E> {
        small(Value::Bool(flag))
    }

    fn visit_i64<E>(self, number: i64) -> Result<Exact, E> {
        small(number.into())
    }

    fn visit_u64<E>(self, number: u64) -> Result<Exact, E> {
        small(number.into())
    }

    fn visit_f64<E>(self, number: f64) -> Result<Exact, E> {
        let value = Number::from_f64(number).map_or(Value::Null, Value::Number);
        Ok(Exact { value, large: number.abs() >= LARGE })
    }

    fn visit_str<E>(self, text: &str) -> Result<Exact, E> {
        small(Value::String(text.to_owned()))
    }

    fn visit_string<E>(self, text: String) -> Result<Exact, E> {
        small(Value::String(text))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Exact, A::Error> {
        let (mut items, mut any_large) = (Vec::new(), false);
        while let Some(Exact { value, large }) = access.next_element()? {
            items.push(value);
            any_large |= large;
        }
        Ok(Exact { value: Value::Array(items), large: any_large })
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Exact, A::Error> {
        let (mut object, mut any_large) = (Map::new(), false);
        while let Some(key) = access.next_key::<String>()? {
            if key == RESERVED {
                return Err(A::Error::custom(format!("the key '{RESERVED}' cannot be used: rename it")));
            }
            match object.entry(key) {
                Entry::Vacant(place) => {
                    let Exact { value, large } = access.next_value()?;
                    place.insert(value);
                    any_large |= large;
                }
                Entry::Occupied(known) => access.next_value_seed(Twice(known.key()))?,
            }
        }
        Ok(Exact { value: Value::Object(object), large: any_large })
    }
}

/// Fails when it reads the second value of a duplicate key, so that the error's position is at the key.
struct Twice<'k>(&'k str);

impl<'de> DeserializeSeed<'de> for Twice<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, _: D) -> Result<(), D::Error> {
        Err(D::Error::custom(format!("duplicate key '{}': give every key of an object once", shown(self.0))))
    }
}

/// An integer that does not fit into 64 bits, and its position, counted from 1.
struct Integer {
    line: usize,
    column: usize,
    digits: String,
}

/// Returns the first integer beyond 64 bits in a text that is valid JSON.
fn long_integer(text: &[u8]) -> Option<Integer> {
    let (mut line, mut line_begin, mut at) = (1, 0, 0);
    while let Some(byte) = text.get(at) {
        let rest = &text[at..];
        let length = match byte {
            b'"' => string_length(rest),
            b'-' | b'0'..=b'9' => rest.iter().take_while(|b| b"+-.eE0123456789".contains(b)).count(),
            b'\n' => {
                (line, line_begin) = (line + 1, at + 1);
                1
            }
            _ => 1,
        };
        let digits = std::str::from_utf8(&rest[..length]).unwrap_or("");
        let is_integer = digits.trim_start_matches('-').bytes().all(|b| b.is_ascii_digit());
        if is_integer && length > 1 && digits.parse::<i64>().is_err() && digits.parse::<u64>().is_err() {
            return Some(Integer { line, column: at - line_begin + 1, digits: digits.to_owned() });
        }
        at += length;
    }
    None
}

/// Returns the length in bytes of the string at the beginning of a text, including its quotes.
fn string_length(text: &[u8]) -> usize {
    let mut at = 1;
    while let Some(byte) = text.get(at) {
        match byte {
            b'"' => return at + 1,
            b'\\' => at += 2,
            _ => at += 1,
        }
    }
    text.len()
}

fn shown(text: &str) -> String {
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(text: &str) -> (String, usize, usize) {
        let error = read(text.as_bytes()).unwrap_err();
        (error.to_string(), error.line(), error.column())
    }

    #[test]
    fn unambiguous_json_is_read_as_by_serde_json() {
        for text in [
            r#"{"a": [1, -2, 2.5, true, null, "x\n\u00e4"], "b": {"a": {}}}"#,
            r#"{"$serde_json::private::Number": "1"}"#,
            "18446744073709551615",
            "-9223372036854775808",
            "1e30",
            "[123456789012345678901234567890.0, 1E25, -0]",
            r#"{"text": "123456789012345678901234567890 \" 99999999999999999999", "n": 1e20}"#,
        ] {
            assert_eq!(read(text.as_bytes()).unwrap(), serde_json::from_str::<Value>(text).unwrap(), "{text}");
        }
    }

    #[test]
    fn a_duplicate_key_is_rejected_with_its_position() {
        let (text, line, _) = refused("{\"prompt\": \"a\",\n \"prompt\": \"b\"}");
        assert!(text.starts_with("duplicate key 'prompt'"), "{text}");
        assert_eq!(line, 2);
        assert!(refused(r#"[{"a": {"b": 1, "c": 2, "b": 1}}]"#).0.contains("duplicate key 'b'"));
        // The same key with different escapes is a duplicate too.
        assert!(refused(r#"{"a": 1, "\u0061": 2}"#).0.contains("duplicate key 'a'"));
    }

    #[test]
    fn an_integer_beyond_64_bits_is_rejected_with_its_position() {
        let (text, line, column) = refused("{\"a\": \"1\",\n  \"id\": 123456789012345678901234567890}");
        assert!(text.starts_with("the integer 123456789012345678901234567890 has more than 64 bits"), "{text}");
        assert_eq!((line, column), (2, 9));
        assert!(refused("[1e30, 18446744073709551616]").0.contains("18446744073709551616"));
        assert!(refused("[-9223372036854775809]").0.contains("-9223372036854775809"));
    }

    #[test]
    fn a_key_that_serde_json_takes_for_its_own_is_refused() {
        assert!(refused(r#"{"x": {"$serde_json::private::RawValue": 5}}"#).0.contains("rename it"));
    }

    #[test]
    fn depth_stays_bounded() {
        assert!(read(&b"[".repeat(100_000)).is_err());
        let deep = [b"{\"a\":".repeat(200), b"1".to_vec(), b"}".repeat(200)].concat();
        assert!(read(&deep).unwrap_err().to_string().contains("recursion limit"));
    }
}
