use super::super::isa::Isa;
use super::super::rows::tests::{assert_close, assert_same, noise};
use super::super::threads::Threads;
use super::*;

struct Case {
    heads: Heads,
    groups: Vec<Group>,
    window: Option<usize>,
    qkv: Vec<f32>,
    d_out: Vec<f32>,
    /// The rows that each row attends to.
    seen: Vec<Vec<usize>>,
}

impl Case {
    fn new(
        (num_heads, num_kv_heads, head_dim): (usize, usize, usize),
        groups: &[(usize, &[usize])],
        window: Option<usize>,
    ) -> Case {
        let heads = Heads::new(num_heads, num_kv_heads, head_dim);
        let (mut seen, mut row) = (vec![], 0);
        for (prompt_len, completion_lens) in groups {
            let start = row;
            let keep = |rows: Vec<usize>| rows[rows.len().saturating_sub(window.unwrap_or(usize::MAX))..].to_vec();
            seen.extend((0..*prompt_len).map(|i| keep((start..=start + i).collect())));
            row += prompt_len;
            for len in *completion_lens {
                seen.extend((0..*len).map(|i| keep((start..start + prompt_len).chain(row..=row + i).collect())));
                row += len;
            }
        }
        let groups = groups
            .iter()
            .map(|(prompt_len, lens)| Group { prompt_len: *prompt_len, completion_lens: lens.to_vec() })
            .collect();
        let qkv = noise(row * heads.width(), 3).iter().map(|v| v * 4.0).collect();
        Case { heads, groups, window, qkv, d_out: noise(row * heads.q_width(), 5), seen }
    }

    fn capped(mut self, softcap: f32) -> Case {
        self.heads.softcap = Some(softcap);
        self
    }

    fn all() -> Vec<Case> {
        let mut cases = vec![];
        let small = &[(5, &[3, 7][..]), (2, &[]), (17, &[0, 33])];
        for (heads, window) in [
            ((1, 1, 2), None),
            ((4, 2, 8), Some(7)),
            ((3, 3, 40), Some(1)),
            ((4, 1, 32), None),
            ((2, 1, 64), Some(30)),
            ((2, 2, 128), None),
            ((1, 1, 256), Some(7)),
        ] {
            cases.push(Case::new(heads, &[(1, &[1])], window));
            cases.push(Case::new(heads, small, window));
        }
        for window in [None, Some(7), Some(30)] {
            cases.push(Case::new((3, 1, 10), &[(70, &[40, 1, 150])], window));
        }
        cases.push(Case::new((1, 1, 8), &[(300, &[300, 40]), (530, &[20])], None));
        cases.push(Case::new((1, 1, 8), &[(300, &[300, 40]), (530, &[20])], Some(270)));
        // The lengths are such that the window excludes much of the prompt and of a completion.
        for (window, lens) in [(1, [512, 3]), (8, [700, 3]), (270, [800, 60])] {
            cases.push(Case::new((2, 1, 16), &[(600, &lens), (512, &[20])], Some(window)));
        }
        for (window, softcap) in [(None, 2.0), (Some(7), 0.5), (Some(30), 50.0)] {
            cases.push(Case::new((4, 2, 32), small, window).capped(softcap));
            cases.push(Case::new((3, 1, 10), &[(70, &[40, 1, 150])], window).capped(softcap));
        }
        cases
    }

    fn what(&self, isa: Isa) -> String {
        format!("{isa}, {:?}, {:?}, window {:?}", self.heads, self.groups, self.window)
    }

    fn key(&self, row: usize, head: usize) -> &[f32] {
        let heads = &self.heads;
        let kv = head / heads.group_size();
        &self.qkv[row * heads.width() + heads.q_width() + kv * heads.head_dim..][..heads.head_dim]
    }

    fn value(&self, row: usize, head: usize) -> &[f32] {
        let heads = &self.heads;
        let kv = head / heads.group_size();
        let column = heads.q_width() + heads.kv_width() + kv * heads.head_dim;
        &self.qkv[row * heads.width() + column..][..heads.head_dim]
    }

