//! `rlood completions`: prints a script with which a shell completes commands, flags, and job ids that the server lists.

use std::time::Duration;

use clap::Args;
use clap_complete::engine::{ArgValueCandidates, CompletionCandidate};
use clap_complete::env::Shells;
use rlood_client::{Client, Retry};
use rlood_types::id::JobId;

use crate::error::CliError;
use crate::follow::text;
use crate::profiles::Profiles;
use crate::target::{Flags, Target, Variables, is_loopback};

/// Environment variable that tells `rlood` to print completions instead of running a command.
pub const VARIABLE: &str = "COMPLETE";
/// Time limit for the request of the job list, since the user is waiting at the shell's prompt.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum number of jobs whose ids are offered as completions, newest first.
const MAX_CANDIDATES: usize = 50;

/// Flags of `rlood completions`.
#[derive(Debug, Clone, Args)]
pub struct Completions {
    /// Shell to print the script for. To enable completion in bash, add `source <(rlood completions bash)` to ~/.bashrc.
    #[arg(value_name = "SHELL", value_parser = ["bash", "zsh", "fish", "powershell", "elvish"])]
    pub shell: String,
}

/// # Errors
/// Fails when the completion script cannot be written.
pub fn run(args: &Completions) -> Result<u8, CliError> {
    let shells = Shells::builtins();
    let Some(shell) = shells.completer(&args.shell) else {
        return Err(CliError::Usage(format!("the shell '{}' is not supported", args.shell)));
    };
    let mut script = Vec::new();
    let written = shell.write_registration(VARIABLE, "rlood", "rlood", "rlood", &mut script);
    written.map_err(CliError::local("write the shell's completion script"))?;
    let out = crate::output::Out::new(false, crate::output::Color::Never);
    out.text(&String::from_utf8_lossy(&script))?;
    Ok(0)
}

/// Returns the completer for arguments that name jobs: offers the server's job ids.
pub fn jobs() -> ArgValueCandidates {
    ArgValueCandidates::new(candidates)
}

/// Lists the jobs of the server that the environment or a profile selects. Errors are ignored, because an error message would
/// disturb the command line that the user is typing.
fn candidates() -> Vec<CompletionCandidate> {
    let mut found = vec![CompletionCandidate::new("@last").help(Some("the most recently submitted job".into()))];
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else { return found };
    let listed = runtime.block_on(async { tokio::time::timeout(REQUEST_TIMEOUT, newest()).await.ok().flatten() });
    // A request that timed out may still be resolving a host name, so the runtime must not wait for it.
    runtime.shutdown_background();
    found.extend(listed.into_iter().flatten());
    found
}

async fn newest() -> Option<Vec<CompletionCandidate>> {
    let target = Target::decide(Flags::default(), &Variables::of_environment(), &Profiles::open().ok()?).ok()?;
    let mut builder = Client::builder(&target.server).retry(Retry::never());
    if let Some(key) = target.key {
        builder = builder.api_key(key);
    }
    if let Some(path) = target.ca_file {
        builder = builder.root_certificates(std::fs::read(path).ok()?);
    }
    if is_loopback(&target.server) {
        builder = builder.no_proxy();
    }
    let page = builder.build().ok()?.raw_get(&["jobs"]).query("limit", MAX_CANDIDATES).page(None).await.ok()?.0;
    let candidate = |job: &serde_json::Value| {
        let id = text(job, "id").parse::<JobId>().ok()?.to_string();
        let name = job["name"].as_str().map(|name| format!(" {}", crate::output::clean(name))).unwrap_or_default();
        Some(CompletionCandidate::new(id).help(Some(format!("{}{name}", text(job, "state")).into())))
    };
    Some(page.data.iter().filter_map(candidate).collect())
}
