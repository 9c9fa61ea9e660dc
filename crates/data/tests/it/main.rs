//! Converts files of every format, and checks the errors for broken ones.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

#[cfg(feature = "parquet")]
mod elsewhere;
#[cfg(feature = "parquet")]
mod memory;

use std::io::{Read, Write};
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

use rlood_data::{Converted, Options, Source, convert, preview};
use rlood_types::dataset::{Recipe, Rejected};
use serde_json::{Value, json};

static GO_ON: AtomicBool = AtomicBool::new(false);

fn options() -> Options<'static> {
    Options { format: None, chat_default: true, answers: false, max_bytes: 1 << 30, cancelled: &GO_ON, images: None }
}

fn fixture_path(name: &str) -> PathBuf {
    rlood_test_support::in_repository("crates/data/tests/fixtures").join(name)
}

fn fixture(name: &str) -> Source {
    Source::file(name, fixture_path(name))
}

struct Dir(tempfile::TempDir);

impl Dir {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn file(&self, name: &str, bytes: &[u8]) -> Source {
        let path: PathBuf = self.0.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        Source::file(name, path)
    }
}

fn recipe(value: Value) -> Recipe {
    serde_json::from_value(value).unwrap()
}

fn converted(sources: &[Source], wanted: Value) -> Result<(Vec<Value>, Converted), Rejected> {
    let mut out = Vec::new();
    let done = convert(sources, &recipe(wanted), &options(), &mut out)?;
    let rows = out.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
    let rows: Vec<Value> = rows.map(|line| serde_json::from_slice(line).unwrap()).collect();
    assert_eq!(rows.len() as u64, done.summary.num_rows);
    Ok((rows, done))
}

fn rows(sources: &[Source], wanted: Value) -> Vec<Value> {
    converted(sources, wanted).unwrap().0
}

fn refused(sources: &[Source], wanted: Value) -> String {
    converted(sources, wanted).unwrap_err().errors[0].detail.clone()
}

/// The GSM8K mapping from the documentation.
fn gsm8k_mapping() -> Value {
    json!({"map": {"prompt": "question", "system": "End with ####.",
                   "columns": {"answer": "{{ answer.split('####')[-1] | trim | replace(',', '') }}"}}})
}

#[test]
fn gsm8k_becomes_chats_with_the_number_alone_in_every_compression() {
    for codec in ["none", "snappy", "zstd", "gzip", "lz4"] {
        let rows = rows(&[fixture(&format!("gsm8k-{codec}.parquet"))], gsm8k_mapping());
        assert_eq!(rows.len(), 40, "{codec}");
        let prompt = json!([{"role": "system", "content": "End with ####."},
                            {"role": "user", "content": "Ann has 30 apples and buys 30000. How many has she?"}]);
        let expected = json!({"prompt": prompt, "question": "Ann has 30 apples and buys 30000. How many has she?", "answer": "30030"});
        assert_eq!(rows[30], expected, "{codec}");
    }
    assert!(refused(&[fixture("gsm8k-brotli.parquet")], json!({})).contains("brotli"));
}

#[test]
fn nested_rows_of_verl_are_read_exactly() {
    let rows = rows(
        &[fixture("verl.parquet")],
        json!({"map": {"keep": ["big", "score", "tags", "price", "raw", "reward_model", "data_source"]}}),
    );
    assert_eq!(rows[0]["big"], json!(9_007_199_254_740_993_i64));
    assert_eq!((&rows[0]["data_source"], &rows[0]["prompt"][0]["content"]), (&json!("math"), &json!("What is 0+0?")));
    assert_eq!(
        (&rows[0]["reward_model"]["ground_truth"], &rows[1]["score"], &rows[2]["score"]),
        (&json!("0"), &json!(null), &json!(1e300))
    );
    assert_eq!((&rows[0]["tags"], &rows[0]["raw"]), (&json!({"a": 1}), &json!("AAE=")));
    assert_eq!(rows[0]["price"].to_string().trim_matches('"'), "1.50");
    let all = converted(&[fixture("verl.parquet")], json!({})).unwrap().1;
    assert!(!all.summary.columns.iter().any(|name| name.starts_with("__index")), "{:?}", all.summary.columns);
    let null =
        refused(&[fixture("verl.parquet")], json!({"map": {"columns": {"truth": "{{ reward_model.ground_truth }}"}}}));
    assert_eq!(null, "row 3 (verl.parquet, row group 0): map.columns.truth: 'reward_model' is null");
}

