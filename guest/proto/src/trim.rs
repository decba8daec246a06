//! Messages of the agent's command `trim`, which names the free space of a BTT disk to the VMM. The
//! disk's driver cannot name it, because the interfaces for mapped volumes have no discards.
//!
//! The command connects to [`TRIM_PORT`] and sends [`TrimMessage::Free`] until it has named all
//! free bytes, then [`TrimMessage::End`]. The VMM sends [`TrimAnswer::Confirm`] before each
//! release, then another [`TrimAnswer`], and closes the connection.

use serde::{Deserialize, Serialize};

use crate::wire::open_envelope;
use crate::{PROTOCOL_VERSION, Refusal};

/// Vsock port on which the VMM listens for the command `trim`.
pub const TRIM_PORT: u32 = 9747;

/// Maximum number of ranges in a message, so that its line is shorter than
/// [`MAX_LINE_BYTES`](crate::MAX_LINE_BYTES).
pub const MAX_RANGES_PER_LINE: usize = 1000;

/// Maximum number of ranges that a command may name. The VMM stores 16 bytes for each.
pub const MAX_TRIM_RANGES: usize = 1 << 20;

/// Message from the command. Unverified.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum TrimMessage {
    /// Free parts of the disk.
    Free {
        /// [`PROTOCOL_VERSION`] of the sender.
        version: u32,
        /// UUID of the BTT, from the disk's attribute `uuid`.
        btt_uuid: String,
        /// Offset and length of each part in bytes.
        ranges: Vec<[u64; 2]>,
    },
    /// The parts named before are all free parts, and remain free until the answer.
    End {
        /// [`PROTOCOL_VERSION`] of the sender.
        version: u32,
    },
    /// Reply to [`TrimAnswer::Confirm`]: the command still holds the named parts.
    Held {
        /// [`PROTOCOL_VERSION`] of the sender.
        version: u32,
    },
}

/// Answer of the VMM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum TrimAnswer {
    /// Request for [`TrimMessage::Held`]. The guest has no access to the space that the VMM is
    /// about to release, so a command that replies has held the space until then.
    Confirm {
        /// [`PROTOCOL_VERSION`] of the sender.
        version: u32,
    },
    /// The pool has the space.
    Trimmed {
        /// [`PROTOCOL_VERSION`] of the sender.
        version: u32,
        /// Space that the volume gave to its pool.
        released_bytes: u64,
    },
    /// The volume has kept its space.
    Failed {
        /// [`PROTOCOL_VERSION`] of the sender.
        version: u32,
        /// Reason for the user.
        reason: String,
    },
}

impl TrimMessage {
    /// Returns the messages that name `ranges`.
    pub fn all(btt_uuid: &str, ranges: &[[u64; 2]]) -> impl Iterator<Item = Self> {
        let free = ranges.chunks(MAX_RANGES_PER_LINE).map(|ranges| Self::Free {
            version: PROTOCOL_VERSION,
            btt_uuid: btt_uuid.to_owned(),
            ranges: ranges.to_vec(),
        });
        free.chain([Self::End { version: PROTOCOL_VERSION }])
    }
}

/// Decodes a line of the command. Checks its shape and version, but not its values.
pub fn decode_trim_message(line: &[u8]) -> Result<TrimMessage, Refusal> {
    let (_, text) = open_envelope(line, &["free", "end", "held"])?;
    serde_json::from_str(text).map_err(Refusal::from_json)
}

/// Decodes the answer of the VMM.
pub fn decode_trim_answer(line: &[u8]) -> Result<TrimAnswer, Refusal> {
    let (_, text) = open_envelope(line, &["confirm", "trimmed", "failed"])?;
    serde_json::from_str(text).map_err(Refusal::from_json)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{MAX_LINE_BYTES, encode_line};

    const UUID: &str = "0a0b0c0d-1122-3344-5566-77889900aabb";

    #[test]
    fn all_ranges_fit_into_the_lines() {
        let ranges = vec![[u64::MAX; 2]; 2 * MAX_RANGES_PER_LINE + 1];
        let (mut line, mut named) = (Vec::new(), Vec::new());
        let messages: Vec<_> = TrimMessage::all(UUID, &ranges).collect();
        assert_eq!(messages.len(), 4);
        for message in messages {
            encode_line(&message, &mut line);
            assert!(line.len() <= MAX_LINE_BYTES, "{}", line.len());
            let decoded = decode_trim_message(&line).unwrap();
            assert_eq!(decoded, message);
            if let TrimMessage::Free { ranges, .. } = decoded {
                named.extend(ranges);
            }
        }
        assert_eq!(named, ranges);
    }

    #[test]
    fn answers_are_decoded_and_other_messages_refused() {
        let mut line = Vec::new();
        for answer in [
            TrimAnswer::Confirm { version: 1 },
            TrimAnswer::Trimmed { version: 1, released_bytes: 2 << 20 },
            TrimAnswer::Failed { version: 1, reason: "no such disk".to_owned() },
        ] {
            encode_line(&answer, &mut line);
            assert_eq!(decode_trim_answer(&line), Ok(answer));
            assert_eq!(decode_trim_message(&line).unwrap_err().label(), "unknown_type");
        }
        for (line, label) in [
            (r#"{"type":"end","version":2}"#, "wrong_version"),
            (r#"{"type":"free","version":1,"ranges":[[1,2]]}"#, "wrong_shape"),
            (r#"{"type":"free","version":1,"btt_uuid":"","ranges":[[1]]}"#, "wrong_shape"),
            (r#"{"type":"free","version":1,"btt_uuid":"","ranges":[[1,-2]]}"#, "wrong_shape"),
        ] {
            assert_eq!(decode_trim_message(line.as_bytes()).unwrap_err().label(), label, "{line}");
        }
    }
}
