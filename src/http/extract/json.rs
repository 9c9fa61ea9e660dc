//! Parses JSON bodies. Errors name the place and the rule, and never repeat a value of the body.

use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::http::error::{Code, FieldError, Problem, shortened};
use crate::strict_json::error_text;

/// Like [`parse_json`], for a body that must be an object. serde would accept a list as a struct's fields in order.
pub(super) fn parse_object<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Problem> {
    let kind = match bytes.strip_prefix(BYTE_ORDER_MARK).unwrap_or(bytes).trim_ascii_start().first() {
        None | Some(b'{' | 0x1f) => return parse_json(bytes),
        Some(b'[') => "a list",
        Some(b'"') => "a string",
        Some(b't' | b'f') => "a boolean",
        Some(b'n') => "null",
        Some(_) => "a number",
    };
    // The whole body is parsed first, so that a syntax error is reported before a value of the wrong type.
    parse_json::<serde::de::IgnoredAny>(bytes)?;
    let detail = format!("the body must be a JSON object, not {kind}");
    Err(Problem::new(Code::InvalidBody, detail.clone()).item("", "invalid", detail))
}

const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// Parses JSON. Answers 400 for a syntax error (with line and column), 422 with a pointer for JSON of another shape. No value of
/// the body is repeated: it may be a secret in the wrong place.
pub fn parse_json<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Problem> {
    let bytes = json_of(bytes)?;
    let mut deserializer = serde_json::Deserializer::from_slice(bytes);
    let value = serde_path_to_error::deserialize(&mut deserializer)
        .map_err(|error| json_problem(error, bytes, &|value| error_in::<T>(value)))?;
    deserializer.end().map_err(|error| broken(&error))?;
    Ok(value)
}

type PathError = serde_path_to_error::Error<serde_json::Error>;

/// Returns the error of reading a value as `T`. All else about errors is the same for each type.
fn error_in<T: DeserializeOwned>(value: &Value) -> Option<PathError> {
    serde_path_to_error::deserialize::<_, T>(value).err()
}

/// Returns the body without its byte order mark, or an error if it cannot be JSON.
fn json_of(bytes: &[u8]) -> Result<&[u8], Problem> {
    let bytes = bytes.strip_prefix(BYTE_ORDER_MARK).unwrap_or(bytes);
    if bytes.iter().all(u8::is_ascii_whitespace) {
        return Err(Problem::new(Code::InvalidJson, "the body is empty: a JSON body is required"));
    }
    if bytes.starts_with(b"\x1f\x8b") {
        let detail = "the body is compressed with gzip but lacks the header 'content-encoding: gzip'";
        return Err(Problem::new(Code::InvalidJson, detail));
    }
    Ok(bytes)
}

fn json_problem(error: PathError, bytes: &[u8], error_in: &dyn Fn(&Value) -> Option<PathError>) -> Problem {
    let pointer = pointer_of(error.path());
    let error = error.into_inner();
    if !error.is_data() {
        return broken(&error);
    }
    let text = error_text(&error);
    if let Some(name) = missing_name(&text) {
        return required(missing_fields(bytes, format!("{pointer}/{name}"), error_in));
    }
    let at = format!("line {}, column {}", error.line(), error.column());
    let text = shortened(&describe_type_error(&text));
    Problem::new(Code::InvalidBody, format!("{text} at '{pointer}' ({at})")).item(pointer, "invalid", text)
}

fn broken(error: &serde_json::Error) -> Problem {
    let at = format!("line {}, column {}", error.line(), error.column());
    let text = shortened(&error_text(error));
    Problem::new(Code::InvalidJson, format!("invalid JSON at {at}: {text}")).items(vec![FieldError {
        pointer: String::new(),
        code: "syntax".to_owned(),
        detail: format!("{at}: {text}"),
    }])
}

