//! Unix stream that also receives file descriptors (unix(7), SCM_RIGHTS).
//!
//! Clients send the descriptors of a tap with the request that adds the network device. The kernel
//! delivers a message with descriptors separately from any data after it. Without pipelining,
//! descriptors therefore belong to the request that they arrive with. They are queued until a call
//! takes them. When the call is answered, descriptors that it did not take are closed.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use parking_lot::Mutex;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, recvmsg};
use tokio::io::{AsyncRead, Interest, Join, ReadBuf, join};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};

use crate::config::NetConfig;

/// Maximum number of descriptors that the kernel sends with one message (SCM_MAX_FD,
/// include/net/scm.h).
const MAX_PER_MESSAGE: usize = 253;
/// Maximum number of descriptors that a call takes: one for each queue pair of a network device.
const MAX_WAITING: usize = NetConfig::MAX_PAIRS as usize;

/// Descriptors that have arrived on a connection and that no call has taken yet.
#[derive(Clone, Debug, Default)]
pub(super) struct Descriptors(Arc<Mutex<Vec<OwnedFd>>>);

impl Descriptors {
    /// Takes all descriptors in the order in which they were sent.
    pub(super) fn take(&self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.0.lock())
    }

    fn add(&self, fds: impl Iterator<Item = OwnedFd>) -> io::Result<()> {
        let mut waiting = self.0.lock();
        waiting.extend(fds);
        if waiting.len() > MAX_WAITING {
            let reason = format!(
                "{} file descriptors wait for a call; the maximum is {MAX_WAITING}",
                waiting.len()
            );
            waiting.clear();
            return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
        }
        Ok(())
    }
}

/// Read half of a stream that receives descriptors.
#[derive(Debug)]
struct FdReader {
    stream: OwnedReadHalf,
    waiting: Descriptors,
}

/// Wraps a stream so that received descriptors are added to `waiting`.
pub(super) fn receiving(
    stream: UnixStream,
    waiting: Descriptors,
) -> Join<impl AsyncRead + Unpin, OwnedWriteHalf> {
    let (stream, writer) = stream.into_split();
    join(FdReader { stream, waiting }, writer)
}

impl FdReader {
    fn receive(&self, bytes: &mut [u8]) -> io::Result<usize> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_PER_MESSAGE))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC;
        let received =
            recvmsg(self.stream.as_ref(), &mut [IoSliceMut::new(bytes)], &mut control, flags)?;
        let fds = control.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        });
        self.waiting.add(fds.flatten())?;
        if received.flags.contains(ReturnFlags::CTRUNC) {
            let reason = "cannot receive all file descriptors that were sent: the limit of open files is reached";
            return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
        }
        Ok(received.bytes)
    }
}

impl AsyncRead for FdReader {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            let stream: &UnixStream = self.stream.as_ref();
            ready!(stream.poll_read_ready(context))?;
            let bytes = buffer.initialize_unfilled();
            match stream.try_io(Interest::READABLE, || self.receive(bytes)) {
                Ok(count) => {
                    buffer.advance(count);
                    return Poll::Ready(Ok(()));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{IoSlice, Read, Write};
    use std::os::fd::AsFd;
    use std::time::Duration;

    use axum::extract::Request;
    use axum::routing::put;
    use axum::{Extension, Router};
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
    use std::os::unix::net::UnixStream as BlockingStream;
    use tempfile::TempDir;

    use super::*;
    use crate::api::{Limits, Server, Socket};
    use crate::config::ApiSocket;

    /// Serves two calls. One reads its body and returns the contents of the received files; the
    /// other takes no descriptors.
    fn serve(test: impl FnOnce(&std::path::Path) + Send + 'static) {
        let dir: TempDir = tempfile::tempdir().unwrap();
        let path = dir.path().join("api");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let take = async |Extension(waiting): Extension<Descriptors>, _body: String| {
                let read = |fd: OwnedFd| {
                    let mut text = String::new();
                    File::from(fd).read_to_string(&mut text).unwrap();
                    text
                };
                waiting.take().into_iter().map(read).collect::<Vec<_>>().join(",")
            };
            let router = Router::new()
                .route("/take", put(take))
                .route("/leave", put(async |_: Request| "left"));
            let socket =
                Socket::for_api(&ApiSocket::Path(path.clone(), Default::default())).unwrap();
            let server = Server::start(socket, router, Limits::API).unwrap();
            tokio::task::spawn_blocking(move || test(&path)).await.unwrap();
            server.stop().await;
        });
    }

