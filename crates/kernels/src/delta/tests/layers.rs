//! Tests of whole layers.

use super::*;

/// The weights of a layer, with their owner.
struct Layer {
    shape: Shape,
    weight: Vec<f32>,
    bias: Option<Vec<f32>>,
    conv: Conv,
    a_log: Vec<f32>,
    dt_bias: Vec<f32>,
    norm: Vec<f32>,
}

impl Layer {
    fn new(shape: Shape, with_bias: bool) -> Layer {
        let weight = scaled(shape.conv_width() * shape.kernel, 1, 2.0);
        let bias = with_bias.then(|| noise(shape.conv_width(), 2));
        Layer {
            shape,
            conv: Conv::new(&weight, bias.as_deref(), shape.kernel),
            weight,
            bias,
            a_log: scaled(shape.num_value_heads, 3, 2.0),
            dt_bias: noise(shape.num_value_heads, 4),
            norm: noise(shape.value_dim, 5).iter().map(|x| x + 1.0).collect(),
        }
    }

    fn weights(&self) -> Weights<'_> {
        let Layer { shape, conv, a_log, dt_bias, norm, .. } = self;
        Weights { shape: *shape, conv, a_log, dt_bias, norm, eps: 1e-5 }
    }

    fn x(&self, rows: usize, seed: u64) -> Vec<f32> {
        scaled(rows * self.shape.width(), seed, 4.0)
    }

    /// The output for the rows of one sequence from a state of zeros.
    fn naive(&self, x: &[f64]) -> Vec<f64> {
        let shape = self.shape;
        let mut inputs = Inputs {
            heads: shape,
            qkv: Vec::new(),
            beta: Vec::new(),
            g: Vec::new(),
            memory: vec![0.0; shape.memory_len()],
        };
        for (token, row) in x.chunks(shape.width()).enumerate() {
            let mut mixed: Vec<f64> = (0..shape.conv_width())
                .map(|channel| {
                    let mut sum = self.bias.as_ref().map_or(0.0, |bias| f64::from(bias[channel]));
                    for tap in (0..shape.kernel).filter(|tap| token + tap + 1 >= shape.kernel) {
                        let input = x[(token + tap + 1 - shape.kernel) * shape.width() + channel];
                        sum += f64::from(self.weight[channel * shape.kernel + tap]) * input;
                    }
                    sum * sigmoid(sum)
                })
                .collect();
            for (head, x) in mixed[..2 * shape.key_width()].chunks_mut(shape.key_dim).enumerate() {
                let length = (x.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
                let scale = if head < shape.num_key_heads { (shape.key_dim as f64).sqrt() } else { 1.0 };
                x.iter_mut().for_each(|x| *x /= length * scale);
            }
            inputs.qkv.extend(mixed);
            let (b, a) = row[shape.b().start..].split_at(shape.num_value_heads);
            inputs.beta.extend(b.iter().map(|b| sigmoid(*b)));
            let softplus = |x: f64| x.max(0.0) + (-x.abs()).exp().ln_1p();
            let g =
                |head: usize| -f64::from(self.a_log[head]).exp() * softplus(a[head] + f64::from(self.dt_bias[head]));
            inputs.g.extend((0..shape.num_value_heads).map(g));
        }
        let mut out = inputs.forward().0;
        for (token, row) in out.chunks_mut(shape.value_width()).enumerate() {
            let z = &x[token * shape.width()..][shape.z()];
            for (o, z) in row.chunks_mut(shape.value_dim).zip(z.chunks(shape.value_dim)) {
                let mean = o.iter().map(|o| o * o).sum::<f64>() / shape.value_dim as f64;
                let r = (mean + f64::from(1e-5f32)).sqrt().recip();
                for ((o, z), norm) in o.iter_mut().zip(z).zip(&self.norm) {
                    *o *= r * f64::from(*norm) * z * sigmoid(*z);
                }
            }
        }
        out
    }

    /// The output for rows of sequences that may continue each other.
    fn naive_of(&self, sequences: &[Sequence], x: &[f64]) -> Vec<f64> {
        let (width, value_width) = (self.shape.width(), self.shape.value_width());
        let mut out = vec![0.0; x.len() / width * value_width];
        for sequence in sequences {
            let mut rows: Vec<usize> = sequence.rows.clone().collect();
            let mut after = sequence.after;
            while let Some(index) = after {
                rows.splice(0..0, sequences[index].rows.clone());
                after = sequences[index].after;
            }
            let x: Vec<f64> = rows.iter().flat_map(|row| x[row * width..(row + 1) * width].to_vec()).collect();
            let own = self.naive(&x);
            let own = &own[own.len() - sequence.rows.len() * value_width..];
            out[sequence.rows.start * value_width..sequence.rows.end * value_width].copy_from_slice(own);
        }
        out
    }

    fn forward(&self, threads: &Threads, isa: Isa, sequences: &[Sequence], x: &[f32]) -> (Vec<f32>, Vec<State>) {
        let mut states = vec![State::new(&self.shape); sequences.len()];
        let mut out = vec![0.0; x.len() / self.shape.width() * self.shape.value_width()];
        forward(threads, isa, &self.weights(), sequences, x, &mut states, &mut out);
        (out, states)
    }

    fn backward(&self, threads: &Threads, isa: Isa, sequences: &[Sequence], x: &[f32], d_out: &[f32]) -> Vec<f32> {
        let mut d_x = vec![0.0; x.len()];
        backward(threads, isa, &self.weights(), sequences, x, d_out, &mut d_x);
        d_x
    }
}

