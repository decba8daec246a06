//! The API's other side: one call, one connection.

use std::io;
use std::path::{Path, PathBuf};

use axum::body::{Body, Bytes, to_bytes};
use axum::http::{Method, Request, Response, StatusCode, header};
use futures_util::StreamExt;
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use thiserror::Error;
use tokio::net::UnixStream;

/// The longest answer that is read: many times what any call answers.
const MAX_ANSWER_BYTES: usize = 16 << 20;

/// Why a call fails.
#[derive(Debug, Error)]
pub enum ClientError {
    /// Nobody answers.
    #[error("Cannot reach a VMM at {path:?}")]
    Connect {
        /// The socket.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Whoever answers does not speak HTTP, or stops in the middle.
    #[error("The answer of {path:?} cannot be read: {reason}")]
    Answer {
        /// The socket.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// The VMM refuses.
    #[error("{status}: {reason}")]
    Refused {
        /// The status code.
        status: StatusCode,
        /// The errors of the answer.
        reason: String,
    },
}

/// Calls the VMM that listens at a path.
#[derive(Clone, Debug)]
pub struct Client {
    path: PathBuf,
}

impl Client {
    /// A client of the VMM at `path`.
    pub fn new(path: &Path) -> Self {
        Self { path: path.to_owned() }
    }

    /// Reads: the body of the answer to `GET /api/v1/CALL`.
    pub async fn get(&self, call: &str) -> Result<Bytes, ClientError> {
        self.call(Method::GET, call, None).await
    }

    /// Changes: `PUT /api/v1/CALL` with a JSON body or none.
    pub async fn put(&self, call: &str, body: Option<String>) -> Result<Bytes, ClientError> {
        self.call(Method::PUT, call, body).await
    }

    /// Follows: gives `take` what `GET /api/v1/CALL` answers, piece by piece as it comes, until the VMM ends it or `take` fails.
    pub async fn follow(
        &self,
        call: &str,
        mut take: impl FnMut(&[u8]) -> io::Result<()>,
    ) -> Result<(), ClientError> {
        let stream = self.connect().await?;
        let answer = send(stream, Method::GET, call, None).await.map_err(|error| self.unreadable(error))?;
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

    async fn call(&self, method: Method, call: &str, body: Option<String>) -> Result<Bytes, ClientError> {
        let stream = self.connect().await?;
        let (status, body) =
            exchange(stream, method, call, body).await.map_err(|error| self.unreadable(error))?;
        if status.is_success() {
            return Ok(body);
        }
        Err(ClientError::Refused { status, reason: reason_of(&body) })
    }

    fn unreadable(&self, error: AnyError) -> ClientError {
        ClientError::Answer { path: self.path.clone(), reason: error.to_string() }
    }
}

type AnyError = Box<dyn std::error::Error + Send + Sync>;

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
    // The connection ends with the answer; what goes wrong on it is seen there.
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

/// The errors of an answer, which are a JSON list, in one line.
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
    fn errors_are_one_line_whatever_the_body_is() {
        assert_eq!(reason_of(br#"["The VM is paused", "because"]"#), "The VM is paused: because");
        assert_eq!(reason_of(b"two\nlines\n"), r"two\nlines");
        assert_eq!(reason_of(b""), "");
    }
}
