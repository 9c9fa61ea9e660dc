//! Checks what is equal bit for bit on our CPU kernels, and on a GPU with exact products, in f32 and in bf16: sampling
//! and training agree, whatever the other rows, the micro-batches, the threads, and recomputed activations.

use std::num::NonZeroU32;

use std::collections::BTreeSet;
use std::sync::Arc;

use rlood_engine::backend::BackendKind;
use rlood_engine::backend::cpu::Cpu;
use rlood_engine::kernels::isa::Isa;
use rlood_engine::kernels::threads::Threads;
use rlood_engine::model::pass::{RowDropout, TrainedRows};
use rlood_engine::model::{Adapter, Flat, Logits, Pick, Policy, RowScore, Trajectory};
use rlood_engine::random::{Key, Stream};
use rlood_types::event::SamplePhase;
use rlood_types::spec::ComputeDtype;
use rlood_types::spec::footprint::Place;

use crate::gradients::{architectures, as_rows, fixture, norm, random_ids, trains_in_full, weights};
use crate::kinds::{exact_kinds, kinds, load_exact};
use crate::train::{Start, TestHost, plan, rows, train, value};

const DTYPES: [ComputeDtype; 2] = [ComputeDtype::F32, ComputeDtype::Bf16];
const TEMPERATURE: f64 = 0.7;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Trained {
    Lora,
    Everything,
}

/// All architectures of a backend in all precisions: with sliding windows, qk-norm, biases, tied and untied heads.
fn on(kind: BackendKind) -> impl Iterator<Item = (&'static str, ComputeDtype)> {
    architectures(kind).flat_map(|name| DTYPES.into_iter().map(move |dtype| (name, dtype)))
}

/// The computation, its backend and its precision.
#[derive(Clone, Copy, Debug)]
struct Case {
    name: &'static str,
    kind: BackendKind,
    dtype: ComputeDtype,
}

impl std::fmt::Display for Case {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}, {:?}, {:?}", self.name, self.kind, self.dtype)
    }
}

/// All architectures on all exact backends, in all precisions.
fn each() -> impl Iterator<Item = Case> {
    exact_kinds().into_iter().flat_map(|kind| on(kind).map(move |(name, dtype)| Case { name, kind, dtype }))
}

/// The parts of an architecture that can be trained.
fn trainings(name: &str) -> impl Iterator<Item = Trained> {
    let all = trains_in_full(name);
    [Trained::Lora, Trained::Everything].into_iter().filter(move |what| all || *what == Trained::Lora)
}

fn trained(name: &str, mut policy: Policy, trained: Trained) -> Policy {
    match trained {
        Trained::Lora => policy.load_lora(&fixture(name).join("lora")).unwrap(),
        Trained::Everything => policy.train_all(&fixture(name)).unwrap(),
    }
    policy
}

fn policy(case: Case, what: Trained) -> Policy {
    trained(case.name, load_exact(&fixture(case.name), case.kind, case.dtype), what)
}

/// Four prompts, the second longer than a block of attention and than Mistral's window; completions of 1 to 70 tokens.
/// The groups begin at rows 0, 3, 5 and 6.
fn groups() -> Vec<(Vec<u32>, Vec<u32>)> {
    [(0, 7, 9), (0, 7, 4), (0, 7, 20), (1, 70, 40), (1, 70, 33), (2, 1, 12), (3, 11, 1), (3, 11, 6)]
        .iter()
        .enumerate()
        .map(|(i, (prompt, p, c))| (random_ids(40 + prompt, *p), random_ids(140 + i as u64, *c)))
        .collect()
}

fn assert_same(what: &str, ours: &[f32], theirs: &[f32]) {
    assert_eq!(ours.len(), theirs.len(), "{what}");
    let differ = |(a, b): &(&f32, &f32)| a.to_bits() != b.to_bits();
    let count = ours.iter().zip(theirs).filter(differ).count();
    let worst = ours.iter().zip(theirs).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert_eq!(count, 0, "{what}: {count} of {} values differ, by up to {worst:e}", ours.len());
}

