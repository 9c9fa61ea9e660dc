//! The state of a run, and how it is loaded.

use std::collections::{HashSet, VecDeque};
use std::ops::Range;
use std::path::Path;

use super::ahead::{self, Ahead};
use super::answers::{self, AnsweredRow};
use super::backend::cpu::Cpu;
use super::backend::{BackendKind, Optimizer};
use super::block::Block;
use super::certificate::{self, Certifier};
use super::checkpoint::{self, TrainerState};
use super::delta::DeltaNorm;
use super::error::EngineError;
use super::host::{ExportedAdapter, Host, PromptRow, RunEnd, TrainInput};
use super::lora::ParameterInfo;
use super::model::Policy;
use super::optim::AdamW;
use super::prompts::{self, TokenizedPrompt};
use super::report::{self, StepSeconds};
use super::rollout::{Batching, Cursor, num_generations};
use super::rollouts::Rollouts;
use super::scoring::Scorer;
use super::start::{self, ReferenceModel};
use super::text::Text;
use super::update::MicroBatching;
use crate::event::{Event, Phase, SamplePhase};
use crate::kernels::isa::Isa;
use crate::spec::{Mixture, Plan, PromptKey, held_out_rows, prompt_key, shared_prompts, test_rows};

/// The complete state of a run.
pub(super) struct Run<'a> {
    pub host: &'a mut dyn Host,
    pub plan: &'a Plan,
    pub model: Model,
    pub data: Data,
    pub schedule: Schedule,
    pub progress: Progress,
    pub files: Files<'a>,
    /// Writes the checkpoints' certificates; None if that is not possible.
    pub certifier: Option<Certifier>,
}

/// The model with its optimizer, and the batch sizes it computes with.
pub(super) struct Model {
    pub policy: Policy,
    pub reference: ReferenceModel,
    pub optimizer: Optimizer,
    pub parameter_info: Vec<ParameterInfo>,
    pub delta_norm: Option<DeltaNorm>,
    /// Whether the policy started with the weights of a warm start instead of the base model's.
    pub is_warm_started: bool,
    /// Whether the log-probs recorded at sampling are used as the old log-probs.
    pub samples_exactly: bool,
    pub micro_batching: MicroBatching,
    /// Whether the GPU once ran out of memory, so that batch sizes were halved.
    pub halved_after_oom: bool,
    /// The adapter as rollout servers have it; None before the first request to them.
    pub exported: Option<ExportedAdapter>,
}

/// The prompts, and which of them are trained and evaluated.
pub(super) struct Data {
    pub text: Text,
    pub prompts: Vec<TokenizedPrompt>,
    pub eval_prompts: Vec<TokenizedPrompt>,
    /// The rows of the warm-up; empty once it is over.
    pub answered: Vec<AnsweredRow>,
    /// The dataset rows to train on, if some are held out for evaluation or for the verdict; None means all.
    pub trained_rows: Option<Vec<u64>>,
    /// Whether the evaluated rows are rows of the training dataset.
    pub eval_is_held_out: bool,
    /// The rows to evaluate: of the evaluation dataset, or held out of the training dataset.
    pub evaluated_rows: Vec<u64>,
    /// Keys that identify the prompts that are evaluated, or that only the verdict reads.
    evaluated_keys: HashSet<PromptKey>,
    /// The number of evaluated prompts that are also trained.
    pub shared_prompts: u64,
}

/// Decides which prompts each step trains on, and how often: determined by the plan and the size of the dataset.
pub(super) struct Schedule {
    pub batching: Batching,
    pub completions_per_step: usize,
}

/// The progress of a run: everything that training changes except the model.
pub(super) struct Progress {
    pub state: TrainerState,
    /// The block of the last step; the next step continues with it unless a new block begins.
    pub block: Option<Block>,
    /// Blocks that are sampled but not scored yet, in order; only with overlap.
    pub ahead: VecDeque<Ahead>,
    pub saved_step: u64,
    /// Whether there was an evaluation or an alert since the last checkpoint.
    pub unsaved_verdict: bool,
    pub seconds: StepSeconds,
}

