//! What a user asks of a job: cancel, pause, resume.

use super::{JobRow, Store, StoreError};
use crate::id::JobId;

impl Store {
    /// Ends a job: at once when queued or paused, by a mark its worker honours when running. Idempotent.
    pub async fn job_cancel(&self, id: JobId, now: i64) -> Result<JobRow, StoreError> {
        let _ = (id, now);
        todo!()
    }

    /// Pauses a job: at once when queued, by a mark its worker honours when running.
    pub async fn job_pause(&self, id: JobId, now: i64) -> Result<JobRow, StoreError> {
        let _ = (id, now);
        todo!()
    }

    /// Queues a paused job again, in its old place; takes back a pause that the worker has not honoured yet.
    pub async fn job_resume(&self, id: JobId, now: i64) -> Result<JobRow, StoreError> {
        let _ = (id, now);
        todo!()
    }
}
