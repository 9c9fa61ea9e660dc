//! The table of `docs/reference/models.md`: which sections the test `parity` checked for each case, and the largest differences.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

use crate::parity::Worst;

const BEGIN: &str = "<!-- written by the suite parity: begin -->\n";
const END: &str = "<!-- written by the suite parity: end -->\n";
const BLESS: &str = "RLOOD_BLESS=1 cargo test --release -p rlood-engine --test it -- parity";

/// The sections of expected.json that most cases have, and a config.json of transformers 4.
const USUAL: [&str; 11] = [
    "tokenizer",
    "chat",
    "logits_check",
    "completions",
    "padded_batch",
    "temperature_logprobs",
    "greedy",
    "lora",
    "reinforce",
    "adamw",
    "config_v4.json",
];

/// The numeric columns: heading, name in `parity`, and the smallest value of a written difference that counts. After
/// AdamW's first step the difference may be a thousand times larger on another machine: the step moves a weight up or
/// down by the learning rate, and if the gradient is nearly 0, rounding decides the direction.
const COLUMNS: [(&str, &str, f64); 5] = [
    ("logits", "logits", 1e-7),
    ("log-probs", "logps", 1e-7),
    ("LoRA log-probs", "lora logps", 1e-7),
    ("gradient", "gradient", 1e-7),
    ("after AdamW", "adamw", 1e-4),
];

/// Allowed ratio of a measured to the written difference, because machines round differently.
const ROUNDING: f64 = 10.0;

/// A row of the table.
#[derive(Debug)]
pub struct Row {
    case: String,
    model_type: String,
    checked: String,
    /// Differences by column, on the CPU and on the reference backend; None = not part of the case.
    differences: Vec<Option<[f64; 2]>>,
}

impl Row {
    /// Creates the row of a case that agrees, with its largest differences on the CPU and on the reference backend.
    pub fn new(dir: &Path, worst: [Option<Worst>; 2]) -> Row {
        let of_column = |(_, key, _): &(&str, &str, f64)| {
            let [cpu, reference] = worst.each_ref().map(|worst| worst.as_ref()?.get(key).copied());
            Some([cpu?, reference?])
        };
        Row {
            case: dir.file_name().unwrap().to_string_lossy().into_owned(),
            model_type: model_type(dir),
            checked: checked(dir),
            differences: COLUMNS.iter().map(of_column).collect(),
        }
    }

    fn written(&self) -> String {
        let cell =
            |pair: &Option<[f64; 2]>| pair.map_or("–".to_owned(), |[cpu, other]| format!("{cpu:.1e} / {other:.1e}"));
        let cells: Vec<String> = self.differences.iter().map(cell).collect();
        format!("| {} | {} | {} | {} |\n", self.case, self.model_type, self.checked, cells.join(" | "))
    }

    /// Compares the row with the one written on the page; the error says what differs.
    fn check(&self, written: &[&str]) -> Result<(), String> {
        let [model_type, checked, cells @ ..] = written else { return Err("it has too few columns".to_owned()) };
        if (*model_type, *checked) != (self.model_type.as_str(), self.checked.as_str()) {
            return Err(format!("{model_type}, {checked} instead of {}, {}", self.model_type, self.checked));
        }
        for (((name, _, least), pair), cell) in COLUMNS.iter().zip(&self.differences).zip(cells) {
            let limits: Vec<f64> = cell.split(" / ").filter_map(|number| number.parse().ok()).collect();
            let numbers: &[f64] = pair.as_ref().map_or(&[], |pair| pair);
            let is_within = |(number, limit): (&f64, &f64)| *number <= ROUNDING * limit.max(*least);
            if numbers.len() != limits.len() || !numbers.iter().zip(&limits).all(is_within) {
                return Err(format!("{name}: {cell} instead of {numbers:?}"));
            }
        }
        Ok(())
    }
}

