//! Minimal HTTP client for the API and the metrics. Each request uses its own connection.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use guest_tools::wait::scaled_limit;
use serde_json::Value;

use crate::tap;

/// Time limit for a response. The time limit is only exceeded if something hangs.
const ANSWER_LIMIT: Duration = Duration::from_secs(30);

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Response {
    pub status: u16,
    /// Body of the response, or an empty string for a response without a body.
    pub body: String,
}

impl Response {
    /// Parses the body, which must be JSON.
    pub fn json(&self) -> Result<Value> {
        serde_json::from_str(&self.body).with_context(|| format!("{self:?} is not JSON"))
    }
}

pub fn request_unix(
    socket: &Path,
    method: &str,
    path: &str,
    body: Option<&str>,
) -> Result<Response> {
    let mut stream = UnixStream::connect(socket)
        .with_context(|| format!("Cannot connect to {}", socket.display()))?;
    stream.set_read_timeout(Some(scaled_limit(ANSWER_LIMIT)))?;
    exchange(&mut stream, method, path, body)
}

pub fn request_tcp(
    address: &str,
    method: &str,
    path: &str,
    body: Option<&str>,
) -> Result<Response> {
    let mut stream =
        TcpStream::connect(address).with_context(|| format!("Cannot connect to {address}"))?;
    stream.set_read_timeout(Some(scaled_limit(ANSWER_LIMIT)))?;
    exchange(&mut stream, method, path, body)
}

/// Sends one request with descriptors on an existing connection, and returns the response.
pub fn request_with(
    stream: &mut UnixStream,
    call: &str,
    body: &str,
    files: &[File],
) -> Result<Response> {
    stream.set_read_timeout(Some(scaled_limit(ANSWER_LIMIT)))?;
    let request = format!(
        "PUT /api/v1/{call} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n\
         {body}",
        body.len()
    );
    tap::send_with(stream, request.as_bytes(), files)?;
    read_response(stream).with_context(|| format!("No response to {call}"))
}

fn exchange(
    stream: &mut (impl Read + Write),
    method: &str,
    path: &str,
    body: Option<&str>,
) -> Result<Response> {
    let mut request = format!(
        "{method} {path} HTTP/1.1\r\nHost: localhost\r\nAccept: application/openmetrics-text, */*;q=0.1\r\nConnection: close\r\n"
    );
    if let Some(body) = body {
        request += &format!("Content-Type: application/json\r\nContent-Length: {}\r\n", body.len());
    }
    request += "\r\n";
    request += body.unwrap_or_default();
    stream.write_all(request.as_bytes()).with_context(|| format!("Cannot send {method} {path}"))?;
    read_response(stream).with_context(|| format!("No response to {method} {path}"))
}

fn read_response(stream: &mut impl Read) -> Result<Response> {
    let mut stream = BufReader::new(stream);
    let mut line = String::new();
    stream.read_line(&mut line)?;
    let status = line.split(' ').nth(1).and_then(|status| status.parse().ok());
    let status: u16 = status.with_context(|| format!("Not an HTTP status line: {line:?}"))?;
    let mut len = None;
    while line != "\r\n" {
        line.clear();
        stream.read_line(&mut line)?;
        ensure!(line.ends_with("\r\n"), "The connection closed within the response's header");
        let Some((key, value)) = line.split_once(':') else { continue };
        ensure!(!key.eq_ignore_ascii_case("transfer-encoding"), "The response is chunked");
        if key.eq_ignore_ascii_case("content-length") {
            len = Some(value.trim().parse().with_context(|| format!("Not a length: {line:?}"))?);
        }
    }
    let mut body = String::new();
    if let Some(len) = len {
        stream.take(len).read_to_string(&mut body)?;
        ensure!(body.len() as u64 == len, "The connection closed within the response's body");
    } else if status != 204 {
        stream.read_to_string(&mut body)?;
    }
    Ok(Response { status, body })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn body_has_its_length_or_ends_with_the_connection() {
        for (wire, status, body) in [
            ("HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello, next", 200, "hello"),
            ("HTTP/1.1 204 No Content\r\n\r\nnext", 204, ""),
            ("HTTP/1.1 400 Bad Request\r\na: b\r\n\r\nno", 400, "no"),
        ] {
            let expected = Response { status, body: body.to_owned() };
            assert_eq!(read_response(&mut wire.as_bytes()).unwrap(), expected);
        }
    }

    #[test]
    fn incomplete_answers_and_other_protocols_are_errors() {
        for wire in [
            "",
            "hello there\r\n\r\n",
            "HTTP/1.1 200 OK\r\ncontent-le",
            "HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n",
            "HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhell",
        ] {
            assert!(read_response(&mut wire.as_bytes()).is_err(), "{wire:?}");
        }
    }
}
