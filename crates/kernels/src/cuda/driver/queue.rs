//! The queue of a device: operations are executed immediately, recorded, or compared with the recorded ones of a body
//! that may run as a graph.

mod bodies;

use std::collections::HashMap;
use std::mem;

use super::list::{List, Op};
use super::pool::{Memory, Pool};
use super::profile::{Profile, Timing};
use crate::cuda::device_api::{CudaError, Driver, Found, Launch, Staging};
use bodies::Body;

/// Counts of the work submitted to a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Number of kernels started individually, not in a graph.
    pub launches: u64,
    /// Number of cuBLAS products started individually, not in a graph.
    pub products: u64,
    /// Number of uploads started individually, not in a graph.
    pub uploads: u64,
    /// Number of times the host waited for the device.
    pub waits: u64,
    /// Number of CUDA graphs created.
    pub captures: u64,
    /// Number of runs of a body as a CUDA graph.
    pub replays: u64,
    /// Number of runs of a body whose operations differed from its last run.
    pub mismatches: u64,
    /// Number of CUDA graphs that could not be created; their work is then started individually.
    pub capture_failures: u64,
    /// Number of buffers created.
    pub allocations: u64,
}

#[derive(Debug, Default)]
enum Mode {
    #[default]
    Direct,
    /// Executes operations and records them for a later graph.
    Recording { list: List, staging: Option<Staging> },
    /// Compares operations with those of a recorded body; the first `next` operations matched. `settled` says whether
    /// the staging memory may be overwritten.
    Comparing { body: Box<Body>, next: usize, settled: bool },
}

/// The queue of a device's single stream.
#[derive(Debug)]
pub(super) struct Queue {
    driver: Box<dyn Driver>,
    pool: Pool,
    kernels: HashMap<String, Found>,
    mode: Mode,
    bodies: HashMap<u64, Body>,
    graphs: bool,
    runs: u64,
    /// Number of allocations until one is refused, for tests.
    refuse_after: Option<u64>,
    /// An error that occurred where no call could return it, such as in a drop; the next call returns it.
    failure: Option<CudaError>,
    /// Whether an allocation failed since unused memory was last given back to the driver.
    is_short: bool,
    counters: Counters,
    profile: Option<Profile>,
    /// Host memory for downloads that the caller waits for later.
    landings: Vec<Staging>,
}

/// Maximum size in bytes of downloads whose host memory is reused.
const LANDING_BYTES: usize = 1 << 20;

impl Queue {
    pub(super) fn new(driver: Box<dyn Driver>, memory_bytes: u64) -> Queue {
        Queue {
            driver,
            pool: Pool::new(memory_bytes),
            kernels: HashMap::new(),
            mode: Mode::Direct,
            bodies: HashMap::new(),
            graphs: std::env::var_os("RLOOD_CUDA_GRAPHS").is_none_or(|value| value != "0"),
            runs: 0,
            refuse_after: None,
            failure: None,
            is_short: false,
            counters: Counters::default(),
            profile: None,
            landings: Vec::new(),
        }
    }

    /// Starts each call to the device: makes it current for the thread, and returns an error that occurred
    /// since the last call.
    pub(super) fn enter(&mut self) -> Result<(), CudaError> {
        self.bind()?;
        self.failure.take().map_or(Ok(()), Err)
    }

    /// Makes the device current for the thread, in places such as a drop that cannot return an earlier error.
    pub(super) fn bind(&mut self) -> Result<(), CudaError> {
        self.driver.enter()
    }

    /// Notes whether the result of an operation is an out-of-memory error.
    fn note_out_of_memory<T>(&mut self, outcome: Result<T, CudaError>) -> Result<T, CudaError> {
        self.is_short |= matches!(outcome, Err(CudaError::OutOfMemory { .. }));
        outcome
    }

    /// Whether the operation is the next one of the recorded body. If it differs, the comparison ends.
    fn matches_recorded(&mut self, same: impl FnOnce(&List, usize) -> bool) -> Result<bool, CudaError> {
        let Mode::Comparing { body, next, .. } = &mut self.mode else { return Ok(false) };
        if same(&body.list, *next) {
            *next += 1;
            return Ok(true);
        }
        self.execute_held_back()?;
        Ok(false)
    }

