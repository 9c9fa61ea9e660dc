//! Reads and checks the rollout servers of a job.

use std::collections::BTreeMap;

use super::foreign::advice;
use super::reader::{Field, FieldError, Reader};
use super::rewards::read_url;
use super::settings::{MAX_WEIGHT, ROLLOUT};
use super::{
    CorrectionMode, CorrectionPlan, JobSpec, PathMap, RewardSecrets, RolloutEngine, RolloutPlan, RolloutServerPlan,
    SamplingPlan, rollout_secret_name,
};

/// Maximum number of servers of a job.
const MAX_SERVERS: usize = 64;

/// Reads the rollout section of a job, and its servers' API keys by the names under which they are stored; `None` = the
/// engine that trains also samples.
pub(super) fn read_rollout(reader: Reader<'_>) -> Option<(RolloutPlan, BTreeMap<String, RewardSecrets>)> {
    let values = ROLLOUT.read(&reader);
    let servers = reader.field("servers");
    let (plans, secrets) = read_servers(&servers);
    let correction = read_correction(&reader.field("correction"));
    let engine: Option<String> = values.get("engine");
    let colocate: bool = values.get("colocate");
    if engine.as_deref() == Some("vllm") {
        match (plans.is_empty(), colocate) {
            (true, false) if servers.value().is_none() => {
                servers
                    .fail("required", "give a list such as [{\"url\": \"http://10.0.0.7:8000\"}], or colocate: true");
            }
            (true, false) => servers.fail("required", "give at least one server, or colocate: true"),
            (false, true) => servers
                .fail("conflict", "with colocate the worker starts its own server: leave out servers, or colocate"),
            (true, true) | (false, false) => {}
        }
    }
    reader.finish(advice);
    let plan = RolloutPlan {
        engine: engine.as_deref().filter(|engine| *engine == "vllm").map(|_| RolloutEngine::Vllm)?,
        servers: plans,
        colocate,
        memory_share: values.get("memory_share"),
        correction,
        max_concurrency: values.get("max_concurrency"),
        timeout_s: values.get("timeout_s"),
    };
    Some((plan, secrets))
}

fn read_servers(field: &Field<'_>) -> (Vec<RolloutServerPlan>, BTreeMap<String, RewardSecrets>) {
    let (mut plans, mut secrets): (Vec<RolloutServerPlan>, _) = (Vec::new(), BTreeMap::new());
    let items = field.items().unwrap_or_default();
    if items.len() > MAX_SERVERS {
        field.fail("out_of_range", format!("a job has at most {MAX_SERVERS} rollout servers, not {}", items.len()));
    }
    for item in items.into_iter().take(MAX_SERVERS) {
        let Some(reader) = item.object() else { continue };
        let url = reader.required("url", "give the address of the server, such as http://10.0.0.7:8000");
        let address = read_url(&url).trim_end_matches('/').to_owned();
        if address.ends_with("/v1") {
            url.fail("invalid_value", "give the address without /v1: the adapter routes and /health are used too");
        }
        if !address.is_empty() && plans.iter().any(|known| known.url == address) {
            url.fail("duplicate", "this server is listed twice: give it once");
        }
        if let Some(key) = reader.field("api_key").nonempty(8_000) {
            if key.chars().all(|c| c.is_ascii_graphic()) {
                let headers = [("authorization".to_owned(), format!("Bearer {key}"))].into();
                let name = rollout_secret_name(plans.len());
                secrets.insert(name, RewardSecrets { headers, ..RewardSecrets::default() });
            } else {
                reader.entry("api_key").fail("invalid_value", "an API key has printable ASCII characters only");
            }
        }
        let path_map = reader.field("path_map").object().and_then(|map| read_path_map(&map));
        reader.finish(advice);
        plans.push(RolloutServerPlan { url: address, path_map });
    }
    (plans, secrets)
}

fn read_path_map(map: &Reader<'_>) -> Option<PathMap> {
    let folder = |name: &'static str, whose: &str| {
        let field = map.required(name, "give both folders: from (as the worker sees it) and to (as the server does)");
        let path = field.nonempty(4_000)?;
        if !path.starts_with('/') {
            field.fail("invalid_value", format!("give the absolute path of the folder as {whose} sees it"));
        }
        Some(path.to_owned())
    };
    let (from, to) = (folder("from", "the worker"), folder("to", "the server"));
    map.finish(advice);
    Some(PathMap { from: from?, to: to? })
}

fn read_correction(field: &Field<'_>) -> CorrectionPlan {
    let default = CorrectionPlan { mode: CorrectionMode::SequenceMask, max: MAX_WEIGHT, min: None };
    let Some(reader) = field.object() else { return default };
    let positive = |name: &'static str| reader.field(name).number("greater than 0", |number| number > 0.0);
    let plan = CorrectionPlan {
        mode: reader.field("mode").variant().unwrap_or(default.mode),
        max: positive("max").unwrap_or(default.max),
        min: positive("min"),
    };
    if plan.min.is_some_and(|min| min > plan.max) {
        reader.entry("min").fail("out_of_range", format!("min may not be greater than max ({})", plan.max));
    }
    reader.finish(advice);
    plan
}

/// Checks the settings that rollout servers cannot follow exactly.
pub(super) fn check(spec: &JobSpec, errors: &mut Vec<FieldError>) {
    let Some(rollout) = &spec.rollout else { return };
    let mut refuse = |pointer: &str, detail: String| errors.push(FieldError::new(pointer, "unsupported", detail));
    let filtered = "the log-probs of a server would then be those of the filtered distribution";
    if let Some((name, value)) = spec.sampling.filter() {
        refuse(
            &format!("/sampling/{name}"),
            format!("{name} {value} cannot be used with rollout servers: {filtered}; leave it out"),
        );
    }
    if !spec.sampling.stop.is_empty() {
        refuse(
            "/sampling/stop",
            "stop strings cannot be used with rollout servers, whose completions end by token ids: leave them out"
                .to_owned(),
        );
    }
    let of_eval = spec.eval.as_ref().and_then(|eval| {
        let off = SamplingPlan { top_p: 1.0, top_k: 0, min_p: 0.0, repetition_penalty: 1.0, ..spec.sampling.clone() };
        let own = SamplingPlan {
            top_p: eval.top_p.unwrap_or(off.top_p),
            top_k: eval.top_k.unwrap_or(off.top_k),
            min_p: eval.min_p.unwrap_or(off.min_p),
            repetition_penalty: eval.repetition_penalty.unwrap_or(off.repetition_penalty),
            ..off
        };
        own.filter()
    });
    if let Some((name, value)) = of_eval {
        refuse(
            &format!("/eval/{name}"),
            format!("{name} {value} cannot be used with rollout servers: {filtered}; leave it out"),
        );
    }
    match &spec.lora {
        None => refuse(
            "/rollout",
            "rollout servers load an adapter after every step, and this job trains all weights: set lora, or leave out rollout"
                .to_owned(),
        ),
        Some(lora) => {
            let outside = |name: &&String| ["lm_head", "embed_tokens"].contains(&name.as_str());
            if let Some(name) = lora.target_modules.iter().find(outside) {
                refuse(
                    "/lora/target_modules",
                    format!("an adapter on {name} changes the base model's answers on a rollout server too: leave {name} out"),
                );
            }
        }
    }
    if spec.training.load_in_4bit && rollout.engine == RolloutEngine::Vllm {
        refuse(
            "/training/load_in_4bit",
            "vLLM has no bitsandbytes base, so its samples would come from another model: leave out load_in_4bit or rollout"
                .to_owned(),
        );
    }
}
