//! The lifecycle messages in the `webhooks` section of the OpenAPI document. The webhook sender delivers them;
//! [`crate::webhooks`] has their types.

use serde::Serialize;
use utoipa::openapi::path::Paths;
use utoipa::openapi::{Components, OpenApi};
use utoipa::{OpenApi as _, ToSchema};

use super::list::Time;
use crate::webhooks::message::{
    CancelledDetail, CheckpointDetail, FailedDetail, LifecycleData, PausedDetail, QueuedDetail, RewardDetail,
    StartedDetail, SucceededDetail, TestData,
};

/// Defines the OpenAPI body and operation of each lifecycle message. The message types are matched as `tt`, because utoipa
/// cannot read a `literal` fragment.
macro_rules! messages {
    ($($(#[doc = $doc:tt])* $handler:ident = $word:tt $path:tt $body:ident($kind:ident, $data:ty);)+) => {
        $(
            $(#[doc = $doc])*
            #[derive(Serialize, ToSchema)]
            struct $body {
                /// Type of the message.
                #[serde(rename = "type")]
                kind: $kind,
                /// When the event happened, not when the message was sent.
                #[schema(value_type = Time)]
                timestamp: Time,
                /// The job at that time, and the event.
                data: $data,
            }

            #[derive(Serialize, ToSchema)]
            #[expect(dead_code, reason = "only describes the message in the OpenAPI document")]
            enum $kind {
                #[serde(rename = $word)]
                It,
            }

            $(#[doc = $doc])*
            ///
            /// The message is signed by Standard Webhooks: `webhook-signature` is `v1,` and the base64 HMAC-SHA256 of
            /// `id.timestamp.body` under the decoded secret of the subscription. A message may arrive twice,
            /// with the same `webhook-id`.
            #[utoipa::path(
                post, path = $path, tag = "Webhooks", operation_id = $word,
                params(
                    ("webhook-id" = String, Header, description = "The id of the message, the same for every delivery attempt"),
                    ("webhook-timestamp" = String, Header, description = "The Unix time of this delivery attempt, in seconds"),
                    ("webhook-signature" = String, Header, description = "The signature `v1,BASE64`; several signatures, separated by spaces, while a secret is rotated: accept the message if one of them is valid"),
                ),
                request_body = $body,
                responses(
                    (status = "2XX", description = "Taken"),
                    (status = 410, description = "The receiver is gone for good: the server disables the subscription"),
                    (status = "default", description = "The server retries the message later; after `Retry-After` if it is set"),
                ),
            )]
            #[expect(dead_code, reason = "only describes the message in the OpenAPI document")]
            fn $handler() {}
        )+

        #[derive(utoipa::OpenApi)]
        #[openapi(paths($($handler),+))]
        struct Messages;
    };
}

messages! {
    /// A job was queued: new, taken back from a worker, or resumed.
    job_queued = "job.queued" "/job.queued" JobQueuedMessage(JobQueuedType, LifecycleData<QueuedDetail>);
    /// A worker started or resumed a job.
    job_started = "job.started" "/job.started" JobStartedMessage(JobStartedType, LifecycleData<StartedDetail>);
    /// A job was paused at a checkpoint.
    job_paused = "job.paused" "/job.paused" JobPausedMessage(JobPausedType, LifecycleData<PausedDetail>);
    /// A job completed successfully.
    job_succeeded = "job.succeeded" "/job.succeeded" JobSucceededMessage(JobSucceededType, LifecycleData<SucceededDetail>);
    /// A job failed with an error.
    job_failed = "job.failed" "/job.failed" JobFailedMessage(JobFailedType, LifecycleData<FailedDetail>);
    /// A job was cancelled by request.
    job_cancelled = "job.cancelled" "/job.cancelled" JobCancelledMessage(JobCancelledType, LifecycleData<CancelledDetail>);
    /// A checkpoint is available for download.
    checkpoint_created = "checkpoint.created" "/checkpoint.created" CheckpointCreatedMessage(CheckpointCreatedType, LifecycleData<CheckpointDetail>);
    /// A reward service does not answer, and the job waits for it.
    reward_degraded = "reward.degraded" "/reward.degraded" RewardDegradedMessage(RewardDegradedType, LifecycleData<RewardDetail>);
    /// A reward service answers again.
    reward_recovered = "reward.recovered" "/reward.recovered" RewardRecoveredMessage(RewardRecoveredType, LifecycleData<RewardDetail>);
    /// A test of a subscription: `POST /webhooks/{id}/test`.
    webhook_test = "webhook.test" "/webhook.test" WebhookTestMessage(WebhookTestType, TestData);
}

/// Returns the messages by name, and the schemas that they refer to.
pub(super) fn webhooks() -> (Paths, Option<Components>) {
    let OpenApi { mut paths, components, .. } = Messages::openapi();
    paths.paths = paths.paths.into_iter().map(|(path, item)| (path.trim_start_matches('/').to_owned(), item)).collect();
    (paths, components)
}