/// Files and names that a checkpoint needs besides the run's state.
pub(super) struct Files<'a> {
    pub model_dir: &'a Path,
    /// The value of `base_model_name_or_path` in the adapter's config.
    pub model_name: &'a str,
    /// Directory in which checkpoints are written before they are published.
    pub scratch_dir: &'a Path,
    /// The reference's weights, which checkpoints include once a warm-up is over.
    pub reference: Option<tempfile::TempPath>,
}

impl<'a> Run<'a> {
    /// Loads the model, the prompts, and the checkpoint to resume from.
    pub fn load(mut input: TrainInput<'a>, host: &'a mut dyn Host) -> Result<Self, RunEnd> {
        let plan = input.plan;
        host.event(Event::Phase { phase: Phase::Loading, step: 0 })?;
        let backend = input.backend.map_or_else(|| BackendKind::of_device(input.device), Ok)?;
        let text = Text::load(input.model_dir).map_err(EngineError::from)?;
        let mut restored = input.resume.as_deref().map(|dir| checkpoint::read(dir, plan)).transpose()?;
        let previous_isa = restored.as_ref().and_then(|restored| restored.state.isa.clone());
        let (isa, changed) =
            start::choose_isa((backend, plan.training.dtype), previous_isa.as_deref(), Isa::requested())?;
        changed.map_or(Ok(()), |warning| host.event(warning))?;
        let mut policy = match isa {
            Some(isa) => {
                let cpu = Cpu::with_process_threads(plan.training.dtype, isa);
                Policy::quantized_on_cpu(input.model_dir, cpu, plan.training.four_bit())?
            }
            None => Policy::load_dtype(input.model_dir, backend, &plan.training)?,
        };
        if let Some(restored) = &mut restored {
            restored.state.isa = isa.map(|isa| isa.name().to_owned());
        }
        policy.set_gradient_checkpointing(plan.training.gradient_checkpointing);
        let warnings = [start::rounding_warning(&policy, plan.training.dtype), start::skipped_warning(&policy)];
        warnings.into_iter().flatten().try_for_each(|warning| host.event(warning))?;
        host.poll()?;
        let step = restored.as_ref().map_or(0, |restored| restored.state.step);
        let mut data = Data::load(text, &mut input, policy.card().max_position_embeddings, host)?;
        if step < plan.warm_up_steps() {
            let rows = std::mem::take(&mut input.warm_up_rows);
            data.tokenize_answers(rows, plan, policy.card().max_position_embeddings, host)?;
        }
        let schedule = Schedule::new(plan, &data.rows_by_source(plan))?;
        let certifier = match certifier(&policy, &data.text, &input) {
            Ok(certifier) => Some(certifier),
            Err(error) => {
                host.event(certificate::warning(&error))?;
                None
            }
        };
        let reference = start::begin(&mut policy, &input, step)?;
        let kept_reference = match &input.resume {
            _ if !plan.has_warmed_reference() || step < plan.warm_up_steps() => None,
            Some(dir) if step > plan.warm_up_steps() => Some(checkpoint::copy_reference(dir, input.scratch_dir)?),
            Some(_) | None => Some(start::save_reference(&policy, input.scratch_dir)?),
        };
        let (adam, state, block, ahead) = match restored {
            Some(restored) => (restored.adam, restored.state, restored.block, restored.ahead),
            None => {
                let isa = isa.map(|isa| isa.name().to_owned());
                let state = TrainerState { plan_sha256: checkpoint::plan_sha256(plan), isa, ..TrainerState::default() };
                (AdamW::of_kind(plan.optimizer.kind, policy.flat().len()), state, None, None)
            }
        };
        let mut run = Self {
            model: Model::new(policy, reference, adam, &input)?,
            data,
            schedule,
            progress: Progress {
                saved_step: state.step,
                unsaved_verdict: false,
                block: block.map(|block| with_advantages(block, &state, plan)),
                ahead: VecDeque::new(),
                seconds: StepSeconds::default(),
                state,
            },
            files: Files {
                model_dir: input.model_dir,
                model_name: input.model_name,
                scratch_dir: input.scratch_dir,
                reference: kept_reference,
            },
            certifier,
            plan,
            host,
        };
        if let Some(ahead) = ahead {
            ahead::begin_scoring(&mut run.rollouts(), &ahead)?;
            run.progress.ahead.push_back(ahead);
        }
        Ok(run)
    }

