//! Chooses the files of a dataset's split in a Hub repository: from the YAML in the README, else from the file names.

use serde::Deserialize;
use serde_json::Value;

use super::columns::nearest;
use super::glob::matches;

/// Extensions of the supported data files, each also with .gz or .zst.
const READABLE: [&str; 7] = ["parquet", "jsonl", "ndjson", "jsonlines", "json", "csv", "tsv"];
/// Extensions of data files that are not supported; the error lists them.
const UNREADABLE: [&str; 7] = ["arrow", "txt", "bz2", "xz", "zip", "tar", "webdataset"];
/// Words for splits in folder and file names, as the library `datasets` 5.2.0 knows them (data_files.py).
const SPLITS: [(&str, &[&str]); 3] = [
    ("train", &["train", "training"]),
    ("validation", &["validation", "valid", "dev", "val"]),
    ("test", &["test", "testing", "eval", "evaluation"]),
];

/// The files chosen for a dataset's split.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chosen {
    /// The configuration's name; `default` if the repository names none.
    pub config: String,
    /// The name of the split.
    pub split: String,
    /// The split's files, sorted by name.
    pub files: Vec<String>,
}

/// The reason why no files can be chosen for a dataset.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CannotChoose {
    /// The request field at fault: `config`, `split` or `hub`.
    pub field: &'static str,
    /// Why no files can be chosen, and which configurations or splits exist.
    pub detail: String,
    /// True if the repository's data is in no supported format, or a script describes it: the hub may offer a converted copy.
    pub is_unreadable: bool,
}

#[derive(Debug, Deserialize)]
struct Card {
    #[serde(default)]
    configs: Vec<Config>,
}

#[derive(Debug, Deserialize)]
struct Config {
    #[serde(default = "default_name")]
    config_name: String,
    #[serde(default)]
    default: bool,
    #[serde(default)]
    data_files: Value,
    #[serde(default)]
    data_dir: Option<String>,
}

fn default_name() -> String {
    "default".to_owned()
}

/// A configuration's splits, each with its file names or patterns of file names.
struct Layout {
    config: String,
    is_default: bool,
    splits: Vec<(String, Vec<String>)>,
}

/// Chooses the files of a split of a dataset's configuration.
///
/// # Errors
/// Fails if the configuration or split must be named, does not exist, or has no supported format. The
/// message lists the choices.
pub fn choose(
    readme: Option<&str>,
    files: &[String],
    config: Option<&str>,
    split: Option<&str>,
) -> Result<Chosen, CannotChoose> {
    let mut layouts = layouts_from_readme(readme.unwrap_or_default(), files);
    let is_guess = layouts.iter().all(|layout| layout.splits.iter().all(|(_, files)| files.is_empty()));
    if is_guess {
        layouts = vec![Layout { config: default_name(), is_default: true, splits: splits_from_names(files) }];
    }
    // Without a readable file, the names of configurations and splits are not known: those of the converted copy count.
    let mut all = layouts.iter().flat_map(|layout| &layout.splits).flat_map(|(_, files)| files);
    if !all.any(|file| is_readable(file)) {
        return Err(unreadable(files));
    }
    // A loading script may define other configurations and splits than the file names suggest.
    let has_script = is_guess && files.iter().any(|file| !file.contains('/') && file.ends_with(".py"));
    let or_converted = |error: CannotChoose| CannotChoose { is_unreadable: has_script, ..error };
    let layout = choose_config(&layouts, config).map_err(or_converted)?;
    let (split, chosen) = choose_split(layout, split).map_err(or_converted)?;
    let mut chosen: Vec<String> = chosen.iter().filter(|file| is_readable(file)).cloned().collect();
    chosen.sort();
    chosen.dedup();
    if chosen.is_empty() {
        return Err(unreadable(files));
    }
    Ok(Chosen { config: layout.config.clone(), split: split.to_owned(), files: chosen })
}

fn unreadable(files: &[String]) -> CannotChoose {
    let found: Vec<&str> = files.iter().filter(|file| is_data(file)).map(String::as_str).take(5).collect();
    let detail = match found.is_empty() {
        true => "the repository holds no data files (parquet, jsonl, json, csv or tsv)".to_owned(),
        false => format!(
            "the repository's data format is not supported ({}); supported are parquet, jsonl, json, csv and tsv, \
             also with .gz or .zst",
            found.join(", ")
        ),
    };
    CannotChoose { field: "hub", detail, is_unreadable: true }
}

