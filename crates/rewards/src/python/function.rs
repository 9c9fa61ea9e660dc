//! Rewards of type `python`. The server process starts at first use and is called over loopback like a webhook, with the same
//! retries, journal and rules for missing values.

use std::collections::BTreeMap;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use futures::future::BoxFuture;
use tokio::sync::OnceCell;

use super::{PythonError, PythonServer, Settings, Target};
use crate::client::RewardClient;
use crate::http_client::restricted_client_builder;
use crate::outgoing::OutgoingPolicy;
use crate::signature::Key;
use crate::spec::{PythonPlan, RewardKind, RewardPlan, RewardSecrets};
use crate::webhook::Webhook;
use crate::{BuildError, JobContext, Judged, Reward, RewardFailure};

/// The Python files with reward functions of one attempt at a job. Each file has one Python process, which serves all rewards
/// that use its functions.
#[derive(Default)]
pub struct PythonFunctions(Mutex<BTreeMap<PathBuf, Arc<FileServer>>>);

/// The Python process that serves the functions of one file, started at first use.
struct FileServer {
    file: PathBuf,
    sha256: Option<String>,
    /// Listening socket for the Python process, bound first so that the address is known before the process runs.
    listener: TcpListener,
    secret: String,
    requirements: Mutex<Requirements>,
    server: OnceCell<PythonServer>,
}

/// The functions and the number of worker processes that the rewards of one file require.
#[derive(Debug, Default, Clone)]
struct Requirements {
    functions: Vec<String>,
    processes: u32,
}

impl PythonFunctions {
    fn of_file(&self, plan: &PythonPlan) -> std::io::Result<Arc<FileServer>> {
        let mut files = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let file = Path::new(&plan.file);
        let server = match files.get(file) {
            Some(server) => server.clone(),
            None => {
                let server = Arc::new(FileServer::new(file, plan.sha256.clone())?);
                files.insert(file.to_owned(), server.clone());
                server
            }
        };
        let mut requirements = server.requirements.lock().unwrap_or_else(PoisonError::into_inner);
        if !requirements.functions.contains(&plan.function) {
            requirements.functions.push(plan.function.clone());
        }
        requirements.processes = requirements.processes.max(plan.processes);
        drop(requirements);
        Ok(server)
    }
}

impl FileServer {
    fn new(file: &Path, sha256: Option<String>) -> std::io::Result<Self> {
        Ok(Self {
            file: file.to_owned(),
            sha256,
            listener: TcpListener::bind(("127.0.0.1", 0))?,
            secret: Key::generate()?,
            requirements: Mutex::default(),
            server: OnceCell::new(),
        })
    }

    async fn ensure_started(self: &Arc<Self>) -> Result<(), String> {
        let start = || async {
            let this = self.clone();
            match tokio::task::spawn_blocking(move || this.start()).await {
                Ok(started) => started.map_err(|error| error.to_string()),
                Err(error) => Err(error.to_string()),
            }
        };
        self.server.get_or_try_init(start).await.map(drop)
    }

    fn start(&self) -> Result<PythonServer, PythonError> {
        if !self.file.is_file() {
            let file = self.file.display();
            let detail = format!(
                "{file} does not exist on this worker's machine: a reward of type python needs the same file at the same path there. Copy \
                 it, or serve it with `rlood reward serve` and use that address in a webhook"
            );
            return Err(PythonError::Setting(detail));
        }
        let Requirements { functions, processes } =
            self.requirements.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let target = Target::of_file(&self.file, functions, self.sha256.clone());
        let settings = Settings {
            processes,
            secrets: vec![self.secret.clone()],
            directory: Some(target.folder.clone()),
            log_as: self.file.file_name().map(|name| name.to_string_lossy().into_owned()),
            ..Settings::new(vec![target])
        };
        let server = PythonServer::start(&self.listener, &settings)?;
        tracing::info!(file = %self.file.display(), python = server.version, "serves rewards");
        Ok(server)
    }
}

/// One Python function as a reward.
pub struct PythonFunction {
    name: String,
    file: Arc<FileServer>,
    webhook: Webhook,
}

impl PythonFunction {
    /// Creates the reward from its plan, with its Python process in `files`. `change` configures the HTTP client that calls the
    /// process, for example with the journal.
    ///
    /// # Errors
    /// Fails when no listening address or no HTTP client can be created.
    pub fn new(
        reward: &RewardPlan,
        plan: &PythonPlan,
        files: &PythonFunctions,
        client: &RewardClient,
        change: impl FnOnce(Webhook, &str) -> Webhook,
    ) -> Result<Self, BuildError> {
        let error = |detail: String| BuildError { reward: reward.name.clone(), detail };
        let file = files.of_file(plan).map_err(|why| error(format!("cannot listen for its process: {why}")))?;
        let address = file.listener.local_addr().map_err(|why| error(why.to_string()))?;
        let url = format!("http://{address}/{}", plan.function);
        let kind = RewardKind::Python(plan.clone()).with_service(|service| service.url.clone_from(&url));
        let secrets = RewardSecrets { secret: Some(file.secret.clone()), ..RewardSecrets::default() };
        let client = loopback_client(client).map_err(error)?;
        let webhook = Webhook::sharing(&reward.name, &kind, &secrets, &client)?.bounded(reward.max_abs_reward);
        Ok(Self { name: reward.name.clone(), file, webhook: change(webhook, &url) })
    }

    /// Returns the HTTP client that calls the Python process, which is started if it is not running.
    pub fn webhook(&self) -> &Webhook {
        &self.webhook
    }
}

/// Returns the same HTTP client, restricted to loopback addresses. The operator's rule about loopback applies only to
/// addresses that users give.
fn loopback_client(client: &RewardClient) -> Result<RewardClient, String> {
    let policy = OutgoingPolicy::parse(&["loopback"]).map_err(|why| why.to_string())?;
    let http = restricted_client_builder(&policy).http1_only().build();
    let http = http.map_err(|why| format!("cannot create an HTTP client: {why}"))?;
    Ok(RewardClient { policy, http, ..client.clone() })
}

impl Reward for PythonFunction {
    fn judge<'a>(
        &'a self,
        job: &'a JobContext,
        samples: &'a [crate::rollout::RewardSample],
    ) -> BoxFuture<'a, Result<Judged, RewardFailure>> {
        Box::pin(async move {
            self.prepare().await?;
            self.webhook.judge(job, samples).await
        })
    }

    fn prepare(&self) -> BoxFuture<'_, Result<(), RewardFailure>> {
        Box::pin(async move {
            let unusable = |detail| RewardFailure::Unusable { reward: self.name.clone(), detail };
            self.file.ensure_started().await.map_err(unusable)
        })
    }
}