/// A prompt with three completions, one of which is continued after an empty sequence, and an unrelated sequence.
fn tree(lengths: [usize; 6]) -> (Vec<Sequence>, usize) {
    let after = [None, Some(0), None, Some(0), Some(3), Some(4)];
    let mut end = 0;
    let sequences = lengths.into_iter().zip(after).map(|(len, after)| {
        let rows = end..end + len;
        end += len;
        Sequence { rows, after }
    });
    (sequences.collect(), lengths.iter().sum())
}

fn alone(rows: usize) -> Vec<Sequence> {
    vec![Sequence { rows: 0..rows, after: None }]
}

#[test]
fn layers_and_their_gradients_are_the_naive_ones_on_every_isa() {
    let cases = [
        (shape_of(1, 2, 3, 4), [2, 3, 4, 1, 0, 5], true),
        (shape_of(2, 2, 2, 3), [70, 1, 3, 66, 2, 2], false),
        (Shape { kernel: 1, ..shape_of(1, 1, 2, 2) }, [3, 2, 0, 2, 1, 1], true),
        (Shape { kernel: 2, ..shape_of(1, 3, 5, 2) }, [0, 2, 3, 2, 0, 1], false),
    ];
    for (shape, lengths, with_bias) in cases {
        let layer = Layer::new(shape, with_bias);
        let (sequences, rows) = tree(lengths);
        let (x, d_out) = (layer.x(rows, 11), noise(rows * shape.value_width(), 12));
        let expected = layer.naive_of(&sequences, &wide(&x));
        let gradients = differences(&wide(&x), &d_out, |x| layer.naive_of(&sequences, x));
        for isa in Isa::available() {
            let mut first: Option<(Vec<f32>, Vec<f32>)> = None;
            for count in [1, 3] {
                let (threads, what) = (Threads::new(count), format!("{isa}, {shape:?}, {count} threads"));
                let (out, _) = layer.forward(&threads, isa, &sequences, &x);
                assert_close(&out, &expected, 1e-5, &what);
                let d_x = layer.backward(&threads, isa, &sequences, &x, &d_out);
                assert_close(&d_x, &gradients, 2e-5, &format!("gradients, {what}"));
                let (out_first, d_x_first) = first.get_or_insert((out.clone(), d_x.clone()));
                assert_same(&out, out_first, &what);
                assert_same(&d_x, d_x_first, &what);
            }
        }
    }
}

