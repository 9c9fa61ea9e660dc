//! Loads the model and the datasets that a job refers to, and counts their tokens.

mod answers;

use std::path::Path as FilePath;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::{Map, Value};

use super::AppState;
use super::auth::Caller;
use super::error::{Problem, chain};
use super::heavy;
use super::models::{RENAMED_TO, is_as_registered};
use super::named_models::{UseOfHub, find_model, renamed};
use super::prompts::{Place, Prompts};
use super::python_rewards;
use super::reach;
use super::reward_models;
use super::runtimes::known_runtimes;
use super::warm_start;
use crate::modelcard::text::{Prompt, Text};
use crate::modelcard::{self, ForeignCard, ModelCard, ModelCardError, ModelDescription, ModelFile};
use crate::outgoing::OutgoingError;
use crate::spec::{Context, FieldError, JobSpec, ModelFacts, PromptLengths, Warning, prompt_key};
use crate::store::ModelRow;

/// Above this number of rows, or bytes of prompts, the worker counts the tokens of prompts in its loading phase.
const MAX_COUNTED_ROWS: u64 = 10_000;
const MAX_COUNTED_BYTES: usize = 16 << 20;
/// Time limit for reading the model's properties and tokenizer, and for counting tokens.
const INSPECT_WITHIN: Duration = Duration::from_secs(60);

/// The model and data that a job refers to, as far as they were found.
pub(super) struct Prepared {
    /// Properties of the model and the data that the plan (the resolved settings) depends on.
    pub(super) context: Context,
    /// Errors for models, datasets and adapters that do not exist or cannot be used.
    pub(super) errors: Vec<FieldError>,
    /// Warnings about checks that were skipped.
    pub(super) warnings: Vec<Warning>,
    /// The prompts to train on.
    pub(super) train: Option<Prompts>,
    /// The prompts of the evaluation and of the verdict.
    pub(super) eval: EvalPrompts,
    /// The rows of the warm-up.
    pub(super) warm_up: Option<Prompts>,
}

/// The datasets that the job's `eval` section names beside the training dataset.
#[derive(Default)]
pub(super) struct EvalPrompts {
    /// Prompts that are evaluated during training.
    pub(super) eval: Option<Prompts>,
    /// Prompts that only the verdict reads.
    pub(super) test: Option<Prompts>,
    /// Prompts of `eval.guard`, on which training must not make the model worse.
    pub(super) guard: Option<Prompts>,
}

impl Prepared {
    /// Whether a dataset is still downloaded, so that the plan is provisional.
    pub(super) fn is_pending(&self) -> bool {
        self.context.is_pending()
    }
}

impl EvalPrompts {
    fn each(&mut self) -> impl Iterator<Item = &mut Prompts> {
        let Self { eval, test, guard } = self;
        eval.iter_mut().chain(test).chain(guard)
    }
}