#[test]
fn a_damaged_parquet_file_is_an_error_and_never_a_panic() {
    let dir = Dir::new();
    let whole = std::fs::read(fixture_path("gsm8k-snappy.parquet")).unwrap();
    let cut = dir.file("cut.parquet", &whole[..whole.len() - 9]);
    assert!(refused(&[cut], gsm8k_mapping()).contains("cut off"));
    assert!(refused(&[dir.file("tiny.parquet", b"PAR1")], gsm8k_mapping()).contains("cut off"));
    let mut errors = 0;
    for at in (4..whole.len()).step_by(7) {
        let mut bytes = whole.clone();
        bytes[at] ^= 0xff;
        let read = converted(&[dir.file("flipped.parquet", &bytes)], gsm8k_mapping());
        errors += u32::from(read.is_err());
    }
    assert!(errors > 50, "{errors}");
    assert!(refused(&[fixture("image.parquet")], json!({})).contains("'picture' holds images"));
    assert_eq!(
        rows(&[fixture("image.parquet")], json!({"map": {"drop": ["picture"], "where": "true"}})),
        [json!({"prompt": "look"})]
    );
}

#[cfg(not(feature = "parquet"))]
#[test]
fn a_build_without_parquet_names_the_command_that_reads_the_file() {
    let error = refused(&[fixture("gsm8k-snappy.parquet")], gsm8k_mapping());
    assert!(error.contains("built without parquet") && error.contains("--features parquet"), "{error}");
}

#[test]
fn text_formats_are_detected_by_content_and_unpacked() {
    let dir = Dir::new();
    let lines = b"{\"prompt\":\"a\",\"n\":1}\n\n{\"prompt\":\"b\",\"n\":2}\n";
    let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    gz.write_all(lines).unwrap();
    let gz = gz.finish().unwrap();
    let zst = zstd::encode_all(&lines[..], 3).unwrap();
    let expected = vec![json!({"prompt": "a", "n": 1}), json!({"prompt": "b", "n": 2})];
    for source in [
        dir.file("rows.ndjson", lines),
        dir.file("no-ending", lines),
        dir.file("rows.json", lines),
        dir.file("rows.jsonl.gz", &gz),
        dir.file("rows", &zst),
        dir.file("list.jsonl", b"[{\"prompt\":\"a\",\"n\":1},\n {\"prompt\":\"b\",\"n\":2}]"),
        dir.file("records", b"{ \"records\": [{\"prompt\":\"a\",\"n\":1},{\"prompt\":\"b\",\"n\":2}]}"),
    ] {
        assert_eq!(rows(std::slice::from_ref(&source), json!({})), expected, "{}", source.name);
    }
    let twice = [gz.clone(), gz.clone()].concat();
    assert_eq!(rows(&[dir.file("twice.gz", &twice)], json!({})).len(), 4, "members one after another");
    assert!(refused(&[dir.file("cut.gz", &gz[..gz.len() - 5])], json!({})).contains("gzip data is broken"));
    assert!(refused(&[dir.file("cut.zst", &zst[..zst.len() - 5])], json!({})).contains("zstd data is broken"));
    assert!(refused(&[dir.file("a.arrow", b"ARROW1\0\0")], json!({})).contains("to_parquet()"));
    let tsv = rows(&[dir.file("rows.tsv", b"prompt\tlabel\n\"a\tb\"\tx, y\n")], json!({}));
    assert_eq!(tsv, [json!({"prompt": "a\tb", "label": "x, y"})]);
    assert_eq!(rows(&[dir.file("looks", b"prompt\tlabel\na\tb\n")], json!({}))[0]["label"], "b");
    assert_eq!(rows(&[dir.file("x", b"prompt,label\na,b\n")], json!({}))[0]["label"], "b");
}

