//! The bundled models and datasets, embedded in the binary so that the demo needs no other
//! files. `examples/make_tiny_model` and `scripts/make_agent_model.py` create them.

use std::io::{self, Read};
use std::path::Path;

use flate2::read::GzDecoder;

/// The training prompts of the demo, with the column `answer`.
pub const TRAIN: &[u8] = include_bytes!("../assets/tiny-data/train.jsonl");
/// Evaluation prompts: sums with other operands than those of the training prompts.
pub const HELD_OUT: &[u8] = include_bytes!("../assets/tiny-data/heldout.jsonl");

/// The training prompts of `rlood demo --agent`: sums of three numbers, with the column `answer`.
pub const AGENT_TRAIN: &[u8] = include_bytes!("../assets/agent-data/train.jsonl");
/// Evaluation prompts of `rlood demo --agent`: other sums.
pub const AGENT_HELD_OUT: &[u8] = include_bytes!("../assets/agent-data/heldout.jsonl");

/// The name and the gzip-compressed contents of each file of a model.
type Files = &'static [(&'static str, &'static [u8])];

const AGENT: Files = include!(concat!(env!("OUT_DIR"), "/agent_files.rs"));
const MODEL: Files = include!(concat!(env!("OUT_DIR"), "/tiny_files.rs"));

/// Writes the bundled model to a directory. Existing files are not touched, because a worker may be reading them.
pub fn unpack_model(dir: &Path) -> io::Result<()> {
    unpack(MODEL, dir)
}

/// Writes the bundled model that calls a calculator to a directory, like [`unpack_model`].
pub fn unpack_agent(dir: &Path) -> io::Result<()> {
    unpack(AGENT, dir)
}

fn unpack(files: Files, dir: &Path) -> io::Result<()> {
    std::fs::create_dir_all(dir)?;
    for (name, gzipped) in files {
        let mut bytes = Vec::new();
        GzDecoder::new(*gzipped).read_to_end(&mut bytes)?;
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
    question_and_answer(HELD_OUT, row)
}

/// Returns the question and the answer of a row of a bundled dataset.
pub fn question_and_answer(dataset: &[u8], row: usize) -> Option<(String, String)> {
    let line = dataset.split(|byte| *byte == b'\n').nth(row).filter(|line| !line.is_empty())?;
    let record: serde_json::Value = serde_json::from_slice(line).ok()?;
    let text = |value: &serde_json::Value| value.as_str().map(str::to_owned);
    Some((text(&record["prompt"][0]["content"])?, text(&record["answer"])?))
}

/// Returns the number of rows in the bundled evaluation dataset.
pub fn held_out_rows() -> usize {
    num_rows(HELD_OUT)
}

/// Returns the number of rows in a bundled dataset.
pub fn num_rows(dataset: &[u8]) -> usize {
    dataset.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()).count()
}
