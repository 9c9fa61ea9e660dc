//! What the document says under `webhooks` of lifecycle messages. The courier sends them; `lifecycle` has their types.

use serde::Serialize;
use utoipa::openapi::path::Paths;
use utoipa::openapi::{Components, OpenApi};
use utoipa::{OpenApi as _, ToSchema};

use super::list::Time;
use crate::lifecycle::message::{
    CancelledDetail, CheckpointDetail, FailedDetail, LifecycleData, PausedDetail, QueuedDetail, RewardDetail,
    StartedDetail, SucceededDetail, TestData,
};

/// A body and its operation for each message. The words are `tt`: inside a `literal` utoipa does not see them.
macro_rules! messages {
    ($($(#[doc = $doc:tt])* $handler:ident = $word:tt $path:tt $body:ident($kind:ident, $data:ty);)+) => {
        $(
            $(#[doc = $doc])*
            #[derive(Serialize, ToSchema)]
            struct $body {
                /// What happened.
                #[serde(rename = "type")]
                kind: $kind,
                /// When it happened; not when it was sent.
                #[schema(value_type = Time)]
                timestamp: Time,
                /// The job then, and the event.
                data: $data,
            }

            #[derive(Serialize, ToSchema)]
            #[expect(dead_code, reason = "describes the message in the document")]
            enum $kind {
                #[serde(rename = $word)]
                It,
            }

            $(#[doc = $doc])*
            ///
            /// Signed as Standard Webhooks says: `webhook-signature` is `v1,` and the base64 HMAC-SHA256 of `id.timestamp.body`
            /// under the decoded secret of the subscription. It may come twice, with one `webhook-id`.
            #[utoipa::path(
                post, path = $path, tag = "Webhooks", operation_id = $word,
                params(
                    ("webhook-id" = String, Header, description = "The message's id, the same at every try"),
                    ("webhook-timestamp" = String, Header, description = "Unix seconds of this try"),
                    ("webhook-signature" = String, Header, description = "`v1,BASE64`; several, separated by spaces, while a secret is rotated: accept the message if one fits"),
                ),
                request_body = $body,
                responses(
                    (status = "2XX", description = "Taken"),
                    (status = 410, description = "Not wanted any more: the subscription is switched off"),
                    (status = "default", description = "Tried again later; after `Retry-After` if that is given"),
                ),
            )]
            #[expect(dead_code, reason = "describes the message in the document")]
            fn $handler() {}
        )+

        #[derive(utoipa::OpenApi)]
        #[openapi(paths($($handler),+))]
        struct Messages;
    };
}

messages! {
    /// A job waits for a worker: new, taken back from one, or resumed.
    job_queued = "job.queued" "/job.queued" JobQueuedMessage(JobQueuedType, LifecycleData<QueuedDetail>);
    /// A worker has begun, or goes on.
    job_started = "job.started" "/job.started" JobStartedMessage(JobStartedType, LifecycleData<StartedDetail>);
    /// A job stopped at a checkpoint.
    job_paused = "job.paused" "/job.paused" JobPausedMessage(JobPausedType, LifecycleData<PausedDetail>);
    /// A job is done.
    job_succeeded = "job.succeeded" "/job.succeeded" JobSucceededMessage(JobSucceededType, LifecycleData<SucceededDetail>);
    /// A job failed.
    job_failed = "job.failed" "/job.failed" JobFailedMessage(JobFailedType, LifecycleData<FailedDetail>);
    /// Somebody ended a job.
    job_cancelled = "job.cancelled" "/job.cancelled" JobCancelledMessage(JobCancelledType, LifecycleData<CancelledDetail>);
    /// A checkpoint can be downloaded.
    checkpoint_created = "checkpoint.created" "/checkpoint.created" CheckpointCreatedMessage(CheckpointCreatedType, LifecycleData<CheckpointDetail>);
    /// A reward does not answer: the job waits for it.
    reward_degraded = "reward.degraded" "/reward.degraded" RewardDegradedMessage(RewardDegradedType, LifecycleData<RewardDetail>);
    /// A reward answers again.
    reward_recovered = "reward.recovered" "/reward.recovered" RewardRecoveredMessage(RewardRecoveredType, LifecycleData<RewardDetail>);
    /// A test of a subscription: `POST /webhooks/{id}/test`.
    webhook_test = "webhook.test" "/webhook.test" WebhookTestMessage(WebhookTestType, TestData);
}

/// The messages by name, and the schemas they name.
pub(super) fn webhooks() -> (Paths, Option<Components>) {
    let OpenApi { mut paths, components, .. } = Messages::openapi();
    paths.paths = paths.paths.into_iter().map(|(path, item)| (path.trim_start_matches('/').to_owned(), item)).collect();
    (paths, components)
}
