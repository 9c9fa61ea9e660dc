//! `rlood adapter-sidecar`: a proxy beside a vLLM server that has no folder in common with the worker. It downloads an adapter from
//! the rlood server before vLLM loads it, and passes on only the routes that a rollout server needs.
//!
//! vLLM's API key guards only `/v1`, and other routes load adapters or generate without a key: behind the proxy they are not reachable.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{DefaultBodyLimit, State};
use axum::http::{HeaderMap, Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use futures::future::LocalBoxFuture;
use rlood_client::Client;
use serde_json::{Value, json};
use tokio::sync::Mutex;

use crate::config::sidecar::SidecarArgs;
use crate::digest::Sha256Digest;
use crate::error_text::with_causes;
use crate::id::JobId;

const LOAD: &str = "/v1/load_lora_adapter";
const UNLOAD: &str = "/v1/unload_lora_adapter";
/// Routes that are passed on.
const ROUTES: [(&str, &str); 7] = [
    ("GET", "/health"),
    ("GET", "/version"),
    ("GET", "/metrics"),
    ("GET", "/v1/models"),
    ("POST", "/v1/completions"),
    ("POST", LOAD),
    ("POST", UNLOAD),
];
/// The files of an adapter. The second has the weights, whose hash is part of the adapter's name.
const FILES: [&str; 2] = ["adapter_config.json", "adapter_model.safetensors"];
/// Time between unloading an adapter and deleting its files: vLLM ends if the files of an adapter in use are gone.
const DELETE_AFTER: Duration = Duration::from_secs(180);
/// Maximum size of a request, in bytes.
const MAX_BYTES: usize = 64 << 20;

/// Why the sidecar could not run.
#[derive(Debug, thiserror::Error)]
pub enum SidecarError {
    /// The folder of adapters cannot be used.
    #[error("cannot use the folder {}", .0.display())]
    Folder(PathBuf, #[source] std::io::Error),
    /// The address cannot be listened on.
    #[error("cannot listen on {0}")]
    Listen(std::net::SocketAddr, #[source] std::io::Error),
    /// A client for the rlood server or for vLLM cannot be created.
    #[error("cannot create an HTTP client: {0}")]
    Client(String),
    /// The proxy stopped because of an error of its socket.
    #[error("the proxy stopped")]
    Stopped(#[source] std::io::Error),
}

struct Sidecar {
    server: Client,
    http: reqwest::Client,
    vllm: String,
    dir: PathBuf,
    /// One lock per adapter, so that it is downloaded once.
    downloads: Mutex<HashMap<String, Arc<Mutex<()>>>>,
}

/// Runs the proxy until the process ends.
///
/// # Errors
/// Fails if the folder or the address cannot be used.
pub fn run(args: SidecarArgs) -> LocalBoxFuture<'static, Result<ExitCode, SidecarError>> {
    Box::pin(async move {
        let folder = |error| SidecarError::Folder(args.dir.clone(), error);
        std::fs::create_dir_all(&args.dir).map_err(folder)?;
        let dir = std::fs::canonicalize(&args.dir).map_err(folder)?;
        let builder = Client::builder(&args.server);
        let builder = args.api_key.iter().fold(builder, |builder, key| builder.api_key(key));
        let sidecar = Sidecar {
            server: builder.build().map_err(|error| SidecarError::Client(with_causes(&error)))?,
            http: crate::reward::http_client::client_builder()
                .build()
                .map_err(|error| SidecarError::Client(with_causes(&error)))?,
            vllm: args.vllm.trim_end_matches('/').to_owned(),
            dir,
            downloads: Mutex::default(),
        };
        let listener = tokio::net::TcpListener::bind(args.listen)
            .await
            .map_err(|error| SidecarError::Listen(args.listen, error))?;
        let address = listener.local_addr().map_err(|error| SidecarError::Listen(args.listen, error))?;
        println!("listening on http://{address}");
        let app = Router::new().fallback(answer).layer(DefaultBodyLimit::max(MAX_BYTES)).with_state(Arc::new(sidecar));
        axum::serve(listener, app).await.map_err(SidecarError::Stopped)?;
        Ok(ExitCode::SUCCESS)
    })
}

async fn answer(
    State(sidecar): State<Arc<Sidecar>>,
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let path = uri.path();
    if !ROUTES.contains(&(method.as_str(), path)) {
        return error(StatusCode::NOT_FOUND, format!("rlood adapter-sidecar does not pass on {method} {path}"));
    }
    match path {
        LOAD => sidecar.load(&headers, &body).await,
        UNLOAD => sidecar.unload(&headers, body).await,
        _ => sidecar.pass_on(method, path, &headers, body).await,
    }
}

/// An error in vLLM's form.
fn error(status: StatusCode, message: String) -> Response {
    let body = json!({"error": {"message": message, "type": "sidecar", "param": null, "code": status.as_u16()}});
    (status, axum::Json(body)).into_response()
}

impl Sidecar {
    /// Sends a request to vLLM, and its answer back as it arrives.
    async fn pass_on(&self, method: Method, path: &str, headers: &HeaderMap, body: Bytes) -> Response {
        let mut request = self.http.request(method, format!("{}{path}", self.vllm)).body(body);
        for name in [header::AUTHORIZATION, header::CONTENT_TYPE, header::ACCEPT] {
            if let Some(value) = headers.get(&name) {
                request = request.header(name, value.clone());
            }
        }
        match request.send().await {
            Ok(answer) => {
                let mut response = Response::builder().status(answer.status());
                for name in [header::CONTENT_TYPE, header::RETRY_AFTER] {
                    if let Some(value) = answer.headers().get(&name) {
                        response = response.header(name, value.clone());
                    }
                }
                response
                    .body(Body::from_stream(answer.bytes_stream()))
                    .unwrap_or_else(|_| StatusCode::BAD_GATEWAY.into_response())
            }
            Err(why) => error(StatusCode::BAD_GATEWAY, format!("vLLM cannot be reached: {}", with_causes(&why))),
        }
    }

    /// Downloads the adapter, then lets vLLM load it from this machine's folder.
    async fn load(&self, headers: &HeaderMap, body: &Bytes) -> Response {
        let name = match adapter_name(body) {
            Ok(found) => found,
            Err(why) => return error(StatusCode::BAD_REQUEST, why),
        };
        let lock = self.downloads.lock().await.entry(name.adapter.clone()).or_default().clone();
        let _locked = lock.lock().await;
        let dir = self.dir.join(&name.adapter);
        if !dir.is_dir()
            && let Err(why) = self.download(&name, &dir).await
        {
            tracing::warn!(adapter = name.adapter, why, "cannot download an adapter");
            // The worker tries again, as when a network file system shows the directory late.
            return error(StatusCode::NOT_FOUND, format!("No adapter found for {}: {why}", name.adapter));
        }
        let body = json!({"lora_name": name.adapter, "lora_path": dir, "load_inplace": false});
        let answer = self.pass_on(Method::POST, LOAD, headers, Bytes::from(body.to_string())).await;
        let (parts, body) = answer.into_parts();
        let body = axum::body::to_bytes(body, MAX_BYTES).await.unwrap_or_default();
        let is_loaded = parts.status == StatusCode::BAD_REQUEST
            && String::from_utf8_lossy(&body).contains("has already been loaded");
        if is_loaded {
            // The files under a name never change, so what is loaded is what was asked for.
            return "Success: LoRA adapter has been loaded before.".into_response();
        }
        Response::from_parts(parts, Body::from(body))
    }

    async fn unload(self: Arc<Self>, headers: &HeaderMap, body: Bytes) -> Response {
        let name = match adapter_name(&body) {
            Ok(found) => found,
            Err(why) => return error(StatusCode::BAD_REQUEST, why),
        };
        let answer = self.pass_on(Method::POST, UNLOAD, headers, body).await;
        if answer.status().is_success() {
            self.downloads.lock().await.remove(&name.adapter);
            tokio::spawn(async move {
                tokio::time::sleep(DELETE_AFTER).await;
                // Loading it again has created another lock.
                let downloads = self.downloads.lock().await;
                let dir = self.dir.join(&name.adapter);
                if !downloads.contains_key(&name.adapter)
                    && let Err(error) = std::fs::remove_dir_all(&dir)
                {
                    tracing::warn!(%error, path = %dir.display(), "cannot delete an adapter");
                }
            });
        }
        answer
    }

    /// Downloads an adapter into `dir`, which appears when it is complete and its hash is right.
    async fn download(&self, name: &AdapterName, dir: &Path) -> Result<(), String> {
        let temporary = tempfile::Builder::new().prefix(".tmp-").tempdir_in(&self.dir).map_err(|e| e.to_string())?;
        for file in FILES {
            let to = temporary.path().join(file);
            let downloaded = self.server.download_rollout_adapter_file(name.job, &name.adapter, file, &to).await;
            downloaded.map_err(|error| with_causes(&error))?;
        }
        let weights = temporary.path().join(FILES[1]);
        let (_, hash) = std::fs::File::open(weights)
            .and_then(|mut file| Sha256Digest::of_reader(&mut file))
            .map_err(|error| error.to_string())?;
        if !hash.to_string().starts_with(&name.hash) {
            return Err("the downloaded weights do not have the hash in the adapter's name".to_owned());
        }
        set_readable(temporary.path()).map_err(|error| error.to_string())?;
        std::fs::rename(temporary.path(), dir).map_err(|error| error.to_string())?;
        let _renamed = temporary.keep();
        Ok(())
    }
}

/// Lets vLLM read the directory as another user.
fn set_readable(dir: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o755))
}

/// The name of an adapter, `rlood-JOB-aATTEMPT-sSTEP-HASH`, and its parts.
#[derive(Debug, PartialEq)]
struct AdapterName {
    adapter: String,
    job: JobId,
    hash: String,
}

fn adapter_name(body: &[u8]) -> Result<AdapterName, String> {
    let body: Value = serde_json::from_slice(body).map_err(|error| format!("the body is not JSON: {error}"))?;
    let adapter = body["lora_name"].as_str().unwrap_or_default();
    let refused = || format!("'{adapter}' is not the name of an adapter of rlood (rlood-JOB-aATTEMPT-sSTEP-HASH)");
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
    let mut parts = adapter.strip_prefix("rlood-").unwrap_or_default().split('-');
    let job = parts.next().and_then(|job| job.parse().ok());
    let hash = parts.next_back().filter(|hash| hash.len() == 12 && hash.bytes().all(|byte| byte.is_ascii_hexdigit()));
    match (job, hash) {
        (Some(job), Some(hash)) if adapter.chars().all(is_plain) => {
            Ok(AdapterName { adapter: adapter.to_owned(), job, hash: hash.to_owned() })
        }
        _ => Err(refused()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_our_adapters_are_files() {
        let job = JobId::new();
        let name = |text: &str| adapter_name(json!({"lora_name": text}).to_string().as_bytes());
        let good = format!("rlood-{job}-a2-s17-0123456789ab");
        let found = name(&good).unwrap();
        assert_eq!((found.adapter.as_str(), found.job, found.hash.as_str()), (good.as_str(), job, "0123456789ab"));
        for bad in [
            "",
            "base",
            "../../etc",
            &format!("rlood-{job}-a2-s17-0123456789"),
            &format!("rlood-{job}-../x-0123456789ab"),
            "rlood-job_1-a2-s17-0123456789ab",
            &format!("rlood-{job}-a2-s17-0123456789xy"),
        ] {
            assert!(name(bad).unwrap_err().contains("rlood-JOB-aATTEMPT-sSTEP-HASH"), "{bad}");
        }
        assert!(adapter_name(b"{").is_err());
    }
}
