//! As much of an HTTP client as the API and the metrics need: one request per connection.

use std::fs::File;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use guest_tools::wait::stretched;
use serde_json::Value;

use crate::tap;

/// No answer takes longer, unless something hangs.
const ANSWER_LIMIT: Duration = Duration::from_secs(30);

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Response {
    pub status: u16,
    /// Empty if the response has no body.
    pub body: String,
}

impl Response {
    /// The body, which must be JSON.
    pub fn json(&self) -> Result<Value> {
        serde_json::from_str(&self.body).with_context(|| format!("{self:?} is no JSON"))
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
    stream.set_read_timeout(Some(stretched(ANSWER_LIMIT)))?;
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
    stream.set_read_timeout(Some(stretched(ANSWER_LIMIT)))?;
    exchange(&mut stream, method, path, body)
}

/// One request on a connection that stays, with descriptors beside it, and its answer.
pub fn request_with(
    stream: &mut UnixStream,
    call: &str,
    body: &str,
    files: &[File],
) -> Result<Response> {
    stream.set_read_timeout(Some(stretched(ANSWER_LIMIT)))?;
    let request = format!(
        "PUT /api/v1/{call} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n\
         {body}",
        body.len()
    );
    tap::send_with(stream, request.as_bytes(), files)?;
    read_response(stream).with_context(|| format!("No answer to {call}"))
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
    read_response(stream).with_context(|| format!("No answer to {method} {path}"))
}

fn read_response(stream: &mut impl Read) -> Result<Response> {
    let mut bytes = Vec::new();
    loop {
        if let Some(response) = parse(&bytes, false)? {
            return Ok(response);
        }
        let mut chunk = [0u8; 16 << 10];
        match stream.read(&mut chunk)? {
            0 => break,
            len => bytes.extend_from_slice(&chunk[..len]),
        }
    }
    parse(&bytes, true)?.context("The connection ended before the answer did")
}

fn parse(bytes: &[u8], ended: bool) -> Result<Option<Response>> {
    let Some(head_len) = bytes.windows(4).position(|window| window == b"\r\n\r\n") else {
        return Ok(None);
    };
    let head = std::str::from_utf8(&bytes[..head_len]).context("The answer's head is not UTF-8")?;
    let body = &bytes[head_len + 4..];
    let status_line = head.split("\r\n").next().unwrap_or_default();
    let status = status_line.split(' ').nth(1).and_then(|status| status.parse().ok());
    let status: u16 =
        status.with_context(|| format!("Not an HTTP status line: {status_line:?}"))?;

    let header = |name: &str| {
        head.split("\r\n").skip(1).find_map(|line| {
            let (key, value) = line.split_once(':')?;
            key.eq_ignore_ascii_case(name).then(|| value.trim())
        })
    };
    let body = if header("transfer-encoding")
        .is_some_and(|coding| coding.eq_ignore_ascii_case("chunked"))
    {
        match dechunk(body)? {
            Some(body) => body,
            None => return Ok(None),
        }
    } else if let Some(len) = header("content-length") {
        let len: usize = len.parse().with_context(|| format!("Content-Length is {len:?}"))?;
        if body.len() < len {
            return Ok(None);
        }
        body[..len].to_vec()
    } else if ended || status == 204 {
        body.to_vec()
    } else {
        return Ok(None);
    };
    let body = String::from_utf8(body).context("The answer's body is not UTF-8")?;
    Ok(Some(Response { status, body }))
}

fn dechunk(mut rest: &[u8]) -> Result<Option<Vec<u8>>> {
    let mut body = Vec::new();
    loop {
        let Some(line_len) = rest.windows(2).position(|window| window == b"\r\n") else {
            return Ok(None);
        };
        let size = std::str::from_utf8(&rest[..line_len])?;
        let size = usize::from_str_radix(size.trim(), 16)
            .with_context(|| format!("Chunk size is {size:?}"))?;
        rest = &rest[line_len + 2..];
        if size == 0 {
            return Ok(Some(body));
        }
        if rest.len() < size + 2 {
            return Ok(None);
        }
        if &rest[size..size + 2] != b"\r\n" {
            bail!("A chunk does not end where its size says");
        }
        body.extend_from_slice(&rest[..size]);
        rest = &rest[size + 2..];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn response(status: u16, body: &str) -> Option<Response> {
        Some(Response { status, body: body.to_owned() })
    }

    #[test]
    fn a_body_with_a_length_is_complete_when_it_is_there() {
        let wire = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello";
        assert_eq!(parse(&wire[..wire.len() - 1], false).unwrap(), None);
        assert_eq!(parse(wire, false).unwrap(), response(200, "hello"));
    }

    #[test]
    fn chunks_are_put_together() {
        let wire =
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\na\r\n0123456789\r\n0\r\n\r\n";
        assert_eq!(parse(wire, false).unwrap(), response(200, "abc0123456789"));
        assert_eq!(parse(&wire[..50], false).unwrap(), None);
    }

    #[test]
    fn an_answer_without_content_has_an_empty_body() {
        assert_eq!(parse(b"HTTP/1.1 204 No Content\r\n\r\n", false).unwrap(), response(204, ""));
    }

    #[test]
    fn a_body_without_a_length_ends_with_the_connection() {
        let wire = b"HTTP/1.1 400 Bad Request\r\n\r\nno";
        assert_eq!(parse(wire, false).unwrap(), None);
        assert_eq!(parse(wire, true).unwrap(), response(400, "no"));
    }

    #[test]
    fn what_is_not_http_is_an_error() {
        assert!(parse(b"hello there\r\n\r\n", true).is_err());
    }
}
