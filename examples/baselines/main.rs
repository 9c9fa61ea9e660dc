//! What the baseline is worth, measured on the bundled task.
//!
//! `cargo run --release --example baselines` runs both parts and writes `benches/results/baselines.md`:
//! [`variance`] the spread of the one-step gradient under each baseline, from the same completions; [`learning`] what
//! each estimator has learned after an equal budget, over five seeds.

mod learning;
mod task;
mod variance;

use std::error::Error;
use std::fmt::Write;
use std::fs;
use std::path::PathBuf;

use clap::{Parser, ValueEnum};

/// Any error: an example may end with it.
type Failure = Box<dyn Error + Send + Sync>;

#[derive(Parser)]
#[command(about = "Measures baselines and estimators on the bundled task")]
struct Args {
    /// Which part.
    #[arg(long, value_enum, default_value_t = Part::All)]
    part: Part,
    /// Independent rollouts at fixed weights.
    #[arg(long, default_value_t = 256)]
    rollouts: usize,
    /// Runs an estimator: seeds 1 to N.
    #[arg(long, default_value_t = 5)]
    seeds: u64,
    /// Optimizer steps a run.
    #[arg(long, default_value_t = 20)]
    steps: u64,
    /// Where the tables are written.
    #[arg(long, default_value = "benches/results/baselines.md")]
    out: PathBuf,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Part {
    All,
    Variance,
    Learning,
}

fn main() -> Result<(), Failure> {
    let args = Args::parse();
    let mut report = String::from("# Baselines and estimators on the bundled task\n");
    writeln!(
        report,
        "\nMade by `cargo run --release --example baselines -- --rollouts {} --seeds {} --steps {}` (rlood {}).",
        args.rollouts,
        args.seeds,
        args.steps,
        env!("CARGO_PKG_VERSION")
    )?;
    if args.part != Part::Learning {
        report.push_str(&variance::measure(args.rollouts)?);
    }
    if args.part != Part::Variance {
        report.push_str(&learning::measure(args.seeds, args.steps, args.rollouts)?);
    }
    println!("{report}");
    if args.part == Part::All {
        if let Some(dir) = args.out.parent() {
            fs::create_dir_all(dir)?;
        }
        fs::write(&args.out, report)?;
    }
    Ok(())
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// With Bessel's correction.
fn std(values: &[f64]) -> f64 {
    let mean = mean(values);
    (values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (values.len() as f64 - 1.0)).sqrt()
}
