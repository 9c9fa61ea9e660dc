//! The subcommands, and the dispatch to the function that runs each of them.

use std::process::ExitCode;

use clap::Subcommand;
use futures::future::LocalBoxFuture;

use crate::commands::{
    compare, completions, datasets, events, export, generate, list, login, logs, metrics, models, profile, pull, push,
    rewards, samples, show, submit, transitions, verdict, verify, wait, watch,
};
use crate::context::with;
use crate::error::CliError;

/// Subcommands that connect to a server.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Check a server's address and API key, and save them as a profile.
    Login(login::Login),
    /// List profiles, set the default profile, or remove a profile.
    Profile(profile::Profile),
    /// Submit a job from a file. Local files that the job names are uploaded.
    Submit(submit::Submit),
    /// List jobs, newest first.
    List(list::List),
    /// Show a job's state, metrics, alerts and checkpoints.
    Show(show::Show),
    /// Compare jobs side by side: their metrics, and the settings that differ.
    Compare(compare::Compare),
    /// Follow jobs until they finish. Ctrl-C detaches without stopping them.
    Watch(watch::Watch),
    /// Wait until jobs finish, and report the outcome in the exit code.
    Wait(wait::Wait),
    /// Print the log lines that workers wrote for a job.
    Logs(logs::Logs),
    /// Print a job's events.
    Events(events::Events),
    /// Print a job's completions with their rewards.
    Samples(samples::Samples),
    /// Print a job's metrics by step.
    Metrics(metrics::Metrics),
    /// Show a job's rewards with their request counts and failures.
    Rewards(rewards::Rewards),
    /// Download and verify a checkpoint. An interrupted download resumes.
    Pull(pull::Pull),
    /// Merge a checkpoint into its base model on the server, and download the result.
    Export(export::Export),
    /// Push a checkpoint to a repository of the model hub, with a model card. An interrupted push resumes.
    Push(push::Push),
    /// Check by a checkpoint's certificate whether a server or a folder computes what the checkpoint computes.
    Verify(verify::Verify),
    /// Compare a trained model with its base model on rows that were not trained on, with a confidence interval.
    Verdict(verdict::Verdict),
    /// Cancel jobs. Saved checkpoints are kept.
    Cancel(transitions::Cancel),
    /// Pause jobs at their next checkpoint, so that they can be resumed later.
    Pause(transitions::Pause),
    /// Resume paused jobs by queueing them again.
    Resume(transitions::Resume),
    /// Create a new job with the same settings from each finished job.
    Retry(transitions::Retry),
    /// Create a new job from each of these checkpoints, which continues from there.
    Fork(transitions::Fork),
    /// Delete finished jobs with their checkpoints and records.
    Delete(transitions::Delete),
    /// Send one prompt to a job's base model and to one of its checkpoints.
    Generate(generate::Generate),
    /// List, register, show and remove models.
    Models(models::Models),
    /// List, upload, show and remove datasets.
    Datasets(datasets::Datasets),
    /// Print a shell script that completes commands, flags and job ids.
    Completions(completions::Completions),
}

/// Runs a subcommand of `rlood` and returns its exit code. Errors are printed to standard error.
pub fn run(command: Command) -> LocalBoxFuture<'static, ExitCode> {
    // Boxed, so that the commands are compiled in this crate and not in the one that polls them.
    Box::pin(async {
        match dispatch(command).await {
            Ok(code) => ExitCode::from(code),
            Err(error) => error.report(),
        }
    })
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
        Command::Verify(args) => with(&args.common, async |context| verify::run(context, &args).await).await,
        Command::Export(args) => with(&args.common, async |context| export::run(context, &args).await).await,
        Command::Push(args) => {
            let common = push::with_token(&args.common);
            with(&common, async |context| push::run(context, &args).await).await
        }
        Command::Verdict(args) => with(&args.common, async |context| verdict::run(context, &args).await).await,
        Command::Cancel(args) => with(&args.common, async |context| transitions::cancel(context, &args).await).await,
        Command::Pause(args) => with(&args.common, async |context| transitions::pause(context, &args).await).await,
        Command::Resume(args) => with(&args.common, async |context| transitions::resume(context, &args).await).await,
        Command::Retry(args) => with(&args.common, async |context| transitions::retry(context, &args).await).await,
        Command::Fork(args) => with(&args.common, async |context| transitions::fork(context, &args).await).await,
        Command::Delete(args) => with(&args.common, async |context| transitions::delete(context, &args).await).await,
        Command::Generate(args) => with(&args.common, async |context| generate::run(context, &args).await).await,
        Command::Models(args) => with(&args.common, async |context| models::run(context, &args).await).await,
        Command::Datasets(args) => with(&args.common, async |context| datasets::run(context, &args).await).await,
    }
}
