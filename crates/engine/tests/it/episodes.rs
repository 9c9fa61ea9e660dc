//! Episodes of several turns: exactness over all turns, interruptions at every question, and what an environment can get wrong.
//!
//! Longer than 500 lines: all tests play with the same host and its journal.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use rlood_engine::host::{Host, PromptRow, RolloutId, RunEnd, SavedCheckpoint, Score, ScoreRequest, StopReason};
use rlood_types::environment::{Ask, EpisodeCall, EpisodeId, EpisodeStop, Reply, ResetAnswer, StepAnswer};
use rlood_types::event::{Event, SamplePhase};
use rlood_types::rollout::{RewardSample, RewardValue, SampledGroup, Segment};
use rlood_types::spec::{
    EnvironmentKind, EnvironmentPlan, EpisodeReturn, Estimator, EvalPlan, Loss, OnInvalid, OnParseError, Plan,
    RewardKind, ServicePlan,
};
use serde_json::{Value, json};

use crate::train::{Start, TestHost, plan, train_model};

/// Writes the roles as Qwen's templates do, and tools before all messages.
const TEMPLATE: &str = "{%- if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}{% endfor %}<tool_call><|im_end|>\n{% endif %}\
{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}\
{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

fn model() -> (tempfile::TempDir, PathBuf) {
    model_of("qwen3")
}

/// A copy of this case's tiny model that ends turns often: a third of its tokens are end-of-sequence tokens.
fn model_of(case: &str) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir(rlood_test_support::fixture("parity").join(case)).unwrap() {
        let file = file.unwrap();
        if file.path().is_file() {
            std::fs::copy(file.path(), dir.path().join(file.file_name())).unwrap();
        }
    }
    let ends: Vec<u32> = std::iter::once(2).chain(100..200).collect();
    let config = json!({"eos_token_id": ends, "pad_token_id": 3}).to_string();
    std::fs::write(dir.path().join("generation_config.json"), config).unwrap();
    std::fs::write(dir.path().join("chat_template.jinja"), TEMPLATE).unwrap();
    let path = dir.path().to_owned();
    (dir, path)
}

fn environment() -> EnvironmentPlan {
    EnvironmentPlan {
        name: "echo".to_owned(),
        kind: EnvironmentKind::Http,
        params: Default::default(),
        max_turns: 3,
        max_episode_tokens: 120,
        max_observation_tokens: 16,
        total: EpisodeReturn::Sum,
        tool_parser: "auto".to_owned(),
        on_parse_error: OnParseError::Reply,
        max_parse_errors: 2,
        max_restarts: 1,
        max_open_episodes: None,
        tools: Vec::new(),
        service: ServicePlan {
            url: "http://environment".to_owned(),
            max_concurrency: 1,
            max_batch_samples: 1,
            max_batch_bytes: 1,
            timeout_ms: 1,
            deadline_ms: 1,
            max_tries: 1,
            max_invalid_tries: 1,
            on_invalid: OnInvalid::Mask,
            max_outage_s: 1,
            cache: false,
            min_valid_per_group: 1,
            max_invalid_fraction: 1.0,
        },
    }
}

fn plan_of(environment: EnvironmentPlan) -> Plan {
    let mut plan = plan();
    plan.environment = Some(environment);
    plan.rewards[0].kind = RewardKind::Environment;
    plan.sampling.max_completion_length = 8;
    plan
}

fn rows() -> Vec<PromptRow> {
    let prompt = |n: u32| json!([{"role": "user", "content": format!("count to {n}")}]);
    (0..8).map(|n| PromptRow { prompt: prompt(n), columns: Default::default() }).collect()
}

/// The question about an episode that an answer belongs to.
type Question = (RolloutId, EpisodeId, Option<u32>);
type Answers = BTreeMap<Question, Reply>;

/// The answers of a test's environment.
type Rules = fn(&EpisodeId, &Ask) -> Reply;