    /// Returns the object that samples and scores completions of the current policy.
    pub fn rollouts(&mut self) -> Rollouts<'_> {
        Rollouts {
            host: &mut *self.host,
            plan: self.plan,
            model: &mut self.model,
            data: &self.data,
            seconds: &mut self.progress.seconds,
            steps_done: self.progress.state.step,
            scratch_dir: self.files.scratch_dir,
        }
    }

    /// Returns the object that computes log-probs without gradient.
    pub fn scorer(&mut self) -> Scorer<'_> {
        Scorer {
            host: &mut *self.host,
            plan: self.plan,
            model: &mut self.model,
            data: &self.data,
            completions_per_step: self.schedule.completions_per_step,
            seconds: &mut self.progress.seconds,
            steps_done: self.progress.state.step,
        }
    }

    /// Reports to the host that the loop enters a phase.
    pub fn enter(&mut self, phase: Phase) -> Result<(), RunEnd> {
        self.host.event(Event::Phase { phase, step: self.progress.state.step })
    }
}

/// Prepares the checkpoints' certificates. If all weights are to be trained, the base model's part is computed here, where the policy
/// is still the base model.
fn certifier(policy: &Policy, text: &Text, input: &TrainInput<'_>) -> Result<Certifier, EngineError> {
    let mut certifier = Certifier::new(text, input.model_dir, policy.card().max_position_embeddings, input.plan)?;
    if input.plan.lora.is_none() {
        certifier.read_base(policy, &|| false)?;
    }
    Ok(certifier)
}

/// Recomputes a block's advantages. They are not stored, because they follow from rewards,
/// their statistics and log-probs.
fn with_advantages(mut block: Block, state: &TrainerState, plan: &Plan) -> Block {
    block.shape_rewards_by(state.reward_stats, plan);
    block.values.fill_advantages(0..block.len(), plan);
    block
}

impl Model {
    fn new(
        policy: Policy,
        reference: ReferenceModel,
        adam: AdamW,
        input: &TrainInput<'_>,
    ) -> Result<Self, EngineError> {
        let plan = input.plan;
        let optimizer = Optimizer::from_state(policy.flat(), AdamW { decayed: policy.decayed(), ..adam })?;
        let parameter_info = policy.parameters();
        let delta_norm = DeltaNorm::load(input.model_dir, policy.card(), policy.lora_config(), &parameter_info)?;
        Ok(Self {
            samples_exactly: policy.samples_exactly(),
            is_warm_started: input.initial_adapter.is_some() || plan.warm_up.is_some(),
            micro_batching: MicroBatching {
                num_generations: num_generations(plan),
                max_tokens: plan.training.micro_batch_tokens as usize,
                temperature: plan.sampling.temperature,
                dropout: None,
            },
            halved_after_oom: false,
            exported: None,
            policy,
            reference,
            optimizer,
            parameter_info,
            delta_norm,
        })
    }
}