fn choose_config<'l>(layouts: &'l [Layout], config: Option<&str>) -> Result<&'l Layout, CannotChoose> {
    let names = || layouts.iter().map(|layout| layout.config.as_str());
    let list = || names().map(|name| format!("'{name}'")).collect::<Vec<_>>().join(", ");
    let refuse = |detail: String| Err(CannotChoose { field: "config", detail, is_unreadable: false });
    match (config, layouts) {
        (Some(config), _) => match layouts.iter().find(|layout| layout.config == config) {
            Some(layout) => Ok(layout),
            None => {
                let meant =
                    nearest(config, names()).map_or_else(String::new, |near| format!(" (did you mean '{near}'?)"));
                refuse(format!("there is no config '{config}'; there are {}{meant}", list()))
            }
        },
        (None, [only]) => Ok(only),
        (None, several) => match several.iter().find(|layout| layout.is_default || layout.config == "default") {
            Some(layout) => Ok(layout),
            None => refuse(format!(
                "config {} must be chosen",
                names().map(|name| format!("'{name}'")).collect::<Vec<_>>().join(" or ")
            )),
        },
    }
}

fn choose_split<'l>(layout: &'l Layout, split: Option<&str>) -> Result<(&'l str, &'l [String]), CannotChoose> {
    let names = || layout.splits.iter().map(|(name, _)| name.as_str());
    let list = || names().collect::<Vec<_>>().join(", ");
    let refuse = |detail: String| Err(CannotChoose { field: "split", detail, is_unreadable: false });
    let wanted = match split {
        Some(split) => split,
        None if layout.splits.len() == 1 => {
            return Ok(layout.splits.first().map_or(("train", &[]), |(name, files)| (name, files)));
        }
        None => "train",
    };
    match layout.splits.iter().find(|(name, _)| name == wanted) {
        Some((name, files)) => Ok((name, files)),
        None if layout.splits.is_empty() => Ok(("train", &[])),
        None if split.is_none() => refuse(format!(
            "split {} must be chosen",
            names().map(|name| format!("'{name}'")).collect::<Vec<_>>().join(" or ")
        )),
        None => {
            let meant = nearest(wanted, names()).map_or_else(String::new, |near| format!(" (did you mean '{near}'?)"));
            refuse(format!("there is no split '{wanted}'; splits are {}{meant}", list()))
        }
    }
}

/// Reads the configurations from the YAML between the `---` lines of a README.
fn layouts_from_readme(readme: &str, files: &[String]) -> Vec<Layout> {
    let front = readme.trim_start_matches('\u{feff}').strip_prefix("---").and_then(|rest| rest.split_once("\n---"));
    let Some((yaml, _)) = front else { return Vec::new() };
    let Ok(Card { configs }) = serde_saphyr::from_str::<Card>(yaml) else { return Vec::new() };
    configs
        .into_iter()
        .map(|Config { config_name, default, data_files, data_dir }| {
            let dir = data_dir.as_deref().map(|dir| dir.trim_matches('/')).filter(|dir| !dir.is_empty());
            let within = |pattern: &str| dir.map_or_else(|| pattern.to_owned(), |dir| format!("{dir}/{pattern}"));
            let matching = |patterns: &[String]| {
                let patterns: Vec<String> = patterns.iter().map(|pattern| within(pattern)).collect();
                files.iter().filter(|file| patterns.iter().any(|pattern| matches(pattern, file))).cloned().collect()
            };
            let splits: Vec<(String, Vec<String>)> = match patterns_of(&data_files) {
                Some(splits) => splits.into_iter().map(|(name, patterns)| (name, matching(&patterns))).collect(),
                None => {
                    let inside = |file: &&String| dir.is_none_or(|dir| file.starts_with(&format!("{dir}/")));
                    splits_from_names(&files.iter().filter(inside).cloned().collect::<Vec<_>>())
                }
            };
            Layout { config: config_name, is_default: default, splits }
        })
        .collect()
}