/// A host with an environment of simple rules, and a journal that outlives it.
struct Playing {
    host: TestHost,
    rules: Rules,
    journal: Rc<RefCell<Answers>>,
    sampled: Rc<RefCell<BTreeMap<RolloutId, Vec<SampledGroup>>>>,
    /// Number of questions that reached the environment.
    asked: usize,
    /// Ends the run before the answer to this question is recorded, or after it.
    dies_at: Option<(usize, bool)>,
    closed: usize,
    /// Number of episodes that are open, and the largest number so far.
    open: (usize, usize),
}

impl Playing {
    fn new(rules: Rules) -> Self {
        Self {
            host: TestHost::default(),
            rules,
            journal: Rc::default(),
            sampled: Rc::default(),
            asked: 0,
            dies_at: None,
            closed: 0,
            open: (0, 0),
        }
    }

    /// A host of the next attempt, with the same journal.
    fn again(&self) -> Self {
        Self { journal: self.journal.clone(), sampled: self.sampled.clone(), ..Self::new(self.rules) }
    }

    fn run(&mut self, model: &Path, plan: &Plan) -> Option<StopReason> {
        let start = Start { eval_rows: rows()[..2].to_vec(), ..Start::default() };
        train_model(model, plan, rows(), start, self).unwrap()
    }

    fn adapter(&self) -> Vec<u8> {
        self.host.saved.last().expect("a checkpoint").adapter()
    }

    /// All episodes of training, in order.
    fn groups(&self) -> Vec<SampledGroup> {
        let sampled = self.sampled.borrow();
        let trained = sampled.iter().filter(|(id, _)| id.is_trained());
        trained.flat_map(|(_, groups)| groups.clone()).collect()
    }
}

impl Host for Playing {
    fn score(&mut self, request: &ScoreRequest<'_>) -> Result<Vec<Score>, RunEnd> {
        self.host.requests.push((request.id, request.samples.to_vec()));
        let value = |sample: &RewardSample| match sample.episode.as_ref().unwrap().total {
            Some(total) => RewardValue::Number(total),
            None => RewardValue::Missing,
        };
        Ok(request.samples.iter().map(|sample| Score { values: vec![value(sample)] }).collect())
    }

    fn event(&mut self, event: Event) -> Result<(), RunEnd> {
        self.host.event(event)
    }

    fn saved(&mut self, checkpoint: &SavedCheckpoint<'_>) -> Result<(), RunEnd> {
        self.host.saved(checkpoint)
    }

    fn stop(&self) -> Option<StopReason> {
        None
    }

    fn observe(&mut self, trace: &rlood_engine::host::StepTrace<'_>) {
        self.host.observe(trace);
    }

    fn recorded(&mut self, id: RolloutId) -> Result<Option<Vec<SampledGroup>>, RunEnd> {
        Ok(self.sampled.borrow().get(&id).cloned())
    }

    fn sampled(&mut self, id: RolloutId, groups: &[SampledGroup]) -> Result<(), RunEnd> {
        let text = serde_json::to_string(groups).unwrap();
        let back: Vec<SampledGroup> = serde_json::from_str(&text).unwrap();
        // Times differ between runs, so the journal has none.
        let mut expected = groups.to_vec();
        let episodes =
            expected.iter_mut().flat_map(|group| &mut group.completions).filter_map(|one| one.episode.as_mut());
        episodes.flat_map(|episode| &mut episode.turns).for_each(|turn| turn.latency_ms = None);
        assert_eq!(back, expected, "episodes survive the journal");
        self.sampled.borrow_mut().insert(id, back);
        Ok(())
    }

    fn environment(&mut self, id: RolloutId, calls: &[EpisodeCall]) -> Result<Vec<Reply>, RunEnd> {
        let mut replies = Vec::new();
        for EpisodeCall { episode, ask } in calls {
            let turn = match ask {
                Ask::Reset(_) => {
                    self.open.0 += 1;
                    self.open.1 = self.open.1.max(self.open.0);
                    None
                }
                Ask::Step(step) => Some(step.turn),
                Ask::Close(_) => {
                    self.closed += 1;
                    self.open.0 -= 1;
                    replies.push(Reply::Closed);
                    continue;
                }
            };
            let question = (id, episode.clone(), turn);
            if let Some(known) = self.journal.borrow().get(&question) {
                replies.push(known.clone());
                continue;
            }
            let dies = self.dies_at.filter(|(at, _)| *at == self.asked);
            self.asked += 1;
            let reply = (self.rules)(episode, ask);
            if dies.is_none_or(|(_, is_recorded)| is_recorded) {
                self.journal.borrow_mut().insert(question, reply.clone());
            }
            if dies.is_some() {
                return Err(RunEnd::Stopped(StopReason::LeaseLost));
            }
            replies.push(reply);
        }
        Ok(replies)
    }
}

