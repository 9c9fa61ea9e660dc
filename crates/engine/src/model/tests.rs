//! Trajectories with context segments: the model reads context tokens, but neither scores nor trains them.

use super::*;
use crate::spec::LoraPlan;
use crate::trajectory::{Segment, Segments};

const PROMPT: [u32; 3] = [5, 6, 7];

/// The segments are: model 8 9, context 10 11, model 12, context 13.
fn segments() -> Segments {
    let model = |ids: &[u32]| Segment::Model { ids: ids.to_vec(), logps: None };
    let context = |ids: &[u32]| Segment::Context { ids: ids.to_vec() };
    Segments(vec![model(&[8, 9]), context(&[10, 11]), model(&[12]), context(&[13])])
}

fn policy(kind: BackendKind) -> Policy {
    let mut policy = Policy::load(&rlood_test_support::fixture("golden/qwen2_onpolicy"), kind).unwrap();
    let target_modules = ["q_proj", "down_proj"].map(String::from).to_vec();
    let config = LoraPlan { target_modules, ..LoraPlan::all_linear(4, 8.0) };
    policy.add_lora(&config, 1).unwrap();
    policy
}

fn close(ours: &[f32], theirs: &[f32]) -> bool {
    ours.len() == theirs.len() && ours.iter().zip(theirs).all(|(a, b)| (a - b).abs() <= 1e-5)
}

#[test]
fn context_tokens_are_read_and_neither_scored_nor_trained() {
    let segments = segments();
    for kind in [BackendKind::Cpu, BackendKind::Reference] {
        let policy = policy(kind);
        // A row with the same prompt comes first, so that the packing shares the prompt.
        let first = Trajectory::of_completion(&PROMPT, &[14]);
        let rows = [first.clone(), Trajectory::new(&PROMPT, &segments)];
        let whole = [first, Trajectory::of_completion(&PROMPT, &[8, 9, 10, 11, 12])];
        let scores = policy.score(&rows, 0.7, Adapter::On).unwrap();
        let all = &policy.score(&whole, 0.7, Adapter::On).unwrap()[1];
        let trained = |values: &[f32]| vec![values[0], values[1], values[4]];
        assert!(close(&scores[1].logps, &trained(&all.logps)), "{kind:?}: {:?} and {:?}", scores[1].logps, all.logps);
        assert!(close(&scores[1].entropies, &trained(&all.entropies)), "{kind:?}");

        let gradient = |rows: &[Trajectory<'_>], of_rows: [Vec<f32>; 2]| {
            let mut gradient = policy.zero_gradient().unwrap();
            policy.forward_backward(rows, 0.7, &mut |_| Ok(of_rows.to_vec()), &mut gradient).unwrap();
            gradient.values().unwrap().into_owned()
        };
        let ours = gradient(&rows, [vec![0.5], vec![1.0, -2.0, 3.0]]);
        let theirs = gradient(&whole, [vec![0.5], vec![1.0, -2.0, 0.0, 0.0, 3.0]]);
        assert!(close(&ours, &theirs) && ours.iter().any(|value| value.abs() > 1e-3), "{kind:?}");

        // A gradient with entries for context tokens has the wrong shape.
        let mut unused = policy.zero_gradient().unwrap();
        let wrong = policy.forward_backward(&rows, 0.7, &mut |_| Ok(vec![vec![0.5], vec![0.0; 6]]), &mut unused);
        assert!(wrong.is_err());
    }
}

#[test]
fn a_trajectory_without_a_model_token_has_no_scores() {
    let context = Segments(vec![Segment::Context { ids: vec![10, 11] }]);
    let rows = [Trajectory::new(&PROMPT, &context), Trajectory::of_completion(&PROMPT, &[8])];
    let scores = policy(BackendKind::Cpu).score(&rows, 1.0, Adapter::On).unwrap();
    assert_eq!((scores[0].logps.len(), scores[1].logps.len()), (0, 1));
    let unknown = Segments(vec![Segment::Context { ids: vec![u32::MAX] }]);
    assert!(policy(BackendKind::Cpu).score(&[Trajectory::new(&PROMPT, &unknown)], 1.0, Adapter::On).is_err());
}
