//! Errors of API calls in terms of this program. The VMM names its calls, and a user types verbs.

use std::io::ErrorKind;

use foreshore::api::ClientError;

use super::API_SOCKET;

/// Formats an error with its causes as one line. `is_verb` returns true for the verbs of the
/// program.
pub(crate) fn describe(error: &anyhow::Error, is_verb: impl Fn(&str) -> bool) -> String {
    let text = format!("{error:#}").replace('\n', " ");
    match error.chain().find_map(|error| error.downcast_ref()) {
        Some(ClientError::Refused { .. }) => with_verbs(&text, is_verb),
        Some(ClientError::Connect { source, .. }) => match source.kind() {
            ErrorKind::NotFound | ErrorKind::ConnectionRefused => format!(
                "{text}; start `foreshore --api-socket PATH`, or name the socket of a running VMM by --api-socket or {API_SOCKET}"
            ),
            ErrorKind::PermissionDenied => {
                format!("{text}; run foreshore-remote as the user of the VMM")
            }
            _ => text,
        },
        _ => text,
    }
}

/// Replaces names of calls by the verbs that make them.
fn with_verbs(text: &str, is_verb: impl Fn(&str) -> bool) -> String {
    let is_end = |c: char| !(c.is_ascii_alphanumeric() || c == '.' || c == '-');
    let pieces = text.split_inclusive(is_end).map(|piece| {
        let call = piece.trim_end_matches(is_end);
        match verb_of(call).filter(|verb| is_verb(verb)) {
            Some(verb) => format!("`{verb}`{}", &piece[call.len()..]),
            None => piece.to_owned(),
        }
    });
    pieces.collect()
}

fn verb_of(call: &str) -> Option<&str> {
    match call {
        "vmm.shutdown" => Some("shutdown-vmm"),
        "pool.info" => Some("pool"),
        _ => call.strip_prefix("vm.").or_else(|| call.strip_prefix("vmm.")),
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use anyhow::Context;

    use super::*;

    #[test]
    fn refusal_names_verbs_instead_of_calls() {
        let is_verb = |verb: &str| ["create", "boot", "shutdown-vmm", "pool"].contains(&verb);
        for (text, expected) in [
            ("the VM is not created; vm.create creates it", "`create` creates it"),
            ("vm.boot, vmm.shutdown or pool.info", "`boot`, `shutdown-vmm` or `pool`"),
            ("no such file: /run/vm.boot.img", "no such file: /run/vm.boot.img"),
            ("vm.unknown", "vm.unknown"),
        ] {
            let text = with_verbs(text, is_verb);
            assert!(text.ends_with(expected), "{text}");
        }
    }

    #[test]
    fn unreachable_socket_has_a_remedy() {
        let message = |kind: ErrorKind| {
            let source = io::Error::from(kind);
            let error: Result<(), _> =
                Err(ClientError::Connect { path: "/run/vm.sock".into(), source });
            describe(&error.context("no VMM has answered").unwrap_err(), |_| true)
        };
        for kind in [ErrorKind::NotFound, ErrorKind::ConnectionRefused] {
            let text = message(kind);
            assert!(text.contains("\"/run/vm.sock\": ") && text.contains(API_SOCKET), "{text}");
        }
        let text = message(ErrorKind::PermissionDenied);
        assert!(text.ends_with("; run foreshore-remote as the user of the VMM"), "{text}");
        assert!(!message(ErrorKind::NotADirectory).contains(';'));
    }
}
