//! The tests run on the emulator if its feature is enabled, else on a GPU if there is one.

use super::super::attention::tests::{Case, device, download, group, heads, rounded, upload};
use super::super::attention::{Layout, attend};
use super::*;

/// Computes attention over the whole batch.
fn packed(device: &Device, case: &Case, qkv: &[f32], dtype: Dtype) -> Vec<f32> {
    let (tokens, width, q_width) = (case.tokens(), case.heads.width(), case.heads.q_width());
    let layout = Layout::new(device, &case.heads, &case.groups, case.window).unwrap();
    let qkv = upload(device, qkv, dtype);
    let out = device.alloc(tokens * q_width * dtype.bytes()).unwrap();
    let softmax = device.alloc(tokens * case.heads.num_heads * 4).unwrap();
    let of_softmax = Rows::new(&softmax, tokens, case.heads.num_heads, Dtype::F32);
    let of_out = Rows::new(&out, tokens, q_width, dtype);
    attend(device, &layout, Rows::new(&qkv, tokens, width, dtype), of_out, of_softmax).unwrap();
    download(device, &out, tokens * q_width, dtype)
}

/// Decodes the completions of prompts token by token, in two layers: with the case's window and without. All groups but
/// the first begin at step `late`. Compares the bits with those of training.
fn decode_has_the_bits_of_training(case: &Case, dtype: Dtype, spread: Spread, late: usize) {
    let Some(device) = device() else { return };
    let (heads, width, q_width) = (case.heads, case.heads.width(), case.heads.q_width());
    let qkv = rounded(case.qkv(dtype), dtype);
    let windows = [case.window, None];
    let expected =
        windows.map(|window| packed(&device, &Case { heads, groups: case.groups.clone(), window }, &qkv, dtype));
    let mut cache = Cache::new(&device, &heads, 2, dtype).unwrap();
    cache.spread = spread;
    // Each live row: the index of its next token in the batch, and the end of its last token.
    let (mut live, mut begin): (Vec<(usize, usize)>, usize) = (Vec::new(), 0);
    for step in 0.. {
        let coming = match step {
            0 if late == 0 => &case.groups[..],
            0 => &case.groups[..1],
            _ if step == late => &case.groups[1..],
            _ => &[],
        };
        if !coming.is_empty() {
            let lengths: Vec<usize> = coming.iter().map(|group| group.prompt_len).collect();
            assert_eq!(cache.announce(&lengths).unwrap(), 0);
            let mut prompts: Vec<f32> = Vec::new();
            for (number, group) in coming.iter().enumerate() {
                prompts.extend(&qkv[begin * width..(begin + group.prompt_len) * width]);
                begin += group.prompt_len;
                for len in &group.completion_lens {
                    live.push((begin, begin + len));
                    begin += len;
                }
                cache.add_rows(number, group.completion_lens.len(), 100).unwrap();
            }
            let tokens = prompts.len() / width;
            let prompts = upload(&device, &prompts, dtype);
            for layer in 0..2 {
                cache.fill(0, layer, Rows::new(&prompts, tokens, width, dtype)).unwrap();
            }
            cache.close();
        }
        let keep: Vec<bool> = live.iter().map(|(at, end)| at < end).collect();
        cache.retain(&keep);
        live.retain(|(at, end)| at < end);
        assert_eq!(cache.rows(), live.len());
        if live.is_empty() {
            break;
        }
        // The batch has more rows than are live, as in a bucket.
        let bucket = live.len() + step % 2;
        let mut rows: Vec<f32> = live.iter().flat_map(|(at, _)| &qkv[at * width..(at + 1) * width]).copied().collect();
        rows.resize(bucket * width, f32::NAN);
        let rows = upload(&device, &rows, dtype);
        let out = device.alloc(bucket * q_width * dtype.bytes()).unwrap();
        if step % 3 == 0 {
            cache.begin_step().unwrap();
        }
        for (layer, window) in windows.into_iter().enumerate() {
            let of_out = Rows::new(&out, bucket, q_width, dtype);
            cache.attend(layer, window, Rows::new(&rows, bucket, width, dtype), of_out).unwrap();
            let actual = download(&device, &out, bucket * q_width, dtype);
            for (row, (at, _)) in live.iter().enumerate() {
                let expected = &expected[layer][at * q_width..(at + 1) * q_width];
                let actual = &actual[row * q_width..(row + 1) * q_width];
                assert_eq!(actual, expected, "row {row}, step {step}, layer {layer}, {}", case.what(dtype));
            }
            assert!(actual[live.len() * q_width..].iter().all(|value| *value == 0.0));
        }
        live.iter_mut().for_each(|(at, _)| *at += 1);
    }
}

fn for_all_plans(case: &Case) {
    for dtype in [Dtype::F32, Dtype::Bf16] {
        for warps in [1, 6, usize::MAX] {
            decode_has_the_bits_of_training(case, dtype, Spread { warps, long: 1 }, 0);
        }
    }
}

#[test]
fn one_row_of_one_head_attends_as_in_training() {
    for_all_plans(&Case { heads: heads(1, 1, 32), groups: vec![group(1, &[3])], window: None });
}

#[test]
fn rows_that_share_prompts_attend_as_in_training() {
    let groups = vec![group(70, &[3, 2, 1, 3, 0]), group(129, &[2]), group(5, &[1, 3, 3])];
    for_all_plans(&Case { heads: heads(4, 1, 64), groups, window: Some(66) });
}