    /// Executes the operations that matched the recorded body so far, and switches to recording.
    fn execute_held_back(&mut self) -> Result<(), CudaError> {
        let (body, next) = match mem::take(&mut self.mode) {
            Mode::Comparing { body, next, .. } => (body, next),
            other => {
                self.mode = other;
                return Ok(());
            }
        };
        self.counters.mismatches += 1;
        let Body { mut list, mut staging, .. } = *body;
        list.truncate(next);
        let issued = list.issue(&mut *self.driver, staging.as_ref());
        let used = staging.as_mut().map_or(Ok(()), |staging| self.driver.used(staging));
        self.mode = Mode::Recording { list, staging };
        issued.and(used)
    }

    fn note(&mut self, write: impl FnOnce(&mut List)) {
        if let Mode::Recording { list, .. } = &mut self.mode {
            write(list);
        }
    }

    /// Submits an operation that needs no parameter and no uploaded bytes.
    pub(super) fn submit(&mut self, op: Op) -> Result<(), CudaError> {
        if self.matches_recorded(|list, next| list.ops.get(next) == Some(&op))? {
            return Ok(());
        }
        let label = match op {
            Op::Product(_) => "cublas",
            Op::Zero { .. } => "zero",
            _ => "copy",
        };
        let asked = Profile::timed(&mut self.profile, &mut *self.driver, label, |driver| op.execute(driver));
        self.note_out_of_memory(asked)?;
        self.counters.products += u64::from(matches!(op, Op::Product(_)));
        self.note(|list| list.ops.push(op));
        Ok(())
    }

    pub(super) fn launch(&mut self, kernel: &str, launch: Launch, params: &[u8]) -> Result<(), CudaError> {
        let found = match self.kernels.get(kernel) {
            Some(found) => *found,
            None => {
                let found = self.driver.find(kernel);
                let found = self.note_out_of_memory(found)?;
                self.kernels.insert(kernel.to_owned(), found);
                found
            }
        };
        if let Some(bytes) = found.param_bytes
            && bytes != params.len()
        {
            let given = params.len();
            return Err(CudaError::Input(format!(
                "{kernel}: the parameter has {given} bytes, but the kernel takes {bytes}"
            )));
        }
        if launch.block == 0 || !launch.block.is_multiple_of(32) || launch.block > 1024 {
            return Err(CudaError::Input(format!(
                "{kernel}: a block must have a multiple of 32 threads, at most 1024, not {}",
                launch.block
            )));
        }
        if launch.grid.contains(&0) {
            return Ok(());
        }
        if launch.grid[1] > 65535 || launch.grid[2] > 65535 || launch.grid[0] > i32::MAX as u32 {
            return Err(CudaError::Input(format!("{kernel}: the grid of {:?} blocks is too large", launch.grid)));
        }
        if self.matches_recorded(|list, next| list.is_launch(next, found.kernel, launch, params))? {
            return Ok(());
        }
        let launched = Profile::timed(&mut self.profile, &mut *self.driver, kernel, |driver| {
            driver.launch(found.kernel, launch, params)
        });
        self.note_out_of_memory(launched)?;
        self.counters.launches += 1;
        self.note(|list| list.launch(found.kernel, launch, params));
        Ok(())
    }

    pub(super) fn upload(&mut self, to: u64, bytes: &[u8]) -> Result<(), CudaError> {
        let size = bytes.len() as u64;
        if let Mode::Comparing { body, next, settled } = &mut self.mode
            && let Some(at) = body.list.is_upload(*next, to, size)
            && let Some(staging) = &mut body.staging
        {
            if !*settled {
                self.driver.settle(staging)?;
                *settled = true;
            }
            staging.fill(at as usize, bytes);
            *next += 1;
            return Ok(());
        }
        self.execute_held_back()?;
        Profile::timed(&mut self.profile, &mut *self.driver, "upload", |driver| driver.upload(to, bytes))?;
        self.counters.uploads += 1;
        self.note(|list| list.upload(to, size));
        Ok(())
    }

