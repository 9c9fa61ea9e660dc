//! Bodies: repeated work such as a decode step, recorded in its first run and started as one CUDA graph in later runs.

use std::mem;

use super::super::list::List;
use super::{Mode, Queue};
use crate::cuda::device_api::{CudaError, Graph, Staging};

/// Maximum number of remembered bodies; the one not run for the longest time is dropped first. That is more than twice
/// the number of batch sizes that a batch of up to 4,096 rows passes through (`bucket`), and few enough that their
/// graphs fit into the memory that buffers leave free.
const MOST_BODIES: usize = 128;

/// The recorded work of a body.
#[derive(Debug)]
pub(super) struct Body {
    pub(super) list: List,
    pub(super) staging: Option<Staging>,
    /// The CUDA graph: None before the second run, `Some(None)` if the operations must be executed individually.
    graph: Option<Option<Box<dyn Graph>>>,
    last_run: u64,
}

impl Queue {
    pub(in super::super) fn begin(&mut self, key: u64) -> Result<(), CudaError> {
        if !matches!(self.mode, Mode::Direct) {
            return Err(CudaError::Input(
                "a recorded sequence of GPU operations must not begin within another one".to_owned(),
            ));
        }
        if !self.graphs || self.profile.is_some() {
            return Ok(());
        }
        self.mode = match self.bodies.remove(&key) {
            Some(body) => Mode::Comparing { body: Box::new(body), next: 0, settled: false },
            None => Mode::Recording { list: List::default(), staging: None },
        };
        Ok(())
    }

    pub(in super::super) fn finish(&mut self, key: u64) -> Result<(), CudaError> {
        if let Mode::Comparing { body, next, .. } = &self.mode
            && *next < body.list.ops.len()
        {
            self.execute_held_back()?;
        }
        self.runs += 1;
        let body = match mem::take(&mut self.mode) {
            Mode::Direct => return Ok(()),
            Mode::Recording { list, staging } => match self.remember(list, staging)? {
                Some(body) => body,
                None => return Ok(()),
            },
            Mode::Comparing { body, .. } => self.start(*body)?,
        };
        if self.bodies.len() >= MOST_BODIES
            && let Some(oldest) = self.bodies.iter().min_by_key(|(_, body)| body.last_run).map(|(key, _)| *key)
            && let Some(forgotten) = self.bodies.remove(&oldest)
        {
            self.forget(forgotten.staging)?;
        }
        self.bodies.insert(key, body);
        Ok(())
    }

    /// Stores a recorded body, with staging memory for its next run.
    fn remember(&mut self, list: List, staging: Option<Staging>) -> Result<Option<Body>, CudaError> {
        if list.waited {
            self.forget(staging)?;
            return Ok(None);
        }
        let needed = list.staged as usize;
        let staging = match staging {
            Some(staging) if staging.bytes >= needed => Some(staging),
            staging => {
                self.forget(staging)?;
                if needed > 0 { Some(self.driver.stage(needed)?) } else { None }
            }
        };
        Ok(Some(Body { list, staging, graph: None, last_run: self.runs }))
    }

    /// Runs a body whose operations all matched the recorded ones.
    fn start(&mut self, mut body: Body) -> Result<Body, CudaError> {
        let graph = match body.graph.take() {
            Some(graph) => Some(graph),
            None => match body.list.capture(&mut *self.driver, body.staging.as_ref()) {
                Ok(graph) => {
                    self.counters.captures += 1;
                    Some(graph)
                }
                // Other CUDA graphs occupy the memory that this one needs: drop them; the next run tries again.
                Err(CudaError::OutOfMemory { .. }) if !self.bodies.is_empty() => {
                    self.counters.capture_failures += 1;
                    self.forget_bodies();
                    None
                }
                Err(_) => {
                    self.counters.capture_failures += 1;
                    Some(None)
                }
            },
        };
        let run = graph.as_ref().and_then(Option::as_deref);
        let mut outcome = body.list.replay(run, &mut *self.driver, body.staging.as_ref());
        if let (Ok(()), Some(staging)) = (&outcome, &mut body.staging) {
            outcome = self.driver.used(staging);
        }
        if let Err(error) = self.note_out_of_memory(outcome) {
            // Operations that were started may still read the staging memory, so wait; an error here would add no
            // information to the first one.
            let _ = self.driver.synchronize();
            let _ = self.forget(body.staging);
            return Err(error);
        }
        self.counters.replays += 1;
        body.graph = graph;
        body.last_run = self.runs;
        Ok(body)
    }

    /// Executes the operations held back of a body that failed or panicked.
    pub(in super::super) fn abandon(&mut self) {
        if let Err(error) = self.driver.enter() {
            self.failure.get_or_insert(error);
        }
        if let Err(error) = self.execute_held_back() {
            self.failure.get_or_insert(error);
        }
        if let Mode::Recording { staging, .. } = mem::take(&mut self.mode)
            && let Err(error) = self.forget(staging)
        {
            self.failure.get_or_insert(error);
        }
    }

    fn forget(&mut self, staging: Option<Staging>) -> Result<(), CudaError> {
        if let Some(staging) = staging {
            self.driver.settle(&staging)?;
            self.driver.unstage(staging);
        }
        Ok(())
    }

    pub(super) fn forget_bodies(&mut self) {
        for (_, body) in mem::take(&mut self.bodies) {
            if let Err(error) = self.forget(body.staging) {
                self.failure.get_or_insert(error);
            }
        }
    }
}
