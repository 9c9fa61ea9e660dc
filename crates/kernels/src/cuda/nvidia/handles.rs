//! Handles of the driver that outlive the call which created them: graphs, and the events of a timer.

use cudarc::driver::{result, sys};

use super::{driver_result, of_driver};
use crate::cuda::device_api::{CudaError, Graph, Timer};

/// An executable graph for its device's stream.
#[derive(Debug)]
pub(super) struct GraphExec {
    pub(super) graph: sys::CUgraphExec,
    pub(super) stream: sys::CUstream,
}

// SAFETY: handles of the driver belong to no thread.
unsafe impl Send for GraphExec {}

impl Graph for GraphExec {
    fn start(&self) -> Result<(), CudaError> {
        // SAFETY: graph and stream belong to the same device, which is open.
        unsafe { result::graph::launch(self.graph, self.stream) }.map_err(|error| of_driver("cuGraphLaunch", error))
    }
}

impl Drop for GraphExec {
    fn drop(&mut self) {
        // SAFETY: created by `end_capture` and destroyed once; the driver keeps it until a current run has ended.
        let _ = unsafe { result::graph::exec_destroy(self.graph) };
    }
}

/// A point in a stream's work: a CUDA event.
#[derive(Debug)]
struct Stamp(sys::CUevent);

// SAFETY: handles of the driver belong to no thread.
unsafe impl Send for Stamp {}

impl Stamp {
    /// Records an event at the current end of the stream.
    fn now(stream: sys::CUstream) -> Result<Stamp, CudaError> {
        let event = driver_result("cuEventCreate", result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT))?;
        let stamp = Stamp(event);
        // SAFETY: event and stream belong to the same device.
        driver_result("cuEventRecord", unsafe { result::event::record(event, stream) })?;
        Ok(stamp)
    }
}

impl Drop for Stamp {
    fn drop(&mut self) {
        // SAFETY: `now` created the event, which is destroyed once.
        let _ = unsafe { result::event::destroy(self.0) };
    }
}

/// A timer between two points in a stream's work.
#[derive(Debug)]
pub(super) struct EventPair {
    stream: sys::CUstream,
    from: Stamp,
    to: Option<Stamp>,
}

// SAFETY: handles of the driver belong to no thread.
unsafe impl Send for EventPair {}

impl EventPair {
    /// Starts the timer: records its first point.
    pub(super) fn begin(stream: sys::CUstream) -> Result<EventPair, CudaError> {
        Ok(EventPair { stream, from: Stamp::now(stream)?, to: None })
    }
}

impl Timer for EventPair {
    fn stop(&mut self) -> Result<(), CudaError> {
        self.to = Some(Stamp::now(self.stream)?);
        Ok(())
    }

    fn seconds(&self) -> Result<f64, CudaError> {
        let Some(to) = &self.to else {
            return Err(CudaError::Failed("the timer of GPU operations was not stopped".to_owned()));
        };
        // SAFETY: both events belong to the same device.
        let milliseconds = driver_result("cuEventElapsedTime", unsafe {
            result::event::synchronize(to.0).and_then(|()| result::event::elapsed(self.from.0, to.0))
        })?;
        Ok(f64::from(milliseconds) / 1e3)
    }
}
