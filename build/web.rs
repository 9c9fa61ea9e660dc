// The dashboard as it is sent: its modules one after another as one, its styles as one, vendored files as they are.
//
// The modules in `web/` are plain ES modules, and a browser can load them as they lie there. Sent one by one they would take a
// third more, since each is compressed by itself. So the lines that import and export are left out, as are comments and spaces that
// mean nothing; names and strings stay. For that a module's top-level names are its own: no other module has the same.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};

/// Name below `/web/`, and content. Panics, so that the build ends, on what cannot be joined.
pub fn dashboard(root: &Path) -> BTreeMap<String, Vec<u8>> {
    let read = |name: &str| fs::read_to_string(root.join(name)).unwrap_or_else(|error| panic!("web/{name}: {error}"));
    let page = read("index.html");
    let is_style = |line: &&str| line.contains("rel=\"stylesheet\"");
    let styles = page.lines().filter(is_style).filter_map(|line| line.split("/web/").nth(1)?.split('"').next());
    let style: String = styles.map(|name| dense(&bare(&read(name)))).collect();
    let mut is_first = true;
    let page: String = page
        .lines()
        .filter(|line| !is_style(line) || std::mem::take(&mut is_first))
        .map(|line| if is_style(&line) { "<link rel=\"stylesheet\" href=\"/web/app.css\">" } else { line })
        .flat_map(|line| [line, "\n"])
        .collect();
    let mut joined =
        Joined { root, seen: BTreeSet::new(), vendored: BTreeSet::new(), names: BTreeMap::new(), body: String::new() };
    joined.add("app.js");
    let vendored: String = joined.vendored.iter().map(|line| format!("{line}\n")).collect();
    let mut files = BTreeMap::from([
        ("index.html".to_owned(), page.into_bytes()),
        ("icon.svg".to_owned(), read("icon.svg").into_bytes()),
        ("app.css".to_owned(), style.into_bytes()),
        ("app.js".to_owned(), format!("{vendored}{}", dense_code(&joined.body)).into_bytes()),
    ]);
    for name in ["preact.js", "hooks.js", "htm.js", "uplot.js"].map(|name| format!("vendor/{name}")) {
        files.insert(name.clone(), read(&name).into_bytes());
    }
    files
}

struct Joined<'a> {
    root: &'a Path,
    seen: BTreeSet<String>,
    /// Their import lines.
    vendored: BTreeSet<String>,
    /// Top-level names, and whose they are.
    names: BTreeMap<String, String>,
    body: String,
}

impl Joined<'_> {
    /// A module, after those it imports.
    fn add(&mut self, module: &str) {
        if !self.seen.insert(module.to_owned()) {
            return;
        }
        let text = fs::read_to_string(self.root.join(module)).unwrap_or_else(|error| panic!("web/{module}: {error}"));
        let mut kept = String::new();
        for line in text.lines() {
            if let Some((names, from)) = import_of(line) {
                assert!(!names.contains(" as "), "web/{module}: an import is called by its own name: {line}");
                match resolved(module, from) {
                    vendored if vendored.starts_with("vendor/") => {
                        self.vendored.insert(format!("import {names} from \"./{vendored}\";"));
                    }
                    own => self.add(&own),
                }
                continue;
            }
            assert!(
                !line.starts_with("import ") && !line.contains(" import("),
                "web/{module}: one import a line, none later: {line}"
            );
            if line.starts_with("export {") {
                assert!(line.ends_with("};"), "web/{module}: an export list stands on one line: {line}");
                continue;
            }
            let line = line.strip_prefix("export default ").or(line.strip_prefix("export ")).unwrap_or(line);
            if let Some(name) = declared(line)
                && let Some(other) = self.names.insert(name.to_owned(), module.to_owned())
            {
                panic!("web/{module} and web/{other} both declare {name}: give one of them another name");
            }
            kept.push_str(line);
            kept.push('\n');
        }
        self.body.push_str(&bare(&kept));
    }
}

/// `names` and `path` of `import names from "path";`.
fn import_of(line: &str) -> Option<(&str, &str)> {
    line.strip_prefix("import ")?.strip_suffix("\";")?.split_once(" from \"")
}

/// What a line at the left edge declares.
fn declared(line: &str) -> Option<&str> {
    let line = line.strip_prefix("async ").unwrap_or(line);
    let rest = ["function ", "class ", "const ", "let "].iter().find_map(|word| line.strip_prefix(word))?;
    let end = rest.find(|letter: char| !(letter.is_alphanumeric() || letter == '_' || letter == '$'))?;
    (end > 0).then(|| &rest[..end])
}

