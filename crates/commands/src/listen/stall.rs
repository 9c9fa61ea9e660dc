//! A stream whose writes fail when the peer does not read for too long.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep};

/// A stream with a time limit for each write.
pub(super) struct Stalling<T> {
    stream: T,
    limit: Duration,
    /// Timer of a pending write; None while no write is pending.
    patience: Option<Pin<Box<Sleep>>>,
}

impl<T> Stalling<T> {
    pub(super) fn new(stream: T, limit: Duration) -> Self {
        Self { stream, limit, patience: None }
    }

    /// Returns the result of polling a write, or an error if the write has been pending for longer than the limit.
    fn watched<R>(&mut self, context: &mut Context<'_>, written: Poll<io::Result<R>>) -> Poll<io::Result<R>> {
        if written.is_ready() {
            self.patience = None;
            return written;
        }
        let limit = self.limit;
        let patience = self.patience.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(Instant::now() + limit)));
        match patience.as_mut().poll(context) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(()) => Poll::Ready(Err(io::Error::new(
                io::ErrorKind::TimedOut,
                "the client does not read the server's response",
            ))),
        }
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Stalling<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Stalling<T> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.watched(context, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, slices);
        self.watched(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        // Flushing has no time limit, because a socket has nothing to flush.
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shut = Pin::new(&mut self.stream).poll_shutdown(context);
        self.watched(context, shut)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_peer_that_takes_nothing_is_given_up_and_a_slow_one_is_not() {
        let (ours, mut theirs) = tokio::io::duplex(64);
        let mut stream = Stalling::new(ours, Duration::from_secs(5));
        let reader = tokio::spawn(async move {
            let mut piece = [0; 64];
            for _ in 0..4 {
                tokio::time::sleep(Duration::from_secs(4)).await;
                theirs.read_exact(&mut piece).await.unwrap();
            }
            theirs
        });
        stream.write_all(&[0; 5 * 64]).await.unwrap();
        let _theirs = reader.await.unwrap();
        let begun = Instant::now();
        let error = stream.write_all(&[0; 128]).await.unwrap_err();
        assert_eq!((error.kind(), begun.elapsed().as_secs()), (io::ErrorKind::TimedOut, 5));
    }
}
