// The dashboard as it is sent: its modules and the vendored ones one after another as one, its styles as one.
//
// The modules in `web/` are plain ES modules, and a browser can load them as they lie there. Sent one by one they would take a
// third more, since each is compressed by itself. So the lines that import and export are left out, each vendored module becomes
// a function of its own that returns what is asked of it, and what comes of that is minified. For that a module's top-level names
// are its own: no other module has the same.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};

use oxc::allocator::Allocator;
use oxc::codegen::{Codegen, CodegenOptions, CommentOptions, LegalComment};
use oxc::minifier::{CompressOptions, MangleOptions, Minifier, MinifierOptions};
use oxc::parser::Parser;
use oxc::span::SourceType;

/// In the order in which they stand in the joined module: later ones may import from earlier ones.
const VENDORED: [&str; 4] = ["preact.js", "hooks.js", "htm.js", "uplot.js"];

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
        Joined { root, seen: BTreeSet::new(), asked: BTreeMap::new(), names: BTreeMap::new(), body: String::new() };
    joined.add("app.js");
    let vendored = joined.vendored();
    BTreeMap::from([
        ("index.html".to_owned(), page.into_bytes()),
        ("icon.svg".to_owned(), read("icon.svg").into_bytes()),
        ("app.css".to_owned(), style.into_bytes()),
        ("app.js".to_owned(), minified(&format!("{vendored}{}", joined.body)).into_bytes()),
    ])
}

struct Joined<'a> {
    root: &'a Path,
    seen: BTreeSet<String>,
    /// What is imported from each vendored module.
    asked: BTreeMap<String, BTreeSet<String>>,
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
                        self.ask(&vendored["vendor/".len()..], names, module)
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
        self.body.push_str(&bare(&kept).replace("\n<", "<").replace(">\n", ">"));
    }

    /// `{ h, render }` or a name for what is exported by default.
    fn ask(&mut self, vendored: &str, names: &str, module: &str) {
        for name in names.trim_matches(['{', '}', ' ']).split(", ") {
            let owner = self.names.insert(name.to_owned(), format!("vendor/{vendored}"));
            let is_known = owner.as_deref().is_none_or(|owner| owner == format!("vendor/{vendored}"));
            assert!(is_known, "web/{module}: {name} of vendor/{vendored} is also declared by web/{owner:?}");
            self.asked.entry(vendored.to_owned()).or_default().insert(name.to_owned());
        }
    }

    /// The vendored modules, each in a function of its own: `const { h, render } = (() => { …; return { h: k, render: Q }; })();`.
    fn vendored(&mut self) -> String {
        let texts = VENDORED.map(|name| {
            let path = self.root.join("vendor").join(name);
            fs::read_to_string(path).unwrap_or_else(|error| panic!("web/vendor/{name}: {error}"))
        });
        // What they import of each other: `import{options as n}from"./preact.js";`, at the beginning.
        let texts =
            texts.map(|text| match text.strip_prefix("import{").and_then(|rest| rest.split_once("}from\"./")) {
                Some((names, rest)) => {
                    let (from, body) = rest.split_once("\";").expect("an import ends");
                    let aliases: String = names
                        .split(',')
                        .map(|name| {
                            let (name, alias) = name.split_once(" as ").unwrap_or((name, name));
                            self.ask(from, name, "vendor");
                            format!("const {alias} = {name};\n")
                        })
                        .collect();
                    format!("{aliases}{body}")
                }
                None => text,
            });
        let mut out = String::new();
        for (file, text) in VENDORED.iter().zip(texts) {
            let asked = self.asked.get(*file).unwrap_or_else(|| panic!("nobody asks for web/vendor/{file}"));
            let (header, text) = match text.strip_prefix("/*").and_then(|rest| rest.split_once("*/")) {
                Some((words, rest)) => (format!("/*{words}*/\n"), rest.to_owned()),
                None => (String::new(), text),
            };
            let (body, names) = match text.trim_end().strip_suffix("};").and_then(|text| text.rsplit_once("export{")) {
                Some((body, exports)) => {
                    let exported: BTreeMap<&str, &str> = exports
                        .split(',')
                        .map(|one| one.split_once(" as ").map_or((one, one), |(own, name)| (name, own)))
                        .collect();
                    let returned: Vec<String> = asked
                        .iter()
                        .map(|name| {
                            let own = exported.get(name.as_str());
                            format!("{name}: {}", own.unwrap_or_else(|| panic!("web/vendor/{file} has no {name}")))
                        })
                        .collect();
                    let names: Vec<&str> = asked.iter().map(String::as_str).collect();
                    (format!("{body}return {{ {} }};", returned.join(", ")), format!("{{ {} }}", names.join(", ")))
                }
                None => {
                    assert!(asked.len() == 1 && text.contains("export default "), "web/vendor/{file}");
                    (text.replacen("export default ", "return ", 1), asked.iter().cloned().collect())
                }
            };
            out.push_str(&format!("{header}const {names} = (() => {{\n{body}\n}})();\n"));
        }
        out
    }
}

/// A module in as few letters as mean the same.
fn minified(code: &str) -> String {
    let allocator = Allocator::default();
    let parsed = Parser::new(&allocator, code, SourceType::mjs()).parse();
    assert!(parsed.diagnostics.is_empty(), "the dashboard's modules are no JavaScript: {:?}", parsed.diagnostics);
    let mut program = parsed.program;
    let options = MinifierOptions {
        mangle: Some(MangleOptions { top_level: Some(true), ..MangleOptions::default() }),
        mangle_properties: None,
        compress: Some(CompressOptions::default()),
    };
    let done = Minifier::new(options).minify(&allocator, &mut program);
    // Of comments those with a licence.
    let comments = CommentOptions { legal: LegalComment::Inline, ..CommentOptions::disabled() };
    let options = CodegenOptions { comments, ..CodegenOptions::minify() };
    Codegen::new().with_options(options).with_scoping(done.scoping).build(&program).code
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

/// Without lines that are comments and without indentation, which templates would keep; a comment begins its line (`//`, or `/*` to a `*/` that ends one).
fn bare(text: &str) -> String {
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
