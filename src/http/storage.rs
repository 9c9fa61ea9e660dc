//! What the server keeps, by kind and owner, and the limits on it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::State;
use rlood_worker::size::format_size;
use serde::Serialize;
use tokio::sync::Mutex;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::AppState;
use super::auth::Caller;
use super::error::{Code, Problem};
use super::extract::Json;
use crate::storage::{StorageKind, StorageUse};
use crate::store::storage::{self, StorageReport};

/// How old a report may be by which a write is accepted or refused.
const REPORT_AGE: Duration = Duration::from_secs(5);

/// The routes of this module.
pub fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(get_storage))
}

/// The last report, and the right to make the next one: looking at every file is work for one at a time.
#[derive(Debug, Default)]
pub struct LastReport(Mutex<Option<(Instant, Arc<StorageReport>)>>);

/// What the server keeps, as far as the key sees it.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Storage {
    /// The disk of the data directory.
    pub disk: Disk,
    /// Bytes in the data directory: the sum over `kinds`, and over `owners`.
    pub size_bytes: u64,
    /// By kind, all of them.
    pub kinds: Vec<KindStorage>,
    /// By owner, those who have something.
    pub owners: Vec<OwnerStorage>,
    /// Registered models in folders of the operator. They are not in `size_bytes`, and the server never removes their files.
    pub external_models: Amount,
}

/// A disk.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Disk {
    /// Bytes in all.
    pub total_bytes: u64,
    /// Bytes that can be written.
    pub free_bytes: u64,
    /// Bytes that stay free: below this jobs pause (`--disk-reserve`).
    pub reserve_bytes: u64,
}

/// How much there is of something.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct Amount {
    /// Bytes. A file that is linked in several places counts once.
    pub size_bytes: u64,
    /// Models, datasets, checkpoints; of samples and journals the jobs that have some; else files and folders.
    pub count: u64,
}

/// What is kept of one kind.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct KindStorage {
    /// The kind.
    pub kind: StorageKind,
    /// What the key sees of it.
    #[serde(flatten)]
    pub amount: Amount,
    /// The most that all owners together may have (`--storage-limit`); null = no limit but the disk.
    pub limit_bytes: Option<u64>,
}

/// What is kept for one owner.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct OwnerStorage {
    /// The owner; empty = the operator, whose are also models for everybody and what belongs to no job.
    pub owner: String,
    /// In all.
    #[serde(flatten)]
    pub amount: Amount,
    /// By kind, those of which there is something.
    pub kinds: Vec<KindAmount>,
}

/// What one owner has of one kind.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct KindAmount {
    /// The kind.
    pub kind: StorageKind,
    /// How much.
    #[serde(flatten)]
    pub amount: Amount,
}

impl std::ops::AddAssign<StorageUse> for Amount {
    fn add_assign(&mut self, other: StorageUse) {
        self.size_bytes += other.size_bytes;
        self.count += other.count;
    }
}

/// What is kept.
///
/// A key with the scope admin sees every owner's, others their own; the disk and the limits are the same for all.
/// `rlood gc --dry-run` on the server lists what can be removed.
#[utoipa::path(get, path = "/system/storage", tag = "System",
    responses((status = 200, description = "By kind and by owner", body = Storage)))]
async fn get_storage(State(state): State<AppState>, caller: Caller) -> Result<Json<Storage>, Problem> {
    let report = report(&state, Duration::ZERO).await?;
    let mut all = Amount::default();
    let mut owners: Vec<OwnerStorage> = Vec::new();
    let seen = |owner: &str| caller.may_see(owner);
    for ((kind, owner), used) in report.usage.iter().filter(|((_, owner), _)| seen(owner)) {
        let at = owners.iter().position(|known| known.owner == *owner).unwrap_or_else(|| {
            owners.push(OwnerStorage { owner: owner.clone(), amount: Amount::default(), kinds: Vec::new() });
            owners.len() - 1
        });
        all += *used;
        if let Some(entry) = owners.get_mut(at) {
            entry.amount += *used;
            entry.kinds.push(KindAmount { kind: *kind, amount: amount_of(*used) });
        }
    }
    owners.sort_by(|one, other| one.owner.cmp(&other.owner));
    let kinds = StorageKind::ALL.into_iter().map(|kind| {
        let mut amount = Amount::default();
        for ((_, _), used) in report.usage.iter().filter(|((of, owner), _)| *of == kind && seen(owner)) {
            amount += *used;
        }
        KindStorage { kind, amount, limit_bytes: state.config.storage_limits.get(&kind).copied() }
    });
    let mut external_models = Amount::default();
    for (_, used) in report.elsewhere.iter().filter(|(owner, _)| seen(owner)) {
        external_models += *used;
    }
    let disk = Disk {
        total_bytes: report.disk_bytes,
        free_bytes: report.free_bytes,
        reserve_bytes: state.config.edge.disk_reserve_bytes,
    };
    Ok(Json(Storage { disk, size_bytes: all.size_bytes, kinds: kinds.collect(), owners, external_models }))
}

fn amount_of(StorageUse { size_bytes, count }: StorageUse) -> Amount {
    Amount { size_bytes, count }
}

/// The report of now, or one that is at most so old. Requests that come while one is made wait for it.
async fn report(state: &AppState, age: Duration) -> Result<Arc<StorageReport>, Problem> {
    let asked = Instant::now();
    let mut last = state.storage.0.lock().await;
    // One that was begun after the request is as good as its own.
    let is_good = |at: &Instant| *at >= asked || at.elapsed() < age;
    if let Some((_, report)) = last.as_ref().filter(|(at, _)| is_good(at)) {
        return Ok(report.clone());
    }
    let begun = Instant::now();
    let report = Arc::new(storage::report(&state.store, &state.files).await.map_err(Problem::internal)?);
    *last = Some((begun, report.clone()));
    Ok(report)
}

/// Refuses bytes of a kind that has a limit and has reached it.
pub(super) async fn check_limit(state: &AppState, kind: StorageKind, more_bytes: u64) -> Result<(), Problem> {
    let Some(limit) = state.config.storage_limits.get(&kind).copied() else { return Ok(()) };
    let report = report(state, REPORT_AGE).await?;
    let used: u64 = report.usage.iter().filter(|((of, _), _)| *of == kind).map(|(_, used)| used.size_bytes).sum();
    if used.saturating_add(more_bytes) <= limit {
        return Ok(());
    }
    let detail = format!(
        "{kind} take {} of the {} that --storage-limit allows them, and {} more do not fit: delete some that are not needed \
         (`rlood gc --dry-run` on the server lists what can go), or have the operator raise the limit",
        format_size(used),
        format_size(limit),
        format_size(more_bytes)
    );
    Err(Problem::new(Code::StorageFull, detail))
}
