//! What can go wrong on a device.

use std::fmt;

/// An error of a device, by what its caller can do about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CudaError {
    /// There is no room for a buffer, also after the pooled memory was given back. The device goes on working.
    OutOfMemory {
        /// Bytes of the buffer; 0: the driver has no room for what a kernel itself needs.
        requested: u64,
        /// Bytes that live buffers hold.
        used: u64,
        /// Bytes that the device has, or may use.
        total: u64,
    },
    /// This build or machine cannot run on such a device: no driver, no cuBLAS, no GPU, or no kernels in the build.
    Unavailable(String),
    /// Anything else: the device's context is lost, and the process must end.
    Failed(String),
    /// The caller asked for something that makes no sense: a range outside a buffer, an unknown kernel.
    Input(String),
}

impl fmt::Display for CudaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CudaError::OutOfMemory { requested: 0, used, total } => {
                write!(
                    f,
                    "out of device memory: no room for what a kernel itself needs, {used} bytes in use of {total}"
                )
            }
            CudaError::OutOfMemory { requested, used, total } => {
                write!(f, "out of device memory: {requested} bytes asked for, {used} in use of {total}")
            }
            CudaError::Unavailable(why) | CudaError::Input(why) => f.write_str(why),
            CudaError::Failed(why) => write!(f, "the device failed: {why}"),
        }
    }
}

impl std::error::Error for CudaError {}
