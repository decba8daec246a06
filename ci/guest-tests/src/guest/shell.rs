//! Runs scripts in the guest through the VMM's vsock socket.

use std::io::{BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use guest_tools::shell_protocol::{Frame, GUEST_SHELL_PORT, Request};
use guest_tools::wait::scaled_limit;
use guest_tools::{CorruptData, vsock};

/// How to reach a guest's vsock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Endpoint {
    /// Through a Unix socket of the VMM, as with Foreshore, Cloud Hypervisor and Firecracker.
    Socket(PathBuf),
    /// Through the host's kernel, as with QEMU.
    Vhost { cid: u32 },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    pub stdout: String,
    pub stderr: String,
    /// Exit code, or 128 plus the number of the signal that killed the script.
    pub code: i32,
}

impl Output {
    /// Returns the output if the command exited with zero. If the command found wrong stored data,
    /// the error has the context [`CorruptData`].
    pub fn success(self, command: &str) -> Result<String> {
        let Self { stdout, stderr, code } = self;
        let error = match code {
            0 => return Ok(stdout),
            _ => anyhow!("`{command}` ended with {code} in the guest:\n{stdout}{stderr}"),
        };
        Err(if code == CorruptData::CODE { error.context(CorruptData) } else { error })
    }
}

/// Script that is running in the guest. Drop closes the connection, and the guest then kills the
/// script.
#[derive(Debug)]
pub struct Script {
    stream: BufReader<UnixStream>,
    /// Start of a line that is not complete yet.
    pending: Vec<u8>,
    stderr: Vec<u8>,
    code: Option<i32>,
}

impl Script {
    /// Connects and starts the script. The script fails if it prints nothing for longer than
    /// `silence_limit`.
    pub fn start(guest: &Endpoint, silence_limit: Duration, script: &str) -> Result<Self> {
        let mut stream = match guest {
            Endpoint::Socket(path) => connect_socket(path, GUEST_SHELL_PORT, silence_limit)?,
            Endpoint::Vhost { cid } => connect_vhost(*cid, GUEST_SHELL_PORT, silence_limit)?,
        };
        Request(script.to_owned()).write_to(&mut stream).context("Cannot send the script")?;
        Ok(Self {
            stream: BufReader::new(stream),
            pending: Vec::new(),
            stderr: Vec::new(),
            code: None,
        })
    }

    /// Returns the next line of standard output, without the newline. Returns `None` at the end of
    /// the script or of the connection. [`Script::finish`] distinguishes the two.
    pub fn next_line(&mut self) -> Option<String> {
        loop {
            if let Some(len) = self.pending.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.pending.drain(..=len).collect();
                return Some(String::from_utf8_lossy(&line[..len]).into_owned());
            }
            if self.code.is_some() || self.read_frame().is_err() {
                return None;
            }
        }
    }

    /// Waits for a line. Fails if the script ends first.
    pub fn wait_for_line(&mut self, expected: &str) -> Result<()> {
        let mut lines = std::iter::from_fn(|| self.next_line());
        let found = lines.any(|line| line == expected);
        ensure!(found, "The script has ended without the line {expected:?}");
        Ok(())
    }

    pub fn finish(mut self) -> Result<Output> {
        let code = loop {
            if let Some(code) = self.code {
                break code;
            }
            self.read_frame()
                .context("The connection to the guest's shell failed, or the script hangs")?;
        };
        Ok(Output {
            stdout: String::from_utf8_lossy(&self.pending).into_owned(),
            stderr: String::from_utf8_lossy(&self.stderr).into_owned(),
            code,
        })
    }

    fn read_frame(&mut self) -> Result<()> {
        match Frame::read_from(&mut self.stream)? {
            Frame::Stdout(bytes) => self.pending.extend(bytes),
            Frame::Stderr(bytes) => self.stderr.extend(bytes),
            Frame::Exit(code) => self.code = Some(code),
        }
        Ok(())
    }
}

fn connect_socket(vsock: &Path, port: u32, silence_limit: Duration) -> Result<UnixStream> {
    let mut stream = UnixStream::connect(vsock)
        .with_context(|| format!("Cannot connect to {}", vsock.display()))?;
    stream.set_read_timeout(Some(scaled_limit(silence_limit)))?;
    stream.write_all(format!("CONNECT {port}\n").as_bytes())?;
    let mut answer = Vec::new();
    // Reads byte by byte, because the data after the newline comes from the guest.
    while answer.last() != Some(&b'\n') {
        let mut byte = [0u8];
        stream
            .read_exact(&mut byte)
            .with_context(|| format!("Port {port} of the guest does not answer"))?;
        answer.push(byte[0]);
        ensure!(
            answer.len() < 64,
            "The answer to CONNECT is not a line: {:?}",
            String::from_utf8_lossy(&answer)
        );
    }
    ensure!(
        answer.starts_with(b"OK "),
        "The answer to CONNECT: {:?}",
        String::from_utf8_lossy(&answer)
    );
    Ok(stream)
}

/// Connects through the host's kernel (vhost).
fn connect_vhost(cid: u32, port: u32, silence_limit: Duration) -> Result<UnixStream> {
    // Only reads, writes, shutdowns and time-outs are used here. For these calls, UnixStream does
    // not depend on the address family.
    let stream = UnixStream::from(vsock::socket(None).context("Cannot create a vsock socket")?);
    stream.set_read_timeout(Some(scaled_limit(silence_limit)))?;
    vsock::connect(&stream, cid, port)
        .with_context(|| format!("Cannot connect to port {port} of CID {cid}"))?;
    Ok(stream)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_stored_data_in_the_guest_is_reported_as_such() {
        let ended = |code| Output { stdout: "out".to_owned(), stderr: "err".to_owned(), code };
        assert_eq!(ended(0).success("true").unwrap(), "out");
        for (code, expected) in [(1, 1), (137, 1), (CorruptData::CODE, CorruptData::CODE)] {
            let error = ended(code).success("check").context("Round 3").unwrap_err();
            assert_eq!(CorruptData::code_of(&error), expected);
            assert!(format!("{error:#}").ends_with("outerr"), "{error:#}");
        }
    }
}
