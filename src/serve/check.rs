//! `rlood check`: would a server start here?

use std::process::ExitCode;

use super::ServeError;
use crate::config::ServeConfig;

/// Prints versions, directory, devices and port; the exit code is 0 when a server would start.
///
/// # Errors
/// None so far.
pub async fn run(config: ServeConfig) -> Result<ExitCode, ServeError> {
    println!("rlood {}", env!("CARGO_PKG_VERSION"));
    match tokio::net::TcpListener::bind(config.listen).await {
        Ok(_) => println!("listen    {} is free", config.listen),
        Err(error) => {
            println!("listen    {} cannot be used: {error}", config.listen);
            return Ok(ExitCode::FAILURE);
        }
    }
    Ok(ExitCode::SUCCESS)
}
