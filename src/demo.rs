//! `rlood demo`: trains the bundled model from start to end, as a user's job would.
//!
//! The demo consists of the same parts as a real setup: a server as `rlood serve` runs it, with its own worker process; a reward
//! service on another port ([`reward_service`]); and a client that uses only the public HTTP API ([`rlood_client`]). It also serves
//! as an example of that API. `rlood demo --agent` trains another bundled model in the same way, to call a calculator in episodes of
//! several turns ([`calculator`]).

use std::io::IsTerminal;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use rlood_client::{Client, DatasetUpload, Document};
use serde_json::{Value, json};
use tokio::signal::unix::{SignalKind, signal};

use crate::bundle;
use crate::config::{ConfigError, DemoArgs, HubConfig, ServeConfig, resolve_listen};
use crate::demo::reward_service::ExampleService;
use crate::id::{DatasetId, JobId};
use crate::job::State;
use crate::reward::signature::Key;
use crate::serve::{self, ServeError};

mod agent;
mod arithmetic;
pub mod calculator;
mod outcome;
mod progress;
pub mod reward_service;

use agent::AgentOutcome;
use calculator::Calculator;
use outcome::Outcome;
use progress::Progress;

/// The id under which the bundled model is registered.
const MODEL: &str = "rlood/tiny";
/// Default listen address of the demo; if it is in use, the demo chooses a free port.
const USUAL_LISTEN: &str = "127.0.0.1:8080";
/// Default number of optimizer steps, which reaches the goal with a margin: held-out accuracy was ≥ 0.98 after 20 and ≥ 0.99 after
/// 40 steps with each of six seeds.
const STEPS: u64 = 40;
/// Number of steps between checkpoints.
const CHECKPOINT_EVERY: u64 = 20;
/// Exit code after Ctrl-C: 128 + SIGINT, by the convention of shells.
const EXIT_INTERRUPTED: u8 = 130;