/// Loads the model and all datasets that a job refers to. Inline records are moved out of the job.
pub(super) async fn prepare(
    state: &AppState,
    caller: &Caller,
    spec: &mut JobSpec,
    uploaded: Option<Prompts>,
    use_of_hub: UseOfHub,
) -> Result<Prepared, Problem> {
    let mut errors = unreachable_services(state, spec).await?;
    let model = find_model(state, caller, (&spec.model, "/model"), use_of_hub, &mut errors).await?;
    // While the model is unknown, a chat template is assumed, because most models have one.
    let chat_default = model.as_ref().is_none_or(|row| row.card["has_chat_template"] != Value::Bool(false));
    let train = match uploaded {
        Some(prompts) => Some(prompts),
        None => {
            let place = Place::new("/dataset", chat_default, use_of_hub);
            Prompts::find(state, caller, spec.dataset.as_mut(), &place, &mut errors).await?
        }
    };
    let mut eval = EvalPrompts::default();
    if let Some(spec) = &mut spec.eval {
        let guard = spec.guard.as_mut().and_then(|guard| guard.dataset.as_mut());
        for (prompts, source, at) in [
            (&mut eval.eval, spec.dataset.as_mut(), "/eval/dataset"),
            (&mut eval.test, spec.test_dataset.as_mut(), "/eval/test_dataset"),
            (&mut eval.guard, guard, "/eval/guard/dataset"),
        ] {
            let place = Place::new(at, chat_default, use_of_hub);
            *prompts = Prompts::find(state, caller, source, &place, &mut errors).await?;
        }
    }
    let warm_up = answers::find(state, caller, spec, (chat_default, use_of_hub), &mut errors).await?;
    python_rewards::resolve(state, caller, spec, &mut errors).await?;
    let reward_models = reward_models::find(state, caller, spec, use_of_hub, &mut errors).await?;
    let (memory_limit_bytes, places) = (state.config.memory_per_worker(), state.config.places());
    let warm_start = warm_start::find(state, caller, spec, use_of_hub == UseOfHub::Register, &mut errors).await?;
    let runtimes = known_runtimes(state).await?;
    let kwargs = spec.sampling.chat_template_kwargs.clone();
    let model = model.map(|row| (state.downloads.readable(&row), row));
    let inspection = move |stop: &AtomicBool| {
        let (mut train, mut eval, mut warm_up, mut warnings) = (train, eval, warm_up, Vec::new());
        let facts = match model {
            Some((dir, model)) => {
                let mut found = Found { errors: &mut errors, warnings: &mut warnings };
                let prompts = train.iter_mut().chain(eval.each());
                inspect((&model, &dir), (prompts, warm_up.as_mut()), &kwargs, stop, &mut found)?
            }
            None => None,
        };
        let reward_models = reward_models::inspect(reward_models, &mut errors, &mut warnings);
        let warm_start = warm_start.and_then(|start| {
            let described =
                facts.as_ref().and_then(|(facts, description)| Some((facts.id.as_str(), description.as_ref()?)));
            start.inspect(described, &mut errors, &mut warnings)
        });
        let facts_of = |prompts: &Option<Prompts>| prompts.as_ref().map(|prompts| prompts.facts.clone());
        let context = Context {
            model: facts.map(|(facts, _)| facts),
            dataset: facts_of(&train),
            eval_dataset: facts_of(&eval.eval),
            test_dataset: facts_of(&eval.test),
            guard_dataset: facts_of(&eval.guard),
            warm_up_dataset: facts_of(&warm_up),
            warm_start,
            reward_models,
            memory_limit_bytes,
            places,
            runtimes,
        };
        Ok(Prepared { context, errors, warnings, train, eval, warm_up })
    };
    heavy::run(state, caller, INSPECT_WITHIN, inspection).await?
}

/// The errors and warnings found while the model and data of a job were read.
struct Found<'f> {
    errors: &'f mut Vec<FieldError>,
    warnings: &'f mut Vec<Warning>,
}

/// Finds URLs of rewards, of tools and of the environment whose address is refused, as far as that is known without DNS. Names are checked when they are resolved.
async fn unreachable_services(state: &AppState, spec: &JobSpec) -> Result<Vec<FieldError>, Problem> {
    let policy = reach::outgoing(state).await?;
    let refused = |at: String, service: &Value| {
        let field = if service.get("server_url").is_some() { "server_url" } else { "url" };
        match policy.check_url(service.get(field)?.as_str()?) {
            Err(error @ OutgoingError::Refused { .. }) => {
                Some(FieldError::new(format!("{at}/{field}"), "address_refused", error.to_string()))
            }
            // Other errors in a URL are reported when the job is parsed.
            Ok(_) | Err(_) => None,
        }
    };
    let lists = ["/rewards", "/eval/rewards", "/eval/guard/rewards", "/tools"].into_iter().flat_map(|at| {
        let rewards = spec.redacted.pointer(at).and_then(Value::as_array).into_iter().flatten();
        rewards.enumerate().map(move |(index, reward)| (format!("{at}/{index}"), reward))
    });
    let environment = spec.redacted.get("environment").map(|environment| ("/environment".to_owned(), environment));
    Ok(lists.chain(environment).filter_map(|(at, service)| refused(at, service)).collect())
}

