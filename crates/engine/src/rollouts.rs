//! Completions of the current policy: sampled, or read from the host's journal, and scored by the rewards.
//!
//! Longer than 500 lines: every source of completions, each a short function.

use std::num::NonZeroUsize;
use std::path::Path;
use std::time::Instant;

use rlood_types::rollout::{RewardSample, Segment};
use serde_json::{Value, json};

use super::certificate;
use super::episodes::{self, Episodes, Table};
use super::error::EngineError;
use super::generate::{GeneratePrompt, GenerateRequest, Generated, generate};
use super::host::{
    BlockSampling, ExportedAdapter, Host, Rollout, RolloutCompletion, RolloutGroup, RolloutId, RolloutPart, RunEnd,
    SamplePrompt, SampleRequest, SampledGroup, ScoreRequest,
};
use super::model::{Adapter, Policy};
use super::prompts::TokenizedPrompt;
use super::random::{Key, Stream};
use super::refill;
use super::relief;
use super::report::StepSeconds;
use super::rollout::{Batching, num_generations};
use super::run::{Data, Model};
use super::sampling::Sampler;
use crate::environment::{Episode, EpisodeCall, Reply};
use crate::event::{Event, Phase, SamplePhase};
use crate::spec::{Estimator, Plan};

/// Number of evaluation prompts that are sampled and recorded together on a CPU.
const EVALUATION_BATCH: usize = 64;
/// The same on rollout servers, which sample many prompts at a time.
const SERVER_EVALUATION_BATCH: usize = 512;

/// Number of probe sequences by which rollout servers are checked, and of tokens in each.
const PROBES: usize = 4;
const PROBE_TOKENS: usize = 48;
/// Number of bits of a seed. JSON numbers are exact up to 2^53.
const SEED_BITS: u32 = 53;

/// Samples completions and requests their scores.
pub(super) struct Rollouts<'r> {
    pub host: &'r mut dyn Host,
    pub plan: &'r Plan,
    pub model: &'r mut Model,
    pub data: &'r Data,
    pub seconds: &'r mut StepSeconds,
    pub steps_done: u64,
    /// Directory in which the adapter is exported for rollout servers.
    pub scratch_dir: &'r Path,
}

