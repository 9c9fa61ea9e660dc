//! Chooses the runtime of a job, and refuses by name what the chosen one cannot do.

use super::facts::Context;
use super::runtime_spec::RuntimeChoice;
use super::{
    Estimator, FieldError, Guarantees, JobSpec, KlEstimator, KlIn, Loss, ResumeGuarantee, RewardNormalization,
    RuntimeFacts, RuntimeName, RuntimePlan, StopGuarantee,
};

/// The guarantees that a job gives up if TRL trains it.
const GIVES_UP: &str = "it gives up pauses inside a step, evaluation during training, certificates, and equal bytes after an interruption on a GPU";
/// How an environment for TRL is created.
const INSTALL: &str =
    "run `rlood runtime install trl` on the worker's machine, then restart the worker (or the server that starts it)";

/// Chooses the runtime, and adds what the job cannot have with it to `errors`.
pub(super) fn choose(spec: &JobSpec, context: &Context, errors: &mut Vec<FieldError>) -> RuntimePlan {
    let only_trl = only_trl(spec, context);
    let name = match spec.runtime.name {
        RuntimeChoice::Own => RuntimeName::Own,
        RuntimeChoice::Trl => RuntimeName::Trl,
        RuntimeChoice::Auto if only_trl.is_empty() => RuntimeName::Own,
        RuntimeChoice::Auto => RuntimeName::Trl,
    };
    if name == RuntimeName::Own {
        let refused = only_trl.into_iter().map(|(at, what)| {
            let detail =
                format!("{what}, which rlood's own engine cannot: add \"runtime\": {{\"name\": \"trl\"}}; {GIVES_UP}");
            FieldError::new(at, "needs_runtime", detail)
        });
        errors.extend(refused);
        return RuntimePlan::default();
    }
    errors.extend(beyond_trl(spec, context));
    let facts = find_environment(spec, context, errors);
    let gpus = facts.is_some_and(|facts| facts.gpus);
    RuntimePlan {
        name,
        load_in_8bit: spec.runtime.load_in_8bit,
        zero_stage: spec.runtime.zero_stage,
        offload: spec.runtime.offload,
        versions: facts.map(|facts| facts.versions.clone()).unwrap_or_default(),
        guarantees: Guarantees {
            resume: if gpus { ResumeGuarantee::Recorded } else { ResumeGuarantee::ExactCpu },
            stop: StopGuarantee::Step,
        },
    }
}

/// Returns the settings that only TRL can train with: the JSON pointer of each, and what it asks for.
fn only_trl(spec: &JobSpec, context: &Context) -> Vec<(&'static str, String)> {
    let mut found = Vec::new();
    if let Some(architecture) = context.model.as_ref().and_then(|model| model.foreign.as_ref()) {
        found.push(("/model", format!("the job trains a model of the architecture '{architecture}'")));
    }
    let with_images = context.datasets().filter(|(facts, _)| facts.has_images());
    found.extend(with_images.map(|(_, at)| (at, "the job trains on images".to_owned())));
    if spec.resources.devices > 1 {
        found.push(("/resources/devices", format!("the job asks for {} devices", spec.resources.devices)));
    }
    if spec.runtime.load_in_8bit {
        found.push(("/runtime/load_in_8bit", "the job asks for a base model in 8 bits".to_owned()));
    }
    if spec.runtime.zero_stage.is_some() {
        found.push(("/runtime/zero_stage", "the job asks for DeepSpeed".to_owned()));
    }
    found
}

