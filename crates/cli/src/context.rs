//! The context of a command: a client for the server, and the output to write to.

use clap::Args;
use rlood_client::{Client, ClientBuilder, Error, Retry};

use crate::error::CliError;
use crate::hub_token::user_token;
use crate::output::{Color, Out, clean};
use crate::profiles::Profiles;
use crate::target::{Flags, Target, Variables, is_loopback};

/// Maximum number of retries of a request. All retries together take about 3 s, so that a wrong address is reported soon.
const MAX_RETRIES: u32 = 4;

/// Flags of every command that connects to a server.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Server and output")]
pub struct Common {
    /// Address of the server. Default: RLOOD_SERVER, then the profile's server, then http://127.0.0.1:8080.
    #[arg(long, global = true, value_name = "URL")]
    pub server: Option<String>,

    /// API key. Other users can see it in the process list: prefer RLOOD_KEY, or a profile with key_command.
    #[arg(long, global = true, value_name = "KEY")]
    pub key: Option<String>,

    /// Profile to use, created by `rlood login`. Default: RLOOD_PROFILE, then the default profile.
    #[arg(long, global = true, value_name = "NAME")]
    pub profile: Option<String>,

    /// Hugging Face token for gated and private models and datasets, and for pushes. The server does not store it. Other users can see a flag in
    /// the process list: prefer the variable.
    #[arg(long, global = true, env = "RLOOD_HUB_TOKEN", hide_env_values = true, value_name = "TOKEN")]
    pub hub_token: Option<String>,

    /// Send the Hugging Face token of this machine's user with the requests: HF_TOKEN, or the file that `hf auth login` writes. It is used
    /// instead of --hub-token. Without this flag only `rlood push` reads it.
    #[arg(long, global = true)]
    pub hf_token: bool,

    /// Print the API's JSON: one document, or one object per line when following.
    #[arg(long, global = true)]
    pub json: bool,

    /// When to use color; auto means on a terminal, unless NO_COLOR is set.
    #[arg(long, global = true, value_enum, default_value_t = Color::Auto, value_name = "WHEN")]
    pub color: Color,
}

impl Common {
    /// Returns whether a flag, a variable or a profile names a server.
    ///
    /// # Errors
    /// Fails when the file of profiles cannot be read.
    pub fn names_a_server(&self) -> Result<bool, CliError> {
        Ok(self.has_flag() || !self.target()?.is_assumed)
    }

    /// Returns whether a flag of the connection is given.
    pub fn has_flag(&self) -> bool {
        self.server.is_some() || self.key.is_some() || self.profile.is_some()
    }

    /// Returns the output settings that the flags select.
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
        let mut builder = builder_of(&target)?;
        if self.hf_token {
            let (token, place) = user_token(|name| std::env::var(name).ok()).ok_or_else(|| {
                let detail = "--hf-token: no token found: set HF_TOKEN, run `hf auth login`, or use --hub-token";
                CliError::Usage(detail.to_owned())
            })?;
            self.out()
                .note(format!("the hub token of {} is sent to the server, which does not store it", clean(&place)));
            builder = builder.hub_token(token);
        } else if let Some(token) = self.hub_token.as_deref().filter(|token| !token.trim().is_empty()) {
            builder = builder.hub_token(token);
        }
        let client = builder.build()?;
        Ok(Context { client, out: self.out(), target })
    }
}

/// The context that a command runs in: client, output and target server.
pub struct Context {
    /// Client for the target server.
    pub client: Client,
    /// Output for data (standard output) and messages (standard error).
    pub out: Out,
    /// The server's address and the API key, and the profile that they come from.
    pub target: Target,
}

impl Context {
    /// Adds advice to a connection error: how to start or name a server.
    pub fn explain(&self, error: CliError) -> CliError {
        match &error {
            CliError::Api(Error::Unreachable { source, .. }) if source.is_connect() => {
                let server = &self.target.server;
                let advice = if self.target.is_assumed {
                    "start a server with `rlood serve`, or name another one with --server, RLOOD_SERVER or `rlood login URL`"
                } else {
                    "check the address of the server, and whether it is running"
                };
                CliError::Unreachable(format!("cannot connect to {server}: {advice}"))
            }
            _ => error,
        }
    }
}

/// Runs a command that needs a server.
///
/// # Errors
/// Returns the command's error. A connection error also contains advice.
pub async fn with(common: &Common, work: impl AsyncFnOnce(&Context) -> Result<u8, CliError>) -> Result<u8, CliError> {
    let context = common.context()?;
    work(&context).await.map_err(|error| context.explain(error))
}

/// Creates a client for a server.
pub fn client_of(target: &Target) -> Result<Client, CliError> {
    Ok(builder_of(target)?.build()?)
}

fn builder_of(target: &Target) -> Result<ClientBuilder, CliError> {
    let mut builder = Client::builder(&target.server).retry(Retry { max_retries: MAX_RETRIES, ..Retry::default() });
    if let Some(key) = &target.key {
        builder = builder.api_key(key);
    }
    if let Some(path) = &target.ca_file {
        let pem = std::fs::read(path);
        let pem = pem.map_err(|error| {
            CliError::Usage(format!("cannot read the certificates of ca_file {}: {error}", path.display()))
        })?;
        builder = builder.root_certificates(pem);
    }
    if is_loopback(&target.server) {
        builder = builder.no_proxy();
    }
    Ok(builder)
}