impl Rollouts<'_> {
    /// Samples and scores the generation block with this index, whose prompts begin at `position`, for the optimizer
    /// steps from `step` on.
    pub fn block(&mut self, step: u64, index: u64, position: u64, batching: &Batching) -> Result<Rollout, RunEnd> {
        let (rows, next_prompt) = batching.block_at(position);
        let rows = self.data.dataset_rows(rows);
        let key = self.train_key(index);
        let groups = self.groups(RolloutId::train(step), &rows, key)?;
        let drawn = BlockSampling { next_prompt: Some(next_prompt), ..BlockSampling::default() };
        let mut rollout = Rollout { groups, drawn };
        refill::refill(self, batching, step, index, &mut rollout)?;
        Ok(rollout)
    }

    /// The root random key of a block's completions.
    pub fn train_key(&self, block: u64) -> Key {
        Key::new(self.plan.training.seed, Stream::Train).with(block)
    }

    /// Returns scored groups for these rows, with the greedy completions that remax compares them with.
    pub fn groups(&mut self, id: RolloutId, rows: &[u64], key: Key) -> Result<Vec<RolloutGroup>, RunEnd> {
        let sampled = self.sample(id, rows, key)?;
        let mut groups = self.score(id, &sampled)?;
        let greedy = self.sample_greedy(id, rows, key)?;
        self.score_greedy(id, &greedy, &mut groups)?;
        Ok(groups)
    }

    /// Samples completions for these dataset rows, without scores.
    pub fn sample(&mut self, id: RolloutId, rows: &[u64], key: Key) -> Result<Vec<SampledGroup>, RunEnd> {
        let sampling = &self.plan.sampling;
        self.sample_with(id, rows, key, Sampler::new(sampling, sampling.temperature))
    }

    /// Samples one greedy completion for each of these rows, without scores; none unless the estimator is remax.
    pub fn sample_greedy(&mut self, id: RolloutId, rows: &[u64], key: Key) -> Result<Vec<SampledGroup>, RunEnd> {
        match self.plan.rloo.estimator {
            Estimator::Remax => self.sample_with(id.greedy(), rows, key, Sampler::new(&self.plan.sampling, 0.0)),
            _ => Ok(Vec::new()),
        }
    }

    fn sample_with(
        &mut self,
        id: RolloutId,
        rows: &[u64],
        key: Key,
        sampler: Sampler,
    ) -> Result<Vec<SampledGroup>, RunEnd> {
        self.enter(Phase::Rollout)?;
        let started = Instant::now();
        let recorded = self.host.recorded(id)?;
        let groups = self.generate_unless(recorded, id, rows, key, sampler)?;
        self.seconds.generate += started.elapsed().as_secs_f64();
        Ok(groups)
    }

    /// Scores the completions of these groups with all rewards.
    pub fn score(&mut self, id: RolloutId, groups: &[SampledGroup]) -> Result<Vec<RolloutGroup>, RunEnd> {
        self.enter(Phase::Reward)?;
        let started = Instant::now();
        let groups = self.with_scores(id, groups)?;
        self.seconds.reward += started.elapsed().as_secs_f64();
        Ok(groups)
    }

    /// Scores the greedy completions, if any, and attaches them to the groups of their prompts.
    pub fn score_greedy(
        &mut self,
        id: RolloutId,
        greedy: &[SampledGroup],
        groups: &mut [RolloutGroup],
    ) -> Result<(), RunEnd> {
        if greedy.is_empty() {
            return Ok(());
        }
        for (group, greedy) in groups.iter_mut().zip(self.score(id.greedy(), greedy)?) {
            group.greedy = greedy.completions.into_iter().next();
        }
        Ok(())
    }

    /// Samples and scores the rows of an evaluation.
    pub fn evaluation(&mut self, id: RolloutId, rows: &[u64], key: Key, sampler: Sampler) -> Result<Rollout, RunEnd> {
        let groups = self.sample_evaluation(id, rows, key, sampler)?;
        Ok(Rollout { groups: self.with_scores(id, &groups)?, drawn: BlockSampling::default() })
    }

    /// Samples the completions of an evaluation in batches. After an interruption the host's journal holds the finished
    /// batches, and the next attempt continues after them. This requires that a completion does not depend on the other
    /// rows sampled with it.
    fn sample_evaluation(
        &mut self,
        id: RolloutId,
        rows: &[u64],
        key: Key,
        sampler: Sampler,
    ) -> Result<Vec<SampledGroup>, RunEnd> {
        // An older version recorded an evaluation as a whole, under the id that is now the first batch's.
        let mut recorded = self.host.recorded(id)?;
        if !self.model.samples_exactly || recorded.as_ref().is_some_and(|groups| self.matches_rows(id, groups, rows)) {
            return self.generate_unless(recorded, id, rows, key, sampler);
        }
        let mut groups = Vec::with_capacity(rows.len());
        for (round, piece) in (0..).zip(rows.chunks(self.evaluation_batch(rows))) {
            let id = id.round(round);
            let known = if round == 0 { recorded.take() } else { self.host.recorded(id)? };
            groups.extend(self.generate_unless(known, id, piece, key, sampler)?);
        }
        Ok(groups)
    }

    /// Number of evaluation prompts per batch: large enough that little time is lost while the last completions
    /// of a batch end.
    fn evaluation_batch(&self, rows: &[u64]) -> usize {
        if self.plan.samples_elsewhere() {
            return SERVER_EVALUATION_BATCH;
        }
        let prompts = self.data.prompts_of(SamplePhase::Eval);
        let longest = rows.iter().map(|&row| prompts[row as usize].ids.len()).max().unwrap_or(0);
        let tokens_per_row = longest + self.plan.sampling.max_completion_length as usize;
        let at_once = relief::generation_rows(self.model, self.plan, tokens_per_row);
        let num_generations = self.num_generations(RolloutId::eval(0));
        match self.model.policy.device_peak_bytes() {
            // A GPU samples many completions concurrently, and is underused while the last ones of a batch end.
            Some(_) => (2 * at_once / num_generations).max(EVALUATION_BATCH),
            None => EVALUATION_BATCH,
        }
    }

    /// Returns whole groups for these dataset rows: those of the host's journal if they match, else newly sampled ones,
    /// which are passed to the host. `id` must differ between all samplings of a run, and be the same in every attempt.
    fn generate_unless(
        &mut self,
        recorded: Option<Vec<SampledGroup>>,
        id: RolloutId,
        rows: &[u64],
        key: Key,
        sampler: Sampler,
    ) -> Result<Vec<SampledGroup>, RunEnd> {
        if let Some(groups) = recorded.filter(|groups| self.matches_rows(id, groups, rows)) {
            return Ok(groups);
        }
        let plan = self.plan;
        if let Some(environment) = &plan.environment {
            let episodes = Episodes {
                sampling: &plan.sampling,
                environment,
                text: &self.data.text,
                prompts: self.data.prompts_of(id.phase),
                num_generations: self.num_generations(id),
                keys: (key, self.environment_key(id)),
                max_positions: self.model.policy.card().max_position_embeddings,
            };
            let mut groups = episodes::play(&mut RolloutTable { rollouts: self, id, key, sampler }, &episodes, rows)?;
            if !id.is_trained() {
                let completions = groups.iter_mut().flat_map(|group| &mut group.completions);
                completions.for_each(|completion| completion.segments.forget_logps());
            }
            self.host.sampled(id, &groups)?;
            return Ok(groups);
        }
        let mut completions = match self.plan.samples_elsewhere() {
            true => self.sample_on_servers(id, rows, key, sampler.temperature)?,
            false => loop {
                match self.generate(id, rows, key, sampler) {
                    Err(RunEnd::Failed(error)) => {
                        relief::halve_batches(self.model, error, self.plan, self.data, self.host)?
                    }
                    sampled => break sampled?,
                }
            },
        };
        if !id.is_trained() {
            // Only completions that are trained need their log-probs.
            completions.iter_mut().flatten().for_each(|completion| completion.segments.forget_logps());
        }
        let groups =
            rows.iter().zip(completions).map(|(&row, completions)| SampledGroup { row, completions, prompt_ids: None });
        let groups: Vec<SampledGroup> = groups.collect();
        self.host.sampled(id, &groups)?;
        Ok(groups)
    }

    /// Whether groups from the host's journal are whole groups of exactly these dataset rows.
    fn matches_rows(&self, id: RolloutId, groups: &[SampledGroup], rows: &[u64]) -> bool {
        let num_generations = self.num_generations(id);
        let whole =
            |(group, &row): (&SampledGroup, &u64)| group.row == row && group.completions.len() == num_generations.get();
        groups.len() == rows.len() && groups.iter().zip(rows).all(whole)
    }

    fn generate(&self, id: RolloutId, rows: &[u64], key: Key, sampler: Sampler) -> Result<Vec<Vec<Generated>>, RunEnd> {
        let prompts = self.data.prompts_of(id.phase);
        let prompts: Vec<GeneratePrompt<'_>> =
            rows.iter().map(|&row| GeneratePrompt { row, ids: &prompts[row as usize].ids, given: &[] }).collect();
        let longest = prompts.iter().map(|prompt| prompt.ids.len()).max().unwrap_or(0);
        let max_completion_length = self.plan.sampling.max_completion_length as usize;
        let request = GenerateRequest {
            prompts: &prompts,
            num_generations: self.num_generations(id),
            sampler,
            max_completion_length,
            stop: &self.plan.sampling.stop,
            key,
            eos_token_ids: self.data.text.eos_token_ids(),
            adapter: Adapter::On,
            max_rows: relief::generation_rows(self.model, self.plan, longest + max_completion_length),
        };
        let stop = || self.host.stop().is_some();
        match generate(&self.model.policy, &self.data.text, &request, &stop)? {
            Some(completions) => Ok(completions),
            None => Err(self.host.stopped()),
        }
    }

    /// Samples completions for these dataset rows on rollout servers, with the exported adapter. Old log-probs are never taken from
    /// there: the trained model computes them before training.
    fn sample_on_servers(
        &mut self,
        id: RolloutId,
        rows: &[u64],
        key: Key,
        temperature: f64,
    ) -> Result<Vec<Vec<Generated>>, RunEnd> {
        let num_generations = self.num_generations(id);
        let (updates, step) = (self.model.optimizer.updates(), self.steps_done);
        let known = self.model.exported.take().filter(|exported| exported.updates == updates);
        let exported = match known {
            Some(exported) => exported,
            None => export(self.model, self.data, self.plan, self.scratch_dir, step)?,
        };
        let prompts = self.data.prompts_of(id.phase);
        let prompt = |&row: &u64| SamplePrompt {
            row,
            ids: &prompts[row as usize].ids,
            seed: seed(key.with(row), num_generations.get() as u64),
        };
        let prompts: Vec<SamplePrompt<'_>> = rows.iter().map(prompt).collect();
        let sampled = self.host.sample(&SampleRequest {
            id,
            prompts: &prompts,
            num_generations,
            temperature,
            max_completion_length: self.plan.sampling.max_completion_length as usize,
            eos_token_ids: self.data.text.eos_token_ids(),
            vocab_size: self.model.policy.card().config.vocab_size,
            adapter: &exported,
        });
        self.model.exported = Some(exported);
        let sampled = sampled?;
        let whole = |completions: &Vec<Generated>| completions.len() == num_generations.get();
        if sampled.len() != rows.len() || !sampled.iter().all(whole) {
            let message = format!("the host sampled {} groups for {} prompts", sampled.len(), rows.len());
            return Err(RunEnd::Failed(EngineError::Input(message)));
        }
        Ok(sampled)
    }

    /// The completions as rewards receive them, in block order.
    pub fn reward_samples(&self, id: RolloutId, groups: &[SampledGroup]) -> Result<Vec<RewardSample>, EngineError> {
        let mut samples = Vec::new();
        let dataset = match (id.phase, &self.plan.eval) {
            (SamplePhase::Eval, Some(eval)) => &eval.dataset,
            (SamplePhase::Eval | SamplePhase::Train, _) => &self.plan.dataset,
        };
        for (index, SampledGroup { row, completions, .. }) in groups.iter().enumerate() {
            let prompt = &self.data.prompts_of(id.phase)[*row as usize];
            let source = dataset.source_of(*row);
            for completion in completions {
                if let Some(episode) = &completion.episode {
                    samples.push(self.episode_sample((samples.len(), index), (*row, prompt), completion, episode)?);
                    continue;
                }
                samples.push(RewardSample {
                    source: source.map(str::to_owned),
                    sample_id: format!("s_{}", samples.len()),
                    group_id: format!("g_{index}"),
                    prompt_id: format!("row_{row}"),
                    prompt: prompt.text.clone(),
                    messages: prompt.messages.clone(),
                    completion: self.data.text.decode(completion.segments.completion()?, true)?,
                    finish_reason: completion.finish_reason,
                    num_tokens: completion.segments.num_model_tokens() as u32,
                    completion_ids: Some(completion.segments.completion()?.to_vec()),
                    columns: prompt.columns.clone(),
                    episode: None,
                });
            }
        }
        Ok(samples)
    }

    /// An episode as rewards receive it: the whole chat as messages, and the last answer as the completion.
    fn episode_sample(
        &self,
        (sample, group): (usize, usize),
        (row, prompt): (u64, &TokenizedPrompt),
        completion: &Generated,
        episode: &Episode,
    ) -> Result<RewardSample, EngineError> {
        let last = completion.segments.0.iter().rev().find(|segment| segment.is_model());
        let last = last.map_or(&[][..], Segment::ids);
        Ok(RewardSample {
            source: self.plan.dataset.source_of(row).map(str::to_owned),
            sample_id: format!("s_{sample}"),
            group_id: format!("g_{group}"),
            prompt_id: format!("row_{row}"),
            prompt: prompt.text.clone(),
            messages: Some(Value::Array(conversation(prompt, episode))),
            completion: self.data.text.decode(last, true)?,
            finish_reason: completion.finish_reason,
            num_tokens: completion.segments.num_model_tokens() as u32,
            completion_ids: Some(last.to_vec()),
            columns: prompt.columns.clone(),
            episode: Some(Box::new(episode.clone())),
        })
    }

    /// The root key of the environment's seeds in this rollout. All evaluations have the same.
    pub fn environment_key(&self, id: RolloutId) -> Key {
        let key = Key::new(self.plan.training.seed, Stream::Environment);
        match id.phase {
            SamplePhase::Eval => key.with(0),
            SamplePhase::Train => key.with(id.step).with(id.round.into()),
        }
    }

    fn with_scores(&mut self, id: RolloutId, groups: &[SampledGroup]) -> Result<Vec<RolloutGroup>, RunEnd> {
        let samples = self.reward_samples(id, groups)?;
        let scores = self.host.score(&ScoreRequest { id, samples: &samples })?;
        if scores.len() != samples.len() {
            let message = format!("the host gave {} scores for {} samples", scores.len(), samples.len());
            return Err(RunEnd::Failed(EngineError::Input(message)));
        }
        let mut scores = scores.into_iter();
        let groups = groups.iter().map(|SampledGroup { row, completions, prompt_ids }| RolloutGroup {
            row: *row,
            prompt_ids: match prompt_ids {
                Some(ids) => ids.clone(),
                None => self.data.prompts_of(id.phase)[*row as usize].ids.clone(),
            },
            completions: completions
                .iter()
                .cloned()
                .zip(scores.by_ref())
                .map(|(Generated { segments, finish_reason, episode }, score)| RolloutCompletion {
                    segments,
                    finish_reason,
                    score,
                    episode,
                })
                .collect(),
            greedy: None,
        });
        Ok(groups.collect())
    }

    fn enter(&mut self, phase: Phase) -> Result<(), RunEnd> {
        self.host.event(Event::Phase { phase, step: self.steps_done })
    }

    /// Number of completions of each prompt in a rollout.
    pub fn num_generations(&self, id: RolloutId) -> NonZeroUsize {
        let eval = || NonZeroUsize::new(self.plan.eval.as_ref()?.num_generations as usize);
        match id.phase {
            _ if id.part == RolloutPart::Greedy => NonZeroUsize::MIN,
            SamplePhase::Eval => eval().unwrap_or(num_generations(self.plan)),
            SamplePhase::Train => num_generations(self.plan),
        }
    }
}

