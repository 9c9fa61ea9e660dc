//! The version of a database, determined by its migrations; and opening databases unchanged, with or without a running server.

use std::path::Path;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use sqlx::SqlStr;
use sqlx::migrate::{MigrateError, Migration, MigrationType, Migrator};
use sqlx::sqlite::{SqliteConnectOptions, SqlitePoolOptions};

use super::{Doing, Store, StoreError, sqlite_version};

/// The migrations that bring a database to this rlood's version.
pub(super) static MIGRATIONS: LazyLock<Migrator> = LazyLock::new(|| {
    let migration = |&(version, description, sql): &(i64, &'static str, &'static str)| {
        let sql = SqlStr::from_static(sql);
        Migration::new(version, description.into(), MigrationType::Simple, sql, false)
    };
    Migrator::with_migrations(FILES.iter().map(migration).collect())
});

/// The SQL files of the directory `migrations`, each with version and description; build.rs embeds them.
const FILES: &[(i64, &str, &str)] = include!(concat!(env!("OUT_DIR"), "/migrations.rs"));

impl Store {
    /// Opens a database of this or of an older rlood without migrating it, for a copy or an inspection; a server may be
    /// using it. `Newer` if a newer rlood wrote it, `Open` if there is none. Statements on tables that a migration changed
    /// fail on an older database: see [`Store::is_current`].
    pub async fn open_as_is(database: &Path) -> Result<Store, StoreError> {
        sqlite_version().await?;
        let options = SqliteConnectOptions::new()
            .filename(database)
            .foreign_keys(true)
            .busy_timeout(Duration::from_secs(10))
            .pragma("trusted_schema", "OFF");
        // The second connection copies while the first one blocks other writers.
        let both = SqlitePoolOptions::new()
            .max_connections(2)
            .connect_with(options)
            .await
            .map_err(|source| StoreError::Open { path: database.to_owned(), source })?;
        let store = Store {
            writer: both.clone(),
            readers: both.clone(),
            searchers: both.clone(),
            checkpointer: both,
            changes: Arc::default(),
            judges: false,
        };
        let applied = store.migrations().await;
        let error = match applied.map(|applied| applied.into_iter().filter(|it| !MIGRATIONS.version_exists(*it)).max())
        {
            Ok(None) => return Ok(store),
            Ok(Some(unknown)) => newer(unknown),
            Err(error) => error,
        };
        store.close().await;
        Err(error)
    }

    /// Opens the database of a running or stopped server for a command with a few statements. `Older` or `Newer` if it has another
    /// version; `Open` if there is no database.
    pub async fn open_beside(database: &Path) -> Result<Store, StoreError> {
        let store = Store::open_as_is(database).await?;
        let error = match store.missing_migration().await {
            Ok(None) => return Ok(store),
            Ok(Some(missing)) => StoreError::Older { missing },
            Err(error) => error,
        };
        store.close().await;
        Err(error)
    }

    /// Whether the database has all migrations of this rlood.
    pub async fn is_current(&self) -> Result<bool, StoreError> {
        Ok(self.missing_migration().await?.is_none())
    }

    /// Whether the database, which may have an older version, has a table of this name.
    pub async fn has_table(&self, name: &str) -> Result<bool, StoreError> {
        sqlx::query_scalar("SELECT EXISTS (SELECT 1 FROM sqlite_schema WHERE type = 'table' AND name = ?)")
            .bind(name)
            .fetch_one(&self.readers)
            .await
            .doing("check whether the database has a table")
    }

    async fn missing_migration(&self) -> Result<Option<i64>, StoreError> {
        let applied = self.migrations().await?;
        Ok(MIGRATIONS.iter().map(|known| known.version).filter(|known| !applied.contains(known)).min())
    }

    /// Returns the migrations of the database; empty = it was never migrated.
    async fn migrations(&self) -> Result<Vec<i64>, StoreError> {
        if !self.has_table("_sqlx_migrations").await? {
            return Ok(Vec::new());
        }
        sqlx::query_scalar("SELECT version FROM _sqlx_migrations")
            .fetch_all(&self.readers)
            .await
            .doing("read the database's version")
    }
}

fn newer(found: i64) -> StoreError {
    let known = MIGRATIONS.iter().map(|known| known.version).max().unwrap_or_default();
    StoreError::Newer { found, known }
}

/// Converts the reason why a database could not be migrated.
pub(super) fn not_migrated(source: MigrateError) -> StoreError {
    match source {
        MigrateError::VersionMissing(found) => newer(found),
        source => StoreError::Migrate { source },
    }
}
