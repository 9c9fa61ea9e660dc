//! What is asked of a device, carried out at once, noted down, or compared with what was noted.

mod bodies;

use std::collections::HashMap;
use std::mem;

use super::list::{List, Op};
use super::pool::{Memory, Pool};
use super::profile::{Profile, Timing};
use crate::cuda::device_api::{CudaError, Driver, Found, Launch, Staging};
use bodies::Body;

/// How much was asked of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Kernels started one by one.
    pub launches: u64,
    /// Products by cuBLAS started one by one.
    pub products: u64,
    /// Copies from the host started one by one.
    pub uploads: u64,
    /// Times that the host waited for the device.
    pub waits: u64,
    /// Graphs made.
    pub captures: u64,
    /// Bodies run as a graph.
    pub replays: u64,
    /// Bodies that differed from their last run.
    pub mismatches: u64,
    /// Graphs that could not be made: their work is then started one by one.
    pub capture_failures: u64,
    /// Buffers made.
    pub allocations: u64,
}

#[derive(Debug, Default)]
enum Mode {
    #[default]
    Direct,
    /// Carry out, and note.
    Noting { list: List, staging: Option<Staging> },
    /// Compare; `next` ops were as noted. `settled`: the staging memory may be overwritten.
    Comparing { body: Box<Body>, next: usize, settled: bool },
}

/// The one stream of a device.
#[derive(Debug)]
pub(super) struct Queue {
    driver: Box<dyn Driver>,
    pool: Pool,
    kernels: HashMap<String, Found>,
    mode: Mode,
    bodies: HashMap<u64, Body>,
    graphs: bool,
    runs: u64,
    /// Allocations until one is refused.
    refuse_after: Option<u64>,
    /// What went wrong where nobody could be told.
    failure: Option<CudaError>,
    /// There was no room for something since memory was last given back.
    is_short: bool,
    counters: Counters,
    profile: Option<Profile>,
    /// Memory for downloads that are waited for later.
    landings: Vec<Staging>,
}

/// Downloads up to this size use the same memory again.
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

    /// Before each call: bind the device to the thread, and tell what failed since the last one.
    pub(super) fn enter(&mut self) -> Result<(), CudaError> {
        self.bind()?;
        self.failure.take().map_or(Ok(()), Err)
    }

    /// Bind the device to the thread, where nobody can be told of a failure.
    pub(super) fn bind(&mut self) -> Result<(), CudaError> {
        self.driver.enter()
    }

    /// Remember where there was no room.
    fn noticed<T>(&mut self, outcome: Result<T, CudaError>) -> Result<T, CudaError> {
        self.is_short |= matches!(outcome, Err(CudaError::OutOfMemory { .. }));
        outcome
    }

    /// Whether the op is the next one of a body that is compared. If it is another one, the body is compared no longer.
    fn elided(&mut self, same: impl FnOnce(&List, usize) -> bool) -> Result<bool, CudaError> {
        let Mode::Comparing { body, next, .. } = &mut self.mode else { return Ok(false) };
        if same(&body.list, *next) {
            *next += 1;
            return Ok(true);
        }
        self.catch_up()?;
        Ok(false)
    }

    /// Carry out what was held back, and note the rest.
    fn catch_up(&mut self) -> Result<(), CudaError> {
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
        self.mode = Mode::Noting { list, staging };
        issued.and(used)
    }

    fn note(&mut self, write: impl FnOnce(&mut List)) {
        if let Mode::Noting { list, .. } = &mut self.mode {
            write(list);
        }
    }

    /// An op without bytes of its own.
    pub(super) fn ask(&mut self, op: Op) -> Result<(), CudaError> {
        if self.elided(|list, next| list.ops.get(next) == Some(&op))? {
            return Ok(());
        }
        let label = match op {
            Op::Product(_) => "cublas",
            Op::Zero { .. } => "zero",
            _ => "copy",
        };
        let asked = Profile::timed(&mut self.profile, &mut *self.driver, label, |driver| op.carry_out(driver));
        self.noticed(asked)?;
        self.counters.products += u64::from(matches!(op, Op::Product(_)));
        self.note(|list| list.ops.push(op));
        Ok(())
    }

    pub(super) fn launch(&mut self, kernel: &str, launch: Launch, params: &[u8]) -> Result<(), CudaError> {
        let found = match self.kernels.get(kernel) {
            Some(found) => *found,
            None => {
                let found = self.driver.find(kernel);
                let found = self.noticed(found)?;
                self.kernels.insert(kernel.to_owned(), found);
                found
            }
        };
        if let Some(bytes) = found.param_bytes
            && bytes != params.len()
        {
            let given = params.len();
            return Err(CudaError::Input(format!("{kernel}: a parameter of {given} bytes, the kernel takes {bytes}")));
        }
        if launch.block == 0 || !launch.block.is_multiple_of(32) || launch.block > 1024 {
            return Err(CudaError::Input(format!(
                "{kernel}: {} threads are not a multiple of 32 up to 1024",
                launch.block
            )));
        }
        if launch.grid.contains(&0) {
            return Ok(());
        }
        if launch.grid[1] > 65535 || launch.grid[2] > 65535 || launch.grid[0] > i32::MAX as u32 {
            return Err(CudaError::Input(format!("{kernel}: a grid of {:?} blocks", launch.grid)));
        }
        if self.elided(|list, next| list.is_launch(next, found.kernel, launch, params))? {
            return Ok(());
        }
        let launched = Profile::timed(&mut self.profile, &mut *self.driver, kernel, |driver| {
            driver.launch(found.kernel, launch, params)
        });
        self.noticed(launched)?;
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
        self.catch_up()?;
        Profile::timed(&mut self.profile, &mut *self.driver, "upload", |driver| driver.upload(to, bytes))?;
        self.counters.uploads += 1;
        self.note(|list| list.upload(to, size));
        Ok(())
    }

    /// The addresses of a buffer, and the size of its block.
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
        self.catch_up()?;
        let at = match self.pool.take(block, &mut *self.driver) {
            // Graphs take memory of the driver's.
            Err(CudaError::OutOfMemory { .. }) if !self.bodies.is_empty() => {
                self.forget_bodies();
                self.pool.take(block, &mut *self.driver)
            }
            taken => taken,
        };
        let at = self.noticed(at)?;
        let op = Op::Born { at, block, bytes };
        if let Err(error) = op.carry_out(&mut *self.driver) {
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
            && let Err(error) = self.ask(Op::Dropped { at, block, bytes })
        {
            self.failure.get_or_insert(error);
        }
        self.pool.give(at, block);
    }

    pub(super) fn download(&mut self, from: u64, to: &mut [u8]) -> Result<(), CudaError> {
        self.wait()?;
        self.driver.download(from, to)
    }

    /// Start a download. What it copies to comes back by `land`.
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

    /// Wait for a download that was started, and read it unless nobody wants it any more.
    pub(super) fn land(&mut self, staging: Staging, to: Option<&mut [u8]>) -> Result<(), CudaError> {
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
        self.catch_up()?;
        self.note(|list| list.waited = true);
        self.counters.waits += 1;
        Ok(())
    }

    /// A body whose buffers then come to lie where they were is still what its graph was made of; but where there was no
    /// room, graphs make some too.
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
        // Errors have nobody left to be told to; the driver ends with its process or is already lost.
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