/// Why the demo could not run.
#[derive(Debug, thiserror::Error)]
pub enum DemoError {
    /// A flag is invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The server failed to start.
    #[error(transparent)]
    Serve(#[from] ServeError),
    /// The API returned an error.
    #[error(transparent)]
    Api(#[from] rlood_client::Error),
    /// An operation on files, sockets or signals failed.
    #[error("cannot {doing}")]
    System {
        /// The operation that failed.
        doing: String,
        /// Error of the underlying operation.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The job did not end as expected.
    #[error("{0}")]
    Job(String),
}

fn system<E: std::error::Error + Send + Sync + 'static>(doing: impl Into<String>) -> impl FnOnce(E) -> DemoError {
    let doing = doing.into();
    move |source| DemoError::System { doing, source: Box::new(source) }
}

/// Runs the subcommand `rlood demo`.
///
/// # Errors
/// Fails when the server cannot start, the API refuses a request, or the job does not succeed.
pub(crate) async fn run(args: DemoArgs) -> Result<ExitCode, DemoError> {
    let begun = Instant::now();
    let mut terminate = signal(SignalKind::terminate()).map_err(system("listen for the signal SIGTERM"))?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(system("listen for the signal SIGINT"))?;
    let data_dir = match &args.data_dir {
        Some(given) => std::path::absolute(given).map_err(system("read --data-dir"))?,
        None => fresh_data_dir()?,
    };
    let config = ServeConfig {
        listen: listen_address(args.listen.as_deref())?,
        hub: HubConfig::of_environment(),
        isa: args.isa,
        ..ServeConfig::loopback(&data_dir)?
    };
    let server = serve::start(config).await?;
    serve::announce(server.addr()).map_err(system("write to standard output"))?;

    let demonstrated = tokio::select! {
        demonstrated = demonstrate(&args, &data_dir, server.addr(), begun) => Some(demonstrated),
        _ = terminate.recv() => None,
        _ = interrupt.recv() => None,
    };
    let code = match &demonstrated {
        None => ExitCode::from(EXIT_INTERRUPTED),
        Some(Err(_)) => ExitCode::FAILURE,
        Some(Ok(demonstrated)) if args.exit => demonstrated.judge(),
        Some(Ok(_)) => {
            println!("\nserving until Ctrl-C");
            tokio::select! { _ = terminate.recv() => {}, _ = interrupt.recv() => {} }
            ExitCode::SUCCESS
        }
    };
    tokio::select! { () = server.stop() => {}, _ = terminate.recv() => {}, _ = interrupt.recv() => {} }
    match demonstrated {
        Some(Err(error)) => Err(error),
        Some(Ok(_)) | None => Ok(code),
    }
}

/// The results of a demo. The service is part of them, because it must answer further jobs and verdicts.
enum Demonstrated {
    Sums(Outcome, #[expect(dead_code, reason = "it serves until it is dropped")] ExampleService),
    Agent(Box<AgentOutcome>, #[expect(dead_code, reason = "it serves until it is dropped")] Calculator),
}

impl Demonstrated {
    fn judge(&self) -> ExitCode {
        match self {
            Demonstrated::Sums(outcome, _) => outcome.judge(),
            Demonstrated::Agent(outcome, _) => outcome.judge(),
        }
    }
}

async fn demonstrate(
    args: &DemoArgs,
    data_dir: &Path,
    server: SocketAddr,
    begun: Instant,
) -> Result<Demonstrated, DemoError> {
    let client = Client::builder(&format!("http://{server}")).no_proxy().build()?;
    if args.agent {
        let (outcome, calculator) = agent::demonstrate(&client, args, data_dir, begun).await?;
        return Ok(Demonstrated::Agent(Box::new(outcome), calculator));
    }
    let (outcome, service) = demonstrate_sums(&client, args, data_dir, begun).await?;
    Ok(Demonstrated::Sums(outcome, service))
}

/// Runs the demo over HTTP, as a user would: registers the model, uploads the data, submits the job, follows
/// it, fetches the results. The reward service is returned too, because a verdict on the job needs it.
async fn demonstrate_sums(
    client: &Client,
    args: &DemoArgs,
    data_dir: &Path,
    begun: Instant,
) -> Result<(Outcome, ExampleService), DemoError> {
    let model_dir = data_dir.join("tiny");
    bundle::unpack_model(&model_dir).map_err(system(format!("write the bundled model to {}", model_dir.display())))?;
    let secret = Key::generate().map_err(system("generate a secret"))?;
    let service = ExampleService::start(&secret).await.map_err(system("start the demo's reward service"))?;

    let model = client.create_model(MODEL, &model_dir.to_string_lossy()).await?;
    let train = client.create_dataset(&DatasetUpload::ndjson(bundle::TRAIN).named("sums")).await?;
    let held_out = client.create_dataset(&DatasetUpload::ndjson(bundle::HELD_OUT).named("sums-held-out")).await?;
    let steps = args.steps.unwrap_or(STEPS);
    let reward =
        json!({"name": "correct", "type": "webhook", "url": service.url(), "secret": secret, "max_batch_samples": 256});
    let job = Document::from(&job(train.id, held_out.id, reward, steps, args.seed));
    let id = client.create_job(&job).await?.id;

    let num_parameters = model.card.map_or(0, |card| card.num_parameters);
    println!("model     {MODEL}, {num_parameters} parameters, in {}", model_dir.display());
    println!("dataset   {} prompts, {} held out", train.num_rows, held_out.num_rows);
    println!("reward    {} (contract v1, signed)", service.url());
    follow(client, id, steps).await?;
    let outcome = Outcome::read(client, id, steps, data_dir).await?;
    outcome.print(client.server(), begun.elapsed());
    Ok((outcome, service))
}

/// Prints how to find the job, and shows its progress until it has succeeded.
async fn follow(client: &Client, id: JobId, steps: u64) -> Result<(), DemoError> {
    println!("job       {}/jobs/{id}", client.server());
    println!("          rlood submit job.yaml --server {} submits one of your own", client.server());
    println!("          rlood watch {id} --server {} follows it, as here\n", client.server());
    let progress = Progress::new(steps, std::io::stdout().is_terminal() && std::io::stderr().is_terminal());
    let job = progress.follow(client, id).await?;
    if job.state == State::Succeeded {
        return Ok(());
    }
    let (code, message, suggestion) = job.failure.map_or_else(Default::default, |failure| {
        (failure.code, failure.message, failure.suggestion.unwrap_or_default())
    });
    let state = job.state.as_str();
    Err(DemoError::Job(format!("the job is {state}: {code} {message} {suggestion}")))
}

/// Builds the job as a user would write it.
fn job(train: DatasetId, held_out: DatasetId, reward: Value, steps: u64, seed: u64) -> Value {
    json!({
        "name": "demo: sums",
        "model": MODEL,
        "dataset": {"id": train},
        "eval": {"dataset": {"id": held_out}, "every_steps": steps, "before_start": true, "num_generations": 1, "temperature": 0},
        "rewards": [
            reward,
            // A reward with weight 0 is logged but not trained on.
            {"name": "exact_match", "type": "exact_match", "column": "answer", "weight": 0},
        ],
        "rloo": {"num_generations": 8, "beta": 0.01},
        "sampling": {"max_completion_length": 6, "temperature": 1.0},
        "lora": {"r": 16, "alpha": 32, "target_modules": "all-linear"},
        "optimizer": {"learning_rate": 1.5e-3, "lr_scheduler_type": "linear", "warmup_steps": 5},
        "training": {"prompts_per_step": 32, "max_steps": steps, "seed": seed},
        "checkpoints": {"every_steps": steps.min(CHECKPOINT_EVERY)},
    })
}

fn listen_address(given: Option<&str>) -> Result<SocketAddr, ConfigError> {
    match given {
        Some(given) => resolve_listen(given, false),
        None => {
            let usual = resolve_listen(USUAL_LISTEN, false)?;
            let is_free = std::net::TcpListener::bind(usual).is_ok();
            Ok(if is_free { usual } else { SocketAddr::from(([127, 0, 0, 1], 0)) })
        }
    }
}

/// Creates a folder for the demo's data in the user's cache directory.
fn fresh_data_dir() -> Result<PathBuf, DemoError> {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = absolute("XDG_CACHE_HOME")
        .or_else(|| absolute("HOME").map(|home| home.join(".cache")))
        .unwrap_or_else(std::env::temp_dir)
        .join("rlood");
    std::fs::create_dir_all(&cache).map_err(system(format!("create {}", cache.display())))?;
    let name = format!("demo-{}-", jiff::Timestamp::now().strftime("%Y%m%d-%H%M%S"));
    let fresh = tempfile::Builder::new().prefix(&name).tempdir_in(&cache);
    Ok(fresh.map_err(system(format!("create a folder for the demo in {}", cache.display())))?.keep())
}