impl Data {
    /// Takes the rows of the input, tokenizes them, and divides them between training and evaluation.
    fn load(text: Text, input: &mut TrainInput<'_>, max_positions: usize, host: &dyn Host) -> Result<Self, RunEnd> {
        let plan = input.plan;
        let rows = std::mem::take(&mut input.rows);
        let eval_rows = std::mem::take(&mut input.eval_rows);
        let keys = |rows: &[PromptRow]| rows.iter().map(|row| prompt_key(&row.prompt)).collect::<Vec<PromptKey>>();
        let (keys, eval_keys) = (keys(&rows), keys(&eval_rows));
        let prompts = prompts::tokenize(&text, rows, &plan.sampling, max_positions)?;
        let eval_prompts = prompts::tokenize(&text, eval_rows, &plan.sampling, max_positions)?;
        host.poll()?;
        let eval = plan.eval.as_ref();
        let fraction = eval.and_then(|eval| eval.fraction);
        let held_out = |fraction| held_out_rows(plan.arithmetic.split, &keys, fraction, plan.training.seed);
        let held_out = fraction.map(held_out);
        if held_out.as_ref().is_some_and(Vec::is_empty) {
            return Err(RunEnd::Failed(EngineError::Prompts(
                "eval.fraction cannot hold out any prompt: all prompts are equal, and equal prompts are never split between training and evaluation; set an evaluation dataset, or add prompts".into(),
            )));
        }
        let not_trained = held_out.as_deref().unwrap_or_default();
        let test = eval.and_then(|eval| eval.test_fraction);
        let tested =
            test.map(|fraction| test_rows(&keys, not_trained, fraction, plan.training.seed)).unwrap_or_default();
        let is_trained = |row: &u64| not_trained.binary_search(row).is_err() && tested.binary_search(row).is_err();
        let trained_rows: Option<Vec<u64>> =
            (held_out.is_some() || !tested.is_empty()).then(|| (0..prompts.len() as u64).filter(is_trained).collect());
        let of_rows = |rows: &[u64]| rows.iter().filter_map(|row| keys.get(*row as usize)).collect::<Vec<_>>();
        let trained_keys = trained_rows.as_deref().map_or_else(|| keys.iter().collect(), of_rows);
        let eval_is_held_out = held_out.is_some();
        let mut evaluated_keys: HashSet<PromptKey> = of_rows(&tested).into_iter().copied().collect();
        evaluated_keys.extend(std::mem::take(&mut input.judged_keys));
        let (evaluated_rows, shared_prompts) = match held_out {
            Some(rows) => {
                let shared = shared_prompts(trained_keys, of_rows(&rows));
                evaluated_keys.extend(of_rows(&rows));
                (rows, shared)
            }
            None => {
                let shared = shared_prompts(trained_keys, &eval_keys);
                evaluated_keys.extend(&eval_keys);
                ((0..eval_prompts.len() as u64).collect(), shared)
            }
        };
        Ok(Self {
            text,
            prompts,
            eval_prompts,
            answered: Vec::new(),
            trained_rows,
            eval_is_held_out,
            evaluated_rows,
            evaluated_keys,
            shared_prompts,
        })
    }

    /// Tokenizes the rows of the warm-up. Rows whose prompts are evaluated, or compared by the verdict, are left out: a model
    /// that has learned their answers would score too high.
    fn tokenize_answers(
        &mut self,
        rows: Vec<PromptRow>,
        plan: &Plan,
        max_positions: usize,
        host: &mut dyn Host,
    ) -> Result<(), RunEnd> {
        let keys: Vec<PromptKey> = rows.iter().map(answers::prompt_key_of).collect();
        let answered = answers::tokenize(&self.text, rows, &plan.sampling, max_positions)?;
        host.poll()?;
        let num_rows = answered.len();
        let rows = answered.into_iter().zip(&keys).filter(|(_, key)| !self.evaluated_keys.contains(*key));
        self.answered = rows.map(|(row, _)| row).collect();
        let left_out = num_rows - self.answered.len();
        if left_out > 0 {
            host.event(report::left_out_warning(left_out, num_rows))?;
        }
        if self.answered.is_empty() {
            let why = if num_rows == 0 {
                "the warm-up's dataset has no rows"
            } else {
                "the prompts of all rows are also evaluated, or compared by the verdict"
            };
            let detail = format!("the warm-up has no rows to train on: {why}; add rows");
            return Err(RunEnd::Failed(EngineError::Prompts(detail)));
        }
        Ok(())
    }