/// Parses the field `data_files` of a README's YAML: a pattern of file names, a list of patterns, or `[{split, path}]`.
fn patterns_of(data_files: &Value) -> Option<Vec<(String, Vec<String>)>> {
    let texts = |value: &Value| -> Vec<String> {
        match value {
            Value::String(text) => vec![text.clone()],
            Value::Array(items) => items.iter().filter_map(|item| item.as_str().map(str::to_owned)).collect(),
            _ => Vec::new(),
        }
    };
    match data_files {
        Value::Null => None,
        Value::Array(items) if items.iter().any(Value::is_object) => {
            let split = |item: &Value| item.get("split").and_then(Value::as_str).unwrap_or("train").to_owned();
            let mut splits: Vec<(String, Vec<String>)> = Vec::new();
            for item in items {
                let (name, paths) = (split(item), texts(&item["path"]));
                match splits.iter_mut().find(|(known, _)| *known == name) {
                    Some((_, known)) => known.extend(paths),
                    None => splits.push((name, paths)),
                }
            }
            Some(splits)
        }
        Value::Object(by_split) => Some(by_split.iter().map(|(name, paths)| (name.clone(), texts(paths))).collect()),
        one => Some(vec![("train".to_owned(), texts(one))]),
    }
}

/// Guesses the splits from the file names as the library `datasets` does: from `data/{split}-00000-of-00001.*`, then from words in
/// folder names, then in file names; else all files are `train`.
fn splits_from_names(files: &[String]) -> Vec<(String, Vec<String>)> {
    let data: Vec<&String> = files.iter().filter(|file| is_data(file)).collect();
    let guesses: [fn(&str) -> Option<String>; 3] = [split_of_shard, split_of_folder, split_of_name];
    for guess in guesses {
        let mut splits: Vec<(String, Vec<String>)> = Vec::new();
        for file in &data {
            let Some(split) = guess(file) else { continue };
            match splits.iter_mut().find(|(known, _)| *known == split) {
                Some((_, files)) => files.push((*file).clone()),
                None => splits.push((split, vec![(*file).clone()])),
            }
        }
        if !splits.is_empty() {
            return splits;
        }
    }
    match data.is_empty() {
        true => Vec::new(),
        false => vec![("train".to_owned(), data.into_iter().cloned().collect())],
    }
}

/// Returns the split that the name of a numbered file contains, such as `data/train_prefs-00000-of-00004.parquet`.
fn split_of_shard(file: &str) -> Option<String> {
    let name = file.rsplit('/').next()?;
    let (before, total) = name.rsplit_once("-of-")?;
    let (split, number) = before.rsplit_once('-')?;
    let digits = |text: &str| text.len() >= 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    let is_shard = digits(number) && digits(total.split('.').next()?);
    (is_shard && !split.is_empty()).then(|| split.to_owned())
}

fn split_of_folder(file: &str) -> Option<String> {
    let (folders, _) = file.rsplit_once('/')?;
    folders.split('/').find_map(split_of)
}

fn split_of_name(file: &str) -> Option<String> {
    split_of(file.rsplit('/').next()?)
}

/// Finds a word that stands for a split, such as `train` or `dev`, between `- . _`, blanks and digits of a name.
fn split_of(text: &str) -> Option<String> {
    let lower = text.to_ascii_lowercase();
    let words: Vec<&str> = lower.split(|c: char| !c.is_ascii_alphabetic()).collect();
    let known = SPLITS.iter().find(|(_, names)| names.iter().any(|name| words.contains(name)));
    known.map(|(split, _)| (*split).to_owned())
}

fn ending(file: &str) -> Option<&str> {
    let name = file.rsplit('/').next()?;
    let inner = name.strip_suffix(".gz").or_else(|| name.strip_suffix(".zst")).unwrap_or(name);
    Some(inner.rsplit_once('.')?.1)
}

fn is_readable(file: &str) -> bool {
    ending(file).is_some_and(|ending| READABLE.contains(&ending)) && is_data(file)
}