fn read(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// The model_type of config.json, with that of its text part.
fn model_type(dir: &Path) -> String {
    let config = read(&dir.join("config.json"));
    let family = rlood_model_files::read(dir).unwrap().config.family;
    match config["model_type"].as_str() {
        Some(whole) if whole != family => format!("{whole}, text {family}"),
        _ => family.to_owned(),
    }
}

/// Describes the sections of a case relative to the usual ones.
fn checked(dir: &Path) -> String {
    let expected = read(&dir.join("expected.json"));
    let sections =
        expected.as_object().unwrap().iter().filter(|(_, value)| !value.is_null()).map(|(name, _)| name.as_str());
    let mut sections: Vec<&str> = sections.filter(|name| *name != "meta").collect();
    if dir.join("config_v4.json").exists() {
        sections.push("config_v4.json");
    }
    let more: Vec<&str> = sections.iter().filter(|name| !USUAL.contains(name)).copied().collect();
    let missing: Vec<&str> = USUAL.into_iter().filter(|name| !sections.contains(name)).collect();
    let listed = |before: &str, names: &[&str]| match names {
        [] => String::new(),
        names => format!("{before} {}", names.join(", ")),
    };
    format!("all{}{}", listed(" and", &more), listed(" but", &missing))
}

fn table(rows: &[Row]) -> String {
    let names: Vec<&str> = COLUMNS.iter().map(|(name, ..)| *name).collect();
    let head = format!(
        "| case | model_type | checked | {} |\n|---|---|---|{}\n",
        names.join(" | "),
        "---|".repeat(names.len())
    );
    head + &rows.iter().map(Row::written).collect::<String>()
}

/// Parses the rows of a written table, by case; the first two lines are its head.
fn written_rows(table: &str) -> BTreeMap<&str, Vec<&str>> {
    let rows =
        table.lines().skip(2).map(|line| line.trim_matches('|').split('|').map(str::trim).collect::<Vec<&str>>());
    rows.map(|cells| (cells[0], cells[1..].to_vec())).collect()
}

/// Compares the page's table with the results, or writes it if `RLOOD_BLESS` is set.
pub fn check(rows: &[Row]) {
    let path = rlood_test_support::in_repository("docs/reference/models.md");
    let page = std::fs::read_to_string(&path).unwrap();
    let (before, rest) = page.split_once(BEGIN).unwrap();
    let (written, after) = rest.split_once(END).unwrap();
    if std::env::var_os("RLOOD_BLESS").is_some() {
        return std::fs::write(&path, [before, BEGIN, &table(rows), END, after].concat()).unwrap();
    }
    let mut written = written_rows(written);
    let mut wrong = Vec::new();
    for row in rows {
        let found = written.remove(row.case.as_str()).ok_or_else(|| "it is missing".to_owned());
        if let Err(why) = found.and_then(|cells| row.check(&cells)) {
            wrong.push(format!("{}: {why}", row.case));
        }
    }
    wrong.extend(written.keys().map(|case| format!("{case}: there is no such case")));
    assert!(wrong.is_empty(), "{} is old; run {BLESS}:\n{}", path.display(), wrong.join("\n"));
}

#[test]
fn a_row_is_compared_with_what_is_written() {
    let row = |first: f64| Row {
        case: "tiny".to_owned(),
        model_type: "llama".to_owned(),
        checked: "all".to_owned(),
        differences: vec![Some([first, 2e-6]), None, None, None, None],
    };
    let table = table(&[row(1e-6)]);
    let written = &written_rows(&table)["tiny"];
    assert_eq!(row(9e-6).check(written), Ok(()));
    assert!(row(2e-5).check(written).unwrap_err().starts_with("logits"));
    let lacks = Row { differences: vec![None; 5], ..row(1e-6) };
    assert!(lacks.check(written).is_err());
    let more = Row { checked: "all and lora_rs".to_owned(), ..row(1e-6) };
    assert!(more.check(written).unwrap_err().contains("lora_rs"));
}