fn user(text: impl Into<String>) -> Value {
    json!({"role": "user", "content": text.into()})
}

/// Says what turn it is, pays by the letters of the answer, and ends some episodes after the second turn.
fn echo(episode: &EpisodeId, ask: &Ask) -> Reply {
    match ask {
        Ask::Reset(reset) => {
            assert!(reset.limits.max_turns == 3 && reset.messages.len() == 1);
            Reply::Reset(ResetAnswer { session: Some("s".to_owned()), ..ResetAnswer::default() })
        }
        Ask::Step(step) => {
            assert_eq!(step.session.as_deref(), Some("s"));
            let bytes: u32 = step.text.bytes().map(u32::from).sum();
            Reply::Step(StepAnswer {
                messages: vec![user(format!("turn {} is over", step.turn))],
                reward: Some(f64::from(bytes % 7) / 7.0),
                done: step.turn == 1 && episode.index == 1,
                metrics: BTreeMap::from([("turn".to_owned(), f64::from(step.turn))]),
                latency_ms: Some(20),
                ..StepAnswer::default()
            })
        }
        Ask::Close(_) => Reply::Closed,
    }
}

#[test]
fn the_first_log_ratio_is_0_over_all_turns_and_only_the_models_tokens_count() {
    let mut adapters = Vec::new();
    for (case, loss, uses, estimator) in [
        ("qwen3", Loss::Sequence, 1, Estimator::Rloo),
        ("qwen3", Loss::TokenMean, 1, Estimator::Rloo),
        ("qwen3", Loss::Sequence, 2, Estimator::Rloo),
        ("qwen3", Loss::TokenMean, 1, Estimator::RlooTurns),
        ("qwen3", Loss::TokenMean, 2, Estimator::RlooTurns),
        // Its layers keep a state in place of keys and values.
        ("qwen3_5", Loss::Sequence, 2, Estimator::Rloo),
    ] {
        let (_dir, model) = model_of(case);
        let mut plan = plan_of(environment());
        (plan.rloo.loss, plan.rloo.estimator) = (loss, estimator);
        plan.rloo.num_iterations = uses;
        plan.training.max_steps *= u64::from(uses);
        plan.eval = Some(EvalPlan { temperature: 1.0, ..EvalPlan::of_dataset(plan.dataset.clone(), 2) });
        let mut host = Playing::new(echo);
        assert_eq!(host.run(&model, &plan), None);
        assert!(!adapters.contains(&host.adapter()), "{estimator:?} with {loss:?} trains something else");
        adapters.push(host.adapter());
        let metrics = host.host.metrics(SamplePhase::Train);
        for (step, metrics) in metrics.iter().filter(|(step, _)| (step - 1) % u64::from(uses) == 0) {
            assert_eq!(metrics["sampling/log_ratio_max"], Some(0.0), "step {step}");
            assert!(metrics["environment/turns/max"] >= Some(2.0), "{metrics:?}");
            assert!(metrics["environment/masked_fraction"] > Some(0.1));
            assert_eq!(metrics["rewards/score/mean"], metrics["environment/return_mean"]);
            assert!(metrics["environment/metrics/turn"] > Some(0.1), "{metrics:?}");
            assert_eq!((metrics["environment/latency_p95"], metrics["tools/offered"]), (Some(0.02), Some(0.0)));
        }
        let samples = host.host.events.iter().filter_map(|event| match event {
            Event::Samples { samples } => Some(samples),
            _ => None,
        });
        for sample in samples.flatten() {
            let episode = sample.episode.as_ref().unwrap();
            let tokens: u32 = episode.turns.iter().map(|turn| turn.turn.num_tokens).sum();
            assert_eq!((tokens, episode.turns[0].latency_ms), (sample.num_tokens, Some(20)));
            assert!(episode.turns.len() < 2 || episode.turns[0].turn.observations[0]["role"] == "user");
        }
        let groups = host.groups();
        let mut episodes = groups.iter().flat_map(|group| &group.completions).map(|one| one.episode.as_ref().unwrap());
        assert!(episodes.any(|episode| episode.turns.len() == 3), "some episodes have three turns");
        // Every vector of the step has an entry for each token of the model, and none for the environment's.
        let trace = host.host.traces.iter().find(|trace| trace.step == 1).unwrap();
        let lengths: Vec<usize> = trace.new_logps.iter().map(Vec::len).collect();
        let mut expected: Vec<usize> = Vec::new();
        for row in trace.rows.chunks(2) {
            let group = groups.iter().find(|group| group.row == row[0]).unwrap();
            expected.extend(group.completions.iter().map(|one| one.segments.num_model_tokens()));
        }
        assert_eq!(lengths, expected);
        assert!(
            host.closed > 0
                && host
                    .host
                    .metrics(SamplePhase::Eval)
                    .iter()
                    .all(|(_, metrics)| metrics["eval_environment/turns/mean"] >= Some(1.0))
        );
    }
}

