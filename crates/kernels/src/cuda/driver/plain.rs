//! Values that are copied to the device as bytes: elements of buffers, and the parameter of a kernel.

use half::bf16;

mod sealed {
    pub trait Sealed {}
}

/// An element of a buffer: any bytes are a valid value, and it has no padding.
pub trait Plain: Copy + Default + Send + Sync + sealed::Sealed + 'static {}

macro_rules! plain {
    ($($type:ty),*) => { $(
        impl sealed::Sealed for $type {}
        impl Plain for $type {}
    )* };
}
plain!(u8, i8, u16, i16, u32, i32, u64, i64, f32, f64, bf16);

/// The bytes of `values`.
pub(in super::super) fn bytes<T: Plain>(values: &[T]) -> &[u8] {
    // SAFETY: Plain types have no padding, so all their bytes are initialized.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), std::mem::size_of_val(values)) }
}

/// The bytes of `values`, for writing.
pub(in super::super) fn bytes_mut<T: Plain>(values: &mut [T]) -> &mut [u8] {
    // SAFETY: there is no padding, and any bytes are a valid value of a Plain type.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), std::mem::size_of_val(values)) }
}

/// The parameter of a kernel: the same struct as in the device code, declared with [`params!`](super::params).
///
/// # Safety
/// The type is `#[repr(C)]` and `Copy`, without padding.
pub unsafe trait Params: Copy + 'static {}

/// The bytes of a kernel's parameter.
pub(in super::super) fn param_bytes<P: Params>(params: &P) -> &[u8] {
    // SAFETY: Params types have no padding.
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(params).cast(), size_of::<P>()) }
}

/// Declares the parameter of a kernel; fields in the order of the struct in the device code, those of 8 bytes first.
/// Does not compile if there were padding: then add a `pad: u32` on both sides.
///
/// ```ignore
/// params! {
///     struct Scale { x: u64, y: u64, factor: f32, count: u32 }
/// }
/// ```
macro_rules! params {
    ($(#[$attribute:meta])* $visibility:vis struct $name:ident { $($field:ident : $type:ty),* $(,)? }) => {
        $(#[$attribute])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug)]
        $visibility struct $name { $($field: $type),* }
        const _: () = assert!(
            size_of::<$name>() == 0 $(+ size_of::<$type>())*,
            "a kernel's parameter has padding: put members of 8 bytes first, and end with `pad: u32` where it is needed"
        );
        // SAFETY: the type is repr(C) and Copy, and its fields fill it.
        unsafe impl $crate::cuda::driver::Params for $name {}
    };
}
pub(in super::super) use params;