    /// Number of trained rows of each source; a single number if there is one source.
    fn rows_by_source(&self, plan: &Plan) -> Vec<u64> {
        match &self.trained_rows {
            Some(trained) => plan.dataset.rows_by_source(trained),
            None if plan.dataset.sources.is_empty() => vec![self.prompts.len() as u64],
            None => plan.dataset.sources.iter().map(|source| source.num_rows).collect(),
        }
    }

    /// The tokenized prompts that the row numbers of a rollout refer to.
    pub fn prompts_of(&self, phase: SamplePhase) -> &[TokenizedPrompt] {
        match phase {
            SamplePhase::Train => &self.prompts,
            // Evaluation rows that are held out are rows of the training dataset.
            SamplePhase::Eval if self.eval_is_held_out => &self.prompts,
            SamplePhase::Eval => &self.eval_prompts,
        }
    }

    /// Maps positions in the training order, which excludes held-out rows, to dataset rows.
    pub fn dataset_rows(&self, places: Vec<u64>) -> Vec<u64> {
        match &self.trained_rows {
            Some(trained) => places.into_iter().map(|place| trained[place as usize]).collect(),
            None => places,
        }
    }
}

impl Schedule {
    fn new(plan: &Plan, trained_rows: &[u64]) -> Result<Self, EngineError> {
        let batching = Batching::of_plan(plan, Mixture::of_sources(&plan.dataset.sources, trained_rows));
        if !batching.fills_a_block() {
            return Err(EngineError::Prompts(format!(
                "an epoch of the dataset has {} prompts to train on, fewer than one generation block of {}; lower prompts_per_step or steps_per_generation, or add prompts",
                batching.mixture.shortest_epoch(),
                batching.prompts_per_block
            )));
        }
        let completions_per_step = plan.training.prompts_per_step as usize * num_generations(plan).get();
        Ok(Self { batching, completions_per_step })
    }

    /// The range of the block's completions that an optimizer step trains.
    pub fn slice(&self, cursor: Cursor) -> Range<usize> {
        let start = cursor.slice as usize * self.completions_per_step;
        start..start + self.completions_per_step
    }

    /// The position where a new block's prompts begin: the end of the previous block's if refills consumed prompts.
    pub fn position_of_block(&self, block: u64, state: &TrainerState) -> u64 {
        state.next_prompt.unwrap_or_else(|| self.batching.position_of_block(block))
    }

    /// Whether old log-probs that were not recorded at sampling must be computed before training: the block is trained
    /// more than once, or its advantages are whitened together and include a KL penalty, or the training forward
    /// applies dropout. Otherwise the training forward itself provides them: old = new, ratio 1.
    pub fn needs_old_pass(&self, plan: &Plan) -> bool {
        let drops = plan.lora.as_ref().is_some_and(|lora| lora.dropout > 0.0);
        drops || self.batching.uses_per_block() > 1 || (plan.rloo.penalizes_reward() && plan.rloo.whitens_advantages())
    }

    /// Number of passes over the dataset after an RLOO step; computed from the position if refills consume prompts.
    pub fn epochs(&self, step: u64, state: &TrainerState, plan: &Plan) -> f64 {
        match state.next_prompt {
            Some(next) if !plan.dataset.sources.is_empty() => self.batching.epochs_at(next),
            Some(next) if plan.rloo.min_informative_groups > 0 => {
                next as f64 / self.batching.mixture.num_rows().max(1) as f64
            }
            Some(_) | None => self.batching.epochs(step),
        }
    }
}