/// Reads the model's properties and counts the tokens of prompts, until `stop` is set. Blocking.
fn inspect<'p>(
    (model, dir): (&ModelRow, &FilePath),
    (prompts, answers): (impl Iterator<Item = &'p mut Prompts>, Option<&'p mut Prompts>),
    kwargs: &Map<String, Value>,
    stop: &AtomicBool,
    found: &mut Found<'_>,
) -> Result<Option<(ModelFacts, Option<ModelDescription>)>, Problem> {
    let unusable = |detail: String| {
        FieldError::new("/model", "invalid_model", format!("model '{}' cannot be used: {detail}", model.id))
    };
    let (facts, description, files) = match described(model, dir) {
        Ok(described) => described,
        Err(error) => {
            found.errors.push(unusable(error.to_string()));
            return Ok(None);
        }
    };
    // The files of a model that is still downloading are compared with its fingerprint once it is complete.
    let is_same = if model.state == "downloading" { Ok(true) } else { is_as_registered(model, &files) };
    match is_same {
        Ok(true) => {}
        Ok(false) => {
            let detail = format!(
                "the files of model '{}' have changed since it was registered: register it again (POST /models with the same id and source), then submit again",
                model.id
            );
            found.errors.push(FieldError::new("/model", "model_changed", detail));
            return Ok(None);
        }
        Err(error) => {
            found.errors.push(unusable(error.to_string()));
            return Ok(None);
        }
    }
    if let Some(name) = model.card[RENAMED_TO].as_str() {
        found.warnings.push(renamed("/model", name));
    }
    let text = match Text::load(dir) {
        Ok(text) => text,
        Err(error) => {
            found.errors.push(unusable(chain(&error)));
            return Ok(None);
        }
    };
    for prompts in prompts {
        let model = Model { text: &text, facts: &facts, kwargs };
        if let Err(error) = measure(prompts, &model, stop, found) {
            return Err(Problem::internal(format!("the rows of a dataset cannot be read: {error}")));
        }
    }
    if let Some(rows) = answers {
        let model = Model { text: &text, facts: &facts, kwargs };
        if let Err(error) = answers::measure(rows, &model, stop, found) {
            return Err(Problem::internal(format!("the rows of a dataset cannot be read: {error}")));
        }
    }
    Ok(Some((facts, description)))
}

/// The tokenizer and limits with which prompts' tokens are counted.
struct Model<'m> {
    text: &'m Text,
    facts: &'m ModelFacts,
    kwargs: &'m Map<String, Value>,
}

fn measure(prompts: &mut Prompts, model: &Model<'_>, stop: &AtomicBool, found: &mut Found<'_>) -> std::io::Result<()> {
    found.warnings.extend(prompts.renamed.iter().map(|(at, name)| renamed(at, name)));
    if prompts.facts.is_pending {
        found.warnings.push(not_downloaded(&prompts.at));
        return Ok(());
    }
    let Model { text, facts: model, kwargs } = *model;
    let mut count = prompts.facts.num_rows <= MAX_COUNTED_ROWS;
    let (mut has_chat, mut lengths, mut failures) = (false, PromptLengths::default(), Vec::new());
    let mut keys = Vec::new();
    let (mut seen_rows, mut seen_bytes) = (0_u64, 0);
    prompts.each_prompt(|row, prompt| {
        has_chat |= prompt.is_array();
        seen_rows += 1;
        seen_bytes += text_bytes(prompt);
        count &= seen_bytes <= MAX_COUNTED_BYTES;
        if !count || stop.load(Ordering::Relaxed) {
            return false; // Only the first rows are checked here; the worker checks every row.
        }
        keys.push(prompt_key(prompt));
        // Invalid prompts were reported before, and a missing chat template is reported later, so both are skipped here.
        let usable = !prompt.is_array() || model.has_chat_template;
        let Some(prompt) = usable.then(|| Prompt::from_value(prompt).ok()).flatten() else { return true };
        match text.prompt_ids(&prompt, kwargs) {
            Ok(ids) => {
                let tokens = ids.len() as u64;
                lengths.too_long += u64::from(tokens >= model.max_position_embeddings);
                if tokens > lengths.longest {
                    (lengths.longest, lengths.longest_row) = (tokens, row);
                }
            }
            Err(error) => failures.push(format!("row {row}: {}", chain(&error))),
        }
        failures.len() < 5
    })?;
    prompts.facts.has_chat_prompts = has_chat;
    prompts.facts.prompt_lengths = count.then_some(lengths);
    prompts.facts.prompt_keys = Some(keys).filter(|_| count && failures.is_empty());
    if !count {
        let detail = format!(
            "only the first {seen_rows} of {} prompts were checked, and the tokens of the others are not counted (the limit is \
             {MAX_COUNTED_ROWS} rows or {} MiB of prompts): the worker counts all of them when the job starts, and the job \
             fails then if one is too long",
            prompts.facts.num_rows,
            MAX_COUNTED_BYTES >> 20
        );
        found.warnings.push(Warning { pointer: prompts.at.clone(), code: "prompts_not_counted".to_owned(), detail });
    }
    found
        .errors
        .extend(failures.into_iter().map(|detail| FieldError::new(&*prompts.at, "prompt_not_encodable", detail)));
    Ok(())
}

