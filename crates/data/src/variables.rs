//! Finds the variables that a template or expression reads, in order, so that an error can name the column that was meant.

/// Words of the template language and its functions, which are never columns.
const WORDS: [&str; 44] = [
    "and",
    "or",
    "not",
    "in",
    "is",
    "if",
    "elif",
    "else",
    "endif",
    "for",
    "recursive",
    "endfor",
    "break",
    "continue",
    "set",
    "endset",
    "with",
    "endwith",
    "filter",
    "endfilter",
    "macro",
    "endmacro",
    "call",
    "endcall",
    "do",
    "block",
    "endblock",
    "raw",
    "endraw",
    "autoescape",
    "endautoescape",
    "true",
    "True",
    "false",
    "False",
    "none",
    "None",
    "loop",
    "caller",
    "range",
    "dict",
    "namespace",
    "self",
    "super",
];

/// Whether a setting of a mapping is a template, and not the path of a column.
pub fn is_template(text: &str) -> bool {
    text.contains("{{") || text.contains("{%")
}

/// Returns the names that a template or expression reads, in order, without those that it defines itself.
pub fn variables(source: &str) -> Vec<&str> {
    let (mut read, mut defined) = (Vec::new(), Vec::new());
    for code in code_parts(source) {
        let tokens = tokens(code);
        // Whether the next names are defined here: by `for x in`, `set x =`, `with x =` or `macro x(y)`.
        let mut defines = false;
        for (at, token) in tokens.iter().copied().enumerate() {
            let before = at.checked_sub(1).and_then(|at| tokens.get(at)).copied().unwrap_or_default();
            let after = |count: usize| tokens.get(at + count).copied().unwrap_or_default();
            match token {
                "for" | "set" | "with" | "macro" => defines = true,
                "in" | "=" => defines = false,
                _ if !is_name(token) || WORDS.contains(&token) => {}
                // An attribute, a filter, a test, or the name of an argument.
                _ if matches!(before, "." | "|" | "is" | "filter") => {}
                _ if before == "not" && at >= 2 && tokens.get(at - 2) == Some(&"is") => {}
                _ if defines => defined.push(token),
                _ if after(1) == "=" && after(2) != "=" => {}
                _ => read.push(token),
            }
        }
    }
    read.retain(|name| !defined.contains(name));
    read
}

/// Returns the parts of a template between `{{` and `}}` or `{%` and `%}`; an expression is one part.
fn code_parts(source: &str) -> Vec<&str> {
    if !is_template(source) {
        return vec![source];
    }
    let (mut parts, mut rest) = (Vec::new(), source);
    while let Some(at) = rest.find("{{").into_iter().chain(rest.find("{%")).min() {
        let (open, inside) = rest.split_at(at).1.split_at(2);
        let close = if open == "{{" { "}}" } else { "%}" };
        let (code, after) = inside.split_once(close).unwrap_or((inside, ""));
        parts.push(code);
        rest = after;
    }
    parts
}

/// Splits code into words, texts in quotes, and single other characters.
fn tokens(code: &str) -> Vec<&str> {
    let (mut tokens, mut rest) = (Vec::new(), code.trim_start());
    while let Some(first) = rest.chars().next() {
        let length = match first {
            '\'' | '"' => length_of_text(rest, first),
            _ if is_of_word(first) => rest.find(|c| !is_of_word(c)).unwrap_or(rest.len()),
            _ => first.len_utf8(),
        };
        let (token, after) = rest.split_at(length);
        tokens.push(token);
        rest = after.trim_start();
    }
    tokens
}

/// Returns the length in bytes of a text in quotes, at the beginning of the code.
fn length_of_text(code: &str, quote: char) -> usize {
    let mut is_escaped = false;
    for (at, c) in code.char_indices().skip(1) {
        match c {
            _ if is_escaped => is_escaped = false,
            '\\' => is_escaped = true,
            _ if c == quote => return at + quote.len_utf8(),
            _ => {}
        }
    }
    code.len()
}

fn is_of_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

fn is_name(token: &str) -> bool {
    token.starts_with(|c: char| c.is_alphabetic() || c == '_')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_told_from_words_filters_attributes_and_own_names() {
        for (source, expected) in [
            ("quesiton == 'answer' and kind in ['a']", &["quesiton", "kind"][..]),
            ("a.b.c | lower == \"x\" or not d", &["a", "d"]),
            ("a is defined and b is not none", &["a", "b"]),
            ("n > 5 and range(n) and not kind.startswith('it\\'s')", &["n", "n", "kind"]),
            ("{{ answer.split('####')[-1] | trim | replace(',', '') }}", &["answer"]),
            ("text {{ a }} and {% if b %}{{- c ~ d }}{% endif %} more", &["a", "b", "c", "d"]),
            ("{% for m in messages %}{{ m.role }}{{ loop.index }}{% endfor %}", &["messages"]),
            ("{% set x = y | join(attribute='z') %}{{ x }}{{ f(k=v) }}", &["y", "f", "v"]),
            ("question", &["question"]),
            ("", &[]),
        ] {
            assert_eq!(variables(source), expected, "{source}");
        }
    }
}
