//! Tests of products on tiles. On machines without AMX the emulator executes the instructions.

pub(crate) mod emulator;

use super::*;

#[test]
fn the_shapes_of_the_start_up_check_agree_under_emulation() {
    if !emulator::install() {
        return;
    }
    for shape in [
        (1, 1, 1),
        (17, 65, 33),
        (33, 31, 70),
        (5, 100, 300),
        (70, 64, 32),
        (3, 33, 1100),
        (16, 96, 512),
        (521, 33, 1100),
        (550, 1300, 40),
    ] {
        let apart = crate::gemm::apart(Isa::Amx, Isa::Avx512, shape);
        assert!(apart <= 1e-3, "{shape:?}: {apart}");
    }
}

#[test]
fn inputs_are_rounded_to_the_nearest_bf16() {
    if !emulator::install() {
        return;
    }
    let one = crate::pack::PackedMatrix::new(&[1.0], 1, crate::pack::PackDtype::Bf16);
    let given = [1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, -3.0, f32::INFINITY, f32::from_bits(0x7fff_ffff)];
    let mut y = [0.0; 5];
    let term = crate::gemm::Term { x: &given, stride: 1, weight: &one };
    let out = crate::gemm::Output { y: &mut y, stride: 1, rows: 5, add: false };
    crate::gemm::forward_panels(Isa::Amx, &term, Default::default(), None, 0..1, out);
    assert_eq!(y[..4], [1.0, 1.015_625, -3.0, f32::INFINITY]);
    assert!(y[4].is_nan());
}
