//! `rlood gc`: removes unneeded data from a data directory, with or without a running server, and from the workers' cache.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use futures::future::LocalBoxFuture;
use rlood_worker::args::default_cache_dir;
use rlood_worker::model_cache::ModelCache;
use rlood_worker::size::format_size;

use crate::config::gc::GcArgs;
use crate::config::keys::Life;
use crate::files::{DataDir, FilesError};
use crate::store::gc::{self, GcItem, GcRules};
use crate::store::storage::StorageError;
use crate::store::{Store, StoreError, clock_ms};

/// Name of the workers' model cache in the printed totals.
const CACHE: &str = "worker cache";

/// Why `rlood gc` stopped.
#[derive(Debug, thiserror::Error)]
pub enum GcError {
    /// An operation on the data directory or its database failed.
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// The data directory does not exist or contains no database.
    #[error("the directory {} contains no rlood database: use the server's --data-dir, or --cache-only on a machine that has only workers", .0.display())]
    NoDatabase(PathBuf),
    /// The workers' cache cannot be used.
    #[error("the workers' cache of models in {} cannot be used", .dir.display())]
    Cache {
        /// Path of the cache.
        dir: PathBuf,
        /// Error of the underlying operation.
        #[source]
        source: std::io::Error,
    },
}

impl From<FilesError> for GcError {
    fn from(error: FilesError) -> Self {
        GcError::Storage(error.into())
    }
}

impl From<StoreError> for GcError {
    fn from(error: StoreError) -> Self {
        GcError::Storage(error.into())
    }
}

/// Number and size of removed items by kind; with `--dry-run`, of items to remove.
#[derive(Debug, Default)]
struct Sums(BTreeMap<String, (u64, u64)>);

impl Sums {
    fn add(&mut self, kind: String, size_bytes: u64) {
        let (count, bytes) = self.0.entry(kind).or_default();
        *count += 1;
        *bytes += size_bytes;
    }

    fn print(&self, is_dry: bool) {
        let would = if is_dry { "would be removed" } else { "removed" };
        for (kind, (count, bytes)) in &self.0 {
            println!("{:>10}  {kind:<16}  {count} {would}", format_size(*bytes));
        }
        let (count, bytes) = self.0.values().fold((0, 0), |(n, sum), (count, bytes)| (n + count, sum + bytes));
        println!("{:>10}  {:<16}  {count} {would}", format_size(bytes), "total");
    }
}

/// Runs the subcommand `rlood gc`.
///
/// # Errors
/// Fails when a directory or the database cannot be used. Items that were already removed stay removed.
pub fn run(args: GcArgs) -> LocalBoxFuture<'static, Result<ExitCode, GcError>> {
    Box::pin(async move {
        let is_dry = args.dry_run;
        let mut sums = Sums::default();
        if !args.cache_only {
            clean_data_dir(&args, &mut sums).await?;
        }
        let cache_dir = args.cache_dir.clone().unwrap_or_else(|| default_cache_dir(None));
        // A machine on which no worker ran has no model cache.
        if cache_dir.join("models").is_dir() {
            let retain = Duration::from_secs(u64::try_from(args.retain_cache.seconds).unwrap_or(0));
            clean_cache(&cache_dir, retain, is_dry, &mut sums)
                .map_err(|source| GcError::Cache { dir: cache_dir.clone(), source })?;
        }
        sums.print(is_dry);
        Ok(ExitCode::SUCCESS)
    })
}

async fn clean_data_dir(args: &GcArgs, sums: &mut Sums) -> Result<(), GcError> {
    let database = args.data_dir.join("rlood.db");
    if !database.is_file() {
        return Err(GcError::NoDatabase(args.data_dir.clone()));
    }
    let files = DataDir::beside(&args.data_dir)?;
    // The lock of the data directory is held to the end, so that no server starts on the directory meanwhile.
    let is_served = !files.lock_out_servers();
    let store = Store::open_beside(&files.database()).await?;
    let ms = |life: Option<Life>| life.map(|life| life.seconds * 1000);
    let rules = GcRules {
        now: clock_ms(),
        is_served,
        datasets_ms: ms(args.retain_datasets),
        models_ms: ms(args.retain_models),
        checkpoints_ms: ms(args.retain_checkpoints),
    };
    let done = clean(&store, &files, rules, args.dry_run, sums).await;
    store.close().await;
    done
}

async fn clean(store: &Store, files: &DataDir, rules: GcRules, is_dry: bool, sums: &mut Sums) -> Result<(), GcError> {
    for GcItem { kind, name, size_bytes, reason, removal } in gc::plan(store, files, rules).await? {
        let verb = match removal {
            None => "pinned",
            Some(_) if is_dry => "remove",
            Some(removal) if gc::remove(store, files, &removal).await? => "removed",
            Some(_) => "now in use",
        };
        print_line(verb, kind.as_str(), size_bytes, &name, &reason);
        if matches!(verb, "remove" | "removed") {
            sums.add(kind.to_string(), size_bytes);
        }
    }
    Ok(())
}

fn clean_cache(dir: &Path, retain: Duration, is_dry: bool, sums: &mut Sums) -> std::io::Result<()> {
    let cache = ModelCache::open(dir, None)?;
    let before = SystemTime::now().checked_sub(retain);
    for entry in cache.entries()? {
        let name = if entry.name.is_empty() { &entry.key } else { &entry.name };
        let print = |verb, reason| print_line(verb, CACHE, entry.size_bytes, name, reason);
        if entry.in_use {
            print("pinned", "a worker uses or downloads this model");
        } else if before.is_some_and(|before| entry.used_at < before) {
            if is_dry {
                print("remove", "no worker has used this model for longer than --retain-cache");
            } else if cache.remove(&entry.key)? {
                print("removed", "no worker has used this model for longer than --retain-cache");
            } else {
                print("now in use", "a worker uses or downloads this model");
                continue;
            }
            sums.add(CACHE.to_owned(), entry.size_bytes);
        }
    }
    Ok(())
}

fn print_line(verb: &str, kind: &str, size_bytes: u64, name: &str, reason: &str) {
    println!("{verb:<7}  {kind:<16}  {:>10}  {name}  ({reason})", format_size(size_bytes));
}
