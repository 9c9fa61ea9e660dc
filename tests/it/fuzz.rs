//! The targets of `fuzz/` with the tests' own mutator: corpora are replayed and mutated; see `fuzz/README.md`.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use targets::{TARGETS, Target};

/// Directory of the fixtures, relative to this crate.
const FIXTURES: &str = "tests/fixtures";

mod targets {
    use super::FIXTURES;
    include!("../../fuzz/targets.rs");
}

/// Number of mutated inputs per target in the short form.
const CHANGES: u64 = 2000;
/// Time limit per target in the short form.
const SHORT: Duration = Duration::from_secs(10);
/// Fragments that parsers look for.
const WORDS: [&str; 36] = [
    "{",
    "}",
    "[",
    "]",
    "\"",
    ":",
    ",",
    "null",
    "true",
    "-",
    "1e999",
    "-0.0",
    "NaN",
    "18446744073709551616",
    "9007199254740993",
    "\\u0000",
    "\\ud800",
    "\u{feff}",
    "\u{202e}",
    "\r\n",
    "\n\n",
    "{{",
    "}}",
    "{%",
    "%}",
    "{% for x in range(99999999) %}",
    "|",
    "bytes=",
    "0-",
    "-0",
    "9999999999999999999-",
    "..",
    "/",
    "%2e",
    "\0",
    "\t",
];

struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % end.max(1) as u64) as usize
    }
}

/// Applies one to eight mutations to an input, possibly with a fragment of another.
fn changed(random: &mut Random, inputs: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = inputs[random.below(inputs.len())].clone();
    for _ in 0..=random.below(8) {
        let at = random.below(bytes.len() + 1);
        match random.below(9) {
            0 if at < bytes.len() => bytes[at] ^= 1 << random.below(8),
            1 if at < bytes.len() => bytes[at] = random.below(256) as u8,
            2 => bytes.insert(at, random.below(256) as u8),
            3 => {
                let end = (at + 1 + random.below(16)).min(bytes.len());
                bytes.drain(at.min(end)..end);
            }
            4 => {
                let end = (at + 1 + random.below(64)).min(bytes.len());
                let piece = bytes[at.min(end)..end].to_vec();
                let most = if random.below(20) == 0 { 2000 } else { 4 };
                let times = 1 + random.below(most);
                bytes.splice(at..at, piece.repeat(times));
            }
            5 => {
                let word = WORDS[random.below(WORDS.len())];
                bytes.splice(at..at, word.bytes());
            }
            6 => {
                let other = &inputs[random.below(inputs.len())];
                let from = random.below(other.len() + 1);
                let to = (from + random.below(64)).min(other.len());
                bytes.splice(at..at, other[from..to].iter().copied());
            }
            7 => bytes.truncate(at),
            // Overwrites bytes with a number, as in length and count fields.
            _ if at + 8 <= bytes.len() => {
                let numbers = [0, 1, u64::MAX, u64::from(u32::MAX), 1 << 31, 1 << 40, i64::MAX as u64, 8];
                bytes[at..at + 8].copy_from_slice(&numbers[random.below(numbers.len())].to_le_bytes());
            }
            _ => {}
        }
        bytes.truncate(1 << 16);
    }
    bytes
}

fn corpus(name: &str) -> Vec<Vec<u8>> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(name);
    let mut files: Vec<PathBuf> = std::fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(!files.is_empty(), "{} is empty", dir.display());
    files.iter().map(|file| std::fs::read(file).unwrap()).collect()
}

/// Runs a target on its corpus and on mutations of it; returns the number of inputs.
fn fuzz(name: &str, target: Target, time: Option<Duration>) -> u64 {
    let artifacts = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/artifacts");
    let mut inputs = corpus(name);
    let seed = match time {
        // The short form uses the same seed every time.
        None => 0x9e37_79b9_7f4a_7c15,
        Some(_) => u64::from(std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().subsec_nanos()) << 20 | 1,
    };
    let mut random = Random(seed);
    let begun = Instant::now();
    let (mut count, kept) = (0, inputs.len());
    // Stored for diagnosis: an abort (such as a stack overflow) leaves no other trace.
    let last = std::env::temp_dir().join(format!("rlood-fuzz-{}-{name}", std::process::id()));
    loop {
        let place = usize::try_from(count).unwrap();
        let input = if place < kept { inputs[place].clone() } else { changed(&mut random, &inputs) };
        if time.is_some() {
            std::fs::write(&last, &input).unwrap();
        }
        let one = Instant::now();
        if catch_unwind(AssertUnwindSafe(|| target(&input))).is_err() {
            std::fs::create_dir_all(&artifacts).unwrap();
            let file = artifacts.join(format!("{name}-{count}"));
            std::fs::write(&file, &input).unwrap();
            panic!("{name} panics; its input lies in {}", file.display());
        }
        assert!(one.elapsed() < Duration::from_secs(20), "{name} takes {:?} for {input:?}", one.elapsed());
        count += 1;
        // Without coverage feedback, a few mutated inputs are mutated further.
        if time.is_some() && random.below(50) == 0 {
            let keep = changed(&mut random, &inputs);
            let place = random.below(200);
            if inputs.len() < kept + 200 { inputs.push(keep) } else { inputs[kept + place] = keep }
        }
        let enough = match time {
            Some(time) => begun.elapsed() >= time,
            None => count >= kept as u64 + CHANGES || begun.elapsed() >= SHORT,
        };
        if enough && place + 1 >= kept {
            break;
        }
    }
    let _ = std::fs::remove_file(&last);
    count
}

#[test]
fn no_target_breaks_whatever_it_is_given() {
    let time = std::env::var("RLOOD_FUZZ_SECONDS").ok().map(|text| Duration::from_secs(text.parse().expect("seconds")));
    let only = std::env::var("RLOOD_FUZZ_TARGET").ok();
    let next = AtomicUsize::new(0);
    let work = || {
        while let Some((name, target)) = TARGETS.get(next.fetch_add(1, Ordering::Relaxed)) {
            if only.as_deref().is_none_or(|only| only == *name) {
                let begun = Instant::now();
                let count = fuzz(name, *target, time);
                println!("{name}: {count} inputs in {:.1} s, none breaks it", begun.elapsed().as_secs_f64());
            }
        }
    };
    let threads = std::thread::available_parallelism().map_or(2, usize::from).min(TARGETS.len());
    std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        for thread in running {
            if let Err(panic) = thread.join() {
                std::panic::resume_unwind(panic);
            }
        }
    });
}