#[test]
fn no_more_episodes_are_open_than_the_server_allows() {
    let (_dir, model) = model();
    let mut sampled = Vec::new();
    for (most, expected) in [(None, 4), (Some(4), 4), (Some(3), 2), (Some(1), 1)] {
        let plan = plan_of(EnvironmentPlan { max_open_episodes: most, ..environment() });
        let mut host = Playing::new(echo);
        assert_eq!(host.run(&model, &plan), None);
        assert_eq!(host.open, (0, expected), "at most {most:?}");
        for (step, metrics) in host.host.metrics(SamplePhase::Train) {
            assert_eq!(metrics["sampling/log_ratio_max"], Some(0.0), "step {step}, at most {most:?}");
        }
        let texts = |group: &SampledGroup| -> Vec<String> {
            let episodes = group.completions.iter().map(|one| one.episode.as_ref().unwrap());
            episodes.flat_map(|episode| &episode.turns).map(|turn| turn.text.clone()).collect()
        };
        sampled.push(host.groups().iter().take(2).map(texts).collect::<Vec<_>>());
    }
    for texts in &sampled {
        assert_eq!(*texts, sampled[0], "the first step samples the same, whatever is open");
    }
}

#[test]
fn an_interruption_at_any_question_ends_with_the_same_bytes_and_no_turn_is_taken_twice() {
    for (case, step) in [("qwen3", 7), ("qwen3_5", 15)] {
        let (_dir, model) = model_of(case);
        interrupt(&model, step);
    }
}

/// Interrupts a run at every question whose number is a multiple of this.
fn interrupt(model: &Path, step: usize) {
    let plan = plan_of(environment());
    let mut calm = Playing::new(echo);
    calm.run(model, &plan);
    let questions = calm.asked;
    assert!(questions > 20);
    for is_recorded in [false, true] {
        for at in (0..questions).step_by(step) {
            let mut first = Playing::new(echo);
            first.dies_at = Some((at, is_recorded));
            assert_eq!(first.run(model, &plan), Some(StopReason::LeaseLost));
            let mut second = first.again();
            assert_eq!(second.run(model, &plan), None);
            assert_eq!(second.adapter(), calm.adapter(), "interrupted at question {at}");
            // The one whose answer was not recorded is asked again, which the contract makes harmless.
            let twice = usize::from(!is_recorded);
            assert_eq!(first.asked + second.asked, questions + twice);
        }
    }
}

