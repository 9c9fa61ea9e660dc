//! The tests run on the emulator if its feature is enabled, else on a GPU if there is one.

use super::super::rows::tests::{DTYPES, Given, assert_near, device};
use super::*;
use crate::rows::tests::assert_same;

const FORMS: [Form; 3] = [Form::Nt, Form::Nn, Form::Tn];
const TILES: [Tile; 3] = [Tile::Small, Tile::Middle, Tile::Large];
const THIN: [Tile; 2] = [Tile::Thin, Tile::ThinTall];

/// Operands of a product; `odd` ones cannot be read 16 bytes at a time.
fn operands(
    device: &Device,
    form: Form,
    (m, n, k): (usize, usize, usize),
    seed: u64,
    dtype: Dtype,
    odd: bool,
) -> (Given, Given) {
    let given = |(rows, width): (usize, usize), seed| match odd {
        true => Given::odd(device, rows, width, seed, dtype),
        false => Given::placed(device, (rows, width), (8, width.next_multiple_of(8)), seed, dtype),
    };
    let a = if form == Form::Tn { (k, m) } else { (m, k) };
    let b = if form == Form::Nt { (n, k) } else { (k, n) };
    (given(a, seed), given(b, seed + 1))
}

/// Computes a·b in f64, row by row.
fn naive(form: Form, (m, n, k): (usize, usize, usize), a: &Given, b: &Given) -> Vec<f64> {
    let (a, b) = (a.wide(), b.wide());
    let mut out = Vec::with_capacity(m * n);
    for row in 0..m {
        for column in 0..n {
            let left = |i: usize| if form == Form::Tn { a[i * m + row] } else { a[row * k + i] };
            let right = |i: usize| if form == Form::Nt { b[column * k + i] } else { b[i * n + column] };
            out.push((0..k).map(|i| left(i) * right(i)).sum());
        }
    }
    out
}

fn types(form: Form) -> Vec<(Dtype, Dtype)> {
    let mut types = DTYPES.map(|dtype| (dtype, Dtype::F32)).to_vec();
    if form != Form::Tn {
        types.push((Dtype::Bf16, Dtype::Bf16));
    }
    types
}

/// Tensor cores, which compute bf16, truncate the last bits of their sums instead of rounding.
fn tolerance(dtype: Dtype) -> f64 {
    if dtype == Dtype::Bf16 { 6e-6 } else { 2e-6 }
}

#[test]
fn products_are_the_naive_ones_in_every_tile() {
    let Some(device) = device() else { return };
    for sizes in
        [(1, 1, 1), (3, 5, 7), (16, 32, 64), (17, 40, 33), (70, 65, 100), (130, 140, 48), (9, 129, 130), (67, 9, 700)]
    {
        for form in FORMS {
            for ((dtype, out_type), odd) in types(form).into_iter().flat_map(|types| [(types, false), (types, true)]) {
                let (m, n, k) = sizes;
                let (a, b) = operands(&device, form, sizes, 1, dtype, odd);
                let expected = naive(form, sizes, &a, &b);
                let plain = Product::new(form, a.rows(), b.rows());
                let mut first: Option<Vec<f32>> = None;
                let mut first_thin: Option<Vec<f32>> = None;
                let thin = if (form, dtype) == (Form::Nt, Dtype::Bf16) { &THIN[..] } else { &[] };
                for tile in TILES.iter().chain(thin).copied() {
                    let what = format!("{sizes:?} {form:?} {dtype:?} to {out_type:?}, odd {odd}, {tile:?}");
                    let out = Given::odd(&device, m, n, 5, out_type);
                    exact(&device, tile, &plain, SplitK::whole(k), None, out.rows()).expect("a product");
                    let now = out.now(&device);
                    assert_near(&now, &expected, out_type, tolerance(dtype), &what);
                    let first = if THIN.contains(&tile) { &mut first_thin } else { &mut first };
                    assert_same(&now, first.get_or_insert(now.clone()), &what);
                }
                let out = Given::placed(&device, (m, n), (0, n), 6, out_type);
                product(&device, Gemm::Fast, &plain, out.rows()).expect("a product");
                assert_near(&out.now(&device), &expected, out_type, tolerance(dtype), "cuBLAS");
            }
        }
    }
}

