//! The audit log: who changed what, and when.

use sqlx::sqlite::SqliteRow;
use sqlx::{QueryBuilder, Sqlite};

use super::{Doing, Page, Store, StoreError, column, cursor, cursor_key, page, parse_cursor};

/// A change to record in the audit log.
#[derive(Debug, Clone)]
pub struct NewAudit {
    /// Who made the change: the id of a key, or `operator`, `anonymous`, `command_line`, `server`.
    pub actor: String,
    /// Name of the key that made the change.
    pub actor_name: Option<String>,
    /// Owner of the key; empty = the operator.
    pub owner: String,
    /// The action, such as `POST /jobs/{id}/cancel` or `keys revoke`.
    pub action: String,
    /// The changed object: a path, or an id.
    pub target: String,
    /// HTTP status of the response.
    pub status: Option<u16>,
    /// Id of the request, as in the response and in the log.
    pub request_id: Option<String>,
    /// Address that the request came from.
    pub address: Option<String>,
}

/// A change in the audit log.
#[derive(Debug, Clone)]
pub struct AuditRow {
    /// Number of the entry, which grows from entry to entry.
    pub id: i64,
    /// Time of the change, Unix time in milliseconds.
    pub time: i64,
    /// The change that was recorded.
    pub change: NewAudit,
}

impl Store {
    /// Adds an entry to the audit log.
    pub async fn audit_add(&self, change: NewAudit, now: i64) -> Result<(), StoreError> {
        let NewAudit { actor, actor_name, owner, action, target, status, request_id, address } = change;
        sqlx::query(
            "INSERT INTO audit (time, actor, actor_name, owner, action, target, status, request_id, address) \
             VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        )
        .bind(now)
        .bind(actor)
        .bind(actor_name)
        .bind(owner)
        .bind(action)
        .bind(target)
        .bind(status)
        .bind(request_id)
        .bind(address)
        .execute(&self.writer)
        .await
        .doing("add an entry to the audit log")?;
        Ok(())
    }

    /// Lists entries, newest first; `actor` and `target` (the object itself, or everything below it) filter them.
    pub async fn audit_list(
        &self,
        actor: Option<&str>,
        target: Option<&str>,
        after: Option<&str>,
        limit: u32,
    ) -> Result<Page<AuditRow>, StoreError> {
        let limit = limit.clamp(1, 1000);
        let mut query = QueryBuilder::<Sqlite>::new("SELECT * FROM audit WHERE 1");
        if let Some(actor) = actor {
            query.push(" AND actor = ").push_bind(actor);
        }
        if let Some(target) = target {
            query.push(" AND (target = ").push_bind(target);
            query.push(" OR substr(target, 1, length(").push_bind(target).push(") + 1) = ");
            query.push_bind(format!("{target}/")).push(")");
        }
        if let Some(after) = after {
            let [id] = parse_cursor("audit", after)?;
            query.push(" AND id < ").push_bind(cursor_key::<i64>(&id)?);
        }
        query.push(" ORDER BY id DESC LIMIT ").push_bind(i64::from(limit) + 1);
        let rows = query.build().fetch_all(&self.readers).await.doing("list the audit log")?;
        let data = rows.iter().map(AuditRow::read).collect::<Result<Vec<_>, _>>()?;
        Ok(page(data, limit, |row| cursor("audit", [&row.id.to_string()])))
    }
}

impl AuditRow {
    fn read(row: &SqliteRow) -> Result<AuditRow, StoreError> {
        Ok(AuditRow {
            id: column(row, "id")?,
            time: column(row, "time")?,
            change: NewAudit {
                actor: column(row, "actor")?,
                actor_name: column(row, "actor_name")?,
                owner: column(row, "owner")?,
                action: column(row, "action")?,
                target: column(row, "target")?,
                status: column(row, "status")?,
                request_id: column(row, "request_id")?,
                address: column(row, "address")?,
            },
        })
    }
}
