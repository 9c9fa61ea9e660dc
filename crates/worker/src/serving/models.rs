//! The models of a serving process: loaded when a request needs them, dropped when others need their memory.

use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::Sender;

use rlood_types::serving::{
    FromServing, ServedBase, ServedModel, ServedPiece, ServedRequest, ServedWeights, ServingError, ServingState,
};

use super::Message;
use crate::engine::backend::BackendKind;
use crate::engine::error::EngineError;
use crate::engine::model::{Policy, Precision};
use crate::engine::serving::{Batcher, Counts, Limits};
use crate::engine::text::Text;
use crate::modelcard;
use crate::one_shot::error_text;
use crate::spec::{ComputeDtype, FieldError};

/// Maximum number of adapters that one base model holds.
const MAX_ADAPTERS: usize = 32;
/// Part of the memory for the keys and values of running answers, and for those of earlier prompts.
const CACHE_SHARE: u64 = 4;
const KEPT_SHARE: u64 = 16;
/// Memory limit if none is known, in bytes.
const UNKNOWN_MEMORY: u64 = 8 << 30;
/// Maximum memory of earlier prompts, in bytes.
const MAX_KEPT: u64 = 1 << 30;

/// The weights that a batcher holds: a base model, or a model whose weights were all trained.
#[derive(Debug, Clone, PartialEq, Eq)]
struct ModelKey {
    base: ServedBase,
    full: Option<ServedWeights>,
}

impl ModelKey {
    fn of(model: &ServedModel) -> ModelKey {
        let full = model.weights.clone().filter(|weights| weights.full);
        ModelKey { base: model.base.clone(), full }
    }
}

/// The result of loading a model in its own thread.
pub(super) struct Loaded {
    key: ModelKey,
    batcher: Result<Batcher, ServingError>,
}

/// A request that waits until its model is loaded.
struct Pending {
    id: u64,
    model: ServedModel,
    request: Arc<ServedRequest>,
}

/// A loaded model with the adapters that it serves.
struct Model {
    key: ModelKey,
    batcher: Batcher,
    /// The adapters and their slots, the least recently used first.
    adapters: Vec<(ServedWeights, u32)>,
    next_slot: u32,
    /// Memory of the weights in bytes.
    bytes: u64,
    /// Memory limit of the process in bytes.
    memory_bytes: u64,
}

/// All models of the process.
pub(super) struct Models {
    backend: BackendKind,
    memory_bytes: u64,
    max_rows: usize,
    sender: Sender<Message>,
    /// The loaded models, the least recently used first.
    models: Vec<Model>,
    /// The model that is being loaded, with its estimated memory.
    loading: Option<ModelKey>,
    /// Requests whose model is not loaded, in order.
    pending: VecDeque<Pending>,
    /// The model of each request that was given to a batcher, and the number of its answers that have not ended.
    running: HashMap<u64, (ModelKey, u32)>,
    /// Numbers of tokens of models that were dropped.
    dropped: Counts,
}

impl Models {
    pub(super) fn new(
        backend: BackendKind,
        memory_limit: Option<u64>,
        max_rows: usize,
        sender: Sender<Message>,
    ) -> Models {
        let (models, pending, running) = (Vec::new(), VecDeque::new(), HashMap::new());
        let memory_bytes = memory_limit.unwrap_or(UNKNOWN_MEMORY);
        Models {
            backend,
            memory_bytes,
            max_rows,
            sender,
            models,
            loading: None,
            pending,
            running,
            dropped: Counts::default(),
        }
    }

    /// Whether no model has anything to generate.
    pub(super) fn is_idle(&self) -> bool {
        self.models.iter().all(|model| model.batcher.is_idle())
    }

    /// Starts a request, at once or when its model is loaded.
    pub(super) fn start(&mut self, id: u64, model: ServedModel, request: ServedRequest) -> Vec<FromServing> {
        self.pending.push_back(Pending { id, model, request: Arc::new(request) });
        self.give_out()
    }

