//! What every command gets: a client of the server, and where to write.

use clap::Args;
use rlood_client::{Client, Error, Retry};

use crate::error::CliError;
use crate::output::{Color, Out};
use crate::profiles::Profiles;
use crate::target::{Flags, Target, Variables, is_loopback};

/// Tries of a command after the first one: about 3 s, so that a wrong address is told soon.
const RETRIES: u32 = 4;

/// The flags of every command that talks to a server.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Server and output")]
pub struct Common {
    /// Address of the server. Default: RLOOD_SERVER, then the profile, then http://127.0.0.1:8080.
    #[arg(long, global = true, value_name = "URL")]
    pub server: Option<String>,

    /// API key. It can be seen in the list of processes: prefer a profile with key_command, or RLOOD_KEY.
    #[arg(long, global = true, value_name = "KEY")]
    pub key: Option<String>,

    /// Profile of `rlood login`, with its server and key. Default: RLOOD_PROFILE, then the default profile.
    #[arg(long, global = true, value_name = "NAME")]
    pub profile: Option<String>,

    /// Print the API's own JSON: one document, or one object a line while something is followed.
    #[arg(long, global = true)]
    pub json: bool,

    /// When to color: auto means on a terminal, unless NO_COLOR is set.
    #[arg(long, global = true, value_enum, default_value_t = Color::Auto, value_name = "WHEN")]
    pub color: Color,
}

impl Common {
    /// Whether a flag, a variable or a profile names a server.
    ///
    /// # Errors
    /// When the file of profiles cannot be read.
    pub fn names_a_server(&self) -> Result<bool, CliError> {
        Ok(self.has_flag() || !self.target()?.is_assumed)
    }

    /// Whether a flag of the connection is given.
    pub fn has_flag(&self) -> bool {
        self.server.is_some() || self.key.is_some() || self.profile.is_some()
    }

    /// Where to write.
    pub(crate) fn out(&self) -> Out {
        Out::new(self.json, self.color)
    }

    fn target(&self) -> Result<Target, CliError> {
        let Self { server, key, profile, .. } = self;
        let flags = Flags { server: server.as_deref(), key: key.as_deref(), profile: profile.as_deref() };
        Target::decide(flags, &Variables::of_environment(), &Profiles::open()?)
    }

    pub(crate) fn context(&self) -> Result<Context, CliError> {
        let target = self.target()?;
        let client = client_of(&target)?;
        Ok(Context { client, out: self.out(), target })
    }
}

/// What a command works with.
pub struct Context {
    /// Of the server.
    pub client: Client,
    /// Where to write.
    pub out: Out,
    /// The server, and where it comes from.
    pub target: Target,
}

impl Context {
    /// The error, with what to do when no server was named and none runs here.
    pub fn explain(&self, error: CliError) -> CliError {
        match &error {
            CliError::Api(Error::Unreachable { source, .. }) if source.is_connect() => {
                let server = &self.target.server;
                let advice = if self.target.is_assumed {
                    "`rlood serve` starts a server here; --server, RLOOD_SERVER or `rlood login URL` name another one"
                } else {
                    "check the address, and that the server runs"
                };
                CliError::Unreachable(format!("no server answers at {server}: {advice}"))
            }
            _ => error,
        }
    }
}

/// Runs a command that needs a server.
///
/// # Errors
/// Those of the command; where no server answers, with what to do.
pub async fn with(common: &Common, work: impl AsyncFnOnce(&Context) -> Result<u8, CliError>) -> Result<u8, CliError> {
    let context = common.context()?;
    work(&context).await.map_err(|error| context.explain(error))
}

/// A client of the target.
pub fn client_of(target: &Target) -> Result<Client, CliError> {
    let mut builder = Client::builder(&target.server).retry(Retry { max_retries: RETRIES, ..Retry::default() });
    if let Some(key) = &target.key {
        builder = builder.api_key(key);
    }
    if let Some(path) = &target.ca_file {
        let pem = std::fs::read(path);
        let pem = pem.map_err(|error| CliError::Usage(format!("cannot read ca_file {}: {error}", path.display())))?;
        builder = builder.root_certificates(pem);
    }
    if is_loopback(&target.server) {
        builder = builder.no_proxy();
    }
    Ok(builder.build()?)
}