/// Whether a file of a repository contains rows, and is not a description such as `dataset_infos.json`.
fn is_data(file: &str) -> bool {
    let name = file.rsplit('/').next().unwrap_or(file);
    let described =
        ["dataset_infos.json", "dataset_info.json", "state.json", "config.json", "requirements.txt", "LICENSE.txt"];
    if name.starts_with('.') || described.contains(&name) {
        return false;
    }
    ending(file).is_some_and(|ending| READABLE.contains(&ending) || UNREADABLE.contains(&ending))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    fn chosen(readme: &str, names: &[&str], config: Option<&str>, split: Option<&str>) -> Result<Chosen, String> {
        choose(Some(readme), &files(names), config, split).map_err(|error| error.detail)
    }

    const GSM8K: &str = "---\nlicense: mit\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train-*\n  - split: test\n    path: main/test-*\n- config_name: socratic\n  data_files:\n  - split: train\n    path: socratic/train-*\n---\n# GSM8K\n";
    const GSM8K_FILES: [&str; 4] = [
        "README.md",
        "main/train-00000-of-00001.parquet",
        "main/test-00000-of-00001.parquet",
        "socratic/train-00000-of-00001.parquet",
    ];

    #[test]
    fn the_readme_s_yaml_says_which_files_are_a_split() {
        let train = chosen(GSM8K, &GSM8K_FILES, Some("main"), Some("train")).unwrap();
        assert_eq!(train.files, ["main/train-00000-of-00001.parquet"]);
        assert_eq!(chosen(GSM8K, &GSM8K_FILES, Some("main"), None).unwrap().split, "train");
        let none = chosen(GSM8K, &GSM8K_FILES, None, None).unwrap_err();
        assert_eq!(none, "config 'main' or 'socratic' must be chosen");
        let other = chosen(GSM8K, &GSM8K_FILES, Some("mian"), None).unwrap_err();
        assert_eq!(other, "there is no config 'mian'; there are 'main', 'socratic' (did you mean 'main'?)");
        let split = chosen(GSM8K, &GSM8K_FILES, Some("main"), Some("trian")).unwrap_err();
        assert_eq!(split, "there is no split 'trian'; splits are train, test (did you mean 'train'?)");
        let default = "---\nconfigs:\n- config_name: a\n  data_files: a.csv\n- config_name: b\n  default: true\n  data_files: ['b/*.json']\n---\n";
        let b = chosen(default, &["a.csv", "b/1.json", "b/2.json", "b/c/3.json"], None, None).unwrap();
        assert_eq!((b.config.as_str(), b.files), ("b", files(&["b/1.json", "b/2.json"])));
        let dir = "---\nconfigs:\n- config_name: x\n  data_dir: x\n---\n";
        let x = chosen(dir, &["x/train.csv", "x/test.csv", "y/train.csv"], None, Some("test")).unwrap();
        assert_eq!(x.files, ["x/test.csv"]);
    }

    #[test]
    fn without_yaml_splits_are_guessed_as_the_library_datasets_does() {
        for (names, split, expected) in [
            (
                &[
                    "data/train-00000-of-00002.parquet",
                    "data/train-00001-of-00002.parquet",
                    "data/test-00000-of-00001.parquet",
                ][..],
                None,
                &["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"][..],
            ),
            (
                &["data/train_prefs-00000-of-00001.parquet", "data/test_prefs-00000-of-00001.parquet"],
                Some("train_prefs"),
                &["data/train_prefs-00000-of-00001.parquet"],
            ),
            (
                &["helpful-base/train.jsonl.gz", "helpful-base/test.jsonl.gz"],
                Some("test"),
                &["helpful-base/test.jsonl.gz"],
            ),
            (&["dev/a.csv", "train/b.csv"], Some("validation"), &["dev/a.csv"]),
            (&["deepscaler.json", "README.md", "dataset_infos.json"], None, &["deepscaler.json"]),
        ] {
            assert_eq!(chosen("", names, None, split).unwrap().files, expected, "{names:?}");
        }
        let prefs = ["data/train_prefs-00000-of-00001.parquet", "data/test_prefs-00000-of-00001.parquet"];
        assert_eq!(chosen("", &prefs, None, None).unwrap_err(), "split 'train_prefs' or 'test_prefs' must be chosen");
    }

    #[test]
    fn unsupported_data_is_distinguished_from_no_data() {
        let error = choose(None, &files(&["data-00000-of-00001.arrow", "state.json"]), None, None).unwrap_err();
        assert!(error.is_unreadable && error.detail.contains("data-00000-of-00001.arrow"), "{error:?}");
        let error = choose(None, &files(&["README.md", "script.py"]), None, None).unwrap_err();
        assert!(error.detail.contains("no data files"), "{error:?}");
        // The configurations and splits of unreadable files are not known, so a requested one is no error.
        for names in [&["data.zip"][..], &["script.py"], &["data-00000-of-00001.arrow"]] {
            for (config, split) in [(Some("main"), None), (None, Some("test")), (Some("main"), Some("test"))] {
                let error = choose(None, &files(names), config, split).unwrap_err();
                assert!(error.is_unreadable && error.field == "hub", "{names:?} {config:?} {split:?}: {error:?}");
            }
        }
        // A script may define what the names of readable files do not suggest.
        let error = choose(None, &files(&["rows.py", "extra.csv"]), Some("main"), None).unwrap_err();
        assert!(error.is_unreadable && error.detail.contains("there is no config 'main'"), "{error:?}");
        let error = choose(None, &files(&["train.csv"]), Some("main"), None).unwrap_err();
        assert!(!error.is_unreadable, "{error:?}");
    }
}