#[test]
fn without_a_prompt_the_map_to_paste_is_offered() {
    let dir = Dir::new();
    for (row, expected) in [
        (
            json!({"question": "2+2?", "answer": "2+2=4 #### 4"}),
            r#""map": {"prompt":"question","columns":{"ground_truth":"{{ answer.split('####')[-1] | trim | replace(',', '') }}"}}"#,
        ),
        (
            json!({"problem": "2+2?", "solution": "4"}),
            r#""map": {"prompt":"problem","columns":{"ground_truth":"solution"}}"#,
        ),
        (json!({"messages": [], "ground_truth": "4"}), r#""map": {"prompt":"messages","cut_answer":true}"#),
        (json!({"conversations": []}), r#""map": {"prompt":"conversations","cut_answer":true}"#),
        (json!({"instruction": "Sum", "input": "1 2"}), r#"{% if input %}"#),
        (json!({"a": 1}), r#""map": {"prompt": "…"}"#),
    ] {
        let message = refused(&[dir.file("rows.ndjson", row.to_string().as_bytes())], json!({}));
        assert!(message.contains(expected) && message.contains("there is no 'prompt' column"), "{message}");
    }
}

#[test]
fn conversations_are_converted_and_answers_cut_only_on_request() {
    let dir = Dir::new();
    let row = json!({"id": 1, "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]});
    let source = [dir.file("rows.ndjson", row.to_string().as_bytes())];
    let whole = rows(&source, json!({"map": {"prompt": "conversations", "keep": ["id"]}}));
    let turns = json!([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]);
    assert_eq!(whole, [json!({"prompt": turns, "id": 1})]);
    let cut = rows(
        &source,
        json!({"map": {"prompt": "conversations", "cut_answer": true, "system": "Be brief.", "drop": ["conversations"]}}),
    );
    let turns = json!([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]);
    assert_eq!(cut, [json!({"prompt": turns, "id": 1})]);
}

#[test]
fn a_text_becomes_a_chat_if_the_map_or_the_model_says_so() {
    let dir = Dir::new();
    let source = [dir.file("rows.ndjson", b"{\"prompt\":\"a\",\"q\":\"b\"}")];
    let prompt = |map: Value| rows(&source, json!({"map": map}))[0]["prompt"].clone();
    assert_eq!(prompt(json!({"drop": ["q"]})), "a");
    assert_eq!(prompt(json!({"prompt": "q"})), json!([{"role": "user", "content": "b"}]));
    assert_eq!(prompt(json!({"prompt": "q", "chat": false})), "b");
    assert_eq!(prompt(json!({"chat": true})), json!([{"role": "user", "content": "a"}]));
    assert_eq!(
        prompt(json!({"system": "s {{ q }}"})),
        json!([{"role": "system", "content": "s b"}, {"role": "user", "content": "a"}])
    );
    assert_eq!(prompt(json!({"prompt": "{{ q }}!"})), json!([{"role": "user", "content": "b!"}]));
    let mut out = Vec::new();
    let plain = Options { chat_default: false, ..options() };
    convert(&source, &recipe(json!({"map": {"prompt": "q"}})), &plain, &mut out).unwrap();
    assert!(out.starts_with(b"{\"prompt\":\"b\","));
}

#[test]
fn rows_with_answers_keep_them() {
    let dir = Dir::new();
    let turns = json!([{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]);
    let chat = json!([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]);
    let lines = [
        json!({"messages": chat, "id": 1}),
        json!({"conversations": turns, "id": 2}),
        json!({"prompt": "p", "messages": chat, "id": 3}),
        json!({"messages": "no chat", "id": 4}),
    ];
    let answers = Options { answers: true, ..options() };
    let of = |lines: &[Value], map: Value, options: &Options<'_>| {
        let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
        let source = [dir.file("rows.ndjson", text.as_bytes())];
        let mut out = Vec::new();
        convert(&source, &recipe(map), options, &mut out).map_err(|rejected| rejected.errors[0].detail.clone())?;
        let lines = out.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
        Ok::<Vec<Value>, String>(lines.map(|line| serde_json::from_slice(line).unwrap()).collect())
    };
    let expected = [
        json!({"prompt": chat, "id": 1}),
        json!({"prompt": chat, "id": 2}),
        json!({"prompt": "p", "messages": chat, "id": 3}),
    ];
    assert_eq!(of(&lines[..3], json!({}), &answers).unwrap(), expected);
    assert_eq!(of(&lines[..1], json!({"map": {"keep": []}}), &answers).unwrap(), [json!({"prompt": chat})]);
    assert!(of(&lines[3..], json!({}), &answers).unwrap_err().contains("no 'prompt' column"));
    // The command line names the chat column of a warm-up's file when it uploads the file, which gives the same rows.
    for (line, column) in [(0, "messages"), (1, "conversations")] {
        let uploaded = of(&lines[line..=line], json!({"map": {"prompt": column, "drop": [column]}}), &options());
        assert_eq!(uploaded, of(&lines[line..=line], json!({}), &answers), "{column}");
    }
    let kept = of(&lines[..1], json!({"map": {"prompt": "messages", "keep": []}}), &options());
    assert_eq!(kept, of(&lines[..1], json!({"map": {"keep": []}}), &answers));
    assert!(
        of(&lines[..1], json!({}), &options()).unwrap_err().contains("cut_answer"),
        "elsewhere it is offered to cut it"
    );
    // The answer column has another name than `completion`.
    let pair = [json!({"question": "q", "answer": "a #### 4"})];
    let by_name = of(&pair, json!({"map": {"prompt": "question", "completion": "answer", "keep": []}}), &options());
    assert_eq!(by_name.unwrap(), [json!({"prompt": [{"role": "user", "content": "q"}], "completion": "a #### 4"})]);
    let made = of(&pair, json!({"map": {"prompt": "question", "completion": "{{ answer }}!", "keep": []}}), &options());
    assert_eq!(made.unwrap()[0]["completion"], "a #### 4!");
    let unknown = of(&pair, json!({"map": {"prompt": "question", "completion": "anser"}}), &options()).unwrap_err();
    assert!(unknown.contains("map.completion") && unknown.contains("did you mean 'answer'"), "{unknown}");
    let twice = json!({"map": {"prompt": "question", "completion": "answer", "columns": {"completion": "answer"}}});
    assert!(of(&pair, twice, &options()).unwrap_err().contains("either that one or map.completion"));
}

#[test]
fn rows_are_chosen_by_where_unique_limit_and_seed() {
    let dir = Dir::new();
    let lines: String =
        (0..1000).map(|n| format!("{{\"prompt\":\"p{}\",\"n\":{n},\"kind\":\"{}\"}}\n", n / 2, n % 3)).collect();
    let source = [dir.file("rows.ndjson", lines.as_bytes())];
    let numbers =
        |wanted: Value| -> Vec<u64> { rows(&source, wanted).iter().map(|row| row["n"].as_u64().unwrap()).collect() };
    assert_eq!(numbers(json!({"limit": 3})), [0, 1, 2]);
    assert_eq!(numbers(json!({"map": {"where": "kind == '0' and n > 5"}, "limit": 2})), [6, 9]);
    assert_eq!(numbers(json!({"map": {"unique": "prompt"}, "limit": 3})), [0, 2, 4]);
    // Mapped names take precedence over source columns.
    assert_eq!(numbers(json!({"map": {"columns": {"n2": "kind"}, "unique": ["n2"]}})), [0, 1, 2]);
    let drawn = numbers(json!({"limit": 100, "seed": 7}));
    assert_eq!(drawn, numbers(json!({"limit": 100, "seed": 7})));
    assert_ne!(drawn, numbers(json!({"limit": 100, "seed": 8})));
    assert!(drawn.len() == 100 && drawn.windows(2).all(|pair| pair[0] < pair[1]), "{drawn:?}");
    let mean = drawn.iter().sum::<u64>() / 100;
    assert!((400..600).contains(&mean), "{mean}");
    assert_eq!(numbers(json!({"limit": 5000, "seed": 1})).len(), 1000);
}

#[test]
fn unique_reads_the_column_of_its_path_beside_those_that_are_kept() {
    let wanted = |unique: Value| recipe(json!({"map": {"keep": ["data_source"], "unique": unique}}));
    let look = |unique: Value| preview(&[fixture("verl.parquet")], &wanted(unique), &options(), 2).unwrap();
    let distinct = look(json!("reward_model.ground_truth"));
    assert_eq!((distinct.rows.len(), distinct.rejected), (2, None));
    assert_eq!(distinct.rows[1].as_object().unwrap().keys().collect::<Vec<_>>(), ["prompt", "data_source"]);
}

#[test]
fn errors_name_file_row_and_column() {
    let dir = Dir::new();
    let source =
        [dir.file("rows.ndjson", b"{\"question\":\"a\",\"answer\":\"1\"}\n{\"question\":\"b\",\"answer\":null}\n")];
    for (wanted, expected) in [
        (
            json!({"map": {"prompt": "quesiton"}}),
            "row 1 (rows.ndjson): map.prompt: there is no column 'quesiton'; columns are question, answer (did you mean 'question'?)",
        ),
        (
            json!({"map": {"prompt": "question", "columns": {"a": "{{ answr | trim }}"}}}),
            "row 1 (rows.ndjson): map.columns.a: there is no column 'answr'; columns are question, answer (did you mean 'answer'?)",
        ),
        (
            json!({"map": {"prompt": "question", "columns": {"answer": "{{ answer.split('#')[-1] }}"}}}),
            "row 2 (rows.ndjson): map.columns.answer: 'answer' is null",
        ),
        (
            json!({"map": {"prompt": "question", "keep": ["anwser"]}}),
            "map.keep: there is no column 'anwser'; columns are answer, question (did you mean 'answer'?)",
        ),
        (
            json!({"map": {"prompt": "question", "keep": [], "drop": []}}),
            "map.drop: give either keep or drop, not both",
        ),
        (json!({"map": {"prompt": "question", "columns": {"a": "{{ answer"}}}), "map.columns.a: "),
        (json!({"map": {"prompt": "question", "system": "s", "chat": false}}), "map.chat: "),
        (json!({"seed": 1}), "seed: a seed selects which rows limit keeps: give limit as well"),
        (json!({"limit": 0}), "limit: it must be at least 1"),
        (
            json!({"map": {"prompt": "question", "columns": {"a": "answer"}}}),
            "row 2 (rows.ndjson): map.columns.a: 'answer' is null",
        ),
        (json!({"map": {"prompt": "answer"}}), "row 2 (rows.ndjson): map.prompt: 'answer' is null"),
        (
            json!({"map": {"prompt": "question", "where": "quesiton == 'a' and answer"}}),
            "row 1 (rows.ndjson): map.where: there is no column 'quesiton'; columns are question, answer (did you mean 'question'?)",
        ),
        (
            json!({"map": {"prompt": "question", "where": "answr"}}),
            "row 1 (rows.ndjson): map.where: there is no column 'answr'; columns are question, answer (did you mean 'answer'?)",
        ),
        (
            json!({"map": {"prompt": "question", "columns": {"a": "{{ answer | trim }}"}}}),
            "row 2 (rows.ndjson): map.columns.a: 'answer' is null: give it a default, such as answer | default('', true)",
        ),
        (
            json!({"map": {"prompt": "{{ question ~ ': ' ~ answer }}"}}),
            "row 2 (rows.ndjson): map.prompt: 'answer' is null: give it a default",
        ),
        (
            json!({"map": {"prompt": "question", "where": "answer | lower != 'x'"}}),
            "row 2 (rows.ndjson): map.where: 'answer' is null: give it a default",
        ),
    ] {
        let message = refused(&source, wanted.clone());
        assert!(message.starts_with(expected), "{wanted}: {message}");
    }
    let defaults =
        json!({"map": {"prompt": "question", "columns": {"answer": "{{ answer | default('-', true) | trim }}"}}});
    assert_eq!(rows(&source, defaults)[1]["answer"], "-");
    let bad = [dir.file("bad.ndjson", b"{\"prompt\":\"a\"}\n{\"prompt\":\n{\"prompt\":\"c\"}\n")];
    assert!(refused(&bad, json!({})).starts_with("row 2 (bad.ndjson): broken JSON"), "{}", refused(&bad, json!({})));
    let long = format!("{{\"prompt\":\"a\",\"blob\":\"{}\"}}", "x".repeat(2 << 20));
    let long = [dir.file("long.ndjson", long.as_bytes())];
    assert!(refused(&long, json!({})).contains("'blob' alone has 2097154"), "{}", refused(&long, json!({})));
    assert_eq!(rows(&long, json!({"map": {"drop": ["blob"]}})), [json!({"prompt": "a"})]);
    let mut out = Vec::new();
    let few = Options { max_bytes: 20, ..options() };
    let two = [dir.file("two.ndjson", b"{\"prompt\":\"a\"}\n{\"prompt\":\"b\"}\n")];
    let error = convert(&two, &Recipe::default(), &few, &mut out).unwrap_err();
    assert_eq!(error.errors[0].code, "too_large");
}

#[test]
fn a_bomb_of_zeros_ends_at_its_limit() {
    let dir = Dir::new();
    let bomb = zstd::encode_all(std::io::repeat(b'x').take(100 << 20), 3).unwrap();
    assert!(bomb.len() < 1 << 20);
    let message = refused(&[dir.file("bomb.ndjson.zst", &bomb)], json!({}));
    assert!(message.contains("longer than 64 MiB"), "{message}");
    let bomb = zstd::encode_all(std::io::repeat(b'\n').take(200 << 20), 3).unwrap();
    let message = refused(&[dir.file("blank.ndjson.zst", &bomb)], json!({}));
    assert!(message.contains("no row ends within 128 MiB"), "{message}");
    let begun = std::time::Instant::now();
    let look = preview(&[dir.file("blank.ndjson.zst", &bomb)], &Recipe::default(), &options(), 3);
    assert!(begun.elapsed().as_millis() < 2000 && look.is_ok_and(|look| look.rows.is_empty()));
}

#[test]
fn a_preview_shows_columns_and_mapped_rows_and_suggests_a_map() {
    let source = [fixture("gsm8k-zstd.parquet")];
    let look = preview(&source, &Recipe::default(), &options(), 3).unwrap();
    let columns: Vec<(&str, &str)> = look.columns.iter().map(|column| (column.name.as_str(), column.kind)).collect();
    assert_eq!(columns, [("question", "text"), ("answer", "text")]);
    assert_eq!((look.source_rows.len(), look.rows.len()), (3, 0));
    assert_eq!(look.suggested_map.unwrap()["prompt"], "question");
    assert!(look.rejected.unwrap().errors[0].detail.contains("there is no 'prompt' column"));
    // The dataset of verl has a prompt, but the answer is not where a reward would look for it.
    let verl = preview(&[fixture("verl.parquet")], &Recipe::default(), &options(), 3).unwrap();
    assert_eq!(verl.rejected, None);
    let suggested = json!({"map": verl.suggested_map});
    assert_eq!(suggested["map"], json!({"columns": {"ground_truth": "reward_model.ground_truth"}}));
    let mapped = preview(&[fixture("verl.parquet")], &recipe(suggested), &options(), 3).unwrap();
    assert!(
        mapped.suggested_map.is_none()
            && mapped.rows[0]["ground_truth"] == mapped.rows[0]["reward_model"]["ground_truth"]
    );
    let look = preview(&source, &recipe(gsm8k_mapping()), &options(), 3).unwrap();
    assert_eq!((look.rows.len(), look.rejected), (3, None));
    assert_eq!(look.rows[2]["answer"], "2002");
}

#[test]
fn a_preview_leaves_out_the_row_at_which_its_file_was_cut() {
    let dir = Dir::new();
    let row = |n: usize| format!("{{\"prompt\":\"p{n}\",\"kind\":\"{}\"}}", n % 2);
    let lines: String = (0..6).map(|n| row(n) + "\n").collect();
    let list = format!("[{}]", (0..6).map(row).collect::<Vec<_>>().join(",\n"));
    let csv: String = (0..6).map(|n| format!("\"p{n}\",{}\n", n % 2)).collect();
    // Long enough for several blocks of zstd.
    let long: String =
        (0..2000).map(|n| row(n).replace('}', &format!(",\"pad\":\"{:0200}\"}}\n", n * n * 7919))).collect();
    let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    gz.write_all(long.as_bytes()).unwrap();
    let (gz, zst) = (gz.finish().unwrap(), zstd::encode_all(long.as_bytes(), 3).unwrap());
    let half = |bytes: Vec<u8>| bytes[..bytes.len() / 2].to_vec();
    for (name, bytes) in [
        ("a.ndjson", lines.as_bytes()[..lines.len() - 9].to_vec()),
        ("a.json", list.as_bytes()[..list.len() - 9].to_vec()),
        ("a.csv", format!("prompt,kind\n{}", &csv[..csv.len() - 4]).into_bytes()),
        ("a.ndjson.gz", half(gz)),
        ("a.ndjson.zst", half(zst)),
    ] {
        // More rows are wanted than a filter leaves.
        let wanted = recipe(json!({"map": {"where": "kind == '1' and prompt in ['p1', 'p3']", "unique": "prompt"}}));
        let whole = preview(&[dir.file(name, &bytes)], &wanted, &options(), 5);
        assert!(whole.map_or(true, |whole| whole.rejected.is_some()), "{name}");
        let look = preview(&[dir.file(name, &bytes).cut()], &wanted, &options(), 5).unwrap();
        assert_eq!((look.rows.len(), look.rejected), (2, None), "{name}");
    }
    let one = preview(&[dir.file("one.ndjson", b"{\"prompt\":").cut()], &Recipe::default(), &options(), 3).unwrap_err();
    assert!(one.errors[0].detail.contains("the first row does not end"), "{one:?}");
}

#[test]
fn a_preview_of_a_large_file_is_fast() {
    let dir = Dir::new();
    let path = dir.0.path().join("large.csv");
    let mut file = std::io::BufWriter::new(std::fs::File::create(&path).unwrap());
    file.write_all(b"question,answer\n").unwrap();
    let line = format!("{},{}\n", "q".repeat(500), "a".repeat(500));
    for _ in 0..200_000 {
        file.write_all(line.as_bytes()).unwrap();
    }
    drop(file);
    let source = [Source::file("large.csv", path)];
    let wanted = recipe(json!({"map": {"prompt": "question", "where": "answer == 'never'"}}));
    let looks = (0..3).map(|_| {
        let begun = std::time::Instant::now();
        let look = preview(&source, &wanted, &options(), 5).unwrap();
        assert_eq!((look.source_rows.len(), look.rows.len()), (5, 0));
        begun.elapsed()
    });
    // Takes the fastest of several, because other tests keep the CPU busy.
    let fastest = looks.min().unwrap();
    assert!(fastest.as_millis() < 300, "{fastest:?}");
}

#[test]
fn if_no_row_is_good_reading_stops_with_a_message() {
    let dir = Dir::new();
    let rows = |good: &str| format!("{good}{}", "{\"prompt\":7}\n".repeat(5000));
    let refused = |text: String| {
        converted(&[dir.file("rows.ndjson", text.as_bytes())], json!({"map": {"prompt": "prompt"}})).unwrap_err()
    };
    let all = refused(rows(""));
    assert_eq!((all.num_errors, all.errors.len()), (101, 101));
    assert_eq!(all.errors[100].detail, "none of the first 101 rows of the file can be used: the rest was not read");
    // One good row is enough for all rows to be counted.
    let one_is_good = refused(rows("{\"prompt\":\"a\"}\n"));
    assert_eq!((one_is_good.num_errors, one_is_good.errors.len()), (5000, 100));
}

#[test]
fn a_preview_of_no_rows_is_rejected() {
    let dir = Dir::new();
    for (name, bytes) in [("a.json", "\n"), ("a.json", "[]"), ("a.ndjson", ""), ("a.csv", "prompt,answer\n")] {
        let refused = preview(&[dir.file(name, bytes.as_bytes())], &Recipe::default(), &options(), 3).unwrap_err();
        assert!(refused.errors[0].detail.contains("no rows"), "{name} {bytes:?}: {:?}", refused.errors);
    }
}