/// The table of the episodes of one rollout.
struct RolloutTable<'t, 'r> {
    rollouts: &'t mut Rollouts<'r>,
    id: RolloutId,
    key: Key,
    sampler: Sampler,
}

impl Table for RolloutTable<'_, '_> {
    fn generate(&mut self, prompts: &[GeneratePrompt<'_>], max_tokens: usize) -> Result<Vec<Generated>, RunEnd> {
        let Rollouts { host, plan, model, data, .. } = &mut *self.rollouts;
        let longest = prompts.iter().map(|prompt| prompt.ids.len() + prompt.given.len()).max().unwrap_or(0);
        loop {
            let request = GenerateRequest {
                prompts,
                num_generations: NonZeroUsize::MIN,
                sampler: self.sampler,
                max_completion_length: max_tokens,
                stop: &[],
                key: self.key,
                eos_token_ids: data.text.eos_token_ids(),
                adapter: Adapter::On,
                max_rows: relief::generation_rows(model, plan, longest + max_tokens),
            };
            match generate(&model.policy, &data.text, &request, &|| host.stop().is_some()) {
                Ok(Some(completions)) => return Ok(completions.into_iter().flatten().collect()),
                Ok(None) => return Err(host.stopped()),
                Err(error) => relief::halve_batches(model, error, plan, data, *host)?,
            }
        }
    }

    fn ask(&mut self, calls: &[EpisodeCall]) -> Result<Vec<Reply>, RunEnd> {
        self.rollouts.host.environment(self.id, calls)
    }

    fn event(&mut self, event: Event) -> Result<(), RunEnd> {
        self.rollouts.host.event(event)
    }
}

/// Returns the messages of an episode: the row's, the environment's, and the turns with what followed them.
fn conversation(prompt: &TokenizedPrompt, episode: &Episode) -> Vec<Value> {
    let mut messages = match &prompt.messages {
        Some(Value::Array(messages)) => messages.clone(),
        Some(_) | None => vec![json!({"role": "user", "content": prompt.text})],
    };
    messages.extend(episode.opening.iter().cloned());
    for turn in &episode.turns {
        let mut message = json!({"role": "assistant", "content": turn.text});
        if !turn.tool_calls.is_empty() {
            message["tool_calls"] = json!(turn.tool_calls);
        }
        messages.push(message);
        messages.extend(turn.observations.iter().cloned());
    }
    messages
}

/// Writes the current adapter, and computes the log-probs of the probes.
fn export(
    model: &Model,
    data: &Data,
    plan: &Plan,
    scratch_dir: &Path,
    step: u64,
) -> Result<ExportedAdapter, EngineError> {
    let io = |source| EngineError::Io { path: scratch_dir.to_owned(), source };
    std::fs::create_dir_all(scratch_dir).map_err(io)?;
    let dir = tempfile::Builder::new().prefix(".rollout-").tempdir_in(scratch_dir).map_err(io)?;
    let policy = &model.policy;
    policy.save_lora(dir.path(), &plan.model.id)?;
    let probes = probes(data, policy);
    let logps = |adapter| {
        let probes: Vec<&[u32]> = probes.iter().map(Vec::as_slice).collect();
        certificate::logps(policy, &probes, adapter, &|| false)
    };
    let (base_logps, logps) = (logps(Adapter::Off)?, logps(Adapter::On)?);
    let longest = |phase| data.prompts_of(phase).iter().map(|prompt| prompt.ids.len()).max().unwrap_or(0);
    let longest = longest(SamplePhase::Train).max(longest(SamplePhase::Eval));
    // A server also reads the probes, and samples at least one token after them.
    let longest_probe = probes.iter().map(|probe| probe.len() + 1).max().unwrap_or(0);
    let max_tokens = (longest + plan.sampling.max_completion_length as usize).max(longest_probe);
    Ok(ExportedAdapter { updates: model.optimizer.updates(), step, dir, max_tokens, probes, base_logps, logps })
}

/// Builds probes from the training prompts, which are joined where they are too short.
fn probes(data: &Data, policy: &Policy) -> Vec<Vec<u32>> {
    let prompts = data.prompts_of(SamplePhase::Train);
    let length = PROBE_TOKENS.min(policy.card().max_position_embeddings.saturating_sub(1)).max(2);
    let probe = |first: usize| {
        let ids = prompts.iter().cycle().skip(first).take(PROBE_TOKENS).flat_map(|prompt| prompt.ids.iter().copied());
        ids.take(length).collect::<Vec<u32>>()
    };
    (0..PROBES.min(prompts.len())).map(probe).filter(|probe| probe.len() >= 2).collect()
}

/// Returns a seed that is at least `num_generations` away from the seeds of other keys, or equal to one.
fn seed(key: Key, num_generations: u64) -> u64 {
    let spacing = num_generations.next_power_of_two();
    (key.bits() >> (64 - SEED_BITS + spacing.trailing_zeros())) * spacing
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Stream;

    #[test]
    fn seeds_are_exact_in_json_and_leave_room_for_every_completion() {
        for num_generations in [1, 4, 5, 64] {
            let seeds: Vec<u64> =
                (0..200).map(|row| seed(Key::new(7, Stream::Train).with(row), num_generations)).collect();
            assert!(seeds.iter().all(|seed| seed + num_generations < 1 << SEED_BITS));
            let mut sorted = seeds.clone();
            sorted.sort_unstable();
            assert!(sorted.windows(2).all(|pair| pair[1] - pair[0] >= num_generations), "{num_generations}");
            assert_eq!(seeds[3], seed(Key::new(7, Stream::Train).with(3), num_generations));
        }
    }
}
