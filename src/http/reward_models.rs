//! The models of a job's `reward_model` rewards: looked up or downloaded from the hub, read, checked against the rewards.

use std::collections::BTreeMap;
use std::path::{Path as FilePath, PathBuf};

use super::AppState;
use super::auth::Caller;
use super::error::Problem;
use super::models::{RENAMED_TO, is_as_registered};
use super::named_models::{UseOfHub, find_model, renamed};
use crate::modelcard::{Backbone, ClassifierCard};
use crate::spec::{FieldError, JobSpec, RewardKind, RewardModelFacts, RewardModelPlan, RewardTextFormat, Warning};
use crate::store::ModelRow;

/// A `reward_model` reward, its field in the job, and the registered model.
pub(super) struct Named {
    at: String,
    plan: RewardModelPlan,
    row: ModelRow,
    /// The folder of the model's files, except for the tensors of a model that is being downloaded.
    dir: PathBuf,
}

/// Returns the rows of all models that rewards name; a model that exists on the hub only is registered and downloaded, or inspected.
/// In the job, a name that means a private model becomes that model's id.
pub(super) async fn find(
    state: &AppState,
    caller: &Caller,
    spec: &mut JobSpec,
    use_of_hub: UseOfHub,
    errors: &mut Vec<FieldError>,
) -> Result<Vec<Named>, Problem> {
    let (mut eval, mut guard) = (None, None);
    if let Some(of_eval) = &mut spec.eval {
        eval = of_eval.rewards.as_deref_mut();
        guard = of_eval.guard.as_mut().and_then(|guard| guard.rewards.as_deref_mut());
    }
    let mut wanted: Vec<(String, &mut RewardModelPlan)> = Vec::new();
    for (rewards, at) in
        [(Some(spec.rewards.as_mut_slice()), "/rewards"), (eval, "/eval/rewards"), (guard, "/eval/guard/rewards")]
    {
        for (index, reward) in rewards.unwrap_or_default().iter_mut().enumerate() {
            if let RewardKind::RewardModel(plan) = &mut reward.kind {
                wanted.push((format!("{at}/{index}"), plan));
            }
        }
    }
    let mut found = Vec::with_capacity(wanted.len());
    for (at, plan) in wanted {
        if plan.model.is_empty() {
            continue; // The parser of the job reports it.
        }
        if let Some(row) = find_model(state, caller, (&plan.model, &format!("{at}/model")), use_of_hub, errors).await? {
            plan.model.clone_from(&row.id);
            let dir = state.downloads.readable(&row);
            found.push(Named { at, plan: plan.clone(), row, dir });
        }
    }
    Ok(found)
}

/// Reads the properties of the models. Blocking.
pub(super) fn inspect(
    named: Vec<Named>,
    errors: &mut Vec<FieldError>,
    warnings: &mut Vec<Warning>,
) -> BTreeMap<String, RewardModelFacts> {
    let mut facts = BTreeMap::new();
    for Named { at, plan, row, dir } in named {
        if let Some(name) = row.card[RENAMED_TO].as_str() {
            warnings.push(renamed(&format!("{at}/model"), name));
        }
        match inspect_one(&plan, &row, &dir) {
            Ok(found) => drop(facts.insert(plan.model, found)),
            Err((field, code, detail)) => errors.push(FieldError::new(format!("{at}/{field}"), code, detail)),
        }
    }
    facts
}

/// Returns the model's properties that the resolved job depends on, or the invalid field, an error code, and what to do.
fn inspect_one(
    plan: &RewardModelPlan,
    row: &ModelRow,
    dir: &FilePath,
) -> Result<RewardModelFacts, (&'static str, &'static str, String)> {
    let id = &row.id;
    let unusable =
        |detail: String| ("model", "invalid_model", format!("model '{id}' cannot be used as a reward model: {detail}"));
    let card = ClassifierCard::read(dir).map_err(|error| unusable(error.to_string()))?;
    // The files of a model that is still downloading are compared with its fingerprint once it is complete.
    if row.state != "downloading" && !is_as_registered(row, &card.files).map_err(|error| unusable(error.to_string()))? {
        let detail = format!(
            "the files of model '{id}' have changed since it was registered: register it again (POST /models with the \
             same id and source), then submit again"
        );
        return Err(("model", "model_changed", detail));
    }
    card.label_index(plan.label.as_deref()).map_err(|detail| ("label", "invalid_value", detail))?;
    if let Some(max) = plan.max_length.filter(|max| *max as usize > card.max_tokens) {
        let detail = format!("model '{id}' supports at most {} tokens, not {max}", card.max_tokens);
        return Err(("max_length", "out_of_range", detail));
    }
    if plan.format == RewardTextFormat::Chat && card.chat_template.is_none() {
        let detail = format!("model '{id}' has no chat template: use another format, or add chat_template.jinja to it");
        return Err(("format", "no_chat_template", detail));
    }
    Ok(RewardModelFacts {
        sha256: row.sha256.clone(),
        num_parameters: card.num_parameters,
        is_encoder: matches!(card.backbone, Backbone::Encoder(_)),
    })
}