fn assert_same_scores(what: &str, ours: &[RowScore], theirs: &[RowScore]) {
    assert_eq!(ours.len(), theirs.len(), "{what}");
    for (row, (ours, theirs)) in ours.iter().zip(theirs).enumerate() {
        assert_same(&format!("{what}, log-probs of row {row}"), &ours.logps, &theirs.logps);
        assert_same(&format!("{what}, entropies of row {row}"), &ours.entropies, &theirs.entropies);
    }
}

/// A row during generation, with its recorded tokens and log-probs.
struct Live {
    number: u64,
    prompt: Vec<u32>,
    completion: Vec<u32>,
    logps: Vec<f32>,
    length: usize,
}

/// Samples in a batch in which rows with shared prompts join late and leave early.
fn sample(policy: &Policy, adapter: Adapter) -> Vec<Live> {
    const LENGTHS: [usize; 6] = [1, 33, 5, 48, 17, 40];
    let prompts = [random_ids(20, 11), random_ids(21, 2), random_ids(22, 67), random_ids(23, 1)];
    // After this many tokens, these prompts join, each with this many rows.
    let joins: [(usize, &[usize], usize); 4] = [(0, &[0, 1], 3), (4, &[2, 0], 2), (9, &[3, 1, 1], 1), (20, &[2], 4)];
    let key = Key::new(3, Stream::Probe);
    let mut state = policy.begin(adapter);
    let (mut live, mut done): (Vec<Live>, Vec<Live>) = Default::default();
    for step in 0.. {
        for (_, which, copies) in joins.iter().filter(|(at, ..)| *at == step) {
            let joining: Vec<&[u32]> = which.iter().map(|prompt| prompts[*prompt].as_slice()).collect();
            policy.join(&mut state, &joining, *copies, 48).unwrap();
            for prompt in joining.iter().flat_map(|prompt| std::iter::repeat_n(prompt, *copies)) {
                let number = live.len() + done.len();
                live.push(Live {
                    number: number as u64,
                    prompt: prompt.to_vec(),
                    completion: Vec::new(),
                    logps: Vec::new(),
                    length: LENGTHS[number % LENGTHS.len()],
                });
            }
        }
        if live.is_empty() {
            break;
        }
        let uniform = |row: &Live| key.with(row.number).with(row.completion.len() as u64).uniform();
        let picks: Vec<Pick> =
            live.iter().map(|row| Pick { temperature: TEMPERATURE, uniform: uniform(row) }).collect();
        let chosen = policy.choose(&state, &picks).unwrap();
        for (row, chosen) in live.iter_mut().zip(&chosen) {
            row.completion.push(chosen.token);
            row.logps.push(chosen.logp);
        }
        let keep: Vec<bool> = live.iter().map(|row| row.completion.len() < row.length).collect();
        let mut tokens: Vec<u32> = chosen.iter().map(|chosen| chosen.token).collect();
        if step % 2 == 0 {
            let mut kept = keep.iter();
            tokens.retain(|_| *kept.next().unwrap());
            policy.retain(&mut state, &keep).unwrap();
            policy.append(&mut state, &tokens).unwrap();
        } else {
            policy.append(&mut state, &tokens).unwrap();
            policy.retain(&mut state, &keep).unwrap();
        }
        let (stay, leave): (Vec<Live>, Vec<Live>) = live.into_iter().partition(|row| row.completion.len() < row.length);
        live = stay;
        done.extend(leave);
    }
    assert_eq!(done.len(), 17);
    done
}