    /// Computes the output and dL/dqkv.
    fn naive(&self) -> (Vec<f64>, Vec<f64>) {
        let heads = &self.heads;
        let (dim, width) = (heads.head_dim, heads.width());
        let (mut out, mut d) = (vec![], vec![0f64; self.qkv.len()]);
        let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
        let scale = (dim as f64).powf(-0.5);
        for (row, seen) in self.seen.iter().enumerate() {
            for head in 0..heads.num_heads {
                let q = &self.qkv[row * width + head * dim..][..dim];
                let tanh = |score: f64| heads.softcap.map(|c| (score / f64::from(c)).tanh());
                let scores: Vec<f64> = seen.iter().map(|r| dot(q, self.key(*r, head)) * scale).collect();
                let slopes: Vec<f64> = scores.iter().map(|s| tanh(*s).map_or(1.0, |t| 1.0 - t * t)).collect();
                let capped = |s: &f64| tanh(*s).map_or(*s, |t| t * f64::from(heads.softcap.unwrap_or(1.0)));
                let scores: Vec<f64> = scores.iter().map(capped).collect();
                let largest = scores.iter().fold(f64::MIN, |a, b| a.max(*b));
                let total: f64 = scores.iter().map(|s| (s - largest).exp()).sum();
                let p: Vec<f64> = scores.iter().map(|s| (s - largest).exp() / total).collect();
                for i in 0..dim {
                    out.push(seen.iter().zip(&p).map(|(r, p)| f64::from(self.value(*r, head)[i]) * p).sum());
                }
                let d_out = &self.d_out[row * heads.q_width() + head * dim..][..dim];
                let dp: Vec<f64> = seen.iter().map(|r| dot(d_out, self.value(*r, head))).collect();
                let mean: f64 = p.iter().zip(&dp).map(|(p, dp)| p * dp).sum();
                let key_at = heads.q_width() + head / heads.group_size() * dim;
                for (((r, p), dp), slope) in seen.iter().zip(&p).zip(&dp).zip(&slopes) {
                    let ds = p * (dp - mean) * scale * slope;
                    for i in 0..dim {
                        d[r * width + key_at + heads.kv_width() + i] += p * f64::from(d_out[i]);
                        d[r * width + key_at + i] += ds * f64::from(q[i]);
                        d[row * width + head * dim + i] += ds * f64::from(self.key(*r, head)[i]);
                    }
                }
            }
        }
        (out, d)
    }

    fn forward(&self, threads: &Threads, isa: Isa, segments: &mut Segments) -> (Vec<f32>, Vec<f32>) {
        let Case { heads, groups, window, qkv, .. } = self;
        let mut out = vec![9f32; self.seen.len() * heads.q_width()];
        let mut softmax = vec![9f32; self.seen.len() * heads.num_heads * 2];
        let forward = Forward { heads, groups, window: *window, qkv };
        attend_groups(threads, isa, &forward, segments, &mut out, Some(&mut softmax));
        (out, softmax)
    }

    fn backward(&self, threads: &Threads, isa: Isa, out: &[f32], softmax: &[f32]) -> Vec<f32> {
        let Case { heads, groups, window, qkv, d_out, .. } = self;
        let mut d_qkv = vec![9f32; qkv.len()];
        let backward = Backward { heads, groups, window: *window, qkv, out, softmax, d_out };
        attend_groups_backward(threads, isa, &backward, &mut d_qkv);
        d_qkv
    }
}

#[test]
fn a_packed_batch_and_its_gradient_are_the_naive_ones_on_every_isa_and_any_threads() {
    for case in Case::all() {
        let (out, d) = case.naive();
        for isa in Isa::available() {
            let mut segments = Segments::default();
            let mut first: Option<(Vec<f32>, Vec<f32>)> = None;
            for count in [1, 2, 5] {
                let threads = Threads::new(count);
                let what = format!("{}, {count} threads", case.what(isa));
                let (actual, softmax) = case.forward(&threads, isa, &mut segments);
                assert_close(&actual, &out, 1e-5, &what);
                let d_qkv = case.backward(&threads, isa, &actual, &softmax);
                assert_close(&d_qkv, &d, 1e-5, &what);
                let (out0, d0) = first.get_or_insert((actual.clone(), d_qkv.clone()));
                assert_same(&actual, out0, &what);
                assert_same(&d_qkv, d0, &what);
            }
        }
    }
}

