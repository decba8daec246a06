//! Client of the API. Opens a connection for each call.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, RawFd};
use std::path::{Path, PathBuf};

use axum::body::{Body, Bytes, to_bytes};
use axum::http::{Method, Request, Response, StatusCode, header};
use futures_util::StreamExt;
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use thiserror::Error;
use tokio::io::Interest;
use tokio::net::UnixStream;

use crate::config::NetConfig;

/// Upper limit of an answer, many times longer than the longest answer of any call.
const MAX_ANSWER_BYTES: usize = 16 << 20;
/// Maximum number of descriptors that any call accepts.
const MAX_DESCRIPTORS: usize = NetConfig::MAX_PAIRS as usize;

#[derive(Debug, Error)]
pub enum ClientError {
    #[error("cannot reach a VMM at {path:?}")]
    Connect {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// The server does not use HTTP, or the answer ends early.
    #[error("cannot read the answer of {path:?}: {reason}")]
    Answer { path: PathBuf, reason: String },
    #[error("cannot send file descriptors to {path:?}")]
    Descriptors {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{status}: {reason}")]
    Refused {
        status: StatusCode,
        /// Error texts in the answer.
        reason: String,
    },
}

/// Client of the VMM that listens at a path.
#[derive(Clone, Debug)]
pub struct Client {
    path: PathBuf,
}

impl Client {
    pub fn new(path: &Path) -> Self {
        Self { path: path.to_owned() }
    }

    /// Sends `GET /api/v1/CALL` and returns the body of the answer.
    pub async fn get(&self, call: &str) -> Result<Bytes, ClientError> {
        self.call(Method::GET, call, None).await
    }

    /// Sends `PUT /api/v1/CALL` with an optional JSON body.
    pub async fn put(&self, call: &str, body: Option<String>) -> Result<Bytes, ClientError> {
        self.call(Method::PUT, call, body).await
    }

    /// Sends `PUT /api/v1/CALL` with a JSON body and file descriptors.
    pub async fn put_with(
        &self,
        call: &str,
        body: String,
        fds: &[RawFd],
    ) -> Result<Bytes, ClientError> {
        let stream = self.connect().await?;
        if !fds.is_empty() {
            send_descriptors(&stream, fds).await.map_err(|error| self.unsent(error))?;
        }
        self.finish(stream, Method::PUT, call, Some(body)).await
    }

    /// Sends `GET /api/v1/CALL` and passes pieces of the answer to `take` as they arrive, until the
    /// VMM ends the answer or `take` fails.
    pub async fn follow(
        &self,
        call: &str,
        mut take: impl FnMut(&[u8]) -> io::Result<()>,
    ) -> Result<(), ClientError> {
        let stream = self.connect().await?;
        let answer =
            send(stream, Method::GET, call, None).await.map_err(|error| self.unreadable(error))?;
        let status = answer.status();
        if !status.is_success() {
            let body = collect(answer).await.map_err(|error| self.unreadable(error))?;
            return Err(ClientError::Refused { status, reason: reason_of(&body) });
        }
        let mut pieces = Body::new(answer.into_body()).into_data_stream();
        while let Some(piece) = pieces.next().await {
            let piece = piece.map_err(|error| self.unreadable(error.into()))?;
            take(&piece).map_err(|error| self.unreadable(error.into()))?;
        }
        Ok(())
    }

    async fn connect(&self) -> Result<UnixStream, ClientError> {
        UnixStream::connect(&self.path)
            .await
            .map_err(|source| ClientError::Connect { path: self.path.clone(), source })
    }

    async fn call(
        &self,
        method: Method,
        call: &str,
        body: Option<String>,
    ) -> Result<Bytes, ClientError> {
        let stream = self.connect().await?;
        self.finish(stream, method, call, body).await
    }

    async fn finish(
        &self,
        stream: UnixStream,
        method: Method,
        call: &str,
        body: Option<String>,
    ) -> Result<Bytes, ClientError> {
        let (status, body) =
            exchange(stream, method, call, body).await.map_err(|error| self.unreadable(error))?;
        if status.is_success() {
            return Ok(body);
        }
        Err(ClientError::Refused { status, reason: reason_of(&body) })
    }

    fn unsent(&self, source: io::Error) -> ClientError {
        ClientError::Descriptors { path: self.path.clone(), source }
    }

    fn unreadable(&self, error: AnyError) -> ClientError {
        ClientError::Answer { path: self.path.clone(), reason: error.to_string() }
    }
}

type AnyError = Box<dyn std::error::Error + Send + Sync>;

/// Sends descriptors together with an empty line. A server ignores an empty line before a request
/// (RFC 9112, 2.2). The server assigns them to the following request.
async fn send_descriptors(stream: &UnixStream, fds: &[RawFd]) -> io::Result<()> {
    // SAFETY: the descriptors are only passed to sendmsg, which fails if one is not open. The
    // caller guarantees that no other thread closes and reuses them.
    let fds: Vec<_> = fds.iter().map(|&fd| unsafe { BorrowedFd::borrow_raw(fd) }).collect();
    loop {
        stream.writable().await?;
        let sent = stream.try_io(Interest::WRITABLE, || {
            let mut space =
                [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !control.push(SendAncillaryMessage::ScmRights(&fds)) {
                let reason =
                    format!("{} exceed the maximum of a call, {MAX_DESCRIPTORS}", fds.len());
                return Err(io::Error::new(io::ErrorKind::InvalidInput, reason));
            }
            Ok(sendmsg(stream, &[IoSlice::new(b"\r\n")], &mut control, SendFlags::NOSIGNAL)?)
        });
        match sent {
            Ok(2) => return Ok(()),
            Ok(_) => return Err(io::ErrorKind::WriteZero.into()),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
}

async fn exchange(
    stream: UnixStream,
    method: Method,
    call: &str,
    body: Option<String>,
) -> Result<(StatusCode, Bytes), AnyError> {
    let answer = send(stream, method, call, body).await?;
    Ok((answer.status(), collect(answer).await?))
}

async fn send(
    stream: UnixStream,
    method: Method,
    call: &str,
    body: Option<String>,
) -> Result<Response<Incoming>, AnyError> {
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    // The task ends with the answer. Its error is ignored, because reading the answer fails too.
    tokio::spawn(connection);
    let request = Request::builder()
        .method(method)
        .uri(format!("/api/v1/{call}"))
        .header(header::HOST, "localhost")
        .header(header::CONTENT_TYPE, "application/json")
        .body(body.map_or_else(Body::empty, Body::from))?;
    Ok(sender.send_request(request).await?)
}

async fn collect(answer: Response<Incoming>) -> Result<Bytes, AnyError> {
    Ok(to_bytes(Body::new(answer.into_body()), MAX_ANSWER_BYTES).await?)
}

/// Joins the errors in an answer, a JSON list, into one line.
fn reason_of(body: &[u8]) -> String {
    match serde_json::from_slice::<Vec<String>>(body) {
        Ok(messages) if !messages.is_empty() => messages.join(": "),
        _ => String::from_utf8_lossy(body).trim().escape_debug().to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_one_line_for_any_body() {
        assert_eq!(reason_of(br#"["The VM is paused", "because"]"#), "The VM is paused: because");
        assert_eq!(reason_of(b"two\nlines\n"), r"two\nlines");
        assert_eq!(reason_of(b""), "");
    }
}
