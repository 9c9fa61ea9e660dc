//! Sends the rewards' health reports to the server, periodically and at the end.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Mutex;
use tokio_util::task::AbortOnDropHandle;

use super::client::{Client, ClientError, Held, persist};
use crate::causes::with_causes;
use crate::protocol::{RewardReport, RewardReports};
use crate::reward::Rewards;

/// Interval between two reports, if there is anything new.
const EVERY: Duration = Duration::from_secs(2);

/// Periodic reports of one attempt.
pub(super) struct Reports {
    teller: Arc<Teller>,
    _telling: AbortOnDropHandle<()>,
}

struct Teller {
    client: Client,
    held: Held,
    rewards: Vec<Arc<Rewards>>,
    /// The reports that the server has.
    told: Mutex<Vec<RewardReport>>,
}

impl Reports {
    /// Starts the reports, which are sent until the returned value is dropped.
    pub(super) fn start(client: Client, held: Held, rewards: Arc<Rewards>, of_eval: Option<Arc<Rewards>>) -> Self {
        let rewards = [Some(rewards), of_eval].into_iter().flatten().collect();
        let teller = Arc::new(Teller { client, held, rewards, told: Mutex::default() });
        let telling = tokio::spawn({
            let teller = teller.clone();
            async move {
                loop {
                    tokio::time::sleep(EVERY).await;
                    // A report that fails is included in the next one.
                    if let Err(error) = teller.tell().await {
                        tracing::debug!(error = with_causes(&error), "sending the rewards' reports failed");
                    }
                }
            }
        });
        Self { teller, _telling: AbortOnDropHandle::new(telling) }
    }

    /// Sends the final report, with retries.
    pub(super) async fn last(&self) {
        if let Err(error) = persist(|| self.teller.tell(), ClientError::is_transient).await {
            tracing::warn!(error = with_causes(&error), "sending the rewards' final reports failed");
        }
    }
}

impl Teller {
    async fn tell(&self) -> Result<(), ClientError> {
        let mut told = self.told.lock().await;
        let rewards: Vec<RewardReport> = self.rewards.iter().flat_map(|rewards| rewards.reports()).collect();
        if rewards == *told {
            return Ok(());
        }
        let reports = RewardReports { attempt: self.held.attempt, rewards };
        self.client.rewards(self.held, &reports).await?;
        *told = reports.rewards;
        Ok(())
    }
}
