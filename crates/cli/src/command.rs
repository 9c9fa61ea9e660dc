//! The subcommands, and which function runs each.

use std::process::ExitCode;

use clap::Subcommand;

use crate::commands::{
    compare, completions, datasets, events, export, generate, list, login, logs, metrics, models, moves, profile, pull,
    rewards, samples, show, submit, verdict, wait, watch,
};
use crate::context::with;
use crate::error::CliError;

/// The commands that talk to a server.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Check a server's address and key, and keep them as a profile.
    Login(login::Login),
    /// List profiles, choose the default one, or remove one.
    Profile(profile::Profile),
    /// Submit a job from a file; local files that it names are uploaded.
    Submit(submit::Submit),
    /// List jobs, newest first.
    List(list::List),
    /// Show a job: its state, figures, alerts and checkpoints.
    Show(show::Show),
    /// Show jobs side by side: figures, and settings that differ.
    Compare(compare::Compare),
    /// Follow jobs until they are over. Ctrl-C detaches: the jobs go on.
    Watch(watch::Watch),
    /// Wait until jobs are over; the exit code says how they ended.
    Wait(wait::Wait),
    /// Print what the workers logged about a job.
    Logs(logs::Logs),
    /// Print the events of a job.
    Events(events::Events),
    /// Print completions of a job with their rewards.
    Samples(samples::Samples),
    /// Print the metrics of a job by step.
    Metrics(metrics::Metrics),
    /// Show how the rewards of a job do.
    Rewards(rewards::Rewards),
    /// Download a checkpoint, verified; what arrived before a cut is kept.
    Pull(pull::Pull),
    /// Merge a checkpoint into its base model on the server, and download the result.
    Export(export::Export),
    /// Say whether training made the model better: with an interval, on rows that were not trained on.
    Verdict(verdict::Verdict),
    /// End jobs. Their checkpoints stay.
    Cancel(moves::Cancel),
    /// Stop jobs at a checkpoint, to resume them later.
    Pause(moves::Pause),
    /// Queue paused jobs again.
    Resume(moves::Resume),
    /// Make a new job of the same settings from each job that is over.
    Retry(moves::Retry),
    /// Make a new job that goes on from a checkpoint of another one.
    Fork(moves::Fork),
    /// Delete jobs that are over, with their checkpoints and records.
    Delete(moves::Delete),
    /// Ask the base model and a checkpoint of a job the same prompt.
    Generate(generate::Generate),
    /// List, register, show and remove models.
    Models(models::Models),
    /// List, upload, show and remove datasets.
    Datasets(datasets::Datasets),
    /// Print the script that completes commands, flags and ids in a shell.
    Completions(completions::Completions),
}

/// Runs a command. Errors go to standard error.
pub async fn run(command: Command) -> ExitCode {
    match dispatch(command).await {
        Ok(code) => ExitCode::from(code),
        Err(error) => error.report(),
    }
}

async fn dispatch(command: Command) -> Result<u8, CliError> {
    match command {
        Command::Login(args) => login::run(&args).await,
        Command::Profile(args) => profile::run(&args),
        Command::Completions(args) => completions::run(&args),
        Command::Submit(args) => with(&args.common, async |context| submit::run(context, &args).await).await,
        Command::List(args) => with(&args.common, async |context| list::run(context, &args).await).await,
        Command::Show(args) => with(&args.common, async |context| show::run(context, &args).await).await,
        Command::Compare(args) => with(&args.common, async |context| compare::run(context, &args).await).await,
        Command::Watch(args) => with(&args.common, async |context| watch::run(context, &args).await).await,
        Command::Wait(args) => with(&args.common, async |context| wait::run(context, &args).await).await,
        Command::Logs(args) => with(&args.common, async |context| logs::run(context, &args).await).await,
        Command::Events(args) => with(&args.common, async |context| events::run(context, &args).await).await,
        Command::Samples(args) => with(&args.common, async |context| samples::run(context, &args).await).await,
        Command::Metrics(args) => with(&args.common, async |context| metrics::run(context, &args).await).await,
        Command::Rewards(args) => with(&args.common, async |context| rewards::run(context, &args).await).await,
        Command::Pull(args) => with(&args.common, async |context| pull::run(context, &args).await).await,
        Command::Export(args) => with(&args.common, async |context| export::run(context, &args).await).await,
        Command::Verdict(args) => with(&args.common, async |context| verdict::run(context, &args).await).await,
        Command::Cancel(args) => with(&args.common, async |context| moves::cancel(context, &args).await).await,
        Command::Pause(args) => with(&args.common, async |context| moves::pause(context, &args).await).await,
        Command::Resume(args) => with(&args.common, async |context| moves::resume(context, &args).await).await,
        Command::Retry(args) => with(&args.common, async |context| moves::retry(context, &args).await).await,
        Command::Fork(args) => with(&args.common, async |context| moves::fork(context, &args).await).await,
        Command::Delete(args) => with(&args.common, async |context| moves::delete(context, &args).await).await,
        Command::Generate(args) => with(&args.common, async |context| generate::run(context, &args).await).await,
        Command::Models(args) => with(&args.common, async |context| models::run(context, &args).await).await,
        Command::Datasets(args) => with(&args.common, async |context| datasets::run(context, &args).await).await,
    }
}