    /// Drops a request.
    pub(super) fn cancel(&mut self, id: u64) -> Vec<FromServing> {
        self.pending.retain(|pending| pending.id != id);
        let Some((key, _)) = self.running.remove(&id) else { return Vec::new() };
        let cancelled = match self.models.iter_mut().find(|model| model.key == key) {
            Some(model) => model.batcher.cancel(id),
            None => Ok(()),
        };
        let mut failures = cancelled.map_or_else(|error| self.drop_model(&key, &error), |()| Vec::new());
        failures.extend(self.give_out());
        failures
    }

    /// Adds a model that was loaded, or fails the requests that wait for it.
    pub(super) fn add(&mut self, loaded: Loaded) -> Vec<FromServing> {
        let Loaded { key, batcher } = loaded;
        self.loading = None;
        let mut failures = Vec::new();
        match batcher {
            Ok(batcher) => {
                let bytes = match batcher.policy().matrix_bytes() {
                    Some((linear, head)) => (linear + head) as u64,
                    None => estimate(batcher.policy().card(), &key),
                };
                let memory_bytes = self.memory_bytes;
                self.models.push(Model { key, batcher, adapters: Vec::new(), next_slot: 0, bytes, memory_bytes });
            }
            Err(error) => {
                self.pending.retain(|pending| {
                    let waits = ModelKey::of(&pending.model) == key;
                    if waits {
                        failures.push(FromServing::Failed { id: pending.id, error: error.clone() });
                    }
                    !waits
                });
            }
        }
        failures.extend(self.give_out());
        failures
    }

    /// Gives pending requests to loaded models, and starts to load the model of the first one that is left.
    fn give_out(&mut self) -> Vec<FromServing> {
        let mut failures = Vec::new();
        for pending in std::mem::take(&mut self.pending) {
            let key = ModelKey::of(&pending.model);
            let Some(place) = self.models.iter().position(|model| model.key == key) else {
                self.pending.push_back(pending);
                continue;
            };
            // The most recently used model is last.
            let mut model = self.models.remove(place);
            match model.push(&pending) {
                Ok(()) => {
                    let answers = pending.request.num_choices.max(1);
                    self.running.insert(pending.id, (key, answers));
                }
                Err(error) => failures.push(FromServing::Failed { id: pending.id, error }),
            }
            self.models.push(model);
        }
        while self.loading.is_none()
            && let Some(first) = self.pending.front()
        {
            let key = ModelKey::of(&first.model);
            match self.make_room(&key) {
                Ok(true) => {
                    if let Err(error) = self.load(key) {
                        let failed = self.pending.pop_front().map(|first| FromServing::Failed { id: first.id, error });
                        failures.extend(failed);
                    }
                }
                // Models that are being used hold the memory: the request waits for them.
                Ok(false) => break,
                Err(error) => {
                    let failed = self.pending.pop_front().map(|first| FromServing::Failed { id: first.id, error });
                    failures.extend(failed);
                }
            }
        }
        failures
    }

    /// Drops models without requests until another one fits. False if models that are being used are in the way.
    fn make_room(&mut self, key: &ModelKey) -> Result<bool, ServingError> {
        let card = modelcard::read(&key.base.dir).map_err(|error| unusable(&EngineError::from(error)))?;
        let needed = estimate(&card, key);
        let limit = self.memory_bytes - self.memory_bytes / CACHE_SHARE;
        if needed > limit {
            let mib = |bytes: u64| bytes.div_ceil(1 << 20);
            let detail = format!(
                "the model needs about {} MiB, but the serving process may use only {} MiB for models: use a smaller model or dtype, or raise --memory-limit",
                mib(needed),
                mib(limit)
            );
            return Err(ServingError::OutOfMemory(detail));
        }
        loop {
            let used: u64 = self.models.iter().map(|model| model.bytes).sum();
            if used + needed <= limit {
                return Ok(true);
            }
            let Some(place) = self.models.iter().position(|model| model.batcher.is_idle()) else { return Ok(false) };
            self.remove(place);
        }
    }

    /// Drops a model; its counts remain.
    fn remove(&mut self, place: usize) {
        let counts = self.models.remove(place).batcher.counts();
        self.dropped.prompt_tokens += counts.prompt_tokens;
        self.dropped.reused_tokens += counts.reused_tokens;
        self.dropped.tokens += counts.tokens;
    }