#[test]
fn long_completions_cross_pages_as_in_training() {
    let groups = vec![group(3, &[67, 65])];
    for_all_plans(&Case { heads: heads(2, 1, 16), groups, window: Some(40) });
}

#[test]
fn a_long_row_among_short_ones_attends_as_in_training() {
    let groups = vec![group(3, &[195]), group(130, &[2]), group(2, &[2]), group(2, &[1])];
    let case = Case { heads: heads(2, 1, 32), groups, window: Some(150) };
    for dtype in [Dtype::F32, Dtype::Bf16] {
        decode_has_the_bits_of_training(&case, dtype, Spread { warps: 4, long: 1 }, 192);
    }
}

#[test]
fn wide_and_odd_heads_attend_as_in_training() {
    for_all_plans(&Case { heads: heads(2, 2, 128), groups: vec![group(65, &[2, 2])], window: Some(3) });
    for_all_plans(&Case { heads: heads(17, 1, 10), groups: vec![group(4, &[2, 1])], window: None });
    for_all_plans(&Case { heads: heads(3, 1, 256), groups: vec![group(7, &[2])], window: None });
}

#[test]
fn pages_return_when_rows_leave() {
    let Some(device) = device() else { return };
    let mut cache = Cache::new(&device, &heads(1, 1, 32), 1, Dtype::F32).unwrap();
    for _ in 0..20 {
        let prompt = cache.announce(&[200]).unwrap();
        cache.add_rows(prompt, 4, 10).unwrap();
        cache.close();
        cache.begin_step().unwrap();
        cache.in_step = false;
        cache.retain(&[false; 4]);
    }
    assert_eq!(cache.bytes(), 8 * 64 * 2 * 32 * 4);
}

#[test]
fn steps_out_of_order_are_refused() {
    let Some(device) = device() else { return };
    let mut cache = Cache::new(&device, &heads(1, 1, 32), 2, Dtype::F32).unwrap();
    let prompt = cache.announce(&[1]).unwrap();
    cache.add_rows(prompt, 2, 10).unwrap();
    assert!(cache.add_rows(prompt + 1, 1, 10).is_err());
    let buffer = device.zeros(2 * 96 * 4).unwrap();
    let (qkv, out) = (Rows::new(&buffer, 2, 96, Dtype::F32), Rows::new(&buffer, 2, 32, Dtype::F32));
    assert!(cache.attend(1, None, qkv, out).is_err());
    assert!(cache.attend(2, None, qkv, out).is_err());
    assert!(cache.attend(0, None, qkv.part(0..1), out.part(0..1)).is_err());
    assert!(cache.attend(0, None, qkv, Rows::new(&buffer, 2, 31, Dtype::F32)).is_err());
}

#[test]
fn steps_of_a_bucket_run_as_one_graph_while_rows_grow_and_leave() {
    let Some(device) = device() else { return };
    let (heads, dtype) = (heads(4, 2, 32), Dtype::Bf16);
    let (width, q_width) = (heads.width(), heads.q_width());
    let case = Case { heads, groups: vec![group(66, &[12, 12, 7])], window: None };
    let qkv = case.qkv(dtype);
    let expected = packed(&device, &case, &qkv, dtype);
    let mut cache = Cache::new(&device, &heads, 1, dtype).unwrap();
    cache.announce(&[66]).unwrap();
    let prompt = upload(&device, &qkv[..66 * width], dtype);
    cache.fill(0, 0, Rows::new(&prompt, 66, width, dtype)).unwrap();
    cache.add_rows(0, 3, 12).unwrap();
    cache.close();
    let mut live = vec![66, 78, 90];
    let rows = device.zeros(4 * width * 2).unwrap();
    let out = device.zeros(4 * q_width * 2).unwrap();
    let before = device.counters();
    for step in 0..12 {
        if step == 7 {
            cache.retain(&[true, true, false]);
            live.pop();
        }
        cache.begin_step().unwrap();
        let new = live.iter().flat_map(|begin| &qkv[(begin + step) * width..(begin + step + 1) * width]);
        let values: Vec<half::bf16> = new.map(|value| half::bf16::from_f32(*value)).collect();
        device.write(&rows, 0, &values).unwrap();
        let (of_rows, of_out) = (Rows::new(&rows, 4, width, dtype), Rows::new(&out, 4, q_width, dtype));
        device.graph(1, || cache.attend(0, None, of_rows, of_out)).unwrap();
        let actual = download(&device, &out, 4 * q_width, dtype);
        for (row, begin) in live.iter().enumerate() {
            let expected = &expected[(begin + step) * q_width..(begin + step + 1) * q_width];
            assert_eq!(&actual[row * q_width..(row + 1) * q_width], expected, "row {row}, step {step}");
        }
    }
    let after = device.counters();
    // Only the first step uploads its plan within the body.
    assert!(after.mismatches - before.mismatches <= 1, "{after:?}");
    assert!(after.replays - before.replays >= 9, "{after:?}");
}

#[test]
fn many_partial_results_are_folded_in_order() {
    // Prompts of five and six blocks, folded four at a time.
    let groups = vec![group(330, &[2, 2]), group(64 * 6, &[1])];
    for_all_plans(&Case { heads: heads(10, 1, 32), groups: groups.clone(), window: Some(200) });
    for_all_plans(&Case { heads: heads(2, 1, 64), groups, window: None });
}
