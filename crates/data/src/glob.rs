//! Patterns of file names, as the READMEs of datasets use them.

/// Maximum length of a pattern and of a file name, in bytes.
const MAX_PATTERN: usize = 1024;
/// Maximum number of alternatives that the braces of one pattern may expand to.
const MAX_ALTERNATIVES: usize = 64;

/// Matches a file name against a pattern: `*` within a name, `**` across folders, `?`, `[a-z]`, `{a,b}`, an exact path,
/// or a folder for everything in it.
pub fn matches(pattern: &str, file: &str) -> bool {
    let pattern = pattern.trim_start_matches("./").trim_end_matches('/');
    if pattern.len() > MAX_PATTERN {
        return false;
    }
    alternatives(pattern)
        .iter()
        .any(|pattern| glob(pattern.as_bytes(), file.as_bytes()) || file.starts_with(&format!("{pattern}/")))
}

/// Expands `{a,b}`, up to [`MAX_ALTERNATIVES`]; braces inside braces are literal characters.
fn alternatives(pattern: &str) -> Vec<String> {
    let mut written = vec![String::new()];
    let mut rest = pattern;
    while let Some((before, after)) = rest.split_once('{') {
        let Some((choices, behind)) = after.split_once('}').filter(|(choices, _)| choices.contains(',')) else { break };
        let choices: Vec<&str> = choices.split(',').collect();
        if written.len() * choices.len() > MAX_ALTERNATIVES {
            break;
        }
        written = written
            .iter()
            .flat_map(|start| choices.iter().map(move |choice| format!("{start}{before}{choice}")))
            .collect();
        rest = behind;
    }
    written.iter().map(|start| format!("{start}{rest}")).collect()
}

/// Matches a pattern without backtracking, in time proportional to pattern length times text length: after each piece of the
/// pattern, the set of positions in the text where a match may end is known.
fn glob(mut pattern: &[u8], text: &[u8]) -> bool {
    if pattern.len() > MAX_PATTERN || text.len() > MAX_PATTERN {
        return false;
    }
    let mut ends = vec![false; text.len() + 1];
    if let Some(first) = ends.first_mut() {
        *first = true;
    }
    let before = |at: usize| at.checked_sub(1).and_then(|at| text.get(at)).copied();
    while let Some((piece, rest)) = next_piece(pattern) {
        let mut next = vec![false; ends.len()];
        let mut reached = false;
        for at in 0..ends.len() {
            let here = ends.get(at).copied().unwrap_or_default();
            let came = at.checked_sub(1).and_then(|at| ends.get(at)).copied().unwrap_or_default();
            let ended = match piece {
                Piece::Byte(byte) => came && before(at) == Some(byte),
                Piece::One => came && before(at).is_some_and(|byte| byte != b'/'),
                Piece::Class { bytes, is_without } => {
                    came && before(at).is_some_and(|byte| byte != b'/' && in_class(bytes, byte) != is_without)
                }
                Piece::Name => {
                    reached = here || (reached && before(at) != Some(b'/'));
                    reached
                }
                Piece::Deep => {
                    reached |= here;
                    reached
                }
                // The pattern `**/` matches the empty text or whole folders.
                Piece::Folders => {
                    let ended = here || (reached && before(at) == Some(b'/'));
                    reached |= here;
                    ended
                }
            };
            if let Some(place) = next.get_mut(at) {
                *place = ended;
            }
        }
        (ends, pattern) = (next, rest);
    }
    ends.last().copied().unwrap_or_default()
}

/// A piece of a file name pattern.
enum Piece<'p> {
    Byte(u8),
    One,
    /// A character class: `[a-z_]` or `[!a-z]`.
    Class {
        bytes: &'p [u8],
        is_without: bool,
    },
    Name,
    Deep,
    Folders,
}

fn next_piece(pattern: &[u8]) -> Option<(Piece<'_>, &[u8])> {
    if let [b'[', class @ ..] = pattern
        && let Some(end) = class.iter().skip(1).position(|byte| *byte == b']').map(|at| at + 1)
        && let Some((bytes, [_, rest @ ..])) = class.split_at_checked(end)
    {
        return Some(match bytes {
            [b'!' | b'^', bytes @ ..] => (Piece::Class { bytes, is_without: true }, rest),
            bytes => (Piece::Class { bytes, is_without: false }, rest),
        });
    }
    Some(match pattern {
        [] => return None,
        [b'*', b'*', b'/', rest @ ..] => (Piece::Folders, rest),
        [b'*', b'*', rest @ ..] => (Piece::Deep, rest),
        [b'*', rest @ ..] => (Piece::Name, rest),
        [b'?', rest @ ..] => (Piece::One, rest),
        [byte, rest @ ..] => (Piece::Byte(*byte), rest),
    })
}

/// Whether a byte is one of a class's characters, or within one of its ranges.
fn in_class(class: &[u8], byte: u8) -> bool {
    match class {
        [] => false,
        [from, b'-', to, rest @ ..] => (*from..=*to).contains(&byte) || in_class(rest, byte),
        [one, rest @ ..] => *one == byte || in_class(rest, byte),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_as_in_a_shell_and_in_no_time() {
        for (pattern, file, expected) in [
            ("data/*.csv", "data/a.csv", true),
            ("data/*.csv", "data/b/a.csv", false),
            ("**/a.csv", "a.csv", true),
            ("**/a.csv", "x/y/a.csv", true),
            ("**/a.csv", "x/ya.csv", false),
            ("data/**", "data/x/y.csv", true),
            ("data", "data/x.csv", true),
            ("tr?in.csv", "train.csv", true),
            ("main/train-*", "main/train-00000-of-00001.parquet", true),
            ("*", "a/b", false),
            ("data/train-[0-9]*.csv", "data/train-07.csv", true),
            ("data/train-[0-9]*.csv", "data/train-x.csv", false),
            ("data/[!a-c_]*.csv", "data/d.csv", true),
            ("data/[!a-c_]*.csv", "data/_.csv", false),
            ("data/[a-", "data/[a-", true),
            ("data/[]x].csv", "data/].csv", true),
            ("data/{train,dev}-*.{csv,jsonl}", "data/dev-1.jsonl", true),
            ("data/{train,dev}-*.{csv,jsonl}", "data/test-1.jsonl", false),
            ("data/{train}.csv", "data/{train}.csv", true),
            ("{a,b}", "b/x.csv", true),
            ("a*b*c", "a__b__c", true),
            ("a*b*c", "a__b__", false),
        ] {
            assert_eq!(matches(pattern, file), expected, "{pattern} {file}");
        }
        let begun = std::time::Instant::now();
        assert!(!matches(&"*a".repeat(300), &"a".repeat(600).replace("aaaa", "aaab")));
        assert!(!matches(&"**".repeat(200_000), "a"));
        assert!(!matches(&"{a,b}".repeat(200), &"ab".repeat(100)));
        assert!(begun.elapsed().as_secs() < 2);
    }
}