    /// Temporary file that contains `text`.
    fn file(text: &str) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        std::io::Seek::rewind(&mut file).unwrap();
        file
    }

    fn send(stream: &BlockingStream, bytes: &str, files: &[&File]) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_PER_MESSAGE))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds: Vec<_> = files.iter().map(|file| file.as_fd()).collect();
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        }
        let parts = [IoSlice::new(bytes.as_bytes())];
        assert_eq!(sendmsg(stream, &parts, &mut control, SendFlags::empty()).unwrap(), bytes.len());
    }

    /// Receives the body of an answer. Returns `None` if the server has closed the connection.
    fn receive(stream: &mut BlockingStream) -> Option<String> {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            stream.read_exact(&mut byte).ok()?;
            head.push(byte[0]);
        }
        let head = String::from_utf8(head).unwrap();
        let (_, length) = head.split_once("Content-Length: ").unwrap();
        let mut body = vec![0; length.split("\r\n").next().unwrap().parse().unwrap()];
        stream.read_exact(&mut body).unwrap();
        Some(String::from_utf8(body).unwrap())
    }

    fn request(call: &str, body: &str) -> String {
        format!(
            "PUT /{call} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        )
    }

    /// Checks that the receiver closes the descriptor that `send` passes: the pipe ends for its
    /// reader once all copies of the write end are closed.
    #[track_caller]
    fn assert_closed(send: impl FnOnce(&File)) {
        let (mut reader, writer) = std::io::pipe().unwrap();
        send(&File::from(OwnedFd::from(writer)));
        let (ended, end) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let read = reader.read(&mut [0]).unwrap();
            let _ = ended.send(read);
        });
        assert_eq!(end.recv_timeout(Duration::from_secs(20)), Ok(0), "a copy is open");
    }

    #[test]
    fn descriptors_with_any_part_of_a_request_reach_its_call() {
        serve(|path| {
            let mut stream = BlockingStream::connect(path).unwrap();
            let (a, b) = (file("a"), file("b"));
            // libvirt sends the whole request with the descriptors.
            send(&stream, &request("take", "{}"), &[&a, &b]);
            assert_eq!(receive(&mut stream).unwrap(), "a,b");
            // Cloud Hypervisor's client sends the descriptors with the first line. Here, it does so
            // on the same connection.
            let (c, whole) = (file("c"), request("take", "{}"));
            send(&stream, &whole[..10], &[&c]);
            send(&stream, &whole[10..], &[]);
            assert_eq!(receive(&mut stream).unwrap(), "c");
            // Descriptors with the last byte of the body.
            let (d, split) = (file("d"), whole.len() - 1);
            send(&stream, &whole[..split], &[]);
            send(&stream, &whole[split..], &[&d]);
            assert_eq!(receive(&mut stream).unwrap(), "d");
            send(&stream, &whole, &[]);
            assert_eq!(receive(&mut stream).unwrap(), "", "none is left from before");
        });
    }

    #[test]
    fn unused_descriptors_are_closed_and_too_many_end_the_connection() {
        serve(|path| {
            let mut stream = BlockingStream::connect(path).unwrap();
            assert_closed(|file| {
                send(&stream, &request("leave", ""), &[file; 3]);
                assert_eq!(receive(&mut stream).unwrap(), "left");
            });
            assert_closed(|file| {
                send(&stream, "PUT ", &[file; MAX_WAITING]);
                send(&stream, "/take ", &[file]);
                assert_eq!(receive(&mut stream), None);
            });
            // A call accepts at most one descriptor for each queue pair of a device.
            let (mut stream, file) = (BlockingStream::connect(path).unwrap(), file("e"));
            send(&stream, &request("take", "{}"), &[&file; MAX_WAITING]);
            assert_eq!(receive(&mut stream).unwrap().split(',').count(), 127);
            // If a client disconnects within a request, its descriptors are closed.
            assert_closed(|file| {
                send(&BlockingStream::connect(path).unwrap(), "PUT /ta", &[file; 30])
            });
        });
    }
}
