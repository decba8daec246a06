//! Writes and parses HTTP in the same way as clients of Cloud Hypervisor.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use guest_tests::http::Response;
use guest_tests::tap;

use crate::vm::TIMEOUT;

/// Connection that a client uses for all of its requests.
#[derive(Debug)]
pub(crate) struct Connection(UnixStream);

impl Connection {
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let stream =
            UnixStream::connect(path).with_context(|| format!("Cannot connect to {path:?}"))?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        Ok(Self(stream))
    }

    /// Writes a request or a part of it.
    pub(crate) fn write(&mut self, bytes: &str) -> Result<()> {
        Ok(self.0.write_all(bytes.as_bytes())?)
    }

    /// Writes a request, or a part of it, together with descriptors in a single message. Closes the
    /// descriptors afterwards.
    pub(crate) fn write_with(&mut self, bytes: &str, files: Vec<File>) -> Result<()> {
        tap::send_with(&self.0, bytes.as_bytes(), &files)
    }

    /// Returns the data of a single `recv`.
    pub(crate) fn receive(&mut self) -> Result<String> {
        let mut buffer = [0; 1023];
        let len = self.0.read(&mut buffer)?;
        Ok(String::from_utf8(buffer[..len].to_vec())?)
    }

    /// Reads a response as Cloud Hypervisor's own client does. runtime-rs of Kata Containers uses
    /// the same client. The status is all text between the version and the first `\r`, and
    /// `Content-Length` must be in title case. Other clients are less strict.
    pub(crate) fn answer(&mut self) -> Result<Response> {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            self.0
                .read_exact(&mut byte)
                .context("The connection closed within the response's header")?;
            head.push(byte[0]);
        }
        let head = String::from_utf8(head)?;
        let (status, len) =
            parse(&head).with_context(|| format!("Cannot parse the response: {head:?}"))?;
        let mut body = vec![0; len];
        self.0.read_exact(&mut body).context("The connection closed within the response's body")?;
        Ok(Response { status, body: String::from_utf8(body)? })
    }

    /// Writes a request in one piece, and reads the response.
    pub(crate) fn call(&mut self, request: &str) -> Result<Response> {
        self.write(request)?;
        self.answer()
    }

    /// Makes a call. The client accepts only this status.
    pub(crate) fn expect(&mut self, status: u16, request: &str) -> Result<Response> {
        let answer = self.call(request)?;
        ensure!(answer.status == status, "{request:?} returned {answer:?} instead of {status}");
        Ok(answer)
    }
}

fn parse(head: &str) -> Option<(u16, usize)> {
    let (status, headers) = head.strip_prefix("HTTP/1.1 ")?.split_once("\r\n")?;
    let len = match headers.split_once("Content-Length: ") {
        Some((_, rest)) => rest.split("\r\n").next()?.trim().parse().ok()?,
        None => 0,
    };
    Some((status.trim().parse().ok()?, len))
}

/// Format of a client's requests.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Style {
    /// Text that precedes the path.
    pub base: &'static str,
    /// Headers of every request, each followed by its line end.
    pub headers: &'static str,
    /// Additional headers of requests with a body.
    pub with_body: &'static str,
    /// True if the client sends `Content-Length: 0` with a PUT without a body.
    pub sends_zero_length: bool,
}

/// Format of Go clients that write their requests themselves.
pub(crate) const GO: Style = Style {
    base: "",
    headers: "Host: localhost\r\nUser-Agent: Go-http-client/1.1\r\nAccept-Encoding: gzip\r\n",
    with_body: "Content-Type: application/json\r\n",
    sends_zero_length: true,
};

impl Style {
    pub(crate) fn request(&self, method: &str, call: &str, body: &str) -> String {
        let mut request =
            format!("{method} {}/api/v1/{call} HTTP/1.1\r\n{}", self.base, self.headers);
        if !body.is_empty() {
            request += &format!("{}Content-Length: {}\r\n", self.with_body, body.len());
        } else if self.sends_zero_length && method == "PUT" {
            request += "Content-Length: 0\r\n";
        }
        request + "\r\n" + body
    }

    pub(crate) fn put(&self, call: &str, body: &str) -> String {
        self.request("PUT", call, body)
    }

    pub(crate) fn get(&self, call: &str) -> String {
        self.request("GET", call, "")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_are_parsed_as_strictly_as_by_cloud_hypervisors_client() {
        assert_eq!(parse("HTTP/1.1 204 \r\nDate: x\r\n\r\n"), Some((204, 0)));
        assert_eq!(parse("HTTP/1.1 200 \r\nContent-Length: 7\r\n\r\n"), Some((200, 7)));
        assert_eq!(parse("HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n"), None);
        assert_eq!(parse("HTTP/1.1 200 \r\ncontent-length: 7\r\n\r\n"), Some((200, 0)));
    }

    #[test]
    fn requests_have_the_format_of_their_client() {
        let style = Style {
            base: "",
            headers: "Host: a\r\n",
            with_body: "Type: b\r\n",
            sends_zero_length: true,
        };
        assert_eq!(style.get("vm.info"), "GET /api/v1/vm.info HTTP/1.1\r\nHost: a\r\n\r\n");
        assert_eq!(
            style.put("vm.boot", ""),
            "PUT /api/v1/vm.boot HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n"
        );
        let expected =
            "PUT /api/v1/x HTTP/1.1\r\nHost: a\r\nType: b\r\nContent-Length: 2\r\n\r\n{}";
        assert_eq!(style.put("x", "{}"), expected);
    }
}