/// Rewrites serde's message about a wrong type, without the value and without names of this program's types.
fn describe_type_error(text: &str) -> String {
    if text.starts_with("data did not match any variant of untagged enum") {
        return "has none of the supported forms".to_owned();
    }
    let Some((said, expected)) = text.rsplit_once(", expected ") else { return text.to_owned() };
    if said.starts_with("unknown variant ") {
        return format!("unknown value: must be {expected}");
    }
    let expected = match expected {
        "u8" => "a whole number from 0 to 255",
        "u16" => "a whole number from 0 to 65535",
        "u32" => "a whole number from 0 to 4294967295",
        "u64" | "usize" => "a whole number that is not negative",
        "i8" | "i16" | "i32" | "i64" | "isize" => "a whole number",
        "f32" | "f64" => "a number",
        "a sequence" => "a list",
        "a map" => "an object",
        "unit" => "null",
        "variant identifier" | "string or map" => "one of the known values",
        other if other.starts_with("struct ") || other.contains(" enum ") => "an object",
        other if other.starts_with("enum ") => "one of the known values",
        other => other,
    };
    if said.starts_with("invalid value: ") {
        return format!("must be {expected}");
    }
    let Some(found) = said.strip_prefix("invalid type: ") else { return text.to_owned() };
    // serde's message names the JSON type and then the value, as in `string "…"` or "integer `7`"; only the type is kept.
    let kinds = [
        ("null", "null"),
        ("unit", "null"),
        ("boolean", "a boolean"),
        ("integer", "a whole number"),
        ("floating point", "a number with a fraction"),
        ("number", "a number"),
        ("string", "a string"),
        ("character", "a string"),
        ("sequence", "a list"),
        ("map", "an object"),
    ];
    let found = kinds.iter().find(|(kind, _)| found.starts_with(kind)).map_or("something else", |(_, words)| *words);
    format!("must be {expected}, not {found}")
}

fn missing_name(text: &str) -> Option<&str> {
    text.strip_prefix("missing field `")?.strip_suffix('`')
}

/// Maximum size of a body that is searched for every missing field, in bytes. For longer ones only the first is reported.
const MAX_SEARCHED_BYTES: usize = 64 * 1024;

/// Returns the pointers of all missing required fields, in order. serde stops at the first one, so each missing field is filled
/// with a valid value and the body is parsed again.
fn missing_fields(bytes: &[u8], first: String, error_in: &dyn Fn(&Value) -> Option<PathError>) -> Vec<String> {
    let mut found = Vec::new();
    let whole = bytes.len() <= MAX_SEARCHED_BYTES;
    let mut value: Value = whole.then(|| serde_json::from_slice(bytes).ok()).flatten().unwrap_or_default();
    let mut next = Some(first);
    while let Some(pointer) = next.filter(|pointer| !found.contains(pointer)) {
        next = next_missing(&mut value, &pointer, error_in);
        found.push(pointer);
    }
    found
}

/// Inserts a valid value at `pointer`, and returns the pointer of the next missing field.
fn next_missing(value: &mut Value, pointer: &str, error_in: &dyn Fn(&Value) -> Option<PathError>) -> Option<String> {
    let (parent, name) = pointer.rsplit_once('/')?;
    for stand_in in [json!(""), json!(0), json!([]), json!({}), json!(false)] {
        value.pointer_mut(parent)?.as_object_mut()?.insert(name.to_owned(), stand_in);
        let error = error_in(value)?;
        let at = pointer_of(error.path());
        let inside = at.strip_prefix(pointer).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
        if !inside {
            return missing_name(&error.inner().to_string()).map(|name| format!("{at}/{name}"));
        }
    }
    None
}

fn required(pointers: Vec<String>) -> Problem {
    let detail = format!("{} must be set", pointers.join(", "));
    let item = |pointer| FieldError { pointer, code: "required".to_owned(), detail: "must be set".to_owned() };
    Problem::new(Code::InvalidBody, detail).items(pointers.into_iter().map(item).collect())
}