    /// Loads a model in its own thread, so that others go on generating.
    fn load(&mut self, key: ModelKey) -> Result<(), ServingError> {
        let (backend, sender) = (self.backend, self.sender.clone());
        let limits = Limits {
            max_rows: self.max_rows,
            cache_bytes: (self.memory_bytes / CACHE_SHARE) as usize,
            kept_bytes: (self.memory_bytes / KEPT_SHARE).min(MAX_KEPT) as usize,
        };
        self.loading = Some(key.clone());
        let read = move || {
            // A panic ends only this thread: without a message, requests would wait for the model for ever.
            let loaded = catch_unwind(AssertUnwindSafe(|| load(&key, backend, limits)));
            let batcher = match loaded {
                Ok(loaded) => loaded.map_err(|error| unusable(&error)),
                Err(_) => Err(ServingError::Failed("the model could not be loaded: the loader panicked".to_owned())),
            };
            // Sending fails only when the process ends.
            drop(sender.send(Message::Loaded(Box::new(Loaded { key, batcher }))));
        };
        let thread = std::thread::Builder::new().name("load".to_owned()).spawn(read);
        thread.map(drop).map_err(|error| {
            self.loading = None;
            ServingError::Failed(format!("the thread that loads the model cannot be started: {error}"))
        })
    }

    /// Admits waiting requests and chooses the next token of every running answer.
    pub(super) fn choose(&mut self) -> (Vec<ServedPiece>, Vec<FromServing>) {
        let mut pieces = Vec::new();
        let results: Vec<(ModelKey, Result<(), EngineError>)> = self
            .models
            .iter_mut()
            .map(|model| {
                let done = model.batcher.admit(&mut pieces).and_then(|()| model.batcher.choose(&mut pieces));
                (model.key.clone(), done)
            })
            .collect();
        for piece in pieces.iter().filter(|piece| piece.finish.is_some()) {
            self.count_ended(piece.id);
        }
        (pieces, self.drop_failed(results))
    }

    /// Computes one step of every running answer.
    pub(super) fn advance(&mut self) -> Vec<FromServing> {
        let step = |model: &mut Model| (model.key.clone(), model.batcher.advance());
        let results = self.models.iter_mut().map(step).collect();
        let mut failures = self.drop_failed(results);
        if !self.pending.is_empty() {
            failures.extend(self.give_out());
        }
        failures
    }

    /// Counts an ended answer of a request, and forgets the request with its last one.
    fn count_ended(&mut self, id: u64) {
        if let Some((_, left)) = self.running.get_mut(&id) {
            *left -= 1;
            if *left == 0 {
                self.running.remove(&id);
            }
        }
    }

    fn drop_failed(&mut self, results: Vec<(ModelKey, Result<(), EngineError>)>) -> Vec<FromServing> {
        let failed = results.into_iter().filter_map(|(key, result)| result.err().map(|error| (key, error)));
        failed.flat_map(|(key, error)| self.drop_model(&key, &error)).collect()
    }

    /// Drops a model whose backend failed, with all its requests.
    fn drop_model(&mut self, key: &ModelKey, error: &EngineError) -> Vec<FromServing> {
        if let Some(place) = self.models.iter().position(|model| model.key == *key) {
            self.remove(place);
        }
        let ids: Vec<u64> = self.running.iter().filter(|(_, (other, _))| other == key).map(|(id, _)| *id).collect();
        let error = ServingError::Failed(error_text(error));
        ids.into_iter()
            .map(|id| {
                self.running.remove(&id);
                FromServing::Failed { id, error: error.clone() }
            })
            .collect()
    }

    /// The state of the process: its models and its work.
    pub(super) fn state(&self) -> ServingState {
        let mut state = ServingState::default();
        for model in &self.models {
            let base = ServedModel { base: model.key.base.clone(), weights: model.key.full.clone() };
            let adapters = model.adapters.iter();
            let adapters = adapters.map(|(weights, _)| ServedModel { weights: Some(weights.clone()), ..base.clone() });
            state.models.extend(adapters);
            state.models.push(base.clone());
            state.running += model.batcher.running() as u64;
            state.waiting += model.batcher.waiting() as u64;
            let counts = model.batcher.counts();
            state.prompt_tokens += counts.prompt_tokens;
            state.reused_tokens += counts.reused_tokens;
            state.tokens += counts.tokens;
        }
        let waiting = self.pending.iter().map(|pending| u64::from(pending.request.num_choices));
        state.waiting += waiting.sum::<u64>();
        state.prompt_tokens += self.dropped.prompt_tokens;
        state.reused_tokens += self.dropped.reused_tokens;
        state.tokens += self.dropped.tokens;
        state
    }
}