    /// Allocates memory for a buffer; returns its address and the size of its block.
    pub(super) fn alloc(&mut self, bytes: u64) -> Result<(u64, u64), CudaError> {
        let guard = self.driver.guard();
        let block = bytes.checked_add(2 * guard).and_then(Pool::block).ok_or_else(|| {
            let Memory { used, total, .. } = self.pool.memory();
            CudaError::OutOfMemory { requested: bytes, used, total }
        })?;
        if let Some(left) = &mut self.refuse_after {
            if *left == 0 {
                self.refuse_after = None;
                let Memory { used, total, .. } = self.pool.memory();
                return Err(CudaError::OutOfMemory { requested: block, used, total });
            }
            *left -= 1;
        }
        self.counters.allocations += 1;
        if let Mode::Comparing { body, next, .. } = &mut self.mode
            && let Some(&Op::Born { at, block: noted, bytes: size }) = body.list.ops.get(*next)
            && (noted, size) == (block, bytes)
            && self.pool.take_at(at, block)
        {
            *next += 1;
            return Ok((at + guard, block));
        }
        self.execute_held_back()?;
        let at = match self.pool.take(block, &mut *self.driver) {
            // CUDA graphs use driver memory, so drop them and try again.
            Err(CudaError::OutOfMemory { .. }) if !self.bodies.is_empty() => {
                self.forget_bodies();
                self.pool.take(block, &mut *self.driver)
            }
            taken => taken,
        };
        let at = self.note_out_of_memory(at)?;
        let op = Op::Born { at, block, bytes };
        if let Err(error) = op.execute(&mut *self.driver) {
            self.pool.give(at, block);
            return Err(error);
        }
        self.note(|list| list.ops.push(op));
        Ok((at + guard, block))
    }

    pub(super) fn drop_buffer(&mut self, pointer: u64, block: u64, bytes: u64) {
        let guard = self.driver.guard();
        let at = pointer - guard;
        if guard > 0
            && let Err(error) = self.submit(Op::Dropped { at, block, bytes })
        {
            self.failure.get_or_insert(error);
        }
        self.pool.give(at, block);
    }

    pub(super) fn download(&mut self, from: u64, to: &mut [u8]) -> Result<(), CudaError> {
        self.wait()?;
        self.driver.download(from, to)
    }

    /// Starts a download from the device. Pass the returned memory to `finish_download`.
    pub(super) fn fetch(&mut self, from: u64, bytes: usize) -> Result<Staging, CudaError> {
        self.wait()?;
        let mut staging = match bytes > LANDING_BYTES {
            true => self.driver.stage(bytes)?,
            false => match self.landings.pop() {
                Some(staging) => staging,
                None => self.driver.stage(LANDING_BYTES)?,
            },
        };
        self.driver.fetch(from, &mut staging, bytes)?;
        Ok(staging)
    }

    /// Waits for a download, and reads it if `to` is given.
    pub(super) fn finish_download(&mut self, staging: Staging, to: Option<&mut [u8]>) -> Result<(), CudaError> {
        self.driver.settle(&staging)?;
        if let Some(to) = to {
            staging.read(to);
        }
        match staging.bytes > LANDING_BYTES {
            true => self.driver.unstage(staging),
            false => self.landings.push(staging),
        }
        Ok(())
    }

    pub(super) fn start_profile(&mut self) {
        self.profile = Some(Profile::default());
    }

    pub(super) fn take_profile(&mut self) -> Result<Vec<Timing>, CudaError> {
        match self.profile.take() {
            Some(profile) => profile.timings(),
            None => Ok(Vec::new()),
        }
    }

    pub(super) fn synchronize(&mut self) -> Result<(), CudaError> {
        self.wait()?;
        self.driver.synchronize()
    }

    fn wait(&mut self) -> Result<(), CudaError> {
        self.execute_held_back()?;
        self.note(|list| list.waited = true);
        self.counters.waits += 1;
        Ok(())
    }

    /// Gives unused memory back to the driver. Graphs of bodies stay valid if the bodies' buffers get the same
    /// addresses again; but if an allocation failed, the graphs are dropped too.
    pub(super) fn trim(&mut self) {
        match self.is_short {
            true => self.trim_all(),
            false => self.pool.trim(&mut *self.driver),
        }
    }

    fn trim_all(&mut self) {
        self.is_short = false;
        self.forget_bodies();
        self.pool.trim_all(&mut *self.driver);
    }

    pub(super) fn set_graphs(&mut self, on: bool) {
        self.graphs = on;
    }

    pub(super) fn memory(&self) -> Memory {
        self.pool.memory()
    }

    pub(super) fn reset_peak(&mut self) {
        self.pool.reset_peak();
    }

    pub(super) fn set_memory_limit(&mut self, bytes: Option<u64>) {
        self.pool.set_limit(bytes);
    }

    pub(super) fn inject_out_of_memory(&mut self, allocations: u64) {
        self.refuse_after = Some(allocations);
    }

    pub(super) fn counters(&self) -> Counters {
        self.counters
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        // Errors cannot be reported any more: the process is ending, or the device has already failed.
        if self.driver.enter().is_ok() {
            let _ = self.driver.synchronize();
            self.profile = None;
            for staging in self.landings.drain(..) {
                self.driver.unstage(staging);
            }
            self.trim_all();
        }
    }
}
