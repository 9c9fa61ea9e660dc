//! Stored data by kind and owner, and the limits on it.

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
use crate::downloads::Pending;
use crate::hub::RESERVED_BYTES;
use crate::storage::{StorageKind, StorageUse};
use crate::store::storage::{self, StorageReport};

/// Maximum age of the disk usage report that decides whether a write is accepted.
const REPORT_AGE: Duration = Duration::from_secs(5);

pub fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(get_storage))
}

/// The last disk usage report, and the lock for creating the next one: only one request at a time examines every file.
#[derive(Debug, Default)]
pub struct LastReport(Mutex<Option<(Instant, Arc<StorageReport>)>>);

/// Stored data, as far as the key may see it.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Storage {
    /// The disk of the data directory.
    pub disk: Disk,
    /// Size of the data directory in bytes: the sum over `kinds`, and over `owners`.
    pub size_bytes: u64,
    /// Usage by kind; all kinds are listed.
    pub kinds: Vec<KindStorage>,
    /// Usage by owner; owners without data are not listed.
    pub owners: Vec<OwnerStorage>,
    /// Registered models in folders of the operator. They are not included in `size_bytes`, and the server
    /// never removes their files.
    pub external_models: Amount,
}

/// The disk of the data directory.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Disk {
    /// Total size in bytes.
    pub total_bytes: u64,
    /// Free space in bytes.
    pub free_bytes: u64,
    /// Reserve in bytes: jobs pause when free space falls below it (`--disk-reserve`).
    pub reserve_bytes: u64,
}

/// Size and number of stored items.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct Amount {
    /// Size in bytes. A file with several links counts once.
    pub size_bytes: u64,
    /// Number of models, datasets or checkpoints; for samples and journals the number of jobs that have any;
    /// otherwise files and folders.
    pub count: u64,
}

/// Usage of one kind.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct KindStorage {
    /// The kind of data.
    pub kind: StorageKind,
    /// Usage, as far as the key may see it.
    #[serde(flatten)]
    pub amount: Amount,
    /// Limit for all owners together in bytes (`--storage-limit`); null = limited only by the disk.
    pub limit_bytes: Option<u64>,
}

/// Usage of one owner.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct OwnerStorage {
    /// The owner; empty = the operator, who also owns shared models and data without a job.
    pub owner: String,
    /// Total usage of the owner.
    #[serde(flatten)]
    pub amount: Amount,
    /// Usage by kind; kinds without data are not listed.
    pub kinds: Vec<KindAmount>,
}

/// Usage of one kind by one owner.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct KindAmount {
    /// The kind of data.
    pub kind: StorageKind,
    /// Size and number of items.
    #[serde(flatten)]
    pub amount: Amount,
}

impl std::ops::AddAssign<StorageUse> for Amount {
    fn add_assign(&mut self, other: StorageUse) {
        self.size_bytes += other.size_bytes;
        self.count += other.count;
    }
}

/// Get storage usage and limits.
///
/// A key with the scope admin sees all owners, other keys only their own. The disk and the limits are the same for all. `rlood gc
/// --dry-run` on the server lists what can be removed.
#[utoipa::path(get, path = "/system/storage", tag = "System",
    responses((status = 200, description = "The storage use by kind of data and by owner", body = Storage)))]
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

/// Returns a new disk usage report, or one that is not older than `age`. Requests that arrive while a report is being
/// created wait for it.
async fn report(state: &AppState, age: Duration) -> Result<Arc<StorageReport>, Problem> {
    let asked = Instant::now();
    let mut last = state.storage.0.lock().await;
    // A usage report whose creation began after this request arrived is as good as a new one.
    let is_good = |at: &Instant| *at >= asked || at.elapsed() < age;
    if let Some((_, report)) = last.as_ref().filter(|(at, _)| is_good(at)) {
        return Ok(report.clone());
    }
    let begun = Instant::now();
    let report = Arc::new(storage::report(&state.store, &state.files).await.map_err(Problem::internal)?);
    *last = Some((begun, report.clone()));
    Ok(report)
}

/// Refuses to store data of a kind that has reached its `--storage-limit`.
pub(super) async fn check_limit(state: &AppState, kind: StorageKind, more_bytes: u64) -> Result<(), Problem> {
    if !state.config.storage_limits.contains_key(&kind) {
        return Ok(());
    }
    let report = report(state, REPORT_AGE).await?;
    check_report(state, &report, kind, 0, more_bytes)
}

/// Refuses a model for which the disk, or the `--storage-limit` of models, has no room beside the downloads in progress. The
/// caller holds [`crate::downloads::Downloads::admission`].
pub(super) async fn check_room_for_model(
    state: &AppState,
    source: &str,
    bytes_total: u64,
    missing_bytes: u64,
) -> Result<(), Problem> {
    let pending = state.downloads.pending(source).await?;
    check_room_on_disk(state, pending, "model", missing_bytes)?;
    if !state.config.storage_limits.contains_key(&StorageKind::Models) {
        return Ok(());
    }
    // The report is newer than `pending`, so a file that becomes complete in between counts twice rather than not at all.
    let report = report(state, Duration::ZERO).await?;
    let more_bytes = bytes_total.saturating_sub(pending.stored);
    check_report(state, &report, StorageKind::Models, pending.missing_in_folders, more_bytes)
}

/// Refuses a download (`what` = model or dataset) for which the disk has no room beside the downloads in progress. The caller holds
/// [`crate::downloads::Downloads::admission`].
pub(super) fn check_room_on_disk(
    state: &AppState,
    pending: Pending,
    what: &str,
    missing_bytes: u64,
) -> Result<(), Problem> {
    // A download that alone does not fit was refused before.
    if missing_bytes == 0 || pending.missing_on_disk == 0 {
        return Ok(());
    }
    let needed = missing_bytes.saturating_add(pending.missing_on_disk);
    let free = state.files.free_bytes()?;
    if needed.saturating_add(RESERVED_BYTES) <= free {
        return Ok(());
    }
    let detail = format!(
        "the {what} needs {}, the downloads in progress another {}, and {} are free: wait until they are complete and free up disk \
         space, or choose a smaller {what}",
        format_size(missing_bytes),
        format_size(pending.missing_on_disk),
        format_size(free)
    );
    Err(Problem::new(Code::StorageFull, detail.clone()).item("/hub", "too_large", detail))
}

/// Compares the use of a kind with its limit. `coming_bytes` are those of downloads in progress.
fn check_report(
    state: &AppState,
    report: &StorageReport,
    kind: StorageKind,
    coming_bytes: u64,
    more_bytes: u64,
) -> Result<(), Problem> {
    let Some(limit) = state.config.storage_limits.get(&kind).copied() else { return Ok(()) };
    let used: u64 = report.usage.iter().filter(|((of, _), _)| *of == kind).map(|(_, used)| used.size_bytes).sum();
    if used.saturating_add(coming_bytes).saturating_add(more_bytes) <= limit {
        return Ok(());
    }
    let coming = match coming_bytes {
        0 => String::new(),
        coming => format!(", downloads in progress will take {}", format_size(coming)),
    };
    let detail = format!(
        "{kind} take {} of the {} that --storage-limit allows them{coming}, and {} more do not fit: delete some that are not needed \
         (`rlood gc --dry-run` on the server lists what can go), or have the operator raise the limit",
        format_size(used),
        format_size(limit),
        format_size(more_bytes)
    );
    Err(Problem::new(Code::StorageFull, detail))
}