#[test]
fn a_forgotten_episode_begins_again_and_one_that_stays_lost_has_no_reward() {
    let (_dir, model) = model();
    let plan = plan_of(environment());
    let mut host = Playing::new(|episode, ask| match ask {
        // The first episode of a group is lost once, the second always.
        Ask::Step(step) if step.turn == 1 && (episode.index == 1 || episode.attempt == 0) => Reply::Lost,
        Ask::Step(step) => Reply::Step(StepAnswer {
            messages: vec![user("go on")],
            reward: Some(1.0),
            done: step.turn == 1,
            ..StepAnswer::default()
        }),
        Ask::Reset(_) | Ask::Close(_) => Reply::Reset(ResetAnswer::default()),
    });
    assert_eq!(host.run(&model, &plan), None);
    let mut seen = [0, 0];
    for group in host.groups() {
        for (index, one) in group.completions.iter().enumerate() {
            let episode = one.episode.as_ref().unwrap();
            let reached = episode.turns.len() > 1 || episode.restarts > 0;
            match index {
                0 if reached && episode.stop == EpisodeStop::EnvDone => {
                    assert_eq!((episode.restarts, episode.total), (1, Some(2.0)));
                    seen[0] += 1;
                }
                1 if reached && episode.stop == EpisodeStop::Failed => {
                    assert_eq!((episode.restarts, episode.total), (1, None));
                    seen[1] += 1;
                }
                _ => {}
            }
        }
    }
    assert!(seen[0] > 0 && seen[1] > 0, "{seen:?}");
    let metrics = host.host.metrics(SamplePhase::Train);
    assert!(metrics.iter().any(|(_, metrics)| metrics["environment/restarts"] >= Some(1.0)));
    assert!(metrics.iter().any(|(_, metrics)| metrics["environment/missing_fraction"] > Some(0.0)));
}

#[test]
fn answers_that_are_not_valid_leave_the_episode_without_a_reward_and_say_why() {
    let (_dir, model) = model();
    let cases: [(Rules, &str); 7] = [
        (
            |_, _| Reply::Reset(ResetAnswer { messages: vec![user("long ".repeat(5000))], ..Default::default() }),
            "tokens with the environment's messages and tools, the model reads",
        ),
        (
            |_, _| {
                Reply::Reset(ResetAnswer {
                    messages: vec![json!({"role": "tool", "content": "x"})],
                    ..Default::default()
                })
            },
            "role system or user",
        ),
        (|_, _| Reply::Reset(ResetAnswer { tools: vec![json!({"name": "f"})], ..Default::default() }), "tools"),
        (
            |_, ask| match ask {
                Ask::Step(_) => Reply::Step(StepAnswer {
                    messages: vec![json!({"role": "tool", "tool_call_id": "c", "content": "x"})],
                    ..Default::default()
                }),
                _ => Reply::Reset(ResetAnswer::default()),
            },
            "each tool call must be answered",
        ),
        (
            |_, ask| match ask {
                Ask::Step(_) => Reply::Step(StepAnswer {
                    messages: vec![json!({"role": "assistant", "content": "x"})],
                    ..Default::default()
                }),
                _ => Reply::Reset(ResetAnswer::default()),
            },
            "role must be tool or user",
        ),
        (
            |_, ask| match ask {
                Ask::Step(_) => Reply::Step(StepAnswer {
                    metrics: BTreeMap::from([("a name".to_owned(), 1.0)]),
                    ..Default::default()
                }),
                _ => Reply::Reset(ResetAnswer::default()),
            },
            "metrics/a name must be a finite number",
        ),
        (
            |_, ask| match ask {
                Ask::Step(_) => Reply::Step(StepAnswer { reward: Some(f64::NAN), ..Default::default() }),
                _ => Reply::Reset(ResetAnswer::default()),
            },
            "a reward must be a finite number",
        ),
    ];
    for (rules, why) in cases {
        let mut host = Playing::new(rules);
        assert_eq!(host.run(&model, &plan_of(environment())), None);
        let warned = host.host.events.iter().any(|event| {
            matches!(event, Event::Warning { code, message, .. } if code == "environment_answer" && message.contains(why))
        });
        assert!(warned, "{why}");
        let totals: Vec<Option<f64>> = host
            .groups()
            .iter()
            .flat_map(|group| group.completions.clone())
            .map(|one| one.episode.unwrap().total)
            .collect();
        assert!(totals.iter().any(Option::is_none), "{totals:?}");
    }
}

