//! Overlap: the next block is sampled while the rewards of the current one are computed.

use rlood_engine::backend::BackendKind;
use rlood_engine::host::{Host, RunEnd, SavedCheckpoint, Score, ScoreRequest, StepTrace, StopReason};
use rlood_types::event::Event;
use rlood_types::rollout::RolloutId;
use rlood_types::spec::{Estimator, Plan};

use crate::train::{Start, TestHost, plan, rows, train};

/// A plan with four blocks of two steps.
fn overlapped() -> Plan {
    let mut plan = plan();
    plan.rloo.steps_per_generation = 2;
    plan.rloo.overlap = true;
    plan.training.max_steps = 8;
    plan
}

fn run(plan: &Plan, backend: Option<BackendKind>) -> TestHost {
    let mut host = TestHost::default();
    let start = Start { backend, ..Start::default() };
    assert_eq!(train(plan, rows(), start, &mut host).expect("trains"), None);
    host
}

#[test]
fn an_overlapped_block_is_sampled_by_the_policy_before_the_last_block() {
    for backend in [BackendKind::Cpu, BackendKind::Reference] {
        // A reward so different that the policy then samples other tokens.
        let mut far = overlapped();
        far.optimizer.learning_rate = 0.3;
        let moving = run(&far, Some(backend));
        let mut still = overlapped();
        still.optimizer.learning_rate = 0.0;
        let still = run(&still, Some(backend));
        let mut plain = far;
        plain.rloo.overlap = false;
        let plain = run(&plain, Some(backend));
        let completions = |host: &TestHost, step: u64| -> Vec<String> {
            let of = |id: RolloutId| id == RolloutId::train(step);
            let (_, samples) = host.requests.iter().find(|(id, _)| of(*id)).unwrap();
            samples.iter().map(|sample| format!("{} {}", sample.prompt_id, sample.completion)).collect()
        };
        // The first two blocks are sampled with the initial weights; the third with those after the first block.
        for step in [1, 3] {
            assert_eq!(completions(&moving, step), completions(&still, step), "{backend:?}, step {step}");
        }
        assert_eq!(completions(&moving, 1), completions(&plain, 1));
        assert_ne!(completions(&moving, 5), completions(&still, 5), "{backend:?}");
        assert_ne!(completions(&moving, 3), completions(&plain, 3), "{backend:?}: without overlap it is on-policy");

        let trace = |host: &TestHost, step: u64| host.traces.iter().position(|trace| trace.step == step).unwrap();
        let (of_moving, of_still) = (&moving.traces[trace(&moving, 3)], &still.traces[trace(&still, 3)]);
        // Old log-probs are those of the policy that sampled; the ratio measures how far it has moved since.
        assert_eq!(of_moving.old_logps, of_still.old_logps, "{backend:?}");
        assert_ne!(of_moving.old_logps, of_moving.new_logps);
        assert_eq!(of_still.old_logps, of_still.new_logps, "the same weights give the same bits");
        let first = &moving.traces[trace(&moving, 1)];
        assert_eq!(first.old_logps, first.new_logps, "the first block is on-policy");
    }
}

/// Records in order when scoring begins and when the run waits for scores.
#[derive(Default)]
struct Order {
    host: TestHost,
    calls: Vec<String>,
}

impl Host for Order {
    fn score(&mut self, request: &ScoreRequest<'_>) -> Result<Vec<Score>, RunEnd> {
        self.calls.push(format!("wait {}{:?}", request.id.step, request.id.part));
        self.host.score(request)
    }

    fn begin_score(&mut self, request: &ScoreRequest<'_>) -> Result<(), RunEnd> {
        self.calls.push(format!("begin {}{:?}", request.id.step, request.id.part));
        Ok(())
    }

    fn event(&mut self, event: Event) -> Result<(), RunEnd> {
        if let Event::Step { step, .. } = &event {
            self.calls.push(format!("step {step}"));
        }
        self.host.event(event)
    }

    fn saved(&mut self, checkpoint: &SavedCheckpoint<'_>) -> Result<(), RunEnd> {
        self.host.saved(checkpoint)
    }

    fn stop(&self) -> Option<StopReason> {
        self.host.stop()
    }

    fn observe(&mut self, trace: &StepTrace<'_>) {
        self.host.observe(trace);
    }
}

#[test]
fn scoring_of_the_next_block_starts_before_waiting_for_the_current_one() {
    let mut plan = overlapped();
    plan.training.max_steps = 6;
    let mut order = Order::default();
    train(&plan, rows(), Start::default(), &mut order).expect("trains");
    let expected = "begin 1Sampled|begin 3Sampled|wait 1Sampled|step 1|step 2|begin 5Sampled|wait 3Sampled|step 3|step 4|wait 5Sampled|step 5|step 6";
    assert_eq!(order.calls.join("|"), expected);

    plan.rloo.estimator = Estimator::Remax;
    plan.training.max_steps = 3;
    let mut order = Order::default();
    train(&plan, rows(), Start::default(), &mut order).expect("trains");
    let expected = "begin 1Sampled|begin 1Greedy|begin 3Sampled|begin 3Greedy|wait 1Sampled|wait 1Greedy|step 1|step 2|wait 3Sampled|wait 3Greedy|step 3";
    assert_eq!(order.calls.join("|"), expected);
}
