//! `rlood completions`: a shell completes commands, flags, and the ids and names of jobs, which it asks the server for.

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

/// The variable by which a shell asks the program.
pub const VARIABLE: &str = "COMPLETE";
/// How long a user waits for a server.
const LIMIT: Duration = Duration::from_secs(1);
/// Jobs that are offered, the newest ones.
const OFFERED: usize = 50;

/// Flags of `rlood completions`.
#[derive(Debug, Clone, Args)]
pub struct Completions {
    /// The shell: bash, zsh, fish, powershell or elvish. `source <(rlood completions bash)` in ~/.bashrc switches it on.
    #[arg(value_name = "SHELL", value_parser = ["bash", "zsh", "fish", "powershell", "elvish"])]
    pub shell: String,
}

/// # Errors
/// When the script cannot be written.
pub fn run(args: &Completions) -> Result<u8, CliError> {
    let shells = Shells::builtins();
    let Some(shell) = shells.completer(&args.shell) else {
        return Err(CliError::Usage(format!("{} is not a shell that is known here", args.shell)));
    };
    let mut script = Vec::new();
    let written = shell.write_registration(VARIABLE, "rlood", "rlood", "rlood", &mut script);
    written.map_err(CliError::local("write the script"))?;
    let out = crate::output::Out::new(false, crate::output::Color::Never);
    out.text(&String::from_utf8_lossy(&script))?;
    Ok(0)
}

/// Completes the name of a job.
pub fn jobs() -> ArgValueCandidates {
    ArgValueCandidates::new(candidates)
}

/// Jobs of the server that the environment and the profiles name. Whatever fails, nothing is said: a user types.
fn candidates() -> Vec<CompletionCandidate> {
    let mut found =
        vec![CompletionCandidate::new("@last").help(Some("the job that was submitted last from here".into()))];
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else { return found };
    let listed = runtime.block_on(async { tokio::time::timeout(LIMIT, newest()).await.ok().flatten() });
    // A request that nobody waits for may still be looking up a name.
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
    let page = builder.build().ok()?.raw_get(&["jobs"]).query("limit", OFFERED).page(None).await.ok()?.0;
    let candidate = |job: &serde_json::Value| {
        let id = text(job, "id").parse::<JobId>().ok()?.to_string();
        let name = job["name"].as_str().map(|name| format!(" {}", crate::output::clean(name))).unwrap_or_default();
        Some(CompletionCandidate::new(id).help(Some(format!("{}{name}", text(job, "state")).into())))
    };
    Some(page.data.iter().filter_map(candidate).collect())
}
