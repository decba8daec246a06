//! vsock protocol between the test harness and `guest-shell`.
//!
//! The client sends one [`Request`]: the length of a shell script, in little-endian order, and the
//! script. The guest returns frames until the script has ended: its output as it is written, and
//! finally its exit code. If the client closes the connection earlier, the script and its processes
//! are killed.

use std::io::{self, Read, Write};

/// vsock port of `guest-shell`. It is not near the agent's port.
pub const GUEST_SHELL_PORT: u32 = 2222;

/// Maximum length of a script. Tests send a few lines rather than archives.
pub const MAX_SCRIPT_BYTES: u32 = 1 << 20;

/// Maximum payload of a frame.
pub const MAX_FRAME_BYTES: u32 = 64 << 10;

const FRAME_STDOUT: u8 = b'o';
const FRAME_STDERR: u8 = b'e';
const FRAME_EXIT: u8 = b'x';

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Frame {
    Stdout(Vec<u8>),
    Stderr(Vec<u8>),
    /// Exit code of the script, or 128 plus the number of the signal that killed it.
    Exit(i32),
}

impl Frame {
    /// Writes the frame's kind, the length of the payload in 4 little-endian bytes, and the
    /// payload.
    pub fn write_to(&self, writer: &mut impl Write) -> io::Result<()> {
        let code;
        let (kind, payload): (u8, &[u8]) = match self {
            Self::Stdout(bytes) => (FRAME_STDOUT, bytes),
            Self::Stderr(bytes) => (FRAME_STDERR, bytes),
            Self::Exit(status) => {
                code = status.to_le_bytes();
                (FRAME_EXIT, &code)
            }
        };
        let len = u32::try_from(payload.len()).map_err(|_| invalid("frame too long"))?;
        let mut message = Vec::with_capacity(5 + payload.len());
        message.push(kind);
        message.extend_from_slice(&len.to_le_bytes());
        message.extend_from_slice(payload);
        writer.write_all(&message)
    }

    pub fn read_from(reader: &mut impl Read) -> io::Result<Self> {
        let mut header = [0u8; 5];
        reader.read_exact(&mut header)?;
        let len = u32::from_le_bytes([header[1], header[2], header[3], header[4]]);
        if len > MAX_FRAME_BYTES {
            return Err(invalid("frame longer than the protocol allows"));
        }
        let mut payload = vec![0u8; len as usize];
        reader.read_exact(&mut payload)?;
        match header[0] {
            FRAME_STDOUT => Ok(Self::Stdout(payload)),
            FRAME_STDERR => Ok(Self::Stderr(payload)),
            FRAME_EXIT => {
                let code: [u8; 4] =
                    payload.try_into().map_err(|_| invalid("exit frame is not 4 bytes"))?;
                Ok(Self::Exit(i32::from_le_bytes(code)))
            }
            _ => Err(invalid("unknown kind of frame")),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request(pub String);

impl Request {
    pub fn write_to(&self, writer: &mut impl Write) -> io::Result<()> {
        let len = u32::try_from(self.0.len()).ok().filter(|len| *len <= MAX_SCRIPT_BYTES);
        let len = len.ok_or_else(|| invalid("script longer than the protocol allows"))?;
        let mut message = Vec::with_capacity(4 + self.0.len());
        message.extend_from_slice(&len.to_le_bytes());
        message.extend_from_slice(self.0.as_bytes());
        writer.write_all(&message)
    }

    pub fn read_from(reader: &mut impl Read) -> io::Result<Self> {
        let mut len = [0u8; 4];
        reader.read_exact(&mut len)?;
        let len = u32::from_le_bytes(len);
        if len > MAX_SCRIPT_BYTES {
            return Err(invalid("script longer than the protocol allows"));
        }
        let mut script = vec![0u8; len as usize];
        reader.read_exact(&mut script)?;
        String::from_utf8(script).map(Self).map_err(|_| invalid("script is not UTF-8"))
    }
}

fn invalid(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_survive_encoding() {
        for frame in [Frame::Stdout(b"out".to_vec()), Frame::Stderr(Vec::new()), Frame::Exit(-7)] {
            let mut wire = Vec::new();
            frame.write_to(&mut wire).unwrap();
            assert_eq!(Frame::read_from(&mut wire.as_slice()).unwrap(), frame);
        }
    }

    #[test]
    fn request_survives_encoding() {
        let request = Request("echo ü; exit 3".to_owned());
        let mut wire = Vec::new();
        request.write_to(&mut wire).unwrap();
        assert_eq!(Request::read_from(&mut wire.as_slice()).unwrap(), request);
    }

    #[test]
    fn lengths_beyond_the_bounds_are_refused_before_anything_is_allocated() {
        let frame = [b'o', 0xff, 0xff, 0xff, 0xff];
        assert_eq!(
            Frame::read_from(&mut frame.as_slice()).unwrap_err().kind(),
            io::ErrorKind::InvalidData
        );
        let request = [0xff; 4];
        assert_eq!(
            Request::read_from(&mut request.as_slice()).unwrap_err().kind(),
            io::ErrorKind::InvalidData
        );
    }

    #[test]
    fn an_unknown_frame_is_an_error() {
        let frame = [b'?', 0, 0, 0, 0];
        assert_eq!(
            Frame::read_from(&mut frame.as_slice()).unwrap_err().kind(),
            io::ErrorKind::InvalidData
        );
    }
}
