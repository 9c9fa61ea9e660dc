//! Run on the emulator under its feature, else on a GPU where there is one.

use super::*;

params! { struct Scale { x: u64, y: u64, factor: f32, count: u32 } }

fn device() -> Option<Device> {
    Device::open(0).ok()
}

#[test]
fn a_kernel_runs_by_its_name() {
    let Some(device) = device() else { return };
    let x = device.upload(&[1.0_f32, 2.0, 3.0]).unwrap();
    let y = device.zeros(12).unwrap();
    let params = Scale { x: x.pointer(), y: y.pointer(), factor: 2.0, count: 3 };
    device.launch("scale_f32", Launch { grid: [1, 1, 1], block: 32, shared: 0 }, &params).unwrap();
    assert_eq!(device.download::<f32>(&y, 0, 3).unwrap(), [2.0, 4.0, 6.0]);
}
