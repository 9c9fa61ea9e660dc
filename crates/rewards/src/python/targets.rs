//! Parses `rewards.py:accuracy,format` or `my.module:accuracy` into files and functions, and `game.py:Wordle` into files and classes.

use std::path::{Path, PathBuf};

use serde::Serialize;

use super::PythonError;

/// The kind of thing that targets name, for the messages about targets that are not valid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wanted {
    /// The noun for each name, such as `function`.
    pub noun: &'static str,
    /// The plural of that noun.
    pub plural: &'static str,
    /// A target that is valid.
    pub example: &'static str,
}

impl Wanted {
    /// Functions that are served as rewards.
    pub const FUNCTIONS: Wanted =
        Wanted { noun: "function", plural: "functions", example: "rewards.py:accuracy,format" };
    /// Classes that are served as environments.
    pub const CLASSES: Wanted = Wanted { noun: "class", plural: "classes", example: "game.py:Wordle" };
}

/// A Python file or module, and the functions or classes in it to serve.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Target {
    /// Path of the Python file; `None` for a module on Python's search path.
    pub file: Option<PathBuf>,
    /// Name of the Python module, if the target is not a file.
    pub module: Option<String>,
    /// Directory that Python searches first for the file's imports.
    pub folder: PathBuf,
    /// The file or module as the user wrote it.
    pub shown: String,
    /// Names of the functions or classes to serve.
    pub functions: Vec<String>,
    /// SHA-256 in hexadecimal that the Python file must have.
    pub sha256: Option<String>,
}

impl Target {
    /// Creates a target for a Python file with an absolute path.
    pub fn of_file(file: &Path, functions: Vec<String>, sha256: Option<String>) -> Self {
        Self {
            file: Some(file.to_owned()),
            module: None,
            folder: file.parent().map(Path::to_owned).unwrap_or_default(),
            shown: file.file_name().unwrap_or(file.as_os_str()).to_string_lossy().into_owned(),
            functions,
            sha256,
        }
    }
}

/// Parses targets of the form `FILE_OR_MODULE:NAME,…`. Relative paths start at `directory`.
///
/// # Errors
/// Fails when a target is not valid, a file does not exist, or two names are the same.
pub fn read_targets(given: &[String], wanted: Wanted, directory: &Path) -> Result<Vec<Target>, PythonError> {
    let mut targets: Vec<Target> = Vec::new();
    for text in given {
        let target = read_target(text, wanted, directory)?;
        for name in &target.functions {
            if targets
                .iter()
                .chain([&target])
                .flat_map(|target| &target.functions)
                .filter(|other| *other == name)
                .count()
                > 1
            {
                let Wanted { plural, .. } = wanted;
                let detail = format!(
                    "two {plural} are named '{name}': endpoints are named after {plural}, so serve them in two processes"
                );
                return Err(PythonError::Setting(detail));
            }
        }
        targets.push(target);
    }
    if targets.is_empty() {
        let Wanted { noun, example, .. } = wanted;
        return Err(PythonError::Setting(format!("a {noun} is required, for example {example}")));
    }
    Ok(targets)
}

fn read_target(text: &str, wanted: Wanted, directory: &Path) -> Result<Target, PythonError> {
    let Wanted { noun, example, .. } = wanted;
    let invalid = |detail: String| Err(PythonError::Setting(detail));
    let Some((place, functions)) = text.rsplit_once(':').filter(|(place, _)| !place.is_empty()) else {
        return invalid(format!(
            "'{text}' names no {noun}: must be FILE:{}, for example {example}",
            noun.to_uppercase()
        ));
    };
    let functions: Vec<String> = functions.split(',').map(|name| name.trim().to_owned()).collect();
    if let Some(bad) = functions.iter().find(|name| !is_dotted_name(name)) {
        return invalid(format!("'{bad}' in '{text}' is not the name of a {noun}"));
    }
    let file = directory.join(place);
    let is_file = place.ends_with(".py") || place.contains('/');
    if !is_file && !file.is_file() {
        if !is_dotted_name(place) {
            return invalid(format!("'{place}' is neither a Python file (rewards.py) nor a module (my.module)"));
        }
        return Ok(Target {
            file: None,
            module: Some(place.to_owned()),
            folder: directory.to_owned(),
            shown: place.to_owned(),
            functions,
            sha256: None,
        });
    }
    match file.canonicalize() {
        Ok(path) if path.is_file() => {
            // Imports are searched in the directory of the path as the user wrote it, not in that of a symbolic link's target.
            let folder = file.parent().and_then(|folder| folder.canonicalize().ok()).unwrap_or_default();
            Ok(Target { folder, shown: place.to_owned(), ..Target::of_file(&path, functions, None) })
        }
        Ok(path) => invalid(format!("{} is a directory, but must be a Python file", path.display())),
        Err(error) => invalid(format!("{}: {error}", file.display())),
    }
}

fn is_dotted_name(name: &str) -> bool {
    let is_name = |part: &str| {
        let mut characters = part.chars();
        characters.next().is_some_and(|c| c.is_alphabetic() || c == '_')
            && characters.all(|c| c.is_alphanumeric() || c == '_')
    };
    name.split('.').all(is_name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(given: &[&str], directory: &Path) -> Result<Vec<Target>, String> {
        let given: Vec<String> = given.iter().map(|&text| text.to_owned()).collect();
        read_targets(&given, Wanted::FUNCTIONS, directory).map_err(|error| error.to_string())
    }

    #[test]
    fn files_and_modules_are_distinguished() {
        let scratch = std::env::temp_dir().join(format!("rlood-find-{}", std::process::id()));
        std::fs::create_dir_all(&scratch).unwrap();
        std::fs::write(scratch.join("rewards.py"), "").unwrap();
        let targets = read(&["rewards.py:accuracy, format", "my.module:Judge.score"], &scratch).unwrap();
        assert_eq!(targets[0].functions, ["accuracy", "format"]);
        assert_eq!(targets[0].file, Some(scratch.canonicalize().unwrap().join("rewards.py")));
        assert_eq!((targets[1].module.as_deref(), &targets[1].file), (Some("my.module"), &None));
        for (given, part) in [
            (&["rewards.py"][..], "names no function"),
            (&["nowhere.py:accuracy"], "nowhere.py: No such file"),
            (&["rewards.py:a b"], "not the name of a function"),
            (&["rewards.py:a", "other:a"], "two functions are named 'a'"),
            (&["rewards.py:a,a"], "two functions are named 'a'"),
            (&["my-module:a"], "neither a Python file"),
            (&["../:a"], "is a directory"),
            (&[], "a function is required"),
        ] {
            let error = read(given, &scratch).unwrap_err();
            assert!(error.contains(part), "{given:?}: {error}");
        }
        std::fs::remove_dir_all(&scratch).unwrap();
    }
}
