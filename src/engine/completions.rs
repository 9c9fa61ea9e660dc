//! Completions of the policy as it is, sampled and scored: for a generation block, and for an evaluation.

use std::time::Instant;

use super::error::EngineError;
use super::generate::{GeneratePrompt, GenerateRequest, Generated, generate};
use super::host::{
    Drawn, Rollout, RolloutCompletion, RolloutGroup, RolloutId, RolloutPart, SampledGroup, ScoreRequest,
};
use super::model::Adapter;
use super::prompts::TokenizedPrompt;
use super::random::{Key, Stream};
use super::sampling::Sampler;
use super::{Halt, Run, report};
use crate::event::{Event, Phase, SamplePhase};
use crate::sample::RewardSample;
use crate::spec::Estimator;

/// Prompts of an evaluation that are sampled, and recorded, at a time on a CPU.
const EVALUATION_PIECE: usize = 64;

impl Run<'_> {
    /// Sample the block's completions and have them scored; its prompts begin at the cursor.
    pub(super) fn roll_out(&mut self, step: u64, index: u64) -> Result<Rollout, Halt> {
        let position = self.state.next_prompt.unwrap_or_else(|| self.batching.position_of_block(index));
        let (rows, next_prompt) = self.batching.block_at(position);
        let rows = self.dataset_rows(rows);
        let key = Key::new(self.plan.training.seed, Stream::Train).with(index);
        let groups = self.sample_groups(RolloutId::train(step), &rows, key)?;
        let mut rollout = Rollout { groups, drawn: Drawn { next_prompt: Some(next_prompt), ..Drawn::default() } };
        self.refill(step, index, next_prompt, &mut rollout)?;
        Ok(rollout)
    }

    /// The dataset's rows behind places in the order of training, which leaves out what is held out.
    pub(super) fn dataset_rows(&self, places: Vec<u64>) -> Vec<u64> {
        match &self.trained_rows {
            Some(trained) => places.into_iter().map(|place| trained[place as usize]).collect(),
            None => places,
        }
    }

    /// Groups of these rows, scored, with the greedy completions that remax compares them with.
    pub(super) fn sample_groups(&mut self, id: RolloutId, rows: &[u64], key: Key) -> Result<Vec<RolloutGroup>, Halt> {
        let sampling = &self.plan.sampling;
        let mut groups = self.generate_and_score(id, rows, key, Sampler::new(sampling, sampling.temperature))?;
        if self.plan.rloo.estimator == Estimator::Remax {
            let greedy = self.generate_and_score(id.greedy(), rows, key, Sampler::new(sampling, 0.0))?;
            for (group, greedy) in groups.iter_mut().zip(greedy) {
                group.greedy = greedy.completions.into_iter().next();
            }
        }
        Ok(groups)
    }

    fn generate_and_score(
        &mut self,
        id: RolloutId,
        rows: &[u64],
        key: Key,
        sampler: Sampler,
    ) -> Result<Vec<RolloutGroup>, Halt> {
        let groups = self.sampled_groups(id, rows, key, sampler)?;
        self.score_sampled(id, &groups)
    }

    /// Groups of these rows, not scored.
    pub(super) fn sampled_groups(
        &mut self,
        id: RolloutId,
        rows: &[u64],
        key: Key,
        sampler: Sampler,
    ) -> Result<Vec<SampledGroup>, Halt> {
        self.phase(Phase::Rollout)?;
        let started = Instant::now();
        let groups = self.generate(id, rows, key, sampler)?;
        self.seconds.generate += started.elapsed().as_secs_f64();
        Ok(groups)
    }

    /// The same groups with what the rewards say of them.
    pub(super) fn score_sampled(&mut self, id: RolloutId, groups: &[SampledGroup]) -> Result<Vec<RolloutGroup>, Halt> {
        self.phase(Phase::Reward)?;
        let started = Instant::now();
        let rollout = self.score(id, groups)?;
        self.seconds.reward += started.elapsed().as_secs_f64();
        Ok(rollout.groups)
    }

    /// G completions for each of these rows: recorded ones where the host has them, else sampled and handed to the
    /// host. `id` must be another one for every sampling of a run, and the same in every attempt at it.
    fn generate(&mut self, id: RolloutId, rows: &[u64], key: Key, sampler: Sampler) -> Result<Vec<SampledGroup>, Halt> {
        let recorded = self.host.recorded(id)?;
        self.generate_unless(recorded, id, rows, key, sampler)
    }

    /// The same, where what the host has recorded is known.
    fn generate_unless(
        &mut self,
        recorded: Option<Vec<SampledGroup>>,
        id: RolloutId,
        rows: &[u64],
        key: Key,
        sampler: Sampler,
    ) -> Result<Vec<SampledGroup>, Halt> {
        if let Some(groups) = recorded.filter(|groups| self.fits(id, groups, rows)) {
            return Ok(groups);
        }
        let mut completions = loop {
            match self.sample(id, rows, key, sampler) {
                Err(Halt::Error(error)) => self.relieve(error)?,
                sampled => break sampled?,
            }
        };
        if !id.is_trained() {
            // Nobody asks how likely these were.
            completions.iter_mut().flatten().for_each(|completion| completion.logps = None);
        }
        let groups = rows.iter().zip(completions).map(|(&row, completions)| SampledGroup { row, completions });
        let groups: Vec<SampledGroup> = groups.collect();
        self.host.sampled(id, &groups)?;
        Ok(groups)
    }

    /// Whether recorded groups are whole groups of these rows.
    fn fits(&self, id: RolloutId, groups: &[SampledGroup], rows: &[u64]) -> bool {
        let num_generations = self.num_generations(id);
        let whole =
            |(group, &row): (&SampledGroup, &u64)| group.row == row && group.completions.len() == num_generations;
        groups.len() == rows.len() && groups.iter().zip(rows).all(whole)
    }

    /// The completions of an evaluation, piece by piece: an attempt that is interrupted has its pieces in the host's journal, and
    /// the next attempt continues after them. Only where a completion does not depend on what is sampled beside it.
    fn generate_evaluation(
        &mut self,
        id: RolloutId,
        rows: &[u64],
        key: Key,
        sampler: Sampler,
    ) -> Result<Vec<SampledGroup>, Halt> {
        // An older version recorded an evaluation as a whole, under the id that is now the first piece's.
        let mut recorded = self.host.recorded(id)?;
        if !self.samples_exactly || recorded.as_ref().is_some_and(|groups| self.fits(id, groups, rows)) {
            return self.generate_unless(recorded, id, rows, key, sampler);
        }
        let mut groups = Vec::with_capacity(rows.len());
        for (round, piece) in (0..).zip(rows.chunks(self.evaluation_piece(rows))) {
            let id = id.round(round);
            let known = if round == 0 { recorded.take() } else { self.host.recorded(id)? };
            groups.extend(self.generate_unless(known, id, piece, key, sampler)?);
        }
        Ok(groups)
    }

    /// Prompts of a piece: enough that few rows wait for a piece's last ones.
    fn evaluation_piece(&self, rows: &[u64]) -> usize {
        let prompts = self.prompts_of(SamplePhase::Eval);
        let longest = rows.iter().map(|&row| prompts[row as usize].ids.len()).max().unwrap_or(0);
        let at_once = self.generation_rows(longest + self.plan.sampling.max_completion_length as usize);
        let num_generations = self.num_generations(RolloutId::eval(0)).max(1);
        match self.policy.device_peak_bytes() {
            // A GPU samples many rows at once, and idles while the last ones end.
            Some(_) => (2 * at_once / num_generations).max(EVALUATION_PIECE),
            None => EVALUATION_PIECE,
        }
    }

    fn sample(&self, id: RolloutId, rows: &[u64], key: Key, sampler: Sampler) -> Result<Vec<Vec<Generated>>, Halt> {
        let prompts = self.prompts_of(id.phase);
        let num_generations = self.num_generations(id);
        let prompts: Vec<GeneratePrompt<'_>> =
            rows.iter().map(|&row| GeneratePrompt { row, ids: &prompts[row as usize].ids }).collect();
        let longest = prompts.iter().map(|prompt| prompt.ids.len()).max().unwrap_or(0);
        let max_completion_length = self.plan.sampling.max_completion_length as usize;
        let request = GenerateRequest {
            prompts: &prompts,
            num_generations,
            sampler,
            max_completion_length,
            stop: &self.plan.sampling.stop,
            key,
            eos_token_ids: self.text.eos_token_ids(),
            adapter: Adapter::On,
            max_rows: self.generation_rows(longest + max_completion_length),
        };
        let stop = || self.host.stop().is_some();
        match generate(&self.policy, &self.text, &request, &stop)? {
            Some(completions) => Ok(completions),
            None => Err(self.halt()),
        }
    }

    /// Completions as rewards see them, in block order.
    pub(super) fn reward_samples(&self, id: RolloutId, groups: &[SampledGroup]) -> Result<Vec<RewardSample>, Halt> {
        let mut samples = Vec::new();
        for (index, SampledGroup { row, completions }) in groups.iter().enumerate() {
            let prompt = &self.prompts_of(id.phase)[*row as usize];
            for completion in completions {
                samples.push(RewardSample {
                    sample_id: format!("s_{}", samples.len()),
                    group_id: format!("g_{index}"),
                    prompt_id: format!("row_{row}"),
                    prompt: prompt.text.clone(),
                    messages: prompt.messages.clone(),
                    completion: self.text.decode(&completion.ids, true).map_err(EngineError::from)?,
                    finish_reason: completion.finish_reason,
                    num_tokens: completion.ids.len() as u32,
                    columns: prompt.columns.clone(),
                });
            }
        }
        Ok(samples)
    }

    /// Completions and what the rewards say of them.
    fn score(&mut self, id: RolloutId, groups: &[SampledGroup]) -> Result<Rollout, Halt> {
        let samples = self.reward_samples(id, groups)?;
        let scores = self.host.score(&ScoreRequest { id, samples: &samples })?;
        if scores.len() != samples.len() {
            let message = format!("the host gave {} scores for {} samples", scores.len(), samples.len());
            return Err(Halt::Error(EngineError::Input(message)));
        }
        let mut scores = scores.into_iter();
        let groups = groups.iter().map(|SampledGroup { row, completions }| RolloutGroup {
            row: *row,
            prompt_ids: self.prompts_of(id.phase)[*row as usize].ids.clone(),
            completions: completions
                .iter()
                .cloned()
                .zip(scores.by_ref())
                .map(|(Generated { ids, finish_reason, logps }, score)| RolloutCompletion {
                    ids,
                    finish_reason,
                    score,
                    logps,
                })
                .collect(),
            greedy: None,
        });
        Ok(Rollout { groups: groups.collect(), drawn: Drawn::default() })
    }

    /// Sample and score the evaluation prompts with the policy as it is.
    pub(super) fn evaluate(&mut self) -> Result<(), Halt> {
        let Some(eval) = &self.plan.eval else { return Ok(()) };
        let step = self.state.step;
        self.poll()?;
        self.phase(Phase::Eval)?;
        let started = Instant::now();
        let rows = self.evaluated_rows.clone();
        let key = Key::new(self.plan.training.seed, Stream::Eval).with(step);
        let sampler = Sampler::for_evaluation(&self.plan.sampling, eval);
        let id = RolloutId::eval(step);
        let groups = self.generate_evaluation(id, &rows, key, sampler)?;
        let rollout = self.score(id, &groups)?;
        let (scores, reference) = self.score_evaluated(&rollout.rows().collect::<Vec<_>>())?;
        let evaluation = report::Evaluation { rollout: &rollout, scores: &scores, reference: &reference };
        let (mut metrics, samples) =
            report::evaluation(step, evaluation, self.plan, self.prompts_of(SamplePhase::Eval), &self.text)?;
        if let Some(trained) = self.state.doctor.recent_reward().filter(|_| eval.rewards.is_none())
            && let Some(Some(reward)) = metrics.get("eval_reward")
        {
            metrics.insert("eval_gap".into(), Some(trained - reward));
        }
        self.state.eval_metrics = metrics.clone();
        self.state.evaluated_step = Some(step);
        self.judge_evaluation(&metrics);
        metrics.insert("eval_step_time".into(), Some(started.elapsed().as_secs_f64()));
        self.host.event(Event::Step { step, kind: SamplePhase::Eval, metrics: metrics.clone() })?;
        self.host.event(Event::Samples { samples })?;
        self.consult_doctor(step, &metrics)
    }

    fn prompts_of(&self, phase: SamplePhase) -> &[TokenizedPrompt] {
        match phase {
            SamplePhase::Train => &self.prompts,
            // Held-out rows are rows of the training dataset.
            SamplePhase::Eval if self.trained_rows.is_some() => &self.prompts,
            SamplePhase::Eval => &self.eval_prompts,
        }
    }

    fn num_generations(&self, id: RolloutId) -> usize {
        let train = self.plan.rloo.num_generations;
        match id.phase {
            _ if id.part == RolloutPart::Greedy => 1,
            SamplePhase::Train => train as usize,
            SamplePhase::Eval => self.plan.eval.as_ref().map_or(train, |eval| eval.num_generations) as usize,
        }
    }
}