/// Refuses each setting that has no counterpart in TRL.
fn beyond_trl(spec: &JobSpec, context: &Context) -> Vec<FieldError> {
    let rloo = &spec.rloo;
    let sources = context.dataset.iter().flat_map(|facts| &facts.sources);
    let is_weighted = sources.clone().any(|source| source.plan.weight != source.plan.num_rows as f64);
    let cases = [
        (spec.eval.is_some(), "/eval", "evaluation during training", "remove eval"),
        (spec.early_stopping.is_some(), "/early_stopping", "early stopping", "remove early_stopping"),
        (spec.warm_up.is_some(), "/warm_up", "a warm-up", "train the warm-up as a job of its own"),
        (
            spec.warm_start.is_some(),
            "/warm_start",
            "a warm start",
            "export the checkpoint merged into its model, register that model, and use it as the job's model",
        ),
        (spec.rollout.is_some(), "/rollout", "rollout servers", "remove rollout"),
        (spec.certificate.is_some(), "/certificate", "certificates during training", "remove certificate"),
        (!spec.sampling.stop.is_empty(), "/sampling/stop", "stop strings", "remove sampling.stop"),
        (rloo.estimator != Estimator::Rloo, "/rloo/estimator", "this estimator", "use rloo"),
        (rloo.loss != Loss::Sequence, "/rloo/loss", "this loss", "use sequence"),
        (rloo.kl_in != KlIn::Reward, "/rloo/kl_in", "a KL term in the loss", "use reward"),
        (rloo.kl_estimator != KlEstimator::K1, "/rloo/kl_estimator", "this KL estimator", "use k1"),
        (rloo.drop_tied_groups, "/rloo/drop_tied_groups", "dropped groups", "set it to false"),
        (rloo.min_informative_groups > 0, "/rloo/min_informative_groups", "refills", "set it to 0"),
        (rloo.overlap, "/rloo/overlap", "overlapping blocks", "set it to false"),
        (
            rloo.reward_normalization == RewardNormalization::Running,
            "/rloo/reward_normalization",
            "running statistics of rewards",
            "use none or batch",
        ),
        (is_weighted, "/dataset", "weights of dataset sources", "leave out the weights"),
        (
            spec.runtime.load_in_8bit && spec.training.load_in_4bit,
            "/runtime/load_in_8bit",
            "8 bits and 4 bits at once",
            "choose one of load_in_8bit and training.load_in_4bit",
        ),
        (
            spec.lora.is_none() && (spec.runtime.load_in_8bit || spec.training.load_in_4bit),
            "/lora",
            "training all weights of a quantized model",
            "set lora: a quantized base is frozen, and only an adapter is trained on it",
        ),
        (
            spec.runtime.offload && spec.runtime.zero_stage.is_none(),
            "/runtime/offload",
            "offload without DeepSpeed",
            "set runtime.zero_stage too",
        ),
    ];
    let refused = cases.into_iter().filter(|(is_refused, ..)| *is_refused);
    let refused = refused.map(|(_, at, what, remedy)| {
        FieldError::new(at, "unsupported_by_runtime", format!("the runtime trl does not support {what}: {remedy}"))
    });
    refused.chain(uneven_ranks(spec)).chain(unread_images(context)).collect()
}

/// Refuses images for a model that reads text only.
fn unread_images(context: &Context) -> Option<FieldError> {
    context.dataset.as_ref().filter(|facts| facts.has_images())?;
    let model = context.model.as_ref().filter(|model| !model.reads_images)?;
    let detail = format!(
        "the dataset has images, but the model '{}' reads text only: choose a vision-language model, or a dataset without images",
        model.id
    );
    Some(FieldError::new("/model", "reads_no_images", detail))
}

/// Refuses a number of devices that does not divide the completions of a step.
fn uneven_ranks(spec: &JobSpec) -> Option<FieldError> {
    let completions = u64::from(spec.training.prompts_per_step) * u64::from(spec.rloo.num_generations.get());
    let devices = u64::from(spec.resources.devices);
    let nearest = (1..=devices).rev().find(|devices| completions.is_multiple_of(*devices))?;
    let detail = format!(
        "a step has {completions} completions (prompts_per_step · num_generations), which {devices} devices cannot share evenly: use {nearest} devices, or another prompts_per_step"
    );
    (nearest != devices).then(|| FieldError::new("/resources/devices", "out_of_range", detail))
}

