//! Sends the rewards' health reports to the server, periodically and at the end.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Mutex;
use tokio_util::task::AbortOnDropHandle;

use super::client::{ClaimRef, Client, ClientError, with_retries};
use crate::error_text::with_causes;
use crate::protocol::{RewardReport, RewardReports};
use crate::reward::Rewards;

/// Interval between two health reports to the server, if the rewards' state has changed.
const REPORT_INTERVAL: Duration = Duration::from_secs(2);

/// Sends the health reports of the rewards of one attempt.
pub(super) struct Reports {
    sender: Arc<ReportSender>,
    _task: AbortOnDropHandle<()>,
}

struct ReportSender {
    client: Client,
    claim_ref: ClaimRef,
    rewards: Vec<Arc<Rewards>>,
    /// The reports that were last sent to the server; unchanged ones are not sent again.
    last_sent: Mutex<Vec<RewardReport>>,
}

impl Reports {
    /// Starts sending health reports periodically, until the returned value is dropped.
    pub(super) fn start(
        client: Client,
        claim_ref: ClaimRef,
        rewards: Arc<Rewards>,
        eval_rewards: Option<Arc<Rewards>>,
    ) -> Self {
        let rewards = [Some(rewards), eval_rewards].into_iter().flatten().collect();
        let sender = Arc::new(ReportSender { client, claim_ref, rewards, last_sent: Mutex::default() });
        let task = tokio::spawn({
            let sender = sender.clone();
            async move {
                loop {
                    tokio::time::sleep(REPORT_INTERVAL).await;
                    // If a report cannot be sent, the next one contains its content.
                    if let Err(error) = sender.send().await {
                        tracing::debug!(
                            error = with_causes(&error),
                            "cannot send the reports about the rewards to the server"
                        );
                    }
                }
            }
        });
        Self { sender, _task: AbortOnDropHandle::new(task) }
    }

    /// Sends the final report, with retries.
    pub(super) async fn send_final(&self) {
        if let Err(error) = with_retries(|| self.sender.send(), ClientError::is_transient).await {
            tracing::warn!(
                error = with_causes(&error),
                "cannot send the final reports about the rewards to the server"
            );
        }
    }
}

impl ReportSender {
    async fn send(&self) -> Result<(), ClientError> {
        let mut last_sent = self.last_sent.lock().await;
        let rewards: Vec<RewardReport> = self.rewards.iter().flat_map(|rewards| rewards.reports()).collect();
        if rewards == *last_sent {
            return Ok(());
        }
        let reports = RewardReports { attempt: self.claim_ref.attempt, rewards };
        self.client.rewards(self.claim_ref, &reports).await?;
        *last_sent = reports.rewards;
        Ok(())
    }
}
