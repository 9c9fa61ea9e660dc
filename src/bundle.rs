//! The bundled model and datasets, embedded in the binary so that the demo needs no other
//! files. `examples/make_tiny_model` creates them.

use std::io;
use std::path::Path;

/// The training prompts of the demo, with the column `answer`.
pub const TRAIN: &[u8] = include_bytes!("../assets/tiny-data/train.jsonl");
/// Evaluation prompts: sums with other operands than those of the training prompts.
pub const HELD_OUT: &[u8] = include_bytes!("../assets/tiny-data/heldout.jsonl");

const MODEL: [(&str, &[u8]); 5] = [
    ("config.json", include_bytes!("../assets/tiny/config.json")),
    ("generation_config.json", include_bytes!("../assets/tiny/generation_config.json")),
    ("model.safetensors", include_bytes!("../assets/tiny/model.safetensors")),
    ("tokenizer.json", include_bytes!("../assets/tiny/tokenizer.json")),
    ("tokenizer_config.json", include_bytes!("../assets/tiny/tokenizer_config.json")),
];

/// Writes the bundled model to a directory. Existing files are not touched, because a worker may be reading them.
pub fn unpack_model(dir: &Path) -> io::Result<()> {
    std::fs::create_dir_all(dir)?;
    for (name, bytes) in MODEL {
        let (path, temporary) = (dir.join(name), dir.join(format!(".{name}.tmp")));
        if !std::fs::read(&path).is_ok_and(|found| found == bytes) {
            std::fs::write(&temporary, bytes)?;
            std::fs::rename(&temporary, &path)?;
        }
    }
    Ok(())
}

/// Returns the question and the answer of a row of the bundled evaluation dataset.
pub fn held_out_row(row: usize) -> Option<(String, String)> {
    let line = HELD_OUT.split(|byte| *byte == b'\n').nth(row).filter(|line| !line.is_empty())?;
    let record: serde_json::Value = serde_json::from_slice(line).ok()?;
    let text = |value: &serde_json::Value| value.as_str().map(str::to_owned);
    Some((text(&record["prompt"][0]["content"])?, text(&record["answer"])?))
}

/// Returns the number of rows in the bundled evaluation dataset.
pub fn held_out_rows() -> usize {
    HELD_OUT.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()).count()
}