/// `../core/ui.js` as seen from a module, from `web/`.
fn resolved(module: &str, path: &str) -> String {
    let mut parts = PathBuf::from(module);
    parts.pop();
    for part in Path::new(path).components() {
        match part {
            Component::ParentDir => drop(parts.pop()),
            Component::Normal(name) => parts.push(name),
            _ => {}
        }
    }
    parts.to_string_lossy().replace('\\', "/")
}

/// A style without the spaces that mean nothing.
fn dense(style: &str) -> String {
    let spaced = [(" {\n", "{"), (" { ", "{"), ("; }", "}"), (";\n", ";"), ("; ", ";"), (": ", ":"), (", ", ",")];
    spaced.iter().fold(style.to_owned(), |style, (spaced, dense)| style.replace(spaced, dense))
}

/// A module without the spaces and the comments behind code that mean nothing. Strings, templates and regular expressions stay.
pub fn dense_code(code: &str) -> String {
    let letters: Vec<char> = code.chars().collect();
    let mut out = String::with_capacity(code.len());
    // Of each `${` that is open how many braces are within it.
    let mut open: Vec<u32> = Vec::new();
    let mut at = 0;
    while let Some(&letter) = letters.get(at) {
        let last = out.chars().next_back().unwrap_or('\n');
        let next = letters.get(at + 1).copied().unwrap_or('\n');
        let end = match letter {
            '"' | '\'' => end_of(&letters, at + 1, letter),
            '`' => end_of_template(&letters, at + 1),
            '}' if open.last() == Some(&0) => {
                open.pop();
                end_of_template(&letters, at + 1)
            }
            '/' if next == '/' => {
                at += letters[at..].iter().position(|letter| *letter == '\n').unwrap_or(letters.len() - at);
                continue;
            }
            '/' if "(,=:[!&|?{};\n".contains(last) || out.ends_with("return") => end_of(&letters, at + 1, '/'),
            ' ' | '\n' => {
                let after = letters[at..].iter().find(|letter| !" \n".contains(**letter)).copied().unwrap_or('\n');
                let run = letters[at..].iter().take_while(|letter| " \n".contains(**letter));
                let is_line = run.clone().any(|letter| *letter == '\n');
                at += run.count();
                let is_word = |letter: char| letter.is_alphanumeric() || "_$#".contains(letter);
                let is_needed = if is_line {
                    !"{([,;".contains(last) && !"})]".contains(after)
                } else {
                    (is_word(last) && is_word(after)) || ("+-".contains(last) && last == after)
                };
                if is_needed {
                    out.push(if is_line { '\n' } else { ' ' });
                }
                continue;
            }
            '{' | '}' => {
                if let Some(depth) = open.last_mut() {
                    *depth = if letter == '{' { *depth + 1 } else { *depth - 1 };
                }
                at + 1
            }
            _ => at + 1,
        };
        out.extend(&letters[at..end]);
        at = end;
        if letter != '{' && out.ends_with("${") && "`}".contains(letter) {
            open.push(0);
        }
    }
    out
}

/// Behind the string or the regular expression that `quote` ends.
fn end_of(letters: &[char], mut at: usize, quote: char) -> usize {
    let mut in_class = false;
    while let Some(&letter) = letters.get(at) {
        match letter {
            '\\' => at += 1,
            '[' if quote == '/' => in_class = true,
            ']' => in_class = false,
            letter if letter == quote && !in_class => return at + 1,
            _ => {}
        }
        at += 1;
    }
    at
}

/// Behind the template's end, or behind the next `${`.
fn end_of_template(letters: &[char], mut at: usize) -> usize {
    while let Some(&letter) = letters.get(at) {
        match letter {
            '\\' => at += 1,
            '`' => return at + 1,
            '$' if letters.get(at + 1) == Some(&'{') => return at + 2,
            _ => {}
        }
        at += 1;
    }
    at
}

/// Without lines that are comments and without indentation; a comment begins its line (`//`, or `/*` to a `*/` that ends one).
pub fn bare(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut is_comment = false;
    for line in text.lines().map(str::trim) {
        is_comment |= line.starts_with("/*");
        if !is_comment && !line.starts_with("//") && !line.is_empty() {
            out.push_str(line);
            out.push('\n');
        }
        is_comment &= !line.ends_with("*/");
    }
    out
}
