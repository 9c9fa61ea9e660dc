//! Tasks of tokio, which compiles much code for each type of a task: here all tasks of one result have one type.

use std::any::Any;

use futures::TryFutureExt;
use futures::future::BoxFuture;
use tokio::task::{JoinError, JoinHandle};

type Work = Box<dyn FnOnce() -> Box<dyn Any + Send> + Send>;

/// Starts a task, as [`tokio::spawn`] does.
pub fn spawn<T: Send + 'static>(task: impl Future<Output = T> + Send + 'static) -> JoinHandle<T> {
    let task: BoxFuture<'static, T> = Box::pin(task);
    tokio::spawn(task)
}

/// Starts blocking work and returns its result, as [`tokio::task::spawn_blocking`] does.
///
/// # Errors
/// Returns an error if the work panicked or the runtime stops.
pub fn spawn_blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> impl Future<Output = Result<T, JoinError>> + Send + Unpin {
    let work: Work = Box::new(move || Box::new(work()));
    tokio::task::spawn_blocking(work).map_ok(|result| *result.downcast().expect("the result of the work has its type"))
}