#[test]
fn an_episode_with_a_long_opening_ends_where_the_model_can_read_no_more() {
    let (_dir, model) = model();
    let mut host = Playing::new(|_, ask| match ask {
        Ask::Reset(_) => Reply::Reset(ResetAnswer { messages: vec![user("0".repeat(180))], ..ResetAnswer::default() }),
        Ask::Step(step) => {
            assert!(step.tokens_left < 60, "{}", step.tokens_left);
            Reply::Step(StepAnswer { messages: vec![user("a")], reward: Some(1.0), ..StepAnswer::default() })
        }
        Ask::Close(_) => Reply::Closed,
    });
    assert_eq!(host.run(&model, &plan_of(EnvironmentPlan { max_turns: 50, ..environment() })), None);
    let mut stops = Vec::new();
    for group in host.groups() {
        for one in &group.completions {
            let prompt = group.prompt_ids.as_ref().map_or(0, Vec::len);
            assert!(prompt > 180 && prompt + one.segments.num_tokens() <= 256, "{prompt}");
            stops.push(one.episode.as_ref().unwrap().stop);
        }
    }
    assert!(stops.contains(&EpisodeStop::MaxTokens), "{stops:?}");
}

#[test]
fn limits_end_episodes_and_the_environment_is_told_before_that_the_turn_is_the_last() {
    let (_dir, model) = model();
    for (change, stop) in [
        ((|plan| plan.max_turns = 2) as fn(&mut EnvironmentPlan), EpisodeStop::MaxTurns),
        (|plan| plan.max_episode_tokens = 30, EpisodeStop::MaxTokens),
    ] {
        let mut environment = environment();
        change(&mut environment);
        let most = environment.max_episode_tokens as usize;
        let mut host = Playing::new(|_, ask| match ask {
            Ask::Step(step) => Reply::Step(StepAnswer {
                messages: vec![user("a")],
                reward: step.is_final.then_some(1.0),
                ..StepAnswer::default()
            }),
            _ => Reply::Reset(ResetAnswer::default()),
        });
        assert_eq!(host.run(&model, &plan_of(environment)), None);
        let mut ends = 0;
        for one in host.groups().iter().flat_map(|group| &group.completions) {
            let episode = one.episode.as_ref().unwrap();
            assert!(one.segments.num_tokens() <= most, "{} tokens", one.segments.num_tokens());
            ends += usize::from(episode.stop == stop);
            assert!(
                matches!(one.segments.0.last(), Some(Segment::Model { .. })),
                "an episode ends with a turn of the model"
            );
            if episode.stop == stop && episode.turns.len() > 1 {
                assert_eq!(episode.total, Some(1.0), "the last turn was announced");
            }
        }
        assert!(ends > 0, "{stop:?}");
    }
}

#[test]
fn episodes_of_a_group_that_begin_differently_share_what_is_equal() {
    let (_dir, model) = model();
    let mut host = Playing::new(|episode, ask| match ask {
        Ask::Reset(_) => Reply::Reset(ResetAnswer {
            messages: vec![user(format!("you are number {}", episode.index))],
            ..ResetAnswer::default()
        }),
        _ => Reply::Step(StepAnswer { reward: Some(0.5), done: true, ..StepAnswer::default() }),
    });
    assert_eq!(host.run(&model, &plan_of(environment())), None);
    for group in host.groups() {
        let prompt = group.prompt_ids.unwrap();
        assert!(prompt.len() > 10, "they share the row's message");
        for one in group.completions {
            assert!(matches!(one.segments.0[0], Segment::Context { .. }), "what differs is context");
        }
    }
    let metrics = host.host.metrics(SamplePhase::Train);
    assert!(metrics.iter().all(|(_, metrics)| metrics["sampling/log_ratio_max"] == Some(0.0)));
    let warned = host.host.events.iter().find_map(|event| match event {
        Event::Warning { code, data, .. } if code == "environment_reset_differs" => Some(data.clone()),
        _ => None,
    });
    let openings = warned.expect("a warning")["openings"].clone();
    assert_eq!(
        (&openings[0]["messages"][0]["content"], &openings[1]["index"]),
        (&json!("you are number 0"), &json!(1))
    );
}