#[test]
fn a_second_product_a_bias_and_a_residual_are_added() {
    let Some(device) = device() else { return };
    for (sizes, k2) in [((3, 5, 7), 2), ((17, 40, 33), 24), ((65, 130, 64), 16), ((20, 24, 40), 100)] {
        for form in FORMS {
            for (dtype, out_type) in types(form) {
                for gemm in [Gemm::Exact, Gemm::Fast] {
                    let (m, n, _) = sizes;
                    let what = format!("{sizes:?} + {k2} {form:?} {dtype:?} to {out_type:?}, {gemm:?}");
                    let (a, b) = operands(&device, form, sizes, 1, dtype, false);
                    let (a2, b2) = operands(&device, form, (m, n, k2), 3, dtype, true);
                    let bias = Given::placed(&device, (1, n), (1, n), 5, Dtype::F32);
                    let residual = Given::odd(&device, m, n, 6, Dtype::F32);
                    let (first, second) = (naive(form, sizes, &a, &b), naive(form, (m, n, k2), &a2, &b2));
                    let (bias_values, residual_values) = (bias.wide(), residual.wide());
                    let expected: Vec<f64> = (0..m * n)
                        .map(|i| 0.5 * (first[i] + second[i]) + bias_values[i % n] + residual_values[i])
                        .collect();
                    let whole = Product {
                        more: Some((a2.rows(), b2.rows())),
                        alpha: 0.5,
                        bias: Some(bias.rows()),
                        add: Some(residual.rows()),
                        ..Product::new(form, a.rows(), b.rows())
                    };
                    let out = Given::odd(&device, m, n, 7, out_type);
                    product(&device, gemm, &whole, out.rows()).expect("a product");
                    // The result of cuBLAS is rounded after each of three steps.
                    let tolerance = if (gemm, out_type) == (Gemm::Fast, Dtype::Bf16) { 1e-2 } else { tolerance(dtype) };
                    assert_near(&out.now(&device), &expected, out_type, tolerance, &what);
                    if out_type == Dtype::F32 {
                        product(&device, gemm, &whole, residual.rows()).expect("a product onto itself");
                        assert_near(&residual.now(&device), &expected, out_type, tolerance, &what);
                    }
                }
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_whatever_the_other_rows() {
    let Some(device) = device() else { return };
    let (m, n, k) = (200, 270, 136);
    for dtype in DTYPES {
        let (a, b) = operands(&device, Form::Nt, (m, n, k), 1, dtype, false);
        let (a2, b2) = operands(&device, Form::Nt, (m, n, 24), 3, dtype, false);
        let run = |rows: std::ops::Range<usize>| {
            let out = Given::new(&device, rows.len(), n, 5, Dtype::F32);
            let whole = Product {
                more: Some((a2.rows().part(rows.clone()), b2.rows())),
                ..Product::new(Form::Nt, a.rows().part(rows), b.rows())
            };
            product(&device, Gemm::Exact, &whole, out.rows()).expect("a product");
            out.now(&device)
        };
        let all = run(0..m);
        for rows in [0..1, 199..200, 3..20, 50..130, 7..199] {
            assert_same(&run(rows.clone()), &all[rows.start * n..rows.end * n], "some of the rows");
        }
    }
}

#[test]
fn a_row_of_few_columns_has_the_same_bits_whatever_the_other_rows() {
    let Some(device) = device() else { return };
    let (m, n, k) = (2100, 12, 150);
    let (a, b) = operands(&device, Form::Nt, (m, n, k), 1, Dtype::Bf16, false);
    let run = |rows: std::ops::Range<usize>| {
        let plain = Product::new(Form::Nt, a.rows().part(rows.clone()), b.rows());
        let out = Given::new(&device, rows.len(), n, 5, Dtype::F32);
        product(&device, Gemm::Exact, &plain, out.rows()).expect("a product");
        out.now(&device)
    };
    let all = run(0..m);
    for rows in [0..1, 2099..2100, 30..100] {
        assert_same(&run(rows.clone()), &all[rows.start * n..rows.end * n], "some of the rows");
    }
}

#[test]
fn a_single_line_may_lie_anywhere() {
    let Some(device) = device() else { return };
    for (m, n, k) in [(1, 5, 200), (5, 1, 200), (1, 1, 64)] {
        // The line itself is aligned to 16 bytes; the lines of the tile after it would not be.
        let line =
            |rows, seed| Given::placed(&device, (rows, k), (8, if rows == 1 { 203 } else { 208 }), seed, Dtype::Bf16);
        let (a, b) = (line(m, 1), line(n, 2));
        let plain = Product::new(Form::Nt, a.rows(), b.rows());
        let expected = naive(Form::Nt, (m, n, k), &a, &b);
        for tile in TILES.into_iter().chain(THIN) {
            let out = Given::new(&device, m, n, 3, Dtype::F32);
            exact(&device, tile, &plain, SplitK::whole(k), None, out.rows()).expect("a product");
            assert_near(&out.now(&device), &expected, Dtype::F32, tolerance(Dtype::Bf16), &format!("{tile:?}"));
        }
    }
}

#[test]
fn few_rows_are_one_launch_whose_rows_have_the_same_bits_alone() {
    let Some(device) = device() else { return };
    // One batch of steps and several, with and without a remainder; n and ranks that are not multiples of anything.
    let sizes = [
        (1, 21, 72, 4),
        (3, 40, 264, 8),
        (8, 1, 64, 48),
        (9, 13, 1032, 12),
        (16, 21, 1024, 48),
        (16, 9, 8, 200),
        (16, 9, 4400, 16),
        (2, 7, 4112, 0),
    ];
    for ((m, n, k, k2), odd) in sizes.into_iter().flat_map(|sizes| [(sizes, false), (sizes, true)]) {
        let (a, b) = operands(&device, Form::Nt, (m, n, k), 1, Dtype::Bf16, false);
        let (a2, b2) = operands(&device, Form::Nt, (m, n, k2.max(1)), 3, Dtype::Bf16, odd);
        let bias = Given::placed(&device, (1, n), (1, n), 5, Dtype::F32);
        let residual = Given::odd(&device, m, n, 6, Dtype::F32);
        let sums = naive(Form::Nt, (m, n, k), &a, &b);
        let more = if k2 == 0 { vec![0.0; m * n] } else { naive(Form::Nt, (m, n, k2), &a2, &b2) };
        let (bias_values, residual_values) = (bias.wide(), residual.wide());
        for (all, out_type) in [(false, Dtype::F32), (true, Dtype::F32), (true, Dtype::Bf16)] {
            let what = format!("{m} x {n} over {k} + {k2}, odd {odd}, everything {all}, to {out_type:?}");
            let run = |rows: std::ops::Range<usize>| {
                let whole = Product {
                    more: (k2 > 0).then(|| (a2.rows().part(rows.clone()), b2.rows())),
                    alpha: if all { 0.5 } else { 1.0 },
                    bias: all.then(|| bias.rows()),
                    add: all.then(|| residual.rows().part(rows.clone())),
                    settled: all,
                    ..Product::new(Form::Nt, a.rows().part(rows.clone()), b.rows())
                };
                let out = Given::odd(&device, rows.len(), n, 7, out_type);
                let before = device.counters();
                product(&device, Gemm::Fast, &whole, out.rows()).expect("a product");
                let after = device.counters();
                assert_eq!((after.launches - before.launches, after.products - before.products), (1, 0), "{what}");
                out.now(&device)
            };
            let now = run(0..m);
            let expected: Vec<f64> = (0..m * n)
                .map(|i| match all {
                    true => 0.5 * (sums[i] + more[i]) + bias_values[i % n] + residual_values[i],
                    false => sums[i] + more[i],
                })
                .collect();
            assert_near(&now, &expected, out_type, tolerance(Dtype::Bf16), &what);
            for row in [0, m / 2, m - 1] {
                assert_same(&run(row..row + 1), &now[row * n..(row + 1) * n], &what);
            }
        }
        let whole = Product { add: Some(residual.rows()), ..Product::new(Form::Nt, a.rows(), b.rows()) };
        product(&device, Gemm::Fast, &whole, residual.rows()).expect("a product onto itself");
        let expected: Vec<f64> = sums.iter().zip(&residual_values).map(|(sum, was)| sum + was).collect();
        assert_near(&residual.now(&device), &expected, Dtype::F32, tolerance(Dtype::Bf16), "onto itself");
    }
}

#[test]
fn products_of_few_rows_without_a_kernel_use_cublas() {
    let Some(device) = device() else { return };
    for (form, sizes, dtype, odd) in [
        (Form::Nt, (17, 9, 64), Dtype::Bf16, false),
        (Form::Nt, (3, 9, 60), Dtype::Bf16, false),
        (Form::Nt, (3, 9, 64), Dtype::Bf16, true),
        (Form::Nt, (3, 9, 64), Dtype::F32, false),
        (Form::Nn, (3, 9, 64), Dtype::Bf16, false),
    ] {
        let (a, b) = operands(&device, form, sizes, 1, dtype, odd);
        let out = Given::new(&device, sizes.0, sizes.1, 5, Dtype::F32);
        let before = device.counters().products;
        product(&device, Gemm::Fast, &Product::new(form, a.rows(), b.rows()), out.rows()).expect("a product");
        assert_eq!(device.counters().products - before, 1, "{form:?} {sizes:?} {dtype:?}, odd {odd}");
        assert_near(&out.now(&device), &naive(form, sizes, &a, &b), Dtype::F32, tolerance(dtype), "cuBLAS");
    }
}

#[test]
fn tiles_are_larger_where_there_are_enough_of_them() {
    assert_eq!(Tile::of(1, 100_000), Tile::Small);
    assert_eq!(Tile::of(64, 3072), Tile::Small);
    assert_eq!(Tile::of(512, 1024), Tile::Middle);
    assert_eq!(Tile::of(16384, 1024), Tile::Large);
    assert_eq!(Tile::of(16384, 48), Tile::Middle);
}

#[test]
fn gradients_of_weights_are_added_however_they_are_cut() {
    let Some(device) = device() else { return };
    for (m, n, k) in [(1, 1, 1), (6, 40, 300), (16, 130, 1000), (33, 7, 513), (70, 66, 600)] {
        for (dtype, gemm) in DTYPES.into_iter().flat_map(|dtype| [(dtype, Gemm::Exact), (dtype, Gemm::Fast)]) {
            let what = format!("{m} x {n} over {k}, {dtype:?}, {gemm:?}");
            let (a, b) = operands(&device, Form::Tn, (m, n, k), 1, dtype, false);
            let products = naive(Form::Tn, (m, n, k), &a, &b);
            let gradient = Given::placed(&device, (m, n), (5, n), 3, Dtype::F32);
            let expected: Vec<f64> = products.iter().zip(gradient.wide()).map(|(sum, was)| 0.5 * sum + was).collect();
            outer(&device, gemm, a.rows(), b.rows(), 0.5, gradient.rows()).expect("a gradient");
            let now = gradient.now(&device);
            assert_near(&now, &expected, Dtype::F32, tolerance(dtype), &what);

            // Computed again, and with the rows in two places: the bits are the same except for the
            // rounding of the parts.
            let again = Given::placed(&device, (m, n), (5, n), 3, Dtype::F32);
            outer(&device, gemm, a.rows(), b.rows(), 0.5, again.rows()).expect("a gradient");
            assert_same(&again.now(&device), &now, &what);
            let apart = Given::placed(&device, (m, n), (5, n + 3), 3, Dtype::F32);
            let expected: Vec<f64> = products.iter().zip(apart.wide()).map(|(sum, was)| 0.5 * sum + was).collect();
            let places = [apart.rows().part(0..m / 2), apart.rows().part(m / 2..m)];
            outer_parts(&device, gemm, a.rows(), b.rows(), 0.5, &places).expect("gradients");
            assert_near(&apart.now(&device), &expected, Dtype::F32, tolerance(dtype), &what);
        }
    }
}

#[test]
fn long_sums_are_cut_into_tiles_that_read_the_longer_operand_once() {
    let of = |m, n, k| {
        let (tile, split) = SplitK::of(m, n, k);
        (tile, split.parts, split.k_of_part)
    };
    // The shapes of LoRA's A and B, for three modules and for one.
    assert_eq!(of(48, 1024, 24576), (Tile::Middle, 17, 1472));
    assert_eq!(of(16, 1024, 24576), (Tile::Small, 9, 2752));
    assert_eq!(of(2048, 16, 24576), (Tile::Middle, 9, 2752));
    assert_eq!(of(16, 64, 16384), (Tile::Small, 64, 256));
    assert_eq!(of(256, 256, 16384), (Tile::Large, 64, 256));
    assert_eq!(of(1024, 3072, 16384), (Tile::Large, 2, 8192));
    assert_eq!(of(4096, 4096, 16384), (Tile::Large, 1, 16384));
    // Too few parts for larger tiles.
    assert_eq!(of(256, 256, 100), (Tile::Small, 1, 128));
    assert_eq!(of(16, 64, 100), (Tile::Small, 1, 128));
}

#[test]
fn gradients_of_few_rows_or_columns_are_our_own_in_fast_mode_too() {
    let Some(device) = device() else { return };
    for (m, n, dtype, odd, expected) in [
        (48, 100, Dtype::Bf16, false, (2, 0)),
        (100, 16, Dtype::Bf16, false, (2, 0)),
        (100, 16, Dtype::Bf16, true, (0, 1)),
        (48, 100, Dtype::F32, false, (0, 1)),
        (70, 66, Dtype::Bf16, false, (0, 1)),
    ] {
        let (a, b) = operands(&device, Form::Tn, (m, n, 600), 1, dtype, odd);
        let run = |gemm| {
            let gradient = Given::placed(&device, (m, n), (5, n), 3, Dtype::F32);
            let before = device.counters();
            outer(&device, gemm, a.rows(), b.rows(), 0.5, gradient.rows()).expect("a gradient");
            let after = device.counters();
            (gradient.now(&device), (after.launches - before.launches, after.products - before.products))
        };
        let (now, counts) = run(Gemm::Fast);
        assert_eq!(counts, expected, "{m} x {n} {dtype:?}, odd {odd}");
        if counts.1 == 0 {
            assert_same(&now, &run(Gemm::Exact).0, "exact and fast");
        }
    }
}

#[test]
fn operands_that_do_not_fit_are_refused() {
    let Some(device) = device() else { return };
    let (a, b) = (Given::new(&device, 3, 8, 1, Dtype::Bf16), Given::new(&device, 5, 8, 2, Dtype::Bf16));
    let (f32s, out) = (Given::new(&device, 5, 8, 3, Dtype::F32), Given::new(&device, 3, 5, 4, Dtype::F32));
    let narrow = Given::new(&device, 3, 4, 5, Dtype::F32);
    let right = Product::new(Form::Nt, a.rows(), b.rows());
    for gemm in [Gemm::Exact, Gemm::Fast] {
        assert!(product(&device, gemm, &right, out.rows()).is_ok());
        assert!(product(&device, gemm, &right, narrow.rows()).is_err());
        assert!(product(&device, gemm, &Product { form: Form::Nn, ..right }, out.rows()).is_err());
        assert!(product(&device, gemm, &Product { b: f32s.rows(), ..right }, out.rows()).is_err());
        assert!(product(&device, gemm, &Product { bias: Some(a.rows()), ..right }, out.rows()).is_err());
        assert!(product(&device, gemm, &Product { add: Some(narrow.rows()), ..right }, out.rows()).is_err());
        let beyond = Product { a: Rows { at: 1, ..a.rows() }, ..right };
        assert!(product(&device, gemm, &beyond, out.rows()).is_err());
    }
    let bf16s = Given::new(&device, 8, 8, 6, Dtype::Bf16);
    let into_bf16 = Product::new(Form::Tn, a.rows(), a.rows());
    assert!(product(&device, Gemm::Exact, &into_bf16, bf16s.rows()).is_err());
}