/// The warning that the rows of a dataset were not checked, because they are not here yet.
fn not_downloaded(at: &str) -> Warning {
    let detail = "the dataset is not downloaded yet, so its rows are not checked, and without max_steps the number of steps is an \
                  estimate: the job waits for the dataset, and fails if its rows cannot be used";
    Warning { pointer: at.to_owned(), code: "dataset_not_downloaded".to_owned(), detail: detail.to_owned() }
}

/// Total size of the texts in a prompt, in bytes.
fn text_bytes(prompt: &Value) -> usize {
    match prompt {
        Value::String(text) => text.len(),
        Value::Array(list) => list.iter().map(text_bytes).sum(),
        Value::Object(map) => map.values().map(text_bytes).sum(),
        Value::Null | Value::Bool(_) | Value::Number(_) => 0,
    }
}

/// Returns the facts about a model, its description if rlood's own engine can run it, and its files. Blocking.
fn described(
    row: &ModelRow,
    dir: &FilePath,
) -> Result<(ModelFacts, Option<ModelDescription>, Vec<ModelFile>), ModelCardError> {
    match (modelcard::read(dir), ForeignCard::read(dir)) {
        (Ok(card), _) => Ok((model_facts(row, &card), Some(card.config), card.files)),
        (Err(_), Ok(Some(card))) => Ok((foreign_facts(row, &card), None, card.files)),
        (Err(error), Ok(None)) | (Err(_), Err(error)) => Err(error),
    }
}

/// Whether a chat template cuts answers at the end of their reasoning, as Qwen3's does.
fn removes_reasoning(template: Option<&str>) -> bool {
    template.is_some_and(|template| template.contains("</think>"))
}

fn foreign_facts(row: &ModelRow, card: &ForeignCard) -> ModelFacts {
    ModelFacts {
        id: row.id.clone(),
        sha256: row.sha256.clone(),
        max_position_embeddings: card.max_position_embeddings as u64,
        num_parameters: card.num_parameters,
        size_bytes: card.files.iter().map(|file| file.size_bytes).sum(),
        has_chat_template: card.chat_template.is_some(),
        removes_reasoning: removes_reasoning(card.chat_template.as_deref()),
        shape: None,
        modules: Vec::new(),
        beyond_gpu: None,
        foreign: Some(card.model_type.clone()),
        reads_images: card.reads_images,
    }
}

fn model_facts(row: &ModelRow, card: &ModelCard) -> ModelFacts {
    let config = &card.config;
    ModelFacts {
        id: row.id.clone(),
        sha256: row.sha256.clone(),
        max_position_embeddings: card.max_position_embeddings as u64,
        num_parameters: card.num_parameters,
        size_bytes: card.files.iter().map(|file| file.size_bytes).sum(),
        has_chat_template: card.chat_template.is_some(),
        removes_reasoning: removes_reasoning(card.chat_template.as_deref()),
        shape: Some(card.shape()),
        modules: config.module_names(),
        beyond_gpu: config.beyond_gpu(),
        foreign: None,
        reads_images: false,
    }
}
