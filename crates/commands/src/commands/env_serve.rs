//! `rlood env serve game.py:Wordle`: serves Python classes as environments of contract v1, until SIGTERM or Ctrl-C.

use std::process::ExitCode;
use std::time::Duration;

use futures::future::LocalBoxFuture;
use serde_json::json;

use super::python_serve::{ServeError, read_secrets, serve, url, working_directory};
use crate::config::EnvServeArgs;
use crate::reward::python::{PythonServer, Service, Settings, Wanted, read_targets};

/// Serves the classes until a signal arrives, then returns exit code 0.
///
/// # Errors
/// Fails when a flag or a class is invalid, or the serving process exits by itself.
pub fn run(args: EnvServeArgs) -> LocalBoxFuture<'static, Result<ExitCode, ServeError>> {
    Box::pin(async move {
        let secrets = read_secrets(args.secret.as_deref())?;
        let directory = working_directory()?;
        let targets = read_targets(&args.classes, Wanted::CLASSES, &directory)?;
        let settings = Settings {
            service: Service::Environments {
                state: args.state.map(|state| directory.join(state)),
                forget_after: Duration::from_secs_f64(args.forget_after),
            },
            python: args.python,
            secrets,
            allowed_hosts: args.allowed_hosts.unwrap_or_default(),
            max_connections: args.max_connections,
            ..Settings::new(targets)
        };
        serve(&args.listen, settings, "environments", stanza).await
    })
}

/// Returns the served classes as environments to paste into a job, which has one.
fn stanza(server: &PythonServer, is_signed: bool) -> String {
    let environment = |name: &String| {
        let mut environment = json!({ "url": url(server, name) });
        if is_signed {
            environment["secret"] = json!("whsec_… (the secret of this server)");
        }
        format!("\"environment\": {environment}")
    };
    server.functions.iter().map(environment).collect::<Vec<_>>().join("\n")
}
