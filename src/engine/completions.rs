//! Completions of the policy as it is, sampled and scored: for a generation block, and for an evaluation.

use std::time::Instant;

use super::error::EngineError;
use super::generate::{GeneratePrompt, GenerateRequest, Generated, generate};
use super::host::{Rollout, RolloutCompletion, RolloutGroup, ScoreRequest};
use super::model::Adapter;
use super::prompts::TokenizedPrompt;
use super::random::{Key, Stream};
use super::sampling::Sampler;
use super::{Halt, Run, memory, report};
use crate::event::{Event, Phase, SamplePhase};
use crate::sample::RewardSample;

impl Run<'_> {
    /// Sample the block's completions and have them scored.
    pub(super) fn roll_out(&mut self, step: u64, index: u64) -> Result<Rollout, Halt> {
        let mut rows = self.batching.block_rows(index);
        if let Some(trained) = &self.trained_rows {
            rows.iter_mut().for_each(|row| *row = trained[*row as usize]);
        }
        let key = Key::new(self.plan.training.seed, Stream::Train).with(index);
        let sampler = Sampler::new(&self.plan.sampling, self.plan.sampling.temperature);
        self.phase(Phase::Rollout)?;
        let started = Instant::now();
        let completions = self.generate(SamplePhase::Train, &rows, key, sampler)?;
        self.seconds.generate += started.elapsed().as_secs_f64();
        self.phase(Phase::Reward)?;
        let started = Instant::now();
        let rollout = self.score(SamplePhase::Train, step, &rows, completions)?;
        self.seconds.reward += started.elapsed().as_secs_f64();
        Ok(rollout)
    }

    /// G completions for each of these rows, `[P][G]`.
    fn generate(
        &mut self,
        phase: SamplePhase,
        rows: &[u64],
        key: Key,
        sampler: Sampler,
    ) -> Result<Vec<Vec<Generated>>, Halt> {
        let prompts = self.prompts_of(phase);
        let num_generations = self.num_generations(phase);
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
            max_rows: memory::generation_rows(self.policy.card(), longest + max_completion_length),
        };
        let stop = || self.host.stop().is_some();
        match generate(&self.policy, &self.text, &request, &stop)? {
            Some(completions) => Ok(completions),
            None => Err(self.halt()),
        }
    }

    /// Completions and what the rewards say of them.
    fn score(
        &mut self,
        phase: SamplePhase,
        step: u64,
        rows: &[u64],
        completions: Vec<Vec<Generated>>,
    ) -> Result<Rollout, Halt> {
        let mut samples = Vec::new();
        for (group, (&row, completions)) in rows.iter().zip(&completions).enumerate() {
            let prompt = &self.prompts_of(phase)[row as usize];
            for completion in completions {
                samples.push(RewardSample {
                    sample_id: format!("s_{}", samples.len()),
                    group_id: format!("g_{group}"),
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
        let scores = self.host.score(&ScoreRequest { step, phase, samples: &samples })?;
        if scores.len() != samples.len() {
            let message = format!("the host gave {} scores for {} samples", scores.len(), samples.len());
            return Err(Halt::Error(EngineError::Input(message)));
        }
        let mut scores = scores.into_iter();
        let groups = rows.iter().zip(completions).map(|(&row, completions)| RolloutGroup {
            row,
            prompt_ids: self.prompts_of(phase)[row as usize].ids.clone(),
            completions: completions
                .into_iter()
                .zip(scores.by_ref())
                .map(|(Generated { ids, finish_reason }, score)| RolloutCompletion { ids, finish_reason, score })
                .collect(),
        });
        Ok(Rollout { groups: groups.collect() })
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
        let completions = self.generate(SamplePhase::Eval, &rows, key, sampler)?;
        let rollout = self.score(SamplePhase::Eval, step, &rows, completions)?;
        let (mut metrics, samples) =
            report::evaluation(step, &rollout, self.plan, self.prompts_of(SamplePhase::Eval), &self.text)?;
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

    fn num_generations(&self, phase: SamplePhase) -> usize {
        let train = self.plan.rloo.num_generations;
        match phase {
            SamplePhase::Train => train as usize,
            SamplePhase::Eval => self.plan.eval.as_ref().map_or(train, |eval| eval.num_generations) as usize,
        }
    }
}