/// Decodes the completions token by token, and compares with `out` of the packed batch. With `drops`, the segments drop
/// positions outside of the window, and few must remain.
fn check_decoded(case: &Case, isa: Isa, out: &[f32], drops: bool) {
    let Case { heads, groups, window, qkv, .. } = case;
    let (width, q_width) = (heads.width(), heads.q_width());
    let rows: Vec<&[f32]> = qkv.chunks_exact(width).collect();
    let threads = Threads::new(2);
    let what = format!("{}, drops: {drops}", case.what(isa));
    let window_and = |more: usize| window.filter(|_| drops).map_or(usize::MAX, |window| window + more - 1);
    let mut start = 0;
    for group in groups {
        let mut prompt = Segment::beginning_at(if drops { first_seen(group.prompt_len, *window) } else { 0 });
        prompt.extend(heads, &qkv[(start + prompt.len()) * width..(start + group.prompt_len) * width]);
        assert!(prompt.kept().len() < window_and(BLOCK), "{what}");
        let mut own = vec![Segment::default(); group.completion_lens.len()];
        let mut begin = start + group.prompt_len;
        let begins: Vec<usize> = group
            .completion_lens
            .iter()
            .map(|len| {
                begin += len;
                begin - len
            })
            .collect();
        for step in 0..group.completion_lens.iter().max().map_or(0, |longest| *longest) {
            let live: Vec<usize> = (0..own.len()).filter(|c| step < group.completion_lens[*c]).collect();
            let visible = Visible::of_completion(group.prompt_len, step, *window);
            for c in &live {
                if drops {
                    own[*c].drop_before(heads, visible.own.start);
                }
                own[*c].push(heads, rows[begins[*c] + step]);
                assert!(own[*c].kept().len() <= window_and(DROPPED_AT_ONCE), "{what}");
            }
            let mut outs = vec![vec![0f32; q_width]; live.len()];
            let mut queries: Vec<Query<'_>> = live
                .iter()
                .zip(&mut outs)
                .map(|(c, out)| Query { qkv: rows[begins[*c] + step], own: &own[*c], visible: visible.clone(), out })
                .collect();
            if step % 2 == 0 {
                attend(isa, heads, &prompt, queries.into_iter());
            } else {
                let batch = Batch { prompt: &prompt, queries: &mut queries };
                attend_batches(&threads, isa, heads, &mut [batch]);
            }
            for (c, alone) in live.iter().zip(&outs) {
                let row = begins[*c] + step;
                assert_same(&out[row * q_width..(row + 1) * q_width], alone, &what);
            }
        }
        start += group.len();
    }
}

#[test]
fn a_token_has_the_same_bits_decoded_as_in_the_packed_batch() {
    for case in Case::all() {
        for isa in Isa::available() {
            let (out, _) = case.forward(&Threads::new(2), isa, &mut Segments::default());
            for drops in [false, true] {
                check_decoded(&case, isa, &out, drops);
            }
        }
    }
}

#[test]
fn many_positions_are_dropped_together_and_their_memory_is_used_again() {
    let heads = Heads::new(2, 1, 8);
    let rows = noise(3 * DROPPED_AT_ONCE * heads.width(), 3);
    let mut segment = Segment::default();
    segment.reserve(&heads, 100 + DROPPED_AT_ONCE);
    let memory = segment.keys.as_ptr();
    for (index, row) in rows.chunks_exact(heads.width()).enumerate() {
        let seen = index.saturating_sub(100);
        segment.drop_before(&heads, seen);
        segment.push(&heads, row);
        assert_eq!(segment.kept(), seen / DROPPED_AT_ONCE * DROPPED_AT_ONCE..index + 1);
        assert_eq!(segment.keys.as_ptr(), memory);
    }
}

#[test]
#[should_panic(expected = "a query attends to missing positions")]
fn dropped_positions_must_not_be_visible() {
    let heads = Heads::new(1, 1, 8);
    let prompt = Segment::beginning_at(2 * BLOCK);
    let visible = Visible { prompt: BLOCK..2 * BLOCK, own: 0..0 };
    let (qkv, mut out) = (noise(heads.width(), 3), [0f32; 8]);
    let query = Query { qkv: &qkv, own: &Segment::default(), visible, out: &mut out };
    attend(Isa::Portable, &heads, &prompt, std::iter::once(query));
}

#[test]
fn segments_of_an_earlier_batch_leave_no_trace() {
    let [long, short] = [(40, &[90][..]), (3, &[5][..])].map(|group| Case::new((4, 2, 24), &[group], None));
    for isa in Isa::available() {
        let threads = Threads::new(1);
        let mut segments = Segments::default();
        long.forward(&threads, isa, &mut segments);
        let again = short.forward(&threads, isa, &mut segments);
        assert_eq!(again, short.forward(&threads, isa, &mut Segments::default()), "{isa}");
    }
}