fn pointer_of(path: &serde_path_to_error::Path) -> String {
    use serde_path_to_error::Segment;
    let mut pointer = String::new();
    for segment in path {
        match segment {
            Segment::Seq { index } => pointer.push_str(&format!("/{index}")),
            Segment::Map { key } => pointer.push_str(&format!("/{}", key.replace('~', "~0").replace('/', "~1"))),
            Segment::Enum { variant } => pointer.push_str(&format!("/{variant}")),
            Segment::Unknown => {}
        }
    }
    pointer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, serde::Deserialize)]
    #[serde(deny_unknown_fields)]
    #[expect(dead_code, reason = "only parsed")]
    struct Body {
        list: Vec<u32>,
    }

    #[test]
    fn broken_json_says_where() {
        let problem = parse_json::<Body>(b"{\n \"list\": [1,,2]}").unwrap_err();
        assert_eq!(problem.code(), Code::InvalidJson);
        assert!(problem.detail().contains("line 2, column 13"), "{}", problem.detail());
        assert_eq!(parse_json::<Body>(b"{\"list\":[]} x").unwrap_err().code(), Code::InvalidJson);
        assert_eq!(parse_json::<Body>(b" ").unwrap_err().code(), Code::InvalidJson);
    }

    #[derive(Debug, serde::Deserialize)]
    #[expect(dead_code, reason = "only parsed")]
    struct Order {
        name: String,
        count: u32,
        kind: Kind,
        note: Option<String>,
        parts: Vec<Part>,
    }

    #[derive(Debug, serde::Deserialize)]
    #[expect(dead_code, reason = "only parsed")]
    struct Part {
        id: String,
        size: u32,
    }

    #[derive(Debug, serde::Deserialize)]
    #[serde(rename_all = "snake_case")]
    enum Kind {
        Small,
        Large,
    }

    #[test]
    fn every_missing_field_is_named_where_it_should_be() {
        let said = |body: &str| parse_json::<Order>(body.as_bytes()).unwrap_err().detail().to_owned();
        // No placeholder exists for a value of an enum, so fields after a missing enum are reported once it is set.
        assert_eq!(said("{}"), "/name, /count, /kind must be set");
        assert_eq!(said("{\"kind\": \"small\", \"count\": 1}"), "/name, /parts must be set");
        let parts = "{\"name\": \"a\", \"count\": 1, \"kind\": \"large\", \"parts\": [{}, {\"id\": \"b\"}]}";
        assert_eq!(said(parts), "/parts/0/id, /parts/0/size, /parts/1/size must be set");
    }

    #[test]
    fn no_value_of_a_body_and_no_type_of_ours_is_repeated() {
        let secret = "rld_CANARY, expected struct X";
        for (body, words) in [
            (json!(secret), "the body must be a JSON object, not a string"),
            (json!([secret]), "the body must be a JSON object, not a list"),
            (json!(7), "the body must be a JSON object, not a number"),
            (json!({"name": 7}), "must be a string, not a whole number"),
            (json!({"name": "a", "count": secret}), "must be a whole number from 0 to 4294967295, not a string"),
            (json!({"name": "a", "count": -1}), "must be a whole number from 0 to 4294967295"),
            (json!({"name": "a", "count": 1, "kind": secret}), "must be `small` or `large`"),
            (json!({"name": "a", "count": 1, "kind": "small", "parts": secret}), "must be a list, not a string"),
            (json!({"name": "a", "count": 1, "kind": "small", "parts": [secret]}), "must be an object, not a string"),
        ] {
            let problem = parse_object::<Order>(body.to_string().as_bytes()).unwrap_err();
            assert_eq!(problem.code(), Code::InvalidBody);
            assert!(problem.detail().contains(words), "{body}: {}", problem.detail());
            let said = format!("{problem:?}");
            assert!(!said.contains("CANARY") && !said.contains("struct") && !said.contains("u32"), "{said}");
        }
        assert_eq!(parse_object::<Order>(b"nonsense").unwrap_err().code(), Code::InvalidJson);
        assert_eq!(parse_object::<Order>(b"\"open").unwrap_err().code(), Code::InvalidJson);
    }

    #[test]
    fn a_wrong_shape_says_which_field() {
        let problem = parse_json::<Body>(b"{\"list\": [1, \"x\"]}").unwrap_err();
        assert_eq!(problem.code(), Code::InvalidBody);
        assert!(problem.detail().contains("'/list/1'"), "{}", problem.detail());
        assert_eq!(parse_json::<Body>(b"{\"list\": [], \"lsit\": 1}").unwrap_err().code(), Code::InvalidBody);
    }
}
