//! Looks up the columns of a source row by name and by path, and suggests the name that was probably meant.

use serde_json::{Map, Value};

/// A row of a source file.
pub type Row = Map<String, Value>;

/// Finds a row's value at a path: a column with exactly that name, else a column followed by keys and indices
/// into objects and lists.
pub fn find<'r>(row: &'r Row, path: &str) -> Option<&'r Value> {
    if let Some(value) = row.get(path) {
        return Some(value);
    }
    // Tries the longest prefix of the path first that is the name of a column.
    let ends = path.char_indices().rev().filter(|(_, c)| *c == '.').map(|(at, _)| at);
    for end in ends {
        let (name, rest) = path.split_at(end);
        if let Some(value) = row.get(name) {
            return rest.split('.').skip(1).try_fold(value, |value, part| match value {
                Value::Object(fields) => fields.get(part),
                Value::Array(items) => items.get(part.parse::<usize>().ok()?),
                _ => None,
            });
        }
    }
    None
}

/// The name of the column that a path begins with: the text before the first `.` or `[`.
pub fn column_of_path(path: &str) -> &str {
    path.split('.').next().unwrap_or(path)
}

/// Formats an error such as `there is no column 'quesiton'; columns are question, answer (did you mean 'question'?)`.
pub fn unknown<'n>(name: &str, names: impl Iterator<Item = &'n str> + Clone) -> String {
    let shown: Vec<&str> = names.clone().take(20).collect();
    let more = if names.clone().count() > shown.len() { ", …" } else { "" };
    let meant = nearest(name, names).map_or_else(String::new, |near| format!(" (did you mean '{near}'?)"));
    let list = if shown.is_empty() {
        "the row has no columns".to_owned()
    } else {
        format!("columns are {}{more}", shown.join(", "))
    };
    format!("there is no column '{}'; {list}{meant}", shorten(name))
}

/// Returns the existing name that is most similar to a wrong one, if it is similar enough to be the intended one.
pub fn nearest<'n>(name: &str, names: impl Iterator<Item = &'n str>) -> Option<&'n str> {
    let near = |other: &&str| strsim::damerau_levenshtein(&name.to_lowercase(), &other.to_lowercase());
    let best = names.min_by_key(near)?;
    (near(&best) <= (name.chars().count() / 3).max(1)).then_some(best)
}

/// Shortens a text for an error message.
pub fn shorten(text: &str) -> String {
    match text.char_indices().nth(80) {
        Some((end, _)) => format!("{}…", text.get(..end).unwrap_or_default()),
        None => text.to_owned(),
    }
}

/// The name of a value's type, for error messages.
pub fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "text",
        Value::Array(_) => "list",
        Value::Object(_) => "object",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_path_leads_into_objects_and_lists_and_a_column_s_own_dots_win() {
        let row = json!({"a": {"b": [1, {"c": 2}]}, "a.b": "own", "x.y": {"z": 3}});
        let row = row.as_object().unwrap();
        assert_eq!(find(row, "a.b"), Some(&json!("own")));
        assert_eq!(find(row, "a"), Some(&json!({"b": [1, {"c": 2}]})));
        assert_eq!(find(row, "x.y.z"), Some(&json!(3)));
        assert_eq!(find(row, "a.b.1.c"), None, "'a.b' is a column, and a text");
        let row = json!({"a": {"b": [1, {"c": 2}]}});
        assert_eq!(find(row.as_object().unwrap(), "a.b.1.c"), Some(&json!(2)));
        assert_eq!(find(row.as_object().unwrap(), "a.q"), None);
    }

    #[test]
    fn the_intended_name_is_suggested() {
        let names = ["question", "answer"];
        assert_eq!(
            unknown("quesiton", names.into_iter()),
            "there is no column 'quesiton'; columns are question, answer (did you mean 'question'?)"
        );
        assert_eq!(unknown("zzz", names.into_iter()), "there is no column 'zzz'; columns are question, answer");
    }
}
