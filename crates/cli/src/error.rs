//! Errors of commands, with their messages and exit codes.

use std::io::Write;
use std::process::ExitCode;

use rlood_client::Error;

/// Exit code when the job or the server failed.
pub const EXIT_FAILED: u8 = 1;
/// Exit code when the command line or the request is not valid.
pub const EXIT_USAGE: u8 = 2;
/// Exit code when the job, checkpoint or other resource does not exist.
pub const EXIT_NOT_FOUND: u8 = 3;
/// Exit code when the API key is missing, not valid, or lacks the scope.
pub const EXIT_NOT_ALLOWED: u8 = 4;
/// Exit code when the server does not answer.
pub const EXIT_UNREACHABLE: u8 = 5;
/// Exit code when the job was cancelled.
pub const EXIT_CANCELLED: u8 = 6;
/// Exit code when the job is paused.
pub const EXIT_PAUSED: u8 = 7;
/// Exit code after `--timeout`, the same as of coreutils' `timeout`.
pub const EXIT_TIMEOUT: u8 = 124;
/// Exit code after Ctrl-C, as shells report it.
pub const EXIT_INTERRUPTED: u8 = 130;

/// Reason why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    /// The command line, or a file that it names, cannot be used.
    #[error("{0}")]
    Usage(String),
    /// The job, checkpoint or other resource does not exist.
    #[error("{0}")]
    NotFound(String),
    /// Another failure, which is not an error in the command line.
    #[error("{0}")]
    Failed(String),
    /// The server rejected the request or did not answer.
    #[error("{}", describe(.0))]
    Api(#[from] Error),
    /// No server answers at the address. The text also says what the user can do.
    #[error("{0}")]
    Unreachable(String),
    /// The time limit of `--timeout` was reached.
    #[error("{0}")]
    Timeout(String),
    /// The user pressed Ctrl-C. The text says what keeps running on the server.
    #[error("{0}")]
    Interrupted(String),
    /// The reader of standard output has exited, as `head` does after its last line.
    #[error("standard output was closed")]
    Closed,
}

impl CliError {
    /// Returns a function that converts an I/O error of this machine; `doing` says what the command tried to do.
    pub(crate) fn local(doing: impl std::fmt::Display) -> impl FnOnce(std::io::Error) -> CliError {
        move |source| CliError::Failed(format!("cannot {doing}: {source}"))
    }

    /// Prints the error to standard error, and returns its exit code.
    pub fn report(&self) -> ExitCode {
        // Errors of writing to standard error are ignored, because there is no other place to report them.
        let _ = match self {
            CliError::Closed => Ok(()),
            // After Ctrl-C the terminal has printed ^C on the current line, so the message starts on a new line.
            CliError::Interrupted(text) => writeln!(std::io::stderr(), "\n{text}"),
            _ => writeln!(std::io::stderr(), "rlood: {self}"),
        };
        self.exit_code()
    }

    /// Returns the exit code of the error.
    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self {
            CliError::Usage(_) => EXIT_USAGE,
            CliError::NotFound(_) => EXIT_NOT_FOUND,
            CliError::Failed(_) => EXIT_FAILED,
            CliError::Api(error) => exit_code_of(error),
            CliError::Unreachable(_) => EXIT_UNREACHABLE,
            CliError::Timeout(_) => EXIT_TIMEOUT,
            CliError::Interrupted(_) => EXIT_INTERRUPTED,
            CliError::Closed => 0,
        })
    }
}

fn exit_code_of(error: &Error) -> u8 {
    match error {
        Error::Settings(_) => EXIT_USAGE,
        Error::Unreachable { .. } | Error::Interrupted { .. } | Error::Stalled { .. } => EXIT_UNREACHABLE,
        Error::NotUnderstood { .. } | Error::Damaged { .. } | Error::Disk { .. } => EXIT_FAILED,
        Error::Refused { problem, .. } => match problem.status {
            401 | 403 => EXIT_NOT_ALLOWED,
            404 | 410 => EXIT_NOT_FOUND,
            400 | 413 | 415 | 422 => EXIT_USAGE,
            _ => EXIT_FAILED,
        },
    }
}

/// Formats the server's error answer: the detail, each field error on its own line, and the request id, by which the server's
/// log can be searched.
fn describe(error: &Error) -> String {
    let Some(problem) = error.problem() else {
        let mut text = error.to_string();
        let mut cause = std::error::Error::source(error);
        while let Some(source) = cause {
            text.push_str(&format!(": {source}"));
            cause = source.source();
        }
        return text;
    };
    let mut text = match (problem.detail.as_str(), problem.title.as_str()) {
        // The detail of a 401 explains HTTP headers, which the user of a command does not set, so only the title is shown.
        (_, title) if problem.status == 401 && !title.is_empty() => title.to_owned(),
        ("", "") => format!("the server answered with status {}", problem.status),
        ("", title) => title.to_owned(),
        (detail, _) => detail.to_owned(),
    };
    for error in &problem.errors {
        // If there is a single field error, the detail often repeats it.
        if !text.contains(&error.detail) || !text.contains(&error.pointer) {
            text.push_str(&format!("\n  {}: {}", error.pointer, error.detail));
        }
    }
    if problem.status == 401 {
        text.push_str("\n  save a key with `rlood login URL`, or pass one with --key, RLOOD_KEY or --profile");
    }
    if !problem.request_id.is_empty() {
        text.push_str(&format!("\n  request {}", problem.request_id));
    }
    text
}

#[cfg(test)]
mod tests {
    use rlood_client::Problem;
    use rlood_types::spec::FieldError;

    use super::*;

    fn refused(status: u16) -> Error {
        let errors = vec![
            FieldError::new("/rloo/beta", "out_of_range", "must be at least 0"),
            FieldError::new("/model", "required", "name a model"),
        ];
        let detail = "/rloo/beta: must be at least 0 (and 1 more; see errors)".to_owned();
        let problem = Problem { status, detail, errors, request_id: "req_1".to_owned(), ..Problem::default() };
        Error::Refused { request: "POST /jobs".to_owned(), problem: Box::new(problem) }
    }

    #[test]
    fn the_exit_code_depends_on_the_kind_of_error() {
        for (status, code) in [(401, 4), (403, 4), (404, 3), (410, 3), (422, 2), (400, 2), (409, 1), (500, 1), (503, 1)]
        {
            assert_eq!(exit_code_of(&refused(status)), code, "{status}");
        }
    }

    #[test]
    fn a_problem_is_shown_with_each_error_once_and_the_id_of_the_request() {
        let text = describe(&refused(422));
        assert_eq!(
            text,
            "/rloo/beta: must be at least 0 (and 1 more; see errors)\n  /model: name a model\n  request req_1"
        );
    }
}