#[test]
fn a_layer_gives_the_same_bits_in_one_call_in_parts_and_step_by_step() {
    for (shape, rows) in sizes().map(|(shape, rows)| (shape, rows.max(20))) {
        let layer = Layer::new(shape, true);
        let (width, value_width) = (shape.width(), shape.value_width());
        let xs = [layer.x(rows, 21), layer.x(rows, 22), layer.x(rows, 23)];
        for isa in Isa::available() {
            let threads = Threads::new(2);
            let whole = xs.each_ref().map(|x| layer.forward(&threads, isa, &alone(rows), x));
            // Parts, each a sequence that continues the part before it.
            let cuts = [0, 1, 3, 3, 9, 17, rows];
            let parts: Vec<Sequence> = (0..6)
                .map(|part| Sequence { rows: cuts[part]..cuts[part + 1], after: usize::checked_sub(part, 1) })
                .collect();
            let (out, states) = layer.forward(&threads, isa, &parts, &xs[0]);
            assert_same(&out, &whole[0].0, "parts");
            assert_eq!(states[5], whole[0].1[0]);
            // Parts in separate calls.
            let (mut states, mut out) = (vec![State::new(&shape)], vec![0.0; rows * value_width]);
            for part in parts.iter().map(|part| part.rows.clone()) {
                let x = &xs[0][part.start * width..part.end * width];
                let out = &mut out[part.start * value_width..part.end * value_width];
                forward(&threads, isa, &layer.weights(), &alone(part.len()), x, &mut states, out);
            }
            assert_same(&out, &whole[0].0, "calls");
            assert_eq!(states[0], whole[0].1[0]);
            // Single tokens, with those of other sequences.
            let mut states = vec![State::new(&shape); 3];
            for row in 0..rows {
                let x: Vec<f32> = xs.iter().flat_map(|x| x[row * width..(row + 1) * width].to_vec()).collect();
                let mut out = vec![0.0; 3 * value_width];
                let mut of_rows: Vec<&mut State> = states.iter_mut().collect();
                step(&threads, isa, &layer.weights(), &x, &mut of_rows, &mut out);
                for (out, whole) in out.chunks(value_width).zip(&whole) {
                    assert_same(out, &whole.0[row * value_width..(row + 1) * value_width], "steps");
                }
            }
            for (state, whole) in states.iter().zip(&whole) {
                assert_eq!(*state, whole.1[0]);
            }
        }
    }
}

#[test]
fn many_sequences_give_the_bits_of_each_alone() {
    let shape = shape_of(2, 4, 16, 24);
    let layer = Layer::new(shape, false);
    let lengths: Vec<usize> = (0..40).map(|index| index * 7 % 90).collect();
    let rows: usize = lengths.iter().sum();
    let (x, d_out) = (layer.x(rows, 1), noise(rows * shape.value_width(), 2));
    let mut end = 0;
    let sequences: Vec<Sequence> = lengths
        .iter()
        .map(|len| {
            end += len;
            Sequence { rows: end - len..end, after: None }
        })
        .collect();
    for isa in Isa::available() {
        let threads = Threads::new(2);
        let (out, states) = layer.forward(&threads, isa, &sequences, &x);
        let d_x = layer.backward(&threads, isa, &sequences, &x, &d_out);
        for (sequence, state) in sequences.iter().zip(&states) {
            let x_of = |width: usize| sequence.rows.start * width..sequence.rows.end * width;
            let (own, own_x) = (alone(sequence.rows.len()), &x[x_of(shape.width())]);
            let (out_alone, states_alone) = layer.forward(&threads, isa, &own, own_x);
            assert_same(&out[x_of(shape.value_width())], &out_alone, "out");
            assert_eq!(*state, states_alone[0]);
            let d_x_alone = layer.backward(&threads, isa, &own, own_x, &d_out[x_of(shape.value_width())]);
            assert_same(&d_x[x_of(shape.width())], &d_x_alone, "d_x");
        }
    }
}

