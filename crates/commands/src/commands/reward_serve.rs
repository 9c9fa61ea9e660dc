//! `rlood reward serve rewards.py:accuracy,format`: serves Python functions as reward services of contract v1,
//! until SIGTERM or Ctrl-C.

use std::process::ExitCode;
use std::time::Duration;

use futures::future::LocalBoxFuture;
use serde_json::json;

use super::python_serve::{ServeError, read_secrets, serve, url, working_directory};
use crate::config::RewardServeArgs;
use crate::reward::python::{PythonServer, Settings, Wanted, read_targets};

/// Serves the functions until a signal arrives, then returns exit code 0.
///
/// # Errors
/// Fails when a flag or a function is invalid, or the serving process exits by itself.
pub fn run(args: RewardServeArgs) -> LocalBoxFuture<'static, Result<ExitCode, ServeError>> {
    Box::pin(async move {
        let secrets = read_secrets(args.secret.as_deref())?;
        let targets = read_targets(&args.functions, Wanted::FUNCTIONS, &working_directory()?)?;
        let settings = Settings {
            python: args.python,
            processes: args.processes,
            batch_size: args.batch_size,
            call_timeout: Duration::from_secs_f64(args.timeout),
            reload: args.reload,
            secrets,
            allowed_hosts: args.allowed_hosts.unwrap_or_default(),
            max_connections: args.max_connections,
            ..Settings::new(targets)
        };
        serve(&args.listen, settings, "reward functions", stanza).await
    })
}

/// Returns the served functions as rewards to paste into a job.
fn stanza(server: &PythonServer, is_signed: bool) -> String {
    let reward = |name: &String| {
        let mut reward = json!({"type": "webhook", "name": name, "url": url(server, name), "completion_ids": true});
        if is_signed {
            reward["secret"] = json!("whsec_… (the secret of this server)");
        }
        format!("  {reward}")
    };
    let rewards: Vec<String> = server.functions.iter().map(reward).collect();
    format!("\"rewards\": [\n{}\n]", rewards.join(",\n"))
}