#[test]
fn the_log_probs_of_sampling_are_those_of_scoring() {
    for case in each() {
        let policy = policy(case, Trained::Lora);
        assert!(policy.samples_exactly());
        for adapter in [Adapter::On, Adapter::Off] {
            let mut done = sample(&policy, adapter);
            // First in the order in which the rows ended, then grouped by prompt.
            for order in ["as they ended", "by prompt"] {
                let what = format!("{case}, {adapter:?}, {order}");
                let rows: Vec<Trajectory<'_>> =
                    done.iter().map(|row| Trajectory::of_completion(&row.prompt, &row.completion)).collect();
                let scores = policy.score(&rows, TEMPERATURE, adapter).unwrap();
                for (row, score) in done.iter().zip(&scores) {
                    assert_same(&format!("{what}, row {}", row.number), &row.logps, &score.logps);
                }
                done.sort_by(|a, b| a.prompt.cmp(&b.prompt));
            }
        }
    }
}

#[test]
fn scores_depend_neither_on_the_other_rows_nor_on_the_micro_batches() {
    for case in each() {
        let policy = policy(case, Trained::Lora);
        let owned = groups();
        let rows = as_rows(&owned);
        let score = |rows: &[Trajectory<'_>]| policy.score(rows, TEMPERATURE, Adapter::On).unwrap();
        let whole = score(&rows);
        for row in 0..rows.len() {
            let alone = score(&rows[row..=row]);
            assert_same_scores(&format!("{case}, row {row} alone"), &alone, &whole[row..=row]);
        }
        let reversed: Vec<Trajectory<'_>> = rows.iter().rev().cloned().collect();
        let mut again = score(&reversed);
        again.reverse();
        assert_same_scores(&format!("{case}, reversed"), &again, &whole);
        // Splits inside and between the groups that share a prompt.
        for cut in 1..rows.len() {
            let (first, second) = rows.split_at(cut);
            let split = [score(first), score(second)].concat();
            assert_same_scores(&format!("{case}, cut at {cut}"), &split, &whole);
        }
    }
}

/// Attention sums over a prompt and over the following tokens separately, so only prompts have exactly the logits of a
/// forward pass over the whole sequence. The tokens of a completion have the log-probs of scoring (tested above), which
/// splits the sums in the same way.
#[test]
fn logits_do_not_depend_on_the_other_rows_and_after_a_prompt_are_those_of_a_forward() {
    for case in each() {
        let policy = policy(case, Trained::Lora);
        let sequences = [(1, 30), (5, 31), (67, 32)].map(|(prompt, seed)| (prompt, random_ids(seed, prompt + 40)));
        let cached = |sequences: &[(usize, Vec<u32>)]| -> Vec<Logits> {
            let mut state = policy.begin(Adapter::On);
            let prompts: Vec<&[u32]> = sequences.iter().map(|(prompt, ids)| &ids[..*prompt]).collect();
            policy.join(&mut state, &prompts, 1, 40).unwrap();
            let mut steps = vec![policy.next_logits(&state).unwrap()];
            for step in 0..40 {
                let tokens: Vec<u32> = sequences.iter().map(|(prompt, ids)| ids[prompt + step]).collect();
                policy.append(&mut state, &tokens).unwrap();
                steps.push(policy.next_logits(&state).unwrap());
            }
            steps
        };
        let together = cached(&sequences);
        for (row, (prompt, ids)) in sequences.iter().enumerate() {
            let full = policy.logits(ids, &[prompt - 1, prompt + 39], Adapter::On).unwrap();
            let what = format!("{case}, row {row}");
            assert_same(&what, together[0].row(row), &full[0]);
            // A GPU in bf16 also rounds the values between products, so sums and roundings differ.
            let tolerance = match (case.kind, case.dtype) {
                (BackendKind::Cuda { .. }, ComputeDtype::Bf16) => 0.1,
                // AMX and AVX512-BF16 round the inputs of products: a difference in the last bit of attention can become
                // one bf16 step in the next product (measured: 3.1e-2).
                (BackendKind::Cpu, ComputeDtype::Bf16) if Isa::chosen().unwrap().rounds_inputs() => 6e-2,
                (_, ComputeDtype::F32 | ComputeDtype::Bf16) => 5e-5,
            };
            for (ours, full) in together[40].row(row).iter().zip(&full[1]) {
                assert!((ours - full).abs() <= tolerance * full.abs().max(1.0), "{what}: {ours} and {full}");
            }
            for (step, (alone, together)) in cached(&sequences[row..=row]).iter().zip(&together).enumerate() {
                assert_same(&format!("{what} alone, {step} tokens"), alone.row(0), together.row(row));
            }
        }
    }
}

fn backward(policy: &Policy, rows: &[Trajectory<'_>], first_row: usize, gradient: &mut Flat) -> Vec<RowScore> {
    let g = weights(rows, first_row);
    let dropout = Some(RowDropout { key: Key::new(5, Stream::Dropout).with(1), first_row });
    policy
        .forward_backward_with(rows, 0.8, &TrainedRows { dropout, second_pass: &[] }, &mut |_| Ok(g.clone()), gradient)
        .unwrap()
}

fn gradient(policy: &Policy, rows: &[Trajectory<'_>], cuts: &[usize]) -> (Vec<f32>, Vec<RowScore>) {
    let (mut gradient, mut scores) = (policy.zero_gradient().unwrap(), Vec::new());
    let mut begin = 0;
    for end in cuts.iter().copied().chain([rows.len()]) {
        scores.extend(backward(policy, &rows[begin..end], begin, &mut gradient));
        begin = end;
    }
    let gradient = gradient.values().unwrap().into_owned();
    assert!(gradient.iter().any(|g| *g != 0.0));
    (gradient, scores)
}

/// Whether a parameter's gradient is a single chain over the rows. That is the case for adapters and for all weights
/// except a tied embedding, to which head and lookup add in turn, and the weights of the qk-norms, which are added 64
/// tokens at a time.
fn is_one_chain(policy: &Policy, parameter: &str) -> bool {
    // A GPU sums a micro-batch before adding it to the gradient.
    if policy.place() != Place::Cpu {
        return false;
    }
    let tied = policy.card().config.tie_word_embeddings && parameter == "model.embed_tokens.weight";
    !tied && !["q_norm.weight", "k_norm.weight"].iter().any(|norm| parameter.ends_with(norm))
}

fn assert_same_gradient(what: &str, policy: &Policy, ours: &[f32], theirs: &[f32]) {
    for info in policy.parameters() {
        let range = info.offset..info.offset + info.shape.iter().product::<usize>();
        let (ours, theirs) = (&ours[range.clone()], &theirs[range]);
        if is_one_chain(policy, &info.name) {
            assert_same(&format!("{what}, {}", info.name), ours, theirs);
        } else {
            let difference: Vec<f32> = ours.iter().zip(theirs).map(|(a, b)| a - b).collect();
            assert!(norm(&difference) <= 2e-6 * norm(theirs), "{what}, {}", info.name);
        }
    }
}

/// A step is split only between groups ([`rlood_engine::update::MicroBatching`]): a split inside a group would add the
/// prompt's own gradient in two parts.
#[test]
fn gradients_do_not_depend_on_the_micro_batches() {
    for case in each() {
        for what in trainings(case.name) {
            let mut policy = policy(case, what);
            for dropout in [0.0, 0.25] {
                policy.set_lora_dropout(dropout);
                let owned = groups();
                let rows = as_rows(&owned);
                let (whole, scores) = gradient(&policy, &rows, &[]);
                for cuts in [&[3][..], &[5], &[6], &[3, 5, 6]] {
                    let (split, split_scores) = gradient(&policy, &rows, cuts);
                    let what = format!("{case}, {what:?}, dropout {dropout}, cut at {cuts:?}");
                    assert_same_scores(&what, &split_scores, &scores);
                    assert_same_gradient(&what, &policy, &split, &whole);
                }
                if what == Trained::Everything {
                    break;
                }
            }
        }
    }
}

#[test]
fn nothing_depends_on_the_number_of_threads() {
    let isa = Isa::chosen().unwrap();
    for (name, dtype) in on(BackendKind::Cpu) {
        for what in trainings(name) {
            let owned = groups();
            let rows = as_rows(&owned);
            let run = |threads: usize| {
                let cpu = Cpu::with(dtype, isa, Arc::new(Threads::new(threads)));
                let policy = trained(name, Policy::on_cpu(&fixture(name), cpu).unwrap(), what);
                let sampled: Vec<f32> = sample(&policy, Adapter::On).into_iter().flat_map(|row| row.logps).collect();
                (gradient(&policy, &rows, &[]), sampled)
            };
            let ((first_gradient, first_scores), first_sampled) = run(1);
            for threads in [2, 3] {
                let what = format!("{name}, {dtype:?}, {what:?}, {threads} threads");
                let ((gradient, scores), sampled) = run(threads);
                assert_same_scores(&what, &scores, &first_scores);
                assert_same(&what, &gradient, &first_gradient);
                assert_same(&what, &sampled, &first_sampled);
            }
        }
    }
}

#[test]
fn recomputed_activations_have_the_same_bits() {
    for kind in kinds() {
        for (name, dtype) in on(kind) {
            let mut policy = Policy::load_dtype(&fixture(name), kind, dtype).unwrap();
            policy.load_lora(&fixture(name).join("lora")).unwrap();
            for dropout in [0.0, 0.25] {
                policy.set_lora_dropout(dropout);
                let owned = groups();
                let rows = as_rows(&owned);
                policy.set_gradient_checkpointing(false);
                let (kept, scores) = gradient(&policy, &rows, &[]);
                policy.set_gradient_checkpointing(true);
                let (again, again_scores) = gradient(&policy, &rows, &[]);
                let what = format!("{name}, {kind:?}, {dtype:?}, dropout {dropout}");
                assert_same_scores(&what, &again_scores, &scores);
                assert_same(&what, &again, &kept);
            }
        }
    }
}

#[test]
fn the_first_use_of_every_block_is_exactly_on_policy() {
    for dtype in DTYPES {
        for (num_iterations, steps_per_generation) in [(1, 1), (2, 2)] {
            let mut plan = plan();
            plan.training.dtype = dtype;
            plan.training.max_steps = 4 * u64::from(num_iterations * steps_per_generation);
            plan.rloo.num_generations = NonZeroU32::new(4).unwrap();
            plan.rloo.num_iterations = num_iterations;
            plan.rloo.steps_per_generation = steps_per_generation;
            plan.sampling.max_completion_length = 24;
            plan.sampling.temperature = TEMPERATURE;
            let mut host = TestHost::default();
            let start = Start { backend: Some(BackendKind::Cpu), ..Start::default() };
            assert_eq!(train(&plan, rows(), start, &mut host).unwrap(), None);
            let metrics = host.metrics(SamplePhase::Train);
            let uses = u64::from(num_iterations * steps_per_generation);
            let mut exact = BTreeSet::new();
            for step in 1..=plan.training.max_steps {
                let trace = &host.traces[step as usize - 1];
                if (step - 1) % uses != 0 {
                    assert_ne!(trace.new_logps, trace.old_logps, "{dtype:?}, step {step}: the policy has moved");
                    continue;
                }
                for name in ["sampling/log_ratio_max", "sampling/sampling_logp_difference/max"] {
                    assert_eq!(value(&metrics, step, name), 0.0, "{dtype:?}, step {step}: {name}");
                }
                for (new, old) in trace.new_logps.iter().zip(&trace.old_logps) {
                    assert_same(&format!("{dtype:?}, step {step}"), new, old);
                }
                exact.insert(step);
            }
            assert_eq!(exact.len(), 4);
            for name in ["kl", "kl_sequence", "kl_k3"] {
                assert_eq!(value(&metrics, 1, name), 0.0, "{dtype:?}: {name} of a fresh adapter");
            }
            assert!(value(&metrics, 1 + uses, "kl_k3") > 0.0, "{dtype:?}: the adapter has moved");
        }
    }
}