#[test]
fn many_continuations_of_one_sequence_add_their_gradients_in_order() {
    let shape = shape_of(1, 2, 5, 6);
    let layer = Layer::new(shape, false);
    let mut sequences = vec![Sequence { rows: 0..5, after: None }];
    sequences.extend((0..20).map(|index| Sequence { rows: 5 + 3 * index..8 + 3 * index, after: Some(0) }));
    let rows = 65;
    let (x, d_out) = (layer.x(rows, 1), noise(rows * shape.value_width(), 2));
    let expected = differences(&wide(&x), &d_out, |x| layer.naive_of(&sequences, x));
    for isa in Isa::available() {
        // The number of threads changes which sequences run together.
        let all = [1, 13].map(|count| layer.backward(&Threads::new(count), isa, &sequences, &x, &d_out));
        assert_close(&all[0], &expected, 2e-5, &format!("{isa}"));
        assert_same(&all[0], &all[1], &format!("{isa}"));
    }
}

#[test]
fn avx2_and_avx512_give_the_same_bits() {
    if !Isa::Avx512.is_available() {
        return;
    }
    for (shape, rows) in sizes() {
        let layer = Layer::new(shape, true);
        let (x, d_out) = (layer.x(rows, 31), noise(rows * shape.value_width(), 32));
        let threads = Threads::new(2);
        let [(out, states), (expected, expected_states)] =
            [Isa::Avx2, Isa::Avx512].map(|isa| layer.forward(&threads, isa, &alone(rows), &x));
        assert_same(&out, &expected, &format!("{shape:?}"));
        assert_eq!(states, expected_states);
        let [a, b] = [Isa::Avx2, Isa::Avx512].map(|isa| layer.backward(&threads, isa, &alone(rows), &x, &d_out));
        assert_same(&a, &b, &format!("gradients of {shape:?}"));
    }
}

#[test]
fn huge_gates_give_finite_results_and_nan_stays_nan() {
    let shape = shape_of(1, 2, 4, 4);
    let layer = Layer::new(shape, false);
    for isa in Isa::available() {
        let (threads, mut x) = (Threads::new(1), layer.x(12, 1));
        for (row, value) in [-1e30, -100.0, -30.0, 30.0, 100.0, 1e30].into_iter().enumerate() {
            x[row * shape.width() + shape.z().start..(row + 1) * shape.width()].fill(value / 1e3);
            x[row * shape.width() + shape.b().start..(row + 1) * shape.width()].fill(value);
        }
        let (out, _) = layer.forward(&threads, isa, &alone(12), &x);
        assert_close(&out, &layer.naive(&wide(&x)), 1e-5, &format!("{isa}"));
        let d_x = layer.backward(&threads, isa, &alone(12), &x, &noise(out.len(), 2));
        assert!(d_x.iter().all(|d| d.is_finite()), "{isa}: {d_x:?}");
        x[3 * shape.width() + shape.b().start] = f32::NAN;
        let (out, _) = layer.forward(&threads, isa, &alone(12), &x);
        let (before, after) = out.split_at(3 * shape.value_width());
        assert!(before.iter().all(|value| value.is_finite()) && after[0].is_nan(), "{isa}");
    }
}

#[test]
fn sequences_that_overlap_or_continue_a_later_one_are_refused() {
    let shape = shape_of(1, 1, 2, 2);
    let layer = Layer::new(shape, false);
    let x = layer.x(4, 1);
    for (sequences, message) in [
        (vec![Sequence { rows: 0..3, after: None }, Sequence { rows: 2..4, after: None }], "overlap"),
        (vec![Sequence { rows: 0..5, after: None }], "exceed"),
        (vec![Sequence { rows: 0..2, after: Some(1) }, Sequence { rows: 2..4, after: None }], "an earlier one"),
    ] {
        let run = || layer.forward(&Threads::new(1), Isa::Portable, &sequences, &x);
        let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).unwrap_err();
        let text = panic.downcast_ref::<&str>().map(ToString::to_string);
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap();
        assert!(text.contains(message), "{text}");
    }
}

#[test]
fn a_state_is_copied_and_measured() {
    let shape = shape_of(1, 2, 3, 5);
    let layer = Layer::new(shape, true);
    let (_, states) = layer.forward(&Threads::new(1), Isa::Portable, &alone(5), &layer.x(5, 1));
    let mut copy = State::new(&shape);
    assert_ne!(copy, states[0]);
    copy.copy_from(&states[0]);
    assert_eq!(copy, states[0]);
    assert!(copy.bytes() >= (30 + 3 * 16) * 4);
}
