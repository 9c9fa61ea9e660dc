//! Measures the rows converted per second on one core: the GSM8K mapping from parquet, and ndjson without a template.
//! Each row is converted to its canonical form, validated and hashed. `cargo run --release -p rlood-data --example
//! speed -- FILE.parquet FILE.ndjson`

use std::io::Write;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use rlood_data::{Options, Source, convert};
use rlood_types::dataset::Recipe;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// A writer that hashes the converted rows, as the server does, and discards them.
struct Hashed(Sha256);

impl Write for Hashed {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    let [parquet, ndjson] = files.as_slice() else { return Err("usage: speed FILE.parquet FILE.ndjson".into()) };
    let system = json!("End with #### and the number.");
    let answer = json!("{{ answer.split('####')[-1] | trim | replace(',', '') }}");
    let mapped = json!({"map": {"prompt": "question", "system": system, "columns": {"answer": answer}}});
    let plain = json!({"map": {"prompt": "question", "system": system}});
    for (what, path, recipe) in [
        ("parquet, with the template", parquet, mapped.clone()),
        ("parquet, without it", parquet, plain.clone()),
        ("ndjson, with the template", ndjson, mapped),
        ("ndjson, without it", ndjson, plain),
    ] {
        println!("{what}: {:.0} rows/s", best_of_three(path, &recipe)?);
    }
    Ok(())
}

fn best_of_three(path: &std::path::Path, recipe: &Value) -> Result<f64, Box<dyn std::error::Error>> {
    let recipe: Recipe = serde_json::from_value(recipe.clone())?;
    let sources = [Source::file(path.display().to_string(), path)];
    let cancelled = AtomicBool::new(false);
    let mut best = 0.0_f64;
    for _ in 0..3 {
        let options = Options {
            format: None,
            chat_default: true,
            answers: false,
            max_bytes: u64::MAX,
            cancelled: &cancelled,
            images: None,
        };
        let begun = Instant::now();
        let converted = convert(&sources, &recipe, &options, &mut Hashed(Sha256::new()))
            .map_err(|rejected| rejected.errors.first().map_or_else(String::new, |error| error.detail.clone()))?;
        best = best.max(converted.rows_read as f64 / begun.elapsed().as_secs_f64());
    }
    Ok(best)
}