/// Finds a worker's environment that can train the job, or says what is missing.
fn find_environment<'c>(
    spec: &JobSpec,
    context: &'c Context,
    errors: &mut Vec<FieldError>,
) -> Option<&'c RuntimeFacts> {
    let mut fail = |at: &str, code, detail| errors.push(FieldError::new(at, code, detail));
    let Some(any) = context.runtimes.first() else {
        let detail = format!("no connected worker has the runtime trl: {INSTALL}");
        fail("/runtime", "runtime_unavailable", detail);
        return None;
    };
    let usable: Vec<&RuntimeFacts> = context.runtimes.iter().filter(|facts| facts.is_usable()).collect();
    if usable.is_empty() {
        let version = any.versions.get("trl").map_or("no TRL", String::as_str);
        let detail =
            format!("the environment has TRL {version}, but rlood drives TRL 1.16 only: {INSTALL}, in a new folder");
        fail("/runtime", "runtime_version", detail);
        return None;
    }
    let quantized = (spec.runtime.load_in_8bit || spec.training.load_in_4bit).then_some("quantized");
    let deepspeed = spec.runtime.zero_stage.map(|_| "deepspeed");
    let reads_images = context.model.as_ref().is_some_and(|model| model.reads_images);
    let vlm = reads_images.then_some("vlm");
    let needed: Vec<&str> = quantized.into_iter().chain(deepspeed).chain(vlm).collect();
    let has = |facts: &RuntimeFacts, extra: &str| facts.extras.iter().any(|found| found == extra);
    let complete: Vec<&RuntimeFacts> =
        usable.into_iter().filter(|facts| needed.iter().all(|extra| has(facts, extra))).collect();
    if complete.is_empty() {
        let needed = needed.join(",");
        let detail = format!("no worker's environment has {needed}: run `rlood runtime install trl --extras {needed}`");
        fail("/runtime", "runtime_extra_missing", detail);
        return None;
    }
    let most = complete.iter().map(|facts| facts.devices).max().unwrap_or(0);
    let found = complete.into_iter().find(|facts| facts.devices >= spec.resources.devices);
    if found.is_none() {
        let detail = format!(
            "a worker with the runtime trl has at most {most} devices, not {}: set RLOOD_TRL_DEVICES on the worker, or ask for fewer",
            spec.resources.devices
        );
        fail("/resources/devices", "out_of_range", detail);
    }
    found
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::{Value, json};

    use super::*;
    use crate::spec::{DatasetFacts, ModelFacts, Resolution, resolve, submittable};

    fn environment(version: &str, extras: &[&str], devices: u32, gpus: bool) -> RuntimeFacts {
        let versions = BTreeMap::from([("trl".to_owned(), version.to_owned())]);
        let extras = extras.iter().map(|&extra| extra.to_owned()).collect();
        RuntimeFacts { runtime: "trl".to_owned(), versions, extras, devices, gpus }
    }

    fn resolved(changes: Value, runtimes: Vec<RuntimeFacts>) -> Result<Resolution, Vec<(String, String)>> {
        resolved_with(changes, runtimes, None)
    }

    fn resolved_with(
        changes: Value,
        runtimes: Vec<RuntimeFacts>,
        foreign: Option<&str>,
    ) -> Result<Resolution, Vec<(String, String)>> {
        resolved_columns(changes, runtimes, foreign, &["prompt"])
    }

    fn resolved_columns(
        changes: Value,
        runtimes: Vec<RuntimeFacts>,
        foreign: Option<&str>,
        columns: &[&str],
    ) -> Result<Resolution, Vec<(String, String)>> {
        let records: Vec<Value> = (0..8).map(|row| json!({"prompt": format!("p {row}")})).collect();
        let mut document = json!({
            "model": "m", "dataset": {"records": records}, "rewards": [{"type": "length"}],
            "rloo": {"num_generations": 4}, "training": {"prompts_per_step": 2, "max_steps": 4}
        });
        for (key, value) in changes.as_object().unwrap() {
            match document.get_mut(key).and_then(Value::as_object_mut) {
                Some(section) => section.extend(value.as_object().unwrap().clone()),
                None => document[key] = value.clone(),
            }
        }
        let (spec, errors) = JobSpec::read(document);
        let codes =
            |errors: Vec<FieldError>| errors.into_iter().map(|error| (error.pointer, error.code.to_string())).collect();
        if !errors.is_empty() {
            return Err(codes(errors));
        }
        let model = ModelFacts {
            id: "m".into(),
            sha256: String::new(),
            max_position_embeddings: 4096,
            num_parameters: 1,
            size_bytes: 1,
            has_chat_template: false,
            removes_reasoning: false,
            shape: None,
            modules: Vec::new(),
            beyond_gpu: None,
            foreign: foreign.map(str::to_owned),
            reads_images: foreign.is_some_and(|name| name.ends_with("_vl")),
        };
        let columns = columns.iter().map(|&column| column.to_owned()).collect();
        let dataset = Some(DatasetFacts { columns, ..DatasetFacts::of_records(&records) });
        resolve(&spec, &Context { model: Some(model), dataset, runtimes, ..Context::default() }).map_err(codes)
    }

    fn error(at: &str, code: &str) -> Vec<(String, String)> {
        vec![(at.to_owned(), code.to_owned())]
    }

    #[test]
    fn the_own_engine_is_the_default_and_auto_chooses_trl_only_where_it_must() {
        let here = || vec![environment("1.16.0", &["quantized"], 4, false)];
        let name = |changes: Value| resolved(changes, here()).map(|resolution| resolution.plan.runtime.name);
        assert_eq!(name(json!({})).unwrap(), RuntimeName::Own);
        assert_eq!(name(json!({"runtime": "auto"})).unwrap(), RuntimeName::Own);
        assert_eq!(name(json!({"runtime": "auto", "resources": {"devices": 2}})).unwrap(), RuntimeName::Trl);
        assert_eq!(name(json!({"runtime": {"name": "auto", "load_in_8bit": true}})).unwrap(), RuntimeName::Trl);
        assert_eq!(
            name(json!({"resources": {"devices": 2}})).unwrap_err(),
            error("/resources/devices", "needs_runtime")
        );
        assert_eq!(name(json!({"runtime": "tlr"})).unwrap_err()[0].0, "/runtime/name");
        assert_eq!(name(json!({"runtime": {"name": "trl", "zero_stage": 1}})).unwrap_err()[0].0, "/runtime/zero_stage");
    }

    #[test]
    fn a_model_of_another_architecture_needs_trl() {
        let here = || vec![environment("1.16.0", &[], 4, false)];
        let name = |changes: Value| {
            resolved_with(changes, here(), Some("newest_5")).map(|resolution| resolution.plan.runtime.name)
        };
        assert_eq!(name(json!({})).unwrap_err(), error("/model", "needs_runtime"));
        assert_eq!(name(json!({"runtime": "auto"})).unwrap(), RuntimeName::Trl);
    }

    #[test]
    fn images_need_trl_a_model_that_reads_them_and_the_packages_for_it() {
        let rows = |changes: Value, extras: &[&str], model: &str| {
            resolved_columns(changes, vec![environment("1.16.0", extras, 4, false)], Some(model), &["prompt", "images"])
        };
        let own = rows(json!({}), &["vlm"], "qwen2_5_vl").unwrap_err();
        assert_eq!(own, [error("/model", "needs_runtime"), error("/dataset", "needs_runtime")].concat());
        assert_eq!(
            rows(json!({"runtime": "trl"}), &["vlm"], "newest_5").unwrap_err(),
            error("/model", "reads_no_images")
        );
        let missing = rows(json!({"runtime": "trl"}), &["quantized"], "qwen2_5_vl").unwrap_err();
        assert_eq!(missing, error("/runtime", "runtime_extra_missing"));
        for name in ["trl", "auto"] {
            let plan = rows(json!({"runtime": name}), &["vlm"], "qwen2_5_vl").unwrap().plan;
            assert_eq!(plan.runtime.name, RuntimeName::Trl);
        }
    }

    #[test]
    fn a_plan_of_the_own_engine_is_as_before_and_one_of_trl_says_what_it_guarantees() {
        let own = resolved(json!({}), Vec::new()).unwrap().plan;
        let stored = serde_json::to_value(&own).unwrap();
        assert!(stored.get("runtime").is_none() && stored.get("resources").is_none(), "{stored}");
        assert!(submittable(&own).get("runtime").is_none());

        let plan =
            resolved(json!({"runtime": "trl", "resources": {"devices": 2}}), vec![environment("1.16.1", &[], 2, true)])
                .unwrap()
                .plan;
        assert_eq!(
            plan.runtime.guarantees,
            Guarantees { resume: ResumeGuarantee::Recorded, stop: StopGuarantee::Step }
        );
        assert_eq!(plan.runtime.versions["trl"], "1.16.1");
        let again = submittable(&plan);
        assert_eq!((&again["runtime"]["name"], &again["resources"]["devices"]), (&json!("trl"), &json!(2)));
        let plan = resolved(json!({"runtime": "trl"}), vec![environment("1.16.0", &[], 2, false)]).unwrap().plan;
        assert_eq!(plan.runtime.guarantees.resume, ResumeGuarantee::ExactCpu);
    }

    #[test]
    fn settings_without_counterpart_are_refused_by_name() {
        let here = || vec![environment("1.16.0", &["quantized"], 4, false)];
        for (changes, at) in [
            (json!({"eval": {"fraction": 0.5}}), "/eval"),
            (json!({"sampling": {"stop": ["x"]}}), "/sampling/stop"),
            (json!({"rloo": {"loss": "gspo"}}), "/rloo/loss"),
            (json!({"rloo": {"estimator": "grpo"}}), "/rloo/estimator"),
            (json!({"rloo": {"reward_normalization": "running"}}), "/rloo/reward_normalization"),
            (json!({"rloo": {"drop_tied_groups": true}}), "/rloo/drop_tied_groups"),
            (json!({"runtime": {"name": "trl", "offload": true}}), "/runtime/offload"),
            (json!({"runtime": {"name": "trl", "load_in_8bit": true}, "lora": null}), "/lora"),
        ] {
            let mut changes = changes;
            if changes.get("runtime").is_none() {
                changes["runtime"] = json!("trl");
            }
            assert_eq!(resolved(changes, here()).unwrap_err(), error(at, "unsupported_by_runtime"), "{at}");
        }
        let uneven = json!({"runtime": "trl", "resources": {"devices": 3}});
        assert_eq!(resolved(uneven, here()).unwrap_err(), error("/resources/devices", "out_of_range"));
    }

    #[test]
    fn a_missing_environment_is_an_error_of_the_submission() {
        let asked = || json!({"runtime": {"name": "trl", "load_in_8bit": true}, "resources": {"devices": 4}});
        let refused = |runtimes| resolved(asked(), runtimes).unwrap_err();
        assert_eq!(refused(Vec::new()), error("/runtime", "runtime_unavailable"));
        assert_eq!(refused(vec![environment("1.17.0", &["quantized"], 4, true)]), error("/runtime", "runtime_version"));
        assert_eq!(refused(vec![environment("1.16.0", &["vlm"], 4, true)]), error("/runtime", "runtime_extra_missing"));
        assert_eq!(
            refused(vec![environment("1.16.0", &["quantized"], 2, true)]),
            error("/resources/devices", "out_of_range")
        );
        let two = vec![environment("1.16.0", &["quantized"], 2, true), environment("1.16.0", &["quantized"], 4, true)];
        assert!(resolved(asked(), two).is_ok());
    }
}
