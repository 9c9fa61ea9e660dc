//! The metrics of served models in `/metrics`.

use super::super::prometheus::{family, line};
use crate::http::AppState;
use crate::supervisor::serving::Serving;

/// Appends the metrics of the serving processes.
pub(in super::super) fn write(state: &AppState, text: &mut String) {
    let Some(serving) = &state.serving else { return };
    let (measures, states) = serving.measures();
    let counters = [
        ("rlood_serving_requests_total", "Started requests to served models.", measures.requests),
        (
            "rlood_serving_refused_total",
            "Requests to served models that were refused for lack of room.",
            measures.refused,
        ),
        ("rlood_serving_failed_total", "Requests to served models that failed.", measures.failed),
        ("rlood_serving_prompt_tokens_total", "Prompt tokens of requests to served models.", measures.prompt_tokens),
        ("rlood_serving_tokens_total", "Tokens that served models generated.", measures.tokens),
    ];
    for (name, help, value) in counters {
        family(text, name, "counter", help);
        line(text, name, value);
    }
    let name = "rlood_serving_first_token_seconds";
    family(text, name, "histogram", "Time from a request to a served model until its first token.");
    let (buckets, number, sum) = measures.first_token;
    let mut below = 0;
    for (bound, count) in Serving::buckets().iter().zip(buckets) {
        below += count;
        line(text, &format!("{name}_bucket{{le=\"{bound}\"}}"), below);
    }
    line(text, &format!("{name}_bucket{{le=\"+Inf\"}}"), number);
    line(text, &format!("{name}_sum"), sum);
    line(text, &format!("{name}_count"), number);
    family(text, "rlood_serving_answers", "gauge", "Answers of served models that run or wait, by device.");
    for (device, state) in &states {
        line(text, &format!("rlood_serving_answers{{device=\"{device}\",state=\"running\"}}"), state.running);
        line(text, &format!("rlood_serving_answers{{device=\"{device}\",state=\"waiting\"}}"), state.waiting);
    }
    family(text, "rlood_serving_models", "gauge", "Loaded base models and adapters, by device.");
    for (device, state) in &states {
        line(text, &format!("rlood_serving_models{{device=\"{device}\"}}"), state.models.len());
    }
    let name = "rlood_serving_reused_prompt_tokens";
    family(text, name, "gauge", "Prompt tokens that the running process took from earlier prompts, by device.");
    for (device, state) in &states {
        line(text, &format!("{name}{{device=\"{device}\"}}"), state.reused_tokens);
    }
}