impl Model {
    /// Gives a request to the batcher; loads its adapter if it is not served yet.
    fn push(&mut self, pending: &Pending) -> Result<(), ServingError> {
        let Pending { id, model, request } = pending;
        let vocab_size = self.batcher.policy().card().config.vocab_size;
        if let Some(token) = request.ids.iter().find(|token| **token as usize >= vocab_size) {
            let detail = format!("token id {token} is not below the model's vocab_size {vocab_size}");
            return Err(ServingError::Refused(FieldError::new("/prompt", "invalid_token", detail)));
        }
        let mut request = request.clone();
        let most = self.batcher.most_tokens();
        if request.ids.len() + request.max_tokens as usize > most {
            if !request.to_context_end || request.ids.len() >= most {
                return Err(ServingError::Refused(self.too_long(&request, most)));
            }
            Arc::make_mut(&mut request).max_tokens = (most - request.ids.len()) as u32;
        }
        let slot = match model.weights.as_ref().filter(|weights| !weights.full) {
            None => None,
            Some(weights) => Some(self.slot(weights)?),
        };
        self.batcher.push(*id, slot, request);
        Ok(())
    }

    /// The error for an answer whose keys and values do not fit into the memory.
    fn too_long(&self, request: &ServedRequest, most: usize) -> FieldError {
        let detail = format!(
            "prompt and answer have up to {} tokens, but their keys and values fit into the memory for at most {most} (a quarter of --memory-limit, {} MiB per process): shorten the prompt or the answer",
            request.ids.len() + request.max_tokens as usize,
            self.memory_bytes >> 20
        );
        FieldError::new("/max_tokens", "not_enough_memory", detail)
    }

    /// Returns the slot of an adapter. Drops the least recently used one without requests if there are many.
    fn slot(&mut self, weights: &ServedWeights) -> Result<u32, ServingError> {
        if let Some(place) = self.adapters.iter().position(|(other, _)| other == weights) {
            let adapter = self.adapters.remove(place);
            let slot = adapter.1;
            self.adapters.push(adapter);
            return Ok(slot);
        }
        if self.adapters.len() >= MAX_ADAPTERS
            && let Some(place) = self.adapters.iter().position(|(_, slot)| !self.batcher.uses(Some(*slot)))
        {
            let (_, slot) = self.adapters.remove(place);
            self.batcher.stop_serving(slot);
        }
        let slot = self.next_slot;
        self.batcher.policy_mut().serve_lora(slot, &weights.dir).map_err(|error| unusable(&error))?;
        self.next_slot += 1;
        self.adapters.push((weights.clone(), slot));
        Ok(slot)
    }
}

/// Loads a model and its tokenizer.
fn load(key: &ModelKey, backend: BackendKind, limits: Limits) -> Result<Batcher, EngineError> {
    let ModelKey { base, full } = key;
    let precision = Precision { dtype: base.dtype, load_in_4bit: base.load_in_4bit };
    let text = Text::load(&base.dir)?;
    let mut policy = Policy::load_dtype(&base.dir, backend, precision)?;
    if let Some(weights) = full {
        policy.load_full(&weights.dir)?;
    }
    Ok(Batcher::new(policy, Arc::new(text), limits))
}

/// Estimates the memory of a model's weights in bytes.
fn estimate(card: &modelcard::ModelCard, key: &ModelKey) -> u64 {
    let each = match key.base.dtype {
        ComputeDtype::F32 => 4,
        ComputeDtype::Bf16 => 2,
    };
    // Trained weights are key as parameters in 32 bits besides.
    card.num_parameters * if key.full.is_some() { each + 4 } else { each }
}

fn unusable(error: &EngineError) -> ServingError {
    ServingError::Unusable(error_text(error))
}

#[cfg(test)]
mod tests;
